"""The error-feedback search once more, in plain numpy: whole histories, no rings, no layouts, no intrinsics. Slow and meant to be read.

It states what `survivors.py` computes to the last bit, hence every float32 rounding and every order of summation: which of them are
fused, which errors a survivor sums and which the row, who dies when, and that of equals the first is taken.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from arctool.quant.trellis import Geometry

F32 = np.float32
Floats = NDArray[np.float32]


@dataclass(frozen=True)
class Search:
    """What is searched and how. `values`: f32 [2^l, v]; `metrics`: D f32 [steps, v, v]; `unit`: M f32 [n, n].

    `commit`: columns that are decided together; `delay`: columns that a decision waits for; `exact`: whether the whole of D_t counts or
    its first entry alone; `margin`: how far behind the best a survivor may fall, in units of
    the largest such entry of this step and the next l/k, None for any.
    """

    geometry: Geometry
    values: Floats
    metrics: Floats
    unit: Floats
    commit: int
    delay: int
    exact: bool
    margin: float | None


def fused(a: Floats, b: Floats, c: Floats) -> Floats:
    """a·b + c, rounded once to f32, for finite values whose sum is.

    The f64 sum is rounded to odd, after which rounding it again to f32 cannot go wrong (Boldo and Melquiond, 2008).
    """
    product, addend = np.float64(a) * np.float64(b), np.float64(c)  # the product of two f32 is exact in f64
    total = np.atleast_1d(product + addend)
    back = total - product
    lost = (product - (total - back)) + (addend - back)  # what the f64 addition rounded away, exactly
    bits = total.view(np.int64)
    odd = np.where((lost != 0) & (bits % 2 == 0), bits + np.where((lost > 0) == (total > 0), 1, -1), bits)
    return np.asarray(odd.view(np.float64).astype(np.float32).reshape(np.shape(product + addend)))


def half_energy(values: Floats, metric: Floats | None) -> Floats:
    """½ cᵀDc of every state, products and sums rounded one by one; ½|c|² by way of f64 where there is no D."""
    if metric is None:
        return np.asarray((values.astype(np.float64) ** 2).sum(axis=1) / 2, np.float32)
    total = np.zeros(len(values), np.float32)
    for i in range(values.shape[1]):
        inner = np.zeros(len(values), np.float32)
        for j in range(values.shape[1]):
            inner = inner + metric[i, j] * values[:, j]
        total = total + inner * values[:, i]
    return np.asarray(F32(0.5) * total)


def aim(given: Search, row: Floats, errors: Floats, column: int) -> Floats:
    """w + Σ e_r M_{r, column} over the columns r that `errors`, f32 [survivors, columns so far], has: every survivor's target.

    What lies so far back that all survivors share it is added to w, the rest is summed by itself first.
    """
    shared = np.full(len(errors), row[column], np.float32)
    own = np.zeros(len(errors), np.float32)
    for r in range(errors.shape[1]):
        if column < (r // given.commit + 1) * given.commit + given.delay:
            own = fused(errors[:, r], given.unit[r, column], own)
        else:
            shared = shared + errors[:, r] * given.unit[r, column]
    return np.asarray(shared + own)


def pull(metric: Floats, x: list[Floats], i: int, exact: bool) -> Floats:
    """(Dx)_i, or with a scalar metric D_00·x_i."""
    if not exact:
        return np.asarray(metric[0, 0] * x[i])
    total = metric[i, 0] * x[0]
    for j in range(1, len(x)):
        total = total + metric[i, j] * x[j]
    return np.asarray(total)


def arrivals(given: Search, metric: Floats, cost: Floats, x: list[Floats], left: NDArray[np.int64]) -> Floats:
    """The cost of arriving in every state, from survivors that cost `cost` and aim at `x`; infinite from dead ones."""
    alive = np.isfinite(cost)
    pulls = [pull(metric, x, i, given.exact) for i in range(len(x))]
    power = pulls[0] * x[0]
    for i in range(1, len(x)):
        power = power + pulls[i] * x[i]
    base = (np.where(alive, cost, F32(0)) - cost.min()) + power * F32(0.5)
    half = half_energy(given.values, metric if given.exact else None)
    total = base[left] + half if given.exact else fused(metric[0, 0], half, base[left])
    for i in range(len(x)):
        total = fused(-pulls[i][left], given.values[:, i], total)
    return np.where(alive[left], total, F32(np.inf))


def search_row(given: Search, row: Floats) -> NDArray[np.int64]:
    """States [steps] of one row f32 [n]."""
    v, nodes, symbols = given.geometry.v, 1 << (given.geometry.l - given.geometry.k), 1 << given.geometry.k
    left = np.arange(nodes * symbols) % nodes  # the node that a state leaves; the one that it reaches is state // symbols
    cost = np.full(nodes, np.inf, np.float32)
    cost[0] = 0  # a row starts in state 0
    history = np.zeros((nodes, 0), np.int64)
    errors = np.zeros((nodes, 0), np.float32)
    for t in range(len(row) // v):
        x = [aim(given, row, errors, t * v + i) for i in range(v)]
        arriving = arrivals(given, given.metrics[t], cost, x, left).reshape(nodes, symbols)
        chosen = np.arange(nodes) * symbols + arriving.argmin(axis=1)
        cost = arriving.min(axis=1)
        history = np.concatenate([history[left[chosen]], chosen[:, None]], axis=1)
        errors = np.concatenate([errors[left[chosen]], row[t * v : t * v + v] - given.values[chosen]], axis=1)
        if given.margin is not None:
            heaviest = given.metrics[t : t + 1 + given.geometry.l // given.geometry.k, 0, 0].max()
            cost[cost > cost.min() + F32(given.margin) * heaviest] = np.inf
        columns = (t + 1) * v
        if columns % given.commit == 0 and given.delay < columns < len(row):
            decided = history[:, : (columns - given.delay) // v]
            cost[(decided != decided[cost.argmin()]).any(axis=1)] = np.inf
    return np.asarray(history[cost.argmin()])
