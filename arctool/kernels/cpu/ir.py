"""Vector IR that plain numba cannot say, and the one order of reduction of every product on a CPU, with its oracle in numpy.

It knows pointers and lanes, not formats. Element j of a dot product goes by fused multiply-add to partial sum j mod 16, in rising j; then
the sums are folded 16 → 8 → 4 → 2 → 1. No batch, tile or thread can change that order, so nothing can change a token's bits.
"""

from __future__ import annotations

import numpy as np
from llvmlite import ir
from numba.core import cgutils
from numpy.typing import NDArray

FLOAT, I8, I32, I64 = ir.FloatType(), ir.IntType(8), ir.IntType(32), ir.IntType(64)
LANES = 16
"""Partial sums of a dot product: one AVX-512 register or two of AVX2."""

VECTOR = ir.VectorType(FLOAT, LANES)
INTS = ir.VectorType(I32, LANES)


def fma_oracle(a: NDArray[np.float32], b: NDArray[np.float32], c: NDArray[np.float32]) -> NDArray[np.float32]:
    """a·b + c with one rounding, f32. The product is exact in f64; the sum is rounded to odd there, so that the second rounding is right.

    (Boldo and Melquiond, "Emulation of a FMA and correctly rounded sums", 2008.) Finite values without overflow only.
    """
    product, addend = a.astype(np.float64) * b.astype(np.float64), c.astype(np.float64)
    total = product + addend
    virtual = total - product
    lost = (product - (total - virtual)) + (addend - virtual)
    even = total.view(np.uint64) % 2 == 0
    towards = np.nextafter(total, np.where(lost > 0, np.inf, -np.inf))
    rounded: NDArray[np.float32] = np.where((lost != 0) & even, towards, total).astype(np.float32)
    return rounded


def dot_oracle(w: NDArray[np.float32], x: NDArray[np.float32]) -> NDArray[np.float32]:
    """The order that every product obeys, in numpy: f32 [rows] = w [rows, n] · x [n]."""
    n = x.shape[0]
    padded = -(-n // LANES) * LANES
    weights, inputs = np.zeros((w.shape[0], padded), np.float32), np.zeros(padded, np.float32)
    weights[:, :n], inputs[:n] = w, x
    sums = np.zeros((w.shape[0], LANES), np.float32)
    for start in range(0, padded, LANES):
        part = slice(start, start + LANES)
        sums = fma_oracle(weights[:, part], np.broadcast_to(inputs[part], sums.shape), sums)
    while sums.shape[1] > 1:
        half = sums.shape[1] // 2
        sums = sums[:, :half] + sums[:, half:]
    return sums[:, 0]


def fma(builder: ir.IRBuilder, a: ir.Value, b: ir.Value, c: ir.Value) -> ir.Value:
    """a·b + c lane by lane, with one rounding."""
    kind = ir.FunctionType(a.type, [a.type] * 3)
    function = cgutils.get_or_insert_function(builder.module, kind, f"llvm.fma.v{a.type.count}f32")
    return builder.call(function, [a, b, c])


def fold(builder: ir.IRBuilder, sums: ir.Value) -> ir.Value:
    """Sum of the sixteen lanes by halving, in the oracle's order."""
    total, width = sums, LANES
    while width > 1:
        width //= 2
        first, second = (shuffled(builder, total, list(range(start, start + width))) for start in (0, width))
        total = builder.fadd(first, second)
    return builder.extract_element(total, I32(0))


def fold_four(builder: ir.IRBuilder, sums: list[ir.Value]) -> ir.Value:
    """The sums of four vectors' lanes as one vector f32 [4]: the additions of `fold`, four at a time."""
    parts, width = sums, LANES
    while width > 4:
        width //= 2
        halves = [[shuffled(builder, part, list(range(start, start + width))) for start in (0, width)] for part in parts]
        parts = [builder.fadd(first, second) for first, second in halves]
    pairs = [
        builder.fadd(shuffled(builder, a, [0, 1, 4, 5], b), shuffled(builder, a, [2, 3, 6, 7], b))
        for a, b in ((parts[0], parts[1]), (parts[2], parts[3]))
    ]
    return builder.fadd(shuffled(builder, pairs[0], [0, 2, 4, 6], pairs[1]), shuffled(builder, pairs[0], [1, 3, 5, 7], pairs[1]))


def shuffled(builder: ir.IRBuilder, vector: ir.Value, places: list[int], other: ir.Value | None = None) -> ir.Value:
    """Lanes `places` of `vector` (and, from its width on, of `other`)."""
    second = ir.Constant(vector.type, ir.Undefined) if other is None else other
    return builder.shuffle_vector(vector, second, ir.Constant(ir.VectorType(I32, len(places)), places))


def splat(builder: ir.IRBuilder, scalar: ir.Value, lanes: int = LANES) -> ir.Value:
    """A vector whose lanes are all `scalar`."""
    first = builder.insert_element(ir.Constant(ir.VectorType(scalar.type, lanes), ir.Undefined), scalar, I32(0))
    return shuffled(builder, first, [0] * lanes)


def constant(value: float, lanes: int = LANES) -> ir.Constant:
    """A vector whose lanes are all the f32 `value`."""
    return ir.Constant(ir.VectorType(FLOAT, lanes), [float(np.float32(value))] * lanes)


def pointer(builder: ir.IRBuilder, address: ir.Value, kind: ir.Type) -> ir.Value:
    """The pointer to `kind` at an address given as i64."""
    return builder.inttoptr(address, kind.as_pointer())


def vector_at(builder: ir.IRBuilder, base: ir.Value, element: ir.Value) -> ir.Value:
    """The sixteen f32 that begin `element` floats behind the float pointer `base`; any alignment."""
    return builder.load(builder.bitcast(builder.gep(base, [element]), VECTOR.as_pointer()), align=4)


def put_vector(builder: ir.IRBuilder, value: ir.Value, base: ir.Value, element: ir.Value) -> None:
    """Store sixteen f32 where `vector_at` would read them."""
    builder.store(value, builder.bitcast(builder.gep(base, [element]), VECTOR.as_pointer()), align=4)
