"""FP8 e4m3 (OCP 8-bit floating point, arXiv 2209.05433): the 256 values, the rounding to them, and a matrix with one scale.

e4m3 here is the variant without infinities ("fn"): one sign bit, four of exponent (bias 7), three of mantissa; the largest value is 448
and only 0x7F and 0xFF are no numbers. Knows arrays, not files or speed.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cache

import numpy as np
from numpy.typing import NDArray

from arctool.errors import GeometryError
from arctool.quant.rows import Rows, bounded_rows, first_wrong

E4M3_MAX = 448.0
"""The largest e4m3 value, 1.75 · 2^8."""

SUBNORMAL = 2.0**-9
"""The smallest positive e4m3 value; below 2^-6 the values are its multiples."""

WORST_ERROR = 2.0**-8 + 2.0**-6
"""The most of ‖w−ŵ‖²/‖w‖² that rounding costs a matrix of fewer than 2^31 weights: half of 2^-3 of a normal value, squared, and for each
weight that is subnormal half of 2^-9, squared, against the 448² of the largest."""


@cache
def e4m3_values() -> NDArray[np.float32]:
    """f32 [256]: what every code means; NaN at 0x7F and 0xFF."""
    code = np.arange(256)
    exponent, mantissa = (code >> 3) & 15, code & 7
    size = np.where(exponent == 0, np.ldexp(mantissa / 8.0, -6), np.ldexp(1 + mantissa / 8.0, exponent - 7))
    size[(code & 0x7F) == 0x7F] = np.nan
    values = np.where(code & 0x80, -size, size).astype(np.float32)
    values.flags.writeable = False
    return values


def to_e4m3(x: NDArray[np.float32]) -> NDArray[np.uint8]:
    """Round finite f32 to e4m3 codes, to nearest, ties to even; what is larger than 448 becomes ±448."""
    size = np.minimum(np.abs(x), np.float32(E4M3_MAX))
    bits = size.astype(np.float32).view(np.uint32)
    # Both halves count in units of the last place, so that a carry moves on into the exponent by itself.
    normal = ((bits + (((bits >> 20) & 1) + np.uint32(0x7FFFF))) >> 20) - np.uint32((127 - 7) << 3)
    subnormal = np.rint(size * np.float32(1 / SUBNORMAL)).astype(np.uint32)
    code = np.where(size < np.float32(2.0**-6), subnormal, normal)
    return (code | np.where(np.signbit(x), 0x80, 0)).astype(np.uint8)


@dataclass(frozen=True)
class Fp8Tensor:
    """A weight as e4m3 codes under one scale, as mistral.rs stores it. `codes`: u8 [out, in]; a weight is value(code) · scale, in f32."""

    codes: NDArray[np.uint8]
    scale: np.float32

    @classmethod
    def encoded(cls, weights: NDArray[np.float32], where: str) -> Fp8Tensor:
        """f32 [out, in] under the scale max|w| / 448. Raises GeometryError for what is not finite, or too small for a scale of f32."""
        bad = first_wrong(np.isfinite(weights))
        if bad is not None:
            raise GeometryError(f"{where}: the value at {list(bad)} is {weights[bad]}, which is not finite")
        scale = np.float32(np.abs(weights).max()) / np.float32(E4M3_MAX)
        if not scale:
            return cls(np.where(np.signbit(weights), 0x80, 0).astype(np.uint8), np.float32(1))
        with np.errstate(over="ignore"):
            if not np.isfinite(np.float32(1) / scale):
                raise GeometryError(f"{where}: values up to {np.abs(weights).max():.3g} are too small for an FP8 scale of f32; choose bf16")
        codes = np.empty(weights.shape, np.uint8)
        for part in bounded_rows(*weights.shape):
            codes[part] = to_e4m3(weights[part] / scale)
        return cls(codes, scale)

    @property
    def shape(self) -> tuple[int, ...]:
        return self.codes.shape

    @property
    def in_features(self) -> int:
        return int(self.codes.shape[-1])

    @property
    def label(self) -> str:
        return "fp8"

    @property
    def stored_bits(self) -> int:
        return self.codes.nbytes * 8 + 32

    def check_form(self, where: str) -> None:
        """Raise GeometryError unless the codes are a matrix of bytes."""
        if self.codes.dtype != np.uint8 or self.codes.ndim != 2:
            raise GeometryError(f"{where}: e4m3 codes are u8 [out, in], found {self.codes.dtype} {list(self.codes.shape)}")

    def check_values(self, where: str) -> None:
        """Raise GeometryError for a scale that is no positive number, and for a code that is no number."""
        if not 0 < float(self.scale) * E4M3_MAX <= float(np.finfo(np.float32).max):
            raise GeometryError(f"{where}: the scale {self.scale} does not give finite weights; expected a positive number")
        for part in bounded_rows(*self.codes.shape):
            bad = first_wrong((self.codes[part] & 0x7F) != 0x7F)
            if bad is not None:
                raise GeometryError(f"{where}: the code at {[part.start + bad[0], *bad[1:]]} is NaN")

    def check(self, where: str) -> None:
        """Both."""
        self.check_form(where)
        self.check_values(where)

    def rows(self, which: Rows) -> Fp8Tensor:
        """Some rows."""
        return replace(self, codes=self.codes[which])

    def table(self) -> NDArray[np.float32]:
        """f32 [256]: the weight that each code stands for, one rounding each."""
        with np.errstate(invalid="ignore"):
            return e4m3_values() * self.scale

    def decode(self) -> NDArray[np.float32]:
        """The oracle's weights f32 [out, in]: the bits that every kernel must give."""
        return self.table()[self.codes]

    def dense(self) -> NDArray[np.float32]:
        """The same: there is no rotation."""
        return self.decode()
