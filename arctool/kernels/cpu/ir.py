"""Two pieces of vector IR that plain numba cannot say: an unaligned 32-bit window load and a dot product with a fixed order.

They know pointers and lanes, not formats. `dot` is the one order of reduction of every fused CPU kernel, whatever the batch.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from llvmlite import ir
from numba.core import cgutils, types
from numba.extending import intrinsic
from numpy.typing import NDArray

FLOAT, I32, I64 = ir.FloatType(), ir.IntType(32), ir.IntType(64)
LANES = 16
"""Partial sums of a dot product: two AVX2 registers, enough to hide the latency of an addition."""

HALF = ir.VectorType(FLOAT, LANES // 2)


def dot_oracle(w: NDArray[np.float32], x: NDArray[np.float32]) -> NDArray[np.float32]:
    """The order that `dot` obeys, in numpy: f32 [rows] = w [rows, n] · x [n].

    Element j is multiplied, rounded and added to partial sum j mod 16, in rising j; then the sums are folded 16 → 8 → 4 → 2 → 1.
    """
    n = x.shape[0]
    padded = -(-n // LANES) * LANES
    products = np.zeros((w.shape[0], padded), np.float32)
    products[:, :n] = w * x
    lanes = np.zeros((w.shape[0], LANES), np.float32)
    for start in range(0, padded, LANES):
        lanes = lanes + products[:, start : start + LANES]
    while lanes.shape[1] > 1:
        half = lanes.shape[1] // 2
        lanes = lanes[:, :half] + lanes[:, half:]
    return lanes[:, 0]


@intrinsic
def load_window(typing_context: Any, data: Any, byte: Any) -> Any:
    """The little-endian u32 at any byte offset of a u8 array; the caller guarantees that four bytes are there."""
    signature = types.uint32(data, byte)

    def generate(context: Any, builder: Any, sig: Any, arguments: Any) -> Any:
        pointer = context.make_array(sig.args[0])(context, builder, arguments[0]).data
        address = builder.bitcast(builder.gep(pointer, [arguments[1]]), I32.as_pointer())
        return builder.load(address, align=1)

    return signature, generate


def fold(builder: ir.IRBuilder, low: ir.Value, high: ir.Value) -> ir.Value:
    """Sum of the sixteen lanes by halving, in the oracle's order."""
    total, width = builder.fadd(low, high), LANES // 2
    while width > 1:
        width //= 2
        index = ir.VectorType(I32, width)
        undefined = ir.Constant(total.type, ir.Undefined)
        first = builder.shuffle_vector(total, undefined, ir.Constant(index, list(range(width))))
        second = builder.shuffle_vector(total, undefined, ir.Constant(index, list(range(width, 2 * width))))
        total = builder.fadd(first, second)
    return builder.extract_element(total, ir.Constant(I32, 0))


@intrinsic
def dot(typing_context: Any, w: Any, x: Any, count: Any) -> Any:
    """Σ w[j]·x[j] over `count` f32 values (a multiple of 16: the caller pads with zeros), in the order of `dot_oracle`."""
    signature = types.float32(w, x, types.int64)

    def generate(context: Any, builder: Any, sig: Any, arguments: Any) -> Any:
        pointers = [context.make_array(kind)(context, builder, value).data for kind, value in zip(sig.args[:2], arguments[:2], strict=True)]
        zero = ir.Constant(HALF, [0.0] * (LANES // 2))
        sums = [cgutils.alloca_once_value(builder, zero) for _ in range(2)]
        blocks = builder.sdiv(arguments[2], ir.Constant(I64, LANES))
        with cgutils.for_range(builder, blocks) as loop:
            for half, accumulator in enumerate(sums):
                offset = builder.add(builder.mul(loop.index, ir.Constant(I64, LANES)), ir.Constant(I64, half * LANES // 2))
                values = [builder.load(builder.bitcast(builder.gep(pointer, [offset]), HALF.as_pointer()), align=4) for pointer in pointers]
                builder.store(builder.fadd(builder.load(accumulator), builder.fmul(*values)), accumulator)
        return fold(builder, builder.load(sums[0]), builder.load(sums[1]))

    return signature, generate
