"""Safetensors headers, read as if the file were hostile and written so that any safetensors reader takes them.

A header is a little-endian u64 length, that many bytes of JSON, then the data. Nothing is allocated from a size that the file
claims before the size is checked against the file; every rule of the format is checked, and every refusal names the tensor.
"""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from math import isinf, prod
from typing import Any, Final

from arctool.errors import FormatError
from arctool.uqff.entries import DTYPE_BYTES

MAX_HEADER: Final = 100_000_000
"""The safetensors crate's own limit, in bytes."""

MAX_DEPTH: Final = 64
"""Objects and lists within each other in any JSON that we read or write; configs and reports have fewer than ten."""

_HALF_PAIR: Final = re.compile("[\ud800-\udfff]")

MAX_VALUES: Final = 1 << 19
"""Values of one JSON text, counted by its commas and brackets: a Python object takes up to a hundred times what `[],` does."""

_DISGUISES: Final = {
    **{b"PK\x03\x04": "a zip archive", b"\x1f\x8b": "a gzip archive", b"BZh": "a bzip2 archive", b"\xfd7zXZ": "an xz archive"},
    **{b"\x28\xb5\x2f\xfd": "a zstd archive", b"\x7fELF": "a program", b"GGUF": "a GGUF file", b"%PDF": "a PDF"},
    **dict.fromkeys((b"\x80\x02", b"\x80\x03", b"\x80\x04", b"\x80\x05"), "a pickle"),
    **dict.fromkeys((b"<!", b"<html", b"<?xml"), "a web page, perhaps the error page of a download"),
    b"version ": "a Git LFS pointer: fetch the file itself with `git lfs pull`",
    b"{": "JSON",
}
"""What else files begin with. A length that can be true is believed first: a small header may begin with any of these bytes."""


@dataclass(frozen=True)
class TensorInfo:
    """Where a tensor lies: `begin` and `end` are byte offsets from the start of the data."""

    dtype: str
    shape: tuple[int, ...]
    begin: int
    end: int


@dataclass(frozen=True)
class Header:
    """A checked header: tensors tile the data without gap or overlap. `data_start` is a byte offset in the file."""

    tensors: Mapping[str, TensorInfo]
    metadata: Mapping[str, str]
    data_start: int


def parse_json(text: bytes | memoryview, where: str) -> dict[str, Any]:
    """A JSON object without duplicate keys, NaN, infinity or lone surrogates, at most `MAX_DEPTH` deep. Raises FormatError only.

    Before an object is made of it the text itself is held once, decoded, and its values are counted (`MAX_VALUES`).
    """

    def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        found = dict(pairs)
        if len(found) != len(pairs):
            counts = Counter(key for key, _ in pairs)
            twice = next(key for key, count in counts.items() if count > 1)
            raise FormatError(f"{where}: key {twice!r} occurs twice; readers would disagree on which one counts")
        return found

    def constant(name: str) -> None:
        raise FormatError(f"{where}: {name} is not JSON")

    def number(text: str) -> float:
        found = float(text)
        if isinf(found):
            raise FormatError(f"{where}: {text[:40]} is larger than any number that a reader knows")
        return found

    try:
        decoded = str(text, "utf-8")
        if sum(map(decoded.count, ",[{")) > MAX_VALUES:
            raise FormatError(f"{where}: more than {MAX_VALUES} values; the file is damaged or meant to do harm")
        value = json.loads(decoded, object_pairs_hook=unique, parse_constant=constant, parse_float=number)
    except RecursionError as error:
        raise FormatError(f"{where}: nested more than {MAX_DEPTH} deep; the file is damaged or meant to do harm") from error
    except ValueError as error:
        raise FormatError(f"{where}: not readable as JSON ({str(error)[:80]}); the file is damaged") from error
    if not isinstance(value, dict):
        raise FormatError(f"{where}: expected a JSON object, found {type(value).__name__}")
    check_json(value, where)
    return value


def check_json(value: Any, where: str) -> None:
    """Refuse a JSON value that later code would stumble over: nested past `MAX_DEPTH`, or text that UTF-8 cannot say (FormatError)."""
    level, depth = [value], 0
    while level:
        for text in level:
            if isinstance(text, str) and _HALF_PAIR.search(text):
                raise FormatError(f"{where}: {ascii(text)[:60]} holds half of a surrogate pair, which is no character")
        containers = [item for item in level if isinstance(item, Mapping | list | tuple)]
        if containers and depth == MAX_DEPTH:
            raise FormatError(f"{where}: nested more than {MAX_DEPTH} deep; the file is damaged or meant to do harm")
        level = [part for item in containers for part in ((*item, *item.values()) if isinstance(item, Mapping) else item)]
        depth += 1


def parse_header(data: memoryview, where: str) -> Header:
    """The header of a whole file's bytes `data` (a mapped file: only the header is touched). Raises FormatError."""
    size = len(data)
    if size < 8:
        raise FormatError(f"{where}: {size} bytes are too short for a safetensors header; the file is truncated")
    length = int.from_bytes(data[:8], "little")
    if length > MAX_HEADER or length > size - 8:
        start = bytes(data[:8]).lower()
        disguise = next((name for magic, name in _DISGUISES.items() if start.startswith(magic.lower())), "truncated or damaged")
        raise FormatError(f"{where}: the header claims {length} bytes of {size} (limit {MAX_HEADER}); the file is {disguise}")
    raw = parse_json(data[8 : 8 + length], f"{where}: header")
    metadata = raw.pop("__metadata__", {})
    if not isinstance(metadata, dict) or not all(isinstance(value, str) for value in metadata.values()):
        raise FormatError(f"{where}: header: __metadata__ must map strings to strings")
    tensors = {name: _tensor(name, info, where) for name, info in raw.items()}
    _check_cover(tensors, size - 8 - length, where)
    return Header(tensors, metadata, 8 + length)


def build_header(tensors: Iterable[tuple[str, str, tuple[int, ...]]], metadata: Mapping[str, str]) -> bytes:
    """Length and JSON for tensors (name, dtype, shape) whose data follow in this order, padded so that data start 8-aligned."""
    table: dict[str, Any] = {"__metadata__": dict(sorted(metadata.items()))}
    at = 0
    for name, dtype, shape in tensors:
        end = at + prod(shape) * DTYPE_BYTES[dtype]
        table[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": [at, end]}
        at = end
    text = json.dumps(table, separators=(",", ":"), ensure_ascii=True).encode()
    text += b" " * (-len(text) % 8)
    if len(text) > MAX_HEADER:
        raise FormatError(f"a header of {len(text)} bytes is past the format's limit of {MAX_HEADER}; use smaller shards")
    return len(text).to_bytes(8, "little") + text


def _tensor(name: str, info: Any, where: str) -> TensorInfo:
    place = f"{where}: {name!r}"
    if not name or not name.isprintable() or len(name) > 512:
        raise FormatError(f"{where}: {name[:80]!r} is not a tensor name: expected 1 to 512 printable characters")
    if not isinstance(info, dict) or set(info) != {"dtype", "shape", "data_offsets"}:
        raise FormatError(f"{place}: expected exactly dtype, shape and data_offsets")
    dtype, shape, offsets = info["dtype"], info["shape"], info["data_offsets"]
    if not isinstance(dtype, str) or dtype not in DTYPE_BYTES:
        raise FormatError(f"{place}: dtype {str(dtype)[:40]!r} is unknown; expected one of {', '.join(DTYPE_BYTES)}")
    if not _sizes(shape) or len(shape) > 8:
        raise FormatError(f"{place}: shape {str(shape)[:80]} is not a list of at most 8 sizes below 2^63")
    if not _sizes(offsets) or len(offsets) != 2 or offsets[0] > offsets[1]:
        raise FormatError(f"{place}: data_offsets {str(offsets)[:80]} are not [begin, end] with begin ≤ end")
    need = prod(shape) * DTYPE_BYTES[dtype]
    if offsets[1] - offsets[0] != need:
        raise FormatError(f"{place}: {dtype} {shape} takes {need} bytes, its data_offsets give {offsets[1] - offsets[0]}")
    return TensorInfo(dtype, tuple(shape), *offsets)


def _sizes(value: Any) -> bool:
    return isinstance(value, list) and all(type(item) is int and 0 <= item < 1 << 63 for item in value)


def _check_cover(tensors: Mapping[str, TensorInfo], size: int, where: str) -> None:
    """Tensors must tile [0, size): an overlap is a lie, a hole hides bytes, a short file is truncated."""
    at = 0
    for name, info in sorted(tensors.items(), key=lambda item: (item[1].begin, item[1].end)):
        if info.begin != at:
            kind = "overlaps the one before it" if info.begin < at else "leaves a hole before it"
            raise FormatError(f"{where}: {name!r}: data at byte {info.begin} {kind}; expected byte {at}")
        at = info.end
    if at != size:
        kind = "is truncated" if at > size else "has trailing bytes"
        raise FormatError(f"{where}: the file {kind}: its tensors end at byte {at} of the data, the file at {size}")
