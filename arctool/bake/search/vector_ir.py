"""Vector IR that the search loops share: constants, splats, loads, pointers of arrays. Knows lanes, no loop.

How many lanes a register has changes no bit: every lane does the same operations in the same order.
"""

from __future__ import annotations

from typing import Any

import llvmlite.binding as llvm
from llvmlite import ir
from numba.core import cgutils

FLOAT, I16, I32, I64 = ir.FloatType(), ir.IntType(16), ir.IntType(32), ir.IntType(64)

LANES = 16 if llvm.get_host_cpu_features().get("avx512f", False) else 8
"""f32 lanes of one register."""


class Vectors:
    """What every loop needs: constants, splats, vector loads, for registers of `lanes`."""

    def __init__(self, builder: ir.IRBuilder, lanes: int) -> None:
        self.b, self.lanes = builder, lanes
        self.vec, self.ints = ir.VectorType(FLOAT, lanes), ir.VectorType(I32, lanes)
        self.fma = cgutils.get_or_insert_function(builder.module, ir.FunctionType(self.vec, [self.vec] * 3), f"llvm.fma.v{lanes}f32")

    def const(self, value: int) -> ir.Constant:
        return ir.Constant(I64, value)

    def splat(self, scalar: ir.Value, kind: ir.VectorType) -> ir.Value:
        undefined = ir.Constant(kind, ir.Undefined)
        single = self.b.insert_element(undefined, scalar, ir.Constant(I32, 0))
        return self.b.shuffle_vector(single, undefined, ir.Constant(ir.VectorType(I32, self.lanes), [0] * self.lanes))

    def at(self, pointer: ir.Value, index: ir.Value, kind: ir.VectorType) -> ir.Value:
        return self.b.bitcast(self.b.gep(pointer, [index]), kind.as_pointer())

    def load(self, pointer: ir.Value, index: ir.Value) -> ir.Value:
        return self.b.load(self.at(pointer, index, self.vec), align=4)

    def scalar(self, pointer: ir.Value, index: ir.Value) -> ir.Value:
        return self.b.load(self.b.gep(pointer, [index]))


def pointers_of(context: Any, builder: Any, kinds: Any, arrays: Any) -> list[ir.Value]:
    return [context.make_array(kind)(context, builder, value).data for kind, value in zip(kinds, arrays, strict=True)]
