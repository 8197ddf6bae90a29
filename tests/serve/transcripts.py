"""Texts with calls as each family's models write them, by hand and not by the package's own forms; whole, and spoilt at random."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from random import Random

from arctool.serve.output.families import HERMES, LLAMA3, MISTRAL, MISTRAL_MARKED, ToolFamily

NAMES = ("f", "get_weather", "a.b-c")
FAMILIES = (HERMES, LLAMA3, MISTRAL, MISTRAL_MARKED)

Call = tuple[str, str]
"""A name, and arguments as JSON text."""


def hermes(calls: Sequence[Call]) -> list[str]:
    pieces: list[str] = []
    for name, arguments in calls:
        pieces += ["\n"] if pieces else []
        pieces += ["<tool_call>", "\n", '{"name": "', name, '", "arguments": ', arguments, "}", "\n", "</tool_call>"]
    return pieces


def llama3(calls: Sequence[Call]) -> list[str]:
    pieces: list[str] = []
    for name, arguments in calls:
        pieces += ["; "] if pieces else []
        pieces += ['{"name": "', name, '", "parameters": ', arguments, "}"]
    return pieces


def mistral(calls: Sequence[Call]) -> list[str]:
    pieces = ["[TOOL_CALLS]", " ", "["]
    for i, (name, arguments) in enumerate(calls):
        pieces += [", "] if i else []
        pieces += ['{"name": "', name, '", "arguments": ', arguments, ', "id": "abcdef123"', "}"]
    return [*pieces, "]"]


def marked(calls: Sequence[Call]) -> list[str]:
    return [piece for name, arguments in calls for piece in ("[TOOL_CALLS]", name, "[ARGS]", arguments)]


WRITTEN: dict[str, Callable[[Sequence[Call]], list[str]]] = {"hermes": hermes, "llama3": llama3, "mistral": mistral, "mistral-args": marked}

ARGUMENTS = (
    *("{}", "{ }", '{"a": 1}', '{"": -0.0}', '{"a": "\\u00e9\\n"}', '{"text": "{\\"name\\": \\"f\\"}"}', '{"a":{"b":["}",{"c":"]"}]}}'),
    *('{"city": "Zürich", "days": [1, 2.5e3, null]}', '{\n "q": "x\\"y",\n "r": true\n}'),
    '{"<tool_call>": "</tool_call> [TOOL_CALLS] <|python_tag|>"}',
)

# Of everything that a reader looks for, whole and broken.
PIECES = (
    *("<tool_call>", "</tool_call>", "[TOOL_CALLS]", "[ARGS]", "[CALL_ID]", "<|python_tag|>", "<think>", "</think>", "f", "get_weather"),
    *(
        '{"name": "',
        '", "arguments": ',
        '", "parameters": ',
        '{"name": "zz", "arguments": ',
        '{"name": "f", "parameters": {"a": [1, "}"]}}',
    ),
    *('{"a": "b"}', "{}", "{", "}", "[", "]", "<", "</", '"', "\\", ":", ";", ",", "; ", " ", "\n", "x", "1", "null"),
)
UNUSUAL = (
    *('{"arguments": ', ', "name": "f"}', '{"arguments": {"b": "\n"}, "name": "f"}', '{"name": "f", "arguments": "{\\"c\\": 1}"}'),
    *('{"name": "f"}', ', "id": 1', ', "parameters": {}', '"arguments": null', '{"type": "function", "name": "f", "parameters": {}}'),
)
"""Other ways to write a call, and their beginnings."""


def some_calls(random: Random) -> list[Call]:
    return [(random.choice(NAMES), random.choice(ARGUMENTS)) for _ in range(random.randint(1, 3))]


def spoilt(family: ToolFamily, random: Random, *, unusual: bool = True) -> str:
    """Reasoning, content and calls, or not all of them, of which some pieces and characters were taken out or replaced; cut anywhere."""
    pieces = random.choice([[], [], ["<think>", "\n", "why", "\n", "</think>", "\n\n"], ["\n", "<thi"]]).copy()
    for _ in range(random.randint(0, 3)):
        said = [random.choice(["", "", "", "Let me see.", "{", "<b>", "[1]", " "]), random.choice(["", "\n"])]
        pieces = [*pieces, *said, *WRITTEN[family.name](some_calls(random))]
    others = (*PIECES, *UNUSUAL) if unusual else PIECES
    for _ in range(random.choice([0, 0, 1, 1, 2, 4])):
        at = random.randint(0, len(pieces))
        pieces[at : at + random.randint(0, 1)] = random.choices(others, k=random.randint(0, 2))
    text = "".join(pieces)
    if random.random() < 0.4:
        at = random.randint(0, len(text))
        text = text[:at] + random.choice(["", "}", '"', ",", "x", "\n"]) + text[at + random.randint(0, 1) :]
    return text[: random.choice([len(text), len(text), random.randint(0, len(text))])]
