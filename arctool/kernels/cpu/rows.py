"""How a stored row becomes f32 weights on a CPU: trellis streams with a table, trellis streams with `sum2`, bf16 and f32 rows.

One small jitted function a kind, each writing one row into a scratch buffer. The fused and the dense kernels both call these, so
there is one decoder to prove and one to make faster.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import numpy as np

from arctool.kernels.cpu.ir import load_window
from arctool.kernels.cpu.jit import jit
from arctool.quant.codebooks import SUM2_CENTRE, SUM2_CONSTANTS, SUM2_STEP
from arctool.quant.trellis import Geometry

HISTORY_BYTES = 4
"""Zero bytes kept before a stream's copy, so that the windows of the first steps need no special case."""

RowDecoder = Callable[[Any, Any, Any, Any], None]


def stream_bytes(geometry: Geometry, in_features: int) -> int:
    """Size of the scratch copy of one stream: history, the stride, and room for the last window's whole word."""
    return HISTORY_BYTES + geometry.stride(in_features) + 4


@cache
def trellis_row_decoder(geometry: Geometry, computed: bool) -> RowDecoder:
    """decode(stream u8 [bytes + 4], table f32 [2^l·v], steps, out f32 [steps·v]): unscaled codebook values of one row."""
    k, v, l = geometry.k, geometry.v, geometry.l
    mask = np.uint32((1 << l) - 1)
    first_bit = 8 * HISTORY_BYTES + k - l
    if computed:
        return _sum2_row_decoder(k, l)

    @jit()
    def decode(stream, table, steps, out):  # type: ignore[no-untyped-def]  # numba infers the types
        for t in range(steps):
            bit = first_bit + k * t
            state = np.int64((load_window(stream, bit >> 3) >> np.uint32(bit & 7)) & mask)
            for i in range(v):
                out[t * v + i] = table[state * v + i]

    return decode


def _sum2_row_decoder(k: int, l: int) -> RowDecoder:
    mask = np.uint32((1 << l) - 1)
    first_bit = 8 * HISTORY_BYTES + k - l
    (m0, a0), (m1, a1) = ((np.uint32(m), np.uint32(a)) for m, a in SUM2_CONSTANTS[k])
    step, centre = SUM2_STEP, np.int32(SUM2_CENTRE)

    @jit()
    def value(hashed):  # type: ignore[no-untyped-def]  # numba infers the types
        pairs = (hashed & np.uint32(0x00FF00FF)) + ((hashed >> np.uint32(8)) & np.uint32(0x00FF00FF))
        total = np.int32((pairs & np.uint32(0xFFFF)) + (pairs >> np.uint32(16)))
        return np.float32(total - centre) * step

    @jit()
    def decode(stream, table, steps, out):  # type: ignore[no-untyped-def]  # numba infers the types
        for t in range(steps):
            bit = first_bit + k * t
            state = (load_window(stream, bit >> 3) >> np.uint32(bit & 7)) & mask
            out[2 * t] = value(np.uint32(state * m0 + a0))
            out[2 * t + 1] = value(np.uint32(state * m1 + a1))

    return decode
