"""Finding the codes of K-quants: least squared error of a super-block of 256 weights, by a search that ends where no small step helps.

A super-block is w ≈ d·sc·q (− dmin·m): bounded integers q a weight, sc (and m) a sub-block, f16 d (and dmin) for all. Three stages:

1. *Fit* every sub-block alone with a real step (and offset): some ranges are tried, each is rounded and refitted by least squares.
2. *Settle* the fits on the integers of a super-block, for some values of d and dmin, and keep the best.
3. *Improve*: move each sub-block's integers to their neighbours, refit d and dmin by least squares, and take only what is better.

A plain rounding whose error is bounded is compared last, so that what is stored keeps its bound: the `worst_error` of the types. All is
f32, elementwise or a sum of fixed order, so a block's bytes do not depend on its neighbours. Weights lie as x [weights of a sub-block,
sub-blocks, blocks], so that numpy's inner loops are long. The search is our own: ggml's weighs large values more and fixes d by the
largest scale.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, fields

import numpy as np
from numpy.typing import NDArray

from arctool.quant.ggml.k_quants import SUPER, Codes

F32 = NDArray[np.float32]
U8 = NDArray[np.uint8]

BLOCKS = 128
"""Super-blocks that are searched at a time: 128 KB of weights, so that the dozens of passes over them stay in a second-level cache."""

ONE = np.float32(1)
LEAST = np.float32(2**-24)
"""The least f16 above zero, and the distance of neighbours below `NORMAL`."""

NORMAL = np.float32(2**-14)
"""The least f16 of full precision."""


@dataclass(frozen=True)
class Form:
    """The integers of a type: codes `low` … `high`, `sub` weights a sub-block, scales `scale_low` … `scale_high`, stored less `scale_base`,
    minima 0 … `minimum_high` (0: the type has none).

    `trims`: what stage 1 tries. With minima: shares of a step by which the range is cut at either end, in all pairs. Without: what is
    added to the codes' range, with either sign of the step. `shrinks`: factors of d that stage 2 tries. `rounds`: of stage 3.
    """

    sub: int
    low: int
    high: int
    scale_low: int
    scale_high: int
    scale_base: int
    minimum_high: int
    trims: tuple[float, ...]
    shrinks: tuple[float, ...]
    rounds: int


@dataclass
class State:
    """Super-blocks as integers, all f32: d, dmin [blocks] (values of f16), scales, minima [sub-blocks, blocks], codes [sub, sub-blocks,
    blocks]; error [sub-blocks, blocks] is the squared distance from the weights."""

    d: F32
    dmin: F32
    scales: F32
    minima: F32
    codes: F32
    error: F32


def search(weights: F32, form: Form) -> Codes:
    """The codes of f32 [blocks, 256]. A d or dmin that f16 cannot hold becomes ±inf."""
    found = [_search_some(weights[start : start + BLOCKS], form) for start in range(0, len(weights), BLOCKS)]
    return Codes(*(np.concatenate([getattr(part, field.name) for part in found]) for field in fields(Codes)))


@np.errstate(all="ignore")  # a trial that overflows compares as no better
def _search_some(weights: F32, form: Form) -> Codes:
    count = len(weights)
    exponent = np.clip(np.frexp(np.abs(weights).max(axis=1))[1], -100, 126)
    grid = Grid(form, np.ldexp(ONE, -exponent), np.ldexp(ONE, exponent))
    x = np.ascontiguousarray((weights * grid.down[:, None]).reshape(count, -1, form.sub).transpose(2, 1, 0))
    sign = orientation(x, form)
    mirrored = x * sign
    best = settle(mirrored, *fit(mirrored, form), grid)
    for _ in range(form.rounds):
        best = improve(mirrored, best, grid)
    best.d, best.dmin = best.d * sign, best.dmin * sign
    return grid.codes(better(plain(x, grid), best))


@dataclass(frozen=True)
class Grid:
    """The integers, and the f16 numbers as the search sees them: a block's weights are multiplied by the power of two `down` f32 [blocks],
    exactly, so that their squares neither vanish nor overflow; `up` undoes it."""

    form: Form
    down: F32
    up: F32

    def half(self, factor: F32) -> F32:
        """The f16 nearest to factor · up, times `down`: not zero unless `factor` is, since a multiple of the least f16 may still do;
        `factor` itself where it is beyond f16."""
        wide = factor * self.up
        stored = wide.astype(np.float16).astype(np.float32)
        stored = np.where((stored == 0) & (wide != 0), np.copysign(LEAST, wide), stored) * self.down
        return np.where(np.isfinite(stored), stored, factor)

    def state(self, x: F32, d: F32, dmin: F32, scales: F32, minima: F32) -> State:
        """The nearest codes for given integers and factors, and what they cost."""
        step, offset = d * scales, dmin * minima
        codes = nearest(x, step, offset, self.form)
        return State(d, dmin, scales, minima, codes, distance(x, codes, step, offset))

    def codes(self, state: State) -> Codes:
        """The integers as they lie on the wire; a factor of which no multiple is used is zero."""
        form, blocks = self.form, state.d.shape[0]
        used = ((state.d, state.scales), (state.dmin, state.minima))[: 2 if form.minimum_high else 1]
        halves = [np.where(integers.any(axis=0), factor * self.up, 0).astype("<f2") for factor, integers in used]
        scales = np.ascontiguousarray(state.scales.T).astype(np.int16)  # of q6k they are signed, and wrap
        minima = np.ascontiguousarray(state.minima.T if form.minimum_high else state.minima[:0].T)
        codes = state.codes.transpose(2, 1, 0).reshape(blocks, SUPER) - np.float32(form.low)
        return Codes(np.stack(halves, axis=1), codes.astype(np.uint8), (scales - form.scale_base).astype(np.uint8), minima.astype(np.uint8))


def total(values: F32) -> F32:
    """Sum over the first axis, whose length is a power of two, by halving: one order for any number of blocks."""
    while len(values) > 1:
        half = len(values) // 2
        values = values[:half] + values[half:]
    return values[0]


def inverse(values: F32) -> F32:
    """1/values, zero where that is not finite."""
    found = ONE / values
    found[~np.isfinite(found)] = 0
    return found


def nearest(x: F32, step: F32, offset: F32, form: Form) -> F32:
    """The codes q that bring step·q − offset nearest to x."""
    codes = x + offset
    codes *= inverse(step)
    np.rint(codes, out=codes)
    np.maximum(codes, np.float32(form.low), out=codes)
    return np.minimum(codes, np.float32(form.high), out=codes)


def distance(x: F32, codes: F32, step: F32, offset: F32) -> F32:
    """Σ (x − (step·q − offset))² of every sub-block."""
    gap = codes * step
    gap -= offset
    gap -= x
    gap *= gap
    return total(gap)


def refit(x: F32, sums: F32, codes: F32, affine: bool) -> tuple[F32, F32]:
    """The step and the offset ≥ 0 of least squares for the codes; `sums`: of x. Without minima the offset is zero."""
    squares, products = total(codes * codes), total(codes * x)
    step = products * inverse(squares)
    if not affine:
        return step, np.zeros_like(step)
    count, ones = np.float32(len(x)), total(codes)
    both = (count * products - sums * ones) * inverse(count * squares - ones * ones)
    offset = (both * ones - sums) / count
    inside = offset > 0
    return np.where(inside, both, step), np.where(inside, offset, np.float32(0))


def starts(x: F32, form: Form) -> Iterator[tuple[F32, F32]]:
    """Steps and offsets from which stage 1 fits a sub-block."""
    if not form.minimum_high:
        size = np.abs(x).max(axis=0)
        for trim in form.trims:
            step = size / np.float32(trim - form.low)
            yield from ((step, np.zeros_like(step)), (-step, np.zeros_like(step)))
        return
    low = np.minimum(x.min(axis=0), 0)
    unit = (np.maximum(x.max(axis=0), low) - low) / np.float32(form.high)
    for bottom in form.trims:
        for top in form.trims:
            yield unit * np.float32(1 - (bottom + top) / form.high), -(low + unit * np.float32(bottom))


def fit(x: F32, form: Form) -> tuple[F32, F32]:
    """Stage 1: steps and offsets f32 [sub-blocks, blocks] of little error, each sub-block alone."""
    sums, affine = total(x), form.minimum_high > 0
    best = np.full_like(sums, np.inf), np.zeros_like(sums), np.zeros_like(sums)
    for step, offset in starts(x, form):
        for _ in range(2):
            codes = nearest(x, step, offset, form)
            step, offset = refit(x, sums, codes, affine)
        error = distance(x, codes, step, offset)
        won = error < best[0]
        best = np.where(won, error, best[0]), np.where(won, step, best[1]), np.where(won, offset, best[2])
    return best[1], best[2]


def settle(x: F32, steps: F32, offsets: F32, grid: Grid) -> State:
    """Stage 2: steps and offsets rounded to multiples of f16 factors, of which some are tried."""
    form = grid.form
    index = np.abs(steps).argmax(axis=0)
    extreme = np.take_along_axis(steps, index[None], axis=0)[0]
    full = extreme / np.float32(form.scale_high if form.minimum_high else form.scale_low)
    dmins = offsets.max(axis=0) / np.float32(max(form.minimum_high, 1))
    best: State | None = None
    # Where f16 is coarse, the larger d is rounded up: rounding all of them down would cut every sub-block short.
    upward = np.where(np.abs(full) * grid.up < NORMAL, np.copysign(LEAST / 2 * grid.down, full), 0)
    for shrink in form.shrinks:
        d = grid.half(full * np.float32(shrink) + (upward if shrink > 1 else 0))
        scales = np.clip(np.rint(steps * inverse(d)), form.scale_low, form.scale_high)
        for other in form.shrinks if form.minimum_high else (1.0,):
            dmin = grid.half(dmins * np.float32(other))
            minima = np.minimum(np.rint(offsets * inverse(dmin)), np.float32(form.minimum_high))
            best = better(grid.state(x, d, dmin, scales, minima), best)
    assert best is not None
    return best


def improve(x: F32, state: State, grid: Grid) -> State:
    """Stage 3, one round: the best of a sub-block's neighbours, then factors of least squares where they are better."""
    form = grid.form
    moves = [(s, m) for s in (-1, 0, 1) for m in ((-1, 0, 1) if form.minimum_high else (0,)) if s or m]
    best = state
    for scale, minimum in moves:
        scales = np.clip(state.scales + np.float32(scale), form.scale_low, form.scale_high)
        minima = np.clip(state.minima + np.float32(minimum), 0, form.minimum_high)
        tried = grid.state(x, state.d, state.dmin, scales, minima)
        best = merged(tried.error < best.error, tried, best)
    d, dmin = (grid.half(factor) for factor in factors(x, best))
    return better(grid.state(x, d, dmin, best.scales, best.minima), best)


def factors(x: F32, state: State) -> tuple[F32, F32]:
    """d and dmin of least squares: x ≈ d·(sc·q) − dmin·m, over all weights of a block."""
    scales, minima, codes = state.scales, state.minima, state.codes
    uu = total(scales * scales * total(codes * codes))
    xu = total(scales * total(codes * x))
    vv = total(minima * minima) * np.float32(len(x))
    xv = total(minima * total(x))
    uv = total(scales * minima * total(codes))
    determinant = inverse(uu * vv - uv * uv)
    alone = determinant == 0
    d = np.where(alone, (xu + state.dmin * uv) * inverse(uu), (xu * vv - xv * uv) * determinant)
    return d, np.where(alone, state.dmin, (xu * uv - xv * uu) * determinant)


def better(new: State, old: State | None) -> State:
    """Block by block the one of less error, the old one of equals."""
    return new if old is None else merged(total(new.error) < total(old.error), new, old)


def merged(won: NDArray[np.bool_], new: State, old: State) -> State:
    """`new` where `won` [sub-blocks, blocks] or [blocks] says so, `old` elsewhere; d and dmin are the same where `won` is of sub-blocks."""
    d, dmin = (old.d, old.dmin) if won.ndim == 2 else (np.where(won, new.d, old.d), np.where(won, new.dmin, old.dmin))
    rest = [np.where(won, getattr(new, name), getattr(old, name)) for name in ("scales", "minima", "codes", "error")]
    return State(d, dmin, *rest)


def orientation(x: F32, form: Form) -> F32:
    """−1 for blocks that are searched mirrored, with negative d and dmin: offsets −dmin·m only lower values, so sub-blocks that lie above
    zero as a whole would waste their codes on the way to it."""
    if not form.minimum_high:
        return np.ones(x.shape[2], np.float32)
    above, below = np.maximum(x.min(axis=0), 0), np.maximum(-x.max(axis=0), 0)
    return np.where(total(above * above) > total(below * below), np.float32(-1), ONE)


def plain(x: F32, grid: Grid) -> State:
    """Rounding to the least grid that covers a sub-block, with scales and minima rounded up: the base of the bounds in `k_types`.

    With four codes a grid over both signs may lose all power (weights midway between codes), so there it covers the sign of more power.
    """
    form = grid.form
    sign, minima, dmin = np.ones(x.shape[2], np.float32), np.zeros(x.shape[1:], np.float32), np.zeros(x.shape[2], np.float32)
    if not form.minimum_high:
        sizes = np.abs(x).max(axis=0) / np.float32(form.high + 0.5)
    elif form.high == 3:
        gain = total(total(np.square(np.maximum(x, 0))) - total(np.square(np.minimum(x, 0))))
        sign = np.where(gain < 0, np.float32(-1), ONE)
        sizes = np.maximum((x * sign).max(axis=0), 0) / np.float32(form.high)
    else:
        depth = -np.minimum(x.min(axis=0), 0)
        dmin = grid.half(depth.max(axis=0) / np.float32(form.minimum_high))
        minima = np.minimum(np.ceil(depth * inverse(dmin)), np.float32(form.minimum_high))
        sizes = (np.maximum(x.max(axis=0), 0) + dmin * minima) / np.float32(form.high)
    d = grid.half(sizes.max(axis=0) / np.float32(form.scale_high))
    scales = np.minimum(np.ceil(sizes * inverse(d)), np.float32(form.scale_high))
    return grid.state(x, d * sign, dmin, scales, minima)
