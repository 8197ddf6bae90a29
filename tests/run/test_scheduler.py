"""Planning is fair, live and bounded: checked on hand-worked plans and on random arrivals with a runner that only counts."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from arctool.errors import RequestError, UsageError
from arctool.run.kv.blocks import BlockTable
from arctool.run.sampling.params import SamplingParams
from arctool.run.scheduler import Limits, Scheduler, StepPlan, View, Work, plan
from arctool.run.sequence import FinishReason, Sequence, Status

LIMITS = Limits(max_seqs=4, max_tokens=20, prefill_chunk=8, block_size=4, num_blocks=16, max_model_len=64)
PREFILL, DECODE = True, False


def view(id: int, prompt: int, computed: int = 0, generated: int = 0, new: int = 8, held: int = 0) -> View:
    return View(id, prompt, prompt + generated, computed, prompt + new, held)


def sequence(id: int, prompt: int, new: int) -> Sequence:
    return Sequence(id, tuple(range(prompt)), SamplingParams(), new, 0, BlockTable(LIMITS.block_size))


def test_nobody_there_is_an_empty_plan() -> None:
    assert plan([], [], 16, LIMITS) == StepPlan((), ())


def test_prompts_come_first_in_the_batch_and_every_decode_gets_its_token() -> None:
    running = [view(0, 5, computed=5, generated=1, held=2), view(1, 20, computed=8, held=2)]
    assert plan(running, [], 8, LIMITS).work == (Work(1, 8, 16, PREFILL, False), Work(0, 5, 6, DECODE, True))


def test_only_the_last_chunk_of_a_prompt_emits() -> None:
    assert plan([view(0, 20, computed=16, held=5)], [], 8, LIMITS).work == (Work(0, 16, 20, PREFILL, True),)


def test_chunks_are_cut_at_multiples_of_the_prompt_s_own_positions() -> None:
    assert plan([view(0, 40, computed=3, held=1)], [], 16, LIMITS).work == (Work(0, 3, 8, PREFILL, False),)


def test_generated_tokens_that_are_recomputed_are_of_the_decode_class() -> None:
    assert plan([view(0, 5, computed=5, generated=3, held=3)], [], 8, LIMITS).work == (Work(0, 5, 8, DECODE, True),)
    first = plan([view(0, 5, computed=0, generated=3, held=3)], [], 8, LIMITS).work
    assert first == (Work(0, 0, 5, PREFILL, False),)


def test_a_waiting_prompt_is_admitted_only_if_its_worst_case_is_free_after_everyone_else_s() -> None:
    # It may need (8 + 8) / 4 = 4 blocks; the running one may still need (8 + 24) / 4 − 2 = 6.
    running = [view(0, 8, computed=8, generated=1, new=24, held=2)]
    assert plan(running, [view(1, 8)], 10, LIMITS).admitted == (1,)
    assert plan(running, [view(1, 8)], 9, LIMITS).admitted == ()


def test_nobody_overtakes_the_head_of_the_queue() -> None:
    assert plan([], [view(0, 30, new=30), view(1, 1, new=1)], 10, LIMITS).admitted == ()


def test_no_more_run_at_once_than_allowed() -> None:
    running = [view(i, 4, computed=4, generated=1, new=2, held=2) for i in range(4)]
    assert plan(running, [view(9, 1, new=1)], 8, LIMITS).admitted == ()
    assert plan(running[:3], [view(9, 1, new=1)], 8, LIMITS).admitted == (9,)


def test_the_budget_of_a_step_is_kept() -> None:
    waiting = [view(i, 8, new=2) for i in range(4)]
    assert plan([], waiting, 16, LIMITS).admitted == (0, 1)  # two chunks of 8 fit into 20 tokens


@pytest.mark.parametrize("changes", [{"max_seqs": 0}, {"prefill_chunk": 0}, {"max_tokens": 11}])
def test_limits_that_could_starve_someone_are_refused(changes: dict) -> None:
    with pytest.raises(UsageError, match=next(iter(changes))):
        Limits(**{**LIMITS.__dict__, **changes})


def test_a_request_that_can_never_fit_is_refused_at_the_door() -> None:
    scheduler = Scheduler(LIMITS)
    scheduler.add(sequence(0, 60, 4))
    with pytest.raises(RequestError, match="60 prompt tokens \\+ 5 new ones exceed the context of 64"):
        scheduler.add(sequence(1, 60, 5))


requests = st.lists(st.tuples(st.integers(0, 6), st.integers(1, 40), st.integers(1, 24), st.integers(0, 30)), min_size=1, max_size=12)


@settings(max_examples=150)
@given(requests)
def test_every_request_is_served_in_bounded_time_and_every_block_comes_back(
    arrivals: list[tuple[int, int, int, int]],
) -> None:
    """arrivals: (steps after the one before, prompt tokens, new tokens, age at which it is cancelled if still there)."""
    scheduler = Scheduler(LIMITS)
    queue, clock, admitted = [], 0, []
    for id, (gap, prompt, new, cancel) in enumerate(arrivals):
        clock += gap
        queue.append((clock, sequence(id, prompt, min(new, 64 - prompt)), cancel if id % 3 == 0 else None))
    everyone = [s for _, s, _ in queue]
    # Each sequence alone takes at most 40 / 8 + 24 steps; one after the other is the worst that can be.
    for now in range(clock + len(everyone) * 32):
        while queue and queue[0][0] <= now:
            scheduler.add(queue.pop(0)[1])
        for s in [s for s in scheduler.live() if s.id % 3 == 0 and len(s.output_ids) > arrivals[s.id][3]]:
            scheduler.finish(s, FinishReason.ABORT)
        work = scheduler.schedule()
        scheduler.check()
        admitted += [s.id for s in scheduler.running if s.id not in admitted]
        assert sum(w.tokens for _, w in work) <= LIMITS.max_tokens
        assert len(scheduler.running) <= LIMITS.max_seqs
        classes = [w.prompt for _, w in work]
        assert classes == sorted(classes, key=[PREFILL, DECODE].index)
        if scheduler.running:
            assert work, "somebody runs and nobody advances"
            decoding = [s for s in scheduler.running if s.computed >= len(s.prompt_ids)]
            assert {s.id for s in decoding} <= {s.id for s, _ in work}, "a decoding sequence was skipped"
        for s, w in work:
            assert w.first == s.computed
            assert len(s.table.blocks) * LIMITS.block_size >= w.last
            s.computed = w.last
            if w.emits:
                s.output_ids.append(0)
                if len(s.output_ids) == s.max_tokens:
                    scheduler.finish(s, FinishReason.LENGTH)
    assert all(s.status is Status.FINISHED for s in everyone)
    assert scheduler.allocator.free_blocks == LIMITS.num_blocks
    assert admitted == sorted(admitted), "somebody was overtaken at the door"


def test_finishing_twice_changes_nothing() -> None:
    scheduler = Scheduler(LIMITS)
    s = sequence(0, 8, 8)
    scheduler.add(s)
    scheduler.schedule()
    scheduler.finish(s, FinishReason.ABORT)
    scheduler.finish(s, FinishReason.ERROR)
    assert s.finish_reason is FinishReason.ABORT
    assert scheduler.allocator.free_blocks == LIMITS.num_blocks
