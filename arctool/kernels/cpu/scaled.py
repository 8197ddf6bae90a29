"""Rows of codes under scales beside them (FP8, AFQ, MXFP4) on a CPU: a row decoder a kind.

Each does the oracle's operations in the oracle's order, so that its weights have the oracle's bits.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

from arctool.kernels.cpu.jit import jit
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


def row_decoder_of(weight: ScaledTensor) -> Callable[..., None]:
    """The row decoder of a weight's kind."""
    if isinstance(weight, AfqTensor):
        return row_decoder("afq", weight.bits, weight.group)
    return row_decoder("mxfp4", 4, GROUP) if isinstance(weight, Mxfp4Tensor) else row_decoder("fp8", 8, 1)


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
