"""One JSON line for every HTTP request, once it is over; the request's id; and an answer where a handler fails.

Pure ASGI, and the outermost layer: bodies pass through frame by frame, and whatever escapes from the application, answered or not, is
logged here. Never logged: query strings, headers, bodies.
"""

from __future__ import annotations

import asyncio
import json
import logging
import re
import secrets
import time
from collections.abc import Awaitable, Callable, MutableMapping
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from typing import Any

from starlette.requests import ClientDisconnect

_log = logging.getLogger(__name__)

Message = MutableMapping[str, Any]
Scope = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
App = Callable[[Scope, Receive, Send], Awaitable[None]]

CLIENT_ID = re.compile(rb"[A-Za-z0-9._:/+=@-]{1,128}")
"""Request ids that a client may have echoed."""
LONGEST_TEXT = 256
"""Characters of whatever a client can choose, path, model or error, that get into a line."""
CLIENT_GONE = 499
"""Status of a request whose client left before there was any answer, as nginx writes it."""


@dataclass
class Note:
    """What handlers know of a request and the log wants: they find it as `note_of(scope)` and fill it in while they work."""

    model: str | None = None
    stream: bool | None = None
    prompt_tokens: int | None = None
    cached_tokens: int | None = None
    completion_tokens: int | None = None
    finish_reasons: list[str] = field(default_factory=list)
    ttft_ms: float | None = None
    error: str | None = None
    disconnected: bool = False


def note_of(scope: Scope) -> Note:
    """The request's note; one that nobody reads where there is no access log."""
    note = scope.get("state", {}).get("note")
    return note if isinstance(note, Note) else Note()


def request_id_of(scope: Scope) -> str:
    """The id under which the server's logs have the request; empty where there is no access log."""
    return str(scope.get("state", {}).get("request_id", ""))


class AccessLog:
    """The middleware. `write` takes a line without its end; `clock` is monotonic and measures; `wall` is only written down."""

    def __init__(
        self, app: App, write: Callable[[str], None], clock: Callable[[], float] = time.monotonic, wall: Callable[[], float] = time.time
    ) -> None:
        self._app = app
        self._write = write
        self._clock = clock
        self._wall = wall

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        exchange = Exchange(scope, receive, send, self._clock, self._wall())
        scope = {**scope, "state": {**scope.get("state", {}), "note": exchange.note, "request_id": exchange.id}}
        try:
            await self._app(scope, exchange.receive, exchange.send)
        except (asyncio.CancelledError, KeyboardInterrupt, SystemExit, GeneratorExit):
            exchange.note.error = exchange.note.error or "the server stopped"
            raise
        except BaseException as error:  # panics of libraries included
            if not (exchange.gone and isinstance(error, OSError | ClientDisconnect)):
                await self._answer(exchange, error)
        finally:
            self._write_down(exchange)

    async def _answer(self, exchange: Exchange, error: BaseException) -> None:
        """What went wrong is the log's to tell. A response that has begun ends here: the server closes its connection."""
        _log.error("request %s failed: %s %s", exchange.id, exchange.method, json.dumps(exchange.path), exc_info=error)
        exchange.note.error = exchange.note.error or type(error).__name__
        if exchange.status is not None:
            return
        message = f"the server failed to answer this request; its log has the reason under {exchange.id}"
        body = json.dumps({"error": {"message": message, "type": "internal_error", "param": None, "code": None}}).encode()
        headers = [(b"content-type", b"application/json"), (b"content-length", str(len(body)).encode())]
        try:
            await exchange.send({"type": "http.response.start", "status": 500, "headers": headers})
            await exchange.send({"type": "http.response.body", "body": body})
        except OSError:
            exchange.gone = True

    def _write_down(self, exchange: Exchange) -> None:
        try:
            self._write(exchange.line())
        except Exception:
            _log.exception("request %s could not be logged", exchange.id)


class Exchange:
    """One request and its answer as they pass. `status`: what was sent, None: nothing yet; `gone`: the client left before the end."""

    def __init__(self, scope: Scope, receive: Receive, send: Send, clock: Callable[[], float], wall: float) -> None:
        self.id = f"req-{secrets.token_hex(12)}"
        self.note = Note()
        self.method = _short(scope["method"])
        self.path = _short(scope["path"])
        self.status: int | None = None
        self.gone = False
        self._client = scope.get("client")
        self._client_id = next((value for name, value in scope["headers"] if name == b"x-request-id" and CLIENT_ID.fullmatch(value)), None)
        self._receive = receive
        self._send = send
        self._clock = clock
        self._wall = wall
        self._began = clock()
        self._ended: float | None = None
        self._sent = 0

    async def receive(self) -> Message:
        message = await self._receive()
        if message["type"] == "http.disconnect":
            self._leave()
        return message

    async def send(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            message = {**message, "headers": [*self._without_id(message), (b"x-request-id", self._client_id or self.id.encode())]}
        try:
            await self._send(message)
        except OSError:
            self._leave()
            raise
        if message["type"] == "http.response.start":
            self.status = message["status"]
        elif message["type"] == "http.response.body" and not self.gone:
            self._sent += len(message.get("body", b"")) if self.method != "HEAD" else 0
            if not message.get("more_body", False):
                self._ended = self._clock()

    def line(self) -> str:
        """The line, all of it ASCII without control characters: whoever looks at a log may do so in a terminal."""
        ended = self._clock() if self._ended is None else self._ended
        self.note.disconnected = self.note.disconnected or self.gone
        if self.status is None and not self.gone:
            self.note.error = self.note.error or "there was no answer"
        record = {
            "time": datetime.fromtimestamp(self._wall, UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z"),
            "request_id": self.id,
            "client_request_id": None if self._client_id is None else self._client_id.decode("ascii"),
            "client": None if self._client is None else f"{self._client[0]}:{self._client[1]}",
            "method": self.method,
            "path": self.path,
            "status": CLIENT_GONE if self.status is None and self.gone else self.status,
            "duration_ms": round((ended - self._began) * 1000, 3),
            "bytes": self._sent,
            **{name: _short(value) if isinstance(value, str) else value for name, value in asdict(self.note).items()},
        }
        known = {name: value for name, value in record.items() if value is not None and value != [] and value is not False}
        return json.dumps(known)

    def _leave(self) -> None:
        if self._ended is None:
            self.gone = True
            self._ended = self._clock()

    def _without_id(self, message: Message) -> list[tuple[bytes, bytes]]:
        return [(name, value) for name, value in message.get("headers", ()) if name.lower() != b"x-request-id"]


def _short(text: str) -> str:
    return text if len(text) <= LONGEST_TEXT else f"{text[:LONGEST_TEXT]}…"
