"""Vector IR for rows of GGML blocks: an f16 at any byte, and q8_0 expanded to f32 by the oracle's one operation (code · scale, exact).

Both trust their callers: the row is whole blocks, its scales are finite.
"""

from __future__ import annotations

from typing import Any

from llvmlite import ir
from numba.core import cgutils, types
from numba.extending import intrinsic

from arctool.kernels.cpu.ir import FLOAT, I32, I64, LANES
from arctool.quant.ggml import Q8_0

I16 = ir.IntType(16)
WIDTH = LANES // 2
HALF = ir.VectorType(FLOAT, WIDTH)
CODES = ir.VectorType(ir.IntType(8), WIDTH)
WIDE = ir.VectorType(I32, WIDTH)
GROUPS = Q8_0.block // WIDTH
"""Vectors of eight weights in a block; an even number, so that every block begins at partial sum 0."""


def half_to_float(builder: ir.IRBuilder, half: ir.Value) -> ir.Value:
    """A finite f16, given as i16, as f32; exact. Written out because `fpext half` is a call into a library where F16C is missing."""
    wide = builder.zext(half, I32)
    size = builder.and_(wide, I32(0x7FFF))
    normal = builder.bitcast(builder.add(builder.shl(size, I32(13)), I32(112 << 23)), FLOAT)
    subnormal = builder.fmul(builder.uitofp(size, FLOAT), ir.Constant(FLOAT, 2.0**-24))
    magnitude = builder.select(builder.icmp_unsigned("<", size, I32(0x400)), subnormal, normal)
    sign = builder.shl(builder.and_(wide, I32(0x8000)), I32(16))
    return builder.bitcast(builder.or_(builder.bitcast(magnitude, I32), sign), FLOAT)


def q8_0_weights(builder: ir.IRBuilder, block: ir.Value) -> list[ir.Value]:
    """The 32 weights of the block at byte pointer `block`, as four vectors of eight."""
    half = builder.load(builder.bitcast(block, I16.as_pointer()), align=1)
    undefined = ir.Constant(HALF, ir.Undefined)
    first = builder.insert_element(undefined, half_to_float(builder, half), I32(0))
    scale = builder.shuffle_vector(first, undefined, ir.Constant(WIDE, [0] * WIDTH))
    weights = []
    for group in range(GROUPS):
        place = builder.gep(block, [I64(2 + WIDTH * group)])
        codes = builder.load(builder.bitcast(place, CODES.as_pointer()), align=1)
        weights.append(builder.fmul(builder.sitofp(builder.sext(codes, WIDE), HALF), scale))
    return weights


def _pointer(context: Any, builder: ir.IRBuilder, kind: Any, value: ir.Value) -> ir.Value:
    return context.make_array(kind)(context, builder, value).data


def _vector(builder: ir.IRBuilder, base: ir.Value, index: ir.Value, group: int) -> ir.Value:
    """Pointer to the eight f32 of `group` within block `index` of a row that begins at `base`."""
    offset = builder.add(builder.mul(index, I64(Q8_0.block)), I64(WIDTH * group))
    return builder.bitcast(builder.gep(base, [offset]), HALF.as_pointer())


@intrinsic
def load_half(typing_context: Any, data: Any, byte: Any) -> Any:
    """The little-endian f16 at any byte offset of a u8 array, as f32; exact. The caller guarantees that it is there and finite."""
    signature = types.float32(data, types.int64)

    def generate(context: Any, builder: Any, sig: Any, arguments: Any) -> Any:
        place = builder.gep(_pointer(context, builder, sig.args[0], arguments[0]), [arguments[1]])
        return half_to_float(builder, builder.load(builder.bitcast(place, I16.as_pointer()), align=1))

    return signature, generate


@intrinsic
def expand_q8_0(typing_context: Any, row: Any, blocks: Any, out: Any) -> Any:
    """out[: 32 · blocks] = the f32 weights of `row`: u8 [34 · blocks]."""
    signature = types.void(row, types.int64, out)

    def generate(context: Any, builder: Any, sig: Any, arguments: Any) -> Any:
        source = _pointer(context, builder, sig.args[0], arguments[0])
        target = _pointer(context, builder, sig.args[2], arguments[2])
        with cgutils.for_range(builder, arguments[1]) as loop:
            block = builder.gep(source, [builder.mul(loop.index, I64(Q8_0.block_bytes))])
            for group, weights in enumerate(q8_0_weights(builder, block)):
                builder.store(weights, _vector(builder, target, loop.index, group), align=4)
        return context.get_dummy_value()

    return signature, generate
