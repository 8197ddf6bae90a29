"""The trellis search with error feedback inside it: every survivor of the search carries the feedback of its own past (per-survivor
processing; Raheli, Polydoros and Tzou, IEEE Trans. Commun. 43, 1995).

Minimises Σ_t ½ η_t D_t η_tᵀ over a row's streams, η_t = x_t − c_t, where the target x_t = w_t + Σ_{i<t} e_i M_{i,t} depends on the
errors e = w − c before it (LDLQ; `ldlq.py` makes M and D). Two streams that meet in a node have different errors behind them, hence
different targets ahead, so each node keeps its survivor's own feedback for the next columns. Against feedback from committed blocks
only, that takes the feedback down from 16 columns to one step and lets every decision wait until `DELAY` columns have confirmed it,
and still each step is searched once.

A step's state s = n·2^k + j leads from node p = s mod 2^(l−k) to node n. Rows go through the steps in lockstep; nothing passes
between them.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

from arctool.bake.survivor_ir import aim_survivors, block_width, hand_over, least_of, select_survivors
from arctool.kernels.cpu.jit import jit
from arctool.quant.trellis import Geometry

COMMIT = 16
"""Columns that are decided together."""

DELAY = 32
"""Columns that a decision waits for, and the columns beyond an undecided block that a survivor feeds by itself. A multiple of COMMIT."""

SPAN = COMMIT + DELAY
"""Length of a survivor's feedback, a ring of columns: those of the block in work and DELAY columns beyond its end."""

DEAD = np.float32(1e30)
"""The cost of a node that no stream may pass any more."""

MARGIN = 4.0
"""Where a row has more than CROWD survivors, one that lies behind the best by more than this many times the rate's least error of a
step is dropped: its feedback is not worth the memory traffic. At K4V2L16 these are 84 of 100, for 0.5 % of the error."""

CROWD = 2048

EXACT_METRIC_STATES = 1 << 13
"""Up to so many states the V errors of a step are weighed by the whole of D_t (½ cᵀDc of each state, made once a step for all rows);
above, where V is 2, D_t is taken as its mean times the identity, which costs 0.4 % of the error at K4V2L16."""


def exact_metric(geometry: Geometry) -> bool:
    """Whether the search of `geometry` weighs the V errors of a step by all of D_t."""
    return geometry.v > 1 and 1 << geometry.l <= EXACT_METRIC_STATES


def rows_per_chunk(geometry: Geometry) -> int:
    """Rows in lockstep: many where a row's survivors are few, else as many as share one pass over the table."""
    return 32 if exact_metric(geometry) else 2


@dataclass(frozen=True)
class Layout:
    """A codebook in the order of the search. Nodes come in blocks of `width`, and blocks that leave the same nodes one after another.

    `half`: ½|c|² f32 [2^l] and `table`: f32 [2^l · v], as [block][symbol](v)[lane]; `records`: u32 [nodes], where node n's values begin
    in `table`; `places`: u32 [nodes], where node p's cost lies in a row's front, and `plane`: how far each pull lies behind it.
    """

    half: NDArray[np.float32]
    table: NDArray[np.float32]
    records: NDArray[np.uint32]
    places: NDArray[np.uint32]
    plane: int


def layout(values: NDArray[np.float32], geometry: Geometry) -> Layout:
    """The layout of `values`: f32 [2^l, v]."""
    k, v, l = geometry.k, geometry.v, geometry.l
    width, symbols, nodes = block_width(k, l), 1 << k, 1 << (l - k)
    wide = nodes > symbols
    groups = nodes // symbols // width if wide else 1
    node = np.arange(nodes)
    block = node // width
    order = (block % groups) * (nodes // width // groups) + block // groups
    ordered = np.empty((nodes // width, symbols, v, width), np.float32)
    ordered[order, :, :, node % width] = values.reshape(nodes, symbols, v)
    half = np.empty((nodes // width, symbols, width), np.float32)
    half[order, :, node % width] = ((values.astype(np.float64) ** 2).sum(axis=1) / 2).reshape(nodes, symbols)
    records = order * symbols * v * width + node % width
    if wide:
        among, symbol = node // symbols, node % symbols
        places = ((among // width) * symbols + symbol) * (1 + v) * width + among % width
    else:
        places = node * (1 + v)
    return Layout(half.reshape(-1), ordered.reshape(-1), records.astype(np.uint32), places.astype(np.uint32), width if wide else 1)


@dataclass(frozen=True)
class Feedback:
    """H = M D Mᵀ as the search reads it. `metrics`: D f32 [steps, v, v] over its mean; `far`: M f32 [n, n]; `near`: f32 [steps·v·SPAN],
    the rows of M right of their step and up to DELAY columns beyond its block, column c at c mod SPAN. `commit`, `delay`: those that
    `near` was cut for, COMMIT and DELAY but to measure others.
    """

    metrics: NDArray[np.float32]
    near: NDArray[np.float32]
    far: NDArray[np.float32]
    commit: int = COMMIT
    delay: int = DELAY


def span_of(commit: int, delay: int) -> int:
    """SPAN for another window. Raises ValueError for one that the loops cannot take."""
    if commit <= 0 or delay < 0 or delay % commit or (commit + delay) % 16:
        raise ValueError(
            f"a window commits some columns, waits for a multiple of them, and spans a multiple of 16; found {commit}, {delay}"
        )
    return commit + delay


@cache
def feedback_kernel(geometry: Geometry, rows: int, commit: int = COMMIT, delay: int = DELAY) -> Any:
    """The jitted search of `rows` rows: see `search` inside for its arguments. Releases the interpreter lock.

    `commit`, `delay`: the window (`span_of`); `commit` holds whole steps.
    """
    span = span_of(commit, delay)
    k, v, l = geometry.k, geometry.v, geometry.l
    nodes, symbols = 1 << (l - k), 1 << k
    width = block_width(k, l)
    plane = width if nodes > symbols else 1
    exact = int(exact_metric(geometry))
    pair = 2 if rows % 2 == 0 else 1
    block_steps, waiting = commit // v, delay // commit
    ring, slots = block_steps * (waiting + 2), max(1, waiting)
    margin = np.float32(MARGIN * v * 2.0 ** (-2.0 * k / v) if nodes > CROWD else DEAD)

    @jit()
    def weigh(table, metric, half):  # type: ignore[no-untyped-def]  # numba infers the types
        """half[record][lane] = ½ cᵀ D c of every state."""
        for record in range(nodes // width * symbols):
            for lane in range(width):
                total = np.float32(0.0)
                for i in range(v):
                    inner = np.float32(0.0)
                    for j in range(v):
                        inner += metric[i, j] * table[(record * v + j) * width + lane]
                    total += inner * table[(record * v + i) * width + lane]
                half[record * width + lane] = np.float32(0.5) * total

    @jit()
    def clear(front):  # type: ignore[no-untyped-def]
        """Every node dead."""
        for record in range(nodes // plane):
            for lane in range(plane):
                front[record * (1 + v) * plane + lane] = DEAD

    @jit()
    def forget(feedback, node, column):  # type: ignore[no-untyped-def]
        """Make room for a new block of columns in the ring of a node's feedback."""
        at = np.uint64(node) * np.uint64(span) + np.uint64(column)
        for h in range(commit):
            feedback[at + np.uint64(h)] = np.float32(0.0)

    @jit()
    def survive(best, limit, living):  # type: ignore[no-untyped-def]
        """The nodes whose cost is within `limit`, and how many."""
        count = np.uint64(0)
        for n in range(nodes):
            living[count] = n
            count += np.uint64(best[n] <= limit)
        return np.int64(count)

    @jit()
    def trace(winner, done, start, until, symbol_ring, states):  # type: ignore[no-untyped-def]
        """Follow the winner's stream back from step `done`; write the states of [start, until) and give the node after until − 1."""
        node = winner
        settled = winner
        for u in range(done - 1, start - 1, -1):
            state = node * symbols + symbol_ring[u % ring, node]
            if u == until - 1:
                settled = node
            if u < until:
                states[u] = state
            node = state & (nodes - 1)
        return settled

    @jit()
    def disperse(start, until, weights, states, table, records, far, targets):  # type: ignore[no-untyped-def]
        """Feed the errors of committed steps to the columns that no survivor's own feedback reaches."""
        columns = weights.shape[1]
        begin = until * v + delay
        for u in range(start, until):
            for i in range(v):
                source = far[u * v + i]
                for r in range(weights.shape[0]):
                    state = states[r, u]
                    value = table[records[state // symbols] + ((state % symbols) * v + i) * width]
                    error = weights[r, u * v + i] - value
                    for c in range(begin, columns):
                        targets[r, c] += error * source[c]

    @jit()
    def search(weights, table, norms, records, places, metrics, near, far, feedback, states):  # type: ignore[no-untyped-def]
        """States of the best streams found for `weights` f32 [rows, n], into `states` i32 [rows, steps].

        `table`, `norms` (½|c|²), `records`, `places`: a Layout; `metrics`: f32 [steps, v, v], D_t; `near`: f32 [steps · v · SPAN], the rows
        of M right of their step and up to DELAY columns beyond their block, column c at c mod SPAN; `far`: f32 [n, n], M; `feedback`:
        f32 [2, rows, nodes · SPAN], all zero, the survivors'.
        """
        columns = weights.shape[1]
        steps = columns // v
        half = norms.copy()
        targets = np.zeros((rows, columns + v), np.float32)
        targets[:, :columns] = weights
        front = np.zeros((rows, (1 + v) * nodes), np.float32)
        best = np.empty((rows, nodes), np.float32)
        chosen = np.empty((rows, nodes), np.int32)
        living = np.zeros((rows, nodes + 1), np.uint32)
        counts = np.ones(rows, np.int64)
        symbol_ring = np.empty((rows, ring, nodes), np.uint16)
        origin = np.zeros((2, rows, nodes), np.uint16)
        origin_ring = np.zeros((rows, slots, nodes), np.uint16)
        committed = 0
        now = 0
        best[:, 0] = np.float32(0.0)
        least = np.zeros(rows, np.float32)
        entries = metrics.reshape(-1)
        for r in range(rows):
            clear(front[r])
            aim_survivors(
                1, living[r], feedback[0, r], targets[r], entries, best[r], places, front[r], 0, 0, 0, least[r], v, span, plane, exact
            )
        for t in range(steps):
            if exact:
                weigh(table, metrics[t], half)
            weight = np.float32(1.0) if exact else metrics[t, 0, 0]
            for first in range(0, rows, pair):
                select_survivors(half, table, weight, front[first:], best[first:], chosen[first:], k, v, l, pair)
            done = t + 1
            for r in range(rows):
                least[r] = least_of(best[r], nodes)
                counts[r] = survive(best[r], min(DEAD, least[r] + margin * weight), living[r])
                hand_over(counts[r], living[r], chosen[r], records, table, weights[r], near, feedback[now, r], feedback[1 - now, r],
                          origin[now, r], origin[1 - now, r], symbol_ring[r, t % ring], t * v * span, t * v, k, v, l, span)  # fmt: skip
            now = 1 - now
            if done % block_steps == 0 or done == steps:
                block = (done - 1) // block_steps
                until = steps if done == steps else max(0, done - waiting * block_steps)
                for r in range(rows):
                    winner = living[r, 0]
                    for index in range(counts[r]):
                        n = living[r, index]
                        origin_ring[r, block % slots, n] = origin[now, r, n]
                        if best[r, n] < best[r, winner]:
                            winner = n
                        forget(feedback[now, r], n, block * commit % span)
                    for n in range(nodes):
                        origin[now, r, n] = n
                    settled = trace(winner, done, committed, until, symbol_ring[r], states[r])
                    if done == steps or until == committed:
                        continue
                    kept = 0
                    for index in range(counts[r]):
                        n = living[r, index]
                        node = n
                        for back in range(waiting):
                            node = origin_ring[r, (block - back) % slots, node]
                        if node == settled:
                            living[r, kept] = n
                            kept += 1
                    counts[r] = kept
                if until > committed and done < steps:
                    disperse(committed, until, weights, states, table, records, far, targets)
                committed = until
            if done < steps:
                for r in range(rows):
                    clear(front[r])
                    aim_survivors(counts[r], living[r], feedback[now, r], targets[r], entries, best[r], places, front[r],
                                  done * v, done * v % span, done * v * v, least[r], v, span, plane, exact)  # fmt: skip

    return search


def workspace(geometry: Geometry, rows: int, span: int = SPAN) -> NDArray[np.float32]:
    """Zeros f32 [2, rows, nodes · span] for the survivors' feedback, on a cache line's boundary: a register then never straddles two."""
    shape = (2, rows, span << (geometry.l - geometry.k))
    size = int(np.prod(shape))
    space = np.zeros(size + 16, np.float32)
    first = -space.ctypes.data % 64 // 4
    return space[first : first + size].reshape(shape)


def search_rows(targets: NDArray[np.float32], table: Layout, feedback: Feedback, geometry: Geometry) -> NDArray[np.int32]:
    """States i32 [rows, steps] of the best streams found for `targets`, f32 [rows, n], in table units."""
    states = np.empty((len(targets), geometry.steps(targets.shape[1])), np.int32)
    span = span_of(feedback.commit, feedback.delay)
    feedback_kernel(geometry, len(targets), feedback.commit, feedback.delay)(
        targets, table.table, table.half, table.records, table.places, feedback.metrics, feedback.near, feedback.far,
        workspace(geometry, len(targets), span), states,
    )  # fmt: skip
    return states
