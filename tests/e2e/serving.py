"""`arctool serve` as a process of its own: started, waited for, signalled, and never left behind."""

from __future__ import annotations

import contextlib
import os
import re
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from zygote import Child, Outcome, Zygote

SECONDS = 60.0
"""Until a test gives a server up."""


class Serving:
    """A server that runs. `said`: its standard error so far."""

    def __init__(self, child: Child) -> None:
        self._child = child
        self.pid = child.pid
        self.ended = False

    @property
    def said(self) -> str:
        return self._child.said("stderr")

    @property
    def url(self) -> str:
        found = re.search(r"listening on (https?://\S+:(\d+));", self.said)
        assert found, self.said
        return found[1]

    @property
    def port(self) -> int:
        return int(self.url.rsplit(":", 1)[1])

    def until_said(self, words: str) -> None:
        self.until(lambda: words in self.said or self.gone, f"it never said {words!r}")
        assert words in self.said, self.said

    def signal(self, number: int) -> None:
        os.kill(self.pid, number)

    def wait(self) -> Outcome:
        """Its end, which must come."""
        self.until(lambda: self.gone, "it does not end")
        self.ended = True
        return self._child.wait()

    @property
    def gone(self) -> bool:
        """Whether it has ended; until its parent asks, it lies there as a zombie."""
        return Path(f"/proc/{self.pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"

    def until(self, condition: Callable[[], bool], complaint: str) -> None:
        end = time.monotonic() + SECONDS
        while not condition():
            assert time.monotonic() < end, f"{complaint}: {self.said}"
            time.sleep(0.01)


def attempt(zygote: Zygote, *argv: str | Path, cwd: Path | None = None, hook: str = "") -> Outcome:
    """How `arctool serve argv` ends by itself; one that serves instead is killed, and shows as such."""
    child = zygote.start("serve", *argv, cwd=cwd, hook=hook)
    server = Serving(child)
    server.until(lambda: server.gone or "ready: http" in server.said, "it neither ends nor serves")
    if not server.gone:
        child.kill()
    return child.wait()


@contextlib.contextmanager
def serving(zygote: Zygote, *argv: str | Path, hook: str = "", ready: bool = True) -> Iterator[Serving]:
    """`arctool serve argv --port 0`, once it is ready unless told otherwise; killed if the test has not waited for its end."""
    child = zygote.start("serve", *argv, "--port", "0", hook=hook)
    server = Serving(child)
    try:
        server.until_said("ready: http" if ready else "listening on")
        yield server
    finally:
        if not server.ended:
            child.kill()
            child.wait()
