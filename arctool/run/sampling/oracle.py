"""The definition of the sampler: one row at a time in plain numpy, slow and obvious. The kernel is tested against it; nothing else uses it.

Order of operations (it changes tokens, so it is part of the interface): log-probabilities, of the raw logits; mask of the constraint and
tokens that min_tokens bans; logit bias; repetition penalty; presence and frequency penalties; temperature; top-k; typical; top-p; min-p;
draw. Arithmetic is f64. Among equals the lower token id comes first, in every step. Each filter sees the probabilities of what the one
before it left. The draw inverts the cumulative distribution over the survivors: best first where top-k, typical or top-p is on, else by id.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from arctool.run.sampling.noise import uniform
from arctool.run.sampling.params import SamplingParams

Tokens = NDArray[np.int64]
Reals = NDArray[np.float64]


def choose(logits: NDArray[np.float32], params: SamplingParams, seed: int, position: int, **changes: object) -> int | None:
    """The token of one row, f32 [vocab] and finite; None if none is left. `changes`: as `adjusted` takes them."""
    changed = adjusted(logits, params, **changes)  # type: ignore[arg-type]
    if changed.max() == -np.inf:
        return None
    return int(changed.argmax()) if params.greedy else draw(*candidates(changed, params), uniform(seed, position))


def adjusted(
    logits: NDArray[np.float32],
    params: SamplingParams,
    *,
    prompt: tuple[int, ...] = (),
    output: tuple[int, ...] = (),
    banned: tuple[int, ...] = (),
    allowed: NDArray[np.bool_] | None = None,
) -> Reals:
    """Logits as f64 after mask, bans, bias and penalties. allowed: [vocab]; prompt, output: the row's earlier tokens."""
    changed = logits.astype(np.float64)
    if allowed is not None:
        changed[~allowed] = -np.inf
    changed[list(banned)] = -np.inf
    for token, addition in zip(*params.bias, strict=True):
        changed[token] += addition
    for token in {*prompt, *output}:
        if changed[token] > 0:
            with np.errstate(over="ignore"):
                changed[token] = min(changed[token] / params.repetition_penalty, 1e300)  # a logit stays finite
        else:
            changed[token] *= params.repetition_penalty
    for token in set(output):
        changed[token] -= params.presence_penalty + params.frequency_penalty * output.count(token)
    return changed


def candidates(logits: NDArray[np.floating], params: SamplingParams) -> tuple[Tokens, Reals]:
    """The tokens that survive the filters and their probabilities f64, normalised, in the order of the draw. logits: after `adjusted`."""
    with np.errstate(over="ignore"):  # a temperature near 0 sends all but the best to −inf, which is right
        scaled = (logits.astype(np.float64) - float(logits.max())) / params.temperature
    ids = np.flatnonzero(logits > -np.inf)
    best_first = False
    if 0 < params.top_k < logits.size:
        ids, best_first = _sorted(ids, -scaled)[: params.top_k], True
    if params.typical_p < 1.0:
        ids, best_first = np.sort(ids), True
        surprise = -scaled[ids]  # −log p, but for a constant that the difference below takes out again
        p = _normalised(scaled[ids])
        entropy = float((p[p > 0] * surprise[p > 0]).sum())
        ids = _sorted(_reaching(ids, np.abs(surprise - entropy), scaled, params.typical_p), -scaled)
    if params.top_p < 1.0:
        ids, best_first = _reaching(np.sort(ids), -scaled[np.sort(ids)], scaled, params.top_p), True
    if params.min_p > 0.0:
        ids = ids[scaled[ids] - scaled[ids].max() >= np.log(params.min_p)]  # p ≥ min_p · p of the best survivor, in logs
    if not best_first:
        ids = np.sort(ids)
    return ids, _normalised(scaled[ids])


def _sorted(ids: Tokens, costs: Reals) -> Tokens:
    """`ids` by their costs [vocab], the least first."""
    ids = np.sort(ids)
    return ids[np.argsort(costs[ids], kind="stable")]


def _reaching(ids: Tokens, costs: Reals, scaled: Reals, mass: float) -> Tokens:
    """The first of `ids` by `costs` (one each, [ids]) that together reach `mass`: all before which less than that was collected."""
    ids = ids[np.argsort(costs, kind="stable")]
    cumulative = np.cumsum(np.exp(scaled[ids]))
    return ids[: int(np.searchsorted(cumulative, mass * cumulative[-1], side="left")) + 1]


def _normalised(scaled: Reals) -> Reals:
    weights = np.exp(scaled - scaled.max())
    return np.asarray(weights / weights.sum())


def draw(ids: Tokens, probabilities: Reals, u: float) -> int:
    """Invert the cumulative distribution at u in [0, 1)."""
    cumulative = np.cumsum(probabilities)
    index = int(np.searchsorted(cumulative, u * cumulative[-1], side="right"))
    return int(ids[min(index, ids.size - 1)])


def logprobs(logits: NDArray[np.float32], token: int, top: int) -> tuple[float, tuple[tuple[int, float], ...]]:
    """Log-softmax in f64 of the chosen token and of the `top` best ones."""
    shifted = logits.astype(np.float64) - float(logits.max())
    log_total = float(np.log(np.exp(shifted).sum()))
    best = np.argsort(-shifted, kind="stable")[:top]
    return float(shifted[token]) - log_total, tuple((int(i), float(shifted[i]) - log_total) for i in best)
