"""Products over rows of GGML blocks on a CPU, fused and dense: one pair of row functions a type, one pair of kernels made of them.

The fused kernel keeps the order of `ir.dot_oracle` whether a row is dotted from its bytes (one token) or from scratch (several), so a
token's result does not depend on how many others there are.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import numpy as np
from numba import prange

from arctool.kernels.cpu.ggml_ir import dot_q8_0, expand_q8_0
from arctool.kernels.cpu.ggml_rows import ROW_DECODERS
from arctool.kernels.cpu.ir import dot
from arctool.kernels.cpu.jit import jit
from arctool.kernels.cpu.linear import ROWS_PER_TASK
from arctool.quant.ggml import GGML_TYPES

EXPAND: dict[str, Any] = {"q8_0": expand_q8_0, **ROW_DECODERS}
"""Type → expand(row u8 [row_bytes], blocks, out f32 [in]): the oracle's weights of one row."""

DOT: dict[str, Any] = {"q8_0": dot_q8_0}
"""Type → dot(row u8 [row_bytes], blocks, x f32 [in]): f32, in the order of `ir.dot_oracle`. A type without one is expanded and dotted."""


@cache
def fused_blocks(name: str) -> Callable[[Any, Any, Any], None]:
    """kernel(data u8 [out, row_bytes], x f32 [tokens, padded in], y f32 [tokens, out]) for GGML type `name`."""
    return _fused_direct(name) if name in DOT else _fused_expanded(name)


def _fused_direct(name: str) -> Callable[[Any, Any, Any], None]:
    expand, dot_row, block_bytes = EXPAND[name], DOT[name], GGML_TYPES[name].block_bytes

    @jit(parallel=True)
    def kernel(data, x, y):  # type: ignore[no-untyped-def]  # numba infers the types
        rows, blocks, width = data.shape[0], data.shape[1] // block_bytes, x.shape[1]
        for task in prange((rows + ROWS_PER_TASK - 1) // ROWS_PER_TASK):
            weights = np.zeros(width, np.float32)
            for row in range(task * ROWS_PER_TASK, min(rows, (task + 1) * ROWS_PER_TASK)):
                if x.shape[0] == 1:  # the weights need not touch memory: a third less time, and the same additions
                    y[0, row] = dot_row(data[row], blocks, x[0])
                else:
                    expand(data[row], blocks, weights)
                    for token in range(x.shape[0]):
                        y[token, row] = dot(weights, x[token], width)

    return kernel


def _fused_expanded(name: str) -> Callable[[Any, Any, Any], None]:
    expand, block_bytes = EXPAND[name], GGML_TYPES[name].block_bytes

    @jit(parallel=True)
    def kernel(data, x, y):  # type: ignore[no-untyped-def]  # numba infers the types
        rows, blocks, width = data.shape[0], data.shape[1] // block_bytes, x.shape[1]
        for task in prange((rows + ROWS_PER_TASK - 1) // ROWS_PER_TASK):
            weights = np.zeros(width, np.float32)  # zero where x is padded, too: what lies there could be nan
            for row in range(task * ROWS_PER_TASK, min(rows, (task + 1) * ROWS_PER_TASK)):
                expand(data[row], blocks, weights)
                for token in range(x.shape[0]):
                    y[token, row] = dot(weights, x[token], width)

    return kernel


@cache
def decode_blocks(name: str) -> Callable[[Any, Any], None]:
    """kernel(data u8 [rows, row_bytes], dense f32 [rows, in]): the oracle's weights of GGML type `name`, bit for bit."""
    expand, block = EXPAND[name], GGML_TYPES[name].block

    @jit(parallel=True)
    def kernel(data, dense):  # type: ignore[no-untyped-def]  # numba infers the types
        rows = data.shape[0]
        for task in prange((rows + ROWS_PER_TASK - 1) // ROWS_PER_TASK):
            for row in range(task * ROWS_PER_TASK, min(rows, (task + 1) * ROWS_PER_TASK)):
                expand(data[row], dense.shape[1] // block, dense[row])

    return kernel
