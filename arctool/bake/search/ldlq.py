"""Rounding with error feedback: a linear layer to trellis streams that minimise tr(E H Eᵀ), H the second moments of its inputs (LDLQ,
QuIP, arXiv 2307.13304; with trellises QTIP, arXiv 2406.11235).

With H = M D Mᵀ, M block-unit upper triangular and D block-diagonal (blocks of V columns, one step of the trellis), a row's loss is
e H eᵀ = Σ_t η_t D_t η_tᵀ with η_t = e_t + Σ_{i<t} e_i M_{i,t}: every step's search may aim at w_t + Σ_{i<t} e_i M_{i,t}, so that later
columns make good what earlier ones lost. Streams start at column 0, hence upper triangular. `survivors.py` does the search.

Knows one matrix and one Hessian, no model and no text. Deterministic: rows go in fixed chunks, each by one thread.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from concurrent.futures import Executor
from dataclasses import dataclass, replace

import numpy as np
import torch
from numpy.typing import NDArray

from arctool.bake.calibration.compensation import SHARE
from arctool.bake.calibration.hessian import LEAST_DAMPING
from arctool.bake.search.rounding import (
    Chunk,
    RoundedLayer,
    RoundedRows,
    RungTools,
    Turned,
    assemble,
    pack,
    round_layer,
    search_scales,
    squared_errors,
    start_scales,
    turn,
)
from arctool.bake.search.survivor_ir import BLOCK
from arctool.bake.search.survivors import Feedback, check_delay, delay_of, exact_metric, rows_per_chunk, search_rows
from arctool.quant.hadamard import Rotation, block_hadamard
from arctool.quant.trellis import Geometry

DAMPING_TRIES = (1.0, 10.0, 100.0)
"""Factors on the damping (`hessian.damping`) that are tried until H has a Cholesky factor."""

GAIN_FACTORS = (0.9, 1.0)
"""Scales tried for each row, around the rung's own. Feedback widens the targets, so the better ones are larger scales (lower gains)."""


@dataclass(frozen=True)
class Method:
    """How layers are searched. The defaults are what a bake does; the others exist to measure what each part is worth.

    `share`: how much of the drift before a layer it makes good (`compensation`); `gains`: `GAIN_FACTORS`; `refit`: whether a row's scale
    is fitted to its values under H; `blocks`: feedback only from whole blocks of BLOCK columns to later ones, as LDLQ was published;
    `quantised_prefix`: whether inputs come through layers as they will be stored; `shrinkage`: whether H is damped more the fewer rows it
    is the mean of, or always by LEAST_DAMPING.
    """

    share: float = SHARE
    gains: tuple[float, ...] = GAIN_FACTORS
    refit: bool = True
    blocks: bool = False
    quantised_prefix: bool = True
    shrinkage: bool = True


METHOD = Method()

SAMPLE = 32
"""Rows, evenly spread, that are rounded by themselves as well: what a layer would lose without feedback."""

NEAR = 0.5
"""Where feedback loses more than this share of what rounding does on the sample, all of the layer is rounded too, and the better one
is kept. On layers of models it loses 0.01 to 0.3 of that; where it does not, weights lie on a grid of their own, say, or H is flat."""


def rotate_hessian(hessian: NDArray[np.float32], rotation: Rotation) -> NDArray[np.float64]:
    """H in the basis of the rows, f64 [n, n]: conjugated by all that the inputs are multiplied with, signs and Hadamard blocks."""
    turned = hessian.astype(np.float64)
    block = rotation.block_in
    hadamard = block_hadamard(np.eye(block, dtype=np.float32), block).astype(np.float64)
    matrix = torch.from_numpy(np.sign(hadamard) / np.sqrt(block))
    signs = torch.from_numpy(rotation.signs_in.astype(np.float64))
    whole = torch.from_numpy(turned)
    for first in range(0, len(whole), block):
        rows, own = whole[first : first + block], signs[first : first + block]
        turned_right = ((rows * signs).unflatten(1, (-1, block)) @ matrix).flatten(1)
        rows.copy_(matrix @ (turned_right * own[:, None]))
    return turned


def factor(hessian: NDArray[np.float64], step: int) -> tuple[NDArray[np.float32], NDArray[np.float64]]:
    """(M f32 [n, n], D f64 [n/step, step, step]) with H = M D Mᵀ, M upper triangular with identity blocks on its diagonal.

    Computed in f64 from H's lower triangle. Raises ValueError where H has no Cholesky factor.
    """
    n = len(hessian)
    lower, failed = torch.linalg.cholesky_ex(torch.from_numpy(np.array(hessian[::-1, ::-1].T, order="C")))
    if failed.item() or not torch.isfinite(lower.diagonal()).all():
        raise ValueError("not positive definite")
    upper = lower.numpy()[::-1, ::-1]
    unit = np.zeros((n, n), np.float32)
    weights = np.empty((n // step, step, step))
    for t in range(n // step):
        first, last = t * step, (t + 1) * step
        own = np.array(upper[first:last, first:last], order="C")
        weights[t] = own @ own.T
        unit[:last, first:last] = torch.from_numpy(np.array(upper[:last, first:last], order="C")) @ torch.from_numpy(np.linalg.inv(own))
    return unit, weights


def feedback(hessian: NDArray[np.float64], geometry: Geometry, blocks: bool = False, delay: int | None = None) -> Feedback:
    """Factor a damped Hessian, f64 [n, n], for the search of `geometry`. `blocks`: as in `Method`, for widths that hold whole blocks.

    `delay`: columns that a decision waits for, None for what a bake takes. Raises ValueError where H has no factor.
    """
    v, n = geometry.v, len(hessian)
    if blocks and n % BLOCK:
        raise ValueError(f"expected whole blocks of {BLOCK} columns, found {n}")
    unit, weights = factor(hessian, BLOCK if blocks else v)
    if blocks:
        weights = np.broadcast_to(np.eye(v), (n // v, v, v))
    traces = np.trace(weights, axis1=1, axis2=2) / v
    if not exact_metric(geometry):
        weights = traces[:, None, None] * np.eye(v)
    reach = BLOCK + check_delay(delay_of(geometry) if delay is None else delay)
    near = np.zeros((n, reach), np.float32)
    for row in range(n):
        block, first = row // BLOCK * BLOCK, row // v * v + v
        last = min(n, block + reach)
        near[row, first - block : last - block] = unit[row, first:last]
    return Feedback((weights / traces.mean()).astype(np.float32), near, unit)


def damped(hessian: NDArray[np.float64], geometry: Geometry, share: float, blocks: bool = False) -> Feedback:
    """The factors of H with `share` of its mean diagonal added to it, or more (`DAMPING_TRIES`) if it has none, which is left there.

    H itself is scaled by the power of two that brings its mean diagonal to [½, 1): f32 then holds its products with weights of any
    ordinary size. Raises ValueError, saying why, where there are no factors.
    """
    mean = float(np.diag(hessian).mean())
    if not np.isfinite(hessian).all() or not mean > 0:
        raise ValueError(f"the second moments of its inputs are useless (mean square {mean:.3g})")
    np.ldexp(hessian, -math.frexp(mean)[1], out=hessian)
    diagonal = np.diag(hessian).copy()
    mean = float(diagonal.mean())
    for tried in DAMPING_TRIES:
        np.fill_diagonal(hessian, diagonal + share * tried * mean)
        try:
            return feedback(hessian, geometry, blocks)
        except ValueError:
            continue
    raise ValueError(f"its Hessian is not positive definite, even with {share * DAMPING_TRIES[-1]:.0%} of its mean diagonal added")


@dataclass(frozen=True)
class Problem:
    """A layer to search. `source`: the rotated weights that errors refer to; `pulled`: rows · H f32 [out, in]; `hessian`: the damped H,
    f32 [in, in]; `feedback`: its factors.
    """

    turned: Turned
    source: NDArray[np.float32]
    pulled: NDArray[np.float32]
    hessian: torch.Tensor
    feedback: Feedback
    tools: RungTools
    method: Method


@dataclass(frozen=True)
class FedChunk:
    """Some rows, done, and their losses, f64 [rows]: e H eᵀ and w H wᵀ with the damped H."""

    chunk: Chunk
    losses: NDArray[np.float64]
    totals: NDArray[np.float64]


def feed_layer(
    weight: NDArray[np.float32],
    hessian: NDArray[np.float32],
    key: str,
    tools: RungTools,
    rotation: Rotation,
    pool: Executor,
    method: Method = METHOD,
    target: NDArray[np.float32] | None = None,
    share: float = LEAST_DAMPING,
) -> RoundedLayer:
    """Quantise `weight` f32 [out, in] under `hessian` f32 [in, in], the mean of x xᵀ over calibration rows in the original basis.

    `share`: of H's mean diagonal that is added to it (`hessian.damping`); `target`: what is searched for in place of `weight`, to which the
    relative error still refers. Where feedback cannot be used, or would do worse than rounding each row by itself, the layer is rounded and
    its note says why. Raises SourceError where f32 cannot hold the quantised layer. Peak memory besides the arguments: 24 in² bytes (H in
    f64, its copy that is factored, the factor), five times the weight, and for each thread the survivors of a chunk of rows.
    """
    turned = turn(weight if target is None else target, key, rotation)
    source = turned.rows if target is None else rotation.rotate(np.ldexp(weight, -turned.shift) if turned.shift else weight)
    try:
        whole = rotate_hessian(hessian, rotation)
        factors = damped(whole, tools.rung.geometry, share, method.blocks)
    except ValueError as reason:
        return round_layer(weight, key, tools, rotation, pool, str(reason))
    flat = torch.from_numpy(whole.astype(np.float32))
    del whole
    problem = Problem(turned, source, (torch.from_numpy(turned.rows) @ flat).numpy(), flat, factors, tools, method)
    sample = slice(None, None, max(1, len(turned.rows) // SAMPLE))
    rounding = pool.submit(rounded_chunk, problem, sample)
    found = search(problem, feed_chunk, pool)
    losses = np.concatenate([part.losses for part in found])
    loss, total = float(losses.sum()), sum(float(part.totals.sum()) for part in found)
    note = None
    if losses[sample].sum() > NEAR * rounding.result().losses.sum():
        rounded = search(problem, rounded_chunk, pool)
        plain = sum(float(part.losses.sum()) for part in rounded)
        if plain < loss:
            note = f"rounded without feedback, which would lose {loss / total:.4g} of its output's power instead of {plain / total:.4g}"
            found, loss = rounded, plain
    layer = assemble(turned, [part.chunk for part in found], tools)
    return replace(layer, proxy_error=loss / total if total else 0.0, note=note)


def search(problem: Problem, method: Callable[[Problem, slice], FedChunk], pool: Executor) -> list[FedChunk]:
    """All rows by `method`, in chunks whose size depends on the geometry alone."""
    size = rows_per_chunk(problem.tools.rung.geometry)
    starts = range(0, len(problem.turned.rows), size)
    return list(pool.map(lambda start: method(problem, slice(start, start + size)), starts))


def feed_chunk(problem: Problem, part: slice) -> FedChunk:
    """Search some rows at every gain of the method; keep for each row the one with the least loss at its refitted scale."""
    rows, tools = problem.turned.rows[part], problem.tools
    best: tuple[NDArray[np.int32], NDArray[np.float32], NDArray[np.float64]] | None = None
    for gain in problem.method.gains:
        start = start_scales(rows, tools.rung.gain * gain)
        targets = np.ascontiguousarray(rows / start[:, None], np.float32)
        states = search_rows(targets, tools.layout, problem.feedback, tools.rung.geometry)
        scales, losses = refit(problem, part, states, start)
        if best is not None:
            better = losses < best[2]
            states = np.where(better[:, None], states, best[0])
            scales, losses = np.where(better, scales, best[1]), np.where(better, losses, best[2])
        best = states, scales, losses
    assert best is not None
    return scored(problem, part, *best[:2])


def rounded_chunk(problem: Problem, part: slice) -> FedChunk:
    """Some rows, each rounded by itself."""
    found = search_scales(np.ascontiguousarray(problem.turned.rows[part]), problem.tools)
    return scored(problem, part, found.states, found.scales)


def refit(
    problem: Problem, part: slice, states: NDArray[np.int32], start: NDArray[np.float64]
) -> tuple[NDArray[np.float32], NDArray[np.float64]]:
    """(scales f32, losses f64) of rows with given values c: the scale that minimises (w − s·c) H (w − s·c)ᵀ is w H cᵀ / c H cᵀ."""
    rows = problem.turned.rows[part]
    values = problem.tools.values[states].reshape(rows.shape)
    wide, pulled = values.astype(np.float64), problem.pulled[part].astype(np.float64)
    shared = (pulled * wide).sum(axis=1)
    power = ((torch.from_numpy(values) @ problem.hessian).numpy().astype(np.float64) * wide).sum(axis=1)
    fitted = np.divide(shared, power, out=start.copy(), where=power > 0) if problem.method.refit else start
    scales = np.where((rows != 0).any(axis=1), fitted, 0.0).astype(np.float32)
    losses = (pulled * rows).sum(axis=1) - 2 * scales * shared + scales.astype(np.float64) ** 2 * power
    return scales, losses


def scored(problem: Problem, part: slice, states: NDArray[np.int32], scales: NDArray[np.float32]) -> FedChunk:
    """The chunk as it will be stored, and its losses computed from its errors."""
    rows, tools = problem.turned.rows[part], problem.tools
    values = tools.values[states].reshape(rows.shape)
    errors = rows - values * scales[:, None]
    pulled = (torch.from_numpy(errors) @ problem.hessian).numpy().astype(np.float64)
    source = problem.source[part]
    squares = squared_errors(source.astype(np.float64), values.astype(np.float64), scales)
    chunk = pack(source, RoundedRows(states, scales, squares), tools)
    return FedChunk(chunk, (pulled * errors).sum(axis=1), (problem.pulled[part].astype(np.float64) * rows).sum(axis=1))
