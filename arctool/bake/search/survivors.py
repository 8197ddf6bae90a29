"""The trellis search with error feedback inside it: every survivor of the search carries the feedback of its own past (per-survivor
processing; Raheli, Polydoros and Tzou, IEEE Trans. Commun. 43, 1995).

Minimises Σ_t ½ η_t D_t η_tᵀ over a row's streams, η_t = x_t − c_t, where the target x_t = w_t + Σ_{i<t} e_i M_{i,t} depends on the
errors e = w − c before it (LDLQ; `ldlq.py` makes M and D). Two streams that meet in a node have different errors behind them, hence
different targets ahead, so each node keeps its survivor's own feedback for the next columns. Against feedback from committed blocks
only, that takes the feedback down from 16 columns to one step and lets every decision wait until `DELAY` columns have confirmed it,
and still each step is searched once. What moves at every step is a survivor's feedback to the columns of its block and its errors in it;
what these feed to the columns beyond is added up once a block. Both lie in as many slots as there are survivors, not nodes.

A step's state s = n·2^k + j leads from node p = s mod 2^(l−k) to node n. Rows go through the steps in lockstep; nothing passes
between them.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

from arctool.bake.search.select_ir import block_width, least_of, select_survivors
from arctool.bake.search.survivor_ir import BLOCK, TRAIL, aim_survivors, extend_survivors, hand_over
from arctool.kernels.cpu.jit import jit
from arctool.quant.trellis import Geometry

DELAY = 64
"""Columns that a decision waits for, and the columns beyond its block that a survivor feeds by itself. A multiple of BLOCK."""

LONG_DELAY = 96
"""That of trellises with more than CROWD nodes, whose survivors share their past later; docs/quality.md has the curve."""

DEAD = np.float32(1e30)
"""The cost of a node that no stream may pass any more."""

ALIVE = np.float32(1e29)
"""More than any stream that may go on costs."""

MARGIN = 4.0
"""Where a row has more than CROWD survivors, one that lies behind the best by more than this many times the rate's least error of a
step is dropped: its feedback is not worth the memory traffic. At K4V2L16 these are 84 of 100, for 0.5 % of the error. The step is
the heaviest of those that the trellis remembers, from this one on: before a heavy step a survivor that is behind may still win."""

CROWD = 2048

EXACT_METRIC_STATES = 1 << 13
"""Up to so many states the V errors of a step are weighed by the whole of D_t (½ cᵀDc of each state, made once a step for all rows);
above, where V is 2, D_t is taken as its mean times the identity, which costs 0.4 % of the error at K4V2L16."""


def delay_of(geometry: Geometry) -> int:
    """The delay of a bake: within 3 % of the error of a search that sees the whole row, for every geometry of a rung."""
    return LONG_DELAY if 1 << (geometry.l - geometry.k) > CROWD else DELAY


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
    """H = M D Mᵀ as the search reads it. `metrics`: D f32 [steps, v, v] over its mean; `far`: M f32 [n, n]; `near`: f32 [n, BLOCK + delay],
    the rows of M right of their step, from the first column of their block to `delay` columns beyond it.
    """

    metrics: NDArray[np.float32]
    near: NDArray[np.float32]
    far: NDArray[np.float32]

    @property
    def delay(self) -> int:
        """Columns that a decision waits for."""
        return self.near.shape[1] - BLOCK


def check_delay(delay: int) -> int:
    """`delay`. Raises ValueError for one that the loops cannot take."""
    if delay < 0 or delay % BLOCK:
        raise ValueError(f"a decision waits for a multiple of {BLOCK} columns; found {delay}")
    return delay


@cache
def feedback_kernel(geometry: Geometry, rows: int, delay: int) -> Any:
    """The jitted search of `rows` rows: see `search` inside for its arguments. Releases the interpreter lock.

    Raises ValueError as `check_delay`.
    """
    reach = BLOCK + check_delay(delay)
    k, v, l = geometry.k, geometry.v, geometry.l
    nodes, symbols = 1 << (l - k), 1 << k
    width = block_width(k, l)
    plane = width if nodes > symbols else 1
    exact = int(exact_metric(geometry))
    memory = l // k
    pair = 2 if rows % 2 == 0 else 1
    block_steps, waiting = BLOCK // v, delay // BLOCK
    ring, kept_blocks = block_steps * (waiting + 2), max(1, waiting)
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
    def survive(best, limit, living):  # type: ignore[no-untyped-def]
        """The nodes whose cost is within `limit`, and how many."""
        count = np.uint64(0)
        for n in range(nodes):
            living[count] = n
            count += np.uint64(best[n] <= limit)
        return np.int64(count)

    @jit()
    def trace(winner, done, start, until, symbol_ring, states):  # type: ignore[no-untyped-def]
        """Follow the winner's stream back from step `done`; write the states of [start, until)."""
        node = winner
        for u in range(done - 1, start - 1, -1):
            state = node * symbols + symbol_ring[u % ring, node]
            if u < until:
                states[u] = state
            node = state & (nodes - 1)

    @jit()
    def ancestor(slot, origin_ring, block):  # type: ignore[no-untyped-def]
        """The slot, `waiting` blocks before the end of `block`, of the survivor that is in `slot` now."""
        for back in range(waiting):
            slot = origin_ring[(block - back) % kept_blocks, slot]
        return slot

    @jit()
    def agree(count, living, slots, origin_ring, block, winner):  # type: ignore[no-untyped-def]
        """Keep of the first `count` nodes of `living` those whose streams have the decided past of the winner's; give how many."""
        decided = ancestor(slots[winner], origin_ring, block)
        kept = np.int64(0)
        for index in range(count):
            n = living[index]
            if ancestor(slots[n], origin_ring, block) == decided:
                living[kept] = n
                kept += 1
        return kept

    @jit()
    def disperse(start, until, weights, states, table, records, far, targets):  # type: ignore[no-untyped-def]
        """Feed the errors of committed steps to the columns that no survivor's own feedback reaches."""
        begin = until * v + delay
        for u in range(start, until):
            for i in range(v):
                source = far[u * v + i, begin:]
                for r in range(weights.shape[0]):
                    state = states[r, u]
                    value = table[records[state // symbols] + ((state % symbols) * v + i) * width]
                    error = weights[r, u * v + i] - value
                    target = targets[r, begin:]
                    for c in range(np.uint64(len(source))):  # unsigned, or no two columns are added up at once
                        target[c] += error * source[c]

    @jit()
    def search(weights, table, norms, records, places, metrics, near, far, trails, beyond, states):  # type: ignore[no-untyped-def]
        """States of the best streams found for `weights` f32 [rows, n], into `states` i32 [rows, steps].

        `table`, `norms` (½|c|²), `records`, `places`: a Layout; `metrics`, `near` (flat), `far`: a Feedback; `trails`, `beyond`: f32, all
        zero, the survivors' feedback and errors (`workspace`).
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
        slots = np.zeros((2, rows, nodes), np.uint16)
        origin = np.zeros((2, rows, nodes), np.uint16)
        origin_ring = np.zeros((rows, kept_blocks, nodes), np.uint16)
        committed = 0
        now = 0
        old = 0
        best[:, 0] = np.float32(0.0)
        least = np.zeros(rows, np.float32)
        entries = metrics.reshape(-1)
        for r in range(rows):
            clear(front[r])
            aim_survivors(
                1, living[r], slots[0, r], trails[0, r], targets[r], entries, best[r], places, front[r], 0, 0, 0, least[r], v, plane, exact
            )
        for t in range(steps):
            if exact:
                weigh(table, metrics[t], half)
            weight = np.float32(1.0) if exact else metrics[t, 0, 0]
            slack = weight
            if not exact:
                for u in range(t + 1, min(steps, t + 1 + memory)):
                    slack = max(slack, metrics[u, 0, 0])
            for first in range(0, rows, pair):
                select_survivors(half, table, weight, front[first:], best[first:], chosen[first:], k, v, l, pair)
            done = t + 1
            for r in range(rows):
                least[r] = least_of(best[r], nodes)
                counts[r] = survive(best[r], min(ALIVE, least[r] + margin * slack), living[r])
                hand_over(counts[r], living[r], chosen[r], records, table, weights[r], near, slots[now, r], slots[1 - now, r],
                          trails[now, r], trails[1 - now, r], origin[now, r], origin[1 - now, r], symbol_ring[r, t % ring],
                          t * v, t * v % BLOCK, k, v, l, reach)  # fmt: skip
            now = 1 - now
            if done % block_steps == 0 or done == steps:
                block = (done - 1) // block_steps
                until = steps if done == steps else max(0, done - waiting * block_steps)
                for r in range(rows):
                    winner = living[r, 0]
                    for index in range(counts[r]):
                        n = living[r, index]
                        origin_ring[r, block % kept_blocks, index] = origin[now, r, index]
                        if best[r, n] < best[r, winner]:
                            winner = n
                    trace(winner, done, committed, until, symbol_ring[r], states[r])
                    if done == steps:
                        continue
                    if until > committed:
                        counts[r] = agree(counts[r], living[r], slots[now, r], origin_ring[r], block, winner)
                    extend_survivors(counts[r], living[r], near, slots[now, r], trails[now, r], beyond[old, r],
                                     beyond[1 - old, r], origin[now, r], block * BLOCK, delay)  # fmt: skip
                    for index in range(nodes):
                        origin[now, r, index] = index
                old = 1 - old
                if until > committed and done < steps:
                    disperse(committed, until, weights, states, table, records, far, targets)
                committed = until
            if done < steps:
                for r in range(rows):
                    clear(front[r])
                    aim_survivors(counts[r], living[r], slots[now, r], trails[now, r], targets[r], entries, best[r], places, front[r],
                                  done * v, done * v % BLOCK, done * v * v, least[r], v, plane, exact)  # fmt: skip

    return search


def workspace(geometry: Geometry, rows: int, delay: int) -> tuple[NDArray[np.float32], NDArray[np.float32]]:
    """Zeros for the survivors: (trails f32 [2, rows, slots · TRAIL], feedback beyond their block f32 [2, rows, slots · delay]).

    Both begin on a cache line's boundary: a register then never straddles two.
    """
    return _aligned(2, rows, TRAIL << (geometry.l - geometry.k)), _aligned(2, rows, delay << (geometry.l - geometry.k))


def _aligned(*shape: int) -> NDArray[np.float32]:
    size = int(np.prod(shape))
    space = np.zeros(size + 16, np.float32)
    first = -space.ctypes.data % 64 // 4
    return space[first : first + size].reshape(shape)


def search_rows(targets: NDArray[np.float32], table: Layout, feedback: Feedback, geometry: Geometry) -> NDArray[np.int32]:
    """States i32 [rows, steps] of the best streams found for `targets`, f32 [rows, n], in table units."""
    states = np.empty((len(targets), geometry.steps(targets.shape[1])), np.int32)
    feedback_kernel(geometry, len(targets), feedback.delay)(
        targets, table.table, table.half, table.records, table.places, feedback.metrics, feedback.near.reshape(-1), feedback.far,
        *workspace(geometry, len(targets), feedback.delay), states,
    )  # fmt: skip
    return states
