"""Trellis streams expanded to f32 by straight-line IR: every shift and offset of a period of steps is a constant.

A period is the shortest run of steps that covers whole groups of sixteen weights and whole bytes. One 64-bit load serves as many states as
it covers. A row's first period shifts zeros in where its history would lie before the row; its last one may read up to `OVERRUN` bytes
past the row, so whoever calls keeps so many readable.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from math import gcd
from typing import Any

import numpy as np
from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from arctool.kernels.cpu.ir import FLOAT, I8, I32, I64, LANES, fma, fold, pointer, shuffled, splat
from arctool.quant.codebooks import SUM2_CENTRE, SUM2_CONSTANTS, SUM2_STEP
from arctool.quant.trellis import Geometry

WORD = 64
OVERRUN = 64
"""Bytes behind a row that its last period may read: what is left of a period that the row does not fill, and of its last word."""

HALF_LANES = LANES // 2


@dataclass(frozen=True)
class Expander:
    """`expand(source, table, periods, out)`, an intrinsic over i64 addresses: writes `periods · weights` unscaled codebook values, f32."""

    expand: Any
    weights: int

    def periods(self, in_features: int) -> int:
        """Periods that cover a row."""
        return -(-in_features // self.weights)


def period_steps(geometry: Geometry) -> int:
    """Steps of a period: whole groups of sixteen weights, whole bytes."""
    by_lanes, by_bytes = LANES // gcd(LANES, geometry.v), 8 // gcd(8, geometry.k)
    return by_lanes * by_bytes // gcd(by_lanes, by_bytes)


@cache
def expander(geometry: Geometry, computed: bool) -> Expander:
    """The expander of one geometry; `computed`: with the `sum2` codebook, which needs no table."""
    steps = period_steps(geometry)
    size = steps * geometry.k // 8
    write = _write_computed if computed else _write_from_table

    @intrinsic
    def expand(typing_context: Any, source: Any, table: Any, periods: Any, out: Any) -> Any:
        signature = types.void(*[types.int64] * 4)

        def generate(context: Any, builder: Any, sig: Any, arguments: Any) -> Any:
            source, table, periods, out = arguments
            stream = pointer(builder, source, I8)
            write(builder, geometry, _Words(builder, stream, geometry, first=True), table, out)
            with cgutils.for_range(builder, builder.sub(periods, I64(1))) as loop:
                index = builder.add(loop.index, I64(1))
                here = builder.gep(stream, [builder.mul(index, I64(size))])
                target = builder.add(out, builder.mul(index, I64(4 * steps * geometry.v)))
                write(builder, geometry, _Words(builder, here, geometry, first=False), table, target)
            return context.get_dummy_value()

        return signature, generate

    return Expander(expand, steps * geometry.v)


QUARTER = 4
"""Weights that a multiply-add takes at once on their way from the table to the sums."""


@cache
def direct_dot(geometry: Geometry, rows: int) -> Any:
    """An intrinsic: dot(source, row_bytes, table, periods, x, scales, y): y[r] = scales[r] · Σ w[r, j] · x[j] for `rows` rows, one token.

    The weights go from the table into the sums without a stop in memory, in the order of `ir.dot_oracle` all the same. Geometries with
    V of at most 4 and a table; rows that their periods fill exactly. Addresses, all i64.
    """
    steps = period_steps(geometry)
    size, groups = steps * geometry.k // 8, LANES // QUARTER
    quarter = ir.VectorType(FLOAT, QUARTER)

    @intrinsic
    def dot(typing_context: Any, source: Any, row_bytes: Any, table: Any, periods: Any, x: Any, scales: Any, y: Any) -> Any:
        signature = types.void(*[types.int64] * 7)

        def generate(context: Any, builder: Any, sig: Any, arguments: Any) -> Any:
            source, row_bytes, table, periods, x, scales, y = arguments
            values, inputs = pointer(builder, table, FLOAT), pointer(builder, x, FLOAT)
            streams = [builder.gep(pointer(builder, source, I8), [builder.mul(row_bytes, I64(r))]) for r in range(rows)]
            zero = ir.Constant(quarter, [0.0] * QUARTER)
            sums = [[cgutils.alloca_once_value(builder, zero) for _ in range(groups)] for _ in range(rows)]

            def period(offset: ir.Value, start: ir.Value, first: bool) -> None:
                words = [_Words(builder, builder.gep(stream, [offset]), geometry, first) for stream in streams]
                for group in range(steps * geometry.v // QUARTER):
                    place = builder.gep(inputs, [builder.add(start, I64(group * QUARTER))])
                    factors = builder.load(builder.bitcast(place, quarter.as_pointer()), align=4)
                    for row in range(rows):
                        total = sums[row][group % groups]
                        weights = _quarter(builder, geometry, words[row], group, values)
                        builder.store(fma(builder, weights, factors, builder.load(total)), total)

            period(I64(0), I64(0), True)
            with cgutils.for_range(builder, builder.sub(periods, I64(1))) as loop:
                index = builder.add(loop.index, I64(1))
                period(builder.mul(index, I64(size)), builder.mul(index, I64(steps * geometry.v)), False)
            factors, out = pointer(builder, scales, FLOAT), pointer(builder, y, FLOAT)
            for row in range(rows):
                parts = [builder.load(total) for total in sums[row]]
                halves = [shuffled(builder, parts[i], list(range(2 * QUARTER)), parts[i + 1]) for i in (0, 2)]
                total = fold(builder, shuffled(builder, halves[0], list(range(LANES)), halves[1]))
                scale = builder.load(builder.gep(factors, [I64(row)]))
                builder.store(builder.fmul(scale, total), builder.gep(out, [I64(row)]))
            return context.get_dummy_value()

        return signature, generate

    return dot


def _quarter(builder: ir.IRBuilder, geometry: Geometry, words: _Words, group: int, values: ir.Value) -> ir.Value:
    """The four weights of a group of a period, f32 [4], gathered from as many rows of the table as it takes."""
    steps = QUARTER // geometry.v
    rows = range(group * steps, (group + 1) * steps)
    if geometry.v == 1:
        weights: ir.Value = ir.Constant(ir.VectorType(FLOAT, QUARTER), ir.Undefined)
        for lane, step in enumerate(rows):
            weights = builder.insert_element(weights, _table_row(builder, geometry, *words.at(step), values, FLOAT), I32(lane))
        return weights
    found = [_table_row(builder, geometry, *words.at(step), values, ir.VectorType(FLOAT, geometry.v)) for step in rows]
    return found[0] if len(found) == 1 else shuffled(builder, found[0], list(range(QUARTER)), found[1])


def _table_row(builder: ir.IRBuilder, geometry: Geometry, word: ir.Value, bit: int, values: ir.Value, kind: ir.Type) -> ir.Value:
    """The table's row of the state that begins at `bit` of a word, as one value of type `kind`."""
    state = builder.and_(builder.lshr(word, I64(bit)), I64(geometry.states - 1))
    row = builder.bitcast(builder.gep(values, [builder.mul(state, I64(geometry.v))]), kind.as_pointer())
    return builder.load(row, align=4)


class _Words:
    """The 64-bit words of one period, each loaded once: `at(step)` gives a word and the step's state's first bit in it."""

    def __init__(self, builder: ir.IRBuilder, stream: ir.Value, geometry: Geometry, first: bool) -> None:
        self._builder, self._stream, self._geometry, self._first = builder, stream, geometry, first
        self._word: ir.Value | None = None
        self._byte = 0

    def at(self, step: int) -> tuple[ir.Value, int]:
        bit = self._geometry.k * (step + 1) - self._geometry.l
        if self._word is None or bit + self._geometry.l - 8 * self._byte > WORD:
            self._byte = bit // 8
            self._word = self._load(self._byte)
        return self._word, bit - 8 * self._byte

    def _load(self, byte: int) -> ir.Value:
        before = -byte if self._first and byte < 0 else 0
        place = self._builder.gep(self._stream, [I64(byte + before)])
        word = self._builder.load(self._builder.bitcast(place, I64.as_pointer()), align=1)
        return self._builder.shl(word, I64(8 * before)) if before else word


def _write_from_table(builder: ir.IRBuilder, geometry: Geometry, words: _Words, table: ir.Value, out: ir.Value) -> None:
    v = geometry.v
    # One weight or two move through integer registers, of whose loads a core does more at once.
    kind = {1: I32, 2: I64}.get(v, ir.VectorType(FLOAT, v))
    rows, target = pointer(builder, table, FLOAT), pointer(builder, out, FLOAT)
    for step in range(period_steps(geometry)):
        place = builder.bitcast(builder.gep(target, [I64(step * v)]), kind.as_pointer())
        builder.store(_table_row(builder, geometry, *words.at(step), rows, kind), place, align=4)


def _write_computed(builder: ir.IRBuilder, geometry: Geometry, words: _Words, table: ir.Value, out: ir.Value) -> None:
    target = pointer(builder, out, FLOAT)
    for first in range(0, period_steps(geometry), HALF_LANES):
        states = _states(builder, geometry, [words.at(step) for step in range(first, first + HALF_LANES)])
        values = [_sum2(builder, states, multiplier, addend) for multiplier, addend in SUM2_CONSTANTS[geometry.k]]
        pairs = shuffled(builder, values[0], [i // 2 + HALF_LANES * (i % 2) for i in range(LANES)], values[1])
        place = builder.bitcast(builder.gep(target, [I64(2 * first)]), pairs.type.as_pointer())
        builder.store(pairs, place, align=4)


def _states(builder: ir.IRBuilder, geometry: Geometry, found: list[tuple[ir.Value, int]]) -> ir.Value:
    """The states i32 [8] of eight steps, given as words and first bits."""
    wide = ir.VectorType(I64, HALF_LANES)
    words = splat(builder, found[0][0], HALF_LANES)
    for lane, (word, _) in enumerate(found):
        if word is not found[0][0]:
            words = builder.insert_element(words, word, I32(lane))
    shifted = builder.lshr(words, ir.Constant(wide, [bit for _, bit in found]))
    masked = builder.and_(shifted, ir.Constant(wide, [geometry.states - 1] * HALF_LANES))
    return builder.trunc(masked, ir.VectorType(I32, HALF_LANES))


def _sum2(builder: ir.IRBuilder, states: ir.Value, multiplier: int, addend: int) -> ir.Value:
    """`quant.codebooks.sum2` of one hash, f32 [8]: the sum of the four bytes, centred and scaled with one rounding."""

    def ints(value: int) -> ir.Constant:
        return ir.Constant(states.type, [value & 0xFFFFFFFF] * HALF_LANES)

    hashed = builder.add(builder.mul(states, ints(int(multiplier))), ints(int(addend)))
    pairs = builder.add(builder.and_(hashed, ints(0x00FF00FF)), builder.and_(builder.lshr(hashed, ints(8)), ints(0x00FF00FF)))
    total = builder.add(builder.and_(pairs, ints(0xFFFF)), builder.lshr(pairs, ints(16)))
    centred = builder.sitofp(builder.sub(total, ints(int(SUM2_CENTRE))), ir.VectorType(FLOAT, HALF_LANES))
    return builder.fmul(centred, ir.Constant(centred.type, [float(np.float32(SUM2_STEP))] * HALF_LANES))
