"""How much, how fast, from where: what the server refuses before it reads it, and how it says so."""

from __future__ import annotations

import contextlib
import json
import socket
import time
from collections.abc import Iterator
from typing import Any

import pytest
from live import Live, live, until
from scripted import scripted
from wire import JSON, Answers, closed, connected, get, head, post, receive, send

from arctool.run.llm import LLM
from arctool.serve import limits
from arctool.serve.problems import Problem
from arctool.serve.strict_json import MAX_CONTAINERS, MAX_NESTING, parse_body

CHAT, PLAIN = "/v1/chat/completions", "/v1/completions"
MOST = 20_000
"""Bytes of a body, here."""
SLOW = 0.3
"""Seconds for a body, here."""


def body_of(size: int) -> bytes:
    """A good request of exactly so many bytes."""
    bare = json.dumps({"prompt": "Hi", "max_tokens": 2, "user": ""}).encode()
    return bare.replace(b'"user": ""', b'"user": "' + b"x" * (size - len(bare)) + b'"')


def chunked(*pieces: bytes) -> bytes:
    return b"".join(f"{len(piece):x}\r\n".encode() + piece + b"\r\n" for piece in pieces)


CHUNKED = head("POST", PLAIN, {**JSON, "Transfer-Encoding": "chunked"})


def sized(size: int, **more: str) -> bytes:
    return head("POST", PLAIN, {**JSON, "Content-Length": str(size), **more})


@pytest.fixture(scope="module")
def llm() -> LLM:
    return scripted({"": "yes"})


@pytest.fixture(scope="module")
def server(llm: LLM) -> Iterator[Live]:
    with live(llm, max_body=MOST, body_timeout=SLOW) as running:
        yield running


def answers(server: Live) -> None:
    """A good request is answered as ever."""
    assert post(server.port, PLAIN, {"prompt": "Hi", "max_tokens": 9}).json["choices"][0]["text"] == "yes"


@pytest.mark.parametrize("size", [MOST - 1, MOST, MOST + 1])
@pytest.mark.parametrize("whole", [True, False], ids=["sized", "chunked"])
def test_a_body_may_be_as_long_as_the_limit(whole: bool, size: int, server: Live) -> None:
    body = body_of(size)
    reply = post(server.port, PLAIN, body) if whole else send(server.port, CHUNKED, chunked(body[:7000], body[7000:]), b"0\r\n\r\n")
    if size <= MOST:
        assert reply.status == 200
    else:
        assert (reply.status, reply.error["code"]) == (413, "request_too_large")
        assert f"at most {MOST} bytes" in reply.error["message"]
        assert reply.header("Connection") == "close"
    answers(server)


def test_what_is_far_too_large_is_refused_quickly_and_never_tokenised(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    with live(llm) as server:
        seen: list[str] = []
        monkeypatch.setattr(llm, "encode_text", lambda text, **_: seen.append(text))
        for path, field in (
            (CHAT, {"messages": [{"role": "user", "content": "word " * 1_900_000}]}),
            (PLAIN, {"prompt": "word " * 1_900_000}),
        ):
            body = json.dumps(field).encode()
            assert len(body) > 9_000_000
            began = time.monotonic()
            assert post(server.port, path, body).status == 413
            assert send(server.port, sized(len(body), Expect="100-continue")).status == 413
            assert time.monotonic() - began < 2
        assert seen == []


def test_a_text_that_no_context_holds_is_refused_before_it_is_tokenised(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    assert llm.tokenizer is not None
    tokenizer = llm.tokenizer
    seen: list[int] = []
    encode = tokenizer.encode

    def watched(text: str, *, add_special_tokens: bool) -> list[int]:
        seen.append(len(text))
        return encode(text, add_special_tokens=add_special_tokens)

    monkeypatch.setattr(tokenizer, "encode", watched)
    with live(llm) as server:
        for size in (100_000, 1_900_000, 5_000_000):
            for path, fields in (
                (CHAT, {"messages": [{"role": "user", "content": "w" * size}]}),
                (PLAIN, {"prompt": "w" * size}),
                (PLAIN, {"prompt": ["Hi", "w" * size]}),
                ("/tokenize", {"prompt": "w" * size}),
                ("/tokenize", {"messages": [{"role": "user", "content": "w" * size}]}),
            ):
                reply = post(server.port, path, fields)
                assert reply.status == 400
                assert reply.error["param"] == ("messages" if "messages" in fields else "prompt")
        assert all(size < 60 for size in seen)


MANY: dict[str, Any] = {
    "unknown fields": {f"f{n}": n for n in range(300_000)},
    "messages of no role": {"messages": [{}] * 1_000_000},
    "some messages of no role": {"messages": [{}] * 40_000},
    "messages that are none": {"messages": [5] * 2_000_000},
    "parts of no kind": {"messages": [{"role": "user", "content": [{}] * 40_000}]},
    "parts of no text": {"messages": [{"role": "user", "content": [{"type": "text"}] * 40_000}]},
    "variables": {"messages": [{"role": "user", "content": "Hi"}], "chat_template_kwargs": {f"f{n}": n for n in range(300_000)}},
    "tools that are none": {"messages": [{"role": "user", "content": "Hi"}], "tools": [5] * 2_000_000},
    "token ids": {"prompt": [5] * 2_000_000},
    "token ids, echoed": {"prompt": [5] * 2_000_000, "echo": True},
    "prompts": {"prompt": [[5]] * 1_000_000},
    "stop tokens": {"prompt": "Hi", "stop_token_ids": ["x"] * 1_000_000},
    "stops": {"prompt": "Hi", "stop": ["x"] * 1_000_000},
    "biases": {"prompt": "Hi", "logit_bias": {str(n): 1 for n in range(400_000)}},
    "metadata": {"prompt": "Hi", "metadata": {f"f{n}": n for n in range(300_000)}},
}
"""Bodies within the limit of bytes."""

ENDLESS = [(name, CHAT if "messages" in body else PLAIN) for name, body in MANY.items()]
ENDLESS += [(name, "/v1/messages") for name, body in MANY.items() if "messages" in body]


@pytest.mark.parametrize(("name", "path"), ENDLESS)
def test_no_body_within_the_limit_holds_everybody_up(name: str, path: str, patient: Live) -> None:
    """Before there were limits of what is in it, each took 2 to 20 seconds of the loop that serves all."""
    data = json.dumps(MANY[name]).encode()
    assert len(data) <= 8 << 20
    began = time.process_time()
    reply = post(patient.port, path, data)
    took = time.process_time() - began  # of all threads: a busy machine makes it no longer
    assert reply.status == 400
    assert reply.json["error"]["message"]
    assert took < 4


@pytest.mark.parametrize("items", [[5] * 2_000_000, [{}] * 40_000, [{"type": "message"}] * 40_000], ids=["none", "no kind", "empty"])
def test_nor_do_the_items_of_responses(items: Any, patient: Live) -> None:
    began = time.process_time()
    for body in ({"input": items}, {"input": "Hi", "tools": items}, {"input": "Hi", "include": items}):
        assert post(patient.port, "/v1/responses", body).status == 400
    assert time.process_time() - began < 8


@pytest.fixture(scope="module")
def patient(llm: LLM) -> Iterator[Live]:
    with live(llm) as running:
        yield running


def test_a_body_that_does_not_arrive_in_time_is_given_up(server: Live) -> None:
    for start in (sized(500) + b'{"prompt"', CHUNKED + chunked(b'{"prompt"'), sized(500)):
        with connected(server.port) as door:
            door.sendall(start)
            reply = receive(door, "POST")
            assert (reply.status, reply.error["code"]) == (408, "body_timeout")
            assert closed(door)
    answers(server)


@pytest.mark.parametrize("body", [b"hello", b"[]", b'{"a": NaN}', b"[" * 10_000, body_of(MOST + 1)], ids=lambda body: repr(body[:10]))
def test_a_refusal_of_what_has_arrived_does_not_wait_for_more(body: bytes, server: Live) -> None:
    began = time.monotonic()
    assert post(server.port, PLAIN, body).status in (400, 413)
    assert send(server.port, CHUNKED, chunked(body), b"0\r\n\r\n").status in (400, 413)
    assert time.monotonic() - began < 1.5


def test_a_body_that_trickles_is_given_up_all_the_same(server: Live) -> None:
    body = body_of(200)
    with connected(server.port) as door:
        door.settimeout(0.02)
        door.sendall(sized(len(body)))
        heard = b""
        for byte in body:
            with contextlib.suppress(OSError):
                door.sendall(bytes([byte]))
                heard += door.recv(65536)
            if heard:
                break
        assert heard.startswith(b"HTTP/1.1 408")


def test_clients_that_vanish_in_the_middle_leave_nothing(server: Live, monkeypatch: pytest.MonkeyPatch) -> None:
    """What has arrived of a body counts while it is held, and no longer."""
    monkeypatch.setattr(limits, "SMALL_BODY", 0)
    monkeypatch.setattr(limits, "MAX_BODIES", 40)
    for start in (CHUNKED + chunked(b'{"pro'), sized(MOST) + b'{"pro', sized(MOST)):
        for _ in range(6):
            doors = [socket.create_connection(("127.0.0.1", server.port)) for _ in range(3)]
            for door in doors:
                door.sendall(start)
            for door in doors:
                door.close()
    until(lambda: post(server.port, PLAIN, {"prompt": "Hi"}).status == 200)
    answers(server)


def test_bodies_that_were_announced_and_do_not_come_keep_nobody_out(server: Live, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "MAX_BODIES", 3 * MOST)
    with contextlib.ExitStack() as stack:
        for start in (CHUNKED + chunked(b'{"pro'), sized(MOST) + b'{"pro', sized(MOST)) * 5:
            stack.enter_context(connected(server.port)).sendall(start)
        answers(server)


def test_too_many_bodies_at_once_are_refused_until_there_is_room(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    """Three are nearly whole. What is small, or arrives in one piece, is let in all the same."""
    begun, small = body_of(MOST)[:-10], 60
    monkeypatch.setattr(limits, "SMALL_BODY", small)
    monkeypatch.setattr(limits, "MAX_BODIES", 3 * (len(begun) - small))
    with live(llm, max_body=MOST) as server, contextlib.ExitStack() as stack:
        doors = [stack.enter_context(connected(server.port)) for _ in range(3)]
        for door in doors:
            door.sendall(sized(MOST) + begun)
        until(lambda: send(server.port, sized(MOST) + begun).status == 503)
        assert send(server.port, CHUNKED + chunked(begun)).status == 503
        assert post(server.port, PLAIN, body_of(200)).status == 200
        with connected(server.port) as door:
            door.sendall(sized(small) + body_of(small)[:-10])
            answers(server)
            door.sendall(body_of(small)[-10:])
            assert receive(door, "POST").status == 200
        for door in doors:
            door.sendall(body_of(MOST)[-10:])
            assert receive(door, "POST").status == 200
        assert send(server.port, CHUNKED, chunked(body_of(MOST - 5)), b"0\r\n\r\n").status == 200


@pytest.mark.parametrize(
    "rest", [b"zz\r\nhello\r\n", b"-5\r\nhello\r\n", b"5\r\nhelloX\r\n", b"ffffffffffffffffffffff\r\n", b"5" * 30_000], ids=repr
)
def test_chunks_that_are_none_end_the_connection(rest: bytes, server: Live) -> None:
    with connected(server.port) as door:
        door.sendall(CHUNKED + rest[:40_000])
        door.settimeout(10)
        heard = b""
        with contextlib.suppress(OSError):
            while piece := door.recv(65536):
                heard += piece
    assert heard == b"" or heard.startswith(b"HTTP/1.1 4")
    answers(server)


def test_leave_to_send_is_given_to_whom_it_may_be(server: Live) -> None:
    body = body_of(100)
    with connected(server.port) as door:
        door.sendall(sized(len(body), Expect="100-continue"))
        door.settimeout(10)
        assert door.recv(65536).startswith(b"HTTP/1.1 100 ")
        door.sendall(body)
        assert receive(door, "POST").status == 200
    for start, status in (
        (sized(MOST + 1, Expect="100-continue"), 413),
        (head("POST", PLAIN, {"Content-Type": "text/plain", "Content-Length": "5", "Expect": "100-continue"}), 415),
    ):
        assert send(server.port, start).status == status


@pytest.mark.parametrize("headers", [{}, {"Content-Length": "0"}])
def test_a_post_without_a_body_is_refused(headers: dict[str, str], server: Live) -> None:
    reply = send(server.port, head("POST", PLAIN, {**JSON, **headers}))
    assert (reply.status, reply.error["param"]) == (400, "body")


def test_requests_that_come_in_one_piece_are_answered_in_turn(server: Live) -> None:
    body = body_of(100)
    with connected(server.port) as door:
        door.sendall(sized(len(body)) + body + head("GET", "/health") + sized(len(body)) + body + head("GET", "/nothing"))
        answers_in_turn = Answers(door)
        assert [receive(answers_in_turn, method).status for method in ("POST", "GET", "POST", "GET")] == [200, 200, 200, 404]


def test_a_head_is_measured_however_it_arrives(server: Live) -> None:
    for size, status in ((15_000, 200), (17_000, 431)):
        whole = head("GET", "/health", {"A": "x" * size})
        for pieces in ([whole], [whole[:9000], whole[9000:]], [whole[i : i + 1000] for i in range(0, len(whole), 1000)]):
            reply = send(server.port, *pieces)
            assert reply.status == status
            if status == 431:
                assert reply.error["code"] == "headers_too_large"
    answers(server)


HOSTS = {
    "localhost": 200,
    "LOCALHOST:8000": 200,
    "127.0.0.1": 200,
    "127.0.0.1:9": 200,
    "[::1]": 200,
    "[::1]:8000": 200,
    "": 403,
    "evil.example": 403,
    "evil.example:8000": 403,
    "localhost.evil.example": 403,
    "127.0.0.1.evil.example": 403,
    "127.0.0.1@evil.example": 403,
    "evil.example/localhost": 403,
    "localhost:80:80": 403,
    "0.0.0.0": 403,
    "[::1]evil": 403,
    "xn--localhost-9za": 403,
}


@pytest.mark.parametrize("host", HOSTS)
def test_a_name_that_points_here_from_elsewhere_gets_no_answer(host: str, server: Live) -> None:
    """DNS rebinding: a page of evil.example lets its name point to 127.0.0.1, and its script is of the same origin then."""
    for reply in (
        get(server.port, "/v1/models", host=host),
        post(server.port, PLAIN, body_of(100), host=host),
        get(server.port, "/", host=host),
    ):
        assert reply.status == HOSTS[host]
        if reply.status == 403:
            assert reply.error["type"] == "permission_error"


def test_an_operator_adds_names_and_a_public_address_has_any(llm: LLM) -> None:
    with live(llm, allowed_hosts=("Box.Example",)) as server:
        for host, status in (("box.example", 200), ("BOX.example:80", 200), ("localhost", 200), ("other.example", 403)):
            assert get(server.port, "/v1/models", host=host).status == status
    with live(llm, host="0.0.0.0") as server:
        assert get(server.port, "/v1/models", host="anything.example").status == 200
    with live(llm, host="0.0.0.0", allowed_hosts=("box.example",)) as server:
        assert [get(server.port, "/v1/models", host=name).status for name in ("box.example", "evil.example")] == [200, 403]


def nested(depth: int) -> bytes:
    return b'{"a": ' + b"[" * (depth - 1) + b"]" * (depth - 1) + b"}"


def test_nesting_and_number_of_objects_have_exact_limits() -> None:
    assert parse_body(nested(MAX_NESTING))
    full = b'{"a": [' + b",".join([b"[]"] * (MAX_CONTAINERS - 2)) + b"]}"
    assert parse_body(full)
    brackets = json.dumps({"text": '[{\\"' * MAX_CONTAINERS}).encode()
    assert parse_body(brackets)
    for body, words in (
        (nested(MAX_NESTING + 1), "nesting"),
        (full[:-2] + b",{}]}", "objects and lists"),
        (nested(100_000), "objects and lists"),
    ):
        with pytest.raises(Problem, match=words):
            parse_body(body)
