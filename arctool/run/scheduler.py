"""Who computes what in the next step. `plan` is a pure function of plain values; `Scheduler` keeps the queues and carries a plan out.

The rules. Lower rank first: (priority number, arrival, sample). Every sequence that decodes gets its token before a prompt gets
any; prompts get what is left of the step's budget, and at least every `prefill_floor`-th step half of it, if there are so many
decodes that nothing is left. Whoever has to step aside for that comes first in the next step. A sequence is admitted when all
its tokens, and one more block for each who runs and may need it, fit into what nobody owns; what it will generate is not reserved.
So the pool can run out: then the last by rank loses its blocks, waits again at its place and recomputes. The first by rank never
does, so every request ends. Who waits and does not fit may be overtaken by a few that do, `max_overtakes` times in all.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Iterable
from collections.abc import Sequence as Ordered
from dataclasses import dataclass

from arctool.errors import RequestError, UsageError
from arctool.run.kv.blocks import blocks_for
from arctool.run.kv.paging import Copy, Paging
from arctool.run.sequence import FinishReason, Sequence, Status
from arctool.run.telemetry import StepStats, Telemetry, Totals

PREFILL_FLOOR = 4
MAX_STEP_TOKENS = 512
MAX_OVERTAKES = 16


@dataclass(frozen=True)
class Limits:
    """`max_seqs` run at once; `max_step_tokens` in one step, of them `prefill_cap` of prompts; the rest is the cache's."""

    max_seqs: int
    block_size: int
    num_blocks: int
    max_model_len: int
    max_step_tokens: int = MAX_STEP_TOKENS
    prefill_floor: int = PREFILL_FLOOR
    prefill_cap: int | None = None
    max_overtakes: int = MAX_OVERTAKES

    def __post_init__(self) -> None:
        least = {"max_seqs": 1, "block_size": 1, "num_blocks": 1, "max_model_len": 2, "max_step_tokens": 2, "prefill_floor": 1}
        for name, low in (*least.items(), ("prefill_cap", 1), ("max_overtakes", 0)):
            value = getattr(self, name)
            if value is not None and value < low:
                raise UsageError(f"{name}: expected at least {low}, found {value}")

    @property
    def longest(self) -> int:
        """Tokens of the longest sequence that can be served: what the context allows and the whole cache holds."""
        return min(self.max_model_len, self.num_blocks * self.block_size)

    @property
    def prefill_share(self) -> int:
        """Tokens that prompts get of a step of which they would get none otherwise."""
        half = self.max_step_tokens // 2
        return half if self.prefill_cap is None else min(half, self.prefill_cap)


@dataclass(frozen=True)
class View:
    """All that planning may know of a sequence.

    `length` tokens are known, `computed` of them are in the cache (waiting: would be, by a prefix hit). `decoding`: it has been
    generating and only its newest token is to be computed. `missing`: available blocks that it takes to compute all. `grows`: whether
    it may come to need more than those. `last_step`: when it last advanced. `overtaken`: how often it was passed over.
    """

    id: int
    length: int
    computed: int = 0
    decoding: bool = False
    missing: int = 0
    grows: bool = True
    last_step: int = -1
    overtaken: int = 0


@dataclass(frozen=True)
class Work:
    """Compute the tokens at [first, last) of sequence `id`; `emits`: the logits of the last one choose its next token."""

    id: int
    first: int
    last: int
    emits: bool

    @property
    def tokens(self) -> int:
        return self.last - self.first


@dataclass(frozen=True)
class StepPlan:
    """One step: who starts running, and the work. Or, if the blocks do not suffice: who has to give up its own before planning again.

    `passes`: how many steps in a row prompts have had less than their share; the next plan wants to know it.
    """

    work: tuple[Work, ...] = ()
    admitted: tuple[int, ...] = ()
    preempted: int | None = None
    passes: int = 0


def plan(running: Ordered[View], waiting: Iterable[View], available: int, limits: Limits, passes: int = 0) -> StepPlan:
    """Plan the next step. `running` and `waiting` are in order of rank; of `waiting` no more is read than may be admitted.

    `available`: blocks that nobody owns; `passes`: the last plan's. No work, no preempted one: there is nothing to do.
    """
    need = sum(view.missing for view in running)
    if need > available and len(running) > 1:
        return StepPlan(preempted=running[-1].id, passes=passes)
    decodes = [view for view in running if view.decoding]
    due = passes + 1 >= limits.prefill_floor
    room = max(limits.max_step_tokens - len(decodes), limits.prefill_share if due else 0)
    room = room if limits.prefill_cap is None else min(room, limits.prefill_cap)
    prompts: list[Work] = []
    left = room
    for view in running:
        if not view.decoding and left:
            prompts.append(_next_work(view, left))
            left -= prompts[-1].tokens
    admitted: list[int] = []
    for view in _admissible(waiting, running, available - need, limits):
        if not left:
            break
        prompts.append(_next_work(view, left))
        left -= prompts[-1].tokens
        admitted.append(view.id)
    used = room - left
    served = sorted(decodes, key=lambda view: view.last_step)[: limits.max_step_tokens - used]
    rested = used >= limits.prefill_share or (due and used > 0)
    return StepPlan((*prompts, *(_next_work(view, 1) for view in served)), tuple(admitted), None, 0 if rested else passes + 1)


def _admissible(waiting: Iterable[View], running: Ordered[View], available: int, limits: Limits) -> Iterable[View]:
    """Who of `waiting` may start beside the `running` ones, in order, if each takes its blocks."""
    count, growing = len(running), sum(view.grows for view in running)
    passed, may_overtake = 0, limits.max_overtakes
    for view in waiting:
        if count == limits.max_seqs or (passed and may_overtake < 1) or passed > limits.max_overtakes:
            return
        if view.missing + growing <= available:
            yield view
            count, growing, available = count + 1, growing + view.grows, available - view.missing
            may_overtake -= bool(passed)
        else:
            passed, may_overtake = passed + 1, min(may_overtake, limits.max_overtakes - view.overtaken)


def _next_work(view: View, most: int) -> Work:
    """The next tokens of one sequence, at most `most`."""
    last = min(view.length, view.computed + most)
    return Work(view.id, view.computed, last, emits=last == view.length)


@dataclass(frozen=True)
class Step:
    """A plan carried out: the sequences with their work, the blocks to copy, in this order, before it runs, and who has just started."""

    work: tuple[tuple[Sequence, Work], ...] = ()
    copies: tuple[Copy, ...] = ()
    admitted: tuple[Sequence, ...] = ()


class Scheduler:
    """The queues and the blocks, both queues in order of rank.

    `schedule` plans a step and takes its blocks; whoever runs it reports what was computed by `commit`. `finish` gives a sequence's
    blocks back at any time between steps.
    """

    def __init__(self, limits: Limits, paging: Paging | None = None) -> None:
        self.limits = limits
        self.paging = Paging(limits.num_blocks, limits.block_size) if paging is None else paging
        self.waiting: list[Sequence] = []
        self.running: list[Sequence] = []
        self._arrivals = 0
        self._passes = 0
        self._steps = 0
        self._last = StepStats()
        self._totals = Totals()

    def check_fits(self, prompt: int, max_tokens: int) -> None:
        """Raise RequestError if so many tokens could never be served."""
        if prompt >= self.limits.longest:
            raise RequestError(f"prompt: {prompt} tokens leave no room in the context of {self.limits.longest} tokens; shorten it")
        if prompt + max_tokens > self.limits.longest:
            raise RequestError(
                f"max_tokens: {prompt} prompt tokens + {max_tokens} new ones exceed "
                f"the context of {self.limits.longest} tokens; ask for fewer"
            )

    def add(self, sequence: Sequence) -> None:
        """Queue a sequence. Raises RequestError for one that could never run."""
        self.check_fits(len(sequence.prompt_ids), sequence.max_tokens)
        sequence.arrival, self._arrivals = self._arrivals, self._arrivals + 1
        self._wait(sequence)

    def fork(self, sequence: Sequence, siblings: Iterable[Sequence]) -> None:
        """Start `siblings`, samples of the same request, where `sequence` is: they share its blocks until they write.

        One for which there is no place among the running waits as if preempted: prefix hits spare it most of the prompt.
        """
        for sibling in siblings:
            sibling.arrival = sequence.arrival
            if len(self.running) == self.limits.max_seqs:
                self._wait(sibling)
                continue
            sibling.table, sibling.computed = self.paging.fork(sequence.table), sequence.computed
            sibling.status, sibling.last_step = Status.RUNNING, self._steps
            insort(self.running, sibling, key=_rank)

    def schedule(self) -> Step:
        """Plan the next step, preempt and start whom the plan says, and make room for the step's tokens. Empty: no work."""
        preempted = 0
        while True:
            views, queue = [self._view(s) for s in self.running], map(self._view_of_waiting, self.waiting)
            planned = plan(views, queue, self.paging.pool.available, self.limits, self._passes)
            if planned.preempted is None:
                break
            self.preempt(next(s for s in self.running if s.id == planned.preempted))
            preempted += 1
        self._passes = planned.passes
        self._admit(planned.admitted)
        by_id = {s.id: s for s in self.running}
        work = tuple((by_id[item.id], item) for item in planned.work)
        copies = [copy for s, _ in work for copy in self.paging.grow(s.table, s.computed, s.length)]
        self._steps += 1
        for sequence, _ in work:
            sequence.last_step = self._steps
        decoded = len({view.id for view in views if view.decoding} & {item.id for item in planned.work})
        self._last = StepStats(preempted, sum(item.tokens for item in planned.work) - decoded, decoded)
        self._totals = self._totals.plus(self._last)
        return Step(work, tuple(copies), tuple(by_id[i] for i in planned.admitted))

    def commit(self, sequence: Sequence, computed: int) -> None:
        """The first `computed` tokens of `sequence` are computed and accepted; from now on others may find the blocks they fill."""
        sequence.computed = computed
        self.paging.commit(sequence.table, computed, sequence.tokens)

    def preempt(self, sequence: Sequence) -> None:
        """Take a running sequence's blocks away; it waits again at its place and computes its tokens anew."""
        self._remove(self.running, sequence)
        self.paging.release(sequence.table)
        sequence.computed = 0
        sequence.preemptions += 1
        self._wait(sequence)

    def finish(self, sequence: Sequence, reason: FinishReason, error: str | None = None) -> None:
        """Take a sequence out, whatever its status, and free its blocks. A second call changes nothing."""
        if sequence.status is Status.FINISHED:
            return
        if sequence.status is not Status.PENDING:
            self._remove(self.running if sequence.status is Status.RUNNING else self.waiting, sequence)
        sequence.status, sequence.finish_reason, sequence.error = Status.FINISHED, reason, error
        self._totals = self._totals.ended(reason)
        self.paging.release(sequence.table)

    def count_sampled(self, tokens: int, corrupted: int) -> None:
        """Let telemetry know what came of the last step's logits."""
        self._totals = self._totals.sampled(tokens, corrupted)

    def live(self) -> Iterable[Sequence]:
        """Every sequence that is queued or runs."""
        return (*self.running, *self.waiting)

    def telemetry(self) -> Telemetry:
        """How things stand now, what the last step did, and all steps together."""
        return Telemetry(len(self.running), len(self.waiting), self.paging.use, self._last, self._totals)

    def count_anew(self) -> None:
        """Forget what was counted so far: it was no traffic."""
        self._last, self._totals = StepStats(), Totals()

    def check(self) -> None:
        """Raise RuntimeError unless queues, blocks, prefix cache and tables agree."""
        self.paging.check([s.table for s in self.live()])
        for queue, status in ((self.running, Status.RUNNING), (self.waiting, Status.WAITING)):
            if [s.rank for s in queue] != sorted(s.rank for s in queue) or any(s.status is not status for s in queue):
                raise RuntimeError(f"the {status.value} queue is out of order")
        if any(s.table.blocks or s.computed for s in self.waiting):
            raise RuntimeError("a waiting sequence owns blocks")
        for s in self.running:
            size = self.limits.block_size
            if not s.computed < s.length or not blocks_for(s.computed, size) <= len(s.table.blocks) <= blocks_for(s.length, size):
                raise RuntimeError(f"sequence {s.id} has {len(s.table.blocks)} blocks for {s.computed} of {s.length} tokens")

    def _admit(self, ids: Ordered[int]) -> None:
        """Start those sequences. All take their cached blocks before any takes new ones, which could evict them."""
        wanted = set(ids)
        for sequence in [s for s in self.waiting if s.id in wanted] if wanted else []:
            self._remove(self.waiting, sequence)
            for other in self.waiting[: bisect_left(self.waiting, sequence.rank, key=_rank)]:
                other.overtaken += 1
            hit = self.paging.match(sequence.table, sequence.length, sequence.tokens)
            self.paging.claim(sequence.table, hit)
            sequence.computed = len(hit) * self.limits.block_size
            if not sequence.preemptions and not sequence.output_ids:
                sequence.hit = sequence.computed
                self._totals = self._totals.queried(sequence.length, sequence.hit)
            sequence.status = Status.RUNNING
            insort(self.running, sequence, key=_rank)

    def _wait(self, sequence: Sequence) -> None:
        sequence.status = Status.WAITING
        insort(self.waiting, sequence, key=_rank)

    def _remove(self, queue: list[Sequence], sequence: Sequence) -> None:
        at = bisect_left(queue, sequence.rank, key=_rank)
        if at == len(queue) or queue[at] is not sequence:
            raise RuntimeError(f"sequence {sequence.id} is not where its status says: {sequence.status.value}")
        del queue[at]

    def _view(self, s: Sequence) -> View:
        decoding = bool(s.output_ids) and s.computed == s.length - 1
        missing = self.paging.missing(s.table, s.computed, s.length)
        return View(s.id, s.length, s.computed, decoding, missing, self._grows(s), s.last_step)

    def _view_of_waiting(self, s: Sequence) -> View:
        hit = self.paging.match(s.table, s.length, s.tokens)
        taken = blocks_for(s.length, self.limits.block_size) - sum(not self.paging.pool.is_idle(block) for block in hit)
        return View(s.id, s.length, len(hit) * self.limits.block_size, False, taken, self._grows(s), s.last_step, s.overtaken)

    def _grows(self, s: Sequence) -> bool:
        return blocks_for(s.longest, self.limits.block_size) > blocks_for(s.length, self.limits.block_size)


def _rank(sequence: Sequence) -> tuple[int, int, int]:
    return sequence.rank
