"""What the engine counts: now, in the last step, and since it started. Frozen values that any thread may read."""

from __future__ import annotations

from dataclasses import dataclass, replace

from arctool.run.kv.paging import CacheUse


@dataclass(frozen=True)
class StepStats:
    """One step: sequences that lost their blocks, and tokens computed of prompts (or anew) and of texts under way."""

    preempted: int = 0
    prefill_tokens: int = 0
    decode_tokens: int = 0


@dataclass(frozen=True)
class Totals:
    """All steps. `prefix_queries`: prompt tokens of the requests that started; `prefix_hits`: those that the prefix cache had."""

    steps: int = 0
    preempted: int = 0
    prefill_tokens: int = 0
    decode_tokens: int = 0
    prefix_queries: int = 0
    prefix_hits: int = 0

    def plus(self, step: StepStats) -> Totals:
        return replace(
            self,
            steps=self.steps + (step.prefill_tokens + step.decode_tokens > 0),
            preempted=self.preempted + step.preempted,
            prefill_tokens=self.prefill_tokens + step.prefill_tokens,
            decode_tokens=self.decode_tokens + step.decode_tokens,
        )

    def queried(self, tokens: int, hits: int) -> Totals:
        return replace(self, prefix_queries=self.prefix_queries + tokens, prefix_hits=self.prefix_hits + hits)


@dataclass(frozen=True)
class Telemetry:
    """Sequences that run and wait, the cache's blocks, the last step, all steps."""

    running: int
    waiting: int
    cache: CacheUse
    last_step: StepStats
    total: Totals
