"""Whole measurements of a server that stands in for any other: what it is asked, what is made of its answers, and which rows fail."""

from __future__ import annotations

import json
import os
import signal
import socket
import threading
from collections import Counter
from typing import Any

import numpy as np
import pytest
from openai_stand_in import FRUIT, ScriptedClock, StandIn

from arctool.bench.serving.client import Server
from arctool.bench.serving.exchange import Endpoint
from arctool.bench.serving.plan import Load, Plan, Workload
from arctool.bench.serving.session import Result, Voicing, measure
from arctool.bench.serving.workloads import kinds
from arctool.errors import RequestError, UsageError

TWO = (Load(clients=2),)


def plan(**changes: Any) -> Plan:
    wanted = {"loads": TWO, "input_len": 12, "output_len": 6, "requests": 6, "warmups": 0, "cancel_after": 2, "turns": 3, "prefix_len": 20}
    return Plan(**{**wanted, **changes})


def bench(stand_in: StandIn, *, seed: int | None = None, key: str | None = None, timeout: float = 20, **changes: Any) -> Result:
    with stand_in.running() as url:
        return measure(Server.at(url + "/v1", timeout, key), plan(**changes), seed=seed)


def test_every_request_is_asked_for_its_whole_length_and_its_usage() -> None:
    stand_in = StandIn()
    found = bench(stand_in)
    assert (found.failed, found.model, found.refused, found.equal_lengths) == (False, "stand-in", (), True)
    assert found.notes == ()
    assert len(stand_in.asked) == 6
    for body in stand_in.asked:
        assert {name: value for name, value in body.items() if name != "prompt"} == {
            "model": "stand-in",
            "max_tokens": 6,
            "temperature": 0.0,
            "stream": True,
            "stream_options": {"include_usage": True},
            "ignore_eos": True,
            "min_tokens": 6,
        }
    row = found.rows[0]
    assert row.figures is not None
    assert (row.successful, row.figures.input_tokens, row.figures.output_tokens) == (6, 72, 36)
    assert row.figures.tokens_a_chunk == 1.0
    assert 0 < row.concurrency <= 2
    assert json.loads(json.dumps(found.to_json(), allow_nan=False))["rows"][0]["completed"] == 6


def test_times_are_those_of_the_script() -> None:
    clock = ScriptedClock()
    stand_in = StandIn(clock=clock, pauses=(0.3, 0.01, 0.02, 0.03, 0.04, 0.05))
    with stand_in.running() as url:
        found = measure(Server.at(url), plan(loads=(Load(clients=1),), requests=2), clock=clock)
    figures = found.rows[0].figures
    assert figures is not None
    for name, milliseconds in (("ttft", 300), ("tpot", 30), ("itl", 30), ("e2el", 450)):
        assert figures.spreads[name].mean == pytest.approx(milliseconds), name
    assert figures.spreads["itl"].std == pytest.approx(200**0.5)
    assert found.rows[0].duration == pytest.approx(0.9)
    assert figures.output_throughput == pytest.approx(12 / 0.9)


def test_carriage_returns_comments_and_single_bytes_change_nothing() -> None:
    wire = StandIn(frame=lambda data: b": still here\r\n\r\nevent: x\r\ndata: " + data + b"\r\n\r\n", byte_by_byte=True)
    for changes in ({}, {"endpoint": Endpoint.CHAT}):
        found = bench(wire, requests=2, **changes)
        assert found.rows[0].failure is None
        assert found.rows[0].figures is not None
        assert found.rows[0].figures.output_tokens == 12


@pytest.mark.parametrize("usage", ["apart", "together"])
@pytest.mark.parametrize("endpoint", list(Endpoint))
def test_tokens_are_the_servers_count_whatever_a_chunk_brings(usage: str, endpoint: Endpoint) -> None:
    found = bench(StandIn(usage=usage, burst=3), endpoint=endpoint)
    figures = found.rows[0].figures
    assert figures is not None
    assert (figures.output_tokens, figures.tokens_a_chunk) == (36, 3.0)
    assert found.notes == ("2 clients: a chunk brings 3.0 tokens: read TPOT, not ITL",)


@pytest.mark.parametrize(
    ("refused", "sent"),
    [
        ({"min_tokens"}, {"stream_options", "ignore_eos"}),
        ({"ignore_eos"}, {"stream_options", "min_tokens"}),
        ({"ignore_eos", "min_tokens"}, {"stream_options"}),
    ],
)
def test_a_field_that_the_server_refuses_is_left_out_and_named(refused: set[str], sent: set[str]) -> None:
    stand_in = StandIn(refuses=frozenset(refused))
    found = bench(stand_in)
    assert set(found.refused) == refused
    assert not found.failed
    assert all(set(body) & {"stream_options", "ignore_eos", "min_tokens"} == sent for body in stand_in.asked)
    forced = bool(sent - {"stream_options"})
    assert found.equal_lengths is forced
    assert found.rows[0].figures is not None
    assert found.rows[0].figures.answer_lengths == ((6, 6) if forced else (3, 3))
    assert any("unequal lengths" in note for note in found.notes) is not forced


def test_a_field_that_the_server_takes_and_ignores_shows_in_the_lengths() -> None:
    ignoring = StandIn(ignores=frozenset({"ignore_eos", "min_tokens"}))
    assert bench(ignoring).rows[0].failure == "6 of 6 requests failed; 6 of them: 3 tokens where 6 were asked for (finish_reason stop)"
    natural = bench(ignoring, natural=True)
    assert (natural.failed, natural.equal_lengths) == (False, False)
    assert not {"ignore_eos", "min_tokens"} & set(ignoring.asked[-1])


def test_without_usage_nothing_is_measured_unless_chunks_may_count() -> None:
    refusing = StandIn(refuses=frozenset({"stream_options"}))
    with pytest.raises(RequestError, match=r"refuses stream_options\.include_usage"):
        bench(refusing)
    counted = bench(refusing, count_chunks=True)
    assert counted.rows[0].figures is not None
    assert (counted.rows[0].figures.output_tokens, counted.rows[0].figures.input_tokens) == (36, None)
    assert "counted as a token" in " ".join(counted.notes)
    assert bench(StandIn(usage="")).rows[0].failure == "6 of 6 requests failed; 6 of them: the server told no usage"


FAULTS = {
    "busy": "HTTP 503: too many requests are waiting",
    "no stream": "answered with application/json where a stream was asked for",
    "error event": "error in the stream: the engine has died",
    "cut": "the connection broke",
    "early end": "the stream ended before the answer did",
    "no json": "an event that is no JSON object: {] what?",
    "short": "5 tokens where 6 were asked for",
    "zero": "no token came",
    "unseen": "6 tokens without any text",
    "no usage": "the server told no usage",
    "abort": "the server ended the answer: finish_reason abort",
}


@pytest.mark.parametrize("fault", list(FAULTS))
def test_one_faulty_answer_spoils_its_row_and_no_other(fault: str) -> None:
    stand_in = StandIn(faults={7: fault})
    found = bench(stand_in, loads=tuple(Load(clients=clients) for clients in (1, 2, 3)))
    first, second, third = found.rows
    assert (first.failure, third.failure) == (None, None)
    assert second.failure is not None
    assert second.failure.startswith(f"1 of 6 requests failed; 1 of them: {FAULTS[fault]}")
    assert (second.successful, second.failed, second.figures) == (5, 1, None)
    assert len(stand_in.asked) == 18
    assert found.failed


def test_a_token_that_cannot_be_shown_does_not_spoil_anything() -> None:
    for endpoint in Endpoint:
        assert not bench(StandIn(faults=dict.fromkeys(range(6), "hidden")), endpoint=endpoint).failed


def test_a_server_that_falls_silent_is_waited_for_no_longer_than_the_timeout() -> None:
    found = bench(StandIn(faults={0: "silence"}), timeout=0.3)
    assert found.rows[0].failure == "1 of 6 requests failed; 1 of them: no answer within 0.3 s"


def test_no_connection_is_used_twice_for_a_server_may_close_it_at_any_time() -> None:
    stand_in = StandIn()
    assert not bench(stand_in).failed
    assert len(stand_in.callers) == len(stand_in.asked) + len(stand_in.probes)


@pytest.mark.parametrize("clients", [1, 3, 6])
def test_a_closed_loop_keeps_its_clients_busy(clients: int) -> None:
    stand_in = StandIn(together=clients)
    row = bench(stand_in, loads=(Load(clients=clients),)).rows[0]
    assert row.failure is None
    assert (stand_in.most_at_once, row.peak) == (clients, clients)


def test_an_open_loop_keeps_its_times_whatever_the_server_does() -> None:
    clock = ScriptedClock()
    stand_in = StandIn(together=6)
    with stand_in.running() as url:
        found = measure(Server.at(url), plan(loads=(Load(rate=4.0),)), seed=5, clock=clock)
    assert found.rows[0].failure is None
    assert stand_in.most_at_once == 6
    assert found.rows[0].peak == 5, "the last one ends when it begins, by this clock"
    assert sum(clock.slept) == pytest.approx(5 / 4)
    assert found.rows[0].late == pytest.approx(0)


def test_an_open_loop_with_a_cap_has_no_more_than_that_at_once_and_says_how_late_it_was() -> None:
    stand_in = StandIn(together=2)
    row = bench(stand_in, loads=(Load(rate=float("inf"), cap=2),)).rows[0]
    assert row.failure is None
    assert (stand_in.most_at_once, row.peak) == (2, 2)
    assert row.late > 0


def test_a_sweep_never_asks_the_same_twice_and_a_seed_repeats_it() -> None:
    asked = []
    for seed in (None, None, 7, 7):
        stand_in = StandIn()
        found = bench(stand_in, seed=seed, loads=(Load(clients=1), Load(clients=2)), warmups=2)
        assert seed in (None, found.seed)
        assert len(stand_in.asked) == 2 * (6 + 2)
        asked.append(sorted(body["prompt"] for body in stand_in.asked))
        assert len(set(asked[-1])) == 16
    assert not set(asked[0]) & set(asked[1])
    assert asked[2] == asked[3]


def test_a_cache_that_knows_fresh_prompts_is_noted() -> None:
    assert "50% of the prompt tokens came from the server's cache" in bench(StandIn(cached=6)).notes[0]
    assert bench(StandIn(cached=6, overhead=6)).notes == ()
    assert bench(StandIn(cached=6), workload=Workload.SHARED_PREFIX).notes == ()


def test_a_failed_warm_up_fails_its_row_and_nothing_more_is_asked() -> None:
    stand_in = StandIn(faults={0: "busy"})
    found = bench(stand_in, warmups=1)
    assert found.rows[0].failure == "warm-up: HTTP 503: too many requests are waiting"
    assert len(stand_in.asked) == 1


def test_progress_goes_through_all_loads() -> None:
    seen: list[tuple[int, int]] = []
    with StandIn(faults={6: "busy"}).running() as url:
        wanted = plan(loads=(Load(clients=1), Load(clients=2)), workload=Workload.MULTI_TURN)
        measure(Server.at(url), wanted, progress=lambda done, total: seen.append((done, total)))
    assert sorted(seen) == seen
    assert seen[0] == (1, 12)
    assert seen[-1] == (12, 12)


def test_nobody_there_is_one_line_that_says_so() -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{free.getsockname()[1]}"
    with pytest.raises(RequestError, match=f"^{url}: cannot connect: Connection refused; is the server running there"):
        measure(Server.at(url), plan())
    with pytest.raises(RequestError, match=r"^http://no-such-host\.invalid: cannot connect: "):
        measure(Server.at("http://no-such-host.invalid"), plan())


def test_the_key_is_sent_and_its_lack_is_explained() -> None:
    stand_in = StandIn(key="secret")
    assert not bench(stand_in, key="secret").failed
    assert stand_in.keys == {"Bearer secret"}
    with pytest.raises(RequestError, match="HTTP 401: the server wants a key"):
        bench(stand_in)
    assert "secret" not in json.dumps(bench(stand_in, key="secret").to_json())


def test_the_model_is_the_only_one_or_must_be_named() -> None:
    with pytest.raises(UsageError, match=r"^--model: the server has 2 models; name one: a, b$"):
        bench(StandIn(models=("a", "b")))
    stand_in = StandIn(models=("a", "b"))
    with stand_in.running() as url:
        assert measure(Server.at(url), plan(), Voicing(model="b")).model == "b"
        with pytest.raises(RequestError, match="HTTP 404: no model c"):
            measure(Server.at(url), plan(), Voicing(model="c"))
    assert stand_in.probes[-1]["model"] == "c"
    assert stand_in.probes[-2]["model"] == "b", "a server without the model is not asked again with fewer fields"


def test_a_server_that_is_no_openai_server_is_told_apart() -> None:
    with StandIn().running() as url, pytest.raises(RequestError, match="HTTP 404; if this is an OpenAI server"):
        measure(Server.at(url + "/elsewhere"), plan())


def test_a_server_that_refuses_everything_is_named_with_its_own_words() -> None:
    with pytest.raises(RequestError, match="/v1/completions: HTTP 400: temperature: extra fields are not permitted"):
        bench(StandIn(refuses=frozenset({"temperature"})))
    with pytest.raises(RequestError, match="/v1/chat/completions: HTTP 400: response_format: extra"):
        bench(StandIn(refuses=frozenset({"response_format"})), workload=Workload.JSON)


def test_an_interrupted_sweep_keeps_the_rows_that_were_finished() -> None:
    stand_in = StandIn(faults={8: "silence"})
    main = threading.get_ident()

    def interrupt(done: int, total: int) -> None:
        if done == 8:
            signal.pthread_kill(main, signal.SIGINT)

    with stand_in.running() as url:
        found = measure(Server.at(url), plan(loads=(Load(clients=1), Load(clients=2))), progress=interrupt)
    assert found.interrupted
    assert [row.load.clients for row in found.rows] == [1]
    assert found.rows[0].figures is not None
    with stand_in.running() as url, pytest.raises(KeyboardInterrupt):
        measure(Server.at(url), plan(), progress=lambda done, total: os.kill(os.getpid(), signal.SIGINT))


def test_shared_prefixes_are_shared_and_suffixes_are_not() -> None:
    stand_in = StandIn(overhead=2)
    found = bench(stand_in, workload=Workload.SHARED_PREFIX, prefixes=2)
    assert not found.failed
    words = [body["prompt"].split() for body in stand_in.asked]
    assert {len(one) for one in words} == {18 + 12}
    assert len({tuple(one[:18]) for one in words}) == 2
    assert len({tuple(one[18:]) for one in words}) == 6


@pytest.mark.parametrize("endpoint", list(Endpoint))
def test_a_conversation_goes_on_with_what_was_answered(endpoint: Endpoint) -> None:
    stand_in = StandIn()
    found = bench(stand_in, workload=Workload.MULTI_TURN, endpoint=endpoint)
    assert found.rows[0].failure is None
    said = "".join(f" w{at}" for at in range(6))
    if endpoint is Endpoint.CHAT:
        lengths = sorted(len(body["messages"]) for body in stand_in.asked)
        assert lengths == [1, 1, 3, 3, 5, 5]
        longest = next(body["messages"] for body in stand_in.asked if len(body["messages"]) == 5)
        assert [message["role"] for message in longest] == ["user", "assistant"] * 2 + ["user"]
        assert longest[1]["content"] == longest[3]["content"] == said
    else:
        third = max((body["prompt"] for body in stand_in.asked), key=len)
        second = next(p for p in (body["prompt"] for body in stand_in.asked) if third.startswith(p + said) and p.count(said) == 1)
        assert second.split(said)[0] in [body["prompt"] for body in stand_in.asked]
    assert sorted(stand_in.prompt_tokens(body) for body in stand_in.asked) == [12, 12, 30, 30, 48, 48]


def test_a_conversation_ends_with_a_failed_turn_and_what_was_not_asked_failed_too() -> None:
    stand_in = StandIn(faults={0: "busy"})
    row = bench(stand_in, workload=Workload.MULTI_TURN, loads=(Load(clients=1),)).rows[0]
    assert (row.successful, row.failed, len(stand_in.asked)) == (3, 3, 4)


def test_json_answers_are_asked_for_by_schema_and_read() -> None:
    stand_in = StandIn()
    found = bench(stand_in, workload=Workload.JSON, output_len=30)
    assert (found.failed, found.equal_lengths) == (False, False)
    schema = stand_in.asked[0]["response_format"]["json_schema"]["schema"]
    assert set(json.loads(FRUIT)) == set(schema["required"])
    assert not {"ignore_eos", "min_tokens"} & set(stand_in.asked[0])
    assert len({body["messages"][0]["content"][:8] for body in stand_in.asked}) > 1
    assert "is no JSON" in str(bench(StandIn(json_answer="Sure: a pear"), workload=Workload.JSON).rows[0].failure)
    assert "lacks the required grams" in str(
        bench(StandIn(json_answer='{"name": "pear", "ripe": true}'), workload=Workload.JSON, output_len=30).rows[0].failure
    )
    assert "raise --output-len" in str(bench(StandIn(), workload=Workload.JSON).rows[0].failure)


def test_cancelled_requests_are_dropped_on_purpose_and_the_server_sees_it() -> None:
    stand_in = StandIn(together=2)
    found = bench(stand_in, workload=Workload.CANCEL, cancel_share=0.5, output_len=2000, input_len=4)
    row = found.rows[0]
    assert row.failure is None
    assert (row.successful, row.cancelled, row.failed) == (3, 3, 0)
    assert row.figures is not None
    assert row.figures.output_tokens == 3 * 2000
    assert stand_in.vanished == 3


def test_the_mixed_workload_has_all_of_it() -> None:
    stand_in = StandIn()
    wanted = plan(workload=Workload.MIXED, requests=100, output_len=400)
    order = kinds(wanted, np.random.default_rng(0))
    assert Counter(order) == wanted.kinds()
    assert len(set(order[:20])) == len(set(order[-20:])) == 3, "the kinds are not mixed"
    found = bench(stand_in, workload=Workload.MIXED, requests=10, output_len=400, cancel_after=3)
    row = found.rows[0]
    assert row.failure is None
    assert (row.successful, row.cancelled) == (9, 1)
    assert sum("response_format" in body for body in stand_in.asked) == 2
    assert row.figures is not None
    assert row.figures.output_tokens == 7 * 400 + 2 * len(range(0, len(FRUIT), 4))
