"""From the first byte to the last signal: clients that leave, time that runs out, queues that are full, and a server that drains."""

from __future__ import annotations

import asyncio
import http.client
import json
import logging
import signal
import socket
import threading
import time
from collections.abc import AsyncGenerator, Callable, Iterator
from typing import Any

import pytest
from asking import CHAT, COMPLETIONS, Later, bare, get, post, read_all, request
from live import NAME, Live, live, until
from pace import Pace
from scripted import scripted

from arctool.errors import SourceError, UsageError
from arctool.run.llm import LLM
from arctool.run.sequence import FinishReason
from arctool.serve import connection, server
from arctool.serve.replies import EventStream
from arctool.serve.server import Loaded, serve
from arctool.serve.settings import ServeOptions

REPLY = " ".join(f"word{i}" for i in range(400))
"""More than any test waits for."""
TELL = {"role": "user", "content": "tell"}
ASKED = {
    "chat": (CHAT, {"messages": [TELL]}),
    "chat of two": (CHAT, {"messages": [TELL], "n": 2}),
    "stream": (CHAT, {"messages": [TELL], "stream": True}),
    "stream of two": (CHAT, {"messages": [TELL], "n": 2, "stream": True}),
    "completion": (COMPLETIONS, {"prompt": "tell", "max_tokens": 1000}),
    "completions": (COMPLETIONS, {"prompt": ["tell", "tell more"], "max_tokens": 1000}),
    "completion stream": (COMPLETIONS, {"prompt": "tell", "max_tokens": 1000, "stream": True}),
    "completions stream": (COMPLETIONS, {"prompt": ["tell", "tell more"], "max_tokens": 1000, "stream": True}),
    "messages": ("/v1/messages", {"model": NAME, "messages": [TELL], "max_tokens": 1000}),
    "messages stream": ("/v1/messages", {"model": NAME, "messages": [TELL], "max_tokens": 1000, "stream": True}),
    "responses": ("/v1/responses", {"model": NAME, "input": "tell"}),
    "responses stream": ("/v1/responses", {"model": NAME, "input": "tell", "stream": True}),
}


@pytest.fixture
def pace() -> Pace:
    return Pace()


@pytest.fixture
def llm(pace: Pace) -> LLM:
    """Says REPLY to everything, at the test's pace."""
    return scripted(lambda prompt: REPLY, before_step=pace)


@pytest.fixture(autouse=True)
def _no_error_is_logged(caplog: pytest.LogCaptureFixture) -> Iterator[None]:
    """Nothing in this room is a fault of ours, so none may be reported to the operator."""
    yield
    assert [r.getMessage() for r in caplog.get_records("call") if r.levelno >= logging.WARNING] == []


def asked_to_abort(running: Live) -> Callable[[], bool]:
    """Whether somebody has told the engine something that it has not carried out yet."""
    return lambda: bool(running.service.engine._commands)


def idle(llm: LLM) -> bool:
    return not llm.engine.has_work() and llm.engine.telemetry().cache.owned == 0


def ends(text: str) -> list[dict[str, Any]]:
    """The last chunk of every choice of a stream that ended as it should."""
    lines = [line.removeprefix("data: ") for line in text.split("\n\n") if line.startswith("data: ")]
    assert lines[-1] == "[DONE]"
    chunks = [json.loads(line) for line in lines[:-1]]
    assert not any("error" in chunk for chunk in chunks)
    return [chunk["choices"][0] for chunk in chunks if chunk["choices"] and chunk["choices"][0]["finish_reason"]]


def text_of(stream: str) -> str:
    lines = [line.removeprefix("data: ") for line in stream.split("\n\n") if line.startswith("data: {")]
    return "".join(json.loads(line)["choices"][0]["delta"].get("content", "") for line in lines)


# Clients that leave.


@pytest.mark.parametrize("asked", ASKED)
def test_blocks_of_a_client_that_left_are_free_before_the_next_step(llm: LLM, pace: Pace, asked: str) -> None:
    path, body = ASKED[asked]
    with live(llm) as running, pace.held():
        with bare(running.port, request(path, body)):
            pace.until_step(7)
            assert llm.engine.telemetry().cache.owned > 0
        until(asked_to_abort(running))
        pace.end_step()
        until(lambda: idle(llm))
        assert pace.begun == 7


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
def test_a_client_that_leaves_while_its_prompt_is_computed_costs_no_further_step(llm: LLM, pace: Pace, stream: bool) -> None:
    prompt = [5] * (llm.engine.scheduler.limits.max_step_tokens * 3)
    with live(llm) as running, pace.held():
        with bare(running.port, request(COMPLETIONS, {"prompt": prompt, "stream": stream})):
            pace.until_step(2)
            [sequence] = llm.engine.scheduler.running
            assert 0 < sequence.computed < len(prompt)
        until(asked_to_abort(running))
        pace.end_step()
        until(lambda: idle(llm))
        assert pace.begun == 2


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
def test_a_client_that_leaves_the_queue_is_never_started(llm: LLM, pace: Pace, stream: bool) -> None:
    crowd = request(COMPLETIONS, {"prompt": "tell", "n": 64, "max_tokens": 20})
    with live(llm) as running, pace.held(), bare(running.port, crowd) as first:
        pace.until_step(3)
        with bare(running.port, request(COMPLETIONS, {"prompt": "tell me", "stream": stream})):
            until(asked_to_abort(running))  # to take it, here
            pace.until_step(4)
            assert len(llm.engine.scheduler.waiting) == 1
        until(asked_to_abort(running))
        pace.until_step(5)
        assert len(llm.engine.scheduler.waiting) == 0
        pace.run()
        assert b"200 OK" in first.recv(100)
        assert llm.engine.telemetry().total.finished[FinishReason.ABORT] == 1


def test_a_client_that_leaves_before_its_request_is_taken_leaves_nothing(llm: LLM, pace: Pace, monkeypatch: pytest.MonkeyPatch) -> None:
    """While its conversation is rendered, and while the engine, in the middle of a step, has not looked at it."""
    rendering, go = threading.Event(), threading.Event()
    real = llm.render_chat

    def slow(*arguments: Any, **variables: Any) -> str:
        rendering.set()
        assert go.wait(30)
        return real(*arguments, **variables)

    monkeypatch.setattr(llm, "render_chat", slow)
    with live(llm) as running, pace.held():
        engine = running.service.engine
        with bare(running.port, request(CHAT, {"messages": [TELL]})):
            assert rendering.wait(30)
        until(lambda: not running.server.server_state.tasks)
        go.set()
        with bare(running.port, request(COMPLETIONS, {"prompt": "tell", "max_tokens": 8})):
            pace.until_step(1)
            with bare(running.port, request(CHAT, {"messages": [TELL]})):
                until(asked_to_abort(running))
            until(lambda: len(engine._commands) == 2)  # to take it, and to forget it
            pace.until_step(2)
            assert engine.unfinished == 1
            assert len(list(llm.engine.scheduler.live())) == 1


def test_a_client_that_leaves_while_its_grammar_is_compiled_leaves_nothing(llm: LLM, pace: Pace, monkeypatch: pytest.MonkeyPatch) -> None:
    compiling, go = threading.Event(), threading.Event()
    real = llm.engine.check

    def slow(*arguments: Any) -> Any:
        compiling.set()
        assert go.wait(30)
        return real(*arguments)

    with live(llm) as running:
        monkeypatch.setattr(llm.engine, "check", slow)
        with bare(running.port, request(CHAT, {"messages": [TELL], "response_format": {"type": "json_object"}})):
            assert compiling.wait(30)
        until(lambda: not running.server.server_state.tasks)
        go.set()
        assert running.service.engine._entering == 0
        assert idle(llm)


def test_a_client_that_leaves_with_a_second_request_on_its_way_is_noticed_too(llm: LLM, pace: Pace) -> None:
    path, body = ASKED["chat"]
    with live(llm) as running, pace.held():
        with bare(running.port, request(path, body)) as client:
            pace.until_step(2)
            [link] = running.server.server_state.connections
            client.sendall(request(path, body))
            until(lambda: link.conn.trailing_data[0])
            pace.until_step(3)
        until(asked_to_abort(running))
        pace.end_step()
        until(lambda: idle(llm))
        assert pace.begun == 3


def test_a_client_that_takes_nothing_is_given_up_and_its_request_ended(llm: LLM, pace: Pace) -> None:
    body = {"messages": [TELL], "stream": True, "logprobs": True, "top_logprobs": 20}
    with live(llm, send_timeout=0.2) as running, pace.held(), bare(running.port, request(CHAT, body), receive_buffer=1024) as reader:
        until(lambda: pace.begun > 0)
        [link] = running.server.server_state.connections
        while not link.flow.write_paused:
            pace.until_step(pace.begun + 1)
        begun = pace.begun
        assert llm.engine.has_work()
        until(asked_to_abort(running))
        pace.end_step()
        until(lambda: idle(llm))
        assert pace.begun == begun
        until(lambda: not running.server.server_state.connections)
        assert b"[DONE]" not in read_all(reader)


def test_a_client_that_takes_little_by_little_is_not_given_up(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    """It takes longer for what lies ready than `send_timeout`, but it goes on."""
    body = {"messages": [TELL], "stream": True, "logprobs": True, "top_logprobs": 20}
    dropped = []
    drop = connection.Connection._drop
    monkeypatch.setattr(connection.Connection, "_drop", lambda self, before: dropped.append(before) or drop(self, before))
    with live(llm, send_timeout=0.3) as running, bare(running.port, request(CHAT, body), receive_buffer=1024) as reader:
        until(lambda: running.server.server_state.connections)
        [link] = running.server.server_state.connections
        until(lambda: link.flow.write_paused)
        while len(dropped) < 3:
            assert reader.recv(1000), "given up"
            time.sleep(0.01)
        assert not link.transport.is_closing()


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
def test_an_answer_leaves_its_connection_open_for_the_next(llm: LLM, stream: bool) -> None:
    with live(llm) as running:
        link = http.client.HTTPConnection("127.0.0.1", running.port, timeout=30)
        for _ in range(20):
            link.request(
                "POST", CHAT, json.dumps({"messages": [TELL], "max_tokens": 2, "stream": stream}), {"Content-Type": "application/json"}
            )
            assert link.getresponse().read()
        until(lambda: running.server.server_state.total_requests == 20)
        assert len(running.server.server_state.connections) == 1
        link.close()


def test_a_stream_that_never_began_is_closed_too() -> None:
    """A connection that takes nothing, not even the head of the answer, until its client leaves."""
    closed: list[bool] = []

    async def events() -> AsyncGenerator[bytes, None]:
        yield b"never asked for"

    async def takes_nothing(message: Any) -> None:
        await asyncio.Event().wait()

    async def leaves() -> dict[str, str]:
        return {"type": "http.disconnect"}

    stream = EventStream(events(), 15.0, lambda: closed.append(True))
    asyncio.run(asyncio.wait_for(stream({"type": "http"}, leaves, takes_nothing), 10))
    assert closed == [True]


def test_a_client_that_begins_a_second_request_and_falls_silent_is_told_and_left(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connection, "HEADER_SECONDS", 0.1)
    whole = request(CHAT, {"messages": [TELL], "max_tokens": 2})
    with live(llm) as running, bare(running.port, whole) as client:
        assert client.recv(65536).startswith(b"HTTP/1.1 200")
        client.sendall(whole[:30])
        assert b"408" in read_all(client)


# Time that runs out.


@pytest.mark.parametrize("where", ["request", "server"])
@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
def test_time_that_runs_out_ends_a_request_with_what_it_has(llm: LLM, pace: Pace, stream: bool, where: str) -> None:
    own = {"timeout": 0.2} if where == "request" else {"timeout": 1000.0}
    options = {"request_timeout": 0.2} if where == "server" else {"request_timeout": 1000.0}
    with live(llm, **options) as running, pace.held():
        answer = Later(lambda: post(running.port, CHAT, {"messages": [TELL], "stream": stream, **own}))
        pace.until_step(12)
        until(asked_to_abort(running))
        pace.end_step()
        text = answer.result().text
        assert pace.begun == 12
        if stream:
            [end] = ends(text)
            said = text_of(text)
        else:
            [end] = json.loads(text)["choices"]
            said = end["message"]["content"]
        assert end["finish_reason"] == "abort"
        assert 12 <= len(said) < 100
        assert REPLY.startswith(said)
        assert answer.result().status == 200


def test_time_that_runs_out_before_there_is_a_token_is_an_error(llm: LLM, pace: Pace) -> None:
    with live(llm) as running, pace.held():
        started = Later(lambda: post(running.port, CHAT, {"messages": [TELL], "timeout": 0.2}))
        pace.until_step(1)
        unseen = Later(lambda: post(running.port, CHAT, {"messages": [TELL], "timeout": 0.2}))
        assert unseen.result().status == 504
        pace.end_step()
        ended = started.result()
        assert (ended.status, ended.json["choices"][0]["finish_reason"]) == (200, "abort")  # the step gave it its first
        waiting = Later(lambda: post(running.port, COMPLETIONS, {"prompt": [5] * 1500, "timeout": 0.2}))
        until(lambda: pace.begun == 2)
        until(asked_to_abort(running))
        pace.end_step()
        assert waiting.result().status == 504
        for late in (unseen, waiting):
            assert late.result().json["error"]["type"] == "timeout_error"


# Queues that are full.


def test_a_full_queue_refuses_and_the_same_request_is_taken_later(llm: LLM, pace: Pace) -> None:
    body = {"prompt": "tell", "max_tokens": 3}
    with live(llm, max_queued=2) as running, pace.held():
        running_ones = Later(lambda: post(running.port, COMPLETIONS, {"prompt": "tell", "n": 64, "max_tokens": 3}))
        pace.until_step(3)
        queued = []
        for number in range(2):
            queued.append(Later(lambda: post(running.port, COMPLETIONS, body)))
            until(lambda number=number: running.service.engine.unfinished == 2 + number)
        for stream in (False, True):
            refused = post(running.port, COMPLETIONS, {**body, "stream": stream})
            assert (refused.status, refused.headers["Retry-After"]) == (503, "1")
            assert refused.json["error"]["code"] == "queue_full"
        pace.run()
        assert [later.result().status for later in (running_ones, *queued)] == [200] * 3
        assert post(running.port, COMPLETIONS, body).status == 200


def test_conversations_that_wait_to_be_rendered_count_as_queued(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    go, real = threading.Event(), llm.render_chat
    monkeypatch.setattr(llm, "render_chat", lambda *a, **v: go.wait(30) and real(*a, **v))
    body = {"messages": [TELL], "max_tokens": 2}
    with live(llm, max_queued=3) as running:
        # As many as may run at once, and three more.
        waiting = [Later(lambda: post(running.port, CHAT, body)) for _ in range(64 + 3)]
        until(lambda: running.service._at_door == 67)
        assert post(running.port, CHAT, body).status == 503
        go.set()
        assert {later.result().status for later in waiting} <= {200, 503}
        assert sum(later.result().status == 200 for later in waiting) >= 64
        assert post(running.port, CHAT, body).status == 200


# Signals.


def test_a_server_that_drains_finishes_what_it_has_and_refuses_what_comes(llm: LLM, pace: Pace) -> None:
    with live(llm, drain_timeout=60.0) as running, pace.held():
        asked = {name: Later(lambda name=name: post(running.port, *ASKED[name])) for name in ("chat", "stream", "completion stream")}
        until(lambda: running.service.engine.unfinished == 3)
        pace.until_step(5)
        running.server.handle_exit(signal.SIGTERM, None)
        until(lambda: running.server.door.draining)
        for stream in (False, True):
            refused = post(running.port, CHAT, {"messages": [TELL], "stream": stream})
            assert (refused.status, refused.headers["Retry-After"]) == (503, "1")
            assert "shutting down" in refused.json["error"]["message"]
        assert get(running.port, "/health") == (200, {"status": "draining"})
        assert get(running.port, "/ready")[0] == 503
        pace.run()
        assert asked["chat"].result().json["choices"][0]["finish_reason"] == "stop"
        [chat], [completion] = (ends(asked[name].result().text) for name in ("stream", "completion stream"))
        assert (chat["finish_reason"], completion["finish_reason"]) == ("stop", "length")
        running.thread.join(30)
        assert not running.thread.is_alive()
        assert running.server.failure is None
        assert "finishing 3 requests, for 60 s at most; a second Ctrl-C ends them now" in running.said
        with pytest.raises(ConnectionRefusedError):
            post(running.port, CHAT, {})


def test_time_to_drain_that_runs_out_ends_the_rest_with_what_it_has(llm: LLM, pace: Pace) -> None:
    with live(llm, drain_timeout=0.2) as running, pace.held():
        asked = {name: Later(lambda name=name: post(running.port, *ASKED[name])) for name in ("chat", "stream")}
        until(lambda: running.service.engine.unfinished == 2)
        pace.until_step(9)
        unseen = Later(lambda: post(running.port, *ASKED["completion"]))
        until(lambda: running.service.engine.unfinished == 3)
        running.server.handle_exit(signal.SIGTERM, None)
        until(lambda: running.service.engine._stop)
        pace.end_step()
        [whole] = asked["chat"].result().json["choices"]
        [end] = ends(asked["stream"].result().text)
        assert whole["finish_reason"] == end["finish_reason"] == "abort"
        for said in (whole["message"]["content"], text_of(asked["stream"].result().text)):
            assert said
            assert REPLY.startswith(said)
        assert unseen.result().status == 503
        running.thread.join(30)
        assert running.server.failure is None
        assert pace.begun == 9


@pytest.mark.parametrize("where", ["running", "waiting"])
def test_a_second_signal_does_not_wait(llm: LLM, pace: Pace, where: str) -> None:
    with live(llm, drain_timeout=1000.0) as running, pace.held():
        if where == "waiting":
            Later(lambda: post(running.port, COMPLETIONS, {"prompt": "tell", "n": 64, "max_tokens": 1000}))
            pace.until_step(3)
        answer = Later(lambda: post(running.port, *ASKED["stream"]))
        until(lambda: running.service.engine.unfinished == 1 + (where == "waiting"))
        pace.until_step(5)
        for _ in range(2):
            running.server.handle_exit(signal.SIGINT, None)
        until(lambda: running.service.engine._stop)
        pace.end_step()
        running.thread.join(30)
        assert not running.thread.is_alive()
        [end] = ends(answer.result().text)
        assert end["finish_reason"] == "abort"
        assert pace.begun == 5


def test_a_client_that_takes_nothing_does_not_keep_a_server_that_leaves(llm: LLM, pace: Pace, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server, "GRACE_SECONDS", 1)
    body = {"messages": [TELL], "stream": True, "logprobs": True, "top_logprobs": 20}
    with live(llm) as running, bare(running.port, request(CHAT, body), receive_buffer=1024):
        until(lambda: running.server.server_state.connections)
        [link] = running.server.server_state.connections
        until(lambda: link.flow.write_paused)
        until(lambda: idle(llm))
        running.stop()
        assert running.server.failure is None


def test_requests_on_their_way_to_a_server_that_leaves_are_told_so(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    """One that is rendered, two whose grammars are compiled, and two that wait for a thread that compiles."""
    go, inside, render, check = threading.Event(), [], llm.render_chat, llm.engine.check

    def held(work: Callable[..., Any]) -> Callable[..., Any]:
        def slow(*arguments: Any, **options: Any) -> Any:
            inside.append(work)
            assert go.wait(30)
            return work(*arguments, **options)

        return slow

    with live(llm) as running:
        monkeypatch.setattr(llm.engine, "check", held(check))
        body = {"prompt": "tell", "response_format": {"type": "json_object"}}
        asked = [Later(lambda: post(running.port, COMPLETIONS, body)) for _ in range(4)]
        until(lambda: running.service.engine._entering == 4 and len(inside) == 2)
        monkeypatch.setattr(llm, "render_chat", held(render))
        asked.append(Later(lambda: post(running.port, CHAT, {"messages": [TELL]})))
        until(lambda: len(inside) == 3)
        running.server.handle_exit(signal.SIGTERM, None)
        until(lambda: not running.service.engine.healthy)
        go.set()
        for answer in asked:
            assert (answer.result().status, answer.result().headers["Retry-After"]) == (503, "1")
            assert "no more requests" in answer.result().json["error"]["message"]


@pytest.mark.parametrize("ways", [1, 2])
def test_a_signal_while_the_model_is_loaded_ends_the_server_at_once(llm: LLM, ways: int) -> None:
    go = threading.Event()

    def load() -> None:
        go.wait(60)
        raise RuntimeError("nobody needs it any more")

    with live(llm, load=load, ready=False) as running:
        until(lambda: running.said)
        for _ in range(ways):
            running.server.handle_exit(signal.SIGTERM, None)
        running.thread.join(30)
        assert not running.thread.is_alive()
        go.set()
        assert running.server.failure is None
        assert running.server.door.service is None


# What /health and /ready say.


def test_health_and_readiness_while_loading_then_ready_then_stalled(llm: LLM, pace: Pace) -> None:
    go = threading.Event()
    with live(llm, load=lambda: go.wait(60), ready=False, stall=0.1) as running:
        until(lambda: running.said)
        assert get(running.port, "/health") == (200, {"status": "loading"})
        status, body = get(running.port, "/ready")
        assert (status, body["status"]) == (503, "loading")
        for path, asked in (*ASKED.values(), ("/tokenize", {"prompt": "a"})):
            early = post(running.port, path, asked)
            assert (early.status, early.headers["Retry-After"]) == (503, "1")
            assert "loaded" in early.json["error"]["message"]
        go.set()
        until(lambda: get(running.port, "/ready") == (200, {"status": "ready"}))
        assert get(running.port, "/health") == (200, {"status": "ok"})
        with pace.held():
            answer = Later(lambda: post(running.port, COMPLETIONS, {"prompt": "tell", "max_tokens": 3}))
            until(lambda: get(running.port, "/health")[0] == 503)
            assert get(running.port, "/health")[1]["status"] == "stalled"
            assert get(running.port, "/ready")[0] == 503
        assert answer.result().status == 200
        until(lambda: get(running.port, "/health") == (200, {"status": "ok"}))


@pytest.mark.parametrize(
    "error", [SourceError("config.json: no such model"), UsageError("--max-seqs: too few"), MemoryError("no room"), RuntimeError("broken")]
)
def test_a_model_that_cannot_be_loaded_ends_the_server_with_the_loader_s_error(error: BaseException) -> None:
    def load() -> Loaded:
        raise error

    said: list[str] = []
    with pytest.raises(type(error)) as raised:
        serve(load, ServeOptions("tiny", port=0), say=said.append)
    assert raised.value is error
    assert said[0].endswith("; loading the model")


def test_a_port_in_use_is_refused_before_the_model_is_loaded() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(UsageError, match=f"--port: {port} on 127.0.0.1 is in use"):
            serve(lambda: pytest.fail("loaded"), ServeOptions("tiny", port=port), say=lambda line: None)


def test_a_server_goes_on_though_nobody_can_be_told(llm: LLM) -> None:
    """As when standard error is a file on a full disk, or a pipe that nobody reads any more."""

    def deaf(line: str) -> None:
        raise OSError(28, "No space left on device")

    go = threading.Event()
    with live(llm, drain_timeout=0.5, load=lambda: go.wait(30), ready=False) as running:
        until(lambda: running.said)
        running.server._tell = deaf
        go.set()
        until(lambda: get(running.port, "/ready")[0] == 200)
        assert post(running.port, COMPLETIONS, {"prompt": "tell", "max_tokens": 2}).status == 200
        running.stop()
        assert running.server.failure is None
