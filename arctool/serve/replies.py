"""Answers as bytes: JSON, errors, and streams of server-sent events that know when nobody listens any more."""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
from collections.abc import AsyncGenerator, Awaitable, Callable, Coroutine, Mapping
from typing import Any, TypeVar

from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from arctool.serve.access_log import note_of
from arctool.serve.problems import Problem, body_for, of_error

_log = logging.getLogger(__name__)

T = TypeVar("T")

STREAM_HEADERS = ((b"content-type", b"text/event-stream; charset=utf-8"), (b"cache-control", b"no-cache"), (b"x-accel-buffering", b"no"))
COMMENT = b": keep-alive\n\n"
MAX_DISCARDED = 64 << 20
DISCARD_SECONDS = 2.0
DONE = b"data: [DONE]\n\n"
LINE_ENDS = "\x85\u2028\u2029"
"""Those that JSON does not escape."""


class ClientGone(Exception):
    """Whoever asked has left; there is nobody to tell."""


def dumps(value: Any) -> bytes:
    """Compact JSON in UTF-8. What is no Unicode (half a surrogate pair) becomes a question mark: an answer must never fail on its text."""
    return json.dumps(value, ensure_ascii=False, separators=(",", ":"), allow_nan=False).encode("utf-8", "replace")


def json_reply(value: Any, status: int = 200, headers: Mapping[str, str] | None = None) -> Response:
    return Response(dumps(value), status, dict(headers or {}), "application/json")


def problem_reply(scope: Scope, problem: Problem) -> Response:
    """An error as an answer to the request of `scope`; log and metrics are told."""
    tell(scope, problem)
    return Response(body_for(scope["path"], problem), problem.status, dict(problem.headers), "application/json")


def tell(scope: Scope, problem: Problem) -> None:
    """Note for the access log what went wrong, and count what was refused: faults of the request, and what there was no room for."""
    reason = problem.code or problem.type
    note_of(scope).error = reason
    if problem.status < 500 or problem.status == 503:
        scope.get("state", {}).get("refused", _uncounted)(reason)


def _uncounted(reason: str) -> None:
    pass


async def refuse(scope: Scope, receive: Receive, send: Send, problem: Problem) -> None:
    """Answer with a problem in front of the application, before the body was read.

    What the client still sends is thrown away first, within bounds: a connection that is closed on unread bytes is reset, and the
    client would never see the answer. One that waits for leave to send its body gets none.
    """
    expects = any(name == b"expect" for name, _ in scope["headers"])
    if scope["method"] == "POST" and not expects:
        await _throw_away(receive)
    await problem_reply(scope, problem)(scope, receive, send)


async def _throw_away(receive: Receive) -> None:
    left = MAX_DISCARDED
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(DISCARD_SECONDS):
            while left > 0:
                message = await receive()
                left -= len(message.get("body", b""))
                if not message.get("more_body", False):
                    return


def event(value: Any, name: str | None = None) -> bytes:
    """One server-sent event. What Unicode calls the end of a line is escaped: many readers of events would break there."""
    head = b"" if name is None else f"event: {name}\n".encode()
    data = dumps(value)
    for character in LINE_ENDS:
        data = data.replace(character.encode(), f"\\u{ord(character):04x}".encode())
    return head + b"data: " + data + b"\n\n"


async def told(events: AsyncGenerator[bytes, None], scope: Scope, last: bytes = DONE) -> AsyncGenerator[bytes, None]:
    """`events`, then `last`. What fails on the way becomes an event that says so, and nothing follows it."""
    path = scope["path"]
    try:
        async for data in events:
            yield data
    except Exception as error:
        problem = problem_in_stream(path, error)
        note_of(scope).error = problem.code or problem.type
        yield (b"event: error\n" if path.startswith("/v1/messages") else b"") + b"data: " + body_for(path, problem) + b"\n\n"
    else:
        if last:
            yield last
    finally:
        await events.aclose()


def problem_in_stream(path: str, error: Exception) -> Problem:
    """What the reader of a stream is told of `error`. Call it where the error is handled: a fault of ours is logged."""
    problem = of_error(error)
    if problem is None:
        _log.exception("a stream of %s failed", path)
        problem = Problem(500, "internal error; the server's log has more", "internal_error")
    return problem


async def until_gone(request: Request, work: Coroutine[Any, Any, T]) -> T:
    """The result of `work`, which is cancelled as soon as the client leaves; then raises ClientGone."""
    task = asyncio.ensure_future(work)
    leaving = asyncio.ensure_future(_disconnected(request.receive))
    try:
        await asyncio.wait((task, leaving), return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            raise ClientGone
        return task.result()
    finally:
        await _end(task, leaving)


async def _disconnected(receive: Callable[[], Awaitable[Any]]) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


async def _end(*tasks: asyncio.Future[Any]) -> None:
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


class EventStream(Response):
    """A stream of events. Between events that take longer than `keep_alive` it sends comments.

    `close` is called as soon as the client has left or all is said, before anything else is awaited: what makes the events may stand
    anywhere then, and a generator that was never begun has no `finally` to run.
    """

    def __init__(self, events: AsyncGenerator[bytes, None], keep_alive: float, close: Callable[[], None]) -> None:
        super().__init__(None, 200)
        self._events = events
        self._keep_alive = keep_alive
        self._close = close

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        writing = asyncio.ensure_future(self._write(send))
        leaving = asyncio.ensure_future(_disconnected(receive))
        try:
            await asyncio.wait((writing, leaving), return_when=asyncio.FIRST_COMPLETED)
            if writing.done():
                writing.result()
        finally:
            self._close()
            await _end(writing, leaving)
            await self._events.aclose()

    async def _write(self, send: Send) -> None:
        loop = asyncio.get_running_loop()
        last = loop.time()

        async def put(body: bytes) -> None:
            nonlocal last
            await send({"type": "http.response.body", "body": body, "more_body": True})
            last = loop.time()

        async def ping() -> None:
            while True:
                await asyncio.sleep(last + self._keep_alive - loop.time())
                if loop.time() >= last + self._keep_alive:
                    await put(COMMENT)

        await send({"type": "http.response.start", "status": 200, "headers": list(STREAM_HEADERS)})
        pinging = asyncio.ensure_future(ping())
        try:
            async for data in self._events:
                await put(data)
        finally:
            await _end(pinging)
        await send({"type": "http.response.body", "body": b"", "more_body": False})
