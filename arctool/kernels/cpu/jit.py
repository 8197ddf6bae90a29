"""How our numba functions are compiled and cached.

numba's own cache looks only at the file that defines a function, so a changed callee, constant or intrinsic in another file would
leave a stale kernel behind, and an upgraded wheel with the same file times too. Ours is one directory for each state of the sources.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any

from numba import config, njit

SOURCES = ("kernels/cpu/*.py", "quant/*.py", "bake/viterbi*.py")
"""Files whose text can end up in machine code."""


@cache
def cache_directory() -> Path:
    """`$XDG_CACHE_HOME/arctool/jit-<hash of the sources>`; the user's NUMBA_CACHE_DIR comes first if it is set."""
    root = Path(__file__).parents[2]
    digest = hashlib.sha256()
    for pattern in SOURCES:
        for file in sorted(root.glob(pattern)):
            digest.update(file.read_bytes())
    base = config.CACHE_DIR or os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(base) / "arctool" / f"jit-{digest.hexdigest()[:16]}"


@contextmanager
def _numba_cache_in(directory: Path) -> Iterator[None]:
    before = config.CACHE_DIR
    config.CACHE_DIR = str(directory)
    try:
        yield
    finally:
        config.CACHE_DIR = before


def jit(*, parallel: bool = False) -> Callable[[Callable[..., Any]], Any]:
    """Decorator: compile with numba on first call, without the interpreter lock, cached on disk where that is possible."""

    def decorate(function: Callable[..., Any]) -> Any:
        dispatcher = njit(nogil=True, parallel=parallel)(function)
        directory = cache_directory()
        try:
            directory.mkdir(parents=True, exist_ok=True)
            with _numba_cache_in(directory):
                dispatcher.enable_caching()
        except (OSError, RuntimeError):
            # A read-only home costs a second of compiling at each start, nothing else.
            return dispatcher
        return dispatcher

    return decorate
