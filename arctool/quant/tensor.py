"""What a weight of an artifact is, in memory: dense, or packed. Each kind says what it decodes to; none knows files or kernels.

`check_form` asks whether the parts agree and touches no data; `check_values` reads them all and asks whether every weight is a number.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from arctool.errors import GeometryError
from arctool.quant.afq import AfqTensor
from arctool.quant.bf16 import widen
from arctool.quant.codebooks import Codebook
from arctool.quant.fp8 import Fp8Tensor
from arctool.quant.ggml import Each, GgmlType
from arctool.quant.hadamard import Rotation
from arctool.quant.mxfp4 import Mxfp4Tensor
from arctool.quant.rows import Rows, bounded_rows, first_wrong
from arctool.quant.trellis import Geometry, check_padding, check_stride, decode_rows


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

    def check_values(self, where: str) -> None:
        """Raise GeometryError that names the first value that is infinite or no number, if one is. Memory holds a chunk."""
        flat = self.data.reshape(-1)
        for part in bounded_rows(flat.size):
            bad = first_wrong(np.isfinite(widen(flat[part])))
            if bad is not None:
                at = part.start + bad[0]
                index = [int(size) for size in np.unravel_index(at, self.shape)]
                raise GeometryError(f"{where}: the value at {index} is {widen(flat[at : at + 1])[0]}, which is not finite")

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
        return self.label_of(self.geometry, "sum2" if self.codebook.kind == "sum2" else self.codebook.dtype)

    @staticmethod
    def label_of(geometry: Geometry, kind: str) -> str:
        """Label of a trellis of that geometry; `kind`: `sum2`, or the type of its table."""
        return f"trellis-{geometry.name.lower()}-{kind}"

    @property
    def stored_bits(self) -> int:
        """Bits of streams, scales and signs; a shared table is counted once by the artifact, not here."""
        signs = 0 if self.rotation is None else sum(-(-s.size // 8) for s in (self.rotation.signs_in, self.rotation.signs_out))
        return (self.packed.nbytes + self.scales.nbytes + signs) * 8

    def check_form(self, where: str) -> None:
        """Raise GeometryError, naming `where`, unless types and sizes of every part agree with every other. Looks at no stream."""
        self.codebook.check(self.geometry, where)
        check_stride(self.packed, self.geometry, self.in_features, where)
        rows = self.packed.shape[0]
        if self.scales.dtype != np.float32 or self.scales.shape != (rows,):
            raise GeometryError(f"{where}: expected f32 scales [{rows}], found {self.scales.dtype} {list(self.scales.shape)}")
        if self.rotation is not None:
            sizes = (self.rotation.signs_out.size, self.rotation.signs_in.size)
            if sizes != self.shape:
                raise GeometryError(f"{where}: the rotation is for {list(sizes)}, the weight is {list(self.shape)}")

    def check_values(self, where: str) -> None:
        """Raise GeometryError unless the streams' padding is zero and no scale makes a weight that is not finite."""
        for part in bounded_rows(*self.packed.shape):
            check_padding(self.packed[part], self.geometry, self.in_features, where, part.start)
        if not np.isfinite(self.scales).all():
            raise GeometryError(f"{where}: the scale of row {int(np.flatnonzero(~np.isfinite(self.scales))[0])} is not finite")
        sizes = np.abs(self.scales)
        if sizes.size and sizes.max() > 1:  # a codebook's own values are finite, so that smaller scales are safe
            peak = float(np.abs(self.codebook.values(self.geometry)).max())
            row = int(np.argmax(sizes))
            if not float(sizes[row]) * peak <= float(np.finfo(np.float32).max):
                raise GeometryError(
                    f"{where}: the scale of row {row} is {self.scales[row]}; times the codebook's {peak:.4g} it is not finite"
                )

    def check(self, where: str) -> None:
        """Both."""
        self.check_form(where)
        self.check_values(where)

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
    """A weight as GGML blocks, row after row. `data`: u8 [..., out, row_bytes] (experts may lead), perhaps a view into a mapped file
    at any alignment."""

    type: GgmlType
    in_features: int
    data: NDArray[np.uint8]

    @classmethod
    def encoded(cls, type: GgmlType, weights: NDArray[np.float32], where: str, each: Each = map) -> GgmlTensor:
        """`weights` f32 [..., out, in] in blocks of `type`, chunks of rows by `each`. Raises GeometryError, naming `where`, for what they
        cannot hold."""
        return cls(type, weights.shape[-1], type.encode(weights, where, each))

    @property
    def shape(self) -> tuple[int, ...]:
        return (*self.data.shape[:-1], self.in_features)

    @property
    def label(self) -> str:
        return self.type.name

    @property
    def stored_bits(self) -> int:
        return self.data.nbytes * 8

    def check(self, where: str) -> None:
        """Raise GeometryError, naming `where`, unless the bytes are whole rows of blocks with finite scales."""
        self.check_form(where)
        self.check_values(where)

    def check_form(self, where: str) -> None:
        """Raise GeometryError, naming `where`, unless the bytes are whole rows of blocks; reads none of them."""
        self.type.check_form(self.data, self.in_features, where)

    def check_values(self, where: str) -> None:
        """Raise GeometryError, naming `where`, for a scale that is not finite."""
        self.type.check_values(self.data, self.in_features, where)

    def rows(self, which: Rows) -> GgmlTensor:
        """Some along the first axis: rows, or experts of a stack."""
        return replace(self, data=self.data[which])

    def decode(self) -> NDArray[np.float32]:
        """The oracle's weights f32 [..., out, in]: the bits that every kernel must give."""
        return self.type.decode(self.data, self.in_features)

    def dense(self) -> NDArray[np.float32]:
        """The same: blocks are in the original basis."""
        return self.decode()


ScaledTensor = Fp8Tensor | AfqTensor | Mxfp4Tensor
"""Codes under scales that lie beside them."""

PackedTensor = TrellisTensor | GgmlTensor | ScaledTensor
"""A weight whose bytes an oracle decodes."""

Weight = DenseTensor | PackedTensor


def as_matrix(weight: PackedTensor) -> PackedTensor:
    """Stacked experts [experts, out, in] as one matrix [experts · out, in]; any other weight as it is. Nothing is copied."""
    if len(weight.shape) < 3 or isinstance(weight, TrellisTensor | Fp8Tensor):
        return weight
    if isinstance(weight, GgmlTensor):
        return replace(weight, data=_flat(weight.data))
    if isinstance(weight, Mxfp4Tensor):
        return replace(weight, codes=_flat(weight.codes), scales=_flat(weight.scales))
    return replace(weight, packed=_flat(weight.packed), scales=_flat(weight.scales), offsets=_flat(weight.offsets))


def of_stack(weight: Weight, expert: int) -> Weight:
    """One matrix [out, in] of stacked experts [experts, out, in]. Nothing is copied."""
    one = weight.rows(slice(expert, expert + 1))
    return DenseTensor(one.data[0]) if isinstance(one, DenseTensor) else as_matrix(one)


def _flat(array: NDArray) -> NDArray:
    return array.reshape(-1, array.shape[-1])
