"""How fast a model answers on this machine, by the number of people asking at once: `arctool bench PATH`.

What is timed is the engine itself, step by step, sampling included: prompts of random tokens, all different in every round, so that no
prefix is ever found again. A number is earned: a row whose rounds did not bring exactly the tokens that were asked for, or did not engage
the model's kernels, says FAILED and why, and has no figures. Medians over interleaved rounds; quote ratios of one run.
"""

from __future__ import annotations

import os
import statistics
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import llvmlite.binding as llvm
import numba
import numpy as np

from arctool.errors import ArctoolError, UsageError
from arctool.kernels.registry import ATTENTION
from arctool.run.llm import LLM
from arctool.run.sampling.params import SamplingParams
from arctool.run.sequence import FinishReason
from arctool.run.telemetry import Totals

BATCHES = (1, 2, 4, 8, 16, 32, 64)
PROMPT_TOKENS = 128
NEW_TOKENS = 32
ROUNDS = 3
WARM_UP = 8
"""Tokens of the request that compiles what is not in the cache yet, and touches every weight."""

Progress = Callable[[int, int], None]
"""Called as (rounds of a batch size done, all)."""


@dataclass(frozen=True)
class Plan:
    """What to measure: sequences at once, tokens of each prompt, tokens that each generates, rounds."""

    batches: tuple[int, ...] = BATCHES
    prompt_tokens: int = PROMPT_TOKENS
    new_tokens: int = NEW_TOKENS
    rounds: int = ROUNDS

    def __post_init__(self) -> None:
        if not self.batches or min(self.batches) < 1:
            raise UsageError(f"--batches: expected sizes of at least 1, found {list(self.batches)}")
        for name, least in (("prompt_tokens", 1), ("new_tokens", 2), ("rounds", 1)):
            if getattr(self, name) < least:
                raise UsageError(f"--{name.replace('_', '-')}: expected at least {least}, found {getattr(self, name)}")


@dataclass(frozen=True)
class Round:
    """One batch served once. Seconds of the steps up to the last first token, and of the steps after that.

    `prompt_tokens`: that the engine computed; `decoded`: tokens that the latter steps brought, in `decode_steps`; `lengths`: how many each
    sequence got that ended as it should; `preempted`, `prefix_hits`: what must not happen here; `engaged`: calls of each kernel.
    """

    prefill_seconds: float
    prompt_tokens: int
    decode_seconds: float
    decoded: int
    decode_steps: int
    lengths: tuple[int, ...]
    preempted: int
    prefix_hits: int
    engaged: Counter[str]


@dataclass(frozen=True)
class Row:
    """One batch size: tokens a second of all sequences together, medians; or why there is no such number."""

    batch: int
    prefill: float | None = None
    decode: float | None = None
    step_ms: float | None = None
    failure: str | None = None


@dataclass(frozen=True)
class Conditions:
    """Where and with what a measurement ran. `load`: of the machine, before and after; it has `cores`."""

    processor: str
    threads: int
    cores: int
    load: tuple[float, float]


@dataclass(frozen=True)
class Throughput:
    """A measurement. `engaged`: calls of each kernel over all timed rounds."""

    model: str
    plan: Plan
    conditions: Conditions
    rows: tuple[Row, ...]
    engaged: dict[str, int]

    @property
    def failed(self) -> bool:
        return any(row.failure is not None for row in self.rows)

    def to_json(self) -> dict[str, Any]:
        """docs/engine.md says what the fields mean."""
        return asdict(self) | {"failed": self.failed}


def measure(llm: LLM, name: str, plan: Plan, progress: Progress | None = None) -> Throughput:
    """Measure a loaded model. Raises UsageError for a plan that the engine cannot hold."""
    limits = llm.engine.scheduler.limits
    if max(plan.batches) > limits.max_seqs:
        raise UsageError(f"--batches: {max(plan.batches)} sequences at once, but the engine was opened for {limits.max_seqs}")
    if plan.prompt_tokens + plan.new_tokens > llm.engine.max_model_len:
        raise UsageError(
            f"--prompt-tokens: {plan.prompt_tokens} + {plan.new_tokens} new ones exceed the context of {llm.engine.max_model_len}"
        )
    random = np.random.default_rng()  # no seed: a second measurement of the same engine must not meet the first one's prompts
    load = os.getloadavg()[0]
    serve(llm, [_prompt(llm, random, WARM_UP)] * min(2, limits.max_seqs), 2)
    found: dict[int, list[Round]] = {batch: [] for batch in plan.batches}
    failures: dict[int, str] = {}
    total, done = plan.rounds * len(plan.batches), 0
    for _ in range(plan.rounds):
        for batch in plan.batches:
            prompts = [_prompt(llm, random, plan.prompt_tokens) for _ in range(batch)]
            try:
                found[batch].append(serve(llm, prompts, plan.new_tokens))
            except ArctoolError as error:
                failures.setdefault(batch, str(error))
            done += 1
            if progress is not None:
                progress(done, total)
    rows = tuple(row_of(batch, found[batch], plan, failures.get(batch)) for batch in plan.batches)
    conditions = Conditions(llvm.get_host_cpu_name(), numba.get_num_threads(), os.cpu_count() or 1, (load, os.getloadavg()[0]))
    engaged = sum((one.engaged for rounds in found.values() for one in rounds), Counter())
    return Throughput(name, plan, conditions, rows, dict(sorted(engaged.items())))


def serve(llm: LLM, prompts: Sequence[Sequence[int]], new_tokens: int) -> Round:
    """Serve the prompts together, greedily, every one to its `new_tokens`; what it took."""
    engine = llm.engine
    before, totals = Counter(llm.registry.engagement()), engine.telemetry().total
    params = SamplingParams(temperature=0, max_tokens=new_tokens, ignore_eos=True)
    ids: list[int] = []
    try:
        for prompt in prompts:
            ids.append(engine.add_request(prompt, params))
        return _timed(llm, set(ids), before, totals)
    finally:
        for request in ids:
            engine.cancel(request)


def _timed(llm: LLM, waiting: set[int], before: Counter[str], totals: Totals) -> Round:
    """Step until everything is done. `before`, `totals`: what was counted until now."""
    engine = llm.engine
    prefill = decode = 0.0
    decoded = steps = 0
    lengths: list[int] = []
    while engine.has_work():
        began = time.perf_counter()
        updates = engine.step()
        took = time.perf_counter() - began
        tokens = sum(len(update.token_ids) for update in updates)
        endings = [update.completion for update in updates if update.completion is not None]
        lengths += [len(one.token_ids) for one in endings if one.finish_reason is FinishReason.LENGTH]
        if waiting:
            prefill += took
            waiting -= {update.request_id for update in updates}
        else:
            decode, decoded, steps = decode + took, decoded + tokens, steps + 1
    engaged = Counter(llm.registry.engagement())
    engaged.subtract(before)
    now = engine.telemetry().total
    hits, preempted = now.prefix_hits - totals.prefix_hits, now.preempted - totals.preempted
    computed = now.prefill_tokens - totals.prefill_tokens
    return Round(prefill, computed, decode, decoded, steps, tuple(lengths), preempted, hits, +engaged)


def row_of(batch: int, rounds: Sequence[Round], plan: Plan, failure: str | None = None) -> Row:
    """The medians of a batch size, if every round of it was what it claims to be."""
    reason = failure or next((why for one in rounds if (why := objection(one, batch, plan)) is not None), None)
    if reason is None and not rounds:
        reason = "no round was run"
    if reason is not None:
        return Row(batch, failure=reason)
    return Row(
        batch,
        prefill=statistics.median(one.prompt_tokens / one.prefill_seconds for one in rounds),
        decode=statistics.median(one.decoded / one.decode_seconds for one in rounds),
        step_ms=1e3 * statistics.median(one.decode_seconds / one.decode_steps for one in rounds),
    )


def objection(found: Round, batch: int, plan: Plan) -> str | None:
    """Why a round is no measurement, None if it is one."""
    if found.prompt_tokens != batch * plan.prompt_tokens:
        return f"{found.prompt_tokens} prompt tokens where {batch * plan.prompt_tokens} were asked for"
    if found.lengths != (plan.new_tokens,) * batch:
        right = sum(length == plan.new_tokens for length in found.lengths)
        return f"{right} of {batch} sequences brought the {plan.new_tokens} tokens that were asked for"
    if found.preempted or found.prefix_hits:
        return f"{found.preempted} preemptions and {found.prefix_hits} cached tokens: give the cache more memory (--kv-memory)"
    if not (found.prefill_seconds > 0 and found.decode_seconds > 0 and found.decoded > 0):
        return "no time passed"
    if not found.engaged[ATTENTION]:
        return "the attention kernel was never engaged"
    return None


def _prompt(llm: LLM, random: np.random.Generator, tokens: int) -> list[int]:
    return [int(token) for token in random.integers(0, llm.config.vocab_size, tokens)]
