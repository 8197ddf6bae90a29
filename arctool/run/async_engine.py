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
from collections.abc import AsyncIterator, Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, TypeVar

import numba

from arctool.errors import ArctoolError, RequestError
from arctool.run.engine import Engine
from arctool.run.requests import Checked, Completion, Update
from arctool.run.sampling.params import SamplingParams
from arctool.run.telemetry import Telemetry

if TYPE_CHECKING:
    from arctool.run.llm import LLM, Prompt

_log = logging.getLogger(__name__)

T = TypeVar("T")

ENCODERS = 2
COMPILERS = 2
"""Threads that look at requests before the engine sees them. Constraints have their own: one may take seconds to compile."""
POLL_SECONDS = 0.01
"""Between two looks at a thread whose end is waited for."""


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
        self._entering = 0
        self._encoders = ThreadPoolExecutor(ENCODERS, "arctool-encode")
        self._compilers = ThreadPoolExecutor(COMPILERS, "arctool-compile")
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
    def fault(self) -> str | None:
        """What the engine's thread died of, in one line."""
        return None if self._fault is None else f"{type(self._fault).__name__}: {self._fault}"

    @property
    def last_tick(self) -> float:
        """When the thread last finished a step or found itself idle, by the engine's clock; an idle engine is never late."""
        return self._clock() if self._idle() else self._last_tick

    @property
    def unfinished(self) -> int:
        """Requests that were accepted and have not ended."""
        return len(self._names)

    @property
    def clock(self) -> Callable[[], float]:
        """The clock of `last_tick`."""
        return self._clock

    async def beside(self, work: Callable[[], T]) -> T:
        """`work()` in one of the threads that encode requests: for what takes too long for an event loop. Raises EngineStopped."""
        return await self._within(self._encoders, work)

    def telemetry(self) -> Telemetry:
        """What runs, waits and was done."""
        return self._engine.telemetry()

    async def submit(self, prompt: Prompt, params: SamplingParams | None = None, request_id: str | None = None) -> Stream:
        """Queue a request; returns once the engine has accepted it.

        Raises RequestError, by field, for one that cannot be served, or whose `request_id` is in use; EngineBusy; EngineStopped.
        """
        params = SamplingParams() if params is None else params
        loop = asyncio.get_running_loop()
        with self._wake:
            self.check_admission()
            self._entering += 1
        try:
            ids = await self._within(self._encoders, lambda: self.llm.encode(prompt))
            pool = self._encoders if self._engine.is_quick(params) else self._compilers
            request = await self._within(pool, lambda: self._engine.check(ids, params))
            with self._wake:
                self._check_accepting()
                self._count += 1
                name = f"request-{self._count}" if request_id is None else request_id
                if name in self._names:
                    raise RequestError(f"request_id: {name!r:.60} is in use by a request that has not ended")
                stream = self._names[name] = Stream(self, name, params.n, params.n, loop)
                self._command(lambda: self._add(stream, request))
        except BaseException:
            with self._wake:
                self._entering -= 1
            raise
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

    async def stop(self, drain: float = 0.0, patience: float | None = None) -> bool:
        """Take no more requests, give those under way `drain` seconds, abort the rest (their readers are told), end the thread.

        Another call may cut the time short. `patience`: seconds that the step under way then gets to end, None: as many as it needs. False
        if it did not: readers have got EngineStopped, and the thread is left to itself.
        """
        self._accepting = False
        end = self._clock() + drain
        while self.healthy and not self._stop and not self._idle() and self._clock() < end:
            await asyncio.sleep(POLL_SECONDS)
        with self._wake:
            self._stop = True
            self._wake.notify_all()
        self._encoders.shutdown(wait=False, cancel_futures=True)
        self._compilers.shutdown(wait=False, cancel_futures=True)
        end = float("inf") if patience is None else self._clock() + patience
        while self._thread.is_alive():
            if self._clock() >= end:
                self._end_all(None, EngineStopped("the engine was shut down in a step that does not end"))
                return False
            await asyncio.sleep(POLL_SECONDS)
        return True

    def check_admission(self, others: int = 0) -> None:
        """Raise EngineBusy if as many wait as may, EngineStopped if nobody is let in. `others`: who is on the way here.

        Who is still being looked at waits too, unless there is room to run at once.
        """
        self._check_accepting()
        if self._max_queued is None:
            return
        now = self._engine.telemetry()
        waiting = now.waiting + max(0, self._entering + others - max(0, self._engine.max_seqs - now.running))
        if waiting >= self._max_queued:
            raise EngineBusy(f"{waiting} requests are waiting, and no more than {self._max_queued} may; try again later")

    def _check_accepting(self) -> None:
        if self._fault is not None:
            raise EngineStopped(f"the engine has failed: {self.fault}; restart it")
        if not self._accepting:
            raise EngineStopped("the engine is shutting down and takes no more requests")

    async def _within(self, pool: ThreadPoolExecutor, work: Callable[[], T]) -> T:
        """`work()` in a thread of `pool`. Raises EngineStopped if the pool was closed before it began."""
        try:
            future = pool.submit(work)
        except RuntimeError:
            self._check_accepting()
            raise
        try:
            return await asyncio.wrap_future(future)
        except asyncio.CancelledError:
            task = asyncio.current_task()
            if task is None or not task.cancelling():  # nobody cancelled us: the work was
                raise EngineStopped("the engine is shutting down and takes no more requests") from None
            raise

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
                self._deliver(self._engine.step())
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
                self._wake.wait()
            self._last_tick = self._clock()  # an idle engine is never late, however long it was idle
            if self._stop:
                return False
        while self._commands:
            self._commands.popleft()()
        return True

    def _add(self, stream: Stream, request: Checked) -> None:
        with self._wake:
            self._entering -= 1
        if stream.samples:  # else its task has gone already
            try:
                stream.request_id = self._engine.add(request)
                self._streams[stream.request_id] = stream
            except Exception as error:  # a fault of ours that is this request's alone: its task gets it, the engine lives
                stream.refusal = error
        if stream.request_id is None:
            self._names.pop(stream.name, None)
        _in_loop(stream.loop, stream.accepted.set)

    def _cancel(self, stream: Stream, tell: bool) -> None:
        if stream.request_id is None or self._streams.get(stream.request_id) is not stream:
            return
        for update in self._engine.cancel(stream.request_id):
            if tell:
                self._put(stream, update)
        self._forget(stream)

    def _deliver(self, updates: Sequence[Update]) -> None:
        """Hand a step's updates to their readers, with one call for each event loop: waking one up costs more than its news."""
        loops: dict[asyncio.AbstractEventLoop, list[tuple[Stream, Update]]] = {}
        for update in updates:
            stream = self._streams.get(update.request_id)
            if stream is not None:  # else somebody used the engine beside us
                loops.setdefault(stream.loop, []).append((stream, update))
        for loop, news in loops.items():
            told = _in_loop(loop, _put_all, news)
            for stream, update in news:
                if not told:
                    self._cancel(stream, tell=False)
                elif update.completion is not None:
                    stream.untold -= 1
                    if not stream.untold:
                        self._forget(stream)

    def _forget(self, stream: Stream) -> None:
        if stream.request_id is not None:
            self._streams.pop(stream.request_id, None)
        self._names.pop(stream.name, None)

    def _end_all(self, fault: BaseException | None, error: EngineStopped) -> None:
        """Tell everyone who still waits for something, and everyone whose request was never looked at."""
        with self._wake:
            self._fault, self._accepting = self._fault or fault, False
            streams = list(self._names.values())
            self._names.clear()
            self._streams.clear()
            self._commands.clear()
        for stream in streams:
            stream.refusal = error
            self._put(stream, error)
            _in_loop(stream.loop, stream.accepted.set)

    def _put(self, stream: Stream, item: Update | Exception) -> bool:
        return _in_loop(stream.loop, stream.received.put_nowait, item)


def _put_all(news: Sequence[tuple[Stream, Update]]) -> None:
    for stream, update in news:
        stream.received.put_nowait(update)


def _in_loop(loop: asyncio.AbstractEventLoop, function: Callable[..., object], *arguments: Any) -> bool:
    """Call `function` in an event loop from another thread; False if that is closed, and nobody is left to tell."""
    try:
        loop.call_soon_threadsafe(function, *arguments)
    except RuntimeError:
        return False
    return True
