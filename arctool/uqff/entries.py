"""Entries: named tensors as a file holds them, and careful ways to take one apart. Knows dtypes and shapes only."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from math import prod
from typing import Final

import numpy as np
from numpy.typing import NDArray

from arctool.errors import FormatError

DTYPE_BYTES: Final[Mapping[str, int]] = {
    **dict.fromkeys(("BOOL", "U8", "I8", "F8_E4M3", "F8_E5M2", "F8_E8M0"), 1),
    **dict.fromkeys(("U16", "I16", "F16", "BF16"), 2),
    **dict.fromkeys(("U32", "I32", "F32"), 4),
    **dict.fromkeys(("U64", "I64", "F64"), 8),
}
"""Safetensors dtypes of whole bytes. Sub-byte ones (F4, F6) have no place in an artifact and are refused by name."""

MAX_RANK: Final = 3
"""Dimensions of a weight: stacked experts [experts, out, in] have the most."""

_NUMPY: Final[Mapping[str, str]] = {"U8": "|u1", "F8_E4M3": "|u1", "U32": "<u4", "F32": "<f4", "F16": "<f2", "BF16": "<u2"}

_LAYER_ENTRY: Final = re.compile(r"(?P<key>.+?)\.(?P<part>weight|bias)(?:\.(?P<suffix>[a-z0-9_]+))?")


@dataclass(frozen=True)
class Entry:
    """One tensor of a file. `raw`: u8 [nbytes], little-endian, perhaps a view into a mapped file; length and shape agree."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    raw: NDArray[np.uint8]

    @property
    def nbytes(self) -> int:
        return self.raw.nbytes


def entry_of(name: str, dtype: str, array: NDArray) -> Entry:
    """The entry that stores `array`, of the numpy type of `dtype` (BF16 as u16 bits, F8_E4M3 as u8); a view where it can be one."""
    little = np.ascontiguousarray(array).astype(_NUMPY[dtype], copy=False)
    return Entry(name, dtype, array.shape, little.reshape(-1).view(np.uint8))


def bytes_of(array: NDArray) -> NDArray[np.uint8]:
    """The little-endian bytes of `array` as u8 [nbytes]; a view where its memory allows."""
    little = np.ascontiguousarray(array).astype(array.dtype.newbyteorder("<"), copy=False)
    return little.reshape(-1).view(np.uint8)


def scalar_entry(name: str, dtype: str, value: int) -> Entry:
    """A U8 or U32 entry of shape []."""
    return entry_of(name, dtype, np.array(value, _NUMPY[dtype]))


def split_name(name: str) -> tuple[str, str] | None:
    """(layer key, rest) of a layer's entry, rest being `weight`, `bias` or `weight.<suffix>`; None for any other name."""
    match = _LAYER_ENTRY.fullmatch(name)
    if match is None or (match["part"] == "bias" and match["suffix"]):
        return None
    return match["key"], match["part"] + (f".{match['suffix']}" if match["suffix"] else "")


def check_key(key: str) -> None:
    """Refuse a layer key whose entries could be taken for another layer's. Raises FormatError."""
    parts = key.split(".")
    taken = bool({"weight", "bias"} & set(parts)) or parts[0] in ("uqff", "arctool")
    if not key.isprintable() or not all(parts) or len(key) > 256 or taken:
        raise FormatError(
            f"{key!r} is not a layer key: expected a dotted module path of at most 256 printable characters "
            "without empty, `weight` or `bias` parts, outside `uqff.` and `arctool.`"
        )


def values(entry: Entry, where: str) -> NDArray:
    """The entry as an array of its numpy type (BF16 as u16 bits, F8_E4M3 as u8) and shape: a view where it is aligned, else a copy."""
    found = view(entry, where)
    return found if found.flags.aligned else found.copy()


def view(entry: Entry, where: str) -> NDArray:
    """As `values`, but always a view: of an entry at an odd address it is unaligned, which numpy reads and kernels do not."""
    numpy_dtype = _NUMPY.get(entry.dtype)
    if numpy_dtype is None:
        raise FormatError(f"{where}: {entry.name}: dtype {entry.dtype} is not readable; expected one of {', '.join(_NUMPY)}")
    return np.ndarray(entry.shape, numpy_dtype, buffer=entry.raw.data)


def check_form(entry: Entry, dtype: str, shape: tuple[int, ...], where: str) -> None:
    """Raise FormatError unless dtype and shape are the ones that the format asks for."""
    if entry.dtype != dtype or entry.shape != shape:
        raise FormatError(f"{where}: {entry.name}: expected {dtype} {list(shape)}, found {entry.dtype} {list(entry.shape)}; file damaged")


def expect(entry: Entry, dtype: str, shape: tuple[int, ...], where: str) -> NDArray:
    """`values`, once the entry has the form that is asked for. Raises FormatError as `check_form`."""
    check_form(entry, dtype, shape, where)
    return values(entry, where)


def read_shape(entry: Entry, rank: int | None, where: str) -> tuple[int, ...]:
    """A `.shape` entry U32 [rank] of positive sizes; `rank` None allows 1 to `MAX_RANK`. Raises FormatError."""
    found = entry.shape[0] if len(entry.shape) == 1 else 0
    if entry.dtype != "U32" or not 1 <= found <= MAX_RANK or found != (rank or found):
        raise FormatError(
            f"{where}: {entry.name}: expected a U32 shape of {rank or f'1 to {MAX_RANK}'} sizes, found {entry.dtype} {list(entry.shape)}"
        )
    shape = tuple(int(size) for size in values(entry, where))
    if 0 in shape or prod(shape) > 1 << 48:
        raise FormatError(f"{where}: {entry.name}: {list(shape)} is not the shape of a weight")
    return shape
