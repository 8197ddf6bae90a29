"""One request on its way through the engine: its tokens, what of them is in the cache, and how it ended."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum

from arctool.run.kv.blocks import BlockTable
from arctool.run.sampling.params import SamplingParams
from arctool.run.sampling.sampler import TokenLogprobs
from arctool.run.sampling.state import RowState


class Status(Enum):
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
    """The state of one request. Everything that belongs to a row lives here, so that it moves with the row.

    `max_tokens` and `seed` are resolved (params may leave them open). `state`: what the sampler remembers of it.
    `computed`: how many of its tokens are in the cache.
    """

    id: int
    prompt_ids: tuple[int, ...]
    params: SamplingParams
    max_tokens: int
    seed: int
    table: BlockTable
    output_ids: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    state: RowState = field(default_factory=RowState)
    computed: int = 0
    status: Status = Status.WAITING
    finish_reason: FinishReason | None = None
    error: str | None = None

    @property
    def length(self) -> int:
        """Tokens known so far: the prompt and what was generated."""
        return len(self.prompt_ids) + len(self.output_ids)

    @property
    def longest(self) -> int:
        """Tokens that it may come to have."""
        return len(self.prompt_ids) + self.max_tokens

    def tokens(self, first: int, last: int) -> list[int]:
        """Its tokens at positions [first, last)."""
        split = len(self.prompt_ids)
        return [*self.prompt_ids[first : min(last, split)], *self.output_ids[max(first - split, 0) : max(last - split, 0)]]
