"""What every kind of source offers before anybody knows which model it is: tensors to be read one at a time, and assets.

`hf_directory` and `gguf_source` make a `Source`; `checkpoint` checks it against an architecture. Nothing here knows a model.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from arctool.bake.source.terms import Terms

ALL_ROWS = slice(None)


@dataclass(frozen=True)
class StoredTensor:
    """A tensor in a file: its Hugging Face name, logical shape, storage type (`BF16`, `Q4_1` ...) and place."""

    name: str
    shape: tuple[int, ...]
    dtype: str
    file: Path


def part_of(shape: tuple[int, ...], rows: slice) -> tuple[tuple[int, ...], int]:
    """(shape of those rows of a tensor, values before the first of them). `rows`: a run of them, without a step."""
    if not shape:
        return shape, 0
    start, stop, _ = rows.indices(shape[0])
    return (max(0, stop - start), *shape[1:]), start * math.prod(shape[1:])


class TensorStore(Protocol):
    """Tensors by Hugging Face name. `read` goes to the disk on every call and keeps nothing."""

    @property
    def entries(self) -> Mapping[str, StoredTensor]:
        """What is stored, by Hugging Face name."""
        ...

    def check_readable(self, name: str) -> None:
        """Raise SourceError where the storage type of tensor `name` is not one that `read` understands."""
        ...

    def blocks(self, name: str, rows: slice = ALL_ROWS) -> NDArray[np.uint8] | None:
        """The bytes u8 [..., row_bytes] of a tensor of GGML blocks, or of some rows of it, rows in the order of `read`; None where it is
        stored otherwise."""
        ...

    def read(self, name: str, rows: slice = ALL_ROWS) -> NDArray[np.float32]:
        """The values f32 of the entry's shape, or some rows of it. Raises SourceError where the file cannot be read."""
        ...


@dataclass(frozen=True)
class Source:
    """A checkpoint as found: `where` names it in errors, `files` hold its tensors, `config_json` is config.json."""

    where: str
    config_json: dict[str, Any]
    store: TensorStore
    assets: Mapping[str, bytes]
    files: tuple[Path, ...]
    terms: Terms = field(default_factory=Terms)
