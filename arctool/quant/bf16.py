"""bfloat16 as numpy has it not: the upper 16 bits of an f32, kept in uint16 arrays."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray


def to_bf16(x: NDArray[np.float32]) -> NDArray[np.uint16]:
    """Round f32 to bf16 bits, to nearest, ties to even. NaN stays NaN (quiet), ±inf stays, overflow rounds to ±inf."""
    bits = np.ascontiguousarray(x, np.float32).view(np.uint32)
    rounded = (bits + (((bits >> 16) & 1) + np.uint32(0x7FFF))) >> 16
    quiet = (bits >> 16) | np.uint32(0x0040)
    return np.where(np.isnan(x), quiet, rounded).astype(np.uint16)


def from_bf16(bits: NDArray[np.uint16]) -> NDArray[np.float32]:
    """Widen bf16 bits to f32; exact."""
    return (bits.astype(np.uint32) << 16).view(np.float32)


def widen(data: NDArray[Any]) -> NDArray[np.float32]:
    """f32 values of an array that holds f32, or bf16 bits as u16; f32 is returned as it is."""
    return from_bf16(data) if data.dtype == np.uint16 else data.astype(np.float32, copy=False)
