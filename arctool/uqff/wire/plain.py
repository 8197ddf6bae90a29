"""Tag 1: a weight in the entry's own dtype. Read only: mistral.rs does not cast what it loads so, and stops at the first product."""

from __future__ import annotations

from typing import Final

import numpy as np

from arctool.errors import FormatError
from arctool.quant.ggml import GGML_TYPES
from arctool.quant.tensor import DenseTensor, GgmlTensor
from arctool.uqff.entries import MAX_RANK, Entry, view
from arctool.uqff.wire.family import Family, Parts, TablePool
from arctool.uqff.wire.ggml import blocks

TAG: Final = 1


def decode(parts: Parts, tables: TablePool, where: str) -> DenseTensor | GgmlTensor:
    """The weight, as `plain_weight`."""
    entry = parts[""]
    if not 1 <= len(entry.shape) <= MAX_RANK or 0 in entry.shape:
        raise FormatError(f"{where}: a weight has one to three dimensions, all positive, found {list(entry.shape)}")
    return plain_weight(entry, where)


def plain_weight(entry: Entry, where: str) -> DenseTensor | GgmlTensor:
    """Numbers in the entry's own dtype: f32 and bf16 as a view, f16 as rows of ggml's F16, and a mere vector of it widened to f32."""
    if entry.dtype not in ("F32", "BF16", "F16"):
        raise FormatError(f"{where}: expected F32, BF16 or F16, found {entry.dtype}")
    if entry.dtype == "F16" and 2 <= len(entry.shape) <= MAX_RANK and 0 not in entry.shape:
        return blocks(Entry(entry.name, "U8", (entry.nbytes,), entry.raw), GGML_TYPES["f16"], entry.shape, where)
    data = view(entry, where)
    return DenseTensor(data.astype(np.float32) if entry.dtype == "F16" else data)


FAMILY: Final = Family("unquantised", frozenset(("", "format")), frozenset(), decode)
