"""Safetensors files as a tensor store: headers are read and checked up front, one tensor's bytes at a time later.

The `safetensors` library judges a file (truncated, overlapping, lying header); the bytes are read here, because its numpy side
has no bf16 and its memory map would count every tensor ever read as memory in use.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from safetensors import SafetensorError, safe_open

from arctool.bake.source.stored import ALL_ROWS, StoredTensor, part_of
from arctool.errors import SourceError
from arctool.quant.bf16 import from_bf16

READABLE_DTYPES: Mapping[str, np.dtype[Any]] = {"F32": np.dtype("<f4"), "F16": np.dtype("<f2"), "BF16": np.dtype("<u2")}
"""Storage types that we read, as numpy sees their bytes (bf16 as its bits)."""


@dataclass(frozen=True)
class _Slot:
    """Where a tensor's bytes begin in its file."""

    entry: StoredTensor
    offset: int


class SafetensorsStore:
    """The tensors of one or more safetensors files. Raises SourceError for an unreadable file or a name that comes twice."""

    def __init__(self, files: Iterable[Path]) -> None:
        self._slots: dict[str, _Slot] = {}
        for file in files:
            for slot in _read_header(file):
                name = slot.entry.name
                if name in self._slots:
                    other = self._slots[name].entry.file.name
                    raise SourceError(f"{file}: tensor {name} is also in {other}; keep only one of the two files")
                self._slots[name] = slot
        self.entries = {name: slot.entry for name, slot in self._slots.items()}

    def check_readable(self, name: str) -> None:
        """Raise SourceError unless tensor `name` is stored in one of `READABLE_DTYPES`."""
        entry = self.entries[name]
        if entry.dtype not in READABLE_DTYPES:
            raise SourceError(
                f"{entry.file}: {name}: stored as {entry.dtype}; this version reads {', '.join(READABLE_DTYPES)}: "
                "convert the checkpoint to one of them"
            )

    def blocks(self, name: str, rows: slice = ALL_ROWS) -> NDArray[np.uint8] | None:
        """None: safetensors files hold plain numbers."""
        return None

    def read(self, name: str, rows: slice = ALL_ROWS) -> NDArray[np.float32]:
        """The values f32 of tensor `name`, read from its file."""
        slot = self._slots[name]
        entry = slot.entry
        self.check_readable(name)
        dtype = READABLE_DTYPES[entry.dtype]
        shape, first = part_of(entry.shape, rows)
        count = math.prod(shape)
        try:
            raw = np.fromfile(entry.file, dtype, count, offset=slot.offset + first * dtype.itemsize)
        except OSError as error:
            raise SourceError(f"{entry.file}: {name}: cannot be read: {error}") from error
        if raw.size != count:
            raise SourceError(f"{entry.file}: {name}: expected {count} values, the file ends after {raw.size}; fetch it again")
        values = from_bf16(raw) if entry.dtype == "BF16" else raw.astype(np.float32, copy=False)
        return values.reshape(shape)


def _read_header(file: Path) -> list[_Slot]:
    """Tensors of `file` and the absolute offsets of their bytes."""
    try:
        # Opened first: the library calls every file that it may not read a missing one.
        with file.open("rb") as stream, safe_open(file, framework="numpy"):
            length = int.from_bytes(stream.read(8), "little")
            header: dict[str, Any] = json.loads(stream.read(length))
    except OSError as error:
        raise SourceError(f"{file}: cannot be read: {error.strerror or error}") from error
    except (SafetensorError, ValueError) as error:
        raise SourceError(f"{file}: not a readable safetensors file ({error}); fetch it again") from error
    return [
        _Slot(StoredTensor(name, tuple(info["shape"]), info["dtype"], file), 8 + length + info["data_offsets"][0])
        for name, info in header.items()
        if name != "__metadata__"
    ]
