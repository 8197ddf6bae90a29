"""Locks on directories: who holds one may fill and remove it. A lock dies with its process, so a dead run never blocks a live one."""

from __future__ import annotations

import fcntl
import os
from pathlib import Path


def try_lock(directory: Path) -> int | None:
    """A handle that holds the directory's lock until it is closed; None where another process has it or the directory is gone.

    A directory that was removed, perhaps made anew, between opening and locking counts as gone: that lock would guard nothing.
    Raises OSError for anything else.
    """
    try:
        handle = os.open(directory, os.O_RDONLY | os.O_DIRECTORY)
    except FileNotFoundError:
        return None
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(handle)
        return None
    except BaseException:
        os.close(handle)
        raise
    if not is_at(handle, directory):
        os.close(handle)
        return None
    return handle


def is_at(handle: int, directory: Path) -> bool:
    """Whether the open directory `handle` is what the path `directory` means now."""
    try:
        return os.path.samestat(os.fstat(handle), os.stat(directory))
    except FileNotFoundError:
        return False
