"""One sample of a request on its way through the engine: its tokens, what of them is in the cache, and how it ended."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum

from arctool.run.kv.blocks import BlockTable
from arctool.run.sampling.params import SamplingParams
from arctool.run.sampling.sampler import TokenLogprobs
from arctool.run.sampling.state import RowState


class Status(Enum):
    """PENDING: not in the scheduler yet, because a sibling computes the prompt that they share."""

    PENDING = "pending"
    WAITING = "waiting"
    RUNNING = "running"
    FINISHED = "finished"


class FinishReason(Enum):
    """Why a request ended: an end token or stop string; max_tokens or the context; cancelled; failed."""

    STOP = "stop"
    LENGTH = "length"
    ABORT = "abort"
    ERROR = "error"


@dataclass(eq=False)
class Sequence:
    """The state of one sample. Everything that belongs to a row lives here, so that it moves with the row.

    `max_tokens` and `seed` are resolved (params may leave them open). `index`: which of its request's samples it is.
    `state`: what the sampler remembers of it. `computed`: how many of its tokens are in the cache. `hit`: how many tokens of its
    prompt the prefix cache had when it first started.

    The scheduler's: `arrival` counts up by request; `last_step`: when it last advanced; `preemptions`: how often it lost its blocks;
    `overtaken`: by how many that came later, because it did not fit.
    """

    id: int
    prompt_ids: tuple[int, ...]
    params: SamplingParams
    max_tokens: int
    seed: int
    table: BlockTable
    index: int = 0
    output_ids: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    state: RowState = field(default_factory=RowState)
    computed: int = 0
    hit: int = 0
    status: Status = Status.PENDING
    finish_reason: FinishReason | None = None
    error: str | None = None
    arrival: int = -1
    last_step: int = -1
    preemptions: int = 0
    overtaken: int = 0

    @property
    def length(self) -> int:
        """Tokens known so far: the prompt and what was generated."""
        return len(self.prompt_ids) + len(self.output_ids)

    @property
    def longest(self) -> int:
        """Tokens that it may come to have."""
        return len(self.prompt_ids) + self.max_tokens

    @property
    def rank(self) -> tuple[int, int, int]:
        """Who goes first: lower priority number, then earlier arrival, then earlier sample."""
        return self.params.priority, self.arrival, self.index

    def tokens(self, first: int, last: int) -> list[int]:
        """Its tokens at positions [first, last)."""
        split = len(self.prompt_ids)
        return [*self.prompt_ids[first : min(last, split)], *self.output_ids[max(first - split, 0) : max(last - split, 0)]]
