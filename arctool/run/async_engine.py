"""The engine for many tasks at once: one thread owns it, asyncio tasks ask that thread. Knows neither HTTP nor the model.

    task ── submit / abort ──► commands ──► thread: commands, step, commands, step, ... ──► updates ──► each task's own queue

The thread sleeps while there is nothing to do. Commands are carried out between steps, so an abort takes effect within one step.
"""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from collections import deque
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numba

from arctool.errors import ArctoolError, RequestError
from arctool.run.engine import Engine
from arctool.run.requests import Checked, Completion, Update
from arctool.run.sampling.params import SamplingParams
from arctool.run.telemetry import Telemetry

if TYPE_CHECKING:
    from arctool.run.llm import LLM, Prompt

_log = logging.getLogger(__name__)


class EngineBusy(ArctoolError):
    """The queue is as long as it may get. Try again later."""


class EngineStopped(ArctoolError):
    """The engine takes no more requests: it is being shut down, or its thread has failed."""


@dataclass(eq=False)
class Stream:
    """One request's updates, for one task. Iterate over it; `close` (or leaving the task) aborts what is left.

    `samples`: those whose end the task has not read; `untold`: those whose end the engine's thread has not sent.
    """

    engine: AsyncEngine
    name: str
    samples: int
    untold: int
    loop: asyncio.AbstractEventLoop
    request_id: int | None = None
    received: asyncio.Queue[Update | Exception] = field(default_factory=asyncio.Queue)
    accepted: asyncio.Event = field(default_factory=asyncio.Event)
    refusal: Exception | None = None

    def __aiter__(self) -> AsyncIterator[Update]:
        return self._updates()

    async def _updates(self) -> AsyncIterator[Update]:
        """Updates as they come. Raises EngineStopped if the engine fails."""
        try:
            while self.samples:
                item = await self.received.get()
                if isinstance(item, Exception):
                    self.samples = 0
                    raise item
                self.samples -= item.completion is not None
                yield item
        finally:
            self.close()

    def close(self) -> None:
        """Abort the request if it has not ended. Safe to call twice."""
        if self.samples:
            self.samples = 0
            self.engine._abort(self)


class AsyncEngine:
    """Serves asyncio tasks of any number of event loops from one `LLM`, which nobody else may use meanwhile.

    `max_queued`: requests that may wait to be started; one more is refused with EngineBusy. None: any number.
    """

    def __init__(self, llm: LLM, *, max_queued: int | None = None, clock: Callable[[], float] = time.monotonic) -> None:
        self.llm = llm
        self._engine: Engine = llm.engine
        self._max_queued = max_queued
        self._clock = clock
        self._commands: deque[Callable[[], None]] = deque()
        self._wake = threading.Condition()
        self._streams: dict[int, Stream] = {}
        self._names: dict[str, Stream] = {}
        self._submitted = 0
        self._count = 0
        self._accepting = True
        self._stop = False
        self._fault: BaseException | None = None
        self._last_tick = clock()
        self._threads = numba.get_num_threads()
        self._thread = threading.Thread(target=self._serve, name="arctool-engine", daemon=True)
        self._thread.start()

    @property
    def healthy(self) -> bool:
        """Whether the engine's thread lives. `last_tick` says whether it moves."""
        return self._fault is None and self._thread.is_alive()

    @property
    def last_tick(self) -> float:
        """When the thread last finished a step or found itself idle, by the engine's clock; an idle engine is never late."""
        return self._clock() if self._idle() else self._last_tick

    @property
    def unfinished(self) -> int:
        """Requests that were accepted and have not ended."""
        return len(self._names)

    def telemetry(self) -> Telemetry:
        """What runs, waits and was done."""
        return self._engine.telemetry()

    async def submit(self, prompt: Prompt, params: SamplingParams | None = None, request_id: str | None = None) -> Stream:
        """Queue a request; returns once the engine has accepted it.

        Raises RequestError, by field, for one that cannot be served, or whose `request_id` is in use; EngineBusy; EngineStopped.
        """
        params = SamplingParams() if params is None else params
        self._check_admission()
        request = await asyncio.to_thread(lambda: self._engine.check(self.llm.encode(prompt), params))
        with self._wake:
            self._check_admission()
            self._count += 1
            name = f"request-{self._count}" if request_id is None else request_id
            if name in self._names:
                raise RequestError(f"request_id: {name!r:.60} is in use by a request that has not ended")
            stream = self._names[name] = Stream(self, name, params.n, params.n, asyncio.get_running_loop())
            self._submitted += 1
            self._command(lambda: self._add(stream, request))
        try:
            await stream.accepted.wait()
        except BaseException:
            stream.close()
            raise
        if stream.refusal is not None:
            stream.samples = 0
            raise stream.refusal
        return stream

    async def generate(self, prompt: Prompt, params: SamplingParams | None = None, request_id: str | None = None) -> AsyncIterator[Update]:
        """As `submit`, update by update. Closing the iterator, or cancelling the task that reads it, aborts the request."""
        stream = await self.submit(prompt, params, request_id)
        try:
            async for update in stream:
                yield update
        finally:
            stream.close()

    async def complete(self, prompt: Prompt, params: SamplingParams | None = None, request_id: str | None = None) -> list[Completion]:
        """The request's completions, by sample. Cancelling the task aborts it."""
        stream = await self.submit(prompt, params, request_id)
        try:
            done = [update.completion async for update in stream if update.completion is not None]
        finally:
            stream.close()
        return sorted(done, key=lambda completion: completion.index)

    def abort(self, request_id: str) -> bool:
        """End a request from anywhere; its reader gets completions that say so. False if no request has this name (any more)."""
        stream = self._names.get(request_id)
        if stream is None:
            return False
        with self._wake:
            self._command(lambda: self._cancel(stream, tell=True))
        return True

    async def stop(self, drain: float = 0.0) -> None:
        """Take no more requests, give those under way `drain` seconds, abort the rest (their readers are told), end the thread."""
        self._accepting = False
        end = self._clock() + drain
        while self.healthy and not self._idle() and (left := end - self._clock()) > 0:
            await asyncio.sleep(min(0.01, left))
        with self._wake:
            self._stop = True
            self._wake.notify_all()
        await asyncio.to_thread(self._thread.join)

    def _check_admission(self) -> None:
        if self._fault is not None:
            raise EngineStopped(f"the engine has failed: {type(self._fault).__name__}: {self._fault}; restart it")
        if not self._accepting:
            raise EngineStopped("the engine is shutting down and takes no more requests")
        waiting = self._submitted + self._engine.telemetry().waiting
        if self._max_queued is not None and waiting >= self._max_queued:
            raise EngineBusy(f"{waiting} requests are waiting, and no more than {self._max_queued} may; try again later")

    def _idle(self) -> bool:
        return not self._names and not self._commands

    def _command(self, command: Callable[[], None]) -> None:
        """Let the thread carry `command` out before its next step. The caller holds the lock."""
        self._commands.append(command)
        self._wake.notify_all()

    def _abort(self, stream: Stream) -> None:
        with self._wake:
            self._command(lambda: self._cancel(stream, tell=False))

    # What follows runs in the engine's thread.

    def _serve(self) -> None:
        numba.set_num_threads(self._threads)  # numba counts by thread: a new one would not have what this one's maker chose
        try:
            while self._take_commands():
                for update in self._engine.step():
                    self._deliver(update)
                self._last_tick = self._clock()
            for stream in list(self._streams.values()):
                self._cancel(stream, tell=True)
        except BaseException as error:  # a panic of a library's is no Exception, and this thread has nobody above it to tell
            _log.exception("the engine's thread has failed")
            self._end_all(error, EngineStopped(f"the engine has failed: {type(error).__name__}: {error}; restart it"))
        else:
            self._end_all(None, EngineStopped("the engine was shut down before it started the request"))

    def _take_commands(self) -> bool:
        """Carry out what was asked, sleeping while there is nothing to do; whether to go on."""
        with self._wake:
            while not (self._stop or self._commands or self._engine.has_work()):
                self._last_tick = self._clock()
                self._wake.wait()
            if self._stop:
                return False
        while self._commands:
            self._commands.popleft()()
        return True

    def _add(self, stream: Stream, request: Checked) -> None:
        with self._wake:
            self._submitted -= 1
        if stream.samples:  # else its task has gone already
            try:
                stream.request_id = self._engine.add(request)
                self._streams[stream.request_id] = stream
            except Exception as error:  # a fault of ours that is this request's alone: its task gets it, the engine lives
                stream.refusal = error
        if stream.request_id is None:
            self._names.pop(stream.name, None)
        self._call(stream, stream.accepted.set)

    def _cancel(self, stream: Stream, tell: bool) -> None:
        if stream.request_id is None or self._streams.get(stream.request_id) is not stream:
            return
        for completion in self._engine.cancel(stream.request_id):
            if tell:
                self._put(stream, Update(completion.request_id, (), "", completion, completion.index))
        self._forget(stream)

    def _deliver(self, update: Update) -> None:
        stream = self._streams.get(update.request_id)
        if stream is None:
            return  # somebody used the engine beside us
        if not self._put(stream, update):
            self._cancel(stream, tell=False)
        elif update.completion is not None:
            stream.untold -= 1
            if not stream.untold:
                self._forget(stream)

    def _forget(self, stream: Stream) -> None:
        if stream.request_id is not None:
            del self._streams[stream.request_id]
        self._names.pop(stream.name, None)

    def _end_all(self, fault: BaseException | None, error: EngineStopped) -> None:
        """Tell everyone who still waits for something, and everyone whose request was never looked at."""
        with self._wake:
            self._fault, self._accepting = fault, False
            streams = list(self._names.values())
            self._names.clear()
            self._streams.clear()
            self._commands.clear()
        for stream in streams:
            stream.refusal = error
            self._put(stream, error)
            self._call(stream, stream.accepted.set)

    def _put(self, stream: Stream, item: Update | Exception) -> bool:
        return self._call(stream, stream.received.put_nowait, item)

    def _call(self, stream: Stream, function: Callable[..., object], *arguments: Any) -> bool:
        """Call `function` in the stream's event loop; False if that is closed, and nobody is left to tell."""
        try:
            stream.loop.call_soon_threadsafe(function, *arguments)
        except RuntimeError:
            return False
        return True
