"""What clients do: ask whole or in a stream over HTTP, read events, or hold a bare socket and say less than they should."""

from __future__ import annotations

import contextlib
import http.client
import json
import socket
import threading
from collections.abc import AsyncIterator, Callable, Iterator
from dataclasses import dataclass, field
from email.message import Message
from typing import Any

import aiohttp

CHAT = "/v1/chat/completions"
COMPLETIONS = "/v1/completions"


@dataclass
class Heard:
    """What came of one request: by choice its text, pieces in order, and why it ended. `whole`: whether the end was seen."""

    texts: dict[int, str] = field(default_factory=dict)
    finishes: dict[int, str] = field(default_factory=dict)
    pieces: int = 0
    whole: bool = False
    error: dict[str, Any] | None = None

    def take(self, choice: dict[str, Any]) -> None:
        """One choice of a chunk."""
        assert choice["index"] not in self.finishes, "something follows a finish_reason"
        text = choice["delta"].get("content", "") if "delta" in choice else choice["text"]
        self.pieces += bool(text)
        self.texts[choice["index"]] = self.texts.get(choice["index"], "") + text
        if choice["finish_reason"] is not None:
            self.finishes[choice["index"]] = choice["finish_reason"]


def said(body: dict[str, Any]) -> Heard:
    """A whole answer's body, as if it had been streamed."""
    heard = Heard(whole=True)
    for choice in body["choices"]:
        heard.texts[choice["index"]] = choice["message"]["content"] if "message" in choice else choice["text"]
        heard.finishes[choice["index"]] = choice["finish_reason"]
    return heard


async def events(answer: aiohttp.ClientResponse) -> AsyncIterator[str]:
    """The data of each event; comments are left out."""
    async for line in answer.content:
        if line.startswith(b"data: "):
            yield line[6:].decode().rstrip("\n")


async def hear(answer: aiohttp.ClientResponse, pieces: int | None = None) -> Heard:
    """Read a stream to its end, or until it has said `pieces` pieces of text; then the connection is closed."""
    heard = Heard()
    async for data in events(answer):
        assert not heard.whole, "something follows [DONE]"
        if data == "[DONE]":
            heard.whole = True
            continue
        value = json.loads(data)
        if "error" in value:
            heard.error = value["error"]
            continue
        for choice in value["choices"]:
            heard.take(choice)
        if pieces is not None and heard.pieces >= pieces:
            answer.close()
            return heard
    return heard


def request(path: str, body: dict[str, Any], *, length: int | None = None, headers: str = "") -> bytes:
    """A POST as bytes. `length`: what it announces, if not the truth."""
    data = json.dumps(body).encode()
    announced = len(data) if length is None else length
    head = f"POST {path} HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\nContent-Length: {announced}\r\n{headers}\r\n"
    return head.encode() + data


@contextlib.contextmanager
def bare(port: int, data: bytes = b"", *, receive_buffer: int | None = None) -> Iterator[socket.socket]:
    """A connection that has sent `data`. `receive_buffer`: bytes that the kernel keeps of what nobody reads."""
    with socket.socket() as made:
        if receive_buffer is not None:
            made.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_buffer)
        made.settimeout(30)
        made.connect(("127.0.0.1", port))
        made.sendall(data)
        yield made


def read_all(connection: socket.socket) -> bytes:
    """Everything until the other side closes."""
    pieces = []
    while piece := connection.recv(65536):
        pieces.append(piece)
    return b"".join(pieces)


@dataclass(frozen=True)
class Said:
    """A whole response."""

    status: int
    headers: Message
    text: str

    @property
    def json(self) -> Any:
        return json.loads(self.text)


def get(port: int, path: str) -> tuple[int, dict[str, Any]]:
    link = http.client.HTTPConnection("127.0.0.1", port, timeout=30)
    with contextlib.closing(link):
        link.request("GET", path)
        answer = link.getresponse()
        return answer.status, json.loads(answer.read())


def post(port: int, path: str, body: dict[str, Any], headers: dict[str, str] | None = None) -> Said:
    link = http.client.HTTPConnection("127.0.0.1", port, timeout=30)
    with contextlib.closing(link):
        link.request("POST", path, json.dumps(body), {"Content-Type": "application/json", **(headers or {})})
        answer = link.getresponse()
        return Said(answer.status, answer.headers, answer.read().decode())


class Later:
    """Something that a thread waits for, and its result."""

    def __init__(self, work: Callable[[], Any]) -> None:
        self._found: list[Any] = []
        self._thread = threading.Thread(target=lambda: self._found.append(work()), daemon=True)
        self._thread.start()

    @property
    def done(self) -> bool:
        return not self._thread.is_alive()

    def result(self) -> Any:
        self._thread.join(30)
        return self._found[0]
