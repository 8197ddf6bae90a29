"""A program on a team of threads: kernels by address, one after the other, all lanes of the team on each.

A whole step of a model is one program and one call from Python. Lanes take a kernel's tasks from its counter, so a lane that another
process holds up does less; where the next kernel needs what all lanes have done, they meet at a barrier. Who computes what never shows
in a bit: a task's result depends on its operands alone.
"""

from __future__ import annotations

import functools

import numpy as np
from numba import get_num_threads, prange, threading_layer
from numba.np.ufunc.parallel import _launch_threads
from numpy.typing import NDArray

from arctool.errors import UsageError
from arctool.kernels.cpu.jit import jit
from arctool.kernels.cpu.memory import call_entry, current, give_way, i64_at, take

SPINS = 2000
"""Looks at a barrier before a lane offers its core to others, some microseconds: a busy neighbour must not cost a time slice a kernel."""

ENTRY, OPERANDS, MEET, UNLESS, COLUMNS = range(5)
"""Columns of a program's code: a kernel's address, its operands' address, whether the lanes meet behind it, and the number of the step that
says, by being zero, that there is nothing for it to do (−1: there always is)."""


@jit()
def _lane(code, step, counters, meeting, scratch, lanes):  # type: ignore[no-untyped-def]  # numba infers the types
    met = 0
    for i in range(code.shape[0]):
        if code[i, UNLESS] >= 0 and i64_at(step, code[i, UNLESS] + 1)[code[i, UNLESS]] == 0:
            continue
        call_entry(code[i, ENTRY], code[i, OPERANDS], step, counters + 8 * i, scratch)
        if code[i, MEET]:
            met += 1
            take(meeting)
            looks = 0
            while current(meeting) < met * lanes:
                looks += 1
                if looks > SPINS:
                    give_way()


@jit(parallel=True)
def _run(code, step, counters, meeting, scratch, lanes):  # type: ignore[no-untyped-def]  # numba infers the types
    for lane in prange(lanes):
        _lane(code, step, counters, meeting, scratch[lane], lanes)


@functools.cache
def check_threads() -> None:
    """Raise UsageError unless every lane will have a thread of its own: lanes that wait for one that has none would wait for ever."""
    _launch_threads()
    layer = threading_layer()
    if layer != "workqueue":
        raise UsageError(f"numba runs on its {layer!r} threads, and our kernels need its work queue; unset NUMBA_THREADING_LAYER")


def run(code: NDArray[np.int64], step: NDArray[np.int64], counters: NDArray[np.int64], scratch: NDArray[np.int64]) -> None:
    """Run `code` i64 [kernels, COLUMNS] over the step's numbers. `counters`: i64 [kernels + 1], zeroed here; `scratch`: i64 [lanes], the
    address of each lane's own memory. The team has as many lanes as numba has threads, and no more than there are scratches."""
    check_threads()
    counters[:] = 0
    _run(code, step.ctypes.data, counters.ctypes.data, counters.ctypes.data + 8 * len(code), scratch, min(get_num_threads(), len(scratch)))
