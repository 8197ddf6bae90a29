"""A weight made ready for kernels: contiguous arrays, the table as f32, signs as f32. Made once at load, shared by every call."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from arctool.kernels.policy import KINDS, WeightKind
from arctool.quant.afq import AfqTensor
from arctool.quant.bf16 import widen
from arctool.quant.fp8 import Fp8Tensor
from arctool.quant.mxfp4 import Mxfp4Tensor
from arctool.quant.rows import Rows
from arctool.quant.tensor import DenseTensor, GgmlTensor, ScaledTensor, TrellisTensor, Weight


@dataclass(frozen=True)
class PreparedRotation:
    """Signs as f32 ±1 and block sizes of both sides."""

    block_in: int
    block_out: int
    signs_in: NDArray[np.float32]
    signs_out: NDArray[np.float32]


@dataclass(frozen=True)
class Prepared:
    """`weight` is what the artifact holds; `table` f32 [2^l·v] is shared between layers with the same codebook (empty for sum2)."""

    weight: Weight
    kind: WeightKind
    table: NDArray[np.float32]
    rotation: PreparedRotation | None

    def rows(self, which: Rows) -> Prepared:
        """Some rows in the weight's own basis, without a rotation."""
        return replace(self, weight=self.weight.rows(which), rotation=None)

    @property
    def out_features(self) -> int:
        return int(self.weight.shape[0])

    @property
    def in_features(self) -> int:
        return int(self.weight.shape[1])


GGML_KINDS: dict[str, WeightKind] = {kind.removeprefix("ggml-"): kind for kind in KINDS if kind.startswith("ggml-")}
"""Kind of a GGML type, by its name."""


def weight_kind(weight: Weight) -> WeightKind:
    """Which family of kernels a weight needs."""
    if isinstance(weight, Fp8Tensor):
        return "fp8"
    if isinstance(weight, AfqTensor | Mxfp4Tensor):
        return "afq" if isinstance(weight, AfqTensor) else "mxfp4"
    if isinstance(weight, TrellisTensor):
        return "trellis-sum2" if weight.codebook.kind == "sum2" else "trellis-table"
    if isinstance(weight, GgmlTensor):
        return GGML_KINDS[weight.type.name]
    return "dense-bf16" if weight.data.dtype == np.uint16 else "dense-f32"


def prepare_dense(weight: DenseTensor) -> Prepared:
    """A dense weight needs only to be contiguous."""
    contiguous = weight if weight.data.flags.c_contiguous else DenseTensor(weight.data.copy())
    return Prepared(contiguous, weight_kind(weight), np.empty(0, np.float32), None)


def prepare_ggml(weight: GgmlTensor) -> Prepared:
    """Blocks are read where they lie; rows must follow each other."""
    contiguous = weight if weight.data.flags.c_contiguous else replace(weight, data=weight.data.copy())
    return Prepared(contiguous, weight_kind(weight), np.empty(0, np.float32), None)


def kernel_ready(array: NDArray[np.float32]) -> NDArray[np.float32]:
    """The array, copied unless it is contiguous and aligned."""
    return np.require(array, requirements=("C", "A"))


def prepare_scaled(weight: ScaledTensor, table: NDArray[np.float32]) -> Prepared:
    """Codes are read where they lie; AFQ's factors become f32. `table`: what the kernels of the weight's kind look up."""
    if isinstance(weight, AfqTensor):
        scales, offsets = kernel_ready(widen(weight.scales)), kernel_ready(widen(weight.offsets))
        wide = replace(weight, packed=np.ascontiguousarray(weight.packed), scales=scales, offsets=offsets)
        return Prepared(wide, weight_kind(weight), table, None)
    codes = np.ascontiguousarray(weight.codes)
    if isinstance(weight, Mxfp4Tensor):
        return Prepared(replace(weight, codes=codes, scales=np.ascontiguousarray(weight.scales)), weight_kind(weight), table, None)
    return Prepared(replace(weight, codes=codes), weight_kind(weight), table, None)


def prepare_trellis(weight: TrellisTensor, table: NDArray[np.float32]) -> Prepared:
    """`table`: the codebook's flat f32 values, or empty for sum2, which the kernel computes."""
    rotation = weight.rotation
    prepared = None
    if rotation is not None:
        signs_in, signs_out = rotation.signs_in.astype(np.float32), rotation.signs_out.astype(np.float32)
        prepared = PreparedRotation(rotation.block_in, rotation.block_out, signs_in, signs_out)
    return Prepared(weight, weight_kind(weight), table, prepared)
