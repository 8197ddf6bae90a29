"""What stands before the application: a request's size, kind, place and pace are looked at before anything reads its content."""

from __future__ import annotations

import asyncio

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from arctool.serve.problems import Problem
from arctool.serve.replies import ClientGone, problem_reply, refuse
from arctool.serve.strict_json import parse_body

MAX_BODIES = 256 << 20
"""Bytes of bodies that have arrived and are not whole yet, of all clients together."""
SMALL_BODY = 64 << 10
"""Bytes of each body that are not counted: however much others send, who asks for little is let in."""

UTF_8 = {b"utf-8", b"utf8"}

LOOPBACK_NAMES = frozenset(("localhost", "127.0.0.1", "[::1]"))


class Limits:
    """ASGI: refuses what is too large, too slow or of another kind than JSON; hands on requests whose bodies have arrived whole.

    `hosts`: the names in the Host header that are answered, None for any. A server that only this machine reaches answers to this
    machine's names only, or a web page elsewhere could have its own name point here (DNS rebinding) and read answers.
    """

    def __init__(self, app: ASGIApp, *, max_body: int, body_timeout: float, hosts: frozenset[str] | None) -> None:
        self._app = app
        self._max_body = max_body
        self._timeout = body_timeout
        self._hosts = hosts
        self._held = 0

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return await self._app(scope, receive, send)
        headers: dict[bytes, bytes] = dict(scope["headers"])
        body: bytes | None = None
        try:
            self._check_host(headers.get(b"host", b""))
            if scope["method"] != "POST":
                return await self._app(scope, receive, send)
            _check_kind(headers)
            if int(headers.get(b"content-length", b"0")) > self._max_body:
                raise self._too_large()
            body = await self._body(receive)
            if len(body) > self._max_body:  # by its last piece
                raise self._too_large()
            scope.setdefault("state", {})["body"] = parse_body(body)
        except Problem as problem:
            if body is not None or problem.status == 408:  # there is nothing left to throw away, or nothing comes
                return await problem_reply(scope, problem)(scope, receive, send)
            return await refuse(scope, receive, send, problem)
        except ClientGone:
            return
        await self._app(scope, _replay(body, receive), send)

    def _check_host(self, host: bytes) -> None:
        name = host.decode("latin-1").lower()
        name = name if name.endswith("]") else name.rsplit(":", 1)[0]
        if self._hosts is not None and name not in self._hosts:
            raise Problem(
                403, "Host: this server does not answer to that name; start it with --allowed-host to add one", "permission_error"
            )

    def _too_large(self) -> Problem:
        return Problem(413, f"body: expected at most {self._max_body} bytes", code="request_too_large", headers={"Connection": "close"})

    async def _body(self, receive: Receive) -> bytes:
        pieces: list[bytes] = []
        size = counted = 0
        try:
            async with asyncio.timeout(self._timeout):
                while True:
                    message = await receive()
                    if message["type"] == "http.disconnect":
                        raise ClientGone
                    pieces.append(message.get("body", b""))
                    size += len(pieces[-1])
                    if not message.get("more_body", False):
                        return b"".join(pieces)
                    if size > self._max_body:
                        raise self._too_large()
                    # What was announced is not counted: it may never come, and would keep others out meanwhile.
                    more = max(0, size - SMALL_BODY) - counted
                    if more and self._held + more > MAX_BODIES:
                        raise _full()
                    self._held, counted = self._held + more, counted + more
        except TimeoutError as error:
            text = f"body: not received whole within {self._timeout:g} seconds"
            raise Problem(408, text, code="body_timeout", headers={"Connection": "close"}) from error
        finally:
            self._held -= counted


def _full() -> Problem:
    return Problem(503, "too many requests are being received at once; try again", "overloaded_error", headers={"Retry-After": "1"})


def _check_kind(headers: dict[bytes, bytes]) -> None:
    kind, *parameters = (part.strip().lower() for part in headers.get(b"content-type", b"").split(b";"))
    charsets = {part.removeprefix(b"charset=").strip(b'"') for part in parameters if part.startswith(b"charset=")}
    if kind != b"application/json" or not charsets <= UTF_8:
        # Whatever else a web page may send to a stranger without asking first, so this closes the door to it, too.
        raise Problem(415, "Content-Type: expected application/json, in UTF-8", param="Content-Type", headers={"Connection": "close"})
    if headers.get(b"content-encoding", b"identity").lower() != b"identity":
        raise Problem(
            415, "Content-Encoding: compressed bodies are not accepted", param="Content-Encoding", headers={"Connection": "close"}
        )


def _replay(body: bytes, receive: Receive) -> Receive:
    """`body` in one message, then what the connection says."""
    given = False

    async def again() -> Message:
        nonlocal given
        if given:
            return await receive()
        given = True
        return {"type": "http.request", "body": body, "more_body": False}

    return again
