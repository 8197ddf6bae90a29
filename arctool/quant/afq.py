"""AFQ, MLX's affine groups as mistral.rs stores them: codes of 2 to 8 bits, a scale and an offset a group. Read, never written.

A row is one bit stream, bit 0 first, over its bytes; code j lies at bits [j·bits, (j+1)·bits). Knows arrays, not files or speed.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from arctool.errors import GeometryError
from arctool.quant.bf16 import widen
from arctool.quant.rows import Rows, bounded_rows, first_wrong

WIDTHS = (2, 3, 4, 6, 8)
GROUPS = (32, 64, 128)

Factors = NDArray[np.float32] | NDArray[np.float16] | NDArray[np.uint16]
"""f32, f16, or bf16 bits as u16: scales and offsets have the type that the model ran in."""


@dataclass(frozen=True)
class AfqTensor:
    """`packed`: u8 [..., out, in·bits/8]; `scales`, `offsets`: [..., out, in/group]. A weight is code · scale + offset, rounded twice."""

    bits: int
    group: int
    packed: NDArray[np.uint8]
    scales: Factors
    offsets: Factors

    @property
    def shape(self) -> tuple[int, ...]:
        return (*self.packed.shape[:-1], self.in_features)

    @property
    def in_features(self) -> int:
        return int(self.packed.shape[-1]) * 8 // self.bits

    @property
    def label(self) -> str:
        return f"afq{self.bits}"

    @property
    def stored_bits(self) -> int:
        return (self.packed.nbytes + self.scales.nbytes + self.offsets.nbytes) * 8

    def check_form(self, where: str) -> None:
        """Raise GeometryError unless bits and group are MLX's, rows are whole groups, and every group has its factors."""
        if self.bits not in WIDTHS or self.group not in GROUPS:
            raise GeometryError(
                f"{where}: AFQ has {', '.join(map(str, WIDTHS))} bits in groups of {', '.join(map(str, GROUPS))}, "
                f"found {self.bits} bits in groups of {self.group}"
            )
        if self.packed.dtype != np.uint8 or self.packed.ndim not in (2, 3) or self.packed.shape[-1] * 8 % (self.bits * self.group):
            raise GeometryError(
                f"{where}: rows of AFQ with {self.bits} bits are whole groups of {self.group} weights, "
                f"found {self.packed.dtype} {list(self.packed.shape)}"
            )
        want = (*self.packed.shape[:-1], self.in_features // self.group)
        for name, factors in (("scales", self.scales), ("biases", self.offsets)):
            if factors.dtype not in (np.float32, np.float16, np.uint16) or factors.shape != want:
                raise GeometryError(f"{where}: AFQ {name} are floats {list(want)}, found {factors.dtype} {list(factors.shape)}")
        if self.scales.dtype != self.offsets.dtype:
            raise GeometryError(f"{where}: AFQ scales and biases have one type, found {self.scales.dtype} and {self.offsets.dtype}")

    def check_values(self, where: str) -> None:
        """Raise GeometryError for a group whose factors are not finite, or give a weight that is not."""
        top = np.float32((1 << self.bits) - 1)
        for part in bounded_rows(*self.scales.shape):
            with np.errstate(over="ignore", invalid="ignore"):
                scale, offset = widen(self.scales[part]), widen(self.offsets[part])
                bad = first_wrong(np.isfinite(offset) & np.isfinite(scale * top + offset))
            if bad is not None:
                place = [part.start + bad[0], *bad[1:]]
                raise GeometryError(f"{where}: group {place} has scale {scale[bad]} and bias {offset[bad]}; its weights are not finite")

    def check(self, where: str) -> None:
        """Both."""
        self.check_form(where)
        self.check_values(where)

    def rows(self, which: Rows) -> AfqTensor:
        """Some rows (of stacked experts: some experts)."""
        return replace(self, packed=self.packed[which], scales=self.scales[which], offsets=self.offsets[which])

    def codes(self) -> NDArray[np.uint8]:
        """The integers u8 [..., out, in]."""
        bits: NDArray[Any] = np.unpackbits(self.packed, axis=-1, bitorder="little").reshape(*self.shape, self.bits)
        return np.packbits(bits, axis=-1, bitorder="little")[..., 0]

    def decode(self) -> NDArray[np.float32]:
        """The oracle's weights f32: the product is rounded, then the sum. The bits that every kernel must give."""
        grouped = self.codes().reshape(*self.scales.shape, self.group).astype(np.float32)
        return (grouped * widen(self.scales)[..., None] + widen(self.offsets)[..., None]).reshape(self.shape)

    def dense(self) -> NDArray[np.float32]:
        """The same: there is no rotation."""
        return self.decode()
