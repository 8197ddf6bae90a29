"""What the engine counts: now, in the last step, and since it started. Frozen values that any thread may read."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from arctool.run.kv.paging import CacheUse
from arctool.run.sequence import FinishReason

STEP_SIZES = (1, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384)
"""Upper bounds of the classes that steps are counted in, in tokens; larger steps make one more class. vLLM's (`iteration_tokens`)."""


@dataclass(frozen=True)
class StepStats:
    """One step: sequences that lost their blocks, and tokens computed of prompts (or anew) and of texts under way."""

    preempted: int = 0
    prefill_tokens: int = 0
    decode_tokens: int = 0


@dataclass(frozen=True)
class Totals:
    """All steps. `prefix_queries`: prompt tokens of the requests that started; `prefix_hits`: those that the prefix cache had.

    `step_sizes`: steps by how many tokens they computed, in the classes of STEP_SIZES. `generated_tokens`: tokens that were chosen,
    end tokens included. `corrupted`: sequences that ended because a logit was not finite. `finished`: sequences that ended, by why.
    """

    steps: int = 0
    preempted: int = 0
    prefill_tokens: int = 0
    decode_tokens: int = 0
    prefix_queries: int = 0
    prefix_hits: int = 0
    step_sizes: tuple[int, ...] = (0,) * (len(STEP_SIZES) + 1)
    generated_tokens: int = 0
    corrupted: int = 0
    finished: Mapping[FinishReason, int] = field(default_factory=dict)

    def plus(self, step: StepStats) -> Totals:
        tokens = step.prefill_tokens + step.decode_tokens
        return replace(
            self,
            steps=self.steps + (tokens > 0),
            preempted=self.preempted + step.preempted,
            prefill_tokens=self.prefill_tokens + step.prefill_tokens,
            decode_tokens=self.decode_tokens + step.decode_tokens,
            step_sizes=_one_more(self.step_sizes, bisect_left(STEP_SIZES, tokens)) if tokens else self.step_sizes,
        )

    def queried(self, tokens: int, hits: int) -> Totals:
        return replace(self, prefix_queries=self.prefix_queries + tokens, prefix_hits=self.prefix_hits + hits)

    def sampled(self, tokens: int, corrupted: int) -> Totals:
        return replace(self, generated_tokens=self.generated_tokens + tokens, corrupted=self.corrupted + corrupted)

    def ended(self, reason: FinishReason) -> Totals:
        return replace(self, finished={**self.finished, reason: self.finished.get(reason, 0) + 1})


@dataclass(frozen=True)
class Telemetry:
    """Sequences that run and wait, the cache's blocks, the last step, all steps."""

    running: int
    waiting: int
    cache: CacheUse
    last_step: StepStats
    total: Totals


def _one_more(counts: tuple[int, ...], at: int) -> tuple[int, ...]:
    return (*counts[:at], counts[at] + 1, *counts[at + 1 :])
