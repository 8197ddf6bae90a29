"""The scrape: vLLM's names, edges and labels; values equal to what was counted beside it; times by the engine's clock."""

from __future__ import annotations

import asyncio
import re
import threading
import time
from collections import Counter, defaultdict
from dataclasses import dataclass, field

import prometheus_client
import pytest
from prometheus_client.parser import text_string_to_metric_families
from scripted import scripted

from arctool.run.async_engine import AsyncEngine
from arctool.run.kv.paging import CacheUse
from arctool.run.requests import Completion, Timing, Update
from arctool.run.sampling.params import SamplingParams
from arctool.run.sequence import FinishReason
from arctool.run.telemetry import StepStats, Telemetry, Totals
from arctool.serve.metrics import Metrics, RequestMeter

IDLE = Telemetry(0, 0, CacheUse(0, 0, 8), StepStats(), Totals())
LATENCIES = (
    *("time_to_first_token", "inter_token_latency", "request_time_per_output_token", "e2e_request_latency"),
    *("request_queue_time", "request_prefill_time", "request_decode_time", "request_inference_time"),
)


@dataclass
class Scrape:
    """One scrape, parsed: `values[name]` by the labels beside model and engine, and each histogram's edges."""

    values: dict[str, dict[tuple[str, ...], float]] = field(default_factory=lambda: defaultdict(dict))
    edges: dict[str, list[float]] = field(default_factory=lambda: defaultdict(list))
    kinds: dict[str, str] = field(default_factory=dict)
    labels: dict[str, set[str]] = field(default_factory=lambda: defaultdict(set))

    def one(self, name: str, *labels: str) -> float:
        return self.values[name][labels]


def scrape(metrics: Metrics) -> Scrape:
    body, content_type = metrics.render()
    assert content_type == "text/plain; version=0.0.4; charset=utf-8"
    found = Scrape()
    for family in text_string_to_metric_families(body.decode()):
        found.kinds[family.name] = family.type
        for sample in family.samples:
            found.labels[family.name] |= set(sample.labels)
            own = tuple(v for k, v in sorted(sample.labels.items()) if k not in ("model_name", "engine", "le"))
            if sample.name.endswith("_bucket"):
                found.edges[family.name].append(float(sample.labels["le"]))
            else:
                found.values[sample.name][own] = sample.value
    return found


class Clock:
    def __init__(self, now: float = 50.0) -> None:
        self.now = now

    def __call__(self) -> float:
        return self.now


def make(telemetry: Telemetry = IDLE, **more: object) -> Metrics:
    return Metrics(lambda: telemetry, lambda: {}, "the-model", **more)  # type: ignore[arg-type]


def token(time: float, index: int = 0, count: int = 1) -> Update:
    return Update(7, (5,) * count, "x", None, index, time)


def ending(timing: Timing, tokens: int, index: int = 0, time: float | None = None) -> Update:
    done = Completion(7, (1, 2), (5,) * tokens, "x", FinishReason.STOP, None, timing, index=index)
    return Update(7, () if time is None else (5,), "", done, index, time)


def observed(found: Scrape) -> dict[str, tuple[float, float]]:
    """Of every latency that was observed: how often, and the sum."""
    names = {name: f"vllm:{name}_seconds" for name in LATENCIES}
    return {n: (found.one(f"{f}_count"), round(found.one(f"{f}_sum"), 9)) for n, f in names.items() if found.one(f"{f}_count")}


# What is there.


def test_the_names_and_kinds_are_those_of_vllm() -> None:
    found = scrape(make()).kinds
    vllm = {name.removeprefix("vllm:"): kind for name, kind in found.items() if name.startswith("vllm:") and not name.endswith("_created")}
    gauges = {"num_requests_running", "num_requests_waiting", "num_requests_waiting_by_reason", "kv_cache_usage_perc"}
    counters = {
        *("num_preemptions", "corrupted_requests", "request_success", "prompt_tokens", "prompt_tokens_cached", "generation_tokens"),
        *("prefix_cache_queries", "prefix_cache_hits"),
    }
    counts = {
        *("request_prompt_tokens", "request_generation_tokens", "request_max_num_generation_tokens", "request_params_n"),
        *("request_params_max_tokens", "iteration_tokens_total"),
    }
    expected = dict.fromkeys(gauges, "gauge") | dict.fromkeys(counters, "counter") | dict.fromkeys(counts, "histogram")
    assert vllm == expected | {f"{name}_seconds": "histogram" for name in LATENCIES}


def test_counters_are_exposed_under_their_total_names() -> None:
    body = make(log_dropped=lambda: 3).render()[0].decode()
    for line in (
        'vllm:prompt_tokens_total{engine="0",model_name="the-model"} 0.0',
        'vllm:request_success_total{engine="0",finished_reason="abort",model_name="the-model"} 0.0',
        'vllm:iteration_tokens_total_bucket{engine="0",le="+Inf",model_name="the-model"} 0.0',
        "arctool:log_lines_dropped_total 3.0",
        'arctool:computed_tokens_total{phase="prefill"} 0.0',
    ):
        assert f"\n{line}\n" in body


def test_every_name_of_vllm_carries_the_model_and_the_engine() -> None:
    found = scrape(make())
    extra = {"request_success": {"finished_reason"}, "num_requests_waiting_by_reason": {"reason"}}
    for name, labels in found.labels.items():
        if name.startswith("vllm:") and not name.endswith("_created"):
            beside = extra.get(name.removeprefix("vllm:"), set()) | ({"le"} if found.kinds[name] == "histogram" else set())
            assert labels == {"model_name", "engine"} | beside, name


def test_the_edges_are_those_of_vllm() -> None:
    edges = scrape(make(max_model_len=2048)).edges
    inf = float("inf")
    tokens = [1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000, inf]
    per_token = [0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0, inf]
    first = [0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1, 2.5, 5, 7.5, 10, 20, 40, 80, 160, 640, 2560, inf]
    request = [0.3, 0.5, 0.8, 1, 1.5, 2, 2.5, 5, 10, 15, 20, 30, 40, 50, 60, 120, 240, 480, 960, 1920, 7680, inf]
    steps = [1, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384, inf]
    assert edges["vllm:time_to_first_token_seconds"] == first
    assert edges["vllm:inter_token_latency_seconds"] == edges["vllm:request_time_per_output_token_seconds"] == per_token
    for name in LATENCIES[3:]:
        assert edges[f"vllm:{name}_seconds"] == request
    for name in ("prompt_tokens", "generation_tokens", "max_num_generation_tokens", "params_max_tokens"):
        assert edges[f"vllm:request_{name}"] == tokens
    assert edges["vllm:request_params_n"] == [1, 2, 5, 10, 20, inf]
    assert edges["vllm:iteration_tokens_total"] == steps


def test_what_the_engine_counted_is_read_at_the_scrape() -> None:
    sizes = tuple(range(14))
    ended = {FinishReason.STOP: 3, FinishReason.ERROR: 1}
    total = Totals(91, 4, 500, 40, 300, 120, sizes, 45, 2, ended)
    asked: list[int] = []

    def telemetry() -> Telemetry:
        asked.append(0)
        return Telemetry(5, 6, CacheUse(3, 2, 11), StepStats(), total)

    metrics = Metrics(telemetry, lambda: {"cpu.linear.trellis": 9, "cpu.attention": 4}, "m")
    assert asked == []
    found = scrape(metrics)
    assert len(asked) == 1
    assert (found.one("vllm:num_requests_running"), found.one("vllm:num_requests_waiting")) == (5, 6)
    assert found.values["vllm:num_requests_waiting_by_reason"] == {("capacity",): 6}
    assert found.one("vllm:kv_cache_usage_perc") == 3 / 16
    assert found.values["arctool:kv_cache_blocks"] == {("owned",): 3, ("cached",): 2, ("free",): 11}
    assert found.one("vllm:num_preemptions_total") == 4
    assert found.one("vllm:corrupted_requests_total") == 2
    assert found.values["vllm:request_success_total"] == {("stop",): 3, ("length",): 0, ("abort",): 0, ("error",): 1}
    assert found.one("vllm:prompt_tokens_total") == found.one("vllm:prefix_cache_queries_total") == 300
    assert found.one("vllm:prompt_tokens_cached_total") == found.one("vllm:prefix_cache_hits_total") == 120
    assert found.one("vllm:generation_tokens_total") == 45
    assert (found.one("vllm:iteration_tokens_total_count"), found.one("vllm:iteration_tokens_total_sum")) == (91, 540)
    assert found.values["arctool:computed_tokens_total"] == {("prefill",): 500, ("decode",): 40}
    assert found.values["arctool:kernel_calls_total"] == {("cpu.linear.trellis",): 9, ("cpu.attention",): 4}
    body = metrics.render()[0].decode()
    assert 'vllm:iteration_tokens_total_bucket{engine="0",le="16.0",model_name="m"} 3.0' in body  # 0 + 1 + 2


def test_what_the_server_tells_is_there() -> None:
    metrics = make()
    assert "arctool:startup_seconds" not in scrape(metrics).kinds
    metrics.started(2.5)
    for reason in ("queue_full", "queue_full", "body_too_large"):
        metrics.rejected(reason)
    found = scrape(metrics)
    assert found.one("arctool:startup_seconds") == 2.5
    assert found.values["arctool:admission_rejections_total"] == {("queue_full",): 2, ("body_too_large",): 1}
    assert "arctool:log_lines_dropped_total" not in found.values, "there is no log"


def test_the_process_is_measured_too() -> None:
    found = scrape(make())
    assert found.one("process_resident_memory_bytes") > 1e6
    assert found.one("process_cpu_seconds_total") > 0
    assert found.one("process_open_fds") > 2


def test_two_servers_in_one_process_share_nothing() -> None:
    first, second = make(), make()
    first.rejected("queue_full")
    assert scrape(second).values["arctool:admission_rejections_total"] == {}
    assert b"vllm:" not in prometheus_client.generate_latest()


def test_a_model_may_have_any_name() -> None:
    name = 'a"b\\c\nd {e="f"} ü'
    body, _ = Metrics(lambda: IDLE, lambda: {}, name).render()
    names = {s.labels["model_name"] for f in text_string_to_metric_families(body.decode()) for s in f.samples if "model_name" in s.labels}
    assert names == {name}


# Times.


def test_times_are_those_of_the_engine() -> None:
    metrics = make(clock=Clock(10.0))
    meter = metrics.request(2, SamplingParams(max_tokens=9), arrived=9.0)
    for update in (token(12.0), token(12.5), token(14.0)):
        meter.update(update)
    meter.update(ending(Timing(2.5, 5.25, 1.5, 5.0, arrived=9.5), 4, time=14.5))
    found = scrape(metrics)
    assert observed(found) == {
        "time_to_first_token": (1, 3.0),
        "inter_token_latency": (3, 2.5),
        "request_time_per_output_token": (1, round(2.5 / 3, 9)),
        "e2e_request_latency": (1, 5.75),
        "request_queue_time": (1, 2.0),
        "request_prefill_time": (1, 1.0),
        "request_decode_time": (1, 2.5),
        "request_inference_time": (1, 3.5),
    }
    assert meter.first_token == 3.0
    for name, value in {
        "prompt_tokens": 2,
        "generation_tokens": 4,
        "max_num_generation_tokens": 4,
        "params_n": 1,
        "params_max_tokens": 9,
    }.items():
        assert (found.one(f"vllm:request_{name}_count"), found.one(f"vllm:request_{name}_sum")) == (1, value), name


def test_a_request_without_an_arrival_came_when_it_was_metered() -> None:
    clock = Clock(10.0)
    metrics = make(clock=clock)
    meter = metrics.request(2, SamplingParams())
    clock.now = 11.0
    meter.update(token(10.75))
    assert observed(scrape(metrics)) == {"time_to_first_token": (1, 0.75)}
    assert scrape(metrics).one("vllm:request_params_max_tokens_count") == 0, "it was not set"


def test_every_sample_is_a_request_but_to_its_parameters() -> None:
    metrics = make(clock=Clock(0.0))
    meter = metrics.request(10, SamplingParams(n=2), arrived=0.0)
    for update in (token(1.0, 0), token(1.0, 1), token(2.0, 0), token(4.0, 1)):
        meter.update(update)
    meter.update(ending(Timing(1.0, 2.0, 0.5, 2.0), 2, index=0))
    assert scrape(metrics).one("vllm:request_max_num_generation_tokens_count") == 0, "one sample goes on"
    meter.update(ending(Timing(1.0, 6.0, 0.5, 6.0), 3, index=1, time=6.0))
    found = scrape(metrics)
    assert observed(found)["time_to_first_token"] == (2, 2.0)
    assert observed(found)["inter_token_latency"] == (3, 6.0), "each sample has its own gaps"
    assert observed(found)["e2e_request_latency"] == (2, 8.0)
    for name, value in {
        "prompt_tokens": (2, 20),
        "generation_tokens": (2, 5),
        "max_num_generation_tokens": (1, 3),
        "params_n": (1, 2),
    }.items():
        assert (found.one(f"vllm:request_{name}_count"), found.one(f"vllm:request_{name}_sum")) == value, name


def test_tokens_that_come_together_share_their_time() -> None:
    metrics = make()
    meter = metrics.request(2, SamplingParams(), arrived=0.0)
    for update in (token(1.0, count=2), token(1.6, count=3)):
        meter.update(update)
    found = scrape(metrics)
    assert observed(found)["inter_token_latency"] == (4, 0.6)
    assert found.one("vllm:time_to_first_token_seconds_count") == 1


def test_one_that_was_cancelled_in_the_queue_has_waited() -> None:
    metrics = make()
    metrics.request(2, SamplingParams(), arrived=0.0).update(ending(Timing(None, 3.0, arrived=0.5), 0))
    assert observed(scrape(metrics)) == {"e2e_request_latency": (1, 3.5), "request_queue_time": (1, 3.5)}


def test_a_request_whose_client_left_is_counted_with_what_is_known() -> None:
    clock = Clock(0.0)
    metrics = make(clock=clock)
    meter = metrics.request(6, SamplingParams(n=3), arrived=0.0)
    meter.update(token(1.0, 1))
    meter.update(token(2.0, 1))
    meter.update(ending(Timing(1.0, 2.0, 0.5, 2.0), 8, index=2))
    clock.now = 4.0
    for _ in range(2):
        meter.end()
    meter.update(token(5.0, 1))
    meter.update(ending(Timing(1.0, 9.0, 0.5, 9.0), 9, index=1))
    found = scrape(metrics)
    assert observed(found)["e2e_request_latency"] == (3, 2.0 + 4.0 + 4.0)
    assert (found.one("vllm:request_generation_tokens_count"), found.one("vllm:request_generation_tokens_sum")) == (3, 8 + 2 + 0)
    assert found.one("vllm:request_max_num_generation_tokens_sum") == 8
    assert observed(found)["inter_token_latency"] == (1, 1.0)


def test_no_time_is_ever_negative() -> None:
    metrics = make(clock=Clock(100.0))
    meter = metrics.request(2, SamplingParams(n=2))  # made late: the first token was there already
    meter.update(token(99.0))
    meter.update(ending(Timing(1.0, 2.0, 0.5, 2.0, arrived=98.0), 1))
    assert observed(scrape(metrics))["time_to_first_token"] == (1, 0.0)
    assert all(total >= 0 for _, total in observed(scrape(metrics)).values())
    other = make(clock=Clock(100.0))
    other.request(2, SamplingParams(), arrived=101.0).end()
    assert observed(scrape(other)) == {"e2e_request_latency": (1, 0.0)}


# A real engine.


async def feed(
    engine: AsyncEngine, metrics: Metrics, prompt: str, params: SamplingParams, updates: list[Update], leave_after: int = -1
) -> None:
    """What the server does with a request; keeps its updates. `leave_after`: the client vanishes after so many of them."""
    arrived = time.monotonic()
    stream = await engine.submit(prompt, params)
    meter: RequestMeter = metrics.request(len(engine.llm.encode(prompt)), params, arrived)
    try:
        async for update in stream:
            meter.update(update)
            updates.append(update)
            if len(updates) == leave_after:
                return
    finally:
        stream.close()
        meter.end()


def test_the_scrape_says_what_was_counted_beside_it() -> None:
    shared = "the quick brown fox jumps over the lazy dog and the cat sat on the mat with a hat " * 2
    llm = scripted(lambda prompt: "a text of some words " * (1 + len(prompt) % 3))
    asked = [(f"{shared}{i}", SamplingParams(temperature=0, n=1 + (i % 4 == 0), max_tokens=6 if i % 3 else None)) for i in range(12)]
    kept: list[list[Update]] = [[] for _ in asked]
    leavers = {5: 2, 8: 1}

    async def main() -> tuple[Scrape, Telemetry]:
        engine = AsyncEngine(llm)
        metrics = Metrics(engine.telemetry, llm.registry.engagement, "m")
        await feed(engine, metrics, *asked[0], kept[0])
        await asyncio.gather(*(feed(engine, metrics, *asked[i], kept[i], leavers.get(i, -1)) for i in range(1, 12)))
        async with asyncio.timeout(20):
            while engine.unfinished:
                await asyncio.sleep(0.001)
        found = scrape(metrics)
        await engine.stop()
        return found, llm.engine.telemetry()

    found, now = asyncio.run(main())
    done = {i: [u.completion for u in kept[i] if u.completion is not None] for i in range(12)}
    reasons = Counter(one.finish_reason.value for several in done.values() for one in several)
    samples = sum(params.n for _, params in asked)
    gone = sum(asked[i][1].n for i in leavers)
    assert reasons["stop"] >= 3
    assert reasons["length"] >= 3
    assert found.values["vllm:request_success_total"] == {
        ("stop",): reasons["stop"],
        ("length",): reasons["length"],
        ("abort",): gone,
        ("error",): 0,
    }
    lengths = [len(llm.encode(prompt)) for prompt, _ in asked]
    assert found.one("vllm:prompt_tokens_total") == sum(lengths)
    cached = sum(one.cached_tokens for several in done.values() for one in several)
    assert cached > 0
    assert found.one("vllm:prefix_cache_hits_total") >= cached
    told = sum(len(u.token_ids) for updates in kept for u in updates)
    assert told <= found.one("vllm:generation_tokens_total") == now.total.generated_tokens
    assert found.one("vllm:iteration_tokens_total_count") == now.total.steps > 10
    assert found.one("vllm:request_generation_tokens_sum") == told
    assert found.one("vllm:request_prompt_tokens_sum") == sum(n * params.n for n, (_, params) in zip(lengths, asked, strict=True))
    assert found.one("vllm:request_params_n_sum") == samples
    seen = observed(found)
    assert seen["e2e_request_latency"][0] == found.one("vllm:request_generation_tokens_count") == samples
    assert seen["request_queue_time"][0] == seen["request_decode_time"][0] == samples - gone
    texts = [Counter(u.index for u in updates) for updates in kept]
    assert seen["time_to_first_token"][0] == sum(len(text) for text in texts)
    assert seen["inter_token_latency"][0] == told - sum(len(text) for text in texts)
    timings = [one.timing for several in done.values() for one in several]
    assert seen["request_inference_time"][1] == pytest.approx(sum((t.last_token or 0) - (t.scheduled or 0) for t in timings))
    assert seen["request_inference_time"][1] == pytest.approx(seen["request_prefill_time"][1] + seen["request_decode_time"][1])
    assert seen["e2e_request_latency"][1] >= seen["request_inference_time"][1] + seen["request_queue_time"][1]
    assert found.one("vllm:num_requests_running") == found.one("vllm:kv_cache_usage_perc") == 0


def test_a_slow_reader_and_a_jump_of_the_wall_clock_change_no_latency(monkeypatch: pytest.MonkeyPatch) -> None:
    """The engine is done before anything is read, an hour after by the wall clock."""
    llm = scripted(lambda prompt: "some words that are said")

    async def main() -> dict[str, tuple[float, float]]:
        engine = AsyncEngine(llm)
        metrics = Metrics(engine.telemetry, llm.registry.engagement, "m")
        began = time.monotonic()
        stream = await engine.submit("hello", SamplingParams(temperature=0))
        meter = metrics.request(3, SamplingParams(temperature=0), began)
        async with asyncio.timeout(20):
            while engine.unfinished:
                await asyncio.sleep(0.001)
        took = time.monotonic() - began
        wall = time.time
        monkeypatch.setattr(time, "time", lambda: wall() - 3600)
        await asyncio.sleep(0.05)
        async for update in stream:
            meter.update(update)
        await engine.stop()
        seen = observed(scrape(metrics))
        assert 0 < seen["e2e_request_latency"][1] < took
        return seen

    seen = asyncio.run(main())
    assert seen["time_to_first_token"][1] + seen["inter_token_latency"][1] == pytest.approx(seen["e2e_request_latency"][1], abs=0.005)


def test_scrapes_in_other_threads_do_not_disturb_and_never_go_back() -> None:
    llm = scripted(lambda prompt: "many words " * 40)
    bodies: tuple[list[bytes], list[bytes]] = ([], [])
    over = threading.Event()

    async def main() -> None:
        engine = AsyncEngine(llm)
        metrics = Metrics(engine.telemetry, llm.registry.engagement, "m")

        def hammer(own: list[bytes]) -> None:
            while not over.is_set():
                own.append(metrics.render()[0])

        threads = [threading.Thread(target=hammer, args=(own,)) for own in bodies]
        for thread in threads:
            thread.start()
        updates: list[Update] = []
        try:
            await asyncio.gather(*(feed(engine, metrics, f"{i}", SamplingParams(temperature=0, max_tokens=60), updates) for i in range(10)))
        finally:
            over.set()
            for thread in threads:
                thread.join(20)
            await engine.stop()
        assert scrape(metrics).one("vllm:generation_tokens_total") == len(updates)

    asyncio.run(main())
    for own in bodies:
        told = [float(re.findall(rb"^vllm:generation_tokens_total\{.*\} (.*)$", body, re.MULTILINE)[0]) for body in own]
        assert len(set(told)) > 4
        assert told == sorted(told)
        assert len(list(text_string_to_metric_families(own[len(own) // 2].decode()))) > 20
