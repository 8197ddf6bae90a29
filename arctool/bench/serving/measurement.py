"""From exchanges to a row of figures, by the definitions of `vllm bench serve`; or to the reason why there are none.

TTFT: from sending to the first text. E2EL: from sending to the end of the answer. TPOT: (E2EL − TTFT) / (tokens − 1), of answers with more
than one token. ITL: each gap between two chunks. Only answers that are measurements count (`exchange.objection`); what was cancelled on
purpose is counted apart, and its load stays in the duration and in the concurrency.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from arctool.bench.serving.exchange import Exchange, Outcome, generated, objection
from arctool.bench.serving.plan import Load, Plan

METRICS = {"ttft": "TTFT", "tpot": "TPOT", "itl": "ITL", "e2el": "E2EL"}
"""Short names as vLLM's JSON and its tables have them."""


@dataclass(frozen=True)
class Spread:
    """Milliseconds: mean, median, standard deviation (of the population), and (percentile, value)s."""

    mean: float
    median: float
    std: float
    percentiles: tuple[tuple[float, float], ...]


@dataclass(frozen=True)
class Figures:
    """What a row measured. Throughputs a second; `spreads` by metric, without those that nothing had; `goodput`: None where none was asked.

    `input_tokens`, `cached_tokens`: None where the server does not tell; `lengths`: shortest and longest prompt and answer, in tokens.
    """

    input_tokens: int | None
    output_tokens: int
    cached_tokens: int | None
    request_throughput: float
    output_throughput: float
    total_throughput: float | None
    goodput: float | None
    spreads: dict[str, Spread]
    tokens_a_chunk: float
    prompt_lengths: tuple[int, int] | None
    answer_lengths: tuple[int, int]


@dataclass(frozen=True)
class Row:
    """One load. Failed are also requests that were never sent, because the turn before them failed.

    `concurrency`: requests under way, mean over time; `peak`: most at once; `late`: mean seconds behind the open loop's time; `client`:
    share of one core that we took ourselves. `figures` or `failure`: one of them is None.
    """

    load: Load
    requests: int
    successful: int
    failed: int
    cancelled: int
    duration: float
    concurrency: float
    peak: int
    late: float
    client: float
    figures: Figures | None = None
    failure: str | None = None


def row_of(
    plan: Plan, load: Load, exchanges: Sequence[Exchange], *, late: float = 0.0, cpu: float = 0.0, failure: str | None = None
) -> Row:
    """The row of a load's exchanges. `cpu`: seconds of a core that the client took; `failure`: what went wrong before them."""
    outcomes = [exchange.outcome for exchange in exchanges]
    reasons = [objection(exchange, plan.count_chunks) for exchange in exchanges]
    good = [outcome for outcome, why in zip(outcomes, reasons, strict=True) if why is None and not outcome.cancelled]
    cancelled = sum(outcome.cancelled for outcome in outcomes)
    failed = plan.requests - len(good) - cancelled
    duration = max((one.ended for one in outcomes), default=0.0) - min((one.sent for one in outcomes), default=0.0)
    failure = failure or _why_failed(plan, len(good), failed, [why for why in reasons if why is not None])
    if failure is None and not duration > 0:
        failure = "no time passed"
    return Row(
        load=load,
        requests=plan.requests,
        successful=len(good),
        failed=failed,
        cancelled=cancelled,
        duration=duration,
        concurrency=sum(one.ended - one.sent for one in outcomes) / duration if duration > 0 else 0.0,
        peak=peak(outcomes),
        late=late,
        client=cpu / duration if duration > 0 else 0.0,
        figures=None if failure is not None else figures_of(plan, good, duration),
        failure=failure,
    )


def _why_failed(plan: Plan, good: int, failed: int, reasons: Sequence[str]) -> str | None:
    if failed > plan.max_failed * plan.requests:
        if not reasons:
            return f"{failed} of {plan.requests} requests were never answered"
        most, times = Counter(reasons).most_common(1)[0]
        return f"{failed} of {plan.requests} requests failed; {times} of them: {most}"
    return "no request succeeded" if good == 0 else None


def figures_of(plan: Plan, good: Sequence[Outcome], duration: float) -> Figures:
    """The figures of outcomes that are all measurements, at least one."""
    answers = [generated(one, plan.count_chunks) or 0 for one in good]
    prompts = [one.prompt_tokens for one in good if one.prompt_tokens is not None]
    cached = [one.cached_tokens for one in good if one.cached_tokens is not None]
    known = len(prompts) == len(good)
    of_each = [latencies(one, tokens) for one, tokens in zip(good, answers, strict=True)]
    gaps = [1e3 * gap for one in good for gap in one.gaps]
    values = {name: [one[name] for one in of_each if name in one] for name in ("ttft", "tpot", "e2el")} | {"itl": gaps}
    met = sum(all(one.get(name, 0.0) <= most for name, most in plan.goodput) for one in of_each)
    return Figures(
        input_tokens=sum(prompts) if known else None,
        output_tokens=sum(answers),
        cached_tokens=sum(cached) if cached else None,
        request_throughput=len(good) / duration,
        output_throughput=sum(answers) / duration,
        total_throughput=(sum(prompts) + sum(answers)) / duration if known else None,
        goodput=met / duration if plan.goodput else None,
        spreads={name: spread(values[name], plan.percentiles) for name in METRICS if values[name]},
        tokens_a_chunk=sum(answers) / max(1, sum(one.chunks for one in good)),
        prompt_lengths=(min(prompts), max(prompts)) if known else None,
        answer_lengths=(min(answers), max(answers)),
    )


def latencies(outcome: Outcome, tokens: int) -> dict[str, float]:
    """Milliseconds of one answer by metric; no TPOT for a single token."""
    assert outcome.first is not None
    assert outcome.last is not None
    first, whole = 1e3 * (outcome.first - outcome.sent), 1e3 * (outcome.last - outcome.sent)
    return {"ttft": first, "e2el": whole} | ({"tpot": (whole - first) / (tokens - 1)} if tokens > 1 else {})


def spread(values: Sequence[float], percentiles: Sequence[float]) -> Spread:
    """Of at least one value; percentiles between two values are interpolated, as numpy and vLLM do."""
    array = np.array(values)
    found = np.percentile(array, percentiles)
    places = tuple((one, float(value)) for one, value in zip(percentiles, found, strict=True))
    return Spread(float(array.mean()), float(np.median(array)), float(array.std()), places)


def peak(outcomes: Sequence[Outcome]) -> int:
    """Most requests under way at one instant; one that ends as another begins is over."""
    steps = sorted([(one.sent, 1) for one in outcomes] + [(one.ended, -1) for one in outcomes])
    most = now = 0
    for _, step in steps:
        now += step
        most = max(most, now)
    return most


def row_json(row: Row) -> dict[str, Any]:
    """A row under the names of vLLM's result files, and ours; null where there is no figure."""
    figures = row.figures
    found: dict[str, Any] = {
        "label": row.load.label,
        "max_concurrency": row.load.clients or row.load.cap,
        "request_rate": "inf" if row.load.rate == math.inf else row.load.rate,  # JSON has no infinity; vLLM writes it so
        "burstiness": row.load.burstiness if row.load.rate is not None else None,
        "failure": row.failure,
        "num_prompts": row.requests,
        "completed": row.successful,
        "failed": row.failed,
        "cancelled": row.cancelled,
        "duration": row.duration,
        "achieved_concurrency": row.concurrency,
        "max_concurrent_requests": row.peak,
        "mean_send_delay_ms": 1e3 * row.late,
        "client_cores": row.client,
        "total_input_tokens": None if figures is None else figures.input_tokens,
        "total_output_tokens": None if figures is None else figures.output_tokens,
        "cached_tokens": None if figures is None else figures.cached_tokens,
        "prompt_lengths": None if figures is None else figures.prompt_lengths,
        "answer_lengths": None if figures is None else figures.answer_lengths,
        "tokens_per_chunk": None if figures is None else figures.tokens_a_chunk,
        "request_throughput": None if figures is None else figures.request_throughput,
        "request_goodput": None if figures is None else figures.goodput,
        "output_throughput": None if figures is None else figures.output_throughput,
        "total_token_throughput": None if figures is None else figures.total_throughput,
    }
    for name, one in ({} if figures is None else figures.spreads).items():
        found |= {f"mean_{name}_ms": one.mean, f"median_{name}_ms": one.median, f"std_{name}_ms": one.std}
        found |= {f"p{place:g}_{name}_ms": value for place, value in one.percentiles}
    return found
