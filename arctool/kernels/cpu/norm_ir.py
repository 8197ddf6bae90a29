"""The sum of squares of a vector in the one order of reduction, `ir.dot_oracle` of the vector with itself."""

from __future__ import annotations

from typing import Any

from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from arctool.kernels.cpu.ir import I32, I64, LANES, constant, fma, fold, vector_at


@intrinsic
def square_sum(typing_context: Any, x: Any) -> Any:
    """Σ x[j]² of a contiguous f32 vector of any length; what is missing of the last sixteen counts as zero."""
    signature = types.float32(x)

    def generate(context: Any, builder: Any, sig: Any, arguments: Any) -> Any:
        array = context.make_array(sig.args[0])(context, builder, arguments[0])
        length = builder.extract_value(array.shape, 0)
        groups = builder.sdiv(length, I64(LANES))
        sums = cgutils.alloca_once_value(builder, constant(0.0))
        with cgutils.for_range(builder, groups) as loop:
            values = vector_at(builder, array.data, builder.mul(loop.index, I64(LANES)))
            builder.store(fma(builder, values, values, builder.load(sums)), sums)
        rest = cgutils.alloca_once_value(builder, constant(0.0))
        start = builder.mul(groups, I64(LANES))
        with cgutils.for_range(builder, builder.sub(length, start)) as loop:
            value = builder.load(builder.gep(array.data, [builder.add(start, loop.index)]))
            lane = builder.trunc(loop.index, I32)
            builder.store(builder.insert_element(builder.load(rest), value, lane), rest)
        last = builder.load(rest)
        return fold(builder, fma(builder, last, last, builder.load(sums)))

    return signature, generate
