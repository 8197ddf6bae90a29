"""Machine code on disk: one file for each function, its closure and its argument types, written whole and never shared between keys.

numba's own cache has two faults with closures, both of which end in a kernel that silently computes another geometry. Its index and
numbered files are updated without a lock, so that two processes may leave one's number with the other's code. And the symbols in the code
are numbered by each process from 1, so that closures of one function which were compiled in two processes may carry the same name, and the
one that is loaded first is called for both: here a closure's name holds what it closes over (`unique_name`).
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import pickle
import uuid
from pathlib import Path
from types import FunctionType
from typing import Any

import numpy as np
from numba.core.caching import FunctionCache
from numba.core.serialize import dumps
from numba.extending import is_jitted

PLAIN = (bool, int, float, str, bytes, type(None), np.generic)
"""Closure values that their type and `repr` name completely."""


class KeyedFiles:
    """Key → pickled data, one file each. A file appears by rename; a disk that refuses costs a compilation, nothing else."""

    def __init__(self, directory: Path, base: str) -> None:
        self._directory, self._base = directory, base

    def save(self, key: str, data: Any) -> None:
        final = self._path(key)
        temporary = final.with_name(f"{final.name}.{uuid.uuid4().hex}.part")
        try:
            temporary.write_bytes(dumps((key, data)))
            os.replace(temporary, final)
        except OSError:
            with contextlib.suppress(OSError):
                temporary.unlink()

    def load(self, key: str) -> Any:
        """What was saved under `key`, None where nothing was."""
        try:
            stored, data = pickle.loads(self._path(key).read_bytes())
        except OSError:
            return None
        return data if stored == key else None

    def _path(self, key: str) -> Path:
        return self._directory / f"{self._base}.{hashlib.sha256(key.encode()).hexdigest()[:24]}.code"


class KernelCache(FunctionCache):
    """numba's cache of one function with `KeyedFiles` behind it."""

    def __init__(self, function: Any) -> None:
        super().__init__(function)
        self._stamp = self._impl.locator.get_source_stamp()
        self._cache_file = KeyedFiles(Path(self.cache_path), self._impl.filename_base)

    def _index_key(self, sig: Any, codegen: Any) -> str:
        return f"{sig}\n{codegen.magic_tuple()}\n{self._stamp!r}\n{identity(self._py_func)}"


def unique_name(function: Any) -> str:
    """The qualified name of `function`, and for a closure a hash of what it closes over."""
    digest = hashlib.sha256(identity(function).encode()).hexdigest()[:12]
    return f"{function.__qualname__}_{digest}" if function.__closure__ else str(function.__qualname__)


def identity(value: Any) -> str:
    """A text that differs for functions and values that are compiled otherwise, and is the same in every process where it can be.

    The sources' text is no part of it: it names the cache's directory.
    """
    if isinstance(value, PLAIN):
        return f"{type(value).__name__} {value!r}"
    if isinstance(value, tuple):
        return f"({', '.join(map(identity, value))})"
    function = value.py_func if is_jitted(value) else getattr(value, "_defn", value)  # of an intrinsic: what generates it
    if isinstance(function, FunctionType):
        cells = ", ".join(identity(cell.cell_contents) for cell in function.__closure__ or ())
        return f"{function.__module__}.{function.__qualname__}({cells})"
    return hashlib.sha256(dumps(value)).hexdigest()
