"""The GGUF container (llama.cpp, versions 2 and 3, little-endian): metadata and tensor directory, all lengths checked.

Read here, not through `gguf.GGUFReader`, because that reader trusts the counts in the file: a lying length makes it loop or
allocate without bound. Block dequantisation is the `gguf` library's. Knows nothing of models or tokenizers.
"""

from __future__ import annotations

import math
import mmap
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType
from gguf.quants import dequantize
from numpy.typing import NDArray

from arctool.bake.source.stored import ALL_ROWS, part_of
from arctool.errors import SourceError

MAGIC = b"GGUF"
VERSIONS = (2, 3)
DEFAULT_ALIGNMENT = 32
MAX_DIMENSIONS = 4
MAX_TEXTS = 1 << 22
"""Of one list: several times the largest vocabulary. Texts are found one by one, so their number is the time that it takes."""

SCALARS = {0: "<B", 1: "<b", 2: "<H", 3: "<h", 4: "<I", 5: "<i", 6: "<f", 7: "<?", 10: "<Q", 11: "<q", 12: "<d"}
"""struct codes of the metadata value types; 8 is a string, 9 an array."""
STRING, ARRAY = 8, 9

READABLE_TYPES = (
    *("F32", "F16", "BF16", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K"),
    *("TQ1_0", "TQ2_0", "MXFP4", "IQ1_S", "IQ1_M", "IQ2_XXS", "IQ2_XS", "IQ2_S", "IQ3_XXS", "IQ3_S", "IQ4_NL", "IQ4_XS"),
)
"""Block types that the `gguf` library dequantises."""


@dataclass(frozen=True)
class GgufTensor:
    """An entry of the tensor directory: shape outermost first, type name, absolute byte offset and length."""

    name: str
    shape: tuple[int, ...]
    type_name: str
    offset: int
    nbytes: int


@dataclass(frozen=True)
class GgufArray:
    """A list in the metadata, left in the file until somebody asks for it: element type, number, place in the file."""

    kind: int
    count: int
    offset: int
    nbytes: int


@dataclass(frozen=True)
class GgufFile:
    """The parsed front of a GGUF file. A metadata value is a scalar, a text, or a `GgufArray`."""

    path: Path
    metadata: Mapping[str, Any]
    tensors: Mapping[str, GgufTensor]

    def array(self, key: str) -> list[Any]:
        """The elements of the list `key` of the metadata; they become Python objects, so the caller bounds their number first."""
        place = self.metadata[key]
        try:
            raw = np.fromfile(self.path, np.uint8, place.nbytes, offset=place.offset)
        except OSError as error:
            raise SourceError(f"{self.path}: {key}: cannot be read: {error}") from error
        cursor = _Cursor(self.path, raw.tobytes(), 0)
        if place.kind == STRING:
            return [cursor.string(key) for _ in range(place.count)]
        numbers: list[Any] = np.frombuffer(cursor.take(place.nbytes, key), SCALARS[place.kind]).tolist()
        return numbers

    def check_readable(self, tensor: GgufTensor) -> None:
        """Raise SourceError where the block type of `tensor` cannot be dequantised."""
        if tensor.type_name not in READABLE_TYPES:
            raise SourceError(f"{self.path}: {tensor.name}: block type {tensor.type_name} cannot be read; use another quantisation")

    def raw(self, tensor: GgufTensor, rows: slice = ALL_ROWS) -> NDArray[np.uint8]:
        """The bytes of `tensor`, or of some rows of it, as they are stored: u8 [..., row_bytes]."""
        shape, first = part_of(tensor.shape, rows)
        nbytes, before = (tensor.nbytes * count // math.prod(tensor.shape) for count in (math.prod(shape), first))
        try:
            raw = np.fromfile(self.path, np.uint8, nbytes, offset=tensor.offset + before)
        except OSError as error:
            raise SourceError(f"{self.path}: {tensor.name}: cannot be read: {error}") from error
        if raw.size != nbytes:
            raise SourceError(f"{self.path}: {tensor.name}: expected {nbytes} bytes, the file ends after {raw.size}")
        width = nbytes if len(shape) < 2 else tensor.nbytes // math.prod(tensor.shape[:-1])
        return raw.reshape(*shape[:-1], width)

    def read(self, tensor: GgufTensor, rows: slice = ALL_ROWS) -> NDArray[np.float32]:
        """The values f32 of `tensor`, or of some rows of it, dequantised."""
        self.check_readable(tensor)
        raw = self.raw(tensor, rows)
        if tensor.type_name in ("F32", "F16"):
            values = raw.reshape(-1).view("<f4" if tensor.type_name == "F32" else "<f2")
        else:
            values = dequantize(raw, GGMLQuantizationType[tensor.type_name])
        return values.astype(np.float32, copy=False).reshape(part_of(tensor.shape, rows)[0])


def read_gguf(path: Path) -> GgufFile:
    """Parse the front of the GGUF file at `path`. Raises SourceError unless it is a whole, little-endian GGUF 2 or 3."""
    try:
        with path.open("rb") as stream:
            if stream.read(4) != MAGIC:
                raise SourceError(f"{path}: not a model that we know: no GGUF magic; expected a Hugging Face directory or a .gguf file")
            with mmap.mmap(stream.fileno(), 0, access=mmap.ACCESS_READ) as data:
                return _parse(path, _Cursor(path, data, len(MAGIC)))
    except OSError as error:
        raise SourceError(f"{path}: cannot be read: {error.strerror or error}") from error


class _Cursor:
    """Reads values from a buffer and refuses to read past its end."""

    def __init__(self, path: Path, data: mmap.mmap | bytes, position: int) -> None:
        self.path = path
        self.data = data
        self.size = len(data)
        self.position = position

    def skip(self, count: int, what: str) -> int:
        """Pass over the next `count` bytes; returns where they begin."""
        start, end = self.position, self.position + count
        if end > self.size:
            raise SourceError(
                f"{self.path}: {what}: needs {count} bytes at {start}, the file has {self.size}; it is truncated, fetch it again"
            )
        self.position = end
        return start

    def take(self, count: int, what: str) -> bytes:
        """The next `count` bytes."""
        return self.data[self.skip(count, what) : self.position]

    def scalar(self, code: str, what: str) -> Any:
        return struct.unpack(code, self.take(struct.calcsize(code), what))[0]

    def string(self, what: str) -> str:
        raw = self.take(self.scalar("<Q", what), what)
        try:
            return raw.decode("utf-8")
        except UnicodeDecodeError as error:
            raise SourceError(f"{self.path}: {what}: not valid UTF-8 ({error.reason} at byte {error.start})") from error

    def value(self, kind: int, what: str) -> Any:
        """A metadata value of type `kind`; arrays hold scalars or strings, and stay where they are."""
        if kind == STRING:
            return self.string(what)
        if kind != ARRAY:
            return self.scalar(self._code(kind, what), what)
        inner, count = self.scalar("<I", what), self.scalar("<Q", what)
        smallest = 8 if inner == STRING else struct.calcsize(self._code(inner, what))
        if count * smallest > self.size - self.position:
            raise SourceError(f"{self.path}: {what}: claims {count} elements, more than the file can hold; it is damaged, fetch it again")
        start = self.position
        if inner == STRING and count > MAX_TEXTS:
            raise SourceError(f"{self.path}: {what}: claims {count} texts; no list of a model has more than {MAX_TEXTS}")
        if inner == STRING:
            for _ in range(count):
                self.skip(self.scalar("<Q", what), what)
        else:
            self.skip(count * smallest, what)
        return GgufArray(inner, count, start, self.position - start)

    def _code(self, kind: int, what: str) -> str:
        if kind not in SCALARS:
            raise SourceError(f"{self.path}: {what}: unknown metadata type {kind}")
        return SCALARS[kind]


def _parse(path: Path, cursor: _Cursor) -> GgufFile:
    version = cursor.scalar("<I", "version")
    if version not in VERSIONS:
        big_endian = int.from_bytes(version.to_bytes(4, "little"), "big") in VERSIONS
        found = "a big-endian file" if big_endian else f"version {version}"
        raise SourceError(f"{path}: expected little-endian GGUF version 2 or 3, found {found}; convert the model again")
    tensor_count, pair_count = cursor.scalar("<Q", "tensor count"), cursor.scalar("<Q", "metadata count")
    # A metadata pair takes at least 13 bytes, a tensor entry at least 32.
    if pair_count * 13 + tensor_count * 32 > cursor.size:
        raise SourceError(
            f"{path}: claims {pair_count} metadata pairs and {tensor_count} tensors in {cursor.size} bytes; "
            "it is truncated or damaged, fetch it again"
        )
    metadata: dict[str, Any] = {}
    for index in range(pair_count):
        key = cursor.string(f"metadata key {index}")
        if key in metadata:
            raise SourceError(f"{path}: metadata key {key} comes twice")
        metadata[key] = cursor.value(cursor.scalar("<I", key), key)
    headers = [_tensor_header(cursor, index) for index in range(tensor_count)]
    alignment = metadata.get("general.alignment", DEFAULT_ALIGNMENT)
    if not isinstance(alignment, int) or alignment <= 0 or alignment & (alignment - 1):
        raise SourceError(f"{path}: general.alignment: expected a power of two, found {alignment!r}")
    base = -(-cursor.position // alignment) * alignment
    tensors: dict[str, GgufTensor] = {}
    for name, shape, type_id, offset in headers:
        if name in tensors:
            raise SourceError(f"{path}: tensor {name} comes twice")
        tensors[name] = _place(path, cursor.size, name, shape, type_id, base + offset)
    at, before = base, ""
    for tensor in sorted(tensors.values(), key=lambda tensor: tensor.offset):
        if tensor.offset < at:
            raise SourceError(f"{path}: tensor {tensor.name}: begins at byte {tensor.offset}, within {before}; the file is damaged")
        at, before = tensor.offset + tensor.nbytes, tensor.name
    return GgufFile(path, metadata, tensors)


def _tensor_header(cursor: _Cursor, index: int) -> tuple[str, tuple[int, ...], int, int]:
    """Name, shape (outermost first; the file has it innermost first), type id and offset in the data section."""
    name = cursor.string(f"name of tensor {index}")
    rank = cursor.scalar("<I", name)
    if not 1 <= rank <= MAX_DIMENSIONS:
        raise SourceError(f"{cursor.path}: tensor {name}: expected 1 to {MAX_DIMENSIONS} dimensions, found {rank}")
    shape = tuple(cursor.scalar("<Q", name) for _ in range(rank))
    return name, shape[::-1], cursor.scalar("<I", name), cursor.scalar("<Q", name)


def _place(path: Path, file_size: int, name: str, shape: tuple[int, ...], type_id: int, offset: int) -> GgufTensor:
    """The tensor's byte range, checked against its type and the file."""
    try:
        kind = GGMLQuantizationType(type_id)
        block, block_bytes = GGML_QUANT_SIZES[kind]
    except (ValueError, KeyError) as error:
        raise SourceError(f"{path}: tensor {name}: unknown block type {type_id}") from error
    count = 1
    for dimension in shape:
        count *= dimension
    if count == 0 or shape[-1] % block:
        raise SourceError(f"{path}: tensor {name}: {kind.name} needs rows of a multiple of {block} values, found shape {list(shape)}")
    nbytes = count // block * block_bytes
    if offset + nbytes > file_size:
        raise SourceError(
            f"{path}: tensor {name}: ends at byte {offset + nbytes}, the file at {file_size}; it is truncated, fetch it again"
        )
    return GgufTensor(name, shape, kind.name, offset, nbytes)
