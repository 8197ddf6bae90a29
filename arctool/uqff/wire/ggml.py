"""Tag 0: GGML's own types, plain numbers and blocks, in the bytes that llama.cpp and mistral.rs read."""

from __future__ import annotations

from collections.abc import Mapping
from math import prod
from typing import Final

import numpy as np

from arctool.errors import FormatError, GeometryError
from arctool.quant.ggml import GGML_BY_ID, GgmlType
from arctool.quant.tensor import DenseTensor, GgmlTensor
from arctool.uqff.entries import DTYPE_BYTES, Entry, bytes_of, entry_of, expect, read_shape, scalar_entry, view
from arctool.uqff.wire.family import Family, Parts, TablePool

TAG: Final = 0

PLAIN: Final[Mapping[str, int]] = {"f32": 0, "bf16": 30}
"""ggml's numbers of what a `DenseTensor` holds, by its label, which in capitals is the dtype in safetensors."""

UNREADABLE: Final[Mapping[int, str]] = {9: "q8_1", 15: "q8k", 39: "mxfp4"}
"""Types that have a number and are not read: no loader of UQFF takes them, mistral.rs (which writes two of them) included."""


def encode(base: str, weight: DenseTensor | GgmlTensor) -> list[Entry]:
    """The entries of a layer of plain numbers or blocks."""
    kind = weight.type.id if isinstance(weight, GgmlTensor) else PLAIN[weight.label]
    return [
        entry_of(base, "U8", bytes_of(weight.data)),
        scalar_entry(f"{base}.format", "U8", TAG),
        scalar_entry(f"{base}.dtype", "U32", kind),
        entry_of(f"{base}.shape", "U32", np.array(weight.shape, np.uint32)),
    ]


def decode(parts: Parts, tables: TablePool, where: str) -> DenseTensor | GgmlTensor:
    """The weight; its bytes stay a view of the entry."""
    kind = int(expect(parts["dtype"], "U32", (), where))
    plain = next((name for name, number in PLAIN.items() if number == kind), None)
    if plain is not None:
        shape, dtype = read_shape(parts["shape"], None, where), plain.upper()
        _check_size(parts[""], plain, shape, prod(shape) * DTYPE_BYTES[dtype], where)
        return DenseTensor(view(Entry(parts[""].name, dtype, shape, parts[""].raw), where))
    if kind in GGML_BY_ID:
        return blocks(parts[""], GGML_BY_ID[kind], read_shape(parts["shape"], None, where), where)
    label = f"{UNREADABLE[kind]} (ggml {kind})" if kind in UNREADABLE else f"ggml type {kind}"
    names = {number: name for name, number in PLAIN.items()} | {number: known.name for number, known in GGML_BY_ID.items()}
    known = ", ".join(f"{names[number]} ({number})" for number in sorted(names))
    raise FormatError(f"{where}.dtype: {label} is not readable by this version; it reads {known}")


def blocks(entry: Entry, kind: GgmlType, shape: tuple[int, ...], where: str) -> GgmlTensor:
    """The weight of `shape`, [out, in] or stacked [experts, out, in], in the raw bytes of `entry`."""
    if len(shape) not in (2, 3):
        raise FormatError(f"{where}: {kind.name} needs a weight [out, in] or [experts, out, in], found {list(shape)}")
    try:
        width = kind.row_bytes(shape[-1])
    except GeometryError as error:
        raise GeometryError(f"{where}: {error}") from error
    _check_size(entry, kind.name, shape, prod(shape[:-1]) * width, where)
    return GgmlTensor(kind, shape[-1], entry.raw.reshape(*shape[:-1], width))


def _check_size(entry: Entry, name: str, shape: tuple[int, ...], nbytes: int, where: str) -> None:
    """Raise GeometryError unless `entry` is the `nbytes` raw bytes that a weight of `shape` takes."""
    if entry.dtype != "U8" or len(entry.shape) not in (1, 2) or entry.nbytes != nbytes:
        raise GeometryError(f"{where}: {name} {list(shape)} takes {nbytes} bytes as U8, found {entry.dtype} {list(entry.shape)}")


FAMILY: Final = Family("GGML", frozenset(("", "format", "dtype", "shape")), frozenset(), decode)
