"""What a weight of an artifact is, in memory: dense, trellis or GGML blocks. Each says what it decodes to; none knows files or kernels."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from arctool.errors import GeometryError
from arctool.quant.bf16 import widen
from arctool.quant.codebooks import Codebook
from arctool.quant.ggml import GgmlType
from arctool.quant.hadamard import Rotation
from arctool.quant.trellis import Geometry, check_packed, decode_rows

Rows = slice | NDArray[np.int64]
"""Which rows of a weight: a run of them (a view), or some by number (a copy)."""


@dataclass(frozen=True)
class DenseTensor:
    """An unquantised tensor. `data`: f32 values, or bf16 bits as u16, of the tensor's logical shape."""

    data: NDArray[np.float32] | NDArray[np.uint16]

    def __post_init__(self) -> None:
        if self.data.dtype not in (np.float32, np.uint16):
            raise GeometryError(f"a dense tensor holds f32 or bf16 bits, found {self.data.dtype}")

    @property
    def shape(self) -> tuple[int, ...]:
        return self.data.shape

    @property
    def label(self) -> str:
        """Name of the storage type in reports."""
        return "bf16" if self.data.dtype == np.uint16 else "f32"

    @property
    def stored_bits(self) -> int:
        return self.data.nbytes * 8

    def rows(self, which: Rows) -> DenseTensor:
        """Some rows."""
        return DenseTensor(self.data[which])

    def dense(self) -> NDArray[np.float32]:
        """The weights as f32, exactly."""
        return widen(self.data)


@dataclass(frozen=True)
class TrellisTensor:
    """A weight as trellis streams, one a row, in the rotated basis.

    `packed`: u8 [out, stride]; `scales`: f32 [out]; `rotation` maps activations into the basis of the rows, None if they are not rotated.
    """

    geometry: Geometry
    codebook: Codebook
    in_features: int
    packed: NDArray[np.uint8]
    scales: NDArray[np.float32]
    rotation: Rotation | None

    @property
    def shape(self) -> tuple[int, int]:
        return (self.packed.shape[0], self.in_features)

    @property
    def label(self) -> str:
        kind = "sum2" if self.codebook.kind == "sum2" else self.codebook.dtype
        return f"trellis-{self.geometry.name.lower()}-{kind}"

    @property
    def stored_bits(self) -> int:
        """Bits of streams, scales and signs; a shared table is counted once by the artifact, not here."""
        signs = 0 if self.rotation is None else sum(-(-s.size // 8) for s in (self.rotation.signs_in, self.rotation.signs_out))
        return (self.packed.nbytes + self.scales.nbytes + signs) * 8

    def check(self, where: str) -> None:
        """Raise GeometryError, naming `where`, unless every part agrees with every other and the scales are finite."""
        self.codebook.check(self.geometry, where)
        check_packed(self.packed, self.geometry, self.in_features, where)
        rows = self.packed.shape[0]
        if self.scales.dtype != np.float32 or self.scales.shape != (rows,):
            raise GeometryError(f"{where}: expected f32 scales [{rows}], found {self.scales.dtype} {list(self.scales.shape)}")
        if not np.isfinite(self.scales).all():
            raise GeometryError(f"{where}: the scale of row {int(np.flatnonzero(~np.isfinite(self.scales))[0])} is not finite")
        if self.rotation is not None:
            sizes = (self.rotation.signs_out.size, self.rotation.signs_in.size)
            if sizes != self.shape:
                raise GeometryError(f"{where}: the rotation is for {list(sizes)}, the weight is {list(self.shape)}")

    def rows(self, which: Rows) -> TrellisTensor:
        """Some rows, in the rotated basis and without their rotation, which may need all rows."""
        return replace(self, packed=self.packed[which], scales=self.scales[which], rotation=None)

    def decode(self) -> NDArray[np.float32]:
        """The oracle's weights f32 [out, in], still in the rotated basis: the bits that every kernel must give."""
        return decode_rows(self.packed, self.geometry, self.codebook.values(self.geometry), self.scales, self.in_features)

    def dense(self) -> NDArray[np.float32]:
        """The weights f32 [out, in] in the original basis, for comparison with a source."""
        rotated = self.decode()
        return rotated if self.rotation is None else self.rotation.restore(rotated)


@dataclass(frozen=True)
class GgmlTensor:
    """A weight as GGML blocks, row after row. `data`: u8 [out, row_bytes], perhaps a view into a mapped file at any alignment."""

    type: GgmlType
    in_features: int
    data: NDArray[np.uint8]

    @classmethod
    def encoded(cls, type: GgmlType, weights: NDArray[np.float32], where: str) -> GgmlTensor:
        """`weights` f32 [out, in] in blocks of `type`. Raises GeometryError, naming `where`, for what they cannot hold."""
        return cls(type, weights.shape[1], type.encode(weights, where))

    @property
    def shape(self) -> tuple[int, int]:
        return (self.data.shape[0], self.in_features)

    @property
    def label(self) -> str:
        return self.type.name

    @property
    def stored_bits(self) -> int:
        return self.data.nbytes * 8

    def check(self, where: str) -> None:
        """Raise GeometryError, naming `where`, unless the bytes are whole rows of blocks with finite scales."""
        self.type.check(self.data, self.in_features, where)

    def rows(self, which: Rows) -> GgmlTensor:
        """Some rows."""
        return replace(self, data=self.data[which])

    def decode(self) -> NDArray[np.float32]:
        """The oracle's weights f32 [out, in]: the bits that every kernel must give."""
        return self.type.decode(self.data, self.in_features)

    def dense(self) -> NDArray[np.float32]:
        """The same: blocks are in the original basis."""
        return self.decode()


PackedTensor = TrellisTensor | GgmlTensor
"""A weight whose bytes an oracle decodes."""

Weight = DenseTensor | PackedTensor
