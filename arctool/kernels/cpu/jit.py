"""How our numba functions are compiled, cached and run in parallel.

numba's own cache looks only at the file that defines a function, so a changed callee, constant or intrinsic in another file would
leave a stale kernel behind, and an upgraded wheel with the same file times too. Ours is one directory for each state of the sources,
with files that processes cannot mix up (`jit_cache`).

Parallel kernels use numba's work queue, not OpenMP: a spinning barrier costs a hundred times a kernel's time as soon as a neighbour
takes a core (14 ms instead of 0.2 ms a call, measured on two cores). The work queue must be entered by one thread at a time: the lock.
"""

from __future__ import annotations

import functools
import hashlib
import os
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any

from numba import config, njit, types
from numba.core.ccallback import CFunc

from arctool.errors import UsageError
from arctool.kernels.cpu.jit_cache import KernelCache, unique_name

if "NUMBA_THREADING_LAYER" not in os.environ:
    config.THREADING_LAYER = "workqueue"

_work_queue = threading.Lock()

_cache_setting = threading.Lock()
"""Held while numba's one setting for all threads is ours: two that changed it at once would leave a cache in the working directory."""

SOURCES = ("kernels/cpu/*.py", "quant/**/*.py", "bake/search/*.py")
"""Files whose text can end up in machine code. A test holds every user of `jit` to it."""


@cache
def cache_directory() -> Path:
    """`$XDG_CACHE_HOME/arctool/jit-<hash of the sources>`; the user's NUMBA_CACHE_DIR comes first if it is set.

    Raises RuntimeError where the user has no home directory.
    """
    xdg = Path(os.environ.get("XDG_CACHE_HOME", ""))
    base = config.CACHE_DIR or (xdg if xdg.is_absolute() else Path.home() / ".cache")
    return Path(base) / "arctool" / f"jit-{source_digest(Path(__file__).parents[2])}"


def source_digest(package: Path) -> str:
    """Sixteen hex digits of the SHA-256 over names and texts of all `SOURCES` below `package`."""
    digest = hashlib.sha256()
    for pattern in SOURCES:
        for file in sorted(package.glob(pattern)):
            digest.update(file.name.encode() + b"\0" + file.read_bytes() + b"\0")
    return digest.hexdigest()[:16]


@contextmanager
def _numba_cache_in(directory: Path) -> Iterator[None]:
    before = config.CACHE_DIR
    config.CACHE_DIR = str(directory)
    try:
        yield
    finally:
        config.CACHE_DIR = before


def jit(*, parallel: bool = False) -> Callable[[Callable[..., Any]], Any]:
    """Decorator: compile with numba on first call, without the interpreter lock, cached on disk where that is possible.

    A parallel function is called from Python only, never from another jitted one. One that is a closure is compiled anew by each process:
    numba names the bodies of its loops by an address, which two processes may share.
    """

    if config.DISABLE_JIT:
        raise UsageError("NUMBA_DISABLE_JIT is set, and arctool's kernels need the compiler; unset it")

    def decorate(function: Callable[..., Any]) -> Any:
        function.__qualname__ = unique_name(function)
        dispatcher = njit(nogil=True, parallel=parallel)(function)
        if not (parallel and function.__closure__):
            _enable_cache(dispatcher, function)
        return _one_at_a_time(dispatcher) if parallel else dispatcher

    return decorate


ENTRY_ARGUMENTS = ("operands", "step", "counter", "scratch")
"""What a kernel of a program is called with, all i64: the addresses of its operands, of the step's numbers, of the counter from which lanes
take tasks, and of memory of the lane's own."""


def entry(function: Callable[..., Any]) -> Callable[[], int]:
    """Decorator: a kernel that a team of threads calls by address (`team`). Returns what compiles it on first call and gives the address.

    It raises nothing, allocates nothing, and divides as machines do.
    """
    function.__qualname__ = unique_name(function)

    @functools.cache
    def address() -> int:
        signature = (types.int64,) * len(ENTRY_ARGUMENTS), types.void
        compiled = CFunc(function, signature, locals={}, options={"nogil": True, "error_model": "numpy"})
        _enable_cache(compiled, function)
        compiled.compile()
        _compiled.append(compiled)
        return int(compiled.address)

    address.__name__ = function.__name__
    return address


_compiled: list[CFunc] = []
"""Machine code lives as long as what compiled it."""


def _enable_cache(dispatcher: Any, function: Callable[..., Any]) -> None:
    try:
        with _cache_setting:
            directory = cache_directory()
            directory.mkdir(parents=True, exist_ok=True)
            with _numba_cache_in(directory):
                dispatcher._cache = KernelCache(function)  # what `enable_caching` does with numba's own
    except (OSError, RuntimeError):
        # A home that is read-only or unknown costs some seconds of compiling at each start, nothing else.
        return


def _one_at_a_time(dispatcher: Any) -> Callable[..., Any]:
    @functools.wraps(dispatcher)
    def call(*arguments: Any) -> Any:
        with _work_queue:
            return dispatcher(*arguments)

    return call
