"""What a client reads never depends on how the text was cut, nothing of it is lost, and nothing comes twice: for every family."""

from __future__ import annotations

import itertools
import json
import re
import time
from dataclasses import dataclass
from random import Random
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from transcripts import FAMILIES, NAMES, WRITTEN, Call, some_calls, spoilt

from arctool.serve.output import calls as calls_room
from arctool.serve.output.families import HERMES, LLAMA3, MISTRAL, ToolFamily
from arctool.serve.output.parser import OutputParser
from arctool.serve.output.parts import CallArguments, CallStart, Content, Part, Reasoning, joined
from arctool.serve.output.reasoning import THINK

FAMILY = st.sampled_from(FAMILIES)
RANDOM = st.integers(0, (1 << 64) - 1).map(Random)
OPTIONS = st.fixed_dictionaries(
    {"reasoning": st.sampled_from([None, THINK]), "inside": st.booleans(), "parallel": st.booleans()},
).filter(lambda options: options["reasoning"] is not None or not options["inside"])


@dataclass(frozen=True)
class Read:
    """What became of a text."""

    parts: list[Part]
    calls: int
    started: int
    done: bool

    @property
    def arguments(self) -> list[str]:
        return [part.fragment for part in self.parts if isinstance(part, CallArguments)]


def read(family: ToolFamily | None, pieces: list[str], **options: Any) -> Read:
    numbers = itertools.count()
    parser = OutputParser(family, NAMES, new_id=lambda: f"id{next(numbers)}", **options)
    parts = [part for piece in pieces for part in parser.push(piece)] + parser.finish()
    assert all(part.text for part in parts if isinstance(part, Content | Reasoning)), "a part without text"
    assert all(part.fragment for part in parts if isinstance(part, CallArguments)), "a fragment without text"
    assert parser.finish() == []
    return Read(joined(parts), parser.calls, parser.started, parser.done)


def cut(text: str, places: list[int]) -> list[str]:
    ends = sorted({place % (len(text) + 1) for place in places} | {0, len(text)})
    return [text[first:last] for first, last in itertools.pairwise(ends)] or [""]


def parts_of(calls: list[Call], first: int = 0) -> list[Part]:
    """What is read where a model makes these calls."""
    return [
        part
        for i, (name, arguments) in enumerate(calls, first)
        for part in (CallStart(i, f"id{i}", name), CallArguments(i, arguments))
    ]  # fmt: skip


@settings(max_examples=1000)
@given(FAMILY, RANDOM, st.lists(st.integers(0, 400), max_size=12), OPTIONS)
def test_any_cutting_of_any_text_gives_the_same(family: ToolFamily, random: Random, places: list[int], options: dict[str, Any]) -> None:
    text = spoilt(family, random)
    whole = read(family, [text], **options)
    assert read(family, cut(text, places), **options) == whole
    assert read(family, list(text), **options) == whole


def is_object(text: str) -> bool:
    try:
        return isinstance(json.loads(text), dict)
    except ValueError:
        return False


@settings(max_examples=1000)
@given(FAMILY, RANDOM, st.booleans())
def test_arguments_are_json_and_a_text_without_a_call_stands_as_it_is(family: ToolFamily, random: Random, parallel: bool) -> None:
    text = spoilt(family, random)
    found = read(family, [text], parallel=parallel)
    starts = [part for part in found.parts if isinstance(part, CallStart)]
    assert [start.index for start in starts] == list(range(found.started))
    assert [part.index for part in found.parts if isinstance(part, CallArguments)] == list(range(found.started))
    assert {start.name for start in starts} <= set(NAMES)
    assert sum(map(is_object, found.arguments)) == found.calls
    assert found.done == (not parallel and found.calls > 0)
    assert parallel or found.calls <= 1
    if not found.started:
        assert found.parts == ([Content(text)] if text else [])


# What a text may lose, beside a call only: marks, keys, names, punctuation and white space, and the beginning of one where it ends.
FRAME = re.compile(
    r'</?tool_call>|\[TOOL_CALLS\]|\[ARGS\]|\[CALL_ID\]\w*|<\|python_tag\|>|"id"\s*:\s*"[^"]*"?|"(?:name|arguments|parameters|id)"|null'
    r"|f|get_weather|a\.b-c|[][{}:,;\"\s]|</?[a-z_]*$|[a-z0-9]+$"
)


def fates(family: ToolFamily, text: str) -> str:
    """What became of each character of `text`: c (content), a (arguments) or - (dropped). What leaves must stand in the text right before
    what is held; arguments may be "{}" (+) where the call says nothing of any."""
    parser = OutputParser(family, NAMES)
    assert parser._reader is not None
    found = ["-"] * len(text)
    for at in range(len(text) + 1):
        parts = parser.push(text[at]) if at < len(text) else parser.finish()
        end = min(at + 1, len(text)) - len(parser._reader._held)
        for part in reversed(parts):
            if isinstance(part, Content):
                end -= len(part.text)
                assert text.startswith(part.text, end)
                assert set(found[end : end + len(part.text)]) == {"-"}, "a character came twice"
                found[end : end + len(part.text)] = "c" * len(part.text)
            elif isinstance(part, CallArguments):
                is_last = part.fragment in (text[end - 1], json.dumps(text[end - 1])[1:-1])
                assert is_last or part.fragment == "{}"
                found[end - 1] = "a" if is_last else "+"
    return "".join(found)


@pytest.mark.parametrize("family", FAMILIES, ids=lambda family: family.name)
def test_every_character_is_content_or_arguments_or_the_frame_of_a_call(family: ToolFamily) -> None:
    dropped = 0
    for seed in range(800):
        text = spoilt(family, Random(seed), unusual=False)
        found = fates(family, text)
        for gap in re.finditer(r"-+", found):
            first, last = gap.span()
            frame = text[first:last]
            assert "a" in found[max(first - 1, 0) : last + 1] or "+" in found, f"no call beside {frame!r} of {text!r}"
            assert not FRAME.sub("", frame), f"{frame!r} of {text!r}"
            dropped += 1
    assert dropped > 300


@pytest.mark.parametrize("family", FAMILIES, ids=lambda family: family.name)
def test_the_texts_above_hold_calls_whole_and_broken(family: ToolFamily) -> None:
    """Else they would prove nothing."""
    found = [read(family, [spoilt(family, Random(seed))]) for seed in range(1000)]
    assert sum(one.calls > 2 for one in found) > 10
    assert sum(one.calls > 0 and any(isinstance(part, Content) for part in one.parts) for one in found) > 10
    assert sum(one.started > one.calls for one in found) > 10
    assert sum(one.started > one.calls > 0 for one in found) > 5
    assert sum(one.started == 0 for one in found) > 10


SAID = st.text("ab é.,:)}\n", min_size=1, max_size=8).map(str.strip).filter(bool)


@settings(max_examples=200)
@given(FAMILY, SAID | st.just(""), RANDOM.map(some_calls), SAID | st.just(""), st.sampled_from([None, " \n hm <tool_call> {[TOOL_CALLS]"]))
def test_calls_are_read_as_they_were_written(family: ToolFamily, before: str, calls: list[Call], after: str, thought: str | None) -> None:
    """Text before, calls in a row, text behind, and calls again; white space beside a call is no content of its own."""
    if family is LLAMA3:
        before = ""  # there a call without a mark is the whole answer
    written = "".join(WRITTEN[family.name](calls))
    text = (f"{before}\n" if before else "") + written + (f"\n\n{after}" if after else "\n")
    wanted: list[Part] = [Content(before)] if before else []
    wanted += parts_of(calls)
    wanted += [Content(f"\n\n{after}" if before else after)] if after else []
    assert read(family, [text]) == Read(wanted, len(calls), len(calls), False)
    if family is not LLAMA3 and after:
        twice = read(family, [f"{text}\n{written}"])
        assert twice.parts == [*wanted, *parts_of(calls, len(calls))]
    if thought is not None:
        with_thought = read(family, [f"\n<think>\n{thought}\n</think>\n\n{text}"], reasoning=THINK)
        assert with_thought.parts == [Reasoning(thought), *wanted]
        assert read(family, [f"\n{thought}</think>{text}"], reasoning=THINK, inside=True).parts == with_thought.parts


@pytest.mark.parametrize("family", FAMILIES, ids=lambda family: family.name)
def test_a_text_cut_at_any_character_keeps_what_has_left_and_counts_whole_calls_only(family: ToolFamily) -> None:
    calls = [("f", '{"city": "Zürich", "days": [1, 2.5e3, null]}'), ("a.b-c", "{}"), ("get_weather", '{"q": "\\u00e9\\n}"}')]
    text = "".join(WRITTEN[family.name](calls))
    whole = parts_of(calls)
    broken = set()
    for end in range(len(text) + 1):
        found = read(family, [text[:end]])
        ends = [text.index(arguments) + len(arguments) for _, arguments in calls]
        assert found.calls == sum(end >= one for one in ends)
        assert found.started - found.calls in (0, 1)
        broken.add(found.started - found.calls)
        begun = [part for part in found.parts if not isinstance(part, Content)]
        assert begun[:-1] == whole[: max(len(begun) - 1, 0)]
        if found.started > found.calls:
            assert isinstance(begun[-1], CallArguments)
            assert calls[found.calls][1].startswith(begun[-1].fragment)
        said = [part for part in found.parts if isinstance(part, Content)]
        assert "".join(part.text for part in said) in text[:end], "the beginning of a call that never was one is content"
        assert not said or found.started == found.calls
    assert broken == {0, 1}


def test_a_name_leaves_before_its_arguments_end_and_arguments_leave_as_they_come() -> None:
    for family in FAMILIES:
        parser = OutputParser(family, NAMES)
        text = "".join(WRITTEN[family.name]([("f", '{"a": "b"}')]))
        first = text.index('{"a"')
        assert parser.push(text[:first]) == []
        start, opened = parser.push("{")
        assert isinstance(start, CallStart)
        assert (start.name, opened) == ("f", CallArguments(0, "{"))
        assert parser.push('"a": "b') == [CallArguments(0, '"a": "b')]
        assert parser.calls == 0
        assert parser.push('"}') == [CallArguments(0, '"}')]
        assert parser.calls == 1, "a call is whole with its arguments, whatever of its frame is still to come"


@pytest.mark.parametrize("family", FAMILIES, ids=lambda family: family.name)
def test_without_parallel_calls_the_answer_ends_with_the_first(family: ToolFamily) -> None:
    calls = [("f", '{"a": 1}'), ("get_weather", "{}")]
    text = "".join(WRITTEN[family.name](calls))
    assert read(family, [text, " and more"], parallel=False) == Read(parts_of(calls[:1]), 1, 1, True)
    broken = read(family, [text.replace('{"a": 1}', '{"a": ,}')], parallel=False)
    assert broken.done == (family in (HERMES, FAMILIES[3])), "a call that broke off is none"


def test_without_a_family_or_without_tools_everything_is_content() -> None:
    text = "".join(WRITTEN["hermes"]([("f", "{}")]))
    assert read(None, list(text)).parts == [Content(text)]
    parser = OutputParser(HERMES, ())
    assert joined([*parser.push(text), *parser.finish()]) == [Content(text)]
    assert (parser.calls, parser.started, parser.done) == (0, 0, False)


def test_reasoning_and_content_of_one_piece_both_leave() -> None:
    parser = OutputParser(HERMES, NAMES, reasoning=THINK, inside=True)
    assert parser.push("so</think>\n\nyes") == [Reasoning("so"), Content("yes")]


MANY = 80_000
OPENED = '<tool_call>{"name": "f", "arguments": {"a": '
HOSTILE = [
    *("<tool_call>" * 9000, '<tool_call>{"' * 9000, '<tool_call>{"name": "' + "f" * MANY, '<tool_call>{"arguments": ' + "[" * MANY),
    *('<tool_call>{"arguments": "' + "\\u0041" * 20_000, OPENED + "[" * MANY, OPENED + '"' + "\\\\" * MANY, OPENED + "1" * MANY),
    *(OPENED + "1}" + ', "id": ""' * 9000, "<tool_call>" + " " * MANY, " <" * MANY, "\n" * MANY, "; " * MANY, " " * MANY + "{"),
    *("[TOOL_CALLS]" + "f" * MANY, "[TOOL_CALLS]f[CALL_ID]" + "x" * MANY, "[TOOL_CALLS][" * 9000, "[TOOL_CALLS]f{}" * 9000),
    *('{"type": "' + "x" * MANY, '{"arguments": {"a": "' + "x" * MANY, '{"name": "f", "parameters": {}}' + "; " * MANY),
    *("<think>" + "\n" * MANY, "<think>" + "</thin" * 20_000),
]


@pytest.mark.parametrize("family", FAMILIES, ids=lambda family: family.name)
def test_hostile_texts_take_time_by_their_length_and_little_memory(family: ToolFamily) -> None:
    began = time.monotonic()
    for text in HOSTILE:
        parser = OutputParser(family, NAMES, reasoning=THINK)
        assert parser._reader is not None
        said = 0
        for at in range(0, len(text), 1000):
            said += sum(len(part.text) for part in parser.push(text[at : at + 1000]) if isinstance(part, Content))
            assert len(parser._reader._held) <= calls_room.MAX_HELD
        said += sum(len(part.text) for part in parser.finish() if isinstance(part, Content))
        if not parser.started and not text.startswith("<think>"):
            assert said == len(text)
    assert time.monotonic() - began < 60


def test_what_is_held_too_long_is_content_wherever_the_text_was_cut() -> None:
    text = '<tool_call>{"arguments": {"a": "' + "x" * calls_room.MAX_HELD + '"}, "name": "f"}</tool_call>'
    assert read(HERMES, [text]).parts == [Content(text)] == read(HERMES, [text[:70_000], text[70_000:]]).parts
    fits = text.replace("x" * 1000, "", 1)
    assert read(HERMES, [fits]).calls == 1
    spaces = "a" + "\n" * 200 + "[TOOL_CALLS]f{}"
    assert read(MISTRAL, [spaces]).parts == [Content("a" + "\n" * (200 - calls_room.MAX_SPACE)), *parts_of([("f", "{}")])]


@pytest.mark.parametrize(
    ("family", "text"),
    [
        (HERMES, "a < b<"),
        (HERMES, "<tool_call>\nf"),
        (HERMES, '<tool_call>\n{"name": "other"'),
        (HERMES, '<tool_call>\n{"function"'),
        (LLAMA3, '{"name": "Alice"'),
        (LLAMA3, '{"answer"'),
        (LLAMA3, "["),
        (MISTRAL, '[TOOL_CALLS] [{"name": "f", "arguments": ['),
        (MISTRAL, "[TOOL_CALLS]" + "f" * 65),
    ],
)
def test_what_can_be_no_call_any_more_leaves_at_once(family: ToolFamily, text: str) -> None:
    parser = OutputParser(family, NAMES)
    [content] = parser.push(text + "..")
    assert content == Content(text + "..")
