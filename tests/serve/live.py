"""A whole server on a real socket, in a thread of the test's process, so that a test can look behind the door too."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from arctool.run.llm import LLM
from arctool.serve.facts import facts_of
from arctool.serve.listening import listen
from arctool.serve.model_files import ModelFiles
from arctool.serve.server import Loaded, Server
from arctool.serve.service import Service
from arctool.serve.settings import ServeOptions

NAME = "tiny"


@dataclass
class Live:
    """A running server. `said`: its lines for the operator; `logged`: those of the access log."""

    server: Server
    url: str
    port: int
    said: list[str]
    logged: list[str]
    thread: threading.Thread = field(repr=False)

    @property
    def service(self) -> Service:
        assert self.server.door.service is not None
        return self.server.door.service

    def stop(self) -> None:
        """As the first signal does; returns when the server has left."""
        self.server.handle_exit(15, None)
        self.thread.join(60)
        assert not self.thread.is_alive()


@contextlib.contextmanager
def live(
    llm: LLM,
    *,
    files: Path = Path("/nonexistent"),
    load: Callable[[], None] = lambda: None,
    ready: bool = True,
    survives: bool = True,
    **options: Any,
) -> Iterator[Live]:
    """Serve `llm`; whatever the test does, at its end no request and no block may be left, unless the engine does not survive it.

    `load` is called in the loading thread first; `ready`: wait for its end.
    """

    def opened() -> Loaded:
        load()
        return Loaded(llm, facts_of(llm, files, chosen.model_name), ModelFiles(files))

    chosen = ServeOptions(**{"model_name": NAME, "port": 0, "drain_timeout": 5.0, **options})
    said: list[str] = []
    logged: list[str] = []
    door = listen(chosen.host, chosen.port)
    port = door.getsockname()[1]
    server = Server(chosen, opened, said.append, logged.append)
    faults: list[BaseException] = []

    def run() -> None:
        try:
            server.run(sockets=[door])
        except BaseException as error:
            faults.append(error)

    running = Live(server, f"http://127.0.0.1:{port}", port, said, logged, threading.Thread(target=run))
    running.thread.start()
    try:
        until(lambda: not ready or server.door.service is not None or server.failure is not None)
        if server.failure is not None:
            raise server.failure
        yield running
    finally:
        running.stop()
        door.close()
        assert not faults
        if survives:
            llm.engine.scheduler.check()
            assert llm.engine.telemetry().cache.owned == 0
            assert not llm.engine.has_work()


def until(condition: Any, seconds: float = 30.0) -> None:
    """Wait for something that other threads bring about."""
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "waited in vain"
        time.sleep(0.002)
