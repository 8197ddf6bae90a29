"""Codebooks and rungs of the trellis formats: which values a state stands for, and which pairings users can ask for by name.

`sum2` is computed (no table to load); tables ship inside the package, made by `python -m arctool.bake.search.codebook_training` from a seed
and pinned here by SHA-256. The values are the format: a changed bit in any of them changes what every artifact means.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from arctool.errors import GeometryError, UsageError
from arctool.quant.bf16 import widen
from arctool.quant.trellis import Geometry

TableDtype = Literal["f32", "bf16"]

Sum2Constants = tuple[tuple[int, int], tuple[int, int]]
"""(multiplier, increment) of both hashes of `sum2`."""

SUM2_CONSTANTS: dict[int, Sum2Constants] = {
    4: ((0x5CACD651, 0x07865849), (0x18C5F6BB, 0x793CAC8E)),
    6: ((0x43D2A73D, 0x17E5233D), (0x8FAB6745, 0xB76FAA5C)),
    8: ((0x90EBF367, 0x5765B9DB), (0x7D094E05, 0xC262849F)),
}
"""By K. The least error of some thousand random pairs on Gaussian rows, for each K by itself:
which pairs spread a node's 2^K branches well depends on K (`bake/search/sum2_search.py` finds them)."""

SUM2_SHA256: dict[str, str] = {
    "K4V2L16": "8ea60ab45e0b49656dda2f530014c9dc0560b0663015007e4f67dd65aa2b84ab",
    "K6V2L16": "f24766ce23fc98b006cdf5edb8a3fdf1e65ea9856fb0b7e3a3638eb9718e71f5",
    "K8V2L16": "9a480bd1a2d87f7d7b6bfc6d767a4c76b12237f60c3e054b8adeaffe4fa05560",
}
"""Of the little-endian f32 [65536, 2] that `sum2_values` gives by geometry: guards against a machine that computes something else."""

SUM2_CENTRE = 510
"""Mean of the sum of four uniform bytes, 4 · 255 / 2."""

SUM2_STEP = np.float32(1.0 / 147.800537109375)
"""One over the standard deviation of that sum, √(4 · (256² − 1) / 12), as QTIP's 1MAD rounds it."""


@dataclass(frozen=True)
class Codebook:
    """A map from states to values. `table` is None for `sum2`, else f32 or bf16 bits (u16) of shape [2^l, v]."""

    kind: Literal["sum2", "table"]
    table: NDArray[np.float32] | NDArray[np.uint16] | None = None

    @property
    def dtype(self) -> TableDtype:
        """Storage type of the table; `sum2` has none and raises GeometryError."""
        if self.table is None:
            raise GeometryError("sum2 is computed and has no table dtype")
        return "bf16" if self.table.dtype == np.uint16 else "f32"

    @property
    def digest(self) -> str:
        """SHA-256 of the table's little-endian bytes in hex; of the recipe's name for `sum2`."""
        if self.table is None:
            return hashlib.sha256(b"arctool sum2 v1").hexdigest()
        return hashlib.sha256(np.ascontiguousarray(self.table).astype(self.table.dtype.newbyteorder("<")).tobytes()).hexdigest()

    def values(self, geometry: Geometry) -> NDArray[np.float32]:
        """The values f32 [2^l, v] of every state. Raises GeometryError where the codebook does not fit the geometry."""
        self.check(geometry, geometry.name)
        if self.table is None:
            return sum2_values(geometry)
        return widen(self.table)

    def check(self, geometry: Geometry, where: str) -> None:
        """Refuse a codebook that is not the geometry's: geometries of equal rate have equal byte counts, so the table decides."""
        if self.kind == "sum2":
            if self.table is not None:
                raise GeometryError(f"{where}: sum2 is computed and takes no table")
            check_sum2(geometry, where)
            return
        want_dtype: TableDtype = "f32" if geometry.l == 16 else "bf16"
        want_shape = (geometry.states, geometry.v)
        if self.table is None or self.table.dtype not in (np.float32, np.uint16):
            raise GeometryError(f"{where}: a table codebook needs an f32 or bf16 table")
        if self.dtype != want_dtype or self.table.shape != want_shape:
            raise GeometryError(
                f"{where}: {geometry.name} needs a {want_dtype} table {list(want_shape)}, found {self.dtype} {list(self.table.shape)}"
            )


def sum2_values(geometry: Geometry) -> NDArray[np.float32]:
    """f32 [65536, 2]: for both hashes, (sum of the bytes of state · multiplier + increment mod 2^32, less 510) · step, one f32 rounding."""
    check_sum2(geometry, "sum2")
    return sum2_values_of(SUM2_CONSTANTS[geometry.k])


def sum2_values_of(constants: Sum2Constants) -> NDArray[np.float32]:
    """`sum2_values` for given constants."""
    state = np.arange(1 << 16, dtype=np.uint32)
    columns = []
    for multiplier, increment in constants:
        hashed = state * np.uint32(multiplier) + np.uint32(increment)
        octets = ((hashed[:, None] >> np.arange(0, 32, 8, dtype=np.uint32)) & np.uint32(255)).astype(np.int32)
        columns.append((octets.sum(axis=1) - SUM2_CENTRE).astype(np.float32) * SUM2_STEP)
    return np.stack(columns, axis=1)


def check_sum2(geometry: Geometry, where: str) -> None:
    """Refuse a geometry that has no `sum2`: it yields a pair from 16 state bits, with constants for these K only."""
    if geometry.v != 2 or geometry.l != 16 or geometry.k not in SUM2_CONSTANTS:
        known = ", ".join(f"K{k}V2L16" for k in SUM2_CONSTANTS)
        raise GeometryError(f"{where}: sum2 is defined for {known} and cannot serve {geometry.name}")


@dataclass(frozen=True)
class ShippedTable:
    """A table in `quant/tables/`: raw little-endian values, its type, and the SHA-256 that it must have."""

    file: str
    dtype: TableDtype
    sha256: str


SHIPPED_TABLES: dict[str, ShippedTable] = {
    "K4V2L16": ShippedTable("k4v2l16.bin", "f32", "d40776736029074c8a60b72d4c820575ae6344644d628f16d5d4e30d73641d2a"),
    "K8V4L12": ShippedTable("k8v4l12.bin", "bf16", "5fe08e8189bfe49876237ed03b09306c61f2cd101cac47a4b54ddb381c55083c"),
    "K9V4L12": ShippedTable("k9v4l12.bin", "bf16", "0fe7ea4c5a4ba5f75fa9adc4bb5118793a31236bae02cc0116b9b4e123269c44"),
    "K3V1L12": ShippedTable("k3v1l12.bin", "bf16", "976892ef434e3cdfefd803014d72a10125539328f5c8e813814f439053eafcad"),
    "K4V1L12": ShippedTable("k4v1l12.bin", "bf16", "c61ca032d59ee013876d8b43eec9d724d28e9667c429884b90f3cf74614c446b"),
}


@dataclass(frozen=True)
class Rung:
    """A named format that `--isq` accepts. `codebook` is `sum2` or a shipped table's geometry name.

    `gain` is the table's scale over the data's: rows are divided by gain · rms before the search (measured on Gaussian rows).
    """

    name: str
    geometry: Geometry
    codebook_name: str
    gain: float

    @property
    def bits_per_weight(self) -> float:
        return self.geometry.bits_per_weight

    def codebook(self) -> Codebook:
        return Codebook("sum2") if self.codebook_name == "sum2" else shipped_table(self.codebook_name)


RUNGS: dict[str, Rung] = {
    rung.name: rung
    for rung in (
        Rung("qtip2", Geometry(4, 2, 16), "K4V2L16", 1.0),
        Rung("qtip2b", Geometry(4, 2, 16), "sum2", 0.97),
        Rung("qtip2-v4", Geometry(8, 4, 12), "K8V4L12", 1.0),
        Rung("qtip2.25-v4", Geometry(9, 4, 12), "K9V4L12", 1.0),
        Rung("qtip3", Geometry(3, 1, 12), "K3V1L12", 1.0),
        Rung("qtip3b", Geometry(6, 2, 16), "sum2", 0.92),
        Rung("qtip4", Geometry(4, 1, 12), "K4V1L12", 1.03),
        Rung("qtip4b", Geometry(8, 2, 16), "sum2", 0.88),
    )
}


def rung(name: str) -> Rung:
    """The rung called `name`. Raises UsageError that lists the known ones."""
    found = RUNGS.get(name)
    if found is None:
        raise UsageError(f"unknown rung {name!r}; known rungs: {', '.join(RUNGS)}")
    return found


@cache
def shipped_table(name: str) -> Codebook:
    """The packaged table of a geometry, checked against its pinned hash. Raises GeometryError where the file is not the format's."""
    entry = SHIPPED_TABLES.get(name)
    if entry is None:
        raise GeometryError(f"no table ships for {name}; shipped: {', '.join(SHIPPED_TABLES)}")
    data = files("arctool.quant").joinpath("tables", entry.file).read_bytes()
    found = hashlib.sha256(data).hexdigest()
    if found != entry.sha256:
        raise GeometryError(f"quant/tables/{entry.file}: SHA-256 {found} is not the pinned {entry.sha256}; reinstall arctool")
    geometry = Geometry.parse(name)
    table = np.frombuffer(data, "<f4" if entry.dtype == "f32" else "<u2").reshape(geometry.states, geometry.v)
    codebook = Codebook("table", table)
    codebook.check(geometry, entry.file)
    return codebook
