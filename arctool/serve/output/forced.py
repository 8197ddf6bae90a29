"""Grammars that hold a model to its tools: whatever it calls under one is offered, with arguments that its schema allows."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from arctool.errors import RequestError
from arctool.run.sampling.constraint import MAX_SOURCE_BYTES, Constraint
from arctool.run.sampling.grammar import JSON_OPTIONS
from arctool.run.tokenizer import Tokenizer
from arctool.serve.output.families import ToolFamily
from arctool.serve.output.form import ARGUMENTS, NAME
from arctool.serve.output.reasoning import ReasoningTags
from arctool.serve.output.tools import Tool, ToolChoice

MAX_CALLS = 16
"""In one answer: a model that is made to call does not always know when to stop."""

PLAIN = frozenset(("type", "properties", "required", "title", "description", "$schema", "$id", "$comment", "$defs", "definitions"))
"""Keywords of a schema that says all that its objects may have, even where it does not close them."""

ANY_OBJECT: Mapping[str, Any] = {"type": "object"}
NOTES = ("title", "description", "$comment")
DATA = ("const", "enum", "default", "examples")
BRACKETS = {c: f"\\u{ord(c):04x}" for c in "()[]{}"}


def forced_calls(
    family: ToolFamily,
    tools: Sequence[Tool],
    choice: ToolChoice,
    parallel: bool,
    tokenizer: Tokenizer,
    *,
    reasoning: ReasoningTags | None = None,
    inside: bool = False,
) -> Constraint:
    """The constraint of a `choice` of mode "required": one call to the tool that it names; or calls to any, several if `parallel`.

    The model may reason first where `reasoning` has its tags (`inside`: the prompt has opened them). An object whose schema lists
    `properties` and does not say whether it may have others has no others. Raises RequestError for tools too large for a grammar;
    what the engine says against the constraint is `explained` in the request's terms.
    """
    writer = _Writer(family, tokenizer)
    schemas = {i: tool.parameters for i, tool in enumerate(tools) if choice.name in (None, tool.name)}
    start = (writer.thought(reasoning, inside), writer.symbols(family.form.before), writer.calls(parallel and choice.name is None))
    return _constraint([f"start: {' '.join(start)}", *writer.rules(tools, schemas), *writer.thinking(reasoning)])


def strict_calls(
    family: ToolFamily,
    tools: Sequence[Tool],
    parallel: bool,
    tokenizer: Tokenizer,
    *,
    reasoning: ReasoningTags | None = None,
    inside: bool = False,
) -> Constraint | None:
    """As `forced_calls`, for mode "auto": the model says what it likes, but what it begins as a call becomes one, to an offered tool.

    Arguments of `strict` tools are what their schemas allow, those of others any object. None where no tool is strict: nothing needs a
    constraint then. Where calls have no mark (Llama), an answer without one does not begin with a brace.
    """
    if not any(tool.strict for tool in tools):
        return None
    writer = _Writer(family, tokenizer)
    schemas = {i: tool.parameters if tool.strict else ANY_OBJECT for i, tool in enumerate(tools)}
    start = f"start: {writer.thought(reasoning, inside)} {writer.answer(parallel)}"
    return _constraint([start, *writer.saying(), *writer.rules(tools, schemas), *writer.thinking(reasoning)])


def explained(error: RequestError, constraint: Constraint) -> RequestError:
    """`error`, with which the engine refused a request under `constraint` of `forced_calls`, by the name of the tool that is to blame."""
    message = str(error)
    if not message.startswith("grammar: "):
        return error
    lines = constraint.source.split("\n")
    found = re.match(r"grammar: at ([0-9]{1,6})\([0-9]{1,6}\): ", message)
    rule = re.match(r"a([0-9]{1,3}): ", lines[int(found[1]) - 1]) if found and 0 < int(found[1]) <= len(lines) else None
    if found is None or rule is None:
        return RequestError(f"tools: their schemas together: {_reason(error)}")
    return RequestError(f"tools[{rule[1]}].function.parameters: {message[found.end() :].removeprefix('failed to compile JSON schema: ')}")


def _reason(error: RequestError) -> str:
    return str(error).removeprefix("grammar: ")


def _constraint(lines: Sequence[str]) -> Constraint:
    source = "\n".join(lines)
    if (size := len(source.encode())) > MAX_SOURCE_BYTES:
        raise RequestError(
            f"tools: their schemas together: {size} bytes as a grammar, and at most {MAX_SOURCE_BYTES} are accepted; offer less"
        )
    try:
        return Constraint("grammar", source)
    except RequestError as error:
        raise RequestError(f"tools: their schemas together: {_reason(error)}") from error


@dataclass(frozen=True)
class _Writer:
    """Writes a family's form in the grammar's notation. The rule `call` is a call without its mark, if it begins with one."""

    family: ToolFamily
    tokenizer: Tokenizer

    @property
    def marked(self) -> bool:
        """Whether each call begins with a mark."""
        return self.family.form.call[0] in self.family.marks

    def token(self, text: str) -> str | None:
        """The symbol for a text that is a token of its own to the library: a text has it then, and not its letters."""
        token = self.tokenizer.added.get(text)
        if token is None or not (self.tokenizer.is_hidden(token) or (text.startswith("<") and text.endswith(">"))):
            return None
        return f"<[{token}]>"

    def symbols(self, pieces: Iterable[str], name: str = "", arguments: str = "") -> str:
        """Pieces of the form, with the rule `arguments` for these."""
        symbols: list[str] = []
        text = ""
        for piece in pieces:
            symbol = arguments if piece == ARGUMENTS else self.token(piece) if piece in self.family.marks else None
            if symbol is None:
                text += name if piece == NAME else piece
                continue
            symbols += [json.dumps(text)] if text else []
            symbols.append(symbol)
            text = ""
        return " ".join([*symbols, *([json.dumps(text)] if text else [])])

    def calls(self, several: bool) -> str:
        """One call or several, and what stands behind the last."""
        form = self.family.form
        call = f"{self.symbols(form.call[:1])} call" if self.marked else "call"
        more = f"({self.symbols(form.between)} {call}){{0,{MAX_CALLS - 1}}}" if several else ""
        return f"{call} {more} {self.symbols(form.after)}"

    def answer(self, parallel: bool) -> str:
        """What is said, with calls at any place; without `parallel` with one at its end."""
        form = self.family.form
        if not (self.marked or form.before):
            return f"(SAID | {self.calls(parallel)})?"
        mark = self.token(form.call[0] if self.marked else form.before[0])
        call = (
            f"{'opened' if mark is None else mark} {'call' if self.marked else f'{self.symbols(form.before[1:])} {self.calls(parallel)}'}"
        )
        if mark is not None:
            return f"SAID? ({call} SAID?)*" if parallel else f"SAID? ({call})?"
        return f"({call})* SAID?" if parallel else f"(SAID | {call})?"

    def saying(self) -> list[str]:
        """The rules `SAID`, text without a mark, and `opened`, the same up to its end with a mark, where that is no token."""
        mark = self.family.marks[0]
        without = rf"~/(?s:.*){re.escape(mark)}(?s:.*)/"
        if not (self.marked or self.family.form.before):
            return [rf"SAID: /[ \t\r\n]*[^{{ \t\r\n](?s:.*)/ & {without}"]
        return [rf"SAID: /(?s:.+)/ & {without}", *([] if self.token(mark) else [rf"opened[suffix={json.dumps(mark)}]: /(.|\n)*/"])]

    def rules(self, tools: Sequence[Tool], schemas: Mapping[int, Mapping[str, Any]]) -> list[str]:
        """The rule `call`, to the tools that have schemas, each schema on a line of its own: `explained` finds the tool by it."""
        pieces = self.family.form.call[self.marked :]
        lines = ["call: " + " | ".join(f"c{i}" for i in schemas)]
        for i, schema in schemas.items():
            lines += [f"c{i}: {self.symbols(pieces, tools[i].name, f'a{i}')}", f"a{i}: %json {_json(_closed(schema))}"]
        return lines

    def thought(self, reasoning: ReasoningTags | None, inside: bool) -> str:
        if reasoning is None:
            return ""
        return "thought" if inside else f"({self.token(reasoning.open) or json.dumps(reasoning.open)} thought)?"

    def thinking(self, reasoning: ReasoningTags | None) -> list[str]:
        """The rule `thought`: anything up to the closing tag, and the line feeds that models write behind it."""
        if reasoning is None:
            return []
        close = self.token(reasoning.close)
        if close is None:
            return [r'thought: thinking "\n"? "\n"?', rf"thinking[suffix={json.dumps(reasoning.close)}]: /(.|\n)*/"]
        return [rf'thought: /(.|\n)*/ {close} "\n"? "\n"?']


def _closed(parameters: Mapping[str, Any]) -> dict[str, Any]:
    """The schema as the grammar gets it."""
    schema: dict[str, Any] = {**_without_notes(parameters), "x-guidance": JSON_OPTIONS}
    properties, required = parameters.get("properties"), parameters.get("required", [])
    if (
        isinstance(properties, Mapping)
        and isinstance(required, list)
        and set(parameters) <= PLAIN
        and all(r in properties for r in required)
    ):
        schema["additionalProperties"] = False
    return schema


def _without_notes(schema: Any) -> Any:
    """A schema without what is only said to people. A text of such a name that is no note stands in data, which stays as it is."""
    if isinstance(schema, list):
        return [_without_notes(item) for item in schema]
    if not isinstance(schema, Mapping):
        return schema
    kept = ((key, item) for key, item in schema.items() if not (key in NOTES and isinstance(item, str)))
    return {key: item if key in DATA else _without_notes(item) for key, item in kept}


def _json(schema: Mapping[str, Any]) -> str:
    """One line of JSON without brackets in its strings, which would count as nesting of the grammar."""
    found: list[str] = []
    quoted = escaped = False
    for c in json.dumps(schema):
        found.append(BRACKETS[c] if quoted and c in BRACKETS else c)
        if escaped:
            escaped = False
        elif c == "\\":
            escaped = True
        elif c == '"':
            quoted = not quoted
    return "".join(found)
