"""Lines to a file or to standard error, from a server that must not wait for either, nor die of either.

A caller's `write` puts a line into a bounded queue; one thread appends it to the file. What a slow, full, broken or closed place does not
take is dropped and counted, never raised. Knows nothing of what the lines say.
"""

from __future__ import annotations

import os
import sys
import threading
from collections import deque
from pathlib import Path

from arctool.errors import StorageError

STDERR = 2
CAPACITY = 4096
"""Lines that may wait. With lines of 2 KiB at most that is 8 MiB."""


class LogWriter:
    """Appends whole lines to a descriptor. `path`: where it is open, None if it is not ours to close or to reopen.

    Any thread may write. `open_log` makes one.
    """

    def __init__(self, descriptor: int, path: Path | None = None, *, capacity: int = CAPACITY) -> None:
        self._descriptor = descriptor
        self._path = path
        self._capacity = capacity
        self._lines: deque[str] = deque()
        self._wake = threading.Condition()
        self._closed = False
        self._reopen = False
        self._torn = False
        self._dropped = 0
        self._thread = threading.Thread(target=self._serve, name="arctool-log", daemon=True)
        self._thread.start()

    @property
    def dropped(self) -> int:
        """Lines that were not written."""
        return self._dropped

    def write(self, line: str) -> None:
        """Queue one line, without its end. Returns at once and never raises."""
        with self._wake:
            if self._closed or len(self._lines) >= self._capacity:
                self._dropped += 1
                return
            self._lines.append(line)
            self._wake.notify()

    def reopen(self) -> None:
        """Open the path anew before the next line: whoever rotates logs has moved the old file away. Safe in a signal handler."""
        self._reopen = True

    def close(self, timeout: float = 2.0) -> None:
        """Write what waits, as far as the place takes it within `timeout` seconds, and take no more. Safe to call twice."""
        with self._wake:
            self._closed = True
            self._wake.notify()
        self._thread.join(timeout)
        with self._wake:
            self._dropped += len(self._lines)
            self._lines.clear()

    # What follows runs in the writer's thread.

    def _serve(self) -> None:
        while True:
            with self._wake:
                while not self._lines and not self._closed:
                    self._wake.wait()
                if not self._lines:
                    break
                line = self._lines.popleft()
            if not self._append(line):
                with self._wake:
                    self._dropped += 1
        if self._path is not None:
            os.close(self._descriptor)

    def _append(self, line: str) -> bool:
        if self._reopen:
            self._open_anew()
        # A line that a full disk has cut off must not swallow the next one.
        data = b"\n" * self._torn + line.replace("\n", "\\n").encode("utf-8", "backslashreplace") + b"\n"
        begun = False
        try:
            while data:
                data = data[os.write(self._descriptor, data) :]
                begun = True
        except OSError:
            self._torn = begun or self._torn
            return False
        self._torn = False
        return True

    def _open_anew(self) -> None:
        """Goes on with the old file if there is no new one to be had."""
        self._reopen = False
        if self._path is None:
            return
        try:
            fresh = _open(self._path)
        except OSError:
            return
        os.close(self._descriptor)
        self._descriptor, self._torn = fresh, False


def open_log(path: Path | None) -> LogWriter:
    """A log that appends to `path`, or (None) writes to standard error. Raises StorageError if the file cannot be opened."""
    if path is None:
        return LogWriter(STDERR if sys.__stderr__ is not None else -1)  # a process may have been started without one
    try:
        return LogWriter(_open(path), path)
    except OSError as error:
        raise StorageError(f"{path}: cannot write the log there: {error.strerror}") from error


def _open(path: Path) -> int:
    # To open a pipe that nobody reads would wait for its reader; this refuses it. Later writes may wait: that is the thread's business.
    descriptor = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC | os.O_NONBLOCK, 0o640)
    os.set_blocking(descriptor, True)
    return descriptor
