"""The chat loop: lines in, answers streamed out, history kept; Ctrl-C stops an answer, Ctrl-D leaves."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import closing
from dataclasses import dataclass, field
from pathlib import Path

from rich.console import Console
from rich.markup import escape

from arctool.errors import RequestError, SourceError, UsageError
from arctool.run.engine import Completion, Update
from arctool.run.llm import LLM
from arctool.run.sampling.constraint import MAX_SOURCE_BYTES, Constraint
from arctool.run.sampling.params import SamplingParams

HELP = "/help this text · /clear forget the conversation · /system TEXT set the system prompt · /exit leave (or Ctrl-D)"


@dataclass
class Conversation:
    """Messages so far. `system` comes first when it is not empty."""

    system: str = ""
    turns: list[dict[str, str]] = field(default_factory=list)

    def messages(self) -> list[dict[str, str]]:
        head = [{"role": "system", "content": self.system}] if self.system else []
        return head + self.turns


def answer(llm: LLM, prompt: str, system: str, params: SamplingParams, raw: bool) -> Iterator[Update]:
    """Stream the answer to one prompt: through the chat template, or as plain continuation where `raw` or there is none."""
    if raw or llm.template is None:
        return llm.stream(prompt, params)
    return llm.stream_chat(Conversation(system, [{"role": "user", "content": prompt}]).messages(), params)


def constraint(json_schema: Path | None, regex: str | None) -> Constraint | None:
    """What the two options demand of the answer. Raises UsageError for both at once, SourceError for a file that cannot be read."""
    if json_schema is not None and regex is not None:
        raise UsageError("--json-schema and --regex: an answer can be held to one of them")
    if regex is not None:
        return Constraint("regex", regex)
    if json_schema is None:
        return None
    try:
        with json_schema.open("rb") as file:
            return Constraint("json_schema", file.read(MAX_SOURCE_BYTES + 1).decode("utf-8"))
    except (OSError, ValueError) as error:
        raise SourceError(f"{json_schema}: expected a JSON schema: {error}") from error


def piped_prompt() -> str:
    """All of standard input. Raises RequestError where that is no text."""
    try:
        return sys.stdin.read()
    except UnicodeDecodeError as error:
        raise RequestError(f"prompt: standard input is not {error.encoding} text: {error.reason} at byte {error.start}") from error


def show(updates: Iterator[Update], write: Callable[[str], None]) -> Completion | None:
    """Write text as it comes; the completion, or None where Ctrl-C ended it. Raises RequestError for one that failed."""
    with closing(updates) as stream:  # type: ignore[type-var]  # engine streams are generators; closing one cancels its request
        try:
            for update in stream:
                if update.text:
                    write(update.text)
                if update.completion is not None:
                    if update.completion.error:
                        raise RequestError(update.completion.error)
                    return update.completion
        except KeyboardInterrupt:
            return None
    return None


def speed(completion: Completion) -> str:
    """Tokens and their rate after the first one, whose wait is the prompt's."""
    count, first = len(completion.token_ids), completion.timing.first_token
    if first is None or count < 2 or completion.timing.total <= first:
        return f"{count} tokens"
    return f"{count} tokens, {(count - 1) / (completion.timing.total - first):.1f} tokens/s, first after {first:.2f} s"


def loop(llm: LLM, console: Console, params: SamplingParams, system: str, read: Callable[[str], str] = input) -> None:
    """Chat until the user leaves. Errors of one turn are shown and the turn is forgotten; the conversation goes on."""
    conversation = Conversation(system)
    console.print(f"[dim]{HELP}[/dim]")
    while True:
        try:
            line = read("> ").strip()
        except (EOFError, KeyboardInterrupt):
            console.print()
            return
        except UnicodeDecodeError as error:
            console.print(f"[red]the line is not {error.encoding} text[/red]")
            continue
        if line in ("/exit", "/quit"):
            return
        if line.startswith("/"):
            _command(line, conversation, console)
        elif line:
            _turn(llm, conversation, line, params, console)


def _command(line: str, conversation: Conversation, console: Console) -> None:
    name, _, rest = line.partition(" ")
    if name == "/clear":
        conversation.turns.clear()
        console.print("[dim]forgotten[/dim]")
    elif name == "/system":
        conversation.system = rest.strip()
        conversation.turns.clear()
        console.print("[dim]system prompt set, conversation forgotten[/dim]")
    else:
        console.print(f"[dim]{HELP}[/dim]")


def _turn(llm: LLM, conversation: Conversation, line: str, params: SamplingParams, console: Console) -> None:
    conversation.turns.append({"role": "user", "content": line})
    pieces: list[str] = []

    def write(text: str) -> None:
        pieces.append(text)
        console.print(text, end="", markup=False, highlight=False, soft_wrap=True)

    try:
        completion = show(llm.stream_chat(conversation.messages(), params), write)
    except RequestError as error:
        conversation.turns.pop()
        console.print(f"\n[red]{escape(str(error))}[/red]")
        return
    conversation.turns.append({"role": "assistant", "content": "".join(pieces)})
    console.print(f"\n[dim]{'stopped' if completion is None else speed(completion)}[/dim]")


def as_json(completion: Completion) -> dict[str, object]:
    """A completion for scripts."""
    return {
        "text": completion.text,
        "finish_reason": completion.finish_reason.value,
        "prompt_tokens": len(completion.prompt_ids),
        "completion_tokens": len(completion.token_ids),
        "token_ids": list(completion.token_ids),
        "seconds": {"first_token": completion.timing.first_token, "total": completion.timing.total},
    }
