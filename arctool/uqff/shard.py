"""One safetensors file on disk: mapped, lazily read, never trusted. Knows no layers and no versions."""

from __future__ import annotations

import hashlib
import mmap
import os
from io import BufferedIOBase
from pathlib import Path
from typing import Final

import numpy as np
from numpy.typing import NDArray

from arctool.errors import FormatError, StorageError
from arctool.uqff.entries import Entry
from arctool.uqff.files import storage_errors
from arctool.uqff.header import Header, parse_header

HASHED: Final = 1 << 24
"""Bytes that are hashed before their pages are given back."""

READ_BYTES: Final = 1 << 26
"""Bytes that are read at a time, so that Ctrl-C is heard."""


class Shard:
    """An open safetensors file. Arrays handed out are read-only views of the mapping and stay valid after `close`."""

    def __init__(self, path: Path, *, resident: bool = False) -> None:
        """Map `path` and check its header; no tensor is read. Raises StorageError, FormatError.

        `resident`: read all of it into memory instead, which no later change of the file reaches.
        """
        self.path: Final = path
        with storage_errors(path, "read"), path.open("rb") as file:
            size = os.fstat(file.fileno()).st_size
            if size == 0:
                raise FormatError(f"{path}: the file is empty")
            mapped = read_whole(file, size, path) if resident else mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        self.header: Final[Header] = parse_header(memoryview(mapped), str(path))
        self._map: Final = mapped
        self._bytes: NDArray[np.uint8] | None = np.frombuffer(mapped, np.uint8)
        self._bytes.flags.writeable = False
        self._resident: Final = resident

    @property
    def size(self) -> int:
        """Bytes of the file."""
        return self._mapped().nbytes

    def entry(self, name: str) -> Entry:
        """The tensor `name`, which the header must have (KeyError otherwise)."""
        info = self.header.tensors[name]
        start = self.header.data_start
        return Entry(name, info.dtype, info.shape, self._mapped()[start + info.begin : start + info.end])

    def sha256(self, name: str) -> str:
        """SHA-256 (hex) of the tensor `name`, of which no more than `HASHED` bytes are in memory at a time."""
        digest, raw = hashlib.sha256(), self.entry(name).raw
        for at in range(0, raw.nbytes, HASHED):
            digest.update(raw[at : at + HASHED].data)
            self.release(name)
        return digest.hexdigest()

    def release(self, name: str) -> None:
        """Let the system take back the memory of the tensor `name`; whoever reads it again reads it from the file."""
        info, start = self.header.tensors[name], self.header.data_start
        first, last = start + info.begin, start + info.end
        page = mmap.PAGESIZE
        if self._bytes is not None and last > first and not self._resident:
            self._map.madvise(mmap.MADV_DONTNEED, first // page * page, last - first // page * page)

    def header_sha256(self) -> str:
        """SHA-256 (hex) of everything before the data."""
        return hashlib.sha256(self._mapped()[: self.header.data_start].data).hexdigest()

    def close(self) -> None:
        """Let go of the mapping; it ends with the last array that views it."""
        self._bytes = None

    def _mapped(self) -> NDArray[np.uint8]:
        if self._bytes is None:
            raise StorageError(f"{self.path}: the artifact is closed")
        return self._bytes


def read_whole(file: BufferedIOBase, size: int, path: Path) -> mmap.mmap:
    """The file's bytes in memory of our own. Raises FormatError for one that shrinks meanwhile."""
    memory = mmap.mmap(-1, size)
    view, done = memoryview(memory), 0
    while done < size:
        count = file.readinto(view[done : done + READ_BYTES])
        if not count:
            raise FormatError(f"{path}: was cut short while it was read")
        done += count
    return memory
