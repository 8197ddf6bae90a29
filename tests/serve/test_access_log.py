"""One line for every request, after its end, whatever became of it, and nothing secret in it; a fault is answered without its text."""

from __future__ import annotations

import asyncio
import json
import logging
import re
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import pytest
import uvicorn
from fastapi import FastAPI
from fastapi.responses import StreamingResponse
from starlette.requests import ClientDisconnect

from arctool.serve.access_log import AccessLog, App, Message, Receive, Scope, Send, note_of, request_id_of

OK = {"type": "http.response.start", "status": 200, "headers": [(b"content-type", b"text/plain")]}


class Client:
    """Plays the server to one request: what it sends and what it gets. `leaves_at`: the frame at which sending fails."""

    def __init__(
        self, path: str = "/v1/x", *, method: str = "POST", headers: list[tuple[bytes, bytes]] | None = None, **scope: Any
    ) -> None:
        self.scope: Scope = {
            **{"type": "http", "method": method, "path": path, "headers": headers or [], "client": ("192.0.2.1", 4711)},
            **{"query_string": b"api_key=sesame", "raw_path": path.encode("utf-8", "replace")},
            **scope,
        }
        self.messages: list[Message] = [{"type": "http.request", "body": b"secret body", "more_body": False}]
        self.got: list[Message] = []
        self.leaves_at = 1000

    async def receive(self) -> Message:
        return self.messages.pop(0) if self.messages else {"type": "http.disconnect"}

    async def send(self, message: Message) -> None:
        if len(self.got) >= self.leaves_at:
            raise OSError("the client has left")
        self.got.append(message)

    @property
    def headers(self) -> dict[bytes, bytes]:
        return dict(self.got[0]["headers"])

    @property
    def body(self) -> bytes:
        return b"".join(message.get("body", b"") for message in self.got)


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


async def hello(scope: Scope, receive: Receive, send: Send) -> None:
    await send(dict(OK))
    await send({"type": "http.response.body", "body": b"hello", "more_body": False})


def ask(app: App, client: Client | None = None, **clocks: Any) -> tuple[Client, dict[str, Any], str]:
    """The client afterwards, its line, and the line as it was written."""
    client = Client() if client is None else client
    lines: list[str] = []
    asyncio.run(AccessLog(app, lines.append, **clocks)(client.scope, client.receive, client.send))
    assert len(lines) == 1
    return client, json.loads(lines[0]), lines[0]


def test_a_line_says_who_asked_what_and_how_it_went() -> None:
    clock = Clock()

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        await receive()
        note = note_of(scope)
        note.model, note.stream, note.prompt_tokens, note.cached_tokens, note.ttft_ms = "m", True, 7, 0, 12.5
        clock.now += 0.25
        await send(dict(OK))
        for piece in (b"abc", b"defg"):
            clock.now += 0.5
            await send({"type": "http.response.body", "body": piece, "more_body": True})
        await send({"type": "http.response.body", "body": b"", "more_body": False})
        clock.now += 100  # what is done afterwards is nothing that the client waits for
        note.completion_tokens, note.finish_reasons = 3, ["stop", "length"]

    client, line, _ = ask(app, clock=clock, wall=lambda: 1_800_000_000.123456)
    assert line.pop("request_id") == client.headers[b"x-request-id"].decode()
    assert line == {
        **{"time": "2027-01-15T08:00:00.123Z", "client": "192.0.2.1:4711", "method": "POST", "path": "/v1/x", "status": 200},
        **{"duration_ms": 1250.0, "bytes": 7, "model": "m", "stream": True, "prompt_tokens": 7, "cached_tokens": 0},
        **{"completion_tokens": 3, "finish_reasons": ["stop", "length"], "ttft_ms": 12.5},
    }


def test_what_is_not_known_is_not_there() -> None:
    _, line, _ = ask(hello, Client(client=None))
    assert set(line) == {"time", "request_id", "method", "path", "status", "duration_ms", "bytes"}


def test_the_line_comes_after_the_answer() -> None:
    order: list[str] = []

    async def main() -> None:
        client = Client()

        async def send(message: Message) -> None:
            order.append(message["type"])

        await AccessLog(hello, lambda line: order.append("line"))(client.scope, client.receive, send)

    asyncio.run(main())
    assert order == ["http.response.start", "http.response.body", "line"]


def test_frames_pass_one_by_one_and_unchanged() -> None:
    """The next frame is made only when the one before it has been sent."""
    frames: list[Message] = [{"type": "http.response.body", "body": b"%d" % i, "more_body": i < 4} for i in range(5)]
    client = Client()

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        await send(dict(OK))
        for i, frame in enumerate(frames):
            assert len(client.got) == i + 1
            await send(frame)

    ask(app, client)
    assert all(got is frame for got, frame in zip(client.got[1:], frames, strict=True))


def test_nothing_secret_is_in_a_line(caplog: pytest.LogCaptureFixture) -> None:
    headers = [(b"authorization", b"Bearer sesame"), (b"cookie", b"sesame"), (b"x-api-key", b"sesame"), (b"x-request-id", b"my-id")]

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        await receive()
        raise ValueError("secret of the prompt")

    client, line, raw = ask(app, Client(headers=headers))
    assert "sesame" not in raw
    assert "secret" not in raw
    assert b"secret" not in client.body
    assert line["client_request_id"] == "my-id"
    assert "sesame" not in caplog.text


def test_control_characters_and_other_alphabets_are_escaped() -> None:
    path = "/a\nb\x1b[31m\x00\x7f\x9b\u2028\u202eü\ud800"

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        note_of(scope).model = "m\r\n{}"
        await hello(scope, receive, send)

    _, line, raw = ask(app, Client(path))
    assert raw.isascii()
    assert raw.isprintable()
    assert (line["path"], line["model"]) == (path, "m\r\n{}")


def test_a_client_cannot_make_lines_long() -> None:
    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        note_of(scope).model = note_of(scope).error = "x" * 100_000
        await hello(scope, receive, send)

    _, line, raw = ask(app, Client("/" + "y" * 100_000, method="Z" * 100_000))
    assert len(raw) < 2000
    assert line["path"] == "/" + "y" * 255 + "…"


# The id.


def test_every_request_gets_an_id_of_its_own() -> None:
    seen = []

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        seen.append(request_id_of(scope))
        await hello(scope, receive, send)

    lines = [ask(app)[1] for _ in range(20)]
    assert [line["request_id"] for line in lines] == seen
    assert len(set(seen)) == 20
    assert all(re.fullmatch(r"req-[0-9a-f]{24}", one) for one in seen)


def test_a_clients_id_is_echoed_and_logged_beside_ours() -> None:
    client, line, _ = ask(hello, Client(headers=[(b"x-request-id", b"job-7/a.b:c_d")]))
    assert client.headers[b"x-request-id"] == b"job-7/a.b:c_d"
    assert line["client_request_id"] == "job-7/a.b:c_d"
    assert line["request_id"].startswith("req-")


@pytest.mark.parametrize("bad", [b"", b"a b", b"a\r\nset-cookie: x", b"a\n", b"\xff", b"x" * 129, b'"', b"a\x00"])
def test_a_clients_id_that_is_not_plain_is_ignored(bad: bytes) -> None:
    client, line, _ = ask(hello, Client(headers=[(b"x-request-id", bad)]))
    assert client.headers[b"x-request-id"].decode() == line["request_id"]
    assert "client_request_id" not in line


def test_an_id_that_the_application_sets_does_not_make_two() -> None:
    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": [(b"X-Request-Id", b"other"), (b"a", b"b")]})
        await send({"type": "http.response.body"})

    client, line, _ = ask(app)
    assert client.got[0]["headers"] == [(b"a", b"b"), (b"x-request-id", line["request_id"].encode())]


# Faults.


async def fail(scope: Scope, receive: Receive, send: Send) -> None:
    raise KeyError("an inner detail")


class Panic(BaseException):
    """What a library written in another language raises."""


def test_a_fault_before_the_answer_is_answered_and_told_to_the_error_log(caplog: pytest.LogCaptureFixture) -> None:
    client, line, _ = ask(fail, Client("/a\nERROR forged"))
    assert client.got[0]["status"] == 500
    error = json.loads(client.body)["error"]
    assert (error["type"], error["param"], error["code"]) == ("internal_error", None, None)
    assert line["request_id"] in error["message"]
    assert "inner detail" not in client.body.decode()
    assert int(client.headers[b"content-length"]) == len(client.body)
    assert (line["status"], line["error"], line["bytes"]) == (500, "KeyError", len(client.body))
    [record] = caplog.records
    assert line["request_id"] in record.getMessage()
    assert record.getMessage().isprintable()
    assert "inner detail" in caplog.text
    assert "Traceback" in caplog.text


def test_a_panic_is_answered_too() -> None:
    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        raise Panic

    client, line, _ = ask(app)
    assert (client.got[0]["status"], line["error"]) == (500, "Panic")


def test_a_fault_after_the_answer_began_ends_it_there(caplog: pytest.LogCaptureFixture) -> None:
    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        note_of(scope).error = "what the handler knows better"
        await send(dict(OK))
        await send({"type": "http.response.body", "body": b"half", "more_body": True})
        raise KeyError("an inner detail")

    client, line, _ = ask(app)
    assert client.body == b"half"
    assert (line["status"], line["error"], line["bytes"]) == (200, "what the handler knows better", 4)
    assert "Traceback" in caplog.text


@pytest.mark.parametrize("fault", [asyncio.CancelledError, KeyboardInterrupt, SystemExit])
def test_who_stops_the_server_is_not_stopped_by_the_log(fault: type[BaseException], caplog: pytest.LogCaptureFixture) -> None:
    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        raise fault

    lines: list[str] = []
    client = Client()

    async def main() -> None:
        with pytest.raises(fault):
            await AccessLog(app, lines.append)(client.scope, client.receive, client.send)

    asyncio.run(main())
    assert client.got == []
    line = json.loads(lines[0])
    assert line["error"] == "the server stopped"
    assert "status" not in line
    assert caplog.records == []


def test_an_application_that_forgets_to_answer_is_seen() -> None:
    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        return

    _, line, _ = ask(app)
    assert line["error"] == "there was no answer"


def test_a_log_that_cannot_be_written_harms_no_request(caplog: pytest.LogCaptureFixture) -> None:
    def write(line: str) -> None:
        raise OSError("no space left")

    client = Client()
    asyncio.run(AccessLog(hello, write)(client.scope, client.receive, client.send))
    assert client.body == b"hello"
    assert "no space left" in caplog.text


# Clients that leave.


@pytest.mark.parametrize("error", [OSError, ClientDisconnect], ids=lambda error: error.__name__)
def test_a_client_that_leaves_is_no_fault(error: type[Exception], caplog: pytest.LogCaptureFixture) -> None:
    clock, client = Clock(), Client()
    client.leaves_at = 2

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        await send(dict(OK))
        await send({"type": "http.response.body", "body": b"half", "more_body": True})
        clock.now += 1
        try:
            await send({"type": "http.response.body", "body": b"unheard", "more_body": True})
        except OSError:
            clock.now += 5
            raise error from None

    _, line, _ = ask(app, client, clock=clock)
    assert (line["status"], line["bytes"], line["disconnected"], line["duration_ms"]) == (200, 4, True, 1000.0)
    assert "error" not in line
    assert caplog.records == []


def test_what_is_sent_to_a_client_that_has_left_does_not_count() -> None:
    """Some servers take such frames in silence."""
    clock = Clock()

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        await send(dict(OK))
        await send({"type": "http.response.body", "body": b"half", "more_body": True})
        while (await receive())["type"] != "http.disconnect":
            pass
        clock.now += 9
        await send({"type": "http.response.body", "body": b"unheard", "more_body": False})

    _, line, _ = ask(app, clock=clock)
    assert (line["bytes"], line["disconnected"], line["duration_ms"]) == (4, True, 0.0)


def test_a_client_that_leaves_before_the_answer_has_a_status_of_its_own() -> None:
    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        while (await receive())["type"] != "http.disconnect":
            pass

    client, line, _ = ask(app)
    assert (line["status"], line["disconnected"]) == (499, True)
    assert "error" not in line
    assert client.got == []


def test_a_fault_is_a_fault_even_when_the_client_has_left(caplog: pytest.LogCaptureFixture) -> None:
    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        while (await receive())["type"] != "http.disconnect":
            pass
        raise KeyError("a bug")

    client = Client()
    client.leaves_at = 0
    _, line, _ = ask(app, client)
    assert (line["disconnected"], line["error"]) == (True, "KeyError")
    assert "a bug" in caplog.text


def test_an_error_of_the_disk_is_not_a_client_that_left(caplog: pytest.LogCaptureFixture) -> None:
    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        raise OSError("disk")

    client, line, _ = ask(app)
    assert (client.got[0]["status"], line["error"]) == (500, "OSError")
    assert "disk" in caplog.text


def test_hanging_up_after_the_answer_is_not_leaving() -> None:
    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        await hello(scope, receive, send)
        while (await receive())["type"] != "http.disconnect":
            pass

    _, line, _ = ask(app)
    assert "disconnected" not in line


def test_bytes_of_an_answer_without_a_body_are_none() -> None:
    _, line, _ = ask(hello, Client(method="HEAD"))
    assert line["bytes"] == 0


def test_a_jump_of_the_wall_clock_changes_the_time_and_nothing_else() -> None:
    wall = Clock()

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        wall.now -= 1e6
        await hello(scope, receive, send)

    assert 0 <= ask(app, wall=wall)[1]["duration_ms"] < 5000


def test_what_is_not_http_passes_unseen() -> None:
    seen: list[Scope] = []

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        seen.append(scope)

    lines: list[str] = []
    client = Client(type="lifespan")
    asyncio.run(AccessLog(app, lines.append)(client.scope, client.receive, client.send))
    assert seen[0] is client.scope
    assert lines == []


def test_the_state_of_a_request_is_its_own() -> None:
    shared: dict[str, Any] = {"engine": "e"}
    seen: list[dict[str, Any]] = []

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        seen.append(scope["state"])
        await hello(scope, receive, send)

    for _ in range(2):
        ask(app, Client(state=shared))
    assert shared == {"engine": "e"}
    assert seen[0]["engine"] == "e"
    assert seen[0]["note"] is not seen[1]["note"]


def test_without_an_access_log_notes_go_nowhere() -> None:
    note_of({"type": "http"}).model = "m"
    assert note_of({"type": "http"}).model is None
    assert request_id_of({"type": "http"}) == ""


# Over a real socket, under FastAPI.


def make_app(lines: list[str], left: asyncio.Event) -> FastAPI:
    app = FastAPI()
    app.add_middleware(AccessLog, write=lines.append)

    @app.get("/boom")
    async def boom() -> None:
        raise KeyError("an inner detail")

    @app.get("/stream")
    async def stream() -> StreamingResponse:
        async def frames() -> AsyncIterator[bytes]:
            try:
                for _ in range(10_000):
                    yield b"data: x\n\n"
                    await asyncio.sleep(0.005)
            finally:
                left.set()

        return StreamingResponse(frames(), media_type="text/event-stream")

    return app


def serve(body: Callable[[int, list[str], asyncio.Event], Awaitable[None]]) -> None:
    async def main() -> None:
        lines: list[str] = []
        left = asyncio.Event()
        config = uvicorn.Config(make_app(lines, left), port=0, log_level="critical", access_log=False)
        server = uvicorn.Server(config)
        task = asyncio.create_task(server.serve())
        async with asyncio.timeout(20):
            while not server.started:
                await asyncio.sleep(0.001)
            try:
                await body(server.servers[0].sockets[0].getsockname()[1], lines, left)
            finally:
                server.should_exit = True
                await task

    asyncio.run(main())


async def get(port: int, path: str) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(f"GET {path} HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n".encode())
    return reader, writer


def test_a_fault_of_a_handler_gets_our_answer_not_the_frameworks(caplog: pytest.LogCaptureFixture) -> None:
    async def body(port: int, lines: list[str], left: asyncio.Event) -> None:
        reader, writer = await get(port, "/boom?key=sesame")
        answer = (await reader.read()).decode()
        writer.close()
        head, _, content = answer.partition("\r\n\r\n")
        [line] = [json.loads(line) for line in lines]
        assert head.startswith("HTTP/1.1 500 ")
        assert f"x-request-id: {line['request_id']}" in head
        assert json.loads(content)["error"]["type"] == "internal_error"
        assert (line["path"], line["status"]) == ("/boom", 500)

    with caplog.at_level(logging.ERROR):
        serve(body)
    assert "inner detail" in caplog.text


def test_a_client_that_hangs_up_in_a_stream_gets_its_line(caplog: pytest.LogCaptureFixture) -> None:
    async def body(port: int, lines: list[str], left: asyncio.Event) -> None:
        reader, writer = await get(port, "/stream")
        await reader.readuntil(b"data: x\n\n")
        writer.transport.abort()
        await left.wait()
        while not lines:
            await asyncio.sleep(0.001)
        [line] = [json.loads(line) for line in lines]
        assert (line["status"], line["disconnected"]) == (200, True)
        assert 9 <= line["bytes"] < 9 * 10_000
        assert "error" not in line

    serve(body)
    assert caplog.records == []
