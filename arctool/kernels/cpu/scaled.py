"""Products over rows of codes under scales beside them (FP8, AFQ, MXFP4) on a CPU: a row decoder a kind, a pair of kernels made of it.

Each decoder does the oracle's operations in the oracle's order, so that its weights have the oracle's bits; dot products have the one
order of `ir.dot_oracle`.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import numpy as np
from numba import prange
from numpy.typing import NDArray

from arctool.kernels.cpu.ir import dot
from arctool.kernels.cpu.jit import jit
from arctool.kernels.cpu.linear import ROWS_PER_TASK
from arctool.quant.afq import AfqTensor
from arctool.quant.fp8 import Fp8Tensor
from arctool.quant.mxfp4 import E2M1, GROUP, Mxfp4Tensor, powers_of_two
from arctool.quant.tensor import ScaledTensor

Parts = tuple[NDArray[Any], NDArray[Any], NDArray[Any]]
"""Codes u8 [rows, bytes], then what lies beside each row: scales and offsets [rows, groups], or arrays without columns."""


def parts_of(weight: ScaledTensor) -> Parts:
    """The arrays of a weight as the kernels take them."""
    if isinstance(weight, AfqTensor):
        return weight.packed, weight.scales, weight.offsets
    if isinstance(weight, Mxfp4Tensor):
        return weight.codes, weight.scales, weight.scales[:, :0]
    return weight.codes, weight.codes[:, :0], weight.codes[:, :0]


def table_of(weight: ScaledTensor) -> NDArray[np.float32]:
    """What the kernels look up: FP8's weight of each code; MXFP4's sixteen values and, behind them, its 256 powers of two."""
    if isinstance(weight, Fp8Tensor):
        return weight.table()
    return np.concatenate([E2M1, powers_of_two()]) if isinstance(weight, Mxfp4Tensor) else np.empty(0, np.float32)


def kernels_of(weight: ScaledTensor) -> tuple[Callable[..., None], Callable[..., None]]:
    """(fused, decode) kernels of a weight's kind."""
    if isinstance(weight, AfqTensor):
        return _kernels("afq", weight.bits, weight.group)
    return _kernels("mxfp4", 4, GROUP) if isinstance(weight, Mxfp4Tensor) else _kernels("fp8", 8, 1)


@cache
def row_decoder(kind: str, bits: int, group: int) -> Callable[..., None]:
    """decode(codes u8 [bytes], scales, offsets, table, out f32 [≥ in], in): the oracle's weights of one row."""
    if kind == "fp8":
        return _fp8_row
    return _mxfp4_row if kind == "mxfp4" else _afq_row_decoder(bits, group)


@jit()
def _fp8_row(codes, scales, offsets, table, out, count):  # type: ignore[no-untyped-def]  # numba infers the types
    for j in range(count):
        out[j] = table[codes[j]]


@jit()
def _mxfp4_row(codes, scales, offsets, table, out, count):  # type: ignore[no-untyped-def]  # numba infers the types
    for g in range(count // GROUP):
        power = table[16 + np.int64(scales[g])]
        for i in range(GROUP // 2):
            pair = codes[g * (GROUP // 2) + i]
            out[g * GROUP + 2 * i] = table[pair & 15] * power
            out[g * GROUP + 2 * i + 1] = table[pair >> 4] * power


def _afq_row_decoder(bits: int, group: int) -> Callable[..., None]:
    mask = np.uint32((1 << bits) - 1)

    @jit()
    def decode(codes, scales, offsets, table, out, count):  # type: ignore[no-untyped-def]  # numba infers the types
        last = codes.shape[0] - 1
        for g in range(count // group):
            scale, offset = scales[g], offsets[g]
            for i in range(group):
                bit = (g * group + i) * bits
                at = bit >> 3
                # A code may begin in one byte and end in the next; the last byte of a row has no next.
                window = np.uint32(codes[at]) | (np.uint32(codes[min(at + 1, last)]) << np.uint32(8))
                code = (window >> np.uint32(bit & 7)) & mask
                out[g * group + i] = np.float32(code) * scale + offset

    return decode


@cache
def _kernels(kind: str, bits: int, group: int) -> tuple[Callable[..., None], Callable[..., None]]:
    decode_row = row_decoder(kind, bits, group)

    @jit(parallel=True)
    def fused(codes, scales, offsets, table, x, in_features, y):  # type: ignore[no-untyped-def]  # numba infers the types
        rows, width = codes.shape[0], x.shape[1]
        for task in prange((rows + ROWS_PER_TASK - 1) // ROWS_PER_TASK):
            weights = np.zeros(width, np.float32)
            for row in range(task * ROWS_PER_TASK, min(rows, (task + 1) * ROWS_PER_TASK)):
                decode_row(codes[row], scales[row], offsets[row], table, weights, in_features)
                for token in range(x.shape[0]):
                    y[token, row] = dot(weights, x[token], width)

    @jit(parallel=True)
    def decode(codes, scales, offsets, table, dense):  # type: ignore[no-untyped-def]  # numba infers the types
        rows = codes.shape[0]
        for task in prange((rows + ROWS_PER_TASK - 1) // ROWS_PER_TASK):
            for row in range(task * ROWS_PER_TASK, min(rows, (task + 1) * ROWS_PER_TASK)):
                decode_row(codes[row], scales[row], offsets[row], table, dense[row], dense.shape[1])

    return fused, decode
