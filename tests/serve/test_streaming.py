"""Streams, byte by byte: the shape that clients rely on, text that is never taken back, and an end that says how it went."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from typing import Any

import pytest
from live import Live, live
from scripted import scripted
from wire import connected, get, head, post, receive, stream, streaming

from arctool.run.llm import LLM

CHAT, PLAIN = "/v1/chat/completions", "/v1/completions"
REPLIES = {
    "wide": "Grüße, 漢字 and 😀👩‍👩‍👧 end",
    "long": "One two three four five six seven eight nine ten.",
    "stop": "It goes on and ENDS here, not ENDING quite, but now: THE END and nothing of this.",
    "head": "All of it, up to THE EN",
    "lines": "a\nb\r\nc\u2028d\u2029e\x85f\x0bg\x1eh\ni",
    "bytes": "x" * 50,
    "short": "ok",
}


def asked(path: str, word: str, **more: Any) -> dict[str, Any]:
    fields = {"messages": [{"role": "user", "content": word}]} if path == CHAT else {"prompt": word}
    return {**fields, "temperature": 0, "max_tokens": 200, **more}


def text_of(choice: dict[str, Any]) -> str:
    return str(choice["text"] if "text" in choice else choice["message"]["content"])


class Gate:
    """Stands before the engine's steps: lets them through, or stops or breaks one that is to come."""

    def __init__(self) -> None:
        self._open = threading.Event()
        self._open.set()
        self._until_shut = self._until_broken = 0

    def __call__(self) -> None:
        self._until_shut -= 1
        self._until_broken -= 1
        if self._until_shut == 0:
            self._open.clear()
        assert self._open.wait(30)
        if self._until_broken == 0:
            raise RuntimeError("a secret of ours: /home/model.py")

    def shut(self, step: int) -> None:
        """The `step`-th step from now has to wait for `open`."""
        self._until_shut = step

    def open(self) -> None:
        self._open.set()

    def break_step(self, step: int) -> None:
        """The `step`-th step from now fails."""
        self._until_broken = step


@pytest.fixture(scope="module")
def gate() -> Gate:
    return Gate()


@pytest.fixture(scope="module")
def llm(gate: Gate) -> LLM:
    return scripted(REPLIES, before_step=gate)


@pytest.fixture(scope="module")
def server(llm: LLM) -> Iterator[Live]:
    with live(llm, keep_alive=0.03) as running:
        yield running


def pieces_of(llm: LLM, text: str) -> list[bytes]:
    """The bytes of the tokens that the model says a text with."""
    assert llm.tokenizer is not None
    return [llm.tokenizer.token_bytes(token) for token in llm.tokenizer.encode(text, add_special_tokens=False)]


def whole(piece: bytes) -> bool:
    try:
        piece.decode("utf-8")
    except UnicodeDecodeError:
        return False
    return True


@pytest.mark.parametrize("path", [CHAT, PLAIN])
def test_the_head_of_a_stream(path: str, server: Live) -> None:
    reply = stream(server.port, path, asked(path, "short")).reply
    assert reply.status == 200
    assert reply.header("Content-Type") == "text/event-stream; charset=utf-8"
    assert reply.header("Cache-Control") == "no-cache"
    assert reply.header("X-Accel-Buffering") == "no"
    assert reply.header("Transfer-Encoding") == "chunked"
    assert reply.header("Content-Length") is None


@pytest.mark.parametrize("n", [1, 3])
def test_a_chat_streams_role_then_text_then_one_end_then_usage_then_done(n: int, server: Live) -> None:
    found = stream(server.port, CHAT, asked(CHAT, "long", n=n, stream_options={"include_usage": True}))
    *chunks, last = found.chunks
    assert found.data.count("[DONE]") == 1
    for chunk in [*chunks, last]:
        assert set(chunk) == {"id", "object", "created", "model", "choices", "usage"}
        assert (chunk["object"], chunk["model"]) == ("chat.completion.chunk", "tiny")
        assert (chunk["id"], chunk["created"]) == (last["id"], last["created"])
    assert last["choices"] == []
    assert last["usage"]["completion_tokens"] == n * (len(pieces_of(server.service.llm, REPLIES["long"])) + 1)
    assert all(chunk["usage"] is None and len(chunk["choices"]) == 1 for chunk in chunks)
    assert [chunk["choices"][0]["index"] for chunk in chunks[:n]] == list(range(n))
    for index in range(n):
        first, *middle, end = found.choices(index)
        assert first == {"index": index, "delta": {"role": "assistant", "content": ""}, "logprobs": None, "finish_reason": None}
        assert end == {"index": index, "delta": {}, "logprobs": None, "finish_reason": "stop"}
        assert all(set(one["delta"]) == {"content"} and one["delta"]["content"] and one["finish_reason"] is None for one in middle)
        assert "".join(found.pieces(index)) == REPLIES["long"]
        assert len(middle) > 5


@pytest.mark.parametrize("n", [1, 2])
def test_a_completion_streams_text_and_one_end(n: int, server: Live) -> None:
    found = stream(server.port, PLAIN, asked(PLAIN, "long", n=n, stream_options={"include_usage": True}))
    *chunks, last = found.chunks
    assert (last["choices"], last["usage"]["prompt_tokens"]) == ([], len(server.service.llm.encode("long")))
    for chunk in chunks:
        assert set(chunk) == {"id", "object", "created", "model", "choices", "usage"}
        assert (chunk["object"], chunk["id"]) == ("text_completion", last["id"])
        assert set(chunk["choices"][0]) == {"index", "text", "logprobs", "finish_reason"}
    for index in range(n):
        assert found.finish(index) == found.choices(index)[-1]["finish_reason"] == "stop"
        assert "".join(found.pieces(index)) == REPLIES["long"]


@pytest.mark.parametrize("path", [CHAT, PLAIN])
@pytest.mark.parametrize("options", [None, {}, {"include_usage": False}])
def test_without_being_asked_a_stream_does_not_tell_usage(options: Any, path: str, server: Live) -> None:
    found = stream(server.port, path, asked(path, "short", stream_options=options))
    assert all("usage" not in chunk and chunk["choices"] for chunk in found.chunks)


@pytest.mark.parametrize("path", [CHAT, PLAIN])
@pytest.mark.parametrize("word", REPLIES)
def test_pieces_are_whole_characters_and_together_the_whole_answer(word: str, path: str, server: Live, llm: LLM) -> None:
    found = stream(server.port, path, asked(path, word))
    assert "".join(found.pieces()) == REPLIES[word] == text_of(post(server.port, path, asked(path, word)).json["choices"][0])
    assert not any("\ufffd" in piece for piece in found.pieces())
    if word == "wide":
        assert sum(not whole(piece) for piece in pieces_of(llm, REPLIES[word])) > 10
    if word == "lines":  # whatever a client takes for the end of a line
        body = found.reply.body.decode()
        assert body.splitlines() == body.removesuffix("\n").split("\n")


@pytest.mark.parametrize("path", [CHAT, PLAIN])
@pytest.mark.parametrize(("stop", "cut"), [("THE END", "THE END"), (["nothing", "E END", "END and"], "E END"), (["HERE", "ENDI"], "ENDI")])
def test_a_stop_string_that_lies_across_tokens_never_leaks(stop: Any, cut: str, path: str, server: Live, llm: LLM) -> None:
    assert cut.encode() not in pieces_of(llm, REPLIES["stop"])
    found = stream(server.port, path, asked(path, "stop", stop=stop))
    text = REPLIES["stop"].split(cut)[0]
    assert "".join(found.pieces()) == text == text_of(post(server.port, path, asked(path, "stop", stop=stop)).json["choices"][0])
    assert found.finish() == "stop"
    assert len(found.pieces()) > 5


@pytest.mark.parametrize("path", [CHAT, PLAIN])
def test_what_was_held_back_for_a_stop_string_comes_at_the_end(path: str, server: Live) -> None:
    found = stream(server.port, path, asked(path, "head", stop=["THE END", "EN!"]))
    assert "".join(found.pieces()) == REPLIES["head"]


@pytest.mark.parametrize("streamed", [True, False])
@pytest.mark.parametrize("word", ["wide", "head", "stop", "lines"])
def test_the_bytes_of_all_logprobs_are_the_text(word: str, streamed: bool, server: Live) -> None:
    fields = asked(CHAT, word, logprobs=True, top_logprobs=2, stop=["THE END!", "EN?"])
    choices = stream(server.port, CHAT, fields).choices() if streamed else post(server.port, CHAT, fields).json["choices"]
    found = [token for choice in choices if choice["logprobs"] for token in choice["logprobs"]["content"]]
    assert b"".join(bytes(token["bytes"]) for token in found) == REPLIES[word].encode()
    assert all(token["logprob"] <= 0 and len(token["top_logprobs"]) == 2 for token in found)
    if streamed:  # with the text that they make, not before it and not long after
        said = told = ""
        for choice in choices:
            said += choice["delta"].get("content", "")
            told += "".join(bytes(token["bytes"]).decode("latin-1") for token in (choice["logprobs"] or {"content": []})["content"])
            assert len(told) >= len(said.encode())
    plain = asked(PLAIN, word, logprobs=1, stop=["THE END!", "EN?"])
    choices = stream(server.port, PLAIN, plain).choices() if streamed else post(server.port, PLAIN, plain).json["choices"]
    assert sum(len(choice["logprobs"]["tokens"]) for choice in choices if choice["logprobs"]) == len(found)


def test_a_stream_that_waits_says_that_it_lives(server: Live, gate: Gate) -> None:
    gate.shut(1)
    with streaming(server.port, CHAT, asked(CHAT, "long")) as lines:
        try:
            found = []
            while sum(line.startswith(":") for line in found) < 4:
                found.append(next(lines))
        finally:
            gate.open()
        rest = list(lines)
    assert [line for line in found if line and not line.startswith(":")] == [line for line in found if '"role":"assistant"' in line]
    events = [json.loads(line.removeprefix("data: ")) for line in rest if line.startswith("data: {")]
    assert "".join(event["choices"][0]["delta"].get("content", "") for event in events) == REPLIES["long"]
    assert [line for line in rest if line][-1] == "data: [DONE]"


@pytest.mark.parametrize("path", [CHAT, PLAIN])
def test_what_fails_after_the_first_byte_is_an_event_and_the_end(path: str, server: Live, gate: Gate) -> None:
    gate.break_step(8)
    reply = stream(server.port, path, asked(path, "long")).reply
    *_, last = reply.body.decode().removesuffix("\n\n").split("\n\n")
    error = json.loads(last.removeprefix("data: "))["error"]
    assert error == {
        "message": "the engine failed in a step of this request",
        "type": "engine_error",
        "param": None,
        "code": "engine_error",
    }
    assert b'"O"' in reply.body
    assert b"[DONE]" not in reply.body
    assert b'finish_reason":"' not in reply.body
    assert "".join(stream(server.port, path, asked(path, "long")).pieces()) == REPLIES["long"]


@pytest.mark.parametrize("path", [CHAT, PLAIN])
def test_what_fails_before_the_first_byte_of_a_whole_answer_is_an_error(path: str, server: Live, gate: Gate) -> None:
    gate.break_step(6)
    reply = post(server.port, path, asked(path, "long"))
    assert reply.status == 500
    assert reply.error["message"] == "the engine failed in a step of this request"


def test_one_prompt_of_several_that_fails_ends_the_stream_of_all(server: Live, gate: Gate) -> None:
    gate.break_step(4)
    reply = stream(server.port, PLAIN, {**asked(PLAIN, "long"), "prompt": ["long", "wide", "stop"]}).reply
    assert reply.body.count(b'"error"') == 1
    assert b"[DONE]" not in reply.body


@pytest.mark.parametrize("path", [CHAT, PLAIN])
def test_a_connection_serves_on_after_a_stream_and_after_an_error(path: str, server: Live) -> None:
    with connected(server.port) as door:
        for body, status in ((asked(path, "short", stream=True), 200), (asked(path, "short", top_p=5), 400), (asked(path, "short"), 200)):
            data = json.dumps(body).encode()
            door.sendall(head("POST", path, {"Content-Type": "application/json", "Content-Length": str(len(data))}) + data)
            assert receive(door, "POST").status == status
        door.sendall(head("GET", "/health"))
        assert receive(door).json == {"status": "ok"}


def test_a_client_of_http_1_0_gets_its_stream_until_the_connection_ends(server: Live) -> None:
    data = json.dumps(asked(PLAIN, "short", stream=True)).encode()
    with connected(server.port) as door:
        door.sendall(
            f"POST {PLAIN} HTTP/1.0\r\nHost: localhost\r\nContent-Type: application/json\r\nContent-Length: {len(data)}\r\n\r\n".encode()
            + data
        )
        reply = receive(door, "POST")
    assert reply.header("Transfer-Encoding") is None
    assert reply.body.endswith(b"data: [DONE]\n\n")
    assert get(server.port, "/health").status == 200
