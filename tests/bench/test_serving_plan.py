"""A plan that measures nothing is refused by option; shares, arrival times and lists of loads are what they say."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from arctool.bench.serving.client import Server
from arctool.bench.serving.exchange import Endpoint
from arctool.bench.serving.load import arrivals
from arctool.bench.serving.plan import Load, Plan, Workload, parse_floats, parse_goodput, parse_loads
from arctool.bench.serving.session import Voicing, measure
from arctool.errors import SourceError, UsageError

CLOSED = (Load(clients=1),)


@pytest.mark.parametrize(
    ("changes", "option"),
    [
        ({"loads": ()}, "--concurrency"),
        ({"loads": (Load(clients=0),)}, "--concurrency"),
        ({"loads": (Load(clients=65),)}, "--num-prompts: 64 requests cannot keep 65 clients busy"),
        ({"loads": (Load(clients=17),), "workload": Workload.MULTI_TURN}, "--num-prompts: 16 conversations cannot keep 17"),
        ({"loads": (Load(rate=0.0),)}, "--request-rate"),
        ({"loads": (Load(rate=float("nan")),)}, "--request-rate"),
        ({"loads": (Load(rate=1.0, burstiness=0.0),)}, "--burstiness"),
        ({"loads": (Load(rate=1.0, burstiness=float("inf")),)}, "--burstiness"),
        ({"loads": (Load(rate=1.0, cap=0),)}, "--max-concurrency"),
        ({"input_len": 0}, "--input-len"),
        ({"output_len": 0}, "--output-len"),
        ({"requests": 0}, "--num-prompts"),
        ({"warmups": -1}, "--num-warmups"),
        ({"prefixes": 0}, "--prefixes"),
        ({"prefix_len": 1 << 21}, "--prefix-len"),
        ({"turns": 0}, "--turns"),
        ({"turns": 5, "workload": Workload.MULTI_TURN}, "--num-prompts: 64 requests are no whole conversations of 5"),
        ({"cancel_share": 1.0}, "--cancel-share"),
        ({"cancel_after": 64, "workload": Workload.CANCEL}, "--cancel-after"),
        ({"cancel_share": 0.001, "workload": Workload.CANCEL}, "--num-prompts: 64 are too few"),
        ({"requests": 3, "workload": Workload.MIXED}, "--num-prompts: 3 are too few"),
        ({"temperature": float("nan")}, "--temperature"),
        ({"temperature": 2.5}, "--temperature"),
        ({"percentiles": ()}, "--percentiles"),
        ({"percentiles": (0.0,)}, "--percentiles"),
        ({"percentiles": (float("nan"),)}, "--percentiles"),
        ({"max_failed": 1.0}, "--max-failed"),
    ],
)
def test_a_plan_that_measures_nothing_is_refused_by_option(changes: dict[str, Any], option: str) -> None:
    with pytest.raises(UsageError, match=f"^{option}"):
        Plan(**{"loads": CLOSED, **changes})


def test_shares_are_kept_to_the_whole_request() -> None:
    assert Plan(CLOSED, requests=100, workload=Workload.MIXED).kinds() == {"random": 70, "json": 20, "cancel": 10}
    assert Plan(CLOSED, requests=7, workload=Workload.MIXED).kinds() == {"random": 5, "json": 1, "cancel": 1}
    assert Plan(CLOSED, requests=10, workload=Workload.CANCEL, cancel_share=0.25).kinds() == {"random": 8, "cancel": 2}
    assert Plan(CLOSED, requests=9, workload=Workload.JSON).kinds() == {"json": 9}
    for requests in range(6, 60):
        assert sum(Plan(CLOSED, requests=requests, workload=Workload.MIXED).kinds().values()) == requests


def test_loads_are_closed_or_open() -> None:
    assert parse_loads(None, None) == tuple(Load(clients=clients) for clients in (1, 4, 16))
    assert parse_loads("2,8", None) == (Load(clients=2), Load(clients=8))
    assert parse_loads(None, "0.5,inf", 2.0, 8) == (Load(rate=0.5, burstiness=2.0, cap=8), Load(rate=float("inf"), burstiness=2.0, cap=8))
    assert [load.label for load in (*parse_loads("1,2", None), *parse_loads(None, "0.5"))] == ["1 client", "2 clients", "0.5 req/s"]


@pytest.mark.parametrize(
    ("arguments", "option"),
    [
        (("1,two", None), "--concurrency"),
        (("1.5", None), "--concurrency"),
        (("inf", None), "--concurrency"),
        (("4,4", None), "--concurrency"),
        (("", None), "--concurrency"),
        ((None, "fast"), "--request-rate"),
        (("1", "1"), "--request-rate"),
        (("1", None, 0.5), "--burstiness"),
        ((None, None, 1.0, 4), "--burstiness and --max-concurrency"),
    ],
)
def test_loads_that_are_neither_are_refused_by_option(arguments: tuple[Any, ...], option: str) -> None:
    with pytest.raises(UsageError, match=f"^{option}"):
        parse_loads(*arguments)


def test_limits_of_goodput_are_read_and_refused() -> None:
    assert parse_goodput("") == ()
    assert parse_goodput("ttft:200 tpot:50,e2el:5e3") == (("ttft", 200.0), ("tpot", 50.0), ("e2el", 5000.0))
    for wrong in ("ttft", "ttft:", "ttft:-1", "ttft:nan", "itl:5", "ttft:1 ttft:2", "200"):
        with pytest.raises(UsageError, match=r"^--goodput"):
            parse_goodput(wrong)
    with pytest.raises(UsageError, match=r"^--percentiles"):
        parse_floats("50,", "--percentiles")


def test_arrivals_keep_their_rate_and_their_spread() -> None:
    random = np.random.default_rng(7)
    for burstiness in (0.25, 1.0, 100.0):
        times = arrivals(4001, 8.0, burstiness, random)
        gaps = np.diff(times)
        assert times[0] == 0.0
        assert times[-1] == pytest.approx(4000 / 8.0)
        assert gaps.min() >= 0
        # The coefficient of variation of a gamma distribution is one over the root of its shape.
        assert gaps.std() / gaps.mean() == pytest.approx(burstiness**-0.5, rel=0.1)
    assert arrivals(3, float("inf"), 1.0, random) == [0.0] * 3
    assert arrivals(1, 2.0, 1.0, random) == [0.0]


@pytest.mark.parametrize(
    ("base", "url"),
    [
        ("http://localhost:8000", "http://localhost:8000"),
        ("http://localhost:8000/", "http://localhost:8000"),
        ("http://localhost:8000/v1", "http://localhost:8000"),
        ("https://a.example/proxy/v1/", "https://a.example/proxy"),
        ("http://[::1]:80", "http://[::1]:80"),
    ],
)
def test_an_address_may_end_as_openais_clients_have_it(base: str, url: str) -> None:
    assert Server.at(base).url == url


@pytest.mark.parametrize(
    "base", ["", "localhost:8000", "ftp://a", "http://", "http://a:x", "http://a:99999", "http://a?b", "http://a#b", "http://[x"]
)
def test_what_is_no_address_is_refused(base: str) -> None:
    with pytest.raises(UsageError, match=r"^--base-url"):
        Server.at(base)


def test_secrets_stay_out_of_addresses_headers_and_texts() -> None:
    with pytest.raises(UsageError, match=r"^--base-url: a password") as caught:
        Server.at("http://user:secret@host")
    assert "secret" not in str(caught.value)
    for key in ("a\nb", "é", "a\x00"):
        with pytest.raises(UsageError, match=r"^--api-key") as caught:
            Server.at("http://host", api_key=key)
        assert key not in str(caught.value)
    assert "secret" not in repr(Server.at("http://host", api_key="secret"))
    for timeout in (0.0, -1.0, float("nan"), float("inf")):
        with pytest.raises(UsageError, match=r"^--timeout"):
            Server.at("http://host", timeout)


def test_ways_to_make_prompts_that_a_plan_cannot_use_are_refused() -> None:
    server, plan = Server.at("http://127.0.0.1:9"), Plan(CLOSED)
    for voicing, changed, option in (
        (Voicing(vocab_size=0), plan, "--vocab-size"),
        (Voicing(vocab_size=9, tokenizer=Path("x")), plan, "--vocab-size"),
        (Voicing(vocab_size=9), Plan(CLOSED, endpoint=Endpoint.CHAT), "--vocab-size"),
        (Voicing(vocab_size=9), Plan(CLOSED, workload=Workload.MULTI_TURN), "--vocab-size"),
    ):
        with pytest.raises(UsageError, match=f"^{option}"):
            measure(server, changed, voicing)
    with pytest.raises(UsageError, match=r"^--seed"):
        measure(server, plan, seed=-1)
    with pytest.raises(SourceError, match=r"nowhere: no such tokenizer"):
        measure(server, plan, Voicing(tokenizer=Path("nowhere")))
