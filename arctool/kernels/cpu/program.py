"""A list of kernels with their operands, made once and run for every step: `team.run` over arrays that it keeps alive."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Callable
from typing import Any

import numpy as np
from numba import config
from numpy.typing import NDArray

from arctool.kernels.cpu import team

CACHE_LINE = 64


class Program:
    """Kernels in order.

    Not shared between threads that run at the same time: lanes' memory, counters and whatever the operands name belong to one run.
    """

    def __init__(self, step: NDArray[np.int64]) -> None:
        self.step = step
        self._counted: Counter[tuple[str, int]] = Counter()
        self._rows: list[tuple[int, int, int, int]] = []
        self._kept: list[Any] = []
        self._pauses: list[int] = []
        self._scratch_bytes = 0
        self._code = np.empty((0, team.COLUMNS), np.int64)
        self._memory = np.empty(0, np.uint8)
        self._lanes = np.empty(0, np.int64)
        self._counters = np.empty(0, np.int64)

    def __len__(self) -> int:
        return len(self._rows)

    def keep(self, *arrays: Any) -> None:
        """Hold what operands point into for as long as the program lives."""
        self._kept.extend(arrays)

    def count(self, name: str, unless: int = -1) -> None:
        """A run engages the implementation `name` of the registry once more, unless that number of the step is zero."""
        self._counted[name, unless] += 1

    def engaged(self) -> Counter[str]:
        """What a run over the step's present numbers engages, by name."""
        found: Counter[str] = Counter()
        for (name, unless), calls in self._counted.items():
            if unless < 0 or self.step[unless]:
                found[name] += calls
        return found

    def add(self, kernel: Callable[[], int], operands: NDArray[np.int64], *, scratch: int = 0, meet: bool = True, unless: int = -1) -> None:
        """Append a kernel. `scratch`: bytes of its own that a lane needs; `meet`: whether what follows needs all that it does; `unless`:
        which number of the step leaves it nothing to do by being zero."""
        self._kept.append(operands)
        self._rows.append((kernel(), operands.ctypes.data, int(meet), unless))
        self._scratch_bytes = max(self._scratch_bytes, scratch)

    def seal(self) -> None:
        """Lay the code out; after this nothing may be added."""
        self._code = np.array(self._rows, np.int64).reshape(-1, team.COLUMNS)
        self._counters = np.zeros(len(self._rows) + 1, np.int64)
        lanes, size = int(config.NUMBA_NUM_THREADS), -(-max(self._scratch_bytes, 1) // CACHE_LINE) * CACHE_LINE
        self._memory = np.zeros(lanes * size + CACHE_LINE, np.uint8)
        start = -(-self._memory.ctypes.data // CACHE_LINE) * CACHE_LINE
        self._lanes = start + size * np.arange(lanes, dtype=np.int64)

    def pause(self) -> None:
        """A run may stop for a moment before the next kernel (`run`)."""
        self._pauses.append(len(self._rows))

    def run(self, first: int = 0, last: int | None = None, *, pausing: bool = False) -> None:
        """Run kernels [first, last), by default all. `pausing`: Python looks up at every pause, so Ctrl-C need not wait for the end."""
        end = len(self._rows) if last is None else last
        stops = [at for at in self._pauses if first < at < end] if pausing else []
        for begin, stop in itertools.pairwise((first, *stops, end)):
            code = self._code[begin:stop]
            team.run(code, self.step, self._counters[: len(code) + 1], self._lanes)
