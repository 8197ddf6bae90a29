"""The block Hadamard rotation of activations on a CPU, bit for bit the one of `quant.hadamard`: the same additions, one scaling.

Blocks of 16 to 128 values stay in vector registers from their load to their store; smaller ones take plain loops.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import numpy as np
from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from arctool.kernels.cpu.ir import FLOAT, I64, LANES, VECTOR, constant, pointer, put_vector, shuffled, vector_at
from arctool.kernels.cpu.jit import jit
from arctool.kernels.cpu.memory import f32_at


def _within(builder: ir.IRBuilder, x: ir.Value, half: int) -> ir.Value:
    """One pass of half-width `half` < 16 inside a vector: low + high in the low lanes, low − high in the high ones."""
    partner = shuffled(builder, x, [lane ^ half for lane in range(LANES)])
    signs = ir.Constant(VECTOR, [-1.0 if lane & half else 1.0 for lane in range(LANES)])
    return builder.fadd(partner, builder.fmul(x, signs))  # a product with ±1 is exact, and low + (−high) is low − high


def _transformed(builder: ir.IRBuilder, vectors: list[ir.Value]) -> list[ir.Value]:
    """H of one block, given and returned as its vectors, with half-widths in rising order, scaled once."""
    half = 1
    while half < LANES:
        vectors = [_within(builder, vector, half) for vector in vectors]
        half *= 2
    step = 1
    while step < len(vectors):
        mixed = list(vectors)
        for i in range(len(vectors)):
            if not i & step:
                mixed[i] = builder.fadd(vectors[i], vectors[i + step])
                mixed[i + step] = builder.fsub(vectors[i], vectors[i + step])
        vectors, step = mixed, 2 * step
    scale = constant(float(np.float32(1.0 / np.sqrt(np.float64(LANES * len(vectors))))))
    return [builder.fmul(vector, scale) for vector in vectors]


@cache
def _blocks(size: int, signs_first: bool) -> Any:
    """An intrinsic: turn(x, signs, out, count): out = H S x (`signs_first`) or S H x over `count` blocks of `size`; addresses."""

    @intrinsic
    def turn(typing_context: Any, x: Any, signs: Any, out: Any, count: Any) -> Any:
        signature = types.void(*[types.int64] * 4)

        def generate(context: Any, builder: Any, sig: Any, arguments: Any) -> Any:
            source, sign, target = (pointer(builder, address, FLOAT) for address in arguments[:3])
            with cgutils.for_range(builder, arguments[3]) as loop:
                start = builder.mul(loop.index, I64(size))
                places = [builder.add(start, I64(offset)) for offset in range(0, size, LANES)]
                vectors = [vector_at(builder, source, place) for place in places]
                factors = [vector_at(builder, sign, place) for place in places]
                if signs_first:
                    vectors = [builder.fmul(a, b) for a, b in zip(vectors, factors, strict=True)]
                vectors = _transformed(builder, vectors)
                if not signs_first:
                    vectors = [builder.fmul(a, b) for a, b in zip(vectors, factors, strict=True)]
                for vector, place in zip(vectors, places, strict=True):
                    put_vector(builder, vector, target, place)
            return context.get_dummy_value()

        return signature, generate

    return turn


@jit()
def _butterflies(x, block):  # type: ignore[no-untyped-def]  # numba infers the types
    """x = H x in place, over each run of `block` values of a contiguous f32 vector."""
    if block == 1:
        return
    half = 1
    while half < block:
        for start in range(0, x.shape[0], 2 * half):
            for i in range(start, start + half):
                low, high = x[i], x[i + half]
                x[i] = low + high
                x[i + half] = low - high
        half *= 2
    scale = np.float32(1.0 / np.sqrt(np.float64(block)))
    for i in range(x.shape[0]):
        x[i] *= scale


_in16, _in32, _in64, _in128 = (_blocks(size, True) for size in (16, 32, 64, 128))
_out16, _out32, _out64, _out128 = (_blocks(size, False) for size in (16, 32, 64, 128))


@jit()
def rotate_into(x, signs, block, out, count):  # type: ignore[no-untyped-def]  # numba infers the types
    """out = H S x over `count` f32 at addresses; `signs`: f32 ±1."""
    if block == 64:
        _in64(x, signs, out, count // 64)
    elif block == 128:
        _in128(x, signs, out, count // 128)
    elif block == 32:
        _in32(x, signs, out, count // 32)
    elif block == 16:
        _in16(x, signs, out, count // 16)
    else:
        source, sign, target = f32_at(x, count), f32_at(signs, count), f32_at(out, count)
        for i in range(count):
            target[i] = source[i] * sign[i]
        _butterflies(target, block)


@jit()
def restore(y, signs, block, count):  # type: ignore[no-untyped-def]  # numba infers the types
    """y = S H y in place over `count` f32 at addresses; `signs`: f32 ±1."""
    if block == 64:
        _out64(y, signs, y, count // 64)
    elif block == 128:
        _out128(y, signs, y, count // 128)
    elif block == 32:
        _out32(y, signs, y, count // 32)
    elif block == 16:
        _out16(y, signs, y, count // 16)
    else:
        target, sign = f32_at(y, count), f32_at(signs, count)
        _butterflies(target, block)
        for i in range(count):
            target[i] *= sign[i]
