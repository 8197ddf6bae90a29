"""A conversation with the model, in no protocol's words: prompt and tools go in, content, reasoning and calls come out."""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from arctool.errors import RequestError, UsageError
from arctool.run.chat import template_variables
from arctool.run.llm import LLM
from arctool.run.sampling.constraint import Constraint
from arctool.run.sampling.sampler import TokenLogprobs
from arctool.run.sequence import FinishReason
from arctool.serve.answering import Answer
from arctool.serve.output.families import HERMES, ToolFamily, by_name, detect, shown_token_ids
from arctool.serve.output.forced import forced_calls, strict_calls
from arctool.serve.output.generic import generic_messages, takes_system
from arctool.serve.output.messages import template_messages
from arctool.serve.output.parser import OutputParser
from arctool.serve.output.parts import CallArguments, CallStart, Content, Part, Reasoning
from arctool.serve.output.reasoning import THINK, ReasoningTags, detect_reasoning, starts_inside
from arctool.serve.output.tools import Tool, ToolChoice, read_choice, read_tools

RESERVED = frozenset(
    (
        "messages",
        "tools",
        "add_generation_prompt",
        "bos_token",
        "eos_token",
        "strftime_now",
        "raise_exception",
        "range",
        "namespace",
        "dict",
    )
)
"""Variables of a template that a request has no say in."""


@dataclass(frozen=True)
class Conversation:
    """What is asked. `tools` as OpenAI writes them; `tool_choice`: none, auto, required, or the name of a tool, with `named` set.

    `parallel`: whether one answer may call several tools. `variables` go to the template.
    """

    messages: Sequence[Mapping[str, Any]]
    tools: Sequence[Mapping[str, Any]] = ()
    tool_choice: str = "auto"
    named: bool = False
    parallel: bool = True
    variables: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Prepared:
    """What becomes of a conversation before it is rendered. `tools`: those that the model may call."""

    messages: Sequence[Mapping[str, Any]]
    variables: Mapping[str, Any]
    tools: tuple[Tool, ...]
    choice: ToolChoice
    parallel: bool
    shown_token_ids: tuple[int, ...]


@dataclass(frozen=True)
class Saying:
    """News of one choice of an answer. `logprobs`: of the tokens that came with it.

    `finish`: stop, length, tool_calls, abort; None: it goes on.
    """

    choice: int
    parts: tuple[Part, ...]
    logprobs: tuple[tuple[int, TokenLogprobs], ...]
    finish: str | None


class Talk:
    """How one model is talked to: what its template reads, how it writes calls, whether it thinks aloud."""

    def __init__(self, llm: LLM, tool_parser: str = "auto", reasoning_parser: str = "auto") -> None:
        """Raises UsageError where `tool_parser` cannot work with the model's template."""
        self._tokenizer = llm.tokenizer
        source = "" if llm.template is None else llm.template.source
        self._variables = template_variables(source)
        self._own_tools = "tools" in self._variables
        self._system = llm.template is not None and takes_system(llm.template)
        self._family = self._choose_family(source, tool_parser)
        self._reasoning: ReasoningTags | None = {"auto": detect_reasoning(source), "think": THINK}.get(reasoning_parser)

    def _choose_family(self, source: str, tool_parser: str) -> ToolFamily | None:
        if tool_parser == "none":
            return None
        if tool_parser == "auto":
            return detect(source) if self._own_tools else HERMES
        family = by_name(tool_parser)
        if not self._own_tools and family is not HERMES:
            raise UsageError(f"--tool-parser: {tool_parser}: this model's template has no place for tools; use hermes or --chat-template")
        return family

    @property
    def tools_by(self) -> str:
        """How calls are read, for people."""
        if self._family is None:
            return "none that we can read"
        return self._family.name if self._own_tools else f"{self._family.name}, described in a system message"

    @property
    def thinks(self) -> bool:
        """Whether the model marks its thoughts, as far as we know."""
        return self._reasoning is not None

    @property
    def reasoning_by(self) -> str:
        """How reasoning is told from the answer, for people."""
        return "none" if self._reasoning is None else self._reasoning.open

    def reads(self, variable: str) -> bool:
        """Whether the template reads a variable that a request may set."""
        return variable in self._variables and variable not in RESERVED

    def prepare(self, conversation: Conversation) -> Prepared:
        """Check a conversation and put it as the template wants it. Raises RequestError, by field."""
        for name in conversation.variables:
            if not self.reads(name):
                raise RequestError(f"chat_template_kwargs.{name:.40}: this model's chat template has no such switch")
        tools, choice = _tools(conversation)
        if tools and self._family is None:
            raise RequestError("tools: how this model calls tools is not known; the server's --tool-parser and --chat-template can tell")
        if self._own_tools:
            messages = template_messages(conversation.messages, self._family)
        else:
            messages = generic_messages(conversation.messages, tools, system=self._system)
        given = {"tools": [tool.as_given() for tool in tools]} if tools and self._own_tools else {}
        family = self._family if tools else None
        shown = () if self._tokenizer is None else shown_token_ids(self._tokenizer, family, self._reasoning)
        return Prepared(messages, {**conversation.variables, **given}, tools, choice, conversation.parallel, shown)

    def forced(self, prepared: Prepared, prompt: str) -> Constraint | None:
        """What the text must be for the calls that the request demands, or whose form it is strict about; None: anything.

        Raises RequestError.
        """
        family, tokenizer = self._family, self._tokenizer
        if not prepared.tools or family is None or tokenizer is None:
            return None
        inside = self._reasoning is not None and starts_inside(prompt, self._reasoning)
        more: Any = {"reasoning": self._reasoning, "inside": inside}
        if prepared.choice.mode == "required":
            return forced_calls(family, prepared.tools, prepared.choice, prepared.parallel, tokenizer, **more)
        return strict_calls(family, prepared.tools, prepared.parallel, tokenizer, **more)

    def parser(self, prepared: Prepared, prompt: str, *, plain: bool) -> OutputParser:
        """A fresh parser for one sample. `plain`: the text is held to a format, so that nothing in it is reasoning."""
        reasoning = None if plain else self._reasoning
        return OutputParser(
            self._family,
            [tool.name for tool in prepared.tools],
            reasoning=reasoning,
            inside=reasoning is not None and starts_inside(prompt, reasoning),
            parallel=prepared.parallel,
        )


def _tools(conversation: Conversation) -> tuple[tuple[Tool, ...], ToolChoice]:
    """The tools that the model may call, and whether it must. Raises RequestError."""
    tools = read_tools(conversation.tools)
    wanted: Any = conversation.tool_choice
    if conversation.named:
        wanted = {"type": "function", "function": {"name": wanted}}
    elif wanted == "auto" and not tools:
        wanted = "none"
    choice = read_choice(wanted, tools)
    return (() if choice.mode == "none" else tools), choice


@dataclass
class Call:
    call_id: str
    name: str
    arguments: str = ""


@dataclass
class Spoken:
    """One choice as a whole."""

    content: str = ""
    reasoning: str = ""
    calls: list[Call] = field(default_factory=list)
    logprobs: list[tuple[int, TokenLogprobs]] = field(default_factory=list)
    finish: str = ""

    def take(self, part: Part) -> None:
        match part:
            case Content(text):
                self.content += text
            case Reasoning(text):
                self.reasoning += text
            case CallStart(_, call_id, name):
                self.calls.append(Call(call_id, name))
            case CallArguments(index, fragment):
                self.calls[index].arguments += fragment


class Dialogue:
    """An answer while it is spoken. Iterate over it, or `listen` to all of it: the same news either way.

    `reasoning_tokens`: how many have become reasoning so far, all choices together.
    """

    def __init__(self, answer: Answer, parsers: Sequence[OutputParser]) -> None:
        self.answer = answer
        self.choices = len(parsers)
        self.reasoning_tokens = 0
        self._parsers = parsers
        self._unspoken = [0] * len(parsers)  # tokens since the last part of each choice

    async def __aiter__(self) -> AsyncIterator[Saying]:
        async for news in self.answer:
            parser, update = self._parsers[news.choice], news.update
            parts = parser.push(update.text) if update.text else []
            finish = None
            if update.completion is not None:
                parts = [*parts, *parser.finish()]
                finish = _finish(update.completion.finish_reason, parser)
            elif parser.done and all(one.done for one in self._parsers):
                self.answer.stop()  # nothing that is still to come would be read
            self._count(news.choice, len(update.token_ids), parts)
            logprobs = tuple(zip(update.token_ids, update.logprobs, strict=False))
            if parts or logprobs or finish is not None:
                yield Saying(news.choice, tuple(parts), logprobs, finish)

    def _count(self, choice: int, tokens: int, parts: Sequence[Part]) -> None:
        """A token that says nothing yet belongs to what is said next."""
        self._unspoken[choice] += tokens
        if parts:
            self.reasoning_tokens += self._unspoken[choice] if isinstance(parts[0], Reasoning) else 0
            self._unspoken[choice] = 0

    async def listen(self) -> list[Spoken]:
        """The whole answer, choice by choice. Raises Problem for one that ended before it began."""
        spoken = [Spoken() for _ in range(self.choices)]
        async for saying in self:
            one = spoken[saying.choice]
            for part in saying.parts:
                one.take(part)
            one.logprobs += saying.logprobs
            one.finish = saying.finish or one.finish
        self.answer.check_begun()
        return spoken


def _finish(reason: FinishReason, parser: OutputParser) -> str:
    """A call that was cut off is no call: the reason stays what it was. One after which no other may come ends the answer like a stop."""
    return "tool_calls" if parser.done or (reason is FinishReason.STOP and parser.calls) else reason.value
