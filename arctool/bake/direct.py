"""Types that need no search: bf16, f32 and GGML blocks. A tensor is rounded value by value, so it is made anew rather than journalled.

Knows one tensor of a checkpoint at a time; which type it gets is the recipe's affair.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from arctool.bake.choices import KEEP
from arctool.bake.source.checkpoint import Checkpoint
from arctool.errors import GeometryError, SourceError
from arctool.quant.bf16 import from_bf16, to_bf16
from arctool.quant.ggml import GGML_TYPES, GgmlType, row_chunks
from arctool.quant.tensor import DenseTensor, GgmlTensor
from arctool.run.models.spec import Role, TensorSpec


@dataclass(frozen=True)
class DirectTensor:
    """A stored tensor and ‖W−Ŵ‖²/‖W‖² against the source, None for one that is not quantised."""

    weight: DenseTensor | GgmlTensor
    relative_error: float | None


def store_directly(checkpoint: Checkpoint, spec: TensorSpec, name: str) -> DirectTensor:
    """Tensor `spec` as `name`: `bf16` or a GGML type. Raises SourceError, naming file and tensor, for values that it cannot hold."""
    values = checkpoint.tensor(spec.name)
    try:
        if name == KEEP:
            narrow = spec.role is not Role.NORM or checkpoint.stored_dtype(spec.name) == "BF16"
            return DirectTensor(as_bf16(values, spec.name) if narrow else DenseTensor(values), None)
        return as_blocks(values, spec.name, GGML_TYPES[name])
    except (GeometryError, SourceError) as error:
        raise SourceError(f"{checkpoint.file(spec.name)}: {error}") from error


def as_bf16(values: NDArray[np.float32], name: str) -> DenseTensor:
    """`values` rounded to bf16. Raises SourceError where one is too large for it."""
    narrow = to_bf16(values)
    finite = np.isfinite(from_bf16(narrow))
    if not finite.all():
        index = tuple(int(i) for i in np.argwhere(~finite)[0])
        raise SourceError(f"{name}: the value {values[index]} at {list(index)} is larger than bf16 can hold; the checkpoint is damaged")
    return DenseTensor(narrow)


def as_blocks(values: NDArray[np.float32], name: str, kind: GgmlType) -> DirectTensor:
    """`values` f32 [out, in] in GGML blocks. Raises GeometryError where a scale overflows f16, SourceError where scales vanish in it."""
    weight = GgmlTensor.encoded(kind, values, name)
    error = relative_error(weight, values)
    if error > kind.worst_error:
        raise SourceError(
            f"{name}: stored as {kind.name} it would lose {error:.2g} of its power, at most {kind.worst_error:.2g} is rounding: "
            f"its values, up to {np.abs(values).max():.3g}, are too small for f16 scales; choose bf16 for it"
        )
    return DirectTensor(weight, error)


def relative_error(weight: GgmlTensor, values: NDArray[np.float32]) -> float:
    """‖W−Ŵ‖²/‖W‖² in f64, a chunk of rows at a time; 0 for a tensor of zeros."""
    gap = power = 0.0
    for part in row_chunks(*weight.shape):
        want = values[part].astype(np.float64)
        gap += float(np.square(weight.rows(part).decode() - want).sum())
        power += float(np.square(want).sum())
    return gap / power if power else 0.0
