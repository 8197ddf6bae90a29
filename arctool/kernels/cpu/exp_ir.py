"""exp and SiLU of f32 vectors with bits of our own: a library's vector body and scalar tail may differ, these cannot.

exp(x) = 2^n · e^r with n = round(x · log2 e), |r| ≤ ln 2 / 2, and the polynomial of degree 6 of Cephes' `expf` (Moshier), evaluated with
fused multiply-adds. Below `LOWEST` it is 0, above `HIGHEST` it stays there. At most 2 ulp from the truth between them.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic
from numpy.typing import NDArray

from arctool.kernels.cpu.ir import FLOAT, I32, I64, INTS, LANES, VECTOR, constant, fma, fma_oracle, pointer, put_vector, vector_at

LOWEST, HIGHEST = -87.0, 88.0
LOG2_E, LN2_HIGH, LN2_LOW = 1.44269504088896341, 0.693359375, -2.12194440e-4
COEFFICIENTS = (1.9875691500e-4, 1.3981999507e-3, 8.3334519073e-3, 4.1665795894e-2, 1.6666665459e-1, 5.0000001201e-1)
EXPONENT_BIAS, MANTISSA_BITS = 127, 23


def exp_oracle(x: NDArray[np.float32]) -> NDArray[np.float32]:
    """exp of f32 values without NaN, operation by operation."""

    def full(value: float) -> NDArray[np.float32]:
        return np.full(x.shape, value, np.float32)

    kept = np.clip(x, np.float32(LOWEST), np.float32(HIGHEST))
    n = np.rint(kept * np.float32(LOG2_E))
    r = fma_oracle(n, full(-LN2_LOW), fma_oracle(n, full(-LN2_HIGH), kept))
    total = full(COEFFICIENTS[0])
    for coefficient in COEFFICIENTS[1:]:
        total = fma_oracle(total, r, full(coefficient))
    value = fma_oracle(total, r * r, r) + np.float32(1.0)
    power = ((n.astype(np.int32) + EXPONENT_BIAS) << MANTISSA_BITS).view(np.float32)
    return np.where(x < np.float32(LOWEST), np.float32(0.0), value * power)


def exp_of(builder: ir.IRBuilder, x: ir.Value) -> ir.Value:
    """exp of sixteen f32; NaN stays NaN."""
    low, high = constant(LOWEST), constant(HIGHEST)
    too_low = builder.fcmp_ordered("<", x, low)
    kept = builder.select(too_low, low, x)
    kept = builder.select(builder.fcmp_ordered(">", kept, high), high, kept)
    rint = cgutils.get_or_insert_function(builder.module, ir.FunctionType(VECTOR, [VECTOR]), f"llvm.rint.v{LANES}f32")
    n = builder.call(rint, [builder.fmul(kept, constant(LOG2_E))])
    r = fma(builder, n, constant(-LN2_LOW), fma(builder, n, constant(-LN2_HIGH), kept))
    total: ir.Value = constant(COEFFICIENTS[0])
    for coefficient in COEFFICIENTS[1:]:
        total = fma(builder, total, r, constant(coefficient))
    value = builder.fadd(fma(builder, total, builder.fmul(r, r), r), constant(1.0))
    bias, shift = (ir.Constant(INTS, [number] * LANES) for number in (EXPONENT_BIAS, MANTISSA_BITS))
    power = builder.bitcast(builder.shl(builder.add(builder.fptosi(n, INTS), bias), shift), VECTOR)
    return builder.select(too_low, constant(0.0), builder.fmul(value, power))


@intrinsic
def swiglu(typing_context: Any, gate: Any, up: Any, out: Any, width: Any) -> Any:
    """out = gate / (1 + exp(−gate)) · up over `width` f32, a multiple of 16; addresses."""
    signature = types.void(*[types.int64] * 4)

    def generate(context: Any, builder: Any, sig: Any, arguments: Any) -> Any:
        gates, ups, outs = (pointer(builder, address, FLOAT) for address in arguments[:3])
        with cgutils.for_range(builder, builder.sdiv(arguments[3], I64(LANES))) as loop:
            start = builder.mul(loop.index, I64(LANES))
            gate = vector_at(builder, gates, start)
            one_more = builder.fadd(exp_of(builder, builder.fneg(gate)), constant(1.0))
            put_vector(builder, builder.fmul(builder.fdiv(gate, one_more), vector_at(builder, ups, start)), outs, start)
        return context.get_dummy_value()

    return signature, generate


@intrinsic
def exp_scalar(typing_context: Any, x: Any) -> Any:
    """exp of one f32, with the vectors' bits."""
    signature = types.float32(types.float32)

    def generate(context: Any, builder: Any, sig: Any, arguments: Any) -> Any:
        vector = builder.insert_element(constant(0.0), arguments[0], I32(0))
        return builder.extract_element(exp_of(builder, vector), I32(0))

    return signature, generate
