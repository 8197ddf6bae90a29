"""JSON read as it is generated: accepted is what Python's json accepts, and every beginning of it."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from arctool.serve.output.json_text import MAX_DEPTH, Malformed, container, object_text, value

VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner, max_size=3),
    max_leaves=8,
)
OBJECTS = st.dictionaries(st.text(max_size=4), VALUES, max_size=3)
STYLES: list[dict[str, Any]] = [{}, {"ensure_ascii": False}, {"indent": 1}, {"separators": (",", ":")}]
PIECES = [*'{}[]":,\\-.e \n\té\x00', "\\u", "00e9", "a", "true", "nul", "null", "0", "12", "E+"]


def accepted(text: str) -> Any:
    """What Python makes of `text`; None unless it is an object. Control characters in strings are allowed, names for no number are not."""

    def refuse(constant: str) -> None:
        raise ValueError(constant)

    try:
        found = json.loads(text, strict=False, parse_constant=refuse)
    except ValueError:
        return None
    return found if isinstance(found, dict) else None


def read(text: str) -> str | None:
    try:
        return object_text(text)
    except Malformed:
        return None


@settings(max_examples=200)
@given(OBJECTS, st.sampled_from(STYLES), st.sampled_from(["", " ", "\n\t"]))
def test_every_object_is_read_as_it_stands(found: dict[str, Any], style: dict[str, Any], around: str) -> None:
    text = json.dumps(found, **style)
    assert read(around + text + around) == text


@settings(max_examples=400)
@given(OBJECTS, st.integers(0, 200), st.sampled_from(PIECES), st.booleans())
def test_a_spoilt_object_is_accepted_exactly_where_python_accepts_it(found: dict[str, Any], at: int, piece: str, cut: bool) -> None:
    text = json.dumps(found)
    at %= len(text) + 1
    spoilt = text[:at] + piece + text[at + cut :]
    wanted = accepted(spoilt)
    got = read(spoilt)
    assert (got is None) == (wanted is None)
    if got is not None:
        assert json.loads(got) == wanted


@settings(max_examples=400)
@given(st.lists(st.sampled_from(PIECES), max_size=12).map("".join))
@example("-")
@example("01")
@example("1.")
@example("NaN")
def test_any_text_as_a_value_is_accepted_exactly_where_python_accepts_it(text: str) -> None:
    whole = '{"":' + text + "}"
    assert (read(whole) is None) == (accepted(whole) is None)


@settings(max_examples=200)
@given(OBJECTS, st.sampled_from(STYLES))
def test_an_object_ends_with_its_brace_and_every_beginning_is_taken_at_once(found: dict[str, Any], style: dict[str, Any]) -> None:
    text = json.dumps(found, **style)
    taken: list[str] = []
    steps = container("{", taken.append)
    next(steps)
    for at, c in enumerate(text[1:-1], 1):
        assert "".join(taken) == text[:at]
        steps.send(c)
    with pytest.raises(StopIteration):
        steps.send(text[-1])
    assert "".join(taken) == text


def test_a_control_character_in_a_string_becomes_its_escape() -> None:
    assert read('{"a": "x\n\ty\x01"}') == '{"a": "x\\n\\ty\\u0001"}'
    assert read('{"a":\n1}') == '{"a":\n1}'


def test_what_lies_deeper_than_the_bound_is_refused() -> None:
    def nested(depth: int) -> str:
        return '{"":' + "[" * (depth - 1) + "]" * (depth - 1) + "}"

    assert read(nested(MAX_DEPTH)) == nested(MAX_DEPTH)
    assert read(nested(MAX_DEPTH + 1)) is None
    assert read('{"":' + "[" * 100_000) is None


def test_a_value_ends_before_the_character_that_is_not_its_own() -> None:
    for text, behind in (("12.5e3", ","), ("true", "}"), ('"a"', " "), ("[1]", "x"), ("-0", "]")):
        taken: list[str] = []
        steps = value(text[0], taken.append)
        next(steps)
        for c in text[1:]:
            steps.send(c)
        with pytest.raises(StopIteration) as ended:
            steps.send(behind)
        assert ("".join(taken), ended.value.value) == (text, behind)
