"""Grouped-query attention over a paged cache: every query by itself in the numbers, many at once in the loops.

The keys of a sequence are taken in chunks of `KEY_CHUNK` positions that begin at multiples of it. A chunk gives each query its largest
score m, the sum s of exp(score − m) and the weighted values a; chunks are joined in rising order by the rescaling of online softmax
(Milakov and Gimelshein, arXiv 1805.02867). So a query's bits depend on its sequence and position alone: not on the tile that it is
computed in, on the blocks that hold its keys, or on whether its chunks went to several lanes.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache

import numpy as np

from arctool.kernels.cpu.attention_ir import KvKind, largest, mixed_of, scores_of, soften
from arctool.kernels.cpu.exp_ir import exp_scalar
from arctool.kernels.cpu.ir import LANES
from arctool.kernels.cpu.jit import entry, jit
from arctool.kernels.cpu.memory import f32_at, i64_at, take

KEY_CHUNK = 256
QUERY_TILE = 16
"""Queries that a task computes together at most."""

# Operands of both kernels.
Q, Q_PITCH, OUT, OUT_PITCH, KEYS, VALUES, VALUE_PITCH, BLOCK_SIZE, HEADS, KV_HEADS, DIM, WINDOW, SCALE, UNITS, TABLES, PARTS, COUNT = range(
    17
)
OPERANDS = 17

# A unit of work, i64 [UNIT]: queries [ROW, ROW + QUERIES) of the batch, the first at POSITION of a sequence whose block table begins at
# TABLE; CHUNK: the one chunk to compute into part PART, or −1 for all of them.
ROW, QUERIES, POSITION, TABLE, CHUNK, PART = range(6)
UNIT = 6

# Splits to join, i64 [JOIN]: query row, its first part, and how many follow each other.
JOIN = 3


def value_pitch(head_dim: int) -> int:
    """Stored width of a value: whole groups of sixteen lanes."""
    return -(-head_dim // LANES) * LANES


def part_floats(head_dim: int, share: int) -> int:
    """f32 that one part takes for each key head: m, s and a of `share` query heads."""
    return share * (value_pitch(head_dim) + LANES)


def scratch_floats(head_dim: int, share: int) -> int:
    """f32 that a lane needs: queries, scores, running and chunk sums of a tile."""
    rows = QUERY_TILE * share
    return rows * (value_pitch(head_dim) + KEY_CHUNK + 2 * value_pitch(head_dim) + 2 * LANES)


@jit()
def _join(top, total, mixed, chunk_top, chunk_total, chunk_mixed, width):  # type: ignore[no-untyped-def]  # numba infers the types
    """Join a chunk (m, s, a) to a running (m, s, a); the new m and s are returned, a is changed in place. Arrays f32 [width]."""
    if chunk_top == -np.inf:
        return top, total
    higher = max(top, chunk_top)
    keep, add = exp_scalar(top - higher), exp_scalar(chunk_top - higher)
    for d in range(width):
        mixed[d] = mixed[d] * keep + chunk_mixed[d] * add
    return higher, total * keep + chunk_total * add


@cache
def attention(kind: KvKind) -> Callable[[], int]:
    """The kernel over units: tasks are units times key heads, the number of units is the step's."""
    score8, score4, score2, score1 = (scores_of(n, kind) for n in (8, 4, 2, 1))
    mix44, mix24, mix14, mix41, mix11 = (mixed_of(*shape, kind) for shape in ((4, 4), (2, 4), (1, 4), (4, 1), (1, 1)))
    bytes_each = 4 if kind == "f32" else 2

    @jit()
    def score_rows(q, pitch, rows, keys, dim, out):  # type: ignore[no-untyped-def]  # numba infers the types
        row = 0
        while row < rows:
            left = rows - row
            a, b = q + 4 * row * pitch, out + 4 * row * KEY_CHUNK
            if left >= 8:
                score8(a, pitch, keys, dim, b, KEY_CHUNK)
                row += 8
            elif left >= 4:
                score4(a, pitch, keys, dim, b, KEY_CHUNK)
                row += 4
            elif left >= 2:
                score2(a, pitch, keys, dim, b, KEY_CHUNK)
                row += 2
            else:
                score1(a, pitch, keys, dim, b, KEY_CHUNK)
                row += 1

    @jit()
    def mix_rows(p, rows, values, pitch, count, out):  # type: ignore[no-untyped-def]  # numba infers the types
        at = 0
        while at < pitch:
            wide = pitch - at >= 4 * LANES
            v, row = values + bytes_each * at, 0
            while row < rows:
                left = rows - row
                a, b = p + 4 * row * KEY_CHUNK, out + 4 * (row * pitch + at)
                if left >= 4:
                    if wide:
                        mix44(a, KEY_CHUNK, v, pitch, count, b, pitch)
                    else:
                        mix41(a, KEY_CHUNK, v, pitch, count, b, pitch)
                    row += 4
                elif wide and left >= 2:
                    mix24(a, KEY_CHUNK, v, pitch, count, b, pitch)
                    row += 2
                else:
                    if wide:
                        mix14(a, KEY_CHUNK, v, pitch, count, b, pitch)
                    else:
                        mix11(a, KEY_CHUNK, v, pitch, count, b, pitch)
                    row += 1
            at += 4 * LANES if wide else LANES

    @jit()
    def attend_chunk(o, unit, table, head, chunk, q, scores, sums, chunk_mixed):  # type: ignore[no-untyped-def]  # numba infers the types
        """m and s of each row into `sums` f32 [rows, 2], a into `chunk_mixed`; a row that sees nothing here has m = −inf."""
        block_size, dim, pitch, window = o[BLOCK_SIZE], o[DIM], o[VALUE_PITCH], o[WINDOW]
        share, position, queries = o[HEADS] // o[KV_HEADS], unit[POSITION], unit[QUERIES]
        rows, base = queries * share, chunk * KEY_CHUNK
        first = max(base, position - window + 1 if window else 0)
        last = min(base + KEY_CHUNK, position + queries)
        low, high = (first - base) // LANES, (last - base + LANES - 1) // LANES
        for group in range(low, high):
            token = base + group * LANES
            at = (table[token // block_size] * o[KV_HEADS] + head) * block_size + token % block_size
            score_rows(q, pitch, rows, o[KEYS] + bytes_each * at * dim, dim, scores + 4 * LANES * group)
        for row in range(rows):
            here = position + row // share
            line = f32_at(scores + 4 * KEY_CHUNK * row, KEY_CHUNK)
            oldest = here - window + 1 if window else 0
            for j in range(low * LANES, min(oldest - base, high * LANES)):
                line[j] = -np.inf
            for j in range(max(here + 1 - base, low * LANES), high * LANES):
                line[j] = -np.inf
            start = scores + 4 * (KEY_CHUNK * row + LANES * low)
            top = largest(start, high - low)
            sums[2 * row] = top
            if top == -np.inf:
                for j in range(low * LANES, high * LANES):
                    line[j] = 0.0
            else:
                sums[2 * row + 1] = soften(start, high - low, top)
        f32_at(chunk_mixed, rows * pitch)[:] = 0.0
        token = first
        while token < last:
            count = min(block_size - token % block_size, last - token)
            at = (table[token // block_size] * o[KV_HEADS] + head) * block_size + token % block_size
            mix_rows(scores + 4 * (token - base), rows, o[VALUES] + bytes_each * at * pitch, pitch, count, chunk_mixed)
            token += count

    @entry
    def attention_units(operands, step, counter, scratch):  # type: ignore[no-untyped-def]  # numba infers the types
        o = i64_at(operands, OPERANDS)
        units = i64_at(step, o[COUNT] + 1)[o[COUNT]]
        heads, dim, pitch, window = o[KV_HEADS], o[DIM], o[VALUE_PITCH], o[WINDOW]
        share = o[HEADS] // heads
        tile = QUERY_TILE * share
        q, scores = scratch, scratch + 4 * tile * pitch
        mixed = scores + 4 * tile * KEY_CHUNK
        chunk_mixed = mixed + 4 * tile * pitch
        sums, running = f32_at(chunk_mixed + 4 * tile * pitch, 2 * tile), f32_at(chunk_mixed + 4 * tile * (pitch + LANES), 2 * tile)
        scale = f32_at(operands + 8 * SCALE, 1)[0]
        while True:
            task = take(counter)
            if task >= units * heads:
                break
            unit, head = i64_at(o[UNITS] + 8 * UNIT * (task // heads), UNIT), task % heads
            rows = unit[QUERIES] * share
            table = i64_at(o[TABLES] + 8 * unit[TABLE], (unit[POSITION] + unit[QUERIES] - 1) // o[BLOCK_SIZE] + 1)
            for row in range(rows):
                source = f32_at(o[Q] + 4 * ((unit[ROW] + row // share) * o[Q_PITCH] + (head * share + row % share) * dim), dim)
                target = f32_at(q + 4 * row * pitch, dim)
                for d in range(dim):
                    target[d] = source[d] * scale
            oldest = max(0, unit[POSITION] - window + 1) if window else 0
            newest = (unit[POSITION] + unit[QUERIES] - 1) // KEY_CHUNK
            if unit[CHUNK] >= 0:
                attend_chunk(o, unit, table, head, unit[CHUNK], q, scores, sums, chunk_mixed)
                part = f32_at(o[PARTS] + 4 * (unit[PART] * heads + head) * share * (pitch + LANES), share * (pitch + LANES))
                for row in range(share):
                    line = part[row * (pitch + LANES) : (row + 1) * (pitch + LANES)]
                    line[0], line[1] = sums[2 * row], sums[2 * row + 1]
                    line[LANES:] = f32_at(chunk_mixed + 4 * row * pitch, pitch)
                continue
            f32_at(mixed, rows * pitch)[:] = 0.0
            for row in range(rows):
                running[2 * row], running[2 * row + 1] = -np.inf, 0.0
            for chunk in range(oldest // KEY_CHUNK, newest + 1):
                attend_chunk(o, unit, table, head, chunk, q, scores, sums, chunk_mixed)
                for row in range(rows):
                    whole, piece = f32_at(mixed + 4 * row * pitch, pitch), f32_at(chunk_mixed + 4 * row * pitch, pitch)
                    m, s = _join(running[2 * row], running[2 * row + 1], whole, sums[2 * row], sums[2 * row + 1], piece, pitch)
                    running[2 * row], running[2 * row + 1] = m, s
            for row in range(rows):
                out = f32_at(o[OUT] + 4 * ((unit[ROW] + row // share) * o[OUT_PITCH] + (head * share + row % share) * dim), dim)
                whole = f32_at(mixed + 4 * row * pitch, pitch)
                for d in range(dim):
                    out[d] = whole[d] / running[2 * row + 1]

    return attention_units


@entry
def join_parts(operands, step, counter, scratch):  # type: ignore[no-untyped-def]  # numba infers the types
    """Join the parts of each split query: tasks are splits times key heads. UNITS: here the splits, i64 [COUNT's number, JOIN]."""
    o = i64_at(operands, OPERANDS)
    splits = i64_at(step, o[COUNT] + 1)[o[COUNT]]
    heads, dim, pitch = o[KV_HEADS], o[DIM], o[VALUE_PITCH]
    share = o[HEADS] // heads
    size = pitch + LANES
    while True:
        task = take(counter)
        if task >= splits * heads:
            break
        split, head = i64_at(o[UNITS] + 8 * JOIN * (task // heads), JOIN), task % heads
        for row in range(share):
            whole = f32_at(scratch, pitch)
            whole[:] = 0.0
            m, s = np.float32(-np.inf), np.float32(0.0)
            for part in range(split[1], split[1] + split[2]):
                line = f32_at(o[PARTS] + 4 * ((part * heads + head) * share + row) * size, size)
                m, s = _join(m, s, whole, line[0], line[1], line[LANES:], pitch)
            out = f32_at(o[OUT] + 4 * (split[0] * o[OUT_PITCH] + (head * share + row) * dim), dim)
            for d in range(dim):
                out[d] = whole[d] / s
