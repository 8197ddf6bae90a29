"""The figures of a load: by hand, under vLLM's definitions; and the rows that have none, with their reason."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest

from arctool.bench.serving.exchange import Ask, Endpoint, Exchange, Outcome, objection
from arctool.bench.serving.measurement import Spread, peak, row_json, row_of, spread
from arctool.bench.serving.plan import Load, Plan

ASK = Ask("random", Endpoint.COMPLETIONS, b"", prompt_tokens=10, output_tokens=5)
ONE = Outcome(100.0, 100.6, 100.2, 100.6, (0.1, 0.1, 0.1, 0.1), 5, 10, 0, 5, "length", status=200)
"""200 ms to the first token, 400 ms for the other four."""
TWO = replace(ONE, sent=100.5, ended=101.5, first=100.9, last=101.3, cached_tokens=4)
"""400 ms to the first token, 400 ms for the other four, 200 ms more until the connection was closed."""
LOAD = Load(clients=2)
VLLM_NAMES = (
    *("completed", "failed", "duration", "total_input_tokens", "total_output_tokens", "request_throughput", "output_throughput"),
    *("total_token_throughput", "max_concurrency", "max_concurrent_requests", "mean_ttft_ms", "median_ttft_ms", "std_ttft_ms"),
    *("p99_ttft_ms", "mean_tpot_ms", "p90_itl_ms", "p50_e2el_ms"),
)
PLAN = Plan((LOAD,), input_len=10, output_len=5, requests=2, cancel_after=2)


def exchanges(*outcomes: Outcome, ask: Ask = ASK) -> list[Exchange]:
    return [Exchange(ask, outcome) for outcome in outcomes]


def test_the_figures_are_those_of_vllm() -> None:
    row = row_of(replace(PLAN, percentiles=(25, 99)), LOAD, exchanges(ONE, TWO), cpu=0.3)
    figures = row.figures
    assert figures is not None
    assert (row.successful, row.failed, row.cancelled, row.failure, row.peak) == (2, 0, 0, None, 2)
    assert row.duration == pytest.approx(1.5)
    assert row.concurrency == pytest.approx((0.6 + 1.0) / 1.5)
    assert row.client == pytest.approx(0.2)
    assert (figures.input_tokens, figures.output_tokens, figures.cached_tokens) == (20, 10, 4)
    assert figures.request_throughput == pytest.approx(2 / 1.5)
    assert figures.output_throughput == pytest.approx(10 / 1.5)
    assert figures.total_throughput == pytest.approx(30 / 1.5)
    for name, mean, std in (("ttft", 300, 100), ("tpot", 100, 0), ("itl", 100, 0), ("e2el", 700, 100)):
        found = figures.spreads[name]
        assert (found.mean, found.median, found.std) == pytest.approx((mean, mean, std), abs=1e-6)
    assert dict(figures.spreads["ttft"].percentiles) == pytest.approx({25: 250, 99: 398})
    assert figures.goodput is None


def test_a_single_token_has_no_time_per_output_token_and_no_gap() -> None:
    single = replace(ONE, completion_tokens=1, gaps=(), last=100.2)
    row = row_of(PLAN, LOAD, exchanges(single, single, ask=replace(ASK, output_tokens=1)))
    assert row.figures is not None
    assert set(row.figures.spreads) == {"ttft", "e2el"}


@pytest.mark.parametrize(
    ("goodput", "good"),
    [((("ttft", 300.0),), 1), ((("ttft", 400.1), ("tpot", 100.1)), 2), ((("tpot", 99.0),), 0), ((("e2el", 700.0), ("ttft", 300.0)), 1)],
)
def test_goodput_counts_requests_that_meet_every_limit(goodput: tuple[tuple[str, float], ...], good: int) -> None:
    row = row_of(replace(PLAN, goodput=goodput), LOAD, exchanges(ONE, TWO))
    assert row.figures is not None
    assert row.figures.goodput == pytest.approx(good / 1.5)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"failure": "HTTP 503: busy"}, "HTTP 503: busy"),
        ({"completion_tokens": 0}, "no token came"),
        ({"completion_tokens": None}, "the server told no usage"),
        ({"completion_tokens": 4, "finish_reason": "stop"}, "4 tokens where 5 were asked for (finish_reason stop)"),
        ({"completion_tokens": 6}, "6 tokens where 5 were asked for"),
        ({"first": None, "chunks": 0}, "5 tokens without any text"),
        ({"prompt_tokens": 9}, "the server counted 9 prompt tokens where 10 were sent"),
        ({"finish_reason": "abort"}, "the server ended the answer: finish_reason abort"),
    ],
)
def test_an_outcome_that_is_no_measurement_spoils_its_row(changes: dict[str, Any], words: str) -> None:
    wrong = replace(TWO, **changes)
    assert words in str(objection(Exchange(ASK, wrong)))
    row = row_of(PLAN, LOAD, exchanges(ONE, wrong))
    assert row.figures is None
    assert row.failure is not None
    assert row.failure.startswith("1 of 2 requests failed; 1 of them: ")
    assert words in row.failure
    assert (row.successful, row.failed) == (1, 1)
    lenient = row_of(replace(PLAN, max_failed=0.5), LOAD, exchanges(ONE, wrong))
    assert lenient.figures is not None
    assert (lenient.failed, lenient.figures.output_tokens) == (1, 5)
    assert lenient.figures.spreads["ttft"] == Spread(*[pytest.approx(200)] * 2, 0.0, tuple((p, pytest.approx(200)) for p in (50, 90, 99)))  # type: ignore[arg-type]


def test_a_row_says_its_most_frequent_reason() -> None:
    broken, busy = replace(ONE, failure="broken"), replace(ONE, failure="busy")
    row = row_of(replace(PLAN, requests=4), LOAD, exchanges(ONE, broken, busy, busy))
    assert row.failure == "3 of 4 requests failed; 2 of them: busy"


def test_requests_that_were_never_sent_are_failed_and_no_success_is_a_failure() -> None:
    assert row_of(PLAN, LOAD, exchanges(ONE)).failure == "1 of 2 requests were never answered"
    assert row_of(PLAN, LOAD, []).failure == "2 of 2 requests were never answered"
    gone = replace(ONE, cancelled=True)
    assert row_of(PLAN, LOAD, exchanges(gone, gone)).failure == "no request succeeded"
    still = replace(ONE, sent=100.0, ended=100.0)
    assert row_of(PLAN, LOAD, exchanges(still, still)).failure == "no time passed"
    assert row_of(PLAN, LOAD, [], failure="warm-up: no").failure == "warm-up: no"


def test_what_was_cancelled_on_purpose_is_counted_apart_and_its_load_stays() -> None:
    gone = replace(ONE, sent=100.0, ended=102.0, completion_tokens=None, prompt_tokens=None, cancelled=True, first=None)
    row = row_of(replace(PLAN, requests=3), Load(clients=3), exchanges(ONE, TWO, gone))
    assert objection(Exchange(ASK, gone)) is None
    assert (row.successful, row.failed, row.cancelled, row.failure) == (2, 0, 1, None)
    assert row.figures is not None
    assert row.figures.output_tokens == 10
    assert row.figures.request_throughput == pytest.approx(2 / 2.0)
    assert row.concurrency == pytest.approx((0.6 + 1.0 + 2.0) / 2.0)
    assert row.figures.spreads["ttft"].mean == pytest.approx(300)


def test_chunks_are_tokens_only_where_that_is_allowed_and_no_usage_came() -> None:
    silent = replace(ONE, completion_tokens=None, prompt_tokens=None, chunks=4)
    row = row_of(replace(PLAN, count_chunks=True), LOAD, exchanges(silent, TWO))
    assert row.figures is not None
    assert (row.figures.output_tokens, row.figures.input_tokens, row.figures.total_throughput) == (9, None, None)
    nothing = replace(silent, chunks=0, first=None)
    assert objection(Exchange(ASK, nothing), count_chunks=True) == "no token came"


@pytest.mark.parametrize(
    ("slack", "counted", "fine"), [(0, 10, True), (0, 11, False), (2, 8, True), (2, 12, True), (2, 13, False), (2, None, True)]
)
def test_a_prompt_may_be_off_by_what_is_not_known_about_it(slack: int, counted: int | None, fine: bool) -> None:
    found = objection(Exchange(replace(ASK, slack=slack), replace(ONE, prompt_tokens=counted)))
    assert (found is None) is fine


def test_a_conversation_that_was_cut_is_noticed() -> None:
    turn = replace(ASK, prompt_tokens=None, prompt_floor=20)
    assert objection(Exchange(turn, replace(ONE, prompt_tokens=20))) is None
    assert "it cut the conversation" in str(objection(Exchange(turn, replace(ONE, prompt_tokens=19))))


@pytest.mark.parametrize(
    ("text", "reason", "words"),
    [
        ('{"a": 1, "b": null}', "stop", None),
        ('{"a": 1}', "stop", "the answer lacks the required b"),
        ('["a", "b"]', "stop", "the answer is no JSON object"),
        ("Sure! {}", "stop", "the answer is no JSON: 'Sure! {}'"),
        ('{"a": 1, "b', "length", "cut at its longest: raise --output-len"),
    ],
)
def test_a_json_answer_is_read(text: str, reason: str, words: str | None) -> None:
    ask = replace(ASK, output_tokens=None, required=("a", "b"))
    found = objection(Exchange(ask, replace(ONE, text=text, finish_reason=reason)))
    assert found is None if words is None else words in str(found)


def test_the_peak_is_of_instants_and_neighbours_do_not_overlap() -> None:
    times = [(0.0, 2.0), (1.0, 3.0), (2.0, 4.0), (3.0, 3.5), (2.5, 2.75)]
    assert peak([replace(ONE, sent=a, ended=b) for a, b in times]) == 3
    assert peak([replace(ONE, sent=float(at), ended=float(at + 1)) for at in range(5)]) == 1
    assert peak([]) == 0


def test_a_spread_of_many_values() -> None:
    found = spread([float(value) for value in range(101)], (10, 99.9))
    assert (found.mean, found.median) == (50.0, 50.0)
    assert found.std == pytest.approx(29.1547595)
    assert found.percentiles == ((10, 10.0), (99.9, pytest.approx(99.9)))


def test_a_row_has_vllms_names_in_json_and_null_where_it_failed() -> None:
    good = row_json(row_of(PLAN, LOAD, exchanges(ONE, TWO)))
    for name in VLLM_NAMES:
        assert isinstance(good[name], (int, float)), name
    bad = row_json(row_of(PLAN, LOAD, exchanges(ONE)))
    assert bad["output_throughput"] is None
    assert "mean_ttft_ms" not in bad
    endless = row_json(row_of(PLAN, Load(rate=float("inf")), exchanges(ONE, TWO)))
    assert json.loads(json.dumps(endless, allow_nan=False))["request_rate"] == "inf"
