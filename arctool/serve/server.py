"""The life of a server: take the port, answer while the model loads, serve, drain, leave with an exit code that says how it went."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from types import FrameType
from typing import Any

import numba
import uvicorn

import arctool
from arctool.errors import ArctoolError
from arctool.run.async_engine import AsyncEngine
from arctool.run.llm import LLM
from arctool.run.sampling.params import SamplingParams
from arctool.serve.app import create_app
from arctool.serve.connection import MAX_HEADERS, Connection
from arctool.serve.listening import ACCEPTS, WAITING_OUTSIDE, listen, most_connections
from arctool.serve.metrics import Metrics
from arctool.serve.model_files import ModelFiles
from arctool.serve.service import Door, ModelFacts, Service
from arctool.serve.settings import ServeOptions
from arctool.serve.status import Status, report_schedule
from arctool.serve.tls import check_tls
from arctool.serve.tracing import Tracing

LOOK_SECONDS = 1.0
"""Between two looks at the engine and the model's files."""
GRACE_SECONDS = 5
"""What the step under way gets to end after the time to drain, and connections then to take what was written for them."""
HURRY_SECONDS = 1
"""What the step under way gets to end when nobody wants to wait any more."""
IDLE_SECONDS = 75
"""Until a connection that is kept open for further requests is closed; longer than clients keep theirs in a pool."""
WARM_TOKENS = 40
"""A prompt that meets the kernels of prompts; what follows it meets those of single tokens and the sampler."""


class ServerFailed(ArctoolError):
    """A server that had to leave: its engine failed or stands still."""


class EngineStuck(ServerFailed):
    """So did this one, and its engine's thread is still in a step that does not end: it could hold up the interpreter's own end, too."""


@dataclass(frozen=True)
class Loaded:
    """A model, the facts that clients may know about it, and its files."""

    llm: LLM
    facts: ModelFacts
    files: ModelFiles


def serve(
    load: Callable[[], Loaded],
    options: ServeOptions,
    *,
    say: Callable[[str], None],
    write_log: Callable[[str], None] = lambda _: None,
    log_dropped: Callable[[], int] | None = None,
    tracing: Tracing | None = None,
) -> None:
    """Serve until a signal or a fault ends it. `say` takes lines for the operator, `write_log` those of the access log, of which
    `log_dropped` were lost.

    Raises what `load` raises, UsageError, and ServerFailed where the server could not go on; EngineStuck: leave by `os._exit`.
    """
    with contextlib.closing(listen(options.host, options.port)) as door:
        server = Server(options, load, say, write_log, log_dropped, tracing)
        server.run(sockets=[door])
    if server.failure is not None:
        raise server.failure


class Server(uvicorn.Server):
    """uvicorn with a model: loads it while the door already answers, watches it, and drains it on the first signal."""

    def __init__(
        self,
        options: ServeOptions,
        load: Callable[[], Loaded],
        say: Callable[[str], None],
        write_log: Callable[[str], None],
        log_dropped: Callable[[], int] | None = None,
        tracing: Tracing | None = None,
    ) -> None:
        self.options = options
        self.door = Door(options)
        self.failure: BaseException | None = None
        self._load = load
        self._tell = say
        self._log_dropped = log_dropped
        self._tracing = tracing
        self._begun = time.monotonic()
        self._tasks: list[asyncio.Task[None]] = []
        config = uvicorn.Config(
            create_app(self.door, write_log),
            http=partial(Connection, patience=options.send_timeout, most=most_connections()),  # type: ignore[arg-type]  # uvicorn only calls it
            ws="none",
            lifespan="off",
            loop="asyncio",
            log_config=None,
            access_log=False,
            server_header=False,
            proxy_headers=False,
            timeout_keep_alive=IDLE_SECONDS,
            h11_max_incomplete_event_size=MAX_HEADERS,
            timeout_graceful_shutdown=3 * GRACE_SECONDS,
            backlog=ACCEPTS,
            ssl_certfile=options.tls_certificate,
            ssl_keyfile=options.tls_key,
        )
        super().__init__(config)
        if options.tls_certificate is not None and options.tls_key is not None:
            check_tls(options.tls_certificate, options.tls_key)
        # Their words about strangers' bytes are the strangers' to choose, and clients that leave in the middle are no news.
        for name in ("uvicorn.error", "asyncio"):
            logging.getLogger(name).setLevel(logging.ERROR)
        config.load()

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """uvicorn raises the signal again once it is done; a server that drained as told has ended well."""
        if threading.current_thread() is not threading.main_thread():
            yield
            return
        before = {number: signal.signal(number, self.handle_exit) for number in (signal.SIGINT, signal.SIGTERM)}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """The first signal drains, the second does not wait."""
        if self.should_exit:
            self.force_exit = True
        self.should_exit = True

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        for door in sockets or []:
            door.listen(WAITING_OUTSIDE)  # uvicorn has made it ACCEPTS
        host, port = (sockets or [])[0].getsockname()[:2]
        scheme = "https" if self.options.tls_certificate else "http"
        self.address = f"{scheme}://{f'[{host}]' if ':' in host else host}:{port}"
        self._say(f"listening on {self.address}; loading the model")
        self._tasks.append(asyncio.create_task(self._open()))

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Answer on, if only with refusals, until what is under way has ended; then close the door."""
        self.door.draining = True
        ended = await self._stop_engine()
        late = asyncio.ensure_future(self._cut_off(GRACE_SECONDS))
        await super().shutdown(sockets)
        late.cancel()
        await self._cut_off(0.0)
        if self.server_state.tasks:
            await asyncio.wait(self.server_state.tasks, timeout=HURRY_SECONDS)
        if self.door.service is not None:
            self.door.service.close()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        if not ended:
            self.failure = EngineStuck(str(self.failure or "the engine's last step does not end; the server has left without it"))
        elif self.failure is None:
            self._say("stopped")

    async def _open(self) -> None:
        """Load the model beside the event loop, then let requests in."""
        try:
            loaded = await in_thread(lambda: _warm(self._load()))
            if self.should_exit:
                return
            engine = AsyncEngine(loaded.llm, max_queued=self.options.max_queued)
            facts = loaded.facts
            metrics = Metrics(
                engine.telemetry,
                loaded.llm.registry.engagement,
                facts.name,
                engine.clock,
                max_model_len=facts.max_model_len,
                log_dropped=self._log_dropped,
            )
            metrics.started(engine.clock() - self._begun)
            status = Status(
                engine.telemetry,
                model=facts.name,
                version=arctool.__version__,
                max_model_len=facts.max_model_len,
                ready=lambda: not self.door.draining and self.door.fault is None,
            )
            service = Service(loaded.llm, self.options, facts, metrics, status, engine, self._tracing)
        except asyncio.CancelledError:  # the server leaves before there is a model
            raise
        except BaseException as error:
            self._fail(error)
            return
        self.door.service = service
        for line in introduction(service, self.address):
            self._say(line)
        self._tasks.append(asyncio.create_task(self._watch(service, loaded.files)))
        if self.options.schedule_every:
            self._tasks.append(asyncio.create_task(report_schedule(status, self.options.schedule_every, self._say)))

    def _fail(self, error: BaseException) -> None:
        """Leave because of `error`: no more requests, an end for those under way, and a word for whoever started us."""
        self.failure = error
        self.door.fault = f"the server is leaving: {error}"
        self.should_exit = True

    async def _watch(self, service: Service, files: ModelFiles) -> None:
        """Look after the engine and the model's files until one of them fails."""
        told = None
        while self.failure is None:
            await asyncio.sleep(LOOK_SECONDS)
            engine = service.engine
            if not engine.healthy and not self.should_exit:
                self._fail(_engine_failed(engine))
            elif engine.clock() - engine.last_tick > self.options.watchdog:
                self._fail(ServerFailed(f"the engine has not finished a step for {self.options.watchdog:g} s; start the server again"))
            elif (name := files.changed()) is not None and name != told:
                told = name
                self._say(f"note: {name} has changed on the disk; what was loaded is served until the next start")

    async def _stop_engine(self) -> bool:
        """Let the engine finish what it can in time; False if its thread does not end."""
        service = self.door.service
        if service is None:
            return True
        engine, drain = service.engine, self.options.drain_timeout
        if engine.unfinished and drain and not self._in_a_hurry:
            self._say(f"finishing {engine.unfinished} requests, for {drain:g} s at most; a second Ctrl-C ends them now")
        stopping = asyncio.ensure_future(engine.stop(drain, GRACE_SECONDS))
        while not stopping.done() and not self._in_a_hurry:
            await asyncio.wait((stopping,), timeout=0.05)
        ended = stopping.result() if stopping.done() else await engine.stop(0.0, HURRY_SECONDS)
        stopping.cancel()
        if self.failure is None and engine.fault is not None:
            self._fail(_engine_failed(engine))
        return ended

    @property
    def _in_a_hurry(self) -> bool:
        """Whether what is under way gets no more time."""
        return self.force_exit or self.failure is not None

    async def _cut_off(self, seconds: float) -> None:
        """After so long end every connection, whatever it has not taken yet."""
        await asyncio.sleep(seconds)
        for connection in list(self.server_state.connections):
            connection.transport.abort()

    def _say(self, line: str) -> None:
        """Tell the operator. Nobody may be listening, or the disk be full: no reason to fall silent to clients, too."""
        with contextlib.suppress(OSError, ValueError):
            self._tell(line)


def _engine_failed(engine: AsyncEngine) -> ServerFailed:
    return ServerFailed(f"the engine has failed: {engine.fault or 'its thread has ended'}; start the server again")


def _warm(loaded: Loaded) -> Loaded:
    """Run what the first request would otherwise wait for."""
    length = max(1, min(WARM_TOKENS, loaded.facts.max_model_len - 2))
    loaded.llm.generate([[0] * length], SamplingParams(max_tokens=2, ignore_eos=True, cache_salt="arctool warm-up"))
    loaded.llm.engine.scheduler.count_anew()
    return loaded


async def in_thread(work: Callable[[], Any]) -> Any:
    """`work()` in a thread that a leaving process does not wait for; it counts kernels' threads like this one."""
    loop, threads = asyncio.get_running_loop(), numba.get_num_threads()
    result: asyncio.Future[Any] = loop.create_future()

    def settle(value: Any, error: BaseException | None) -> None:
        if not result.done():
            result.set_exception(error) if error is not None else result.set_result(value)

    def run() -> None:
        numba.set_num_threads(threads)
        value, failed = None, None
        try:
            value = work()
        except BaseException as error:
            failed = error
        with contextlib.suppress(RuntimeError):  # the loop has closed: nobody waits
            loop.call_soon_threadsafe(settle, value, failed)

    threading.Thread(target=run, name="arctool-load", daemon=True).start()
    return await result


def introduction(service: Service, address: str) -> list[str]:
    """What an operator wants to know once the model is there."""
    facts, options = service.facts, service.options
    bits = "not quantised" if facts.bits_per_weight is None else f"{facts.bits_per_weight:g} bits a weight"
    formats = ", ".join(f"{count} × {label}" for label, count in facts.formats.items())
    at_once = facts.kv_tokens // facts.max_model_len
    lines = [
        f"model {facts.name}: {bits}{f' ({formats})' if formats else ''}",
        f"context {facts.max_model_len} tokens; cache {facts.kv_tokens} tokens of {facts.kv_dtype}, {at_once} full contexts; "
        f"at most {service.llm.engine.max_seqs} sequences at once, {options.max_queued} requests waiting",
        f"tools: {service.talk.tools_by}; reasoning: {service.talk.reasoning_by}; "
        f"keys: {len(options.api_keys) or 'none, anyone who reaches the port may ask'}",
        f"ready: {address} (chat page), {address}/v1 (OpenAI), {address}/metrics; Ctrl-C ends it",
    ]
    if not options.api_keys and not options.loopback:
        lines.append("warning: the port is open to other machines and no --api-key is set")
    return lines
