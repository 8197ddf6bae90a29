"""Holds a model before each step until the test lets it go on, so that a test sees what happens between two steps."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator

from live import until


class Pace:
    """Give it to `scripted` as `before_step`. Steps run freely, except within `held`.

    `begun`: steps that have begun since then, the one that is held included.
    """

    def __init__(self) -> None:
        self.begun = 0
        self._allowed = threading.Semaphore(0)
        self._held = False

    def __call__(self) -> None:
        self.begun += 1
        if self._held:
            self._allowed.acquire()

    @contextlib.contextmanager
    def held(self) -> Iterator[Pace]:
        """Hold every step. On leaving, whatever became of the test, all run freely again."""
        self.begun, self._held = 0, True
        try:
            yield self
        finally:
            self.run()

    def until_step(self, number: int) -> None:
        """Let steps end until step `number` has begun."""
        until(lambda: self.begun > 0)
        while self.begun < number:
            begun = self.begun
            self._allowed.release()
            until(lambda begun=begun: self.begun > begun)
        assert self.begun == number

    def end_step(self) -> None:
        """Let the step end that is held."""
        self._allowed.release()

    def run(self) -> None:
        """Hold nothing any more."""
        self._held = False
        self._allowed.release(2)
