"""An OpenAI client that does as little as it can: bodies made beforehand, a time for each read of the socket.

Every request has a connection of its own. A server may close a kept one at any time (llama.cpp's does behind every stream, whatever its
header says), and a request that is lost that way looks like a fault of the server; on loopback a new one costs a tenth of a millisecond.
"""

from __future__ import annotations

import asyncio
import os
import time
from dataclasses import dataclass, field
from types import TracebackType
from typing import Protocol
from urllib.parse import urlsplit

import aiohttp

from arctool.bench.serving.answer import Answer, said
from arctool.bench.serving.events import LONGEST, EventReader, EventTooLong
from arctool.bench.serving.exchange import Ask, Outcome
from arctool.errors import UsageError

ENDING = 2.0
"""Seconds for a server to close the body behind its `[DONE]`: who hangs up before is a client that vanished."""

LONGEST_WAIT = 86_400.0

REFUSAL = 64 << 10
"""Bytes of an error that are read."""


class Clock(Protocol):
    """Time and the passing of it, in seconds."""

    def now(self) -> float: ...

    async def sleep(self, seconds: float) -> None: ...


class WallClock:
    """The machine's own."""

    def now(self) -> float:
        return time.perf_counter()

    async def sleep(self, seconds: float) -> None:
        await asyncio.sleep(seconds)


@dataclass(frozen=True)
class Server:
    """Who is measured. `url`: without the /v1 of its paths; `timeout`: seconds of one request, from its sending to its end."""

    url: str
    timeout: float = 600.0
    api_key: str | None = field(default=None, repr=False)

    @classmethod
    def at(cls, base_url: str, timeout: float = 600.0, api_key: str | None = None) -> Server:
        """The server of a `--base-url`, with or without /v1. Raises UsageError."""
        try:
            parts = urlsplit(base_url)
            usable = parts.scheme in ("http", "https") and parts.hostname and parts.port != 0
        except ValueError:
            usable = False
        if not usable or parts.query or parts.fragment:
            raise UsageError(f"--base-url: expected an address like http://127.0.0.1:8000, found {base_url!r:.120}")
        if parts.username is not None or parts.password is not None:
            raise UsageError("--base-url: a password does not belong in an address; use --api-key or OPENAI_API_KEY")
        if not 0 < timeout < LONGEST_WAIT:
            raise UsageError(f"--timeout: expected more than 0 seconds and less than a day, found {timeout}")
        if api_key is not None and not (api_key.isascii() and api_key.isprintable()):
            raise UsageError("--api-key: has characters that no HTTP header can carry")
        return cls(base_url.rstrip("/").removesuffix("/v1").rstrip("/"), timeout, api_key or None)


class Client:
    """Asks one server. An async context manager; `url` and `clock` are for reading."""

    def __init__(self, server: Server, clock: Clock | None = None) -> None:
        self._server = server
        self.clock: Clock = clock or WallClock()
        self.url = server.url

    async def __aenter__(self) -> Client:
        headers = {"Content-Type": "application/json", "Accept-Encoding": "identity"}
        if self._server.api_key is not None:
            headers["Authorization"] = f"Bearer {self._server.api_key}"
        self._session = aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(limit=0, force_close=True),
            timeout=aiohttp.ClientTimeout(total=self._server.timeout),
            cookie_jar=aiohttp.DummyCookieJar(),
            headers=headers,
        )
        return self

    async def __aexit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        await self._session.close()

    async def get(self, path: str) -> tuple[int | None, bytes | str]:
        """(status, body), or (None, what went wrong)."""
        try:
            async with self._session.get(self.url + path, allow_redirects=False) as response:
                return response.status, await _read(response, LONGEST)
        except (aiohttp.ClientError, OSError, TimeoutError, ValueError) as error:
            return None, self._trouble(error)

    async def ask(self, ask: Ask) -> Outcome:
        """Send a request and read its answer to the end; what goes wrong is in the outcome, never raised."""
        now = self.clock.now
        answer = Answer(ask, now())
        status: int | None = None
        try:
            async with self._session.post(self.url + ask.endpoint.path, data=ask.body, allow_redirects=False) as response:
                status = response.status
                if status != 200:
                    failure = f"HTTP {status}: {said(await _read(response, REFUSAL))}"
                    return answer.outcome(now(), status=status, failure=failure)
                if response.content_type != "text/event-stream":
                    failure = f"answered with {response.content_type} where a stream was asked for"
                    return answer.outcome(now(), status=status, failure=failure)
                reader, ended = EventReader(), None
                async for piece in response.content.iter_any():
                    at = now()
                    answer.take(reader.feed(piece), at)
                    if ask.cancel_after is not None and answer.chunks >= ask.cancel_after and not answer.over:
                        response.close()
                        return answer.outcome(at, status=status, cancelled=True)
                    if answer.over:
                        ended = at
                        break
                if answer.failure is not None:
                    response.close()
                elif ended is not None:
                    await _drain(response)
                return answer.outcome(now() if ended is None else ended, status=status)
        except (aiohttp.ClientError, OSError, TimeoutError, ValueError, EventTooLong) as error:
            return answer.outcome(now(), status=status, failure=self._trouble(error))

    def _trouble(self, error: Exception) -> str:
        """What went wrong, in one line of ours."""
        if isinstance(error, TimeoutError):
            return f"no answer within {self._server.timeout:g} s"
        if isinstance(error, EventTooLong):
            return f"an event of more than {LONGEST >> 20} MiB"
        if isinstance(error, aiohttp.ClientConnectorError):
            number = error.os_error.errno or 0
            return f"cannot connect: {os.strerror(number) if number > 0 else error.os_error.strerror or error}"
        return f"the connection broke: {str(error) or type(error).__name__}"


async def _drain(response: aiohttp.ClientResponse) -> None:
    """Read what follows the last event, which is nothing."""
    try:
        async with asyncio.timeout(ENDING):
            while await response.content.readany():
                pass
    except (TimeoutError, aiohttp.ClientError):
        response.close()


async def _read(response: aiohttp.ClientResponse, most: int) -> bytes:
    """The body, or its first bytes."""
    found = bytearray()
    async for piece in response.content.iter_any():
        found += piece
        if len(found) >= most:
            break
    return bytes(found[:most])
