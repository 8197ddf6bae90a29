"""Trellis geometry, row bit streams and states: the layout half of the trellis formats (QTIP, arXiv 2406.11235).

A row of `in_features` weights is one little-endian bit stream, bit 0 first. Step t appends `k` bits and yields `v` weights
from the codebook row that the latest `l` bits select. This module knows nothing of codebook values, files or speed.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from arctool.errors import GeometryError

MAX_STATE_BITS = 16
"""A table of 2^16 rows is the largest that we build, ship or search."""


@dataclass(frozen=True)
class Geometry:
    """A bitshift trellis: each step shifts in `k` bits and emits `v` weights from an `l`-bit state."""

    k: int
    v: int
    l: int

    def __post_init__(self) -> None:
        if not (1 <= self.k <= self.l <= MAX_STATE_BITS and self.v in (1, 2, 4, 8)):
            raise GeometryError(f"{self.name}: a trellis needs 1 ≤ K ≤ L ≤ {MAX_STATE_BITS} and V of 1, 2, 4 or 8; choose one of the rungs")

    @classmethod
    def parse(cls, name: str) -> Geometry:
        """The geometry called `name`, as in `K8V4L12`. Raises GeometryError for anything else."""
        match = re.fullmatch(r"K(\d{1,2})V(\d{1,2})L(\d{1,2})", name)
        if match is None:
            raise GeometryError(f"{name!r} is not a trellis geometry; expected a name like K4V2L16")
        return cls(*(int(group) for group in match.groups()))

    @property
    def name(self) -> str:
        return f"K{self.k}V{self.v}L{self.l}"

    @property
    def states(self) -> int:
        """Number of codebook rows, 2^l."""
        return 1 << self.l

    @property
    def bits_per_weight(self) -> float:
        return self.k / self.v

    def steps(self, in_features: int) -> int:
        """Trellis steps of one row. Raises GeometryError where `v` does not divide the row."""
        if in_features <= 0 or in_features % self.v:
            raise GeometryError(f"{self.name}: in_features {in_features} is not a positive multiple of V={self.v}")
        return in_features // self.v

    def data_bytes(self, in_features: int) -> int:
        """Bytes that carry information in one row: ceil(k · in_features / v / 8)."""
        return -(-self.k * self.steps(in_features) // 8)

    def stride(self, in_features: int) -> int:
        """Allocated bytes of one row: `data_bytes` rounded up to whole 32-bit words, so a kernel never reads past a row."""
        return -(-self.data_bytes(in_features) // 4) * 4


def check_packed(packed: NDArray[np.uint8], geometry: Geometry, in_features: int, where: str) -> None:
    """Refuse a packed matrix whose dtype, stride or padding is not the geometry's. `packed`: u8 [rows, stride]."""
    check_stride(packed, geometry, in_features, where)
    check_padding(packed, geometry, in_features, where)


def check_stride(packed: NDArray[np.uint8], geometry: Geometry, in_features: int, where: str) -> None:
    """Refuse a packed matrix whose dtype or stride is not the geometry's. `packed`: u8 [rows, stride]."""
    stride = geometry.stride(in_features)
    if packed.dtype != np.uint8 or packed.ndim != 2 or packed.shape[1] != stride:
        raise GeometryError(
            f"{where}: {geometry.name} rows of {in_features} weights need u8 [rows, {stride}], found {packed.dtype} {list(packed.shape)}"
        )


def check_padding(packed: NDArray[np.uint8], geometry: Geometry, in_features: int, where: str, first: int = 0) -> None:
    """Refuse streams u8 [rows, stride] with bits behind their last step; `first`: the number of the first row, for the message."""
    used = geometry.k * geometry.steps(in_features)
    tail = np.unpackbits(packed[:, used // 8 :], axis=1, bitorder="little")[:, used % 8 :]
    if tail.any():
        row = int(np.flatnonzero(tail.any(axis=1))[0])
        raise GeometryError(f"{where}: row {first + row} has set bits in the padding after bit {used}; the padding must be zero")


def pack_symbols(symbols: NDArray[np.integer], geometry: Geometry) -> NDArray[np.uint8]:
    """Bit streams of `symbols` [rows, steps], each 0 ≤ symbol < 2^k, as u8 [rows, stride] with zero padding."""
    rows, steps = symbols.shape
    if symbols.size and not (int(symbols.min()) >= 0 and int(symbols.max()) < 1 << geometry.k):
        raise GeometryError(f"{geometry.name}: a symbol lies outside 0 … {(1 << geometry.k) - 1}")
    shifts = np.arange(geometry.k, dtype=np.int64)
    bits = ((symbols.astype(np.int64)[:, :, None] >> shifts) & 1).astype(np.uint8).reshape(rows, steps * geometry.k)
    packed = np.zeros((rows, geometry.stride(steps * geometry.v)), np.uint8)
    dense = np.packbits(bits, axis=1, bitorder="little")
    packed[:, : dense.shape[1]] = dense
    return packed


def unpack_symbols(packed: NDArray[np.uint8], geometry: Geometry, in_features: int) -> NDArray[np.int32]:
    """The symbols [rows, steps] of `packed`: u8 [rows, stride]. Inverse of `pack_symbols`."""
    steps = geometry.steps(in_features)
    bits = np.unpackbits(packed, axis=1, bitorder="little", count=steps * geometry.k).astype(np.int32)
    weights = np.left_shift(1, np.arange(geometry.k, dtype=np.int32))
    return (bits.reshape(packed.shape[0], steps, geometry.k) * weights).sum(axis=2, dtype=np.int32)


def row_states(packed: NDArray[np.uint8], geometry: Geometry, in_features: int) -> NDArray[np.int32]:
    """The states [rows, steps] that the streams pass through: state t = stream bits [k(t+1)−l, k(t+1)), bits below 0 are zero.

    The definition, taken literally: the bits are laid out, `l` zero bits put in front, and bit j of state t is bit k(t+1) + j of that.
    """
    check_packed(packed, geometry, in_features, geometry.name)
    steps = geometry.steps(in_features)
    stream = np.unpackbits(packed, axis=1, bitorder="little", count=steps * geometry.k)
    history = np.zeros((packed.shape[0], geometry.l), np.uint8)
    padded = np.concatenate([history, stream], axis=1)
    states = np.zeros((packed.shape[0], steps), np.uint16)
    for j in range(geometry.l):
        states |= padded[:, geometry.k + j :: geometry.k][:, :steps].astype(np.uint16) << np.uint16(j)
    return states.astype(np.int32)


def decode_rows(
    packed: NDArray[np.uint8],
    geometry: Geometry,
    values: NDArray[np.float32],
    scales: NDArray[np.float32],
    in_features: int,
) -> NDArray[np.float32]:
    """The decode oracle: weights f32 [rows, in_features] = values[state] · scale, one f32 rounding each.

    `values`: f32 [2^l, v]; `scales`: f32 [rows]. Every kernel that dequantises must give these bits.
    """
    if values.dtype != np.float32 or values.shape != (geometry.states, geometry.v):
        raise GeometryError(
            f"{geometry.name} needs f32 codebook values [{geometry.states}, {geometry.v}], found {values.dtype} {list(values.shape)}"
        )
    if scales.dtype != np.float32 or scales.shape != (packed.shape[0],):
        raise GeometryError(f"{geometry.name}: expected f32 scales [{packed.shape[0]}], found {scales.dtype} {list(scales.shape)}")
    weights = values[row_states(packed, geometry, in_features)].reshape(packed.shape[0], in_features)
    return weights * scales[:, None]
