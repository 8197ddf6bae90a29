"""Who computes what in the next step. `plan` is a pure function of plain values; `Scheduler` keeps the queues and carries a plan out.

Rules. First come, first served. Every sequence that decodes gets its token in every step, and at least one prompt advances by a
chunk whenever one is waiting and has room, so neither side starves. A prompt is cut at multiples of `prefill_chunk` of its own
positions and a chunk runs whole or not at all, so the cuts never depend on the load. A sequence is admitted only if the blocks
that it may come to need are free after those that the running ones may come to need: nobody is ever preempted.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from collections.abc import Sequence as Ordered
from dataclasses import dataclass

from arctool.errors import RequestError, UsageError
from arctool.run.kv.blocks import BlockAllocator, blocks_for
from arctool.run.sequence import FinishReason, Sequence, Status


@dataclass(frozen=True)
class Limits:
    """`max_seqs` run at once; `max_tokens` in one step; `prefill_chunk` tokens of a prompt at a time; the rest is the cache's."""

    max_seqs: int
    max_tokens: int
    prefill_chunk: int
    block_size: int
    num_blocks: int
    max_model_len: int

    def __post_init__(self) -> None:
        for name in ("max_seqs", "prefill_chunk"):
            if getattr(self, name) < 1:
                raise UsageError(f"{name}: expected at least 1, found {getattr(self, name)}")
        if self.max_tokens < self.max_seqs + self.prefill_chunk:
            least = self.max_seqs + self.prefill_chunk
            raise UsageError(f"max_tokens: expected max_seqs + prefill_chunk = {least} or more, found {self.max_tokens}")


@dataclass(frozen=True)
class View:
    """All that planning may know of a sequence, in tokens; `held` in blocks."""

    id: int
    prompt: int
    length: int
    computed: int
    longest: int
    held: int


@dataclass(frozen=True)
class Work:
    """Compute the tokens at [first, last) of sequence `id`; `emits`: the logits of the last one choose its next token."""

    id: int
    first: int
    last: int
    prompt: bool
    emits: bool

    @property
    def tokens(self) -> int:
        return self.last - self.first


@dataclass(frozen=True)
class StepPlan:
    """One step: who starts running, and the work, prefill class first."""

    admitted: tuple[int, ...]
    work: tuple[Work, ...]


def plan(running: Ordered[View], waiting: Ordered[View], free_blocks: int, limits: Limits) -> StepPlan:
    """Plan the next step. `running` and `waiting` are in order of arrival. An empty plan means that nobody has work."""
    current = [_next_work(view, limits) for view in running]
    decodes = [work for work in current if not work.prompt]
    budget = limits.max_tokens - sum(work.tokens for work in decodes)
    prefills: list[Work] = []
    for work in current:
        if work.prompt and work.tokens <= budget:
            prefills.append(work)
            budget -= work.tokens
    admitted: list[int] = []
    unreserved = free_blocks - sum(_to_come(view, limits) for view in running)
    for view in waiting:
        work, need = _next_work(view, limits), _to_come(view, limits)
        if len(running) + len(admitted) == limits.max_seqs or need > unreserved or work.tokens > budget:
            break
        prefills.append(work)
        admitted.append(view.id)
        budget, unreserved = budget - work.tokens, unreserved - need
    return StepPlan(tuple(admitted), (*prefills, *decodes))


def _next_work(view: View, limits: Limits) -> Work:
    """The next piece of one sequence: a prompt's chunk, or what follows the prompt, in the class of its own history."""
    if view.computed < view.prompt:
        cut = (view.computed // limits.prefill_chunk + 1) * limits.prefill_chunk
        last, prompt = min(view.prompt, cut), True
    else:
        last, prompt = view.length, False
    return Work(view.id, view.computed, last, prompt, emits=last == view.length)


def _to_come(view: View, limits: Limits) -> int:
    """Blocks that a sequence may still come to need."""
    return blocks_for(view.longest, limits.block_size) - view.held


class Scheduler:
    """The queues and the blocks. `schedule` plans a step and takes its blocks; `finish` gives a sequence's blocks back."""

    def __init__(self, limits: Limits) -> None:
        self.limits = limits
        self.allocator = BlockAllocator(limits.num_blocks)
        self.waiting: deque[Sequence] = deque()
        self.running: list[Sequence] = []

    def add(self, sequence: Sequence) -> None:
        """Queue a sequence. Raises RequestError for one that could never run."""
        need = blocks_for(sequence.longest, self.limits.block_size)
        if sequence.longest > self.limits.max_model_len or need > self.limits.num_blocks:
            raise RequestError(
                f"max_tokens: {len(sequence.prompt_ids)} prompt tokens + {sequence.max_tokens} new ones exceed "
                f"the context of {self.limits.max_model_len} tokens; ask for fewer"
            )
        self.waiting.append(sequence)

    def schedule(self) -> list[tuple[Sequence, Work]]:
        """Plan the next step, start the admitted sequences and make room for the step's tokens. Empty if there is no work."""
        step = plan([_view(s) for s in self.running], [_view(s) for s in self.waiting], self.allocator.free_blocks, self.limits)
        for _ in step.admitted:
            sequence = self.waiting.popleft()
            sequence.status = Status.RUNNING
            self.running.append(sequence)
        by_id = {s.id: s for s in self.running}
        work = [(by_id[w.id], w) for w in step.work]
        for sequence, w in work:
            sequence.table.grow(w.last, self.allocator)
        return work

    def finish(self, sequence: Sequence, reason: FinishReason, error: str | None = None) -> None:
        """Take a sequence out, whatever its status, and free its blocks. A second call changes nothing."""
        if sequence.status is Status.FINISHED:
            return
        (self.running if sequence.status is Status.RUNNING else self.waiting).remove(sequence)
        sequence.status, sequence.finish_reason, sequence.error = Status.FINISHED, reason, error
        sequence.table.release(self.allocator)

    def live(self) -> Iterable[Sequence]:
        """Every sequence that has not finished."""
        return (*self.running, *self.waiting)

    def check(self) -> None:
        """Raise RuntimeError unless blocks and tables agree."""
        self.allocator.check(s.table for s in self.live())


def _view(s: Sequence) -> View:
    return View(s.id, len(s.prompt_ids), s.length, s.computed, s.longest, len(s.table.blocks))
