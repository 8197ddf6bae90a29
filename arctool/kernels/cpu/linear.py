"""Matrix products over stored rows on a CPU: fused (rows decoded into a cache line's worth of scratch and dotted at once) and dense.

`fused` never materialises the matrix: a row is decoded once and dotted with every token while it is in the first-level cache. Each
dot product has the one order of `ir.dot_oracle`, so a token's result does not depend on how many others there are.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import numpy as np
from numba import prange
from numpy.typing import NDArray

from arctool.kernels.cpu.ir import LANES, dot
from arctool.kernels.cpu.jit import jit
from arctool.kernels.cpu.rows import HISTORY_BYTES, trellis_row_decoder
from arctool.quant.trellis import Geometry

ROWS_PER_TASK = 16
"""Rows that one parallel task decodes: amortises its scratch buffers, and still shares 192 rows over many cores."""

FusedTrellis = Callable[[Any, Any, Any, Any, int, Any], None]
DecodeTrellis = Callable[[Any, Any, Any, Any], None]


def padded_width(in_features: int) -> int:
    """Columns of the activations that the fused kernels read: whole groups of 16, the rest zero."""
    return -(-in_features // LANES) * LANES


@cache
def fused_trellis(geometry: Geometry, computed: bool) -> FusedTrellis:
    """kernel(packed u8 [out, stride], table f32 [2^l·v], scales f32 [out], x f32 [tokens, padded in], in_features, y f32 [tokens, out]).

    y[t, o] = scales[o] · dot(codebook values of row o, x[t]): the scale is applied once, to the sum.
    """
    decode, v, history = trellis_row_decoder(geometry, computed), geometry.v, HISTORY_BYTES

    @jit(parallel=True)
    def kernel(packed, table, scales, x, in_features, y):  # type: ignore[no-untyped-def]  # numba infers the types
        rows, stride, width = packed.shape[0], packed.shape[1], x.shape[1]
        for task in prange((rows + ROWS_PER_TASK - 1) // ROWS_PER_TASK):
            stream = np.zeros(history + stride + 4, np.uint8)
            weights = np.zeros(width, np.float32)
            for row in range(task * ROWS_PER_TASK, min(rows, (task + 1) * ROWS_PER_TASK)):
                stream[history : history + stride] = packed[row]
                decode(stream, table, in_features // v, weights)
                for token in range(x.shape[0]):
                    y[token, row] = scales[row] * dot(weights, x[token], width)

    return kernel


@cache
def decode_trellis(geometry: Geometry, computed: bool) -> DecodeTrellis:
    """kernel(packed u8 [out, stride], table f32 [2^l·v], scales f32 [out], dense f32 [out, in]): the oracle's weights, bit for bit."""
    decode, v, history = trellis_row_decoder(geometry, computed), geometry.v, HISTORY_BYTES

    @jit(parallel=True)
    def kernel(packed, table, scales, dense):  # type: ignore[no-untyped-def]  # numba infers the types
        rows, stride, in_features = packed.shape[0], packed.shape[1], dense.shape[1]
        for task in prange((rows + ROWS_PER_TASK - 1) // ROWS_PER_TASK):
            stream = np.zeros(history + stride + 4, np.uint8)
            for row in range(task * ROWS_PER_TASK, min(rows, (task + 1) * ROWS_PER_TASK)):
                stream[history : history + stride] = packed[row]
                decode(stream, table, in_features // v, dense[row])
                for column in range(in_features):
                    dense[row, column] *= scales[row]

    return kernel


@jit(parallel=True)
def fused_bf16(bits, x, y):  # type: ignore[no-untyped-def]  # numba infers the types
    """y f32 [tokens, out] = x f32 [tokens, padded in] · bf16 rows, u16 [out, in], each dot product in the order of `dot_oracle`."""
    rows, in_features, width = bits.shape[0], bits.shape[1], x.shape[1]
    for task in prange((rows + ROWS_PER_TASK - 1) // ROWS_PER_TASK):
        words = np.zeros(width, np.uint32)
        for row in range(task * ROWS_PER_TASK, min(rows, (task + 1) * ROWS_PER_TASK)):
            for column in range(in_features):
                words[column] = np.uint32(bits[row, column]) << np.uint32(16)
            weights = words.view(np.float32)
            for token in range(x.shape[0]):
                y[token, row] = dot(weights, x[token], width)


@jit(parallel=True)
def fused_f32(rows_f32, x, y):  # type: ignore[no-untyped-def]  # numba infers the types
    """y f32 [tokens, out] = x f32 [tokens, padded in] · f32 rows [out, in], each dot product in the order of `dot_oracle`."""
    rows, in_features, width = rows_f32.shape[0], rows_f32.shape[1], x.shape[1]
    for task in prange((rows + ROWS_PER_TASK - 1) // ROWS_PER_TASK):
        weights = np.zeros(width, np.float32)
        for row in range(task * ROWS_PER_TASK, min(rows, (task + 1) * ROWS_PER_TASK)):
            weights[:in_features] = rows_f32[row]
            for token in range(x.shape[0]):
                y[token, row] = dot(weights, x[token], width)


def pad_columns(x: NDArray[np.float32]) -> NDArray[np.float32]:
    """x with zero columns up to a multiple of 16; x itself, made contiguous, where it needs none."""
    width = padded_width(x.shape[1])
    if width == x.shape[1]:
        return np.ascontiguousarray(x)
    padded = np.zeros((x.shape[0], width), np.float32)
    padded[:, : x.shape[1]] = x
    return padded
