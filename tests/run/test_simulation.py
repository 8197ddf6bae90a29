"""Thousands of random requests through the whole engine over a runner that notices every wrong block: equal to alone, fair, leakless."""

from __future__ import annotations

import random
from collections import Counter
from dataclasses import dataclass, field

import pytest
from fake_runner import EOS, VOCAB, FakeRunner, alone

from arctool.run.engine import Engine
from arctool.run.kv.blocks import blocks_for
from arctool.run.requests import Completion
from arctool.run.sampling.params import SamplingParams
from arctool.run.sequence import FinishReason, Sequence

HEADS = [[2 + (7 * i * i + 3 * head) % 14 for i in range(40)] for head in range(2)]
"""Beginnings that requests share."""


@dataclass(frozen=True)
class World:
    """Sizes of an engine, and how requests arrive: a burst of up to `burst` with probability `rate` in each step."""

    blocks: int
    block_size: int
    max_seqs: int
    budget: int
    floor: int = 4
    rate: float = 0.3
    burst: int = 3
    caching: bool = True
    cancels: float = 0.02
    failures: float = 0.0

    @property
    def longest(self) -> int:
        return self.blocks * self.block_size


WORLDS = {
    "tiny pool": World(blocks=6, block_size=4, max_seqs=4, budget=8, failures=0.002),
    "one block each": World(blocks=8, block_size=8, max_seqs=8, budget=16),
    "roomy": World(blocks=64, block_size=4, max_seqs=16, budget=64, burst=8),
    "starved for budget": World(blocks=40, block_size=4, max_seqs=12, budget=6, rate=0.5, floor=4),
    "floor at every step": World(blocks=24, block_size=4, max_seqs=8, budget=4, floor=1),
    "blocks of one token": World(blocks=30, block_size=1, max_seqs=4, budget=8),
    "no prefix cache": World(blocks=12, block_size=4, max_seqs=6, budget=12, caching=False, failures=0.002),
    "many at once": World(blocks=16, block_size=4, max_seqs=6, budget=32, rate=1.0, burst=12, cancels=0.05),
}


def random_request(rng: random.Random, world: World) -> tuple[list[int], SamplingParams]:
    """Half of the prompts begin as others do; some ask for more samples, some do not say how much they want."""
    longest = world.longest
    size = min(rng.choice([1, 2, 4, 5, 8, 9, 13, 16, 22, 40]), longest - 1)
    prompt = [rng.randrange(2, VOCAB) for _ in range(size)]
    if rng.random() < 0.7:
        shared = rng.choice([size, size, 3 * size // 4, size // 3])
        prompt[:shared] = rng.choice(HEADS)[:shared]
    room = longest - size
    most = None if rng.random() < 0.05 and room < 60 else min(room, rng.choice([1, 1, 2, 3, 5, 9, 17]))
    return prompt, SamplingParams(
        temperature=rng.choice([0.0, 1.0]),
        seed=rng.randrange(1 << 32),
        max_tokens=most,
        n=rng.choice([1, 1, 1, 1, 2, 3, 5]),
        priority=rng.choice([0, 0, 0, 1, -1]),
        cache_salt=rng.choice(["", "", "a", "b"]),
        ignore_eos=rng.random() < 0.5,
    )


@dataclass
class Fairness:
    """How long who has waited, against what is promised."""

    engine: Engine
    world: World
    gaps: Counter[int] = field(default_factory=Counter)
    starved: int = 0
    longest_gap: int = 0
    longest_starved: int = 0

    def before(self) -> None:
        scheduler = self.engine.scheduler
        self.decoding = [s for s in scheduler.running if s.output_ids and s.computed == s.length - 1]
        self.could_prefill = any(s not in self.decoding for s in scheduler.running)
        if scheduler.waiting and len(scheduler.running) < self.world.max_seqs:
            need = blocks_for(scheduler.waiting[0].length, self.world.block_size) + 2 * len(scheduler.running)
            self.could_prefill |= need <= scheduler.paging.pool.available
        self.preempted = scheduler.telemetry().total.preempted
        self.first = (scheduler.running[0], scheduler.running[0].preemptions) if scheduler.running else None

    def after(self, work: list[Sequence]) -> None:
        served = {s.id for s in work}
        still = {s.id for s in self.engine.scheduler.running}
        for s in self.decoding:
            self.gaps[s.id] = 0 if s.id in served or s.id not in still else self.gaps[s.id] + 1
            self.longest_gap = max(self.longest_gap, self.gaps[s.id])
        last = self.engine.telemetry().last_step
        if self.could_prefill and not last.prefill_tokens and self.engine.telemetry().total.preempted == self.preempted:
            self.starved += 1
        else:
            self.starved = 0
        self.longest_starved = max(self.longest_starved, self.starved)
        assert self.first is None or self.first[0].preemptions == self.first[1], "the first by rank lost its blocks"
        # In a step decodes get at least the half that prompts cannot take; those who step aside are first in the next one.
        world = self.world
        assert self.longest_gap <= -(-world.max_seqs // (world.budget - world.budget // 2)), "a decoding sequence waited too long"
        assert self.longest_starved < world.floor, "a prompt that fits waited longer than the floor"


@dataclass
class Outcome:
    engine: Engine
    runner: FakeRunner
    requests: dict[int, tuple[list[int], SamplingParams]]
    done: dict[tuple[int, int], Completion]
    steps: int
    fairness: Fairness


def simulate(world: World, count: int, seed: int) -> Outcome:
    """Serve `count` random requests to the end, with the books checked after every step."""
    rng = random.Random(seed)
    runner = FakeRunner(world.blocks, world.block_size, world.longest, world.budget)
    engine = Engine(
        runner,  # type: ignore[arg-type]
        None,
        [EOS],
        max_seqs=world.max_seqs,
        max_step_tokens=world.budget,
        prefill_floor=world.floor,
        enable_prefix_caching=world.caching,
    )
    requests: dict[int, tuple[list[int], SamplingParams]] = {}
    done: dict[tuple[int, int], Completion] = {}
    fairness = Fairness(engine, world)
    steps = idle = 0
    while len(requests) < count or engine.has_work():
        if len(requests) < count and rng.random() < world.rate and len(engine.scheduler.waiting) < 30:
            for _ in range(rng.randint(1, world.burst)):
                prompt, params = random_request(rng, world)
                requests[engine.add_request(prompt, params)] = prompt, params
        for request in [i for i in engine._requests if rng.random() < world.cancels / 4]:
            done.update({(request, u.index): u.completion for u in engine.cancel(request) if u.completion is not None})
        runner.fail = int(rng.random() < world.failures)
        before = runner.computed
        fairness.before()
        updates = engine.step()
        fairness.after([s for s, _ in runner.steps[-1]] if runner.computed > before else [])
        engine.scheduler.check()
        assert len(engine.scheduler.running) <= world.max_seqs
        for update in updates:
            if update.completion is not None:
                assert (update.request_id, update.index) not in done
                done[update.request_id, update.index] = update.completion
        steps += 1
        idle = 0 if runner.computed > before or not engine.has_work() or runner.fail else idle + 1
        assert idle <= 2, "somebody has work and nobody advances"
        runner.steps.clear() if len(runner.steps) > 4 else None
    return Outcome(engine, runner, requests, done, steps, fairness)


def check_outcome(outcome: Outcome, world: World) -> Counter[FinishReason]:
    """Every sample of every request ended as it would have ended alone, and nothing is left behind."""
    reasons: Counter[FinishReason] = Counter()
    assert set(outcome.done) == {(i, index) for i, (_, params) in outcome.requests.items() for index in range(params.n)}
    for (i, index), completion in outcome.done.items():
        prompt, params = outcome.requests[i]
        expected = alone(prompt, params, index, world.longest)
        if completion.finish_reason in (FinishReason.ABORT, FinishReason.ERROR):
            assert completion.token_ids == expected[: len(completion.token_ids)]
        else:
            assert completion.token_ids == expected
        reasons[completion.finish_reason] += 1
    assert outcome.engine.telemetry().cache.owned == 0
    assert not outcome.engine._samples
    return reasons


@pytest.mark.parametrize("name", WORLDS)
def test_random_requests_end_as_each_alone_whatever_the_sizes(name: str) -> None:
    world = WORLDS[name]
    outcome = simulate(world, 200, seed=sum(name.encode()))
    reasons = check_outcome(outcome, world)
    assert len({c.token_ids for c in outcome.done.values()}) > 50, "equal outputs would prove nothing"
    assert reasons[FinishReason.STOP] > 10
    assert reasons[FinishReason.LENGTH] > 20
    assert reasons[FinishReason.ABORT] > 0
    total = outcome.engine.telemetry().total
    if world.caching:
        assert 0 < total.prefix_hits < total.prefix_queries
        assert outcome.runner.copied > 0 or world.block_size == 1, "no block was ever shared and written"
    else:
        assert total.prefix_hits == 0


def test_ten_thousand_requests_leave_no_block_behind() -> None:
    world = World(blocks=24, block_size=4, max_seqs=12, budget=32, rate=1.0, burst=8, cancels=0.02, failures=0.001)
    outcome = simulate(world, 10_000, seed=5)
    reasons = check_outcome(outcome, world)
    assert min(reasons[reason] for reason in FinishReason) > 20
    assert outcome.engine.telemetry().total.preempted > 300, "the pool was never short"
