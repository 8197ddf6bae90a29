"""Tables that layers share: one entry an artifact, named by the digest of its bytes, referred to by the layers' sections."""

from __future__ import annotations

import hashlib

import numpy as np
from numpy.typing import NDArray

from arctool.errors import FormatError, GeometryError
from arctool.quant.codebooks import Codebook
from arctool.quant.tensor import DenseTensor, TrellisTensor
from arctool.uqff.entries import Entry, bytes_of, entry_of, expect
from arctool.uqff.sections import TableRef


def table_name(sha256: str) -> str:
    """Entry name of the table with that digest."""
    return f"arctool.table.{sha256[:16]}"


def table_ref(weight: TrellisTensor) -> TableRef | None:
    """How a layer's sections name its table; None for sum2."""
    if weight.codebook.kind == "sum2":
        return None
    return TableRef(weight.codebook.dtype, weight.geometry.v, weight.geometry.l, weight.codebook.digest)


def table_entry(codebook: Codebook) -> Entry:
    """The entry that holds a table: its little-endian bytes, U8 [nbytes], named by its digest. One per artifact."""
    if codebook.table is None:
        raise GeometryError("sum2 is computed and has no table to store")
    DenseTensor(codebook.table).check_values(table_name(codebook.digest))
    return entry_of(table_name(codebook.digest), "U8", bytes_of(codebook.table))


def read_table(entry: Entry, ref: TableRef, where: str) -> Codebook:
    """The table in `entry`, checked against the length and the whole digest that a layer states, and for finite values."""
    raw: NDArray[np.uint8] = expect(entry, "U8", (ref.nbytes,), where)
    found = hashlib.sha256(raw.data).hexdigest()
    if found != ref.sha256:
        raise FormatError(f"{where}: {entry.name}: SHA-256 {found} is not the layer's {ref.sha256}; the table was altered")
    table = np.frombuffer(raw.tobytes(), "<f4" if ref.dtype == "f32" else "<u2").reshape(-1, ref.v)
    DenseTensor(table).check_values(f"{where}: {entry.name}")
    return Codebook("table", table)
