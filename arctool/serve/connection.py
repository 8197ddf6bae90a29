"""One connection, below HTTP's meaning: bytes that are no HTTP, headers that are too large, and clients that never finish a request."""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import sys
import termios
from collections.abc import Callable
from typing import Any

import h11
from uvicorn.protocols.http.h11_impl import H11Protocol

from arctool.serve.problems import Problem, openai_body

MAX_HEADERS = 16 << 10
HEADER_SECONDS = 20.0
"""Until a new connection has sent the head of its first request, and from the first byte of a later one to the end of its head."""


class Alarm:
    """One timer, set or not."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._timer: asyncio.TimerHandle | None = None

    @property
    def is_set(self) -> bool:
        return self._timer is not None

    def set(self, seconds: float, function: Callable[..., None], *arguments: Any) -> None:
        self.cancel()
        self._timer = self._loop.call_later(seconds, function, *arguments)

    def cancel(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None


class Bounded(h11.Connection):
    """HTTP's state machine with a limit on heads that holds for those, too, that arrive in one piece."""

    def next_event(self) -> Any:
        event = super().next_event()
        if isinstance(event, h11.Request):
            size = len(event.target) + sum(len(name) + len(value) + len(b": \r\n") for name, value in event.headers)
            if size > MAX_HEADERS:
                raise h11.RemoteProtocolError("head too large", error_status_hint=431)
        return event


class Connection(H11Protocol):
    """uvicorn's HTTP/1.1, with errors in our words and clients that keep us waiting given up.

    `patience`: seconds for a client to take anything at all of what lies ready for it. `most`: connections at once; one more takes the
    place of whoever has been idle longest, and is refused if nobody is. Both are meant to be bound before uvicorn gets the class.
    """

    def __init__(self, *arguments: Any, patience: float = 60.0, most: int = 1 << 20, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self.conn = Bounded(h11.SERVER, MAX_HEADERS)
        self._patience = patience
        self._most = most
        self._idle_since = self.loop.time()
        self._silent = Alarm(self.loop)
        self._stuck = Alarm(self.loop)

    def connection_made(self, transport: Any) -> None:
        super().connection_made(transport)
        self._silent.set(HEADER_SECONDS, self._give_up)
        if len(self.connections) > self._most:
            self._make_room()

    def connection_lost(self, exc: Exception | None) -> None:
        self._silent.cancel()
        self._stuck.cancel()
        self._unset_keepalive_if_required()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        if not self._within_a_head():
            self._silent.cancel()
        elif not self._silent.is_set:
            self._silent.set(HEADER_SECONDS, self._give_up)
        # uvicorn stops reading when a request arrives before the last one was answered, and would not see that the client leaves.
        if self.conn.their_state is h11.DONE and len(self.conn.trailing_data[0]) <= MAX_HEADERS:
            self.flow.resume_reading()

    def on_response_complete(self) -> None:
        self._idle_since = self.loop.time()
        super().on_response_complete()

    def pause_writing(self) -> None:
        super().pause_writing()
        self._stuck.set(self._patience, self._drop, self._untaken())

    def resume_writing(self) -> None:
        super().resume_writing()
        self._stuck.cancel()

    def shutdown(self) -> None:
        if self.idle:
            self.transport.abort()  # TLS would take leave, and a client that sleeps would not answer
        else:
            super().shutdown()

    def timeout_keep_alive_handler(self) -> None:
        super().timeout_keep_alive_handler()
        if self.transport.get_write_buffer_size():  # closing would wait until the client has taken it
            self.transport.abort()

    def _make_room(self) -> None:
        idle = [link for link in self.connections if isinstance(link, Connection) and link.idle]
        oldest = min(idle, key=lambda link: link._idle_since, default=self)
        if oldest is self:
            self._say(Problem(503, "too many connections; try again", "overloaded_error", headers={"Retry-After": "1"}))
        else:
            oldest.transport.abort()

    @property
    def idle(self) -> bool:
        """Whether nothing was asked that is not answered, and nobody is about to be told something."""
        return self._within_a_head() and not self.transport.is_closing() and not self.transport.get_write_buffer_size()

    def _drop(self, before: int) -> None:
        """Give a client up that has taken nothing since there were `before` bytes for it."""
        left = self._untaken()
        if left < before:
            self._stuck.set(self._patience, self._drop, left)
        else:
            self.transport.abort()

    def _untaken(self) -> int:
        """Bytes for the client that are still here. The kernel holds megabytes of them, and takes more only in large pieces: whoever reads
        slowly would look, from our buffer alone, like one who does not read."""
        link = self.transport.get_extra_info("socket")
        queued = 0
        with contextlib.suppress(OSError):
            queued = int.from_bytes(fcntl.ioctl(link.fileno(), termios.TIOCOUTQ, bytes(4)), sys.byteorder)
        return self.transport.get_write_buffer_size() + queued

    def send_400_response(self, msg: str) -> None:
        """Called where the bytes are no HTTP request that we take."""
        error = sys.exc_info()[1]
        large = isinstance(error, h11.RemoteProtocolError) and error.error_status_hint == 431
        if large:
            problem = Problem(431, f"headers: expected at most {MAX_HEADERS} bytes", code="headers_too_large")
        else:
            problem = Problem(400, "this is no HTTP/1.1 request", code="bad_request")
        self._say(problem)

    def _say(self, problem: Problem) -> None:
        body = openai_body(problem)
        headers = [(b"content-type", b"application/json"), (b"content-length", str(len(body)).encode()), (b"connection", b"close")]
        headers += [(name.encode(), value.encode()) for name, value in problem.headers.items()]
        if self.conn.our_state in (h11.IDLE, h11.SEND_RESPONSE):
            for event in (h11.Response(status_code=problem.status, headers=headers), h11.Data(data=body), h11.EndOfMessage()):
                self.transport.write(self.conn.send(event) or b"")
        self.transport.close()

    def _give_up(self) -> None:
        if self._within_a_head() and not self.transport.is_closing():
            self._say(Problem(408, f"no request arrived within {HEADER_SECONDS:g} seconds", code="header_timeout"))

    def _within_a_head(self) -> bool:
        """Whether the next request has not arrived, or only a part of its head."""
        return self.conn.their_state is h11.IDLE
