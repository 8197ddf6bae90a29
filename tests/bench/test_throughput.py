"""`arctool bench PATH`: figures only from rounds that were what they claim; the command line's two ways to name a measurement."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest

from arctool.bake.source.checkpoint import open_checkpoint
from arctool.bench.throughput import Plan, Round, Row, measure, objection, row_of
from arctool.errors import UsageError
from arctool.run.llm import LLM, EngineOptions
from arctool.terminal.throughput import throughput

PLAN = Plan(batches=(1, 3), prompt_tokens=20, new_tokens=5, rounds=2)
GOOD = Round(2.0, 60, 0.5, 12, 4, (5, 5, 5), 0, 0, Counter({"cpu.attention": 8}))


def test_a_row_has_the_medians_of_its_rounds() -> None:
    slow = replace(GOOD, prefill_seconds=4.0, decode_seconds=1.0)
    quick = replace(GOOD, prefill_seconds=1.0, decode_seconds=0.25)
    assert row_of(3, [slow, GOOD, quick], PLAN) == Row(3, prefill=30.0, decode=24.0, step_ms=125.0)


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"prompt_tokens": 0}, "0 prompt tokens where 60 were asked for"),
        ({"decoded": 0}, "no time passed"),
        ({"lengths": (5, 1, 5)}, "2 of 3 sequences brought the 5 tokens"),
        ({"lengths": (5, 5)}, "2 of 3 sequences brought the 5 tokens"),
        ({"preempted": 1}, "1 preemptions and 0 cached tokens"),
        ({"prefix_hits": 16}, "0 preemptions and 16 cached tokens"),
        ({"decode_seconds": 0.0}, "no time passed"),
        ({"engaged": Counter({"cpu.linear.dense-f32": 8})}, "the attention kernel was never engaged"),
    ],
)
def test_a_round_that_is_no_measurement_spoils_its_row(changes: dict, reason: str) -> None:
    wrong = replace(GOOD, **changes)
    assert reason in str(objection(wrong, 3, PLAN))
    row = row_of(3, [GOOD, wrong, GOOD], PLAN)
    assert (row.prefill, row.decode, row.step_ms) == (None, None, None)
    assert reason in str(row.failure)


def test_an_error_or_no_round_at_all_is_a_failed_row() -> None:
    assert row_of(3, [], PLAN).failure == "no round was run"
    assert row_of(3, [GOOD], PLAN, "the model gave a logit that is not finite").failure == "the model gave a logit that is not finite"


def test_a_real_model_is_measured_and_what_ran_is_told(tiny_llama: Path) -> None:
    with open_checkpoint(str(tiny_llama)) as checkpoint:
        llm = LLM(checkpoint, EngineOptions(max_seqs=3))
    done = []
    found = measure(llm, "tiny", PLAN, lambda at, total: done.append((at, total)))
    assert done == [(i, 4) for i in range(1, 5)]
    assert not found.failed
    assert [row.batch for row in found.rows] == [1, 3]
    for row in found.rows:
        assert row.prefill is not None
        assert row.decode is not None
        assert row.prefill > 0
        assert row.decode > 0
    layers = llm.config.num_layers
    assert found.engaged["cpu.attention"] == layers * found.engaged["cpu.embedding.dense-f32"]
    assert found.to_json()["rows"][0]["batch"] == 1
    assert throughput(found) is not None


def test_a_second_measurement_of_one_engine_finds_none_of_the_firsts_prompts(tiny_llama: Path) -> None:
    with open_checkpoint(str(tiny_llama)) as checkpoint:
        llm = LLM(checkpoint, EngineOptions(max_seqs=3))
    for batches in ((1,), (3,), (1, 3)):
        found = measure(llm, "tiny", Plan(batches, prompt_tokens=64, new_tokens=3, rounds=2))
        assert [row.failure for row in found.rows] == [None] * len(batches)


@pytest.mark.parametrize(
    ("plan", "option"),
    [
        ({"batches": ()}, "--batches"),
        ({"batches": (0,)}, "--batches"),
        ({"prompt_tokens": 0}, "--prompt-tokens"),
        ({"new_tokens": 1}, "--new-tokens"),
        ({"rounds": 0}, "--rounds"),
    ],
)
def test_a_plan_that_measures_nothing_is_refused_by_option(plan: dict, option: str) -> None:
    with pytest.raises(UsageError, match=f"^{option}:"):
        Plan(**plan)


def test_a_plan_that_the_engine_cannot_hold_is_refused(tiny_llama: Path) -> None:
    with open_checkpoint(str(tiny_llama)) as checkpoint:
        llm = LLM(checkpoint, EngineOptions(max_seqs=2, max_model_len=64))
    with pytest.raises(UsageError, match="opened for 2"):
        measure(llm, "tiny", PLAN)
    with pytest.raises(UsageError, match="exceed the context of 64"):
        measure(llm, "tiny", Plan(batches=(1,), prompt_tokens=63, new_tokens=2))
