"""MXFP4 (OCP Microscaling Formats 1.0): 32 weights share a power of two, each is one of sixteen values. Read, never written.

A byte holds two codes, the low nibble first. A group's scale is E8M0, 2^(byte − 127). Knows arrays, not files or speed.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from arctool.errors import GeometryError
from arctool.quant.rows import Rows, bounded_rows, first_wrong

GROUP = 32

E2M1 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6], np.float32)
"""What the sixteen codes mean: one sign bit, two of exponent (bias 1), one of mantissa."""

MAX_SCALE = 252
"""The largest scale byte under which the code 6 = 1.5 · 2² is an f32; 255 is no number at all."""


@dataclass(frozen=True)
class Mxfp4Tensor:
    """`codes`: u8 [..., out, in/2]; `scales`: u8 [..., out, in/32]; stacked experts have a leading axis."""

    codes: NDArray[np.uint8]
    scales: NDArray[np.uint8]

    @property
    def shape(self) -> tuple[int, ...]:
        return (*self.codes.shape[:-1], self.in_features)

    @property
    def in_features(self) -> int:
        return 2 * int(self.codes.shape[-1])

    @property
    def label(self) -> str:
        return "mxfp4"

    @property
    def stored_bits(self) -> int:
        return (self.codes.nbytes + self.scales.nbytes) * 8

    def check_form(self, where: str) -> None:
        """Raise GeometryError unless the rows are whole groups and every group has its scale."""
        if self.codes.dtype != np.uint8 or self.codes.ndim not in (2, 3) or self.in_features % GROUP:
            raise GeometryError(
                f"{where}: MXFP4 codes are u8 [out, in/2] in groups of {GROUP} weights, found {self.codes.dtype} {list(self.codes.shape)}"
            )
        want = (*self.codes.shape[:-1], self.in_features // GROUP)
        if self.scales.dtype != np.uint8 or self.scales.shape != want:
            raise GeometryError(f"{where}: MXFP4 scales are u8 {list(want)}, found {self.scales.dtype} {list(self.scales.shape)}")

    def check_values(self, where: str) -> None:
        """Raise GeometryError for a scale that is NaN or takes a weight out of the range of f32."""
        for part in bounded_rows(*self.scales.shape):
            bad = first_wrong(self.scales[part] <= MAX_SCALE)
            if bad is not None:
                place = [part.start + bad[0], *bad[1:]]
                found = int(self.scales[part][bad])
                raise GeometryError(f"{where}: the scale at {place} is 2^({found} - 127), at most {MAX_SCALE} gives finite weights")

    def check(self, where: str) -> None:
        """Both."""
        self.check_form(where)
        self.check_values(where)

    def rows(self, which: Rows) -> Mxfp4Tensor:
        """Some rows (of stacked experts: some experts)."""
        return replace(self, codes=self.codes[which], scales=self.scales[which])

    def decode(self) -> NDArray[np.float32]:
        """The oracle's weights f32: value(code) · 2^(scale − 127), exact. The bits that every kernel must give."""
        values = np.empty((*self.codes.shape, 2), np.float32)
        values[..., 0] = E2M1[self.codes & 15]
        values[..., 1] = E2M1[self.codes >> 4]
        grouped = values.reshape(*self.scales.shape, GROUP)
        powers = powers_of_two()[self.scales]
        return (grouped * powers[..., None]).reshape(self.shape)

    def dense(self) -> NDArray[np.float32]:
        """The same: there is no rotation."""
        return self.decode()


def powers_of_two() -> NDArray[np.float32]:
    """f32 [256]: what every E8M0 byte means; NaN at 255."""
    powers = np.ldexp(np.float32(1), np.arange(255, dtype=np.int32) - 127).astype(np.float32)
    return np.append(powers, np.float32(np.nan))
