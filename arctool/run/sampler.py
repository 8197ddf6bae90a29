"""From logits to tokens. Every row is sampled by itself: its token depends on its logits, its parameters, its seed and its
position, on nothing else. The sampler knows neither sequences nor text.

Order of operations (it changes tokens, so it is part of the interface): temperature, top-k, top-p, min-p, draw. Arithmetic is
f64. Among equal logits the lower token id comes first, in every step.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from arctool.run.sampling_params import SamplingParams

# Streams of random numbers under one seed. A drafter of speculative tokens will need its own, disjoint from this one.
DRAW_STREAM = 0


@dataclass(frozen=True)
class SampleRow:
    """What the sampler must know about one row of logits. `position`: index in its sequence of the token that is drawn."""

    params: SamplingParams
    seed: int
    position: int


@dataclass(frozen=True)
class TokenLogprobs:
    """Log-probabilities before temperature and filters: of the chosen token, and of the best alternatives, best first."""

    token: float
    top: tuple[tuple[int, float], ...]


@dataclass(frozen=True)
class Sampled:
    """One row's result: a token, or why there is none."""

    token: int | None
    logprobs: TokenLogprobs | None = None
    error: str | None = None


def sample(logits: NDArray[np.float32], rows: Sequence[SampleRow]) -> list[Sampled]:
    """logits: f32 [rows, vocab] → one result per row. A row with a NaN or an infinity fails, alone."""
    finite = np.asarray(np.isfinite(logits).all(axis=-1))
    best = np.asarray(logits.argmax(axis=-1))
    return [_sample_row(logits[i], row, int(best[i]), bool(finite[i])) for i, row in enumerate(rows)]


def _sample_row(logits: NDArray[np.float32], row: SampleRow, best: int, finite: bool) -> Sampled:
    if not finite:
        bad = int(np.flatnonzero(~np.isfinite(logits))[0])
        return Sampled(None, error=f"the model gave a logit that is not finite (token {bad} at position {row.position})")
    params = row.params
    token = best if params.greedy else draw(*candidates(logits, params), uniform(row.seed, row.position))
    return Sampled(token, None if params.logprobs is None else token_logprobs(logits, token, params.logprobs))


def candidates(logits: NDArray[np.float32], params: SamplingParams) -> tuple[NDArray[np.int64], NDArray[np.float64]]:
    """The tokens that survive the filters and their probabilities f64, normalised; best first if top-k or top-p is on."""
    with np.errstate(over="ignore"):  # a temperature near 0 sends all but the best to −inf, which is right
        scaled = (logits.astype(np.float64) - float(logits.max())) / params.temperature
    ids = np.arange(scaled.size)
    if 0 < params.top_k < ids.size:
        # Ties at the boundary survive the cut by value; the stable sort below keeps the lower ids.
        boundary = np.partition(scaled, ids.size - params.top_k)[ids.size - params.top_k]
        ids = np.flatnonzero(scaled >= boundary)
        ids = ids[np.argsort(-scaled[ids], kind="stable")][: params.top_k]
    if params.top_p < 1.0:
        ids = ids[np.argsort(-scaled[ids], kind="stable")]
        cumulative = np.cumsum(_normalised(scaled[ids]))
        # The smallest set that reaches top_p: every token before which less than top_p has been collected.
        ids = ids[: int(np.searchsorted(cumulative, params.top_p, side="left")) + 1]
    if params.min_p > 0.0:
        # p ≥ min_p · p_best, in logs; the best token has scaled logit 0.
        ids = ids[scaled[ids] >= np.log(params.min_p)]
    return ids, _normalised(scaled[ids])


def _normalised(scaled: NDArray[np.float64]) -> NDArray[np.float64]:
    weights = np.exp(scaled)
    return np.asarray(weights / weights.sum())


def draw(ids: NDArray[np.int64], probabilities: NDArray[np.float64], u: float) -> int:
    """Invert the cumulative distribution at u in [0, 1)."""
    cumulative = np.cumsum(probabilities)
    index = int(np.searchsorted(cumulative, u * cumulative[-1], side="right"))
    return int(ids[min(index, ids.size - 1)])


def uniform(seed: int, position: int, stream: int = DRAW_STREAM) -> float:
    """A number in [0, 1) that depends on its arguments only: Philox-4x64 (Salmon et al. 2011) at counter `position`."""
    key = np.array([seed % (1 << 64), stream], np.uint64)
    counter = np.array([position, 0, 0, 0], np.uint64)
    bits = int(np.random.Philox(key=key, counter=counter).random_raw())
    return (bits >> 11) * 2.0**-53


def token_logprobs(logits: NDArray[np.float32], token: int, top: int) -> TokenLogprobs:
    """Log-softmax in f64 of the chosen token and of the `top` best ones."""
    shifted = logits.astype(np.float64) - float(logits.max())
    log_total = float(np.log(np.exp(shifted).sum()))
    count = min(top, shifted.size)
    best = np.argsort(-shifted, kind="stable")[:count] if count else np.empty(0, np.int64)
    return TokenLogprobs(float(shifted[token]) - log_total, tuple((int(i), float(shifted[i]) - log_total) for i in best))
