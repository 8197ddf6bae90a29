"""What a model writes under these grammars is calls to offered tools, with arguments that their schemas allow; a bad schema is named."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any

import jsonschema_rs
import numpy as np
import pytest
import scripted as scripted_room
from scripted import scripted
from tiny_models import DirectorySource

from arctool.errors import RequestError
from arctool.run.llm import LLM
from arctool.run.requests import Completion
from arctool.run.sampling import grammar as grammar_room
from arctool.run.sampling.constraint import Constraint
from arctool.run.sampling.grammar import Grammars
from arctool.run.sampling.params import SamplingParams
from arctool.run.sampling.sampler import SampleRow, sample
from arctool.run.sampling.state import open_state
from arctool.run.tokenizer import TOKENIZER_FILE, Tokenizer
from arctool.serve.output.families import FAMILIES, HERMES, LLAMA3, ToolFamily, shown_token_ids
from arctool.serve.output.forced import MAX_CALLS, explained, forced_calls, strict_calls
from arctool.serve.output.parser import OutputParser
from arctool.serve.output.parts import CallArguments, CallStart, Content, Part, Reasoning, joined
from arctool.serve.output.reasoning import THINK, ReasoningTags
from arctool.serve.output.tools import ToolChoice, read_tools

VOCAB = 512
END = 2
MARKS = {
    "<tool_call>": False,
    "</tool_call>": False,
    "[TOOL_CALLS]": True,
    "[ARGS]": False,
    "<|python_tag|>": True,
    "<think>": True,
    "</think>": False,
}
"""The marks that a tokenizer may know as tokens, and whether it hides them."""

REQUIRED = ToolChoice("required")


def function(name: str, **fields: Any) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name, **fields}}


WEATHER: dict[str, Any] = {
    "$schema": "http://json-schema.org/draft-07/schema#",
    "type": "object",
    "properties": {
        "city": {"type": "string", "maxLength": 5, "description": "the place (say, {Paris}"},
        "days": {"type": "integer", "minimum": 1, "maximum": 14},
        "unit": {"enum": ["(C)", "[F]", "{K"]},
    },
    "required": ["city", "unit"],
}
POINT: dict[str, Any] = {
    "type": "object",
    "properties": {"at": {"$ref": "#/$defs/point"}, "description": {"type": "boolean", "title": "no note"}},
    "required": ["at", "description"],
    "additionalProperties": False,
    "$defs": {"point": {"type": "array", "items": {"type": "integer", "minimum": 0, "maximum": 9}, "minItems": 2, "maxItems": 2}},
}
TOOLS = read_tools([function("get_weather", parameters=WEATHER), function("now"), function("move.to-1", parameters=POINT)])


@cache
def tokenizer(marked: bool) -> Tokenizer:
    return Tokenizer({TOKENIZER_FILE: tokenizer_json(marked)}, VOCAB)


def tokenizer_json(marked: bool) -> bytes:
    """The tiny tokenizer; `marked`: its last tokens are the marks instead."""
    parsed: dict[str, Any] = json.loads((scripted_room.LLAMA / TOKENIZER_FILE).read_text())
    if marked:
        ids = range(VOCAB - len(MARKS), VOCAB)
        model = parsed["model"]
        kept = {token: i for token, i in model["vocab"].items() if i not in ids}
        model["vocab"] = kept | dict(zip(MARKS, ids, strict=True))
        model["merges"] = model["merges"][: -len(MARKS)]
        plain = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False}
        parsed["added_tokens"] += [{"id": i, "content": mark, "special": MARKS[mark], **plain} for mark, i in zip(MARKS, ids, strict=True)]
    return json.dumps(parsed).encode()


@cache
def grammars(marked: bool) -> Grammars:
    return Grammars(tokenizer(marked), [END])


def walk(marked: bool, constraint: Constraint, seed: int, shown: frozenset[int], favour: int = 0) -> tuple[str, bool]:
    """A model of random logits, which favours tokens from `favour` on, to the end of its text; the text, and whether it ended."""
    params = SamplingParams(constraint=constraint)
    state = open_state(params, (1,), grammars(marked))
    random, tokens = np.random.default_rng(seed), []
    while len(tokens) < 400:
        logits = (random.standard_normal((1, VOCAB)) * 3).astype(np.float32)
        logits[:, favour:] += 5 * bool(favour)
        [found] = sample(logits, [SampleRow(params, seed, len(tokens), len(tokens), (END,), state.history, state.grammar)])
        assert found.error is None
        assert found.token is not None
        state.push(found.token)
        if found.token != END:
            tokens.append(found.token)
        if found.token == END or state.finished:
            return tokenizer(marked).decode(tokens, shown), True
    return tokenizer(marked).decode(tokens, shown), False


def parsed(family: ToolFamily, text: str, **options: Any) -> tuple[list[Part], int]:
    parser = OutputParser(family, [tool.name for tool in TOOLS], **options)
    return joined([*parser.push(text), *parser.finish()]), parser.calls


def calls_of(parts: list[Part]) -> list[tuple[str, str]]:
    names = [part.name for part in parts if isinstance(part, CallStart)]
    return list(zip(names, [part.fragment for part in parts if isinstance(part, CallArguments)], strict=True))


def check_calls(calls: list[tuple[str, str]]) -> None:
    schemas: Mapping[str, Any] = {tool.name: tool.parameters for tool in TOOLS}
    for name, arguments in calls:
        jsonschema_rs.validate(dict(schemas[name]), json.loads(arguments))
        assert set(json.loads(arguments)) <= set(schemas[name]["properties"])


THOUGHTS = [(None, False), (THINK, False), (THINK, True)]


@pytest.mark.parametrize(("reasoning", "inside"), THOUGHTS, ids=["no thought", "thought", "thought begun"])
@pytest.mark.parametrize("marked", [False, True], ids=["letters", "tokens"])
@pytest.mark.parametrize("family", FAMILIES.values(), ids=lambda family: family.name)
def test_a_random_walk_is_calls_to_offered_tools_with_arguments_of_their_schemas(
    family: ToolFamily, marked: bool, reasoning: ReasoningTags | None, inside: bool
) -> None:
    shown = frozenset(shown_token_ids(tokenizer(marked), family, reasoning))
    constraint = forced_calls(family, TOOLS, REQUIRED, True, tokenizer(marked), reasoning=reasoning, inside=inside)
    counts: Counter[str] = Counter()
    for seed in range(12 if reasoning is None else 8):
        text, whole = walk(marked, constraint, seed, shown)
        if not whole:
            continue
        parts, calls = parsed(family, text, reasoning=reasoning, inside=inside)
        assert not any(isinstance(part, Content) for part in parts), text
        assert 1 <= calls == sum(isinstance(part, CallStart) for part in parts) <= MAX_CALLS
        check_calls(calls_of(parts))
        counts.update(name for name, _ in calls_of(parts))
        counts["whole"] += 1
        counts["several"] += calls > 1
        counts["thought"] += any(isinstance(part, Reasoning) for part in parts)
    if reasoning is None:
        assert counts["whole"] > 9
        assert counts["several"] > 2
        assert all(counts[tool.name] for tool in TOOLS)
    elif marked:  # a closing tag in letters does not come by chance
        assert counts["whole"]
        assert counts["thought"] or not inside


@pytest.mark.parametrize("family", FAMILIES.values(), ids=lambda family: family.name)
def test_a_named_tool_is_called_once_and_no_other(family: ToolFamily) -> None:
    constraint = forced_calls(family, TOOLS, ToolChoice("required", "now"), True, tokenizer(True))
    shown = frozenset(shown_token_ids(tokenizer(True), family, None))
    for seed in range(4):
        text, whole = walk(True, constraint, seed, shown)
        assert whole
        [(name, arguments)] = calls_of(parsed(family, text)[0])
        assert (name, json.loads(arguments)) == ("now", {}), "a tool without parameters has no arguments"


@pytest.mark.parametrize("family", FAMILIES.values(), ids=lambda family: family.name)
def test_without_parallel_calls_there_is_one(family: ToolFamily) -> None:
    constraint = forced_calls(family, TOOLS, REQUIRED, False, tokenizer(False))
    for seed in range(8):
        text, whole = walk(False, constraint, seed, frozenset())
        assert whole
        assert parsed(family, text)[1] == 1
        assert len(parsed(family, text, parallel=False)[0]) == 2


def test_an_object_that_says_nothing_of_further_properties_has_none_and_one_that_lists_none_is_open() -> None:
    def source(parameters: dict[str, Any]) -> dict[str, Any]:
        [tool] = read_tools([function("f", parameters=parameters)])
        text = forced_calls(HERMES, [tool], REQUIRED, False, tokenizer(False)).source
        schema: dict[str, Any] = json.loads(text.split("%json ", 1)[1])
        assert schema.pop("x-guidance")["lenient"] is False
        return schema

    listed = {"type": "object", "properties": {"a": {"type": "integer"}}}
    assert source(listed) == {**listed, "additionalProperties": False}
    for said in ({"additionalProperties": True}, {"additionalProperties": {"type": "null"}}, {"required": ["b"]}, {"anyOf": [{}]}):
        assert source({**listed, **said}) == {**listed, **said}
    assert source({"type": "object"}) == {"type": "object"}
    assert source({**listed, "x-guidance": {"lenient": True}}) == listed, "nobody but us has options for the library"


def test_notes_are_left_out_and_data_is_not() -> None:
    inner = {"type": "object", "properties": {"title": {"const": {"title": "kept", "x": "(["}}, "description": {"type": "string"}}}
    noted = {**inner, "title": "gone", "description": "gone (too", "properties": {**inner["properties"], "a": {"description": "gone"}}}
    [tool] = read_tools([function("f", description="gone", parameters=noted)])
    source = forced_calls(HERMES, [tool], REQUIRED, False, tokenizer(False)).source
    assert "gone" not in source
    schema = json.loads(source.split("%json ", 1)[1])
    assert schema["properties"] == {**inner["properties"], "a": {}}


BAD = [
    ({"type": "object", "properties": {"a": {"type": "bogus"}}}, "Invalid type: bogus"),
    ({"type": "object", "properties": {"a": {"type": "string", "format": "zzz"}}}, "Unknown format: zzz"),
    ({"type": "object", "properties": {"a": {"$ref": "#/nowhere"}}}, ""),
    ({"type": "object", "properties": {"a": {"$ref": "http://example.com"}}}, ""),
    ({"type": "object", "properties": {"a": {"type": "array", "uniqueItems": True}}}, ""),
    ({"type": "object", "properties": {"a": {"pattern": "(?=x)"}}}, ""),
]


@pytest.mark.parametrize(("parameters", "message"), BAD, ids=lambda value: str(value)[-30:])
def test_a_schema_that_cannot_be_compiled_is_refused_by_its_tool(parameters: dict[str, Any], message: str) -> None:
    tools = [*TOOLS, *read_tools([function("bad", parameters=parameters, strict=True)])]
    for constraint in (
        forced_calls(HERMES, tools, REQUIRED, True, tokenizer(True), reasoning=THINK),
        forced_calls(LLAMA3, tools, ToolChoice("required", "bad"), True, tokenizer(True)),
        strict_calls(HERMES, tools, True, tokenizer(False), reasoning=THINK, inside=True),
    ):
        assert constraint is not None
        with pytest.raises(RequestError, match=r"^grammar: ") as refused:
            grammars(True).open(constraint)
        error = explained(refused.value, constraint)
        assert str(error).startswith(f"tools[3].function.parameters: {message}")
        assert "grammar" not in str(error)


def test_a_schema_that_takes_too_much_is_refused_as_one_of_the_tools(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(grammar_room, "COMPILE_SECONDS", 1)
    tools = read_tools([function("f", parameters={"type": "object", "properties": {"a": {"type": "integer", "multipleOf": 999983}}})])
    constraint = forced_calls(HERMES, tools, REQUIRED, True, tokenizer(True))
    with pytest.raises(RequestError) as refused:
        grammars(True).open(constraint)
    assert str(explained(refused.value, constraint)).startswith("tools: their schemas together: takes more than 1 s")
    large = read_tools([function(f"f{i}", parameters={"type": "object", "properties": {"a": {"enum": ["x" * 1000]}}}) for i in range(100)])
    with pytest.raises(RequestError, match=r"^tools: their schemas together: [0-9]+ bytes as a grammar, and at most 65536"):
        forced_calls(HERMES, large, REQUIRED, True, tokenizer(True))
    other = RequestError("max_tokens: expected more")
    assert explained(other, constraint) is other


def test_many_tools_with_brackets_in_their_texts_are_served() -> None:
    parameters = {"type": "object", "properties": {"a([{": {"enum": ["((((((((((", "[[[[[[", "{{{{{{"], "description": "(" * 100}}}
    tools = read_tools([function(f"f{i}", description="[" * 100, parameters=parameters) for i in range(128)])
    grammars(True).open(forced_calls(HERMES, tools, REQUIRED, True, tokenizer(True)))


STRICT = read_tools([function("get_weather", parameters=WEATHER, strict=True), function("any", parameters=POINT)])


@pytest.mark.parametrize("parallel", [True, False])
@pytest.mark.parametrize("family", FAMILIES.values(), ids=lambda family: family.name)
def test_under_strict_tools_a_walk_says_what_it_likes_and_its_calls_are_whole(family: ToolFamily, parallel: bool) -> None:
    constraint = strict_calls(family, STRICT, parallel, tokenizer(True))
    assert constraint is not None
    shown = frozenset(shown_token_ids(tokenizer(True), family, None))
    said = called = 0
    for seed in range(15):
        text, whole = walk(True, constraint, seed, shown, favour=VOCAB - len(MARKS))
        parser = OutputParser(family, ["get_weather", "any"])
        parts = joined([*parser.push(text), *parser.finish()])
        assert parser.started - parser.calls in (0, 1)
        if whole:
            assert parser.started == parser.calls <= (MAX_CALLS if parallel else 1)
            for name, arguments in calls_of(parts):
                assert isinstance(json.loads(arguments), dict)
                if name == "get_weather":
                    jsonschema_rs.validate(WEATHER, json.loads(arguments))
        called += parser.calls > 0
        said += bool(parts) and isinstance(parts[0], Content)
    assert said > 3
    if family is not LLAMA3:  # whose calls without a mark begin by chance only seldom
        assert called > 2


def test_under_strict_tools_no_call_is_spelled_past_its_mark() -> None:
    constraint = strict_calls(HERMES, STRICT, True, tokenizer(True))
    assert constraint is not None
    state = grammars(True).open(constraint)
    close = tokenizer(True).token_id(">")
    assert close is not None

    def allowed() -> bool:
        mask = np.zeros(VOCAB // 32, np.uint32)
        assert state.fill(mask, may_end=True) is None
        return bool(mask[close // 32] >> (close % 32) & 1)

    for token in tokenizer(True).encode("Say <tool_call", add_special_tokens=False):
        assert allowed()
        state.push(token)
    assert not allowed()


def test_without_strict_tools_nothing_is_constrained() -> None:
    assert strict_calls(HERMES, TOOLS, True, tokenizer(True)) is None


def answered(monkeypatch: pytest.MonkeyPatch, marked: bool, reply: str, **params: Any) -> tuple[LLM, Completion]:
    """What a model that wants to say `reply` says."""

    class Source(DirectorySource):
        def __init__(self, directory: Path) -> None:
            super().__init__(directory)
            self.assets["tokenizer.json"] = tokenizer_json(marked)

    monkeypatch.setattr(scripted_room, "DirectorySource", Source)
    llm = scripted(lambda prompt: reply)
    return llm, llm.chat([{"role": "user", "content": "Go"}], SamplingParams(temperature=0, max_tokens=300, **params))


@pytest.mark.parametrize("marked", [False, True], ids=["letters", "tokens"])
@pytest.mark.parametrize("family", FAMILIES.values(), ids=lambda family: family.name)
def test_a_model_that_would_rather_talk_calls(monkeypatch: pytest.MonkeyPatch, family: ToolFamily, marked: bool) -> None:
    constraint = forced_calls(family, TOOLS, REQUIRED, False, tokenizer(marked))
    shown = shown_token_ids(tokenizer(marked), family, None)
    _, done = answered(monkeypatch, marked, "I'd rather talk about the weather in Paris.", constraint=constraint, shown_token_ids=shown)
    assert done.finish_reason.value == "stop"
    parts, calls = parsed(family, done.text)
    assert calls == 1
    check_calls(calls_of(parts))


@pytest.mark.parametrize("marked", [False, True], ids=["letters", "tokens"])
@pytest.mark.parametrize("family", FAMILIES.values(), ids=lambda family: family.name)
def test_what_a_model_begins_as_a_call_becomes_one_under_strict_tools(
    monkeypatch: pytest.MonkeyPatch, family: ToolFamily, marked: bool
) -> None:
    reply = family.form.text([("get_weather", '{"town": 3}')])
    before = "" if family is LLAMA3 else "Let me see. "
    constraint = strict_calls(family, STRICT, True, tokenizer(marked))
    shown = shown_token_ids(tokenizer(marked), family, None)
    _, free = answered(monkeypatch, marked, before + reply, shown_token_ids=shown)
    assert free.text == before + reply, "what it would say"
    _, done = answered(monkeypatch, marked, before + reply, constraint=constraint, shown_token_ids=shown)
    parts, calls = parsed(family, done.text)
    assert calls >= 1
    if before:
        assert parts[0] == Content(before.strip())
    name, arguments = calls_of(parts)[0]
    assert name == "get_weather"
    jsonschema_rs.validate(WEATHER, json.loads(arguments))
    _, talk = answered(monkeypatch, marked, "No <call> needed [here].", constraint=constraint, shown_token_ids=shown)
    assert talk.text == "No <call> needed [here]."
