"""Tag 64: trellis streams, their scales, their sections, and the signs of their rotation."""

from __future__ import annotations

from typing import Final

import numpy as np
from numpy.typing import NDArray

from arctool.errors import FormatError, GeometryError
from arctool.quant.codebooks import Codebook
from arctool.quant.hadamard import Rotation
from arctool.quant.tensor import TrellisTensor
from arctool.uqff.entries import Entry, entry_of, expect, read_shape, scalar_entry
from arctool.uqff.sections import Sections, decode_sections, encode_sections
from arctool.uqff.wire.family import Family, Parts, TablePool
from arctool.uqff.wire.tables import table_ref

TAG: Final = 64

MAX_SECTIONS: Final = 256
"""Bytes of the longest blob of sections that is looked at."""


def encode(base: str, weight: TrellisTensor) -> list[Entry]:
    """The entries of a trellis layer."""
    rotation = weight.rotation
    blocks = None if rotation is None else (rotation.block_in, rotation.block_out)
    blob = encode_sections(Sections(weight.geometry, table_ref(weight), blocks), f"{base}.sections")
    entries = [
        entry_of(base, "U8", weight.packed),
        scalar_entry(f"{base}.format", "U8", TAG),
        entry_of(f"{base}.shape", "U32", np.array(weight.shape, np.uint32)),
        entry_of(f"{base}.scales", "F32", weight.scales),
        entry_of(f"{base}.sections", "U8", np.frombuffer(blob, np.uint8)),
    ]
    if rotation is not None:
        for side, signs in (("in", rotation.signs_in), ("out", rotation.signs_out)):
            entries.append(entry_of(f"{base}.signs_{side}", "U8", np.packbits(signs < 0, bitorder="little")))
    return entries


def decode(parts: Parts, tables: TablePool, where: str) -> TrellisTensor:
    """The weight; the streams stay a view."""
    out, inner = read_shape(parts["shape"], 2, where)
    blob = parts["sections"]
    if len(blob.shape) != 1 or blob.nbytes > MAX_SECTIONS:
        raise FormatError(f"{where}.sections: expected at most {MAX_SECTIONS} bytes in one dimension, found {list(blob.shape)}")
    sections = decode_sections(expect(blob, "U8", blob.shape, where).tobytes(), f"{where}.sections")
    try:
        stride = sections.geometry.stride(inner)
    except GeometryError as error:
        raise GeometryError(f"{where}: {error}") from error
    packed = expect(parts[""], "U8", (out, stride), where)
    scales = expect(parts["scales"], "F32", (out,), where)
    rotation = _rotation(parts, sections.blocks, out, inner, where)
    try:
        codebook = Codebook("sum2") if sections.table is None else tables(sections.table)
    except FormatError as error:
        raise FormatError(f"{where}.sections: {error}") from error
    return TrellisTensor(sections.geometry, codebook, inner, packed, scales, rotation)


def _rotation(parts: Parts, blocks: tuple[int, int] | None, out: int, inner: int, where: str) -> Rotation | None:
    """The rotation of section 4 and the sign entries, which come together or not at all."""
    for side in ("signs_in", "signs_out"):
        if side in parts and blocks is None:
            raise FormatError(f"{where}.{side}: no section 4 (rotation) goes with it; the layer would be read in the wrong basis")
        if side not in parts and blocks is not None:
            raise FormatError(f"{where}.{side} is missing: section 4 says that the layer is rotated")
    if blocks is None:
        return None
    signs_in = _signs(parts["signs_in"], inner, where)
    signs_out = _signs(parts["signs_out"], out, where)
    try:
        return Rotation(*blocks, signs_in, signs_out)
    except GeometryError as error:
        raise GeometryError(f"{where}.sections: {error}") from error


def _signs(entry: Entry, count: int, where: str) -> NDArray[np.int8]:
    packed = expect(entry, "U8", (-(-count // 8),), where)
    bits = np.unpackbits(packed, bitorder="little")
    if bits[count:].any():
        raise FormatError(f"{where}: {entry.name}: bits after sign {count - 1} are set; the padding must be zero")
    return (1 - 2 * bits[:count].astype(np.int8)).astype(np.int8)


FAMILY: Final = Family("trellis", frozenset(("", "format", "shape", "scales", "sections")), frozenset(("signs_in", "signs_out")), decode)
