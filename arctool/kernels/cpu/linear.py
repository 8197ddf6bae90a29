"""Matrix products over stored rows on a CPU: a panel of rows is expanded to f32 in the lane's own memory and meets every token there.

A row is expanded once, whatever the number of tokens. Each dot product has the one order of `ir.dot_oracle`, so a token's result does not
depend on how many others there are, where in the batch it stands, or how the rows are shared out.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np

from arctool.kernels.cpu.jit import entry, jit
from arctool.kernels.cpu.memory import f32_at, fetch, i64_at, take, u8_at, u16_at
from arctool.kernels.cpu.rotation import restore
from arctool.kernels.cpu.streams_ir import QUARTER, direct_dot, expander
from arctool.kernels.cpu.tile_ir import direct_rows, host_tile, tile
from arctool.quant.trellis import Geometry

PANEL_BYTES = 256 << 10
"""Expanded rows that a lane holds at a time: they share the second-level cache with the tokens of a tile."""

LONGEST_PANEL = 32
NEAR_BYTES = 40 << 10
"""Activations up to which a panel is one tile of rows: they stay in the first-level cache while panel after panel passes them."""

FETCH_AHEAD = 4096
"""Bytes of stored rows between what is asked for and what is computed, with a single token: weights stream by once, and a core should not
wait for them line by line."""

TASK_ROWS = 32
"""Rows of a task at least; a task holds whole blocks of the output's rotation."""

# Operands. Of the weight: rows, inputs, inputs padded to 16, where its rows lie and how long each is, and what their kind needs beside
# them (`TAIL`: a padded copy of the rows from `TAIL_FIRST` on; `PERIODS`: periods or blocks of a row, or entries of the table).
ROWS, INPUTS, WIDTH, DATA, ROW_BYTES, TAIL_FIRST, TAIL, TABLE, PERIODS = range(9)
SIDE_A, SIDE_A_BYTES, SIDE_B, SIDE_B_BYTES, SCALES, PITCH, PANEL = range(9, 16)
# Of the output: rows of a task, block of its rotation (0: none), signs f32, bias f32 (0: none).
TASK, BLOCK, SIGNS, BIAS = range(16, 20)
# Of the call: activations, result, their pitches in floats, and which number of the step counts the tokens.
X, X_PITCH, Y, Y_PITCH, COUNT = range(20, 25)
OPERANDS = 25


@dataclass(frozen=True)
class RowKind:
    """How the rows of a family are read, as jitted functions.

    `expand(operands, row, out)`: the unscaled values of one row, zeros up to its padded width. `dot(operands, x, y, first, last)`: products
    with a single token straight from the stored rows, from `first` on; returns the first row that it leaves to expansion.
    """

    expand: Any
    dot: Any


@jit()
def _no_rows(o, x, y, first, last):  # type: ignore[no-untyped-def]  # numba infers the types
    return first


@cache
def trellis_rows(geometry: Geometry, computed: bool) -> RowKind:
    """Rows of a trellis."""
    unit = expander(geometry, computed)
    expand = unit.expand

    @jit()
    def expand_row(o, row, out):  # type: ignore[no-untyped-def]  # numba infers the types
        source = o[DATA] + row * o[ROW_BYTES] if row < o[TAIL_FIRST] else o[TAIL] + (row - o[TAIL_FIRST]) * o[ROW_BYTES]
        expand(source, o[TABLE], o[PERIODS], out)
        line = f32_at(out, o[WIDTH])
        for j in range(o[INPUTS], o[WIDTH]):
            line[j] = 0.0

    return RowKind(expand_row, _no_rows if computed or geometry.v > QUARTER else _direct_rows(geometry, unit.weights))


def _direct_rows(geometry: Geometry, period: int) -> Any:
    dot, rows = direct_dot(geometry, direct_rows()), direct_rows()

    @jit()
    def dot_rows(o, x, y, first, last):  # type: ignore[no-untyped-def]  # numba infers the types
        row = first
        if o[PERIODS] * period == o[INPUTS]:
            while row + rows <= min(last, o[TAIL_FIRST]):
                source = o[DATA] + row * o[ROW_BYTES]
                fetch(source + FETCH_AHEAD, rows * o[ROW_BYTES])
                dot(source, o[ROW_BYTES], o[TABLE], o[PERIODS], x, o[SCALES] + 4 * row, y + 4 * row)
                row += rows
        return row

    return dot_rows


@cache
def block_rows(expand: Any) -> RowKind:
    """Rows of GGML blocks; `expand(row u8, blocks, out f32)` is the type's own."""

    @jit()
    def expand_row(o, row, out):  # type: ignore[no-untyped-def]  # numba infers the types
        line = f32_at(out, o[WIDTH])
        expand(u8_at(o[DATA] + row * o[ROW_BYTES], o[ROW_BYTES]), o[PERIODS], line)
        for j in range(o[INPUTS], o[WIDTH]):
            line[j] = 0.0

    return RowKind(expand_row, _no_rows)


@cache
def scaled_rows(decode: Any, bytes_beside: bool) -> RowKind:
    """Rows of codes with factors beside them, f32 or (`bytes_beside`) u8; `decode` is the kind's own."""

    @jit()
    def expand_row(o, row, out):  # type: ignore[no-untyped-def]  # numba infers the types
        codes, line = u8_at(o[DATA] + row * o[ROW_BYTES], o[ROW_BYTES]), f32_at(out, o[WIDTH])
        table, offsets = f32_at(o[TABLE], o[PERIODS]), f32_at(o[SIDE_B] + row * o[SIDE_B_BYTES], o[SIDE_B_BYTES] // 4)
        if bytes_beside:
            decode(codes, u8_at(o[SIDE_A] + row * o[SIDE_A_BYTES], o[SIDE_A_BYTES]), offsets, table, line, o[INPUTS])
        else:
            decode(codes, f32_at(o[SIDE_A] + row * o[SIDE_A_BYTES], o[SIDE_A_BYTES] // 4), offsets, table, line, o[INPUTS])
        for j in range(o[INPUTS], o[WIDTH]):
            line[j] = 0.0

    return RowKind(expand_row, _no_rows)


@jit()
def _bf16_row(o, row, out):  # type: ignore[no-untyped-def]  # numba infers the types
    bits, line = u16_at(o[DATA] + row * o[ROW_BYTES], o[INPUTS]), f32_at(out, o[WIDTH])
    words = line.view(np.uint32)
    for j in range(o[INPUTS]):
        words[j] = bits[j] << 16
    for j in range(o[INPUTS], o[WIDTH]):
        line[j] = 0.0


@jit()
def _f32_row(o, row, out):  # type: ignore[no-untyped-def]  # numba infers the types
    stored, line = f32_at(o[DATA] + row * o[ROW_BYTES], o[INPUTS]), f32_at(out, o[WIDTH])
    line[: o[INPUTS]] = stored
    for j in range(o[INPUTS], o[WIDTH]):
        line[j] = 0.0


BF16_ROWS = RowKind(_bf16_row, _no_rows)
F32_ROWS = RowKind(_f32_row, _no_rows)


@jit()
def finish(o, y, first, last):  # type: ignore[no-untyped-def]  # numba infers the types
    """Restore the outputs [first, last), whole blocks, of a token whose result begins at address `y`, and add the bias."""
    place = y + 4 * first
    if o[BLOCK]:
        restore(place, o[SIGNS] + 4 * first, o[BLOCK], last - first)
    if o[BIAS]:
        y, bias = f32_at(place, last - first), f32_at(o[BIAS] + 4 * first, last - first)
        for i in range(last - first):
            y[i] += bias[i]


@cache
def row_task(kind: RowKind) -> Any:
    """multiply_task(o, x, y, first, last, count, scratch): rows [first, last) of a weight with `count` tokens from address x, to y."""
    tile_rows, tile_tokens = host_tile()
    expand_row, dot_rows = kind.expand, kind.dot
    whole, few_tokens, few_rows, single = (tile(r, t) for r in (tile_rows, 1) for t in (tile_tokens, 1))

    @jit()
    def multiply(o, from_x, to_y, start, size, count, scratch):  # type: ignore[no-untyped-def]  # numba infers the types
        """`size` expanded rows from `start` on, with every token; tiles of tokens outside, so that one stays in the first-level cache."""
        pitch, width, x_pitch, y_pitch = o[PITCH], o[WIDTH], o[X_PITCH], o[Y_PITCH]
        token = 0
        while token < count:
            x, y = from_x + 4 * token * x_pitch, to_y + 4 * (token * y_pitch + start)
            many = count - token >= tile_tokens
            row = 0
            while row < size:
                w, scales, out = scratch + 4 * row * pitch, o[SCALES] + 4 * (start + row), y + 4 * row
                if size - row >= tile_rows:
                    if many:
                        whole(w, pitch, x, x_pitch, width, scales, out, y_pitch)
                    else:
                        few_tokens(w, pitch, x, x_pitch, width, scales, out, y_pitch)
                    row += tile_rows
                else:
                    if many:
                        few_rows(w, pitch, x, x_pitch, width, scales, out, y_pitch)
                    else:
                        single(w, pitch, x, x_pitch, width, scales, out, y_pitch)
                    row += 1
            token += tile_tokens if many else 1

    @jit()
    def multiply_task(o, x, y, first, last, count, scratch):  # type: ignore[no-untyped-def]  # numba infers the types
        if count == 1:
            fetch(o[DATA] + first * o[ROW_BYTES], min(FETCH_AHEAD, (last - first) * o[ROW_BYTES]))
        begin = dot_rows(o, x, y, first, last) if count == 1 else first
        panel = o[PANEL] if 4 * count * o[WIDTH] > NEAR_BYTES else tile_rows
        for start in range(begin, last, panel):
            size = min(panel, last - start)
            if count == 1:
                fetch(o[DATA] + start * o[ROW_BYTES] + FETCH_AHEAD, size * o[ROW_BYTES])
            for row in range(size):
                expand_row(o, start + row, scratch + 4 * row * o[PITCH])
            multiply(o, x, y, start, size, count, scratch)
        if o[BLOCK] or o[BIAS]:
            for token in range(count):
                finish(o, y + 4 * token * o[Y_PITCH], first, last)

    return multiply_task


@cache
def product(kind: RowKind) -> Callable[[], int]:
    """The kernel of y = x Wᵀ + b over a weight whose rows are of that kind; a task is `TASK` rows of W."""
    multiply_task = row_task(kind)

    @entry
    def multiply_rows(operands, step, counter, scratch):  # type: ignore[no-untyped-def]  # numba infers the types
        o = i64_at(operands, OPERANDS)
        count = i64_at(step, o[COUNT] + 1)[o[COUNT]]
        if count == 0:
            return
        while True:
            first = take(counter) * o[TASK]
            if first >= o[ROWS]:
                break
            multiply_task(o, o[X], o[Y], first, min(first + o[TASK], o[ROWS]), count, scratch)

    return multiply_rows


@cache
def expansion(kind: RowKind) -> Callable[[], int]:
    """The kernel that writes the weights themselves, scale applied: Y f32 [rows, inputs], a task is `TASK` rows."""
    expand_row = kind.expand

    @entry
    def expand_rows(operands, step, counter, scratch):  # type: ignore[no-untyped-def]  # numba infers the types
        o = i64_at(operands, OPERANDS)
        while True:
            first = take(counter) * o[TASK]
            if first >= o[ROWS]:
                break
            for row in range(first, min(first + o[TASK], o[ROWS])):
                expand_row(o, row, scratch)
                line, out = f32_at(scratch, o[WIDTH]), f32_at(o[Y] + 4 * row * o[Y_PITCH], o[INPUTS])
                scale = f32_at(o[SCALES] + 4 * row, 1)[0]
                for j in range(o[INPUTS]):
                    out[j] = line[j] * scale

    return expand_rows


@cache
def gathering(kind: RowKind) -> Callable[[], int]:
    """The kernel that looks up rows of a table: Y f32 [tokens, inputs] of the ids i64 at X; a task is a token.

    A rotated row is restored in the oracle's order: H and S of the inputs (BLOCK, BIAS: their signs), then the row's own sign (SIGNS).
    """
    expand_row = kind.expand

    @entry
    def gather_rows(operands, step, counter, scratch):  # type: ignore[no-untyped-def]  # numba infers the types
        o = i64_at(operands, OPERANDS)
        count = i64_at(step, o[COUNT] + 1)[o[COUNT]]
        while True:
            token = take(counter)
            if token >= count:
                break
            row = i64_at(o[X] + 8 * token, 1)[0]
            expand_row(o, row, scratch)
            line, out = f32_at(scratch, o[WIDTH]), f32_at(o[Y] + 4 * token * o[Y_PITCH], o[INPUTS])
            scale = f32_at(o[SCALES] + 4 * row, 1)[0]
            for j in range(o[INPUTS]):
                out[j] = line[j] * scale
            if o[BLOCK]:
                restore(o[Y] + 4 * token * o[Y_PITCH], o[BIAS], o[BLOCK], o[INPUTS])
                sign = f32_at(o[SIGNS] + 4 * row, 1)[0]
                for j in range(o[INPUTS]):
                    out[j] *= sign

    return gather_rows
