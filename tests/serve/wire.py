"""What a client may do with a socket: requests byte by byte, and answers as they come. Stricter than any HTTP library, and ruder."""

from __future__ import annotations

import contextlib
import http.client
import io
import json
import socket
import time
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

JSON = {"Content-Type": "application/json"}
SECONDS = 30.0
"""Until a test gives a socket up; nothing here should ever take a tenth of it."""


@dataclass(frozen=True)
class Reply:
    """One answer. `headers` keeps the order and the repetitions; names are in lower case."""

    status: int
    headers: tuple[tuple[str, str], ...]
    body: bytes

    def header(self, name: str) -> str | None:
        """The value of a header that may come once at most."""
        found = [value for known, value in self.headers if known == name.lower()]
        assert len(found) <= 1, f"{name} is given {len(found)} times"
        return found[0] if found else None

    @property
    def json(self) -> Any:
        assert self.header("Content-Type") == "application/json", self
        return json.loads(self.body)

    @property
    def error(self) -> dict[str, Any]:
        """The error of an answer that has exactly OpenAI's shape, and neither our insides nor much of the request in it."""
        found = self.json
        assert set(found) == {"error"}, found
        error: dict[str, Any] = found["error"]
        assert set(error) == {"message", "type", "param", "code"}, error
        assert isinstance(error["message"], str), error
        assert 0 < len(error["message"]) <= 500, error
        assert error["message"].isprintable(), error
        assert isinstance(error["type"], str), error
        for name in ("param", "code"):
            assert error[name] is None or isinstance(error[name], str), error
        for inside in ("Traceback", "site-packages", ".py", "pydantic", "object at 0x", "Error:", "sys."):
            assert inside not in error["message"], error
        return error


@contextlib.contextmanager
def connected(port: int) -> Iterator[socket.socket]:
    with socket.create_connection(("127.0.0.1", port), SECONDS) as door:
        door.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        yield door


class Answers(io.BufferedReader):
    """What comes through one socket, for several answers in turn: what was read ahead of one is the beginning of the next."""

    def __init__(self, door: socket.socket) -> None:
        super().__init__(socket.SocketIO(door, "r"))

    def makefile(self, mode: str) -> Answers:
        return self

    def close(self) -> None:
        """Called after each answer; the socket is closed by whoever opened it."""


def receive(door: socket.socket | Answers, method: str = "GET") -> Reply:
    """The next answer. `method`: what was asked with, because an answer to HEAD has no body."""
    response = http.client.HTTPResponse(door, method=method)  # type: ignore[arg-type]
    response.begin()
    headers = tuple((name.lower(), value) for name, value in response.getheaders())
    return Reply(response.status, headers, response.read())


def send(port: int, *pieces: bytes, method: str = "GET") -> Reply:
    """The answer to bytes that are sent as they are. A server that answers early may stop reading, so a send may fail."""
    with connected(port) as door:
        for piece in pieces:
            try:
                door.sendall(piece)
            except OSError:
                break
        return receive(door, method)


def head(method: str, path: str, headers: Mapping[str, str] | Iterable[tuple[str, str]] = (), host: str | None = "127.0.0.1") -> bytes:
    """The head of a request."""
    pairs = list(headers.items() if isinstance(headers, Mapping) else headers)
    lines = [f"{method} {path} HTTP/1.1", *([] if host is None else [f"Host: {host}"]), *(f"{name}: {value}" for name, value in pairs)]
    return "\r\n".join([*lines, "", ""]).encode("latin-1")


def post(port: int, path: str, body: Any, headers: Mapping[str, str] = JSON, host: str = "127.0.0.1") -> Reply:
    """POST of a JSON value, or of bytes as they are."""
    data = body if isinstance(body, bytes) else json.dumps(body).encode()
    return send(port, head("POST", path, {**headers, "Content-Length": str(len(data))}, host) + data)


def get(port: int, path: str, headers: Mapping[str, str] | None = None, host: str = "127.0.0.1", method: str = "GET") -> Reply:
    return send(port, head(method, path, headers or {}, host), method=method)


@dataclass(frozen=True)
class Streamed:
    """A stream of events, read to its end. `lines`: without their ends."""

    reply: Reply
    lines: tuple[str, ...]

    @property
    def data(self) -> list[str]:
        """What stands behind `data:`, event by event; each event is one line and an empty one."""
        found = []
        for i, line in enumerate(self.lines):
            if line.startswith("data: "):
                assert self.lines[i + 1] == "", self.lines
                found.append(line.removeprefix("data: "))
            else:
                assert line == "" or line.startswith(":"), line
        return found

    @property
    def comments(self) -> int:
        return sum(line.startswith(":") for line in self.lines)

    @property
    def chunks(self) -> list[Any]:
        """The events before [DONE], which comes last and once."""
        assert self.data[-1] == "[DONE]", self.data
        return [json.loads(text) for text in self.data[:-1]]

    def pieces(self, choice: int = 0) -> list[str]:
        """The texts of one choice, of chat or completions."""
        return [text for one in self.choices(choice) if (text := one["text"] if "text" in one else one["delta"].get("content", ""))]

    def choices(self, choice: int = 0) -> list[Any]:
        return [one for chunk in self.chunks for one in chunk["choices"] if one["index"] == choice]

    def finish(self, choice: int = 0) -> str:
        """Why a choice ended; it is said once."""
        (found,) = [one["finish_reason"] for one in self.choices(choice) if one["finish_reason"] is not None]
        return str(found)


def stream(port: int, path: str, body: Mapping[str, Any], headers: Mapping[str, str] = JSON) -> Streamed:
    """POST with stream=true, read to the end."""
    reply = post(port, path, {**body, "stream": True}, headers)
    text = reply.body.decode("utf-8")
    assert reply.status != 200 or text.endswith("\n\n"), text
    return Streamed(reply, tuple(text.split("\n")))


@contextlib.contextmanager
def streaming(port: int, path: str, body: Mapping[str, Any]) -> Iterator[Iterator[str]]:
    """POST with stream=true, line by line as they come; the answer must be a stream."""
    data = json.dumps({**body, "stream": True}).encode()
    with connected(port) as door:
        door.sendall(head("POST", path, {**JSON, "Content-Length": str(len(data))}) + data)
        response = http.client.HTTPResponse(door, method="POST")
        response.begin()
        assert response.status == 200, response.read()
        yield (line.decode("utf-8").removesuffix("\n") for line in iter(response.readline, b""))


def closed(door: socket.socket, seconds: float = SECONDS) -> bool:
    """Whether the other side hangs up within `seconds`."""
    door.settimeout(0.05)
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        try:
            if not door.recv(65536):
                return True
        except TimeoutError:
            continue
        except OSError:
            return True
    return False
