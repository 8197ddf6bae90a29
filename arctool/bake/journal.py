"""What a bake has finished so far, on disk, so that a killed one goes on where it was and ends with the same bytes.

A hidden directory beside the output: `bake.json` says which bake it belongs to; one file a layer, a SHA-256 and then an npz, appears
by rename when it is whole. Knows trellis tensors, not how they are made or what an artifact looks like.
"""

from __future__ import annotations

import contextlib
import hashlib
import io
import json
import os
import shutil
from pathlib import Path
from types import TracebackType
from typing import Any

import numpy as np
from numpy.typing import NDArray

from arctool.bake.search.rounding import RoundedLayer, RungTools
from arctool.errors import StorageError
from arctool.quant.hadamard import Rotation
from arctool.quant.tensor import TrellisTensor
from arctool.uqff.files import storage_errors, sync_directory, write_file
from arctool.uqff.locks import is_at, try_lock

HEADER = "bake.json"
SUFFIX = ".layer"
ARRAY_SUFFIX = ".array"
UNIFORM = "arctool-uniform"
DIGEST_BYTES = hashlib.sha256().digest_size
READ_BYTES = 1 << 24


def beside(output: Path) -> Path:
    """The output whose journal keeps the uniform bake behind a bit budget; no artifact is ever made there."""
    return output.with_name(f"{output.name}.{UNIFORM}")


class Journal:
    """Use as a context manager; only one process at a time may hold the journal of an output."""

    def __init__(self, output: Path, identity: dict[str, Any]) -> None:
        """`identity`: JSON that names source, options and algorithm; another bake's leavings are discarded, never mixed in."""
        self.directory = output.parent / f".{output.name}.arctool-journal"
        self._identity = json.dumps(identity, sort_keys=True).encode()
        self._lock: int | None = None

    def __enter__(self) -> Journal:
        with storage_errors(self.directory.parent, "write"):
            self.directory.parent.mkdir(parents=True, exist_ok=True)
        with storage_errors(self.directory, "write"):
            self._lock = self._acquire()
        if self._lock is None:
            raise StorageError(f"{self.directory}: another bake to the same output is running; wait for it or choose -o")
        try:
            self._claim()
        except BaseException:
            self._leave()
            raise
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._leave()

    def load(self, index: int, shape: tuple[int, ...], tools: RungTools, rotation: Rotation) -> RoundedLayer | None:
        """Layer `index` if it was finished and its file is whole, else None. Rotation and table are given, not stored."""
        path = self._file(index)
        if not path.is_file():
            return None
        with storage_errors(path, "read"):
            data = path.read_bytes()
        digest, body = data[:DIGEST_BYTES], data[DIGEST_BYTES:]
        if self._digest(index, body) != digest:
            return None
        with np.load(io.BytesIO(body), allow_pickle=False) as stored:
            packed, scales, error = stored["packed"], stored["scales"], float(stored["error"])
            proxy, note, dropped = float(stored["proxy"]), str(stored["note"]), int(stored["dropped"])
        tensor = TrellisTensor(tools.rung.geometry, tools.codebook, shape[1], packed, scales, rotation)
        tensor.check(str(path))
        return RoundedLayer(tensor, error, None if np.isnan(proxy) else proxy, note or None, dropped)

    def store(self, index: int, layer: RoundedLayer) -> None:
        """Keep a finished layer. Raises StorageError."""
        buffer = io.BytesIO()
        proxy = np.nan if layer.proxy_error is None else layer.proxy_error
        np.savez(
            buffer,
            packed=layer.tensor.packed,
            scales=layer.tensor.scales,
            error=np.float64(layer.relative_error),
            proxy=np.float64(proxy),
            note=np.str_(layer.note or ""),
            dropped=np.int64(layer.dropped),
        )
        body = buffer.getvalue()
        self._write(self._file(index), self._digest(index, body), body)

    def store_array(self, name: str, index: int, values: NDArray[Any]) -> None:
        """Keep an array that a resumed bake needs besides its layers, in place of the one that had this name. Raises StorageError."""
        body = np.ascontiguousarray(values).data.cast("B")
        self._write(self.directory / f"{name}{ARRAY_SUFFIX}", self._digest(index, body, name), index.to_bytes(8, "little"), body)

    def load_array(self, name: str, into: NDArray[Any]) -> int | None:
        """Fill `into` with the array of this name and give its index; None, and `into` untouched, if there is none that is whole."""
        path = self.directory / f"{name}{ARRAY_SUFFIX}"
        if not path.is_file() or path.stat().st_size != DIGEST_BYTES + 8 + into.nbytes:
            return None
        with storage_errors(path, "read"), path.open("rb") as file:
            digest, index = file.read(DIGEST_BYTES), int.from_bytes(file.read(8), "little")
            found = self._hash(index, name)
            while piece := file.read(READ_BYTES):
                found.update(piece)
            if found.digest() != digest:
                return None
            file.seek(DIGEST_BYTES + 8)
            whole = into.data.cast("B")  # read in its place: the hidden states of a large calibration are larger than memory
            for first in range(0, into.nbytes, READ_BYTES):
                file.readinto(whole[first : first + READ_BYTES])
        return index

    def finished(self) -> int:
        """How many layers are kept."""
        return sum(1 for _ in self.directory.glob(f"*{SUFFIX}"))

    def stored_bytes(self) -> int:
        """Size of the layers and arrays that are kept."""
        return sum(path.stat().st_size for suffix in (SUFFIX, ARRAY_SUFFIX) for path in self.directory.glob(f"*{suffix}"))

    def empty(self) -> bool:
        """Whether nothing is kept: no layer, no array."""
        return not any(path.suffix in (SUFFIX, ARRAY_SUFFIX) for path in self.directory.iterdir())

    def remove(self) -> None:
        """The artifact is out; nothing here is needed any more."""
        shutil.rmtree(self.directory, ignore_errors=True)

    def discard(self) -> None:
        """Remove what a bake left that died just after its artifact appeared; a live bake's journal stays."""
        if self.directory.is_dir():
            lock = try_lock(self.directory)
            if lock is not None:
                self.remove()
                os.close(lock)

    def _acquire(self) -> int | None:
        """The lock of the directory, made where it is not; None where another bake has it. One that just ended may take it away."""
        while True:
            self.directory.mkdir(exist_ok=True)
            lock = try_lock(self.directory)
            if lock is not None or self.directory.exists():
                return lock

    def _claim(self) -> None:
        """Clear another bake's leavings, unless the directory is this very bake's."""
        header = self.directory / HEADER
        with storage_errors(self.directory, "write"):
            if header.is_file() and header.read_bytes() == self._identity:
                return
            for item in self.directory.iterdir():
                item.unlink()
        self._write(header, self._identity)

    def _leave(self) -> None:
        """Unlock; a journal that keeps nothing offers a next run nothing and goes.

        Once `remove` has run, the path may already be another bake's journal, which is not ours to look at.
        """
        if self._lock is not None:
            if is_at(self._lock, self.directory) and self.empty():
                self.remove()
            os.close(self._lock)
            self._lock = None

    def _digest(self, index: int, body: bytes | memoryview, name: str = "") -> bytes:
        """Of a layer's or an array's bytes and of what they are: a file that strayed in from another place or bake does not fit."""
        digest = self._hash(index, name)
        digest.update(body)
        return digest.digest()

    def _hash(self, index: int, name: str) -> hashlib._Hash:
        return hashlib.sha256(self._identity + index.to_bytes(8, "little") + name.encode())

    def _file(self, index: int) -> Path:
        return self.directory / f"{index:05d}{SUFFIX}"

    def _write(self, final: Path, *parts: bytes | memoryview) -> None:
        temporary = final.with_name(f"{final.name}.part")
        try:
            write_file(temporary, *parts)
            with storage_errors(final, "write"):
                os.replace(temporary, final)
                sync_directory(self.directory)
        except BaseException:
            with contextlib.suppress(OSError):
                temporary.unlink(missing_ok=True)
            raise
