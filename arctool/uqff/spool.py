"""A safetensors file in the making: entries arrive one by one, the header that precedes them can only be written at the end."""

from __future__ import annotations

import contextlib
import hashlib
import shutil
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import IO, Final

import numpy as np

from arctool.errors import FormatError
from arctool.uqff.entries import Entry
from arctool.uqff.files import storage_errors, sync
from arctool.uqff.header import build_header

CHUNK: Final = 1 << 22
"""Bytes that the copy behind the header holds at a time."""


class Spool:
    """A safetensors file in the making: bytes go to two spool files, then behind the header that only the end can know.

    Entries of whole 32-bit words come first, so that each is aligned; those of odd lengths follow. Memory stays bounded.
    """

    def __init__(self, path: Path) -> None:
        self.path: Final = path
        self.size = 0
        self.digests: dict[str, str] = {}
        self._lists: tuple[list[Entry], list[Entry]] = ([], [])
        self._files: list[IO[bytes]] = []
        with storage_errors(path, "write"):
            for name in ("words", "bytes"):
                self._files.append(path.with_name(f".{path.name}.{name}").open("w+b"))

    def add(self, entry: Entry) -> None:
        """Append one entry and remember its SHA-256. Raises FormatError for a name that is taken, StorageError."""
        if entry.name in self.digests:
            raise FormatError(f"{self.path}: entry {entry.name} is written twice")
        odd = int(entry.nbytes % 4 != 0)
        self.digests[entry.name] = hashlib.sha256(entry.raw.data).hexdigest()
        self._lists[odd].append(Entry(entry.name, entry.dtype, entry.shape, np.empty(0, np.uint8)))
        self.size += entry.nbytes
        with storage_errors(self.path, "write"):
            self._files[odd].write(entry.raw.data)

    def seal(self, metadata: Mapping[str, str]) -> str:
        """Write the file, fsync it, remove the spools; returns the SHA-256 (hex) of the header. Raises StorageError."""
        header = build_header(((e.name, e.dtype, e.shape) for part in self._lists for e in part), metadata)
        with storage_errors(self.path, "write"), self.path.open("wb") as out:
            out.write(header)
            for file in self._files:
                file.seek(0)
                shutil.copyfileobj(file, out, CHUNK)
            sync(out)
        self.discard()
        return hashlib.sha256(header).hexdigest()

    def discard(self) -> None:
        """Close and remove the spool files; never raises, so that it may run while an error is on its way."""
        for file in self._files:
            with contextlib.suppress(OSError):  # a full disk refuses the last flush too; the bytes are not wanted
                file.close()
            Path(file.name).unlink(missing_ok=True)
        self._files = []

    def __enter__(self) -> Spool:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.discard()
