"""The trellis search: for each row the bit stream whose decoded values lie nearest to it. Exact over the whole row, in f32.

The streams are little-endian, so a state's newest symbol is its highest bits: s_t = (s_{t−1} >> k) | m << (l−k). Run backwards in
time, M_t[q] = min over m of (d_t(s) + M_{t+1}[s >> k]) with s = q + m·2^(l−k) reads and writes neighbouring states, costs
2^l evaluations a step whatever k is, and leaves the trace to run forwards from state 0, where every row starts. With
d = |x − c|²/2 = |x|²/2 + (|c|²/2 − x·c) the table carries |c|²/2. Only the minima are kept (2^(l−k) a step), never state
costs or arguments: the trace recomputes the one minimum that it needs.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache

import numpy as np
from numpy.typing import NDArray

from arctool.bake.search.viterbi_ir import block_width, search_step
from arctool.kernels.cpu.jit import jit
from arctool.quant.trellis import Geometry

ROWS_PER_PASS = 2
"""Rows searched in one pass over the table: two halve its cache traffic and still fit 16 vector registers (measured)."""

SearchKernel = Callable[[NDArray[np.float32], NDArray[np.float32], NDArray[np.float32], NDArray[np.int32]], None]


def layout(values: NDArray[np.float32], geometry: Geometry) -> NDArray[np.float32]:
    """The codebook f32 [2^l, v] in the order in which the search reads it: [block][symbol][|c|²/2, c_0, … c_{v−1}][lane]."""
    width = block_width(geometry.k, geometry.l)
    symbols, blocks = 1 << geometry.k, (1 << (geometry.l - geometry.k)) // width
    half_norm = (values.astype(np.float64) ** 2).sum(axis=1, keepdims=True) / 2
    planes = np.concatenate([half_norm, values], axis=1).astype(np.float32)
    return np.ascontiguousarray(planes.reshape(symbols, blocks, width, geometry.v + 1).transpose(1, 0, 3, 2)).reshape(-1)


@cache
def search_kernel(geometry: Geometry, rows: int) -> SearchKernel:
    """The jitted search of `rows` rows: kernel(table, targets [steps, rows·v], minima [steps+1, rows·2^(l−k)], states [rows, steps]).

    Geometry constants are compile-time constants of the jitted functions, which release the interpreter lock.
    """
    k, v, l = geometry.k, geometry.v, geometry.l
    group, width, symbols = 1 << (l - k), block_width(k, l), 1 << k

    @jit()
    def trace(table, targets, minima, states):  # type: ignore[no-untyped-def]  # numba infers the types
        for row in range(rows):
            state = 0
            for t in range(targets.shape[0]):
                q = state >> k
                block, lane = q // width, q % width
                best, chosen = np.float32(np.inf), 0
                for m in range(symbols):
                    record = (block * symbols + m) * (v + 1) * width + lane
                    cost = table[record] + minima[t + 1, row * group + ((q + m * group) >> k)]
                    for i in range(v):
                        cost -= targets[t, row * v + i] * table[record + (1 + i) * width]
                    if cost < best:
                        best, chosen = cost, m
                state = q + chosen * group
                states[row, t] = state

    @jit()
    def search(table, targets, minima, states):  # type: ignore[no-untyped-def]  # numba infers the types
        steps = targets.shape[0]
        minima[steps, :] = np.float32(0.0)
        for t in range(steps - 1, 0, -1):
            search_step(table, targets[t], minima[t + 1], minima[t], k, v, l, rows)
        trace(table, targets, minima, states)

    return search


class Searcher:
    """The search for one codebook. Holds the laid-out table; `search` may run in several threads at once."""

    def __init__(self, geometry: Geometry, values: NDArray[np.float32]) -> None:
        self.geometry = geometry
        self.table = layout(values, geometry)

    def workspace_bytes(self, in_features: int) -> int:
        """Memory of one call: the minima of every step, 4 · 2^(l−k) bytes a row and step."""
        return 4 * ROWS_PER_PASS * (self.geometry.steps(in_features) + 1) << (self.geometry.l - self.geometry.k)

    def search(self, targets: NDArray[np.float32]) -> NDArray[np.int32]:
        """States [rows, steps] of the best streams for finite `targets`: f32 [rows, in_features], in table units."""
        rows, steps = targets.shape[0], self.geometry.steps(targets.shape[1])
        states = np.empty((rows, steps), np.int32)
        minima: NDArray[np.float32] | None = None
        for start in range(0, rows, ROWS_PER_PASS):
            chunk = targets[start : start + ROWS_PER_PASS]
            count = chunk.shape[0]
            ordered = np.ascontiguousarray(chunk.reshape(count, steps, self.geometry.v).transpose(1, 0, 2), dtype=np.float32).reshape(
                steps, -1
            )
            if minima is None or minima.shape[1] != count << (self.geometry.l - self.geometry.k):
                minima = np.empty((steps + 1, count << (self.geometry.l - self.geometry.k)), np.float32)
            search_kernel(self.geometry, count)(self.table, ordered, minima, states[start : start + count])
        return states
