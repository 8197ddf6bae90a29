"""What Prometheus scrapes: vLLM's names, bucket edges and labels, so that its dashboards work here, and our own names beside them.

Three sources. What the engine counts is read when somebody scrapes. How long things took is observed by each request's `RequestMeter`, at
the engine's updates and by the engine's clock, so that neither a slow reader nor a keep-alive comment counts. The rest is told by the
server. As in vLLM, each of a request's `n` samples is a request of its own, except to the prompt counters and `request_params_n`.

Names of features that this engine does not have are not there, rather than zero: speculative decoding (`spec_decode_*`), graphs, adapters,
external and multimodal caches, engine sleep. `vllm:num_requests_waiting_by_reason` has one reason: whoever waits, waits for capacity.

Cost, measured on one core of a Zen 3 machine: 0.9 µs a token, 10 µs a request, 2 ms a scrape (`render` may run in a thread).
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, ProcessCollector, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector

from arctool.run.requests import Completion, Update
from arctool.run.sampling.params import SamplingParams
from arctool.run.sequence import FinishReason
from arctool.run.telemetry import STEP_SIZES, Telemetry

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
LABELS = ("model_name", "engine")
"""Of every `vllm:` name. vLLM numbers its engine processes; we are one."""
LONGEST_CONTEXT = 131_072

FIRST_TOKEN = (
    *(0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75),
    *(1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0, 160.0, 640.0, 2560.0),
)
PER_TOKEN = (0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0)
PER_REQUEST = (
    *(0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0, 30.0),
    *(40.0, 50.0, 60.0, 120.0, 240.0, 480.0, 960.0, 1920.0, 7680.0),
)
SAMPLES = (1, 2, 5, 10, 20)
"""Bucket edges, seconds and samples: those of vLLM (`vllm/v1/metrics/loggers.py`)."""


def token_edges(longest: int) -> tuple[int, ...]:
    """1, 2, 5, 10, 20, 50, ... up to `longest`, as vLLM has them."""
    edges = (mantissa * 10**exponent for exponent in range(len(str(longest))) for mantissa in (1, 2, 5))
    return tuple(edge for edge in edges if edge <= longest)


@dataclass(frozen=True)
class Observers:
    """The histograms, each bound to its labels once."""

    first_token: Histogram
    between_tokens: Histogram
    per_token: Histogram
    total: Histogram
    queue: Histogram
    prefill: Histogram
    decode: Histogram
    inference: Histogram
    prompt_tokens: Histogram
    generated_tokens: Histogram
    most_generated_tokens: Histogram
    n: Histogram
    max_tokens: Histogram


class RequestMeter:
    """Observes one request. Give it every update of the engine's, in order; `end` it, whatever happened.

    `arrived`: when the request came, on the engine's clock.
    """

    def __init__(self, observe: Observers, prompt_tokens: int, params: SamplingParams, arrived: float, clock: Callable[[], float]) -> None:
        self._observe = observe
        self._prompt_tokens = prompt_tokens
        self._arrived = arrived
        self._clock = clock
        self._last: list[float | None] = [None] * params.n
        self._tokens = [0] * params.n
        self._open = set(range(params.n))
        self._first: float | None = None

    @property
    def first_token(self) -> float | None:
        """Seconds from arrival to the first token of any sample; None while there is none."""
        return self._first

    def update(self, update: Update) -> None:
        """What a step brought. Of a sample that has ended nothing more is counted."""
        if update.index not in self._open:
            return
        if update.time is not None:
            self._see_tokens(update.index, len(update.token_ids), update.time)
        if update.completion is not None:
            self._finish(update.completion)
            self._close(update.index, len(update.completion.token_ids))

    def end(self) -> None:
        """The request is over. Of samples that go on without a reader only what is known is counted. Safe to call twice."""
        for index in sorted(self._open):
            self._observe.total.observe(max(0.0, self._clock() - self._arrived))
            self._close(index, self._tokens[index])

    def _see_tokens(self, index: int, count: int, now: float) -> None:
        last, self._last[index] = self._last[index], now
        self._tokens[index] += count
        if last is None:
            waited = max(0.0, now - self._arrived)
            self._observe.first_token.observe(waited)
            self._first = waited if self._first is None else self._first
            count, last = count - 1, now
        for _ in range(count):  # tokens that come together share the time that they took
            self._observe.between_tokens.observe((now - last) / count)

    def _finish(self, completion: Completion) -> None:
        timing, observe = completion.timing, self._observe
        before = max(0.0, timing.arrived - self._arrived)
        observe.total.observe(before + timing.total)
        observe.queue.observe(before + (timing.total if timing.scheduled is None else timing.scheduled))
        if timing.scheduled is None or timing.first_token is None or timing.last_token is None:
            return
        decode = timing.last_token - timing.first_token
        observe.prefill.observe(timing.first_token - timing.scheduled)
        observe.decode.observe(decode)
        observe.inference.observe(timing.last_token - timing.scheduled)
        if len(completion.token_ids) > 1:
            observe.per_token.observe(decode / (len(completion.token_ids) - 1))

    def _close(self, index: int, tokens: int) -> None:
        self._open.discard(index)
        self._tokens[index] = tokens
        self._observe.prompt_tokens.observe(self._prompt_tokens)
        self._observe.generated_tokens.observe(tokens)
        if not self._open:
            self._observe.most_generated_tokens.observe(max(self._tokens))


class Metrics:
    """All metrics of one server, in a registry of their own.

    `telemetry`, `engagement` and `log_dropped` (None: there is no log) are asked at each scrape, in whichever thread renders. `clock` is
    the engine's. `max_model_len` bounds the buckets of token counts.
    """

    def __init__(
        self,
        telemetry: Callable[[], Telemetry],
        engagement: Callable[[], Mapping[str, int]],
        model_name: str,
        clock: Callable[[], float] = time.monotonic,
        *,
        max_model_len: int = LONGEST_CONTEXT,
        log_dropped: Callable[[], int] | None = None,
    ) -> None:
        self._clock = clock
        self._labels = (model_name, "0")
        self._registry = CollectorRegistry()
        self._observe = self._observers(token_edges(max_model_len))
        self._rejections = Counter(
            "arctool:admission_rejections_total",
            "Requests that were refused before they were queued.",
            ("reason",),
            registry=self._registry,
        )
        self._registry.register(EngineCollector(telemetry, engagement, self._labels, log_dropped))
        ProcessCollector(registry=self._registry)

    def request(self, prompt_tokens: int, params: SamplingParams, arrived: float | None = None) -> RequestMeter:
        """The meter of a request that the engine has accepted. `arrived`: when its first byte came, by `clock`; None: now."""
        self._observe.n.observe(params.n)
        if params.max_tokens is not None:
            self._observe.max_tokens.observe(params.max_tokens)
        return RequestMeter(self._observe, prompt_tokens, params, self._clock() if arrived is None else arrived, self._clock)

    def rejected(self, reason: str) -> None:
        """A request was refused before it was queued. `reason` is one of few words of ours, nothing that a client says."""
        self._rejections.labels(reason).inc()

    def started(self, seconds: float) -> None:
        """The server is ready, so long after its process began. Tell it once."""
        Gauge("arctool:startup_seconds", "From the start of the program until the server was ready.", registry=self._registry).set(seconds)

    def render(self) -> tuple[bytes, str]:
        """The scrape's body and its content type. Any thread may ask, while the engine and the event loop go on."""
        return generate_latest(self._registry), CONTENT_TYPE

    def _observers(self, tokens: Sequence[float]) -> Observers:
        return Observers(
            first_token=self._histogram("time_to_first_token_seconds", "From the arrival of a request to its first token.", FIRST_TOKEN),
            between_tokens=self._histogram("inter_token_latency_seconds", "From one token of a text to the next.", PER_TOKEN),
            per_token=self._histogram(
                "request_time_per_output_token_seconds", "Mean time from token to token, by text; the first is not counted.", PER_TOKEN
            ),
            total=self._histogram("e2e_request_latency_seconds", "From the arrival of a request to its end.", PER_REQUEST),
            queue=self._histogram("request_queue_time_seconds", "From the arrival of a request until it first ran.", PER_REQUEST),
            prefill=self._histogram("request_prefill_time_seconds", "From a request's first step to its first token.", PER_REQUEST),
            decode=self._histogram("request_decode_time_seconds", "From a request's first token to its last.", PER_REQUEST),
            inference=self._histogram("request_inference_time_seconds", "From a request's first step to its last token.", PER_REQUEST),
            prompt_tokens=self._histogram("request_prompt_tokens", "Tokens of a request's prompt.", tokens),
            generated_tokens=self._histogram("request_generation_tokens", "Tokens that a request was answered with.", tokens),
            most_generated_tokens=self._histogram(
                "request_max_num_generation_tokens", "Tokens of the longest of a request's samples.", tokens
            ),
            n=self._histogram("request_params_n", "The field n of a request.", SAMPLES),
            max_tokens=self._histogram("request_params_max_tokens", "The field max_tokens of a request, where it was set.", tokens),
        )

    def _histogram(self, name: str, what: str, edges: Sequence[float]) -> Histogram:
        return Histogram(f"vllm:{name}", what, LABELS, buckets=edges, registry=self._registry).labels(*self._labels)


@dataclass(frozen=True, eq=False)
class EngineCollector(Collector):
    """Reads what the engine, the kernels and the log have counted, when a scrape asks. Keeps nothing."""

    telemetry: Callable[[], Telemetry]
    engagement: Callable[[], Mapping[str, int]]
    labels: tuple[str, ...]
    log_dropped: Callable[[], int] | None

    def collect(self) -> Iterator[Metric]:
        now = self.telemetry()
        yield from self._queue(now)
        yield from self._tokens(now)
        blocks = GaugeMetricFamily("arctool:kv_cache_blocks", "Blocks of the cache, by state.", labels=("state",))
        for state in ("owned", "cached", "free"):
            blocks.add_metric((state,), getattr(now.cache, state))
        yield blocks
        kernels = CounterMetricFamily("arctool:kernel_calls", "Calls that each kernel has served.", labels=("kernel",))
        for kernel, calls in sorted(self.engagement().items()):
            kernels.add_metric((kernel,), calls)
        yield kernels
        if self.log_dropped is not None:
            yield CounterMetricFamily("arctool:log_lines_dropped", "Lines of the log that could not be written.", self.log_dropped())

    def _queue(self, now: Telemetry) -> Iterator[Metric]:
        cache, total = now.cache, now.total
        blocks = cache.owned + cache.cached + cache.free
        yield self._gauge("num_requests_running", "Requests that run.", now.running)
        yield self._gauge("num_requests_waiting", "Requests that wait to run.", now.waiting)
        reasons = GaugeMetricFamily(
            "vllm:num_requests_waiting_by_reason", "Requests that wait to run, by what for.", labels=(*LABELS, "reason")
        )
        reasons.add_metric((*self.labels, "capacity"), now.waiting)
        yield reasons
        yield self._gauge(
            "kv_cache_usage_perc", "Share of the cache's blocks that requests own, from 0 to 1.", cache.owned / max(blocks, 1)
        )
        yield self._counter("num_preemptions", "Requests that lost their blocks and had to compute anew.", total.preempted)
        yield self._counter("corrupted_requests", "Requests that ended because the model gave logits that are no numbers.", total.corrupted)
        ended = CounterMetricFamily("vllm:request_success", "Requests that ended, by why.", labels=(*LABELS, "finished_reason"))
        for reason in FinishReason:
            ended.add_metric((*self.labels, reason.value), total.finished.get(reason, 0))
        yield ended

    def _tokens(self, now: Telemetry) -> Iterator[Metric]:
        total = now.total
        yield self._counter("prompt_tokens", "Tokens of the prompts of requests that started, cached ones included.", total.prefix_queries)
        yield self._counter("prompt_tokens_cached", "Of those, the ones that the prefix cache had.", total.prefix_hits)
        yield self._counter("prefix_cache_queries", "Tokens that the prefix cache was asked for.", total.prefix_queries)
        yield self._counter("prefix_cache_hits", "Of those, the ones that it had.", total.prefix_hits)
        yield self._counter("generation_tokens", "Tokens that were generated, end tokens included.", total.generated_tokens)
        computed = total.prefill_tokens, total.decode_tokens
        steps = HistogramMetricFamily("vllm:iteration_tokens_total", "Tokens that a step computes.", labels=LABELS)
        steps.add_metric(self.labels, _cumulative(STEP_SIZES, total.step_sizes), sum(computed))
        yield steps
        phases = CounterMetricFamily("arctool:computed_tokens", "Tokens computed, recomputed ones included, by phase.", labels=("phase",))
        for phase, tokens in zip(("prefill", "decode"), computed, strict=True):
            phases.add_metric((phase,), tokens)
        yield phases

    def _gauge(self, name: str, what: str, value: float) -> Metric:
        family = GaugeMetricFamily(f"vllm:{name}", what, labels=LABELS)
        family.add_metric(self.labels, value)
        return family

    def _counter(self, name: str, what: str, value: float) -> Metric:
        family = CounterMetricFamily(f"vllm:{name}", what, labels=LABELS)
        family.add_metric(self.labels, value)
        return family


def _cumulative(edges: Sequence[int], counts: Sequence[int]) -> list[tuple[str, int]]:
    """Prometheus' buckets: each counts all that is at or below its edge."""
    names = [*(str(float(edge)) for edge in edges), "+Inf"]
    return [(name, sum(counts[: place + 1])) for place, name in enumerate(names)]
