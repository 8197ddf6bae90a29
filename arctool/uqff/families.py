"""Families: which entries a layer of the file has, by format tag, and the weight that they mean.

The one place where wire tags meet quant modules. A family owns its exact set of entries: a missing, additional, mistyped or
mis-sized one is refused by name, here, before anything is decoded. It knows no files: tables come from the caller by digest.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from math import prod
from typing import Final

import numpy as np
from numpy.typing import NDArray

from arctool.errors import FormatError, GeometryError
from arctool.quant.bf16 import widen
from arctool.quant.codebooks import Codebook
from arctool.quant.ggml import GGML_BY_ID, GgmlType
from arctool.quant.hadamard import Rotation
from arctool.quant.tensor import DenseTensor, GgmlTensor, TrellisTensor, Weight
from arctool.uqff.entries import Entry, check_key, entry_of, expect, read_shape, scalar_entry
from arctool.uqff.sections import Sections, TableRef, decode_sections, encode_sections

TAG_GGUF: Final = 0
TAG_TRELLIS: Final = 64

GGML_F32: Final = 0
GGML_F16: Final = 1
GGML_BF16: Final = 30
_GGML_WIDTH: Final = {GGML_F32: 4, GGML_F16: 2, GGML_BF16: 2}
_GGML_NAMES: Final = {
    **{0: "F32", 1: "F16", 2: "Q4_0", 3: "Q4_1", 6: "Q5_0", 7: "Q5_1", 8: "Q8_0", 9: "Q8_1"},
    **{10: "Q2_K", 11: "Q3_K", 12: "Q4_K", 13: "Q5_K", 14: "Q6_K", 15: "Q8_K", 30: "BF16", 39: "MXFP4"},
}
_FOREIGN_TAGS: Final = {1: "unquantised", 2: "HQQ", 3: "FP8", 4: "AFQ", 5: "F8Q8", 6: "MXFP4"}

FINITE_CHUNK: Final = 1 << 20
"""Values that the check for infinities widens at a time."""

TablePool = Callable[[TableRef], Codebook]
"""Finds the table of a digest in the artifact and checks it; raises FormatError where it is missing or altered."""


@dataclass(frozen=True)
class Family:
    """One format tag: its name, the suffixes that `<key>.weight` must have, those it may have, and its decoder."""

    name: str
    required: frozenset[str]
    optional: frozenset[str]
    decode: Callable[[Mapping[str, Entry], TablePool, str], Weight]


def encode(key: str, weight: Weight, bias: NDArray[np.float32] | None = None) -> list[Entry]:
    """The entries of one layer, tables excluded (`table_entry`). `bias`: f32 [out]. Raises FormatError, GeometryError."""
    check_key(key)
    base = f"{key}.weight"
    if not weight.shape or 0 in weight.shape:
        raise FormatError(f"{base}: a layer needs at least one weight, found shape {list(weight.shape)}")
    entries = _encode_trellis(base, weight) if isinstance(weight, TrellisTensor) else _encode_ggml(base, weight)
    if bias is not None:
        checked_bias(bias, weight.shape, f"{key}.bias")
        entries.append(entry_of(f"{key}.bias", "F32", bias))
    return entries


def decode(key: str, entries: Mapping[str, Entry], tables: TablePool, where: str = "artifact") -> Weight:
    """The weight of layer `key`. `entries` by full name: `<key>.weight…` and perhaps `<key>.bias`; arrays may be views of them.

    Raises FormatError for a family or entry that is not readable, GeometryError where lengths and shapes disagree.
    """
    base = f"{key}.weight"
    parts = {name[len(base) + 1 :]: entry for name, entry in entries.items() if name == base or name.startswith(f"{base}.")}
    strange = [name for name in entries if name != f"{key}.bias" and not (name == base or name.startswith(f"{base}."))]
    if strange:
        raise FormatError(f"{where}: {strange[0]} does not belong to layer {key}")
    family = family_of(key, parts, where)
    for suffix in sorted(family.required - set(parts)):
        name = f"{base}.{suffix}" if suffix else base
        raise FormatError(f"{where}: {name} is missing: a {family.name} layer needs it; download or bake the artifact again")
    for suffix in sorted(set(parts) - family.required - family.optional):
        raise FormatError(f"{where}: {base}.{suffix} is not an entry of a {family.name} layer; it may need a newer arctool")
    return family.decode(parts, tables, f"{where}: {base}")


def decode_bias(key: str, entries: Mapping[str, Entry], shape: tuple[int, ...], where: str) -> NDArray[np.float32] | None:
    """The bias f32 [out] of layer `key`, None where it has none; `shape` is the weight's."""
    entry = entries.get(f"{key}.bias")
    if entry is None:
        return None
    bias = expect(entry, "F32", shape[:1], where)
    checked_bias(bias, shape, f"{where}: {key}.bias")
    return bias


def family_of(key: str, parts: Mapping[str, Entry], where: str) -> Family:
    """The family that the format tag names. `parts` by suffix. Raises FormatError for one we do not read."""
    name = f"{key}.weight.format"
    if "format" not in parts:
        raise FormatError(f"{where}: {name} is missing: nothing says how the layer is stored")
    tag = int(expect(parts["format"], "U8", (), where))
    if tag in _FOREIGN_TAGS:
        raise FormatError(f"{where}: {name}: {_FOREIGN_TAGS[tag]} (tag {tag}) is not readable by this version")
    if tag not in FAMILIES:
        raise FormatError(f"{where}: {name}: tag {tag} is unknown to this version; known: {', '.join(map(str, FAMILIES))}")
    return FAMILIES[tag]


def checked_bias(bias: NDArray[np.float32], shape: tuple[int, ...], where: str) -> None:
    """Raise FormatError unless `bias` is a finite f32 [out] for a weight [out, in]."""
    if len(shape) != 2 or bias.dtype != np.float32 or bias.shape != shape[:1]:
        raise FormatError(f"{where}: a weight {list(shape)} takes an f32 bias [out], found {bias.dtype} {list(bias.shape)}")
    if not np.isfinite(bias).all():
        raise FormatError(f"{where}: value {int(np.flatnonzero(~np.isfinite(bias))[0])} is not finite")


def check_finite(tensor: DenseTensor, where: str) -> None:
    """Raise FormatError that names the first value of `tensor` that is infinite or no number. Needs no more memory than a chunk."""
    flat = tensor.data.reshape(-1)
    for start in range(0, flat.size, FINITE_CHUNK):
        wrong = ~np.isfinite(widen(flat[start : start + FINITE_CHUNK]))
        if wrong.any():
            first = start + int(np.argmax(wrong))
            index = [int(part) for part in np.unravel_index(first, tensor.shape)]
            raise FormatError(f"{where}: the value at {index} is {widen(flat[first : first + 1])[0]}, which is not finite")


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
    check_finite(DenseTensor(codebook.table), table_name(codebook.digest))
    return entry_of(table_name(codebook.digest), "U8", _bytes_of(codebook.table))


def read_table(entry: Entry, ref: TableRef, where: str) -> Codebook:
    """The table in `entry`, checked against the length and the whole digest that a layer states, and for finite values."""
    raw = expect(entry, "U8", (ref.nbytes,), where)
    found = hashlib.sha256(raw.data).hexdigest()
    if found != ref.sha256:
        raise FormatError(f"{where}: {entry.name}: SHA-256 {found} is not the layer's {ref.sha256}; the table was altered")
    table = np.frombuffer(raw.tobytes(), "<f4" if ref.dtype == "f32" else "<u2").reshape(-1, ref.v)
    check_finite(DenseTensor(table), f"{where}: {entry.name}")
    return Codebook("table", table)


def _bytes_of(array: NDArray) -> NDArray[np.uint8]:
    """The little-endian bytes of `array` as u8 [nbytes]; a view where its memory allows."""
    little = np.ascontiguousarray(array).astype(array.dtype.newbyteorder("<"), copy=False)
    return little.reshape(-1).view(np.uint8)


def _encode_trellis(base: str, weight: TrellisTensor) -> list[Entry]:
    weight.check(base)
    _check_products(weight, base)
    rotation = weight.rotation
    blocks = None if rotation is None else (rotation.block_in, rotation.block_out)
    blob = encode_sections(Sections(weight.geometry, table_ref(weight), blocks), f"{base}.sections")
    entries = [
        entry_of(base, "U8", weight.packed),
        scalar_entry(f"{base}.format", "U8", TAG_TRELLIS),
        entry_of(f"{base}.shape", "U32", np.array(weight.shape, np.uint32)),
        entry_of(f"{base}.scales", "F32", weight.scales),
        entry_of(f"{base}.sections", "U8", np.frombuffer(blob, np.uint8)),
    ]
    if rotation is not None:
        for side, signs in (("in", rotation.signs_in), ("out", rotation.signs_out)):
            entries.append(entry_of(f"{base}.signs_{side}", "U8", np.packbits(signs < 0, bitorder="little")))
    return entries


def _decode_trellis(parts: Mapping[str, Entry], tables: TablePool, where: str) -> TrellisTensor:
    out, inner = read_shape(parts["shape"], 2, where)
    blob = parts["sections"]
    if len(blob.shape) != 1 or blob.nbytes > 256:
        raise FormatError(f"{where}.sections: expected at most 256 bytes in one dimension, found {list(blob.shape)}")
    sections = decode_sections(expect(blob, "U8", blob.shape, where).tobytes(), f"{where}.sections")
    try:
        stride = sections.geometry.stride(inner)
    except GeometryError as error:
        raise GeometryError(f"{where}: {error}") from error
    packed = expect(parts[""], "U8", (out, stride), where)
    scales = expect(parts["scales"], "F32", (out,), where)
    rotation = _decode_rotation(parts, sections.blocks, out, inner, where)
    codebook = Codebook("sum2") if sections.table is None else tables(sections.table)
    weight = TrellisTensor(sections.geometry, codebook, inner, packed, scales, rotation)
    weight.check(where)
    _check_products(weight, where)
    return weight


def _check_products(weight: TrellisTensor, where: str) -> None:
    """Refuse a finite scale that takes the codebook's largest value past the range of f32: such weights would decode to infinity."""
    sizes = np.abs(weight.scales)
    if sizes.size and sizes.max() > 1:  # a codebook's own values are finite, so that smaller scales are safe
        peak = float(np.abs(weight.codebook.values(weight.geometry)).max())
        row = int(np.argmax(sizes))
        if not float(sizes[row]) * peak <= float(np.finfo(np.float32).max):
            raise GeometryError(
                f"{where}: the scale of row {row} is {weight.scales[row]}; times the codebook's {peak:.4g} it is not finite"
            )


def _decode_rotation(parts: Mapping[str, Entry], blocks: tuple[int, int] | None, out: int, inner: int, where: str) -> Rotation | None:
    """The rotation of section 4 and the sign entries, which come together or not at all."""
    for side in ("signs_in", "signs_out"):
        if side in parts and blocks is None:
            raise FormatError(f"{where}.{side}: no section 4 (rotation) goes with it; the layer would be read in the wrong basis")
        if side not in parts and blocks is not None:
            raise FormatError(f"{where}.{side} is missing: section 4 says that the layer is rotated")
    if blocks is None:
        return None
    signs_in = _decode_signs(parts["signs_in"], inner, where)
    signs_out = _decode_signs(parts["signs_out"], out, where)
    try:
        return Rotation(*blocks, signs_in, signs_out)
    except GeometryError as error:
        raise GeometryError(f"{where}.sections: {error}") from error


def _decode_signs(entry: Entry, count: int, where: str) -> NDArray[np.int8]:
    packed = expect(entry, "U8", (-(-count // 8),), where)
    bits = np.unpackbits(packed, bitorder="little")
    if bits[count:].any():
        raise FormatError(f"{where}: {entry.name}: bits after sign {count - 1} are set; the padding must be zero")
    return (1 - 2 * bits[:count].astype(np.int8)).astype(np.int8)


def _encode_ggml(base: str, weight: DenseTensor | GgmlTensor) -> list[Entry]:
    if isinstance(weight, GgmlTensor):
        weight.check(base)
        kind = weight.type.id
    else:
        check_finite(weight, base)
        kind = GGML_BF16 if weight.data.dtype == np.uint16 else GGML_F32
    return [
        entry_of(base, "U8", _bytes_of(weight.data)),
        scalar_entry(f"{base}.format", "U8", TAG_GGUF),
        scalar_entry(f"{base}.dtype", "U32", kind),
        entry_of(f"{base}.shape", "U32", np.array(weight.shape, np.uint32)),
    ]


def _decode_ggml(parts: Mapping[str, Entry], tables: TablePool, where: str) -> DenseTensor | GgmlTensor:
    kind = int(expect(parts["dtype"], "U32", (), where))
    if kind in GGML_BY_ID:
        return _decode_blocks(parts, GGML_BY_ID[kind], where)
    if kind not in _GGML_WIDTH:
        label = f"{_GGML_NAMES[kind]} (ggml {kind})" if kind in _GGML_NAMES else f"ggml type {kind}"
        readable = sorted((*_GGML_WIDTH, *GGML_BY_ID))
        known = ", ".join(f"{_GGML_NAMES[number]} ({number})" for number in readable)
        raise FormatError(f"{where}.dtype: {label} is not readable by this version; it reads {known}")
    shape = read_shape(parts["shape"], None, where)
    _check_size(parts[""], _GGML_NAMES[kind], shape, prod(shape) * _GGML_WIDTH[kind], where)
    typed = {GGML_F32: "F32", GGML_F16: "F16", GGML_BF16: "BF16"}[kind]
    data = expect(Entry(parts[""].name, typed, shape, parts[""].raw), typed, shape, where)
    return DenseTensor(data.astype(np.float32) if kind == GGML_F16 else data)


def _decode_blocks(parts: Mapping[str, Entry], kind: GgmlType, where: str) -> GgmlTensor:
    """A layer of GGML blocks; the bytes stay a view of the entry."""
    out, inner = read_shape(parts["shape"], 2, where)
    try:
        width = kind.row_bytes(inner)
    except GeometryError as error:
        raise GeometryError(f"{where}: {error}") from error
    _check_size(parts[""], _GGML_NAMES[kind.id], (out, inner), out * width, where)
    weight = GgmlTensor(kind, inner, parts[""].raw.reshape(out, width))
    weight.check(where)
    return weight


def _check_size(entry: Entry, name: str, shape: tuple[int, ...], nbytes: int, where: str) -> None:
    """Raise GeometryError unless `entry` is the `nbytes` raw bytes that a weight of `shape` takes."""
    if entry.dtype != "U8" or len(entry.shape) not in (1, 2) or entry.nbytes != nbytes:
        raise GeometryError(f"{where}: {name} {list(shape)} takes {nbytes} bytes as U8, found {entry.dtype} {list(entry.shape)}")


FAMILIES: Final[Mapping[int, Family]] = {
    TAG_GGUF: Family("GGUF", frozenset(("", "format", "dtype", "shape")), frozenset(), _decode_ggml),
    TAG_TRELLIS: Family(
        "trellis",
        frozenset(("", "format", "shape", "scales", "sections")),
        frozenset(("signs_in", "signs_out")),
        _decode_trellis,
    ),
}
"""Every tag that this version reads. Tags up to 63 are mistral.rs's; ours start at 64."""
