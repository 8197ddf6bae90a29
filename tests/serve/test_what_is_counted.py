"""Requests that are refused are counted and logged by their reason, wherever they are refused; what was no request is not counted."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Iterator

import pytest
from asking import CHAT
from live import Live, live, until
from prometheus_client.parser import text_string_to_metric_families
from scripted import scripted
from wire import JSON, get, post

KEY = "a-key-of-some-length"
HELLO = {"messages": [{"role": "user", "content": "Hello"}]}


@pytest.fixture
def server() -> Iterator[Live]:
    with live(scripted(lambda _: "Good day."), api_keys=(KEY,)) as running:
        yield running


def rejections(server: Live) -> dict[str, float]:
    body, _ = server.service.metrics.render()
    families = text_string_to_metric_families(body.decode())
    return {
        sample.labels["reason"]: sample.value
        for family in families
        if family.name == "arctool:admission_rejections"
        for sample in family.samples
        if sample.name.endswith("_total")
    }


def test_a_fresh_server_has_answered_nothing(server: Live) -> None:
    total = server.service.engine.telemetry().total
    assert (total.steps, total.generated_tokens, total.prefix_queries, dict(total.finished)) == (0, 0, 0, {})


def test_every_refusal_is_counted_and_logged_by_its_reason(server: Live) -> None:
    key = {"Authorization": f"Bearer {KEY}"}
    for body, headers, status in (
        (HELLO, {}, 401),
        ({**HELLO, "temperature": 9}, key, 400),
        ({**HELLO, "no_such": 1}, key, 400),
        ({**HELLO, "max_tokens": 5000}, key, 400),
        ({**HELLO, "model": "other"}, key, 404),
        (HELLO, {**key, "Content-Type": "text/plain"}, 415),
        (HELLO, key, 200),
    ):
        assert post(server.port, CHAT, body, headers={**JSON, **headers}).status == status
    wanted = ["invalid_api_key", "invalid_request_error", "unknown_field", "context_length_exceeded", "model_not_found"]
    until(lambda: len(server.logged) == 7)
    assert [json.loads(line).get("error") for line in server.logged] == [*wanted, "invalid_request_error", None]
    assert rejections(server) == {**dict.fromkeys(wanted, 1.0), "invalid_request_error": 2.0}


def test_an_error_within_a_stream_is_in_the_log_and_no_refusal() -> None:
    steps = [0]

    def break_off() -> None:
        steps[0] += 1
        if steps[0] > 3:
            raise RuntimeError("no more")

    with live(scripted(lambda _: "Good day to all of you.", before_step=break_off)) as server:
        steps[0] = 0
        assert b"engine_error" in post(server.port, CHAT, {**HELLO, "stream": True}).body
        until(lambda: server.logged)
        assert json.loads(server.logged[0])["error"] == "engine_error"
        assert rejections(server) == {}


def test_time_at_the_door_is_part_of_a_timeout() -> None:
    """Rendering takes one at a time; who waits for it waits like anybody else."""
    llm = scripted(lambda _: "Good day.")
    with live(llm) as server:
        assert llm.template is not None
        render, busy, free = llm.template.render, threading.Event(), threading.Event()

        def held(*arguments: object, **variables: object) -> str:
            busy.set()
            free.wait(20)
            return render(*arguments, **variables)  # type: ignore[arg-type]

        llm.template.render = held  # type: ignore[method-assign]
        first = threading.Thread(target=post, args=(server.port, CHAT, HELLO))
        first.start()
        busy.wait(20)
        began = time.monotonic()
        reply = post(server.port, CHAT, {**HELLO, "timeout": 0.2})
        assert (reply.status, reply.json["error"]["code"]) == (504, "timeout")
        assert time.monotonic() - began < 15
        free.set()
        first.join()


def test_probes_may_ask_by_head(server: Live) -> None:
    for path in ("/health", "/ready"):
        assert get(server.port, path, method="HEAD").status == 200
