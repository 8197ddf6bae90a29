"""Wire-tag sections of the trellis family: the small blob that says how a layer's row streams are to be read.

At 2 bits per weight a misread does not crash, it serves plausible garbage, and geometries of equal rate have equal byte
counts. So this grammar has one spelling for each meaning and refuses all others, by name, on write and on read. The room
knows bytes and geometries; it knows neither files nor values.

    blob     = [geometry] codebook [rotation]
    geometry = 3, K, L, V                            only where it is not K4V2L16
    codebook = 1, dtype, V, log2(rows), sha256[32]   a table of the artifact, by digest
             | 2                                     sum2, computed
    rotation = 4, log2(block_in), log2(block_out)    present iff the layer has sign entries
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from arctool.errors import FormatError, GeometryError
from arctool.quant.codebooks import TableDtype, check_sum2
from arctool.quant.hadamard import MAX_BLOCK
from arctool.quant.trellis import Geometry

DEFAULT_GEOMETRY: Final = Geometry(k=4, v=2, l=16)
"""The geometry of a blob without tag 3, so that layers of the first format never change by a byte."""

TAG_TABLE: Final = 1
TAG_SUM2: Final = 2
TAG_GEOMETRY: Final = 3
TAG_ROTATION: Final = 4

_NAMES: Final = {TAG_TABLE: "table", TAG_SUM2: "sum2", TAG_GEOMETRY: "geometry", TAG_ROTATION: "rotation"}
_LENGTHS: Final = {TAG_TABLE: 36, TAG_SUM2: 1, TAG_GEOMETRY: 4, TAG_ROTATION: 3}
_PLACES: Final = {TAG_GEOMETRY: 0, TAG_TABLE: 1, TAG_SUM2: 1, TAG_ROTATION: 2}
_DTYPES: Final[dict[int, TableDtype]] = {0: "f32", 1: "bf16"}


@dataclass(frozen=True)
class TableRef:
    """A table by its type, its shape [2^log2_rows, v] and the SHA-256 (hex) of its little-endian bytes."""

    dtype: TableDtype
    v: int
    log2_rows: int
    sha256: str

    @property
    def nbytes(self) -> int:
        return (self.v << self.log2_rows) * (4 if self.dtype == "f32" else 2)


@dataclass(frozen=True)
class Sections:
    """What a blob says. `table` is None for sum2; `blocks` is (block_in, block_out), None without a rotation."""

    geometry: Geometry
    table: TableRef | None
    blocks: tuple[int, int] | None


def check_sections(sections: Sections, where: str) -> None:
    """Raise GeometryError, naming `where`, for a codebook that is not the geometry's or a block that is no rotation's."""
    geometry, table = sections.geometry, sections.table
    if table is None:
        check_sum2(geometry, where)
    else:
        dtype = "f32" if geometry.l == 16 else "bf16"
        if (table.dtype, table.log2_rows, table.v) != (dtype, geometry.l, geometry.v):
            raise GeometryError(
                f"{where}: {geometry.name} needs a {dtype} table [{geometry.states}, {geometry.v}], "
                f"found {table.dtype} [2^{table.log2_rows}, {table.v}]"
            )
        if len(table.sha256) != 64 or set(table.sha256) - set("0123456789abcdef"):
            raise GeometryError(f"{where}: a table is named by 64 lower-case hex digits of SHA-256, found {table.sha256!r}")
    for block in sections.blocks or ():
        if block <= 0 or block & (block - 1) or block > MAX_BLOCK:
            raise GeometryError(f"{where}: rotation block {block} is not a power of two from 1 to {MAX_BLOCK}")


def encode_sections(sections: Sections, where: str) -> bytes:
    """The one blob that means `sections`. Raises GeometryError where they contradict themselves."""
    check_sections(sections, where)
    geometry, table = sections.geometry, sections.table
    blob = bytearray()
    if geometry != DEFAULT_GEOMETRY:
        blob += bytes((TAG_GEOMETRY, geometry.k, geometry.l, geometry.v))
    if table is None:
        blob.append(TAG_SUM2)
    else:
        dtype = next(code for code, name in _DTYPES.items() if name == table.dtype)
        blob += bytes((TAG_TABLE, dtype, table.v, table.log2_rows)) + bytes.fromhex(table.sha256)
    if sections.blocks is not None:
        blob += bytes((TAG_ROTATION, *(block.bit_length() - 1 for block in sections.blocks)))
    return bytes(blob)


def decode_sections(blob: bytes, where: str) -> Sections:
    """The meaning of `blob`. Raises FormatError for broken grammar, GeometryError for a contradiction, naming `where`."""
    found = _split(blob, where)
    geometry = _geometry(found.get(TAG_GEOMETRY), where)
    if TAG_TABLE not in found and TAG_SUM2 not in found:
        raise FormatError(f"{where}: no codebook section (tag 1 table or tag 2 sum2) in {len(blob)} bytes; unreadable")
    sections = Sections(geometry, _table(found.get(TAG_TABLE), where), _blocks(found.get(TAG_ROTATION), where))
    check_sections(sections, where)
    return sections


def _split(blob: bytes, where: str) -> dict[int, bytes]:
    """Payloads by tag; refuses what is unknown, truncated, repeated or out of order, at its byte."""
    found: dict[int, bytes] = {}
    at, place = 0, -1
    while at < len(blob):
        tag = blob[at]
        if tag not in _NAMES:
            raise FormatError(
                f"{where}: unknown section tag {tag} at byte {at} of {len(blob)}: "
                "trailing bytes, or the file needs a newer arctool; known tags are 1 to 4"
            )
        name = f"section {tag} ({_NAMES[tag]}) at byte {at}"
        if at + _LENGTHS[tag] > len(blob):
            raise FormatError(f"{where}: {name} is truncated: expected {_LENGTHS[tag]} bytes, found {len(blob) - at}")
        if tag in found or (_PLACES[tag] == 1 and place == 1):
            raise FormatError(f"{where}: {name} is repeated: a layer has at most one geometry, one codebook and one rotation")
        if _PLACES[tag] <= place:
            raise FormatError(f"{where}: {name} is misplaced: the order is geometry, codebook, rotation")
        found[tag] = blob[at + 1 : at + _LENGTHS[tag]]
        at, place = at + _LENGTHS[tag], _PLACES[tag]
    return found


def _geometry(payload: bytes | None, where: str) -> Geometry:
    if payload is None:
        return DEFAULT_GEOMETRY
    k, l, v = payload
    try:
        geometry = Geometry(k=k, v=v, l=l)
    except GeometryError as error:
        raise GeometryError(f"{where}: section 3 (geometry): {error}") from error
    if geometry == DEFAULT_GEOMETRY:
        raise FormatError(f"{where}: section 3 (geometry) states the default {geometry.name}, which is never written")
    return geometry


def _table(payload: bytes | None, where: str) -> TableRef | None:
    if payload is None:
        return None
    code, v, log2_rows = payload[:3]
    if code not in _DTYPES:
        raise FormatError(f"{where}: section 1 (table): dtype code {code} is unknown; expected 0 (f32) or 1 (bf16)")
    return TableRef(_DTYPES[code], v, log2_rows, payload[3:].hex())


def _blocks(payload: bytes | None, where: str) -> tuple[int, int] | None:
    if payload is None:
        return None
    limit = MAX_BLOCK.bit_length() - 1
    for side, log2 in zip(("input", "output"), payload, strict=True):
        if log2 > limit:
            raise GeometryError(f"{where}: section 4 (rotation): {side} block 2^{log2} is larger than {MAX_BLOCK}")
    return 1 << payload[0], 1 << payload[1]
