"""The inner loops of attention: scores of sixteen keys at once, their softmax weights, and the weighted sum of values.

Keys lie with sixteen tokens side by side for each dimension, so a score is a plain sum over dimensions in rising order, and a lane is a
key. A weighted sum goes over keys in rising order, and a lane is a dimension. How many queries are computed together changes nothing.
"""

from __future__ import annotations

from functools import cache
from typing import Any, Literal

from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from arctool.kernels.cpu.exp_ir import exp_of
from arctool.kernels.cpu.ir import (
    FLOAT,
    I32,
    I64,
    INTS,
    LANES,
    VECTOR,
    constant,
    fma,
    fold,
    pointer,
    put_vector,
    shuffled,
    splat,
    vector_at,
)

I16 = ir.IntType(16)
KvKind = Literal["f32", "bf16"]
"""How keys and values are stored."""


def _stored_vector(builder: ir.IRBuilder, base: ir.Value, element: ir.Value, kind: KvKind) -> ir.Value:
    """Sixteen stored numbers as f32, from `element` on."""
    if kind == "f32":
        return vector_at(builder, base, element)
    bits = ir.VectorType(I16, LANES)
    stored = builder.load(builder.bitcast(builder.gep(base, [element]), bits.as_pointer()), align=2)
    return builder.bitcast(builder.shl(builder.zext(stored, INTS), ir.Constant(INTS, [16] * LANES)), VECTOR)


def stored_type(kind: KvKind) -> ir.Type:
    """The IR type of one stored number."""
    return FLOAT if kind == "f32" else I16


@cache
def scores_of(queries: int, kind: KvKind) -> Any:
    """An intrinsic: score(q, q_pitch, keys, dim, out, out_pitch): out[r, 0:16] = Σ_d q[r, d] · keys[d, 0:16] for `queries` rows r."""

    @intrinsic
    def score(typing_context: Any, q: Any, q_pitch: Any, keys: Any, dim: Any, out: Any, out_pitch: Any) -> Any:
        signature = types.void(*[types.int64] * 6)

        def generate(context: Any, builder: Any, sig: Any, arguments: Any) -> Any:
            q, q_pitch, keys, dim, out, out_pitch = arguments
            rows, target = pointer(builder, q, FLOAT), pointer(builder, out, FLOAT)
            stored = pointer(builder, keys, stored_type(kind))
            starts = [builder.gep(rows, [builder.mul(q_pitch, I64(r))]) for r in range(queries)]
            sums = [cgutils.alloca_once_value(builder, constant(0.0)) for _ in range(queries)]
            with cgutils.for_range(builder, dim) as loop:
                key = _stored_vector(builder, stored, builder.mul(loop.index, I64(LANES)), kind)
                for start, total in zip(starts, sums, strict=True):
                    factor = splat(builder, builder.load(builder.gep(start, [loop.index])))
                    builder.store(fma(builder, factor, key, builder.load(total)), total)
            for r, total in enumerate(sums):
                put_vector(builder, builder.load(total), target, builder.mul(out_pitch, I64(r)))
            return context.get_dummy_value()

        return signature, generate

    return score


@cache
def mixed_of(queries: int, vectors: int, kind: KvKind) -> Any:
    """An intrinsic: mix(p, p_pitch, values, v_pitch, count, out, out_pitch).

    out[r, :16·vectors] += Σ_j p[r, j] · values[j, :16·vectors] over `count` keys j in rising order, for `queries` rows r.
    """

    @intrinsic
    def mix(typing_context: Any, p: Any, p_pitch: Any, values: Any, v_pitch: Any, count: Any, out: Any, out_pitch: Any) -> Any:
        signature = types.void(*[types.int64] * 7)

        def generate(context: Any, builder: Any, sig: Any, arguments: Any) -> Any:
            p, p_pitch, values, v_pitch, count, out, out_pitch = arguments
            weights, target = pointer(builder, p, FLOAT), pointer(builder, out, FLOAT)
            stored = pointer(builder, values, stored_type(kind))
            starts = [builder.gep(weights, [builder.mul(p_pitch, I64(r))]) for r in range(queries)]
            places = [[builder.add(builder.mul(out_pitch, I64(r)), I64(LANES * v)) for v in range(vectors)] for r in range(queries)]
            sums = [[cgutils.alloca_once_value(builder, vector_at(builder, target, place)) for place in row] for row in places]
            with cgutils.for_range(builder, count) as loop:
                row = builder.mul(loop.index, v_pitch)
                value = [_stored_vector(builder, stored, builder.add(row, I64(LANES * v)), kind) for v in range(vectors)]
                for start, totals in zip(starts, sums, strict=True):
                    factor = splat(builder, builder.load(builder.gep(start, [loop.index])))
                    for v, total in enumerate(totals):
                        builder.store(fma(builder, factor, value[v], builder.load(total)), total)
            for row_places, totals in zip(places, sums, strict=True):
                for place, total in zip(row_places, totals, strict=True):
                    put_vector(builder, builder.load(total), target, place)
            return context.get_dummy_value()

        return signature, generate

    return mix


@intrinsic
def largest(typing_context: Any, scores: Any, groups: Any) -> Any:
    """The largest of 16 · `groups` f32 at an address; a NaN is passed over."""
    signature = types.float32(types.int64, types.int64)

    def generate(context: Any, builder: Any, sig: Any, arguments: Any) -> Any:
        base = pointer(builder, arguments[0], FLOAT)
        best = cgutils.alloca_once_value(builder, constant(float("-inf")))
        with cgutils.for_range(builder, arguments[1]) as loop:
            one, other = builder.load(best), vector_at(builder, base, builder.mul(loop.index, I64(LANES)))
            builder.store(builder.select(builder.fcmp_ordered(">", other, one), other, one), best)
        total, width = builder.load(best), LANES
        while width > 1:
            width //= 2
            first, second = (shuffled(builder, total, list(range(start, start + width))) for start in (0, width))
            total = builder.select(builder.fcmp_ordered(">", second, first), second, first)
        return builder.extract_element(total, I32(0))

    return signature, generate


@intrinsic
def soften(typing_context: Any, scores: Any, groups: Any, top: Any) -> Any:
    """Replace 16 · `groups` scores by exp(score − top); returns their sum: lane by lane over the groups, then folded."""
    signature = types.float32(types.int64, types.int64, types.float32)

    def generate(context: Any, builder: Any, sig: Any, arguments: Any) -> Any:
        base, highest = pointer(builder, arguments[0], FLOAT), splat(builder, arguments[2])
        total = cgutils.alloca_once_value(builder, constant(0.0))
        with cgutils.for_range(builder, arguments[1]) as loop:
            start = builder.mul(loop.index, I64(LANES))
            weights = exp_of(builder, builder.fsub(vector_at(builder, base, start), highest))
            put_vector(builder, weights, base, start)
            builder.store(builder.fadd(builder.load(total), weights), total)
        return fold(builder, builder.load(total))

    return signature, generate
