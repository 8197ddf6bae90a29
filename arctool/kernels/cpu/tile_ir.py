"""The micro-kernel of every product: R rows of weights against T tokens at once, each pair in the one order of `ir.dot_oracle`.

A larger tile loads less for each multiplication and changes nothing else: every pair has sixteen partial sums of its own.
"""

from __future__ import annotations

from functools import cache
from typing import Any

from llvmlite import binding, ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from arctool.kernels.cpu.ir import FLOAT, I64, LANES, constant, fma, fold, fold_four, pointer, vector_at

FOUR = 4
"""Rows whose sums are folded together."""


def tile_shape(wide_registers: bool) -> tuple[int, int]:
    """(rows, tokens) of a tile: 16 sums fit AVX-512's 32 registers of sixteen lanes; half a lane and half as many registers hold 4."""
    return (4, 4) if wide_registers else (2, 2)


@cache
def host_tile() -> tuple[int, int]:
    """The tile of this machine."""
    return tile_shape(bool(binding.get_host_cpu_features().get("avx512f")))


def direct_rows() -> int:
    """Rows that are dotted with a single token at once: as many as a tile has, whose quarters of sums fit the registers too."""
    return host_tile()[0]


@cache
def tile(rows: int, tokens: int) -> Any:
    """An intrinsic: tile(w, w_pitch, x, x_pitch, width, scales, y, y_pitch), addresses and pitches in floats, all i64.

    y[t, r] = scales[r] · Σ w[r, j] · x[t, j] over `width` columns, a multiple of 16.
    """

    @intrinsic
    def product(typing_context: Any, w: Any, w_pitch: Any, x: Any, x_pitch: Any, width: Any, scales: Any, y: Any, y_pitch: Any) -> Any:
        signature = types.void(*[types.int64] * 8)

        def generate(context: Any, builder: Any, sig: Any, arguments: Any) -> Any:
            w, w_pitch, x, x_pitch, width, scales, y, y_pitch = arguments
            bases = [pointer(builder, address, FLOAT) for address in (w, x, scales, y)]
            w_rows = [builder.gep(bases[0], [builder.mul(w_pitch, I64(r))]) for r in range(rows)]
            x_rows = [builder.gep(bases[1], [builder.mul(x_pitch, I64(t))]) for t in range(tokens)]
            sums = [[cgutils.alloca_once_value(builder, constant(0.0)) for _ in range(tokens)] for _ in range(rows)]
            with cgutils.for_range(builder, builder.sdiv(width, I64(LANES))) as loop:
                start = builder.mul(loop.index, I64(LANES))
                inputs = [vector_at(builder, row, start) for row in x_rows]
                for r, row in enumerate(w_rows):
                    weights = vector_at(builder, row, start)
                    for t in range(tokens):
                        builder.store(fma(builder, weights, inputs[t], builder.load(sums[r][t])), sums[r][t])
            if rows == FOUR:
                four = ir.VectorType(FLOAT, FOUR).as_pointer()
                scale = builder.load(builder.bitcast(bases[2], four), align=4)
                for t in range(tokens):
                    total = builder.fmul(scale, fold_four(builder, [builder.load(sums[r][t]) for r in range(rows)]))
                    place = builder.gep(bases[3], [builder.mul(y_pitch, I64(t))])
                    builder.store(total, builder.bitcast(place, four), align=4)
                return context.get_dummy_value()
            for r in range(rows):
                scale = builder.load(builder.gep(bases[2], [I64(r)]))
                for t in range(tokens):
                    total = builder.fmul(scale, fold(builder, builder.load(sums[r][t])))
                    builder.store(total, builder.gep(bases[3], [builder.add(builder.mul(y_pitch, I64(t)), I64(r))]))
            return context.get_dummy_value()

        return signature, generate

    return product
