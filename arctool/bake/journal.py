"""What a bake has finished so far, on disk, so that a killed one goes on where it was and ends with the same bytes.

A hidden directory beside the output: `bake.json` says which bake it belongs to, one file a layer appears by rename when it is whole.
Knows trellis tensors, not how they are made or what an artifact looks like.
"""

from __future__ import annotations

import fcntl
import io
import json
import os
import shutil
import zipfile
from pathlib import Path
from types import TracebackType
from typing import Any

import numpy as np

from arctool.bake.rounding import RoundedLayer, RungTools
from arctool.errors import StorageError
from arctool.quant.hadamard import Rotation
from arctool.quant.tensor import TrellisTensor
from arctool.uqff.files import storage_errors, sync_directory, write_file


class Journal:
    """Use as a context manager; only one process at a time may hold the journal of an output."""

    def __init__(self, output: Path, identity: dict[str, Any]) -> None:
        """`identity`: JSON that names source, options and algorithm; another bake's leavings are discarded, never mixed in."""
        self.directory = output.parent / f".{output.name}.arctool-journal"
        self._identity = json.dumps(identity, sort_keys=True).encode()
        self._lock: int | None = None

    def __enter__(self) -> Journal:
        with storage_errors(self.directory, "write"):
            self.directory.mkdir(parents=True, exist_ok=True)
            self._lock = os.open(self.directory, os.O_RDONLY | os.O_DIRECTORY)
            try:
                fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                os.close(self._lock)
                raise StorageError(f"{self.directory}: another bake to the same output is running; wait for it or choose -o") from None
            header = self.directory / "bake.json"
            if not header.is_file() or header.read_bytes() != self._identity:
                for item in self.directory.iterdir():
                    item.unlink()
                self._write("bake.json", self._identity)
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None

    def load(self, index: int, key: str, shape: tuple[int, ...], tools: RungTools, seed: int) -> RoundedLayer | None:
        """Layer `index` if it was finished and its file is whole, else None. Rotation and table are remade, not stored."""
        path = self.directory / f"{index:05d}.npz"
        if not path.is_file():
            return None
        try:
            with storage_errors(path, "read"), np.load(path, allow_pickle=False) as stored:
                packed, scales, error = stored["packed"], stored["scales"], float(stored["error"])
        except (ValueError, KeyError, EOFError, zipfile.BadZipFile):
            return None
        tensor = TrellisTensor(
            tools.rung.geometry, tools.codebook, shape[1], packed, scales, Rotation.seeded(seed, key, shape[0], shape[1])
        )
        tensor.check(str(path))
        return RoundedLayer(tensor, error)

    def store(self, index: int, layer: RoundedLayer) -> None:
        """Keep a finished layer. Raises StorageError."""
        buffer = io.BytesIO()
        np.savez(buffer, packed=layer.tensor.packed, scales=layer.tensor.scales, error=np.float64(layer.relative_error))
        self._write(f"{index:05d}.npz", buffer.getvalue())

    def finished(self) -> int:
        """How many layers are kept."""
        return sum(1 for _ in self.directory.glob("*.npz"))

    def remove(self) -> None:
        """The artifact is out; nothing here is needed any more."""
        shutil.rmtree(self.directory, ignore_errors=True)

    def _write(self, name: str, data: bytes) -> None:
        temporary, final = self.directory / f"{name}.part", self.directory / name
        try:
            write_file(temporary, data)
            with storage_errors(final, "write"):
                os.replace(temporary, final)
                sync_directory(self.directory)
        except BaseException:
            temporary.unlink(missing_ok=True)
            raise
