"""When things happened to a request, and what all requests add up to: counted by the engine, checked against what its updates say."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence as Ordered

import numpy as np
import pytest
from fake_runner import EOS, VOCAB, FakeRunner
from numpy.typing import NDArray

from arctool.run.engine import Completion, Engine, Update
from arctool.run.requests import Timing
from arctool.run.sampling.params import SamplingParams
from arctool.run.scheduler import Work
from arctool.run.sequence import FinishReason, Sequence
from arctool.run.telemetry import STEP_SIZES, StepStats, Totals


class Clock:
    """Stands still unless told to move."""

    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


class SlowRunner(FakeRunner):
    """Every step takes a second, before its logits are there. `spoil`: the sequences whose next logits are not numbers."""

    def __init__(self, clock: Clock, **sizes: int) -> None:
        super().__init__(**{"num_blocks": 64, "block_size": 4, "max_model_len": 64, "budget": 8, **sizes})
        self.clock = clock
        self.spoil: set[int] = set()

    def run(self, work: Ordered[tuple[Sequence, Work]], copies: Ordered[tuple[int, int]] = ()) -> NDArray[np.float32]:
        self.clock.now += 1.0
        logits = super().run(work, copies)
        for row, sequence in enumerate(s for s, item in work if item.emits):
            if sequence.id in self.spoil:
                logits[row, 3] = math.nan
        return logits


def make(clock: Clock, *, max_seqs: int = 8, **sizes: int) -> tuple[Engine, SlowRunner]:
    runner = SlowRunner(clock, **sizes)
    return Engine(runner, None, [EOS], max_seqs=max_seqs, max_step_tokens=runner.budget, clock=clock), runner  # type: ignore[arg-type]


def params(max_tokens: int, *, n: int = 1, ignore_eos: bool = True) -> SamplingParams:
    return SamplingParams(temperature=0.9, seed=1, max_tokens=max_tokens, n=n, ignore_eos=ignore_eos)


def drain(engine: Engine) -> list[Update]:
    updates = []
    while engine.has_work():
        updates += engine.step()
    return updates


def endings(updates: Ordered[Update]) -> list[Completion]:
    return [u.completion for u in updates if u.completion is not None]


def test_timing_counts_from_arrival() -> None:
    clock = Clock()
    engine, _ = make(clock)
    request = engine.check([5, 6, 7], params(3))
    clock.now += 0.25  # between the door and the queue
    engine.add(request)
    clock.now += 0.5  # in the queue
    updates = drain(engine)
    assert [u.time for u in updates] == [1001.75, 1002.75, 1003.75]
    assert endings(updates)[0].timing == Timing(first_token=1.75, total=3.75, scheduled=0.75, last_token=3.75, arrived=1000.0)


def test_an_update_says_when_its_token_was_chosen_not_when_it_is_read() -> None:
    clock = Clock()
    engine, _ = make(clock)
    stream = engine.stream([[5, 6, 7]], [params(2)])
    first = next(stream)
    clock.now += 100  # the reader is slow
    assert (first.time, next(stream).time) == (1001.0, 1102.0)


def test_a_request_that_waits_for_another_has_its_wait_in_its_timing() -> None:
    clock = Clock()
    engine, _ = make(clock, max_seqs=1)
    engine.add_request([5, 6, 7], params(4))
    engine.add_request([5, 6, 8], params(2))
    first, second = endings(drain(engine))
    assert (first.timing.scheduled, second.timing.scheduled) == (0.0, 4.0)
    assert (second.timing.first_token, second.timing.last_token) == (5.0, 6.0)


def test_a_long_prompt_is_scheduled_at_its_first_chunk() -> None:
    clock = Clock()
    engine, _ = make(clock)
    engine.add_request(list(range(2, 15)) + [5] * 9, params(1))  # 22 tokens, 8 a step
    [done] = endings(drain(engine))
    assert (done.timing.scheduled, done.timing.first_token) == (0.0, 3.0)


def test_preemption_does_not_start_a_request_anew() -> None:
    clock = Clock()
    engine, runner = make(clock, num_blocks=8)
    for i in range(2):
        engine.add_request([5, 6, 7, 8 + i], params(20))
    done = endings(drain(engine))
    assert engine.telemetry().total.preempted
    assert [one.timing.scheduled for one in done] == [0.0, 0.0]
    assert max(one.timing.total for one in done) == clock.now - 1000
    assert runner.steps


def test_samples_of_a_request_start_together() -> None:
    clock = Clock()
    engine, _ = make(clock)
    clock.now += 0.5
    engine.add_request([5, 6, 7], params(2, n=3))
    done = endings(drain(engine))
    assert len(done) == 3
    assert {one.timing.scheduled for one in done} == {0.0}
    assert {one.timing.first_token for one in done} == {1.0}


def test_a_request_that_never_ran_has_no_times_but_its_end() -> None:
    clock = Clock()
    engine, _ = make(clock)
    request = engine.add_request([5, 6, 7], params(2))
    clock.now += 3
    [update] = engine.cancel(request)
    assert update.completion is not None
    assert update.completion.timing == Timing(first_token=None, total=3.0, scheduled=None, last_token=None, arrived=1000.0)


def test_totals_are_what_the_updates_add_up_to() -> None:
    clock = Clock()
    engine, runner = make(clock, num_blocks=16)
    rng = np.random.default_rng(0)
    for i in range(12):
        prompt = [5, 6, 7, 8, *rng.integers(2, VOCAB, i).tolist()]
        engine.add_request(prompt, SamplingParams(temperature=1.5, seed=i, max_tokens=3 + i, n=1 + i % 3, ignore_eos=i % 2 == 0))
    updates = [*engine.step(), *engine.step(), *engine.step()]
    cancelled = [update.completion for update in engine.cancel(11) if update.completion is not None]
    updates += drain(engine)
    total = engine.telemetry().total
    assert total.preempted
    assert total.generated_tokens == sum(len(u.token_ids) for u in updates)
    reasons = Counter(done.finish_reason for done in [*endings(updates), *cancelled])
    assert set(reasons) == {FinishReason.STOP, FinishReason.LENGTH, FinishReason.ABORT}
    assert dict(total.finished) == dict(reasons)
    assert total.corrupted == 0
    assert sum(total.step_sizes) == total.steps == len(runner.steps)
    assert total.prefill_tokens + total.decode_tokens == runner.computed


@pytest.mark.parametrize("company", [0, 3], ids=["the pass over few", "the pass over many"])
def test_only_logits_that_are_no_numbers_count_as_corrupted(company: int) -> None:
    clock = Clock()
    engine, runner = make(clock)
    greedy = SamplingParams(temperature=0, max_tokens=4, ignore_eos=True)
    engine.add_request([5, 6], greedy)
    for _ in range(company):
        engine.add_request([5, 7], greedy)
    engine.step()
    before = engine.telemetry().total.generated_tokens
    runner.spoil = {0}
    [failed] = [done for done in endings(engine.step()) if done.finish_reason is FinishReason.ERROR]
    assert failed.error is not None
    assert "not finite" in failed.error
    assert engine.telemetry().total.corrupted == 1
    assert engine.telemetry().total.generated_tokens == before + company
    runner.spoil, runner.fail = set(), 1
    engine.add_request([5, 8], greedy)
    assert {done.finish_reason for done in endings(engine.step())} == {FinishReason.ERROR}
    assert engine.telemetry().total.corrupted == 1
    assert engine.telemetry().total.finished == {FinishReason.ERROR: 2 + company}


def test_a_request_that_leaves_itself_no_token_is_not_corrupted() -> None:
    engine, _ = make(Clock())
    engine.add_request([5, 6], SamplingParams(min_tokens=2, max_tokens=4, stop_token_ids=tuple(range(VOCAB))))
    [done] = endings(drain(engine))
    assert done.finish_reason is FinishReason.ERROR
    assert engine.telemetry().total.corrupted == 0


@pytest.mark.parametrize(
    ("tokens", "place"), [(1, 0), (2, 1), (8, 1), (9, 2), (16, 2), (512, 7), (513, 8), (16384, 12), (16385, 13), (10**6, 13)]
)
def test_a_step_is_counted_in_the_first_class_that_holds_it(tokens: int, place: int) -> None:
    found = Totals().plus(StepStats(prefill_tokens=tokens - 1, decode_tokens=1)).step_sizes
    assert len(found) == len(STEP_SIZES) + 1
    assert found.index(1) == place
    assert sum(found) == 1


def test_a_step_without_work_is_in_no_class() -> None:
    assert Totals().plus(StepStats(preempted=2)) == Totals(preempted=2)
