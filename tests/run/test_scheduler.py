"""Planning is fair, live and bounded: hand-worked plans, and the queues that carry them out. Random arrivals are in test_simulation."""

from __future__ import annotations

from dataclasses import replace

import pytest

from arctool.errors import RequestError, UsageError
from arctool.run.sampling.params import SamplingParams
from arctool.run.scheduler import Limits, Scheduler, StepPlan, View, Work, plan
from arctool.run.sequence import FinishReason, Sequence, Status
from arctool.run.telemetry import StepStats

LIMITS = Limits(max_seqs=4, block_size=4, num_blocks=16, max_model_len=64, max_step_tokens=20)


def decode(id: int, length: int = 9, missing: int = 0, last_step: int = 0) -> View:
    return View(id, length, length - 1, True, missing, last_step=last_step)


def prompt(id: int, length: int, computed: int = 0) -> View:
    return View(id, length, computed)


def waits(id: int, length: int, computed: int = 0, missing: int | None = None, overtaken: int = 0) -> View:
    return View(id, length, computed, missing=-(-length // 4) if missing is None else missing, overtaken=overtaken)


def tokens(step: StepPlan) -> dict[int, int]:
    return {work.id: work.tokens for work in step.work}


def test_nobody_there_is_an_empty_plan() -> None:
    assert plan([], [], 16, LIMITS) == StepPlan(passes=1)


def test_decodes_get_their_token_and_a_prompt_what_is_left() -> None:
    step = plan([decode(0), decode(1), prompt(2, 40, 8)], [], 16, LIMITS)
    assert step.work == (Work(2, 8, 26, False), Work(0, 8, 9, True), Work(1, 8, 9, True))


def test_only_the_end_of_a_prompt_emits_and_the_next_one_gets_the_rest() -> None:
    step = plan([prompt(0, 30, 16), prompt(1, 30)], [], 16, LIMITS)
    assert step.work == (Work(0, 16, 30, True), Work(1, 0, 6, False))


def test_a_prefix_hit_is_not_computed_again() -> None:
    assert plan([], [waits(0, 12, computed=8)], 16, LIMITS).work == (Work(0, 8, 12, True),)


def test_the_prefill_cap_leaves_the_rest_of_the_budget_unused() -> None:
    assert tokens(plan([decode(0), prompt(1, 40)], [], 16, replace(LIMITS, prefill_cap=5))) == {0: 1, 1: 5}


def test_a_waiting_prompt_is_admitted_if_all_its_tokens_fit_with_a_block_for_each_who_runs() -> None:
    running = [decode(0), decode(1, missing=1)]
    assert plan(running, [waits(2, 30)], 11, LIMITS).admitted == (2,)  # 8 of its own, 1 that is due, 2 to go on with
    assert plan(running, [waits(2, 30)], 10, LIMITS).admitted == ()
    assert plan([], [waits(2, 64)], 16, LIMITS).admitted == (2,)


def test_no_block_is_held_back_for_those_who_need_no_more() -> None:
    running = [replace(decode(0), grows=False), decode(1)]
    assert plan(running, [waits(2, 4)], 2, LIMITS).admitted == (2,)
    assert plan(running, [waits(2, 4)], 1, LIMITS).admitted == ()
    assert plan([], [replace(waits(2, 4), grows=False), waits(3, 4)], 2, LIMITS).admitted == (2, 3)


def test_a_cache_of_as_many_contexts_as_sequences_never_makes_anyone_wait() -> None:
    scheduler = Scheduler(replace(LIMITS, max_model_len=16))
    for id in range(4):
        scheduler.add(sequence(id, 4, 12))
    advance(scheduler)
    assert len(scheduler.running) == 4
    for _ in range(11):
        assert len(advance(scheduler)) == 4
    assert scheduler.telemetry().total.preempted == 0
    late = Scheduler(replace(LIMITS, max_model_len=16))
    for id in range(3):
        late.add(sequence(id, 4, 12))
    for _ in range(10):
        advance(late)
    late.add(sequence(3, 12, 4))
    assert len(advance(late)) == 4


def test_those_admitted_together_all_fit() -> None:
    waiting = [waits(0, 4), waits(1, 4), waits(2, 4)]
    assert [len(plan([], waiting, free, LIMITS).admitted) for free in range(6)] == [0, 1, 1, 2, 2, 3]


def test_what_will_be_generated_is_not_reserved() -> None:
    scheduler = Scheduler(LIMITS)
    for id in range(3):
        scheduler.add(sequence(id, 8, 56))
    scheduler.schedule()
    assert [s.id for s in scheduler.running] == [0, 1, 2]


def test_no_more_run_at_once_than_allowed() -> None:
    running = [decode(i) for i in range(4)]
    assert plan(running, [waits(9, 1)], 8, LIMITS).admitted == ()
    assert plan(running[:3], [waits(9, 1)], 8, LIMITS).admitted == (9,)


def test_the_budget_of_a_step_is_kept() -> None:
    step = plan([], [waits(i, 8) for i in range(4)], 16, LIMITS)
    assert tokens(step) == {0: 8, 1: 8, 2: 4}


def test_no_more_of_the_queue_is_read_than_may_be_admitted() -> None:
    read: list[int] = []

    def queue():
        for i in range(1000):
            read.append(i)
            yield waits(i, 8)

    plan([], queue(), 16, LIMITS)
    assert len(read) <= 5
    read.clear()
    plan([], queue(), 1, LIMITS)
    assert len(read) == LIMITS.max_overtakes + 2


def test_when_decodes_eat_the_budget_prompts_get_half_of_it_in_every_fourth_step() -> None:
    limits = replace(LIMITS, max_seqs=64, max_step_tokens=8)
    last = dict.fromkeys(range(10), 0)
    done, passes, served = 0, 0, []
    for now in range(1, 13):
        running = [*(decode(i, last_step=last[i]) for i in last), prompt(99, 100, done)]
        step = plan(running, [], 16, limits, passes)
        passes = step.passes
        found = tokens(step)
        assert sum(found.values()) == 8
        done += found.pop(99, 0)
        served.append(8 - len(found))
        last.update(dict.fromkeys(found, now))
        assert all(now - step <= 2 for step in last.values()), "a decode that stepped aside has to come first"
    assert served == [0, 0, 0, 4] * 3


def test_a_step_that_is_due_takes_no_more_from_decodes_than_prompts_use() -> None:
    limits = replace(LIMITS, max_step_tokens=8)
    running = [*(decode(i) for i in range(10)), prompt(99, 3)]
    assert len(tokens(plan(running, [], 16, limits, passes=3))) == 1 + 5
    assert tokens(plan(running[:10], [], 16, limits, passes=3)) == dict.fromkeys(range(8), 1)


def test_when_blocks_run_out_the_last_by_rank_gives_up_its_own() -> None:
    running = [decode(0, missing=1), decode(1, missing=1), prompt(2, 30)]
    assert plan(running, [waits(3, 1)], 1, LIMITS) == StepPlan(preempted=2)
    assert plan(running[:2], [], 1, LIMITS).preempted == 1
    assert plan(running[:2], [], 2, LIMITS).preempted is None
    assert plan(running[:1], [], 1, LIMITS).work == (Work(0, 8, 9, True),)


def test_one_that_does_not_fit_is_overtaken_a_few_times_and_no_more() -> None:
    limits = replace(LIMITS, max_overtakes=3)
    small = [waits(i, 1) for i in range(1, 9)]
    assert plan([], [waits(0, 60), *small], 10, limits).admitted == (1, 2, 3)
    assert plan([], [waits(0, 60, overtaken=2), *small], 10, limits).admitted == (1,)
    assert plan([], [waits(0, 60, overtaken=3), *small], 10, limits).admitted == ()
    assert plan([], [waits(0, 60), *small], 10, replace(limits, max_overtakes=0)).admitted == ()
    assert plan([], [waits(0, 60), waits(1, 60, overtaken=2), *small[1:]], 10, limits).admitted == (2,)


@pytest.mark.parametrize(
    "changes",
    [
        {"max_seqs": 0},
        {"max_step_tokens": 1},
        {"prefill_floor": 0},
        {"prefill_cap": 0},
        {"max_overtakes": -1},
        {"block_size": 0},
        {"num_blocks": 0},
        {"max_model_len": 1},
    ],
)
def test_limits_that_could_starve_someone_are_refused(changes: dict) -> None:
    with pytest.raises(UsageError, match=f"^{next(iter(changes))}: expected at least"):
        replace(LIMITS, **changes)


def sequence(id: int, size: int, new: int, priority: int = 0, table_of: Scheduler | None = None) -> Sequence:
    table = (table_of or Scheduler(LIMITS)).paging.table()
    return Sequence(id, tuple(range(100 * id, 100 * id + size)), SamplingParams(priority=priority), new, 0, table)


def advance(scheduler: Scheduler) -> list[int]:
    """One step in which every sequence that emits gets token 7; returns who was in it."""
    step = scheduler.schedule()
    scheduler.check()
    for s, item in step.work:
        scheduler.commit(s, item.last)
        if item.emits:
            s.output_ids.append(7)
            if len(s.output_ids) == s.max_tokens:
                scheduler.finish(s, FinishReason.LENGTH)
    scheduler.check()
    return [s.id for s, _ in step.work]


def test_a_request_that_can_never_fit_is_refused_at_the_door() -> None:
    scheduler = Scheduler(LIMITS)
    scheduler.add(sequence(0, 60, 4))
    with pytest.raises(RequestError, match=r"60 prompt tokens \+ 5 new ones exceed the context of 64"):
        scheduler.add(sequence(1, 60, 5))
    with pytest.raises(RequestError, match=r"^prompt: 64 tokens leave no room in the context of 64"):
        scheduler.add(sequence(1, 64, 1))
    small = Scheduler(replace(LIMITS, num_blocks=3))
    with pytest.raises(RequestError, match=r"10 prompt tokens \+ 3 new ones exceed the context of 12"):
        small.add(sequence(1, 10, 3))
    assert len(list(scheduler.live())) == 1


def test_lower_priority_numbers_go_first_then_earlier_arrivals() -> None:
    scheduler = Scheduler(replace(LIMITS, max_seqs=1))
    for id, priority in enumerate([0, 5, -1, 0, 5]):
        scheduler.add(sequence(id, 4, 1, priority))
    assert [advance(scheduler)[0] for _ in range(5)] == [2, 0, 3, 1, 4]


def test_a_preempted_sequence_starts_anew_at_its_place_and_loses_no_token() -> None:
    scheduler = Scheduler(replace(LIMITS, num_blocks=6, max_model_len=24))
    first, second, third = (sequence(i, 7, 12) for i in range(3))
    for s in (first, second, third):
        scheduler.add(s)
    while not second.preemptions:
        advance(scheduler)
    assert (second.status, second.computed, second.table.blocks) == (Status.WAITING, 0, [])
    assert [s.id for s in scheduler.waiting] == [1, 2]
    kept = len(second.output_ids)
    assert kept > 0
    assert not first.preemptions, "the first by rank never gives up its blocks"
    while scheduler.running or scheduler.waiting:
        advance(scheduler)
    assert [len(s.output_ids) for s in (first, second, third)] == [12, 12, 12]
    assert scheduler.telemetry().total.preempted == second.preemptions + third.preemptions
    assert scheduler.paging.use.owned == 0


def test_overtakings_are_counted_over_all_steps() -> None:
    scheduler = Scheduler(replace(LIMITS, max_overtakes=2))
    scheduler.add(sequence(0, 19, 20))
    advance(scheduler)
    big = sequence(1, 52, 1)
    scheduler.add(big)
    started = []
    for id in range(2, 7):
        scheduler.add(sequence(id, 1, 1))
        started += [i for i in advance(scheduler) if i]
    assert (started, big.overtaken) == ([2, 3], 2)
    while scheduler.running or scheduler.waiting:
        started += [i for i in advance(scheduler) if i]
    assert list(dict.fromkeys(started)) == [2, 3, 1, 4, 5, 6]


def test_siblings_share_the_prompt_and_those_without_a_place_wait_their_turn() -> None:
    scheduler = Scheduler(replace(LIMITS, max_seqs=2))
    leader = sequence(0, 10, 3, table_of=scheduler)
    siblings = [replace_index(leader, i, scheduler) for i in (1, 2)]
    scheduler.add(leader)
    [(_, item)] = scheduler.schedule().work
    scheduler.commit(leader, item.last)
    scheduler.fork(leader, siblings)
    for s in (leader, *siblings):
        s.output_ids.append(7 + s.index)
    assert [s.status for s in siblings] == [Status.RUNNING, Status.WAITING]
    assert siblings[0].table.blocks == leader.table.blocks
    step = scheduler.schedule()
    assert [item.first for _, item in step.work] == [10, 10]
    assert len(step.copies) == 1
    scheduler.check()
    scheduler.finish(leader, FinishReason.ABORT)
    scheduler.commit(siblings[0], 11)
    siblings[0].output_ids.append(1)
    resumed = {s.index: item for s, item in scheduler.schedule().work}
    assert (resumed[2].first, resumed[2].last) == (8, 11), "its prompt's full blocks are found"
    assert siblings[1].hit == 0
    scheduler.check()


def replace_index(leader: Sequence, index: int, scheduler: Scheduler) -> Sequence:
    return Sequence(leader.id + index, leader.prompt_ids, leader.params, leader.max_tokens, index, scheduler.paging.table(), index)


def test_telemetry_counts_steps_tokens_hits_and_blocks() -> None:
    scheduler = Scheduler(LIMITS)
    scheduler.add(sequence(0, 9, 2))
    advance(scheduler)
    assert scheduler.telemetry().last_step == StepStats(prefill_tokens=9)
    assert (scheduler.telemetry().running, scheduler.telemetry().cache.owned) == (1, 3)
    advance(scheduler)
    found = scheduler.telemetry()
    assert found.last_step == StepStats(decode_tokens=1)
    assert (found.running, found.cache.owned, found.cache.cached, found.cache.free) == (0, 0, 2, 14)
    again = sequence(0, 9, 1)
    scheduler.add(again)
    advance(scheduler)
    total = scheduler.telemetry().total
    assert (total.steps, total.prefill_tokens, total.decode_tokens) == (3, 10, 1)
    assert (total.prefix_queries, total.prefix_hits, again.hit) == (18, 8, 8)
    assert scheduler.schedule().work == ()
    assert scheduler.telemetry().total.steps == 3


def test_finishing_twice_changes_nothing() -> None:
    scheduler = Scheduler(LIMITS)
    s = sequence(0, 8, 8)
    scheduler.add(s)
    scheduler.schedule()
    scheduler.finish(s, FinishReason.ABORT)
    scheduler.finish(s, FinishReason.ERROR)
    assert s.finish_reason is FinishReason.ABORT
    assert scheduler.paging.use.owned == 0


def test_the_checker_sees_queues_that_lie() -> None:
    scheduler = Scheduler(LIMITS)
    one, two = sequence(0, 8, 8), sequence(1, 8, 8)
    scheduler.add(one)
    scheduler.add(two)
    scheduler.waiting.reverse()
    with pytest.raises(RuntimeError, match="out of order"):
        scheduler.check()
    scheduler.waiting.reverse()
    scheduler.schedule()
    one.computed = 9
    with pytest.raises(RuntimeError, match="2 blocks for 9 of 8 tokens"):
        scheduler.check()
    one.status = Status.WAITING
    with pytest.raises(RuntimeError, match="not where its status says"):
        scheduler.finish(one, FinishReason.ABORT)
