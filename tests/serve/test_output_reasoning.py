"""What stands in the first tags is reasoning, however the text was cut; what comes before and behind them is not."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from arctool.serve.output.reasoning import MAX_SPACE, THINK, ReasoningSplitter, detect_reasoning, starts_inside


def split(pieces: list[str], *, inside: bool = False) -> tuple[str, str]:
    splitter = ReasoningSplitter(THINK, inside=inside)
    found = [*map(splitter.push, pieces), splitter.finish()]
    begun = [bool(answer) for thought, answer in found if thought or answer]
    assert begun == sorted(begun), "reasoning after the answer has begun"
    return "".join(thought for thought, _ in found), "".join(answer for _, answer in found)


@pytest.mark.parametrize(
    ("text", "inside", "reasoning", "answer"),
    [
        ("<think>why</think>so", False, "why", "so"),
        ("\n <think>\nwhy\n\nnot\n</think>\n\n so\n", False, "why\n\nnot", " so\n"),
        ("<think>\n\n</think>\n\nso", False, "", "so"),
        ("<think>a < b</ think></think>c</think><think>d", False, "a < b</ think>", "c</think><think>d"),
        ("<think>why", False, "why", ""),
        ("<think>why\n\n</thin", False, "why\n\n</thin", ""),
        ("<think>", False, "", ""),
        ("\nwhy\n</think>\nso", True, "why", "so"),
        ("<think>why</think>so", True, "<think>why", "so"),
        ("why", True, "why", ""),
        ("so <think>why</think>", False, "", "so <think>why</think>"),
        ("\n<thinking>why</think>", False, "", "\n<thinking>why</think>"),
        ("\n<thi", False, "", "\n<thi"),
        (" \n", False, "", " \n"),
        ("", False, "", ""),
        (" " * MAX_SPACE + "<think>a</think>b", False, "a", "b"),
        (" " * (MAX_SPACE + 1) + "<think>a</think>b", False, "", " " * (MAX_SPACE + 1) + "<think>a</think>b"),
        ("<think>a" + "\n" * 70 + "</think>b", False, "a" + "\n" * (70 - MAX_SPACE), "b"),
    ],
)
def test_reasoning_is_what_the_first_tags_hold(text: str, inside: bool, reasoning: str, answer: str) -> None:
    assert split([text], inside=inside) == (reasoning, answer)
    assert split(list(text), inside=inside) == (reasoning, answer)


PIECES = st.sampled_from(["<think>", "</think>", "<th", "</thi", "nk>", "<", "\n", "\n" * 40, " ", " " * 40, "a", "</"])


@settings(max_examples=500)
@given(st.lists(PIECES, max_size=10).map("".join), st.lists(st.integers(0, 200), max_size=8), st.booleans())
def test_any_cutting_gives_the_same_and_loses_tags_and_space_only(text: str, places: list[int], inside: bool) -> None:
    whole = split([text], inside=inside)
    ends = sorted({place % (len(text) + 1) for place in places} | {0, len(text)})
    assert split([text[first:last] for first, last in itertools.pairwise(ends)], inside=inside) == whole
    reasoning, answer = whole
    opened, closed = ("" if inside else "<think>"), "</think>"
    rest = text if inside else text.lstrip()
    if not rest.startswith(opened) or (not inside and len(text) - len(rest) > MAX_SPACE):
        assert whole == ("", text)
        return
    thought, tag, behind = rest[len(opened) :].partition(closed)
    if tag:
        assert (thought.strip("\n"), behind.lstrip("\n")) == (reasoning.strip("\n"), answer)
        assert len(thought) - len(reasoning) <= len(thought) - len(thought.strip("\n"))
    else:
        assert whole == (thought.lstrip("\n"), "")


def test_reasoning_leaves_as_it_comes() -> None:
    splitter = ReasoningSplitter(THINK, inside=True)
    given_text = ["\n", "why", " not", "\n", "\nb", "</", "x", "\n</think>", "\n", "so"]
    assert [splitter.push(piece) for piece in given_text] == [
        ("", ""), ("why", ""), (" not", ""), ("", ""), ("\n\nb", ""), ("", ""), ("</x", ""), ("", ""), ("", ""), ("", "so"),
    ]  # fmt: skip


def test_a_template_that_knows_the_tags_has_reasoning_and_a_prompt_may_begin_it() -> None:
    assert detect_reasoning("{{ '<|im_start|>assistant\\n<think>\\n' }}") is THINK
    assert detect_reasoning("{% set content = content.split('</think>')[-1] %}") is THINK
    assert detect_reasoning("{{ 'think' }}") is None
    assert starts_inside("<|im_start|>assistant\n<think>\n", THINK)
    assert not starts_inside("<|im_start|>assistant\n<think>\n\n</think>\n\n", THINK)
    assert not starts_inside("<think>\n<|im_start|>assistant\n", THINK)
