"""Types that need no search: plain ones, GGML blocks and FP8. A tensor is rounded value by value, so it is made anew, not journalled.

A tensor that its source keeps in the very type that is asked for is copied, byte for byte. Knows one tensor of a checkpoint at a time;
which type it gets is the recipe's affair.
"""

from __future__ import annotations

from concurrent.futures import Executor
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from arctool.bake.choices import ALIASES, F32, FP8, KEEP, PLAIN
from arctool.bake.source.checkpoint import Checkpoint
from arctool.errors import GeometryError, SourceError
from arctool.quant import fp8
from arctool.quant.bf16 import from_bf16, to_bf16
from arctool.quant.fp8 import Fp8Tensor
from arctool.quant.ggml import GGML_TYPES, GgmlType
from arctool.quant.tensor import DenseTensor, GgmlTensor
from arctool.run.models.spec import Role, TensorSpec
from arctool.uqff.distance import relative_error


@dataclass(frozen=True)
class DirectTensor:
    """A stored tensor and ‖W−Ŵ‖²/‖W‖² against the source, None for one that is not quantised."""

    weight: DenseTensor | GgmlTensor | Fp8Tensor
    relative_error: float | None


def store_directly(checkpoint: Checkpoint, spec: TensorSpec, name: str, pool: Executor | None = None) -> DirectTensor:
    """Tensor `spec` as `name`: a plain type, a GGML type or `fp8`. `pool`: shares the work; it changes no byte.

    Raises SourceError, naming file and tensor, for values that the type cannot hold.
    """
    try:
        if name in GGML_TYPES and ALIASES.get(stored := checkpoint.stored_dtype(spec.name).lower(), stored) == name:
            blocks = checkpoint.blocks(spec.name)
            if blocks is not None:
                return copied(GgmlTensor(GGML_TYPES[name], spec.shape[-1], blocks), spec.name)
        values = checkpoint.tensor(spec.name)
        if name in (KEEP, F32):
            kept = spec.role in (Role.NORM, Role.ROUTER)
            narrow = name == KEEP and (not kept or checkpoint.stored_dtype(spec.name) == "BF16")
            return DirectTensor(as_bf16(values, spec.name) if narrow else DenseTensor(values), None)
        return as_fp8(values, spec.name) if name == FP8 else as_blocks(values, spec.name, GGML_TYPES[name], pool)
    except (GeometryError, SourceError) as error:
        raise SourceError(f"{checkpoint.file(spec.name)}: {error}") from error


def copied(weight: GgmlTensor, name: str) -> DirectTensor:
    """Blocks as the source has them. Raises GeometryError for a scale that is not finite."""
    weight.check(name)
    return DirectTensor(weight, None if weight.label in PLAIN else 0.0)


def as_bf16(values: NDArray[np.float32], name: str) -> DenseTensor:
    """`values` rounded to bf16. Raises SourceError where one is too large for it."""
    narrow = to_bf16(values)
    finite = np.isfinite(from_bf16(narrow))
    if not finite.all():
        index = tuple(int(i) for i in np.argwhere(~finite)[0])
        raise SourceError(f"{name}: the value {values[index]} at {list(index)} is larger than bf16 can hold; the checkpoint is damaged")
    return DenseTensor(narrow)


def as_fp8(values: NDArray[np.float32], name: str) -> DirectTensor:
    """`values` f32 [out, in] as e4m3 under one scale. Raises SourceError where most of them vanish beside the largest."""
    weight = Fp8Tensor.encoded(values, name)
    return _bounded(weight, values, name, fp8.WORST_ERROR, "spread too far for one scale")


def as_blocks(values: NDArray[np.float32], name: str, kind: GgmlType, pool: Executor | None = None) -> DirectTensor:
    """`values` f32 [out, in] in GGML blocks. Raises GeometryError where a scale overflows f16, SourceError where scales vanish in it."""
    weight = GgmlTensor.encoded(kind, values, name, map if pool is None else pool.map)
    found = _bounded(weight, values, name, kind.worst_error, "too small for f16 scales")
    return DirectTensor(weight, None) if kind.name in PLAIN else found


def _bounded(weight: GgmlTensor | Fp8Tensor, values: NDArray[np.float32], name: str, worst: float, why: str) -> DirectTensor:
    """The tensor with its error. Raises SourceError for more than rounding can cost: the type's scales could not follow the values."""
    error = relative_error(weight, DenseTensor(values))
    if error > worst:
        raise SourceError(
            f"{name}: stored as {weight.label} it would lose {error:.2g} of its power, at most {worst:.2g} is rounding: "
            f"its values, up to {np.abs(values).max():.3g}, are {why}; choose bf16 for it"
        )
    return DirectTensor(weight, error)
