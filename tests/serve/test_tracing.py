"""A span says what a request was and how long it took, in the conventions' names and without a word of its text; no SDK, no tracing."""

from __future__ import annotations

import sys
from dataclasses import dataclass, field
from typing import Any

import pytest

from arctool.errors import UsageError
from arctool.run.requests import Completion, Timing
from arctool.run.sampling.params import SamplingParams
from arctool.run.sequence import FinishReason
from arctool.serve.tracing import Traced, Tracing, attributes, open_tracing

NOW = 1_800_000_000_000_000_000
TIMING = Timing(first_token=1.0, total=3.25, scheduled=0.25, last_token=3.0, arrived=7.0)


def completion(
    tokens: int, reason: FinishReason = FinishReason.STOP, index: int = 0, cached: int = 0, timing: Timing = TIMING
) -> Completion:
    return Completion(1, (1, 2, 3), (5,) * tokens, "secret text", reason, None, timing, None, index, cached)


@dataclass
class Span:
    name: str
    given: dict[str, Any]
    statuses: list[tuple[Any, str]] = field(default_factory=list)
    ended: int | None = None

    def set_status(self, status: Any, description: str) -> None:
        self.statuses.append((status, description))

    def end(self, end_time: int) -> None:
        self.ended = end_time


@dataclass
class Tracer:
    spans: list[Span] = field(default_factory=list)

    def start_span(self, name: str, **given: Any) -> Span:
        self.spans.append(Span(name, given))
        return self.spans[-1]


def trace(request: Traced, tracer: Tracer | None = None) -> Span:
    tracer = Tracer() if tracer is None else tracer
    tracing = Tracing(tracer, "m", context_of=lambda headers: ("context", headers), server="SERVER", failed="ERROR", wall=lambda: NOW)
    tracing.record(request)
    tracing.close()
    [span] = tracer.spans
    return span


def test_a_span_has_the_names_of_the_conventions() -> None:
    params = SamplingParams(
        temperature=0.5, top_p=0.9, top_k=40, max_tokens=64, frequency_penalty=0.1, presence_penalty=0.2, seed=3, n=2, stop=("secret",)
    )
    done = (completion(5, FinishReason.LENGTH, 1), completion(4, FinishReason.STOP, 0, cached=2))
    request = Traced("req-1", "chat", params, 3, seconds=3.5, first_token=1.25, completions=done)
    assert attributes(request, "m") == {
        "gen_ai.operation.name": "chat",
        "gen_ai.provider.name": "arctool",
        "gen_ai.request.model": "m",
        "gen_ai.response.model": "m",
        "gen_ai.response.id": "req-1",
        "gen_ai.request.temperature": 0.5,
        "gen_ai.request.top_p": 0.9,
        "gen_ai.request.top_k": 40,
        "gen_ai.request.max_tokens": 64,
        "gen_ai.request.frequency_penalty": 0.1,
        "gen_ai.request.presence_penalty": 0.2,
        "gen_ai.request.seed": 3,
        "gen_ai.request.choice.count": 2,
        "gen_ai.usage.input_tokens": 3,
        "gen_ai.usage.output_tokens": 9,
        "gen_ai.usage.cache_read.input_tokens": 2,
        "gen_ai.response.finish_reasons": ("stop", "length"),
        "gen_ai.latency.e2e": 3.5,
        "gen_ai.latency.time_to_first_token": 1.25,
        "gen_ai.latency.time_in_queue": 0.25,
        "gen_ai.latency.time_in_model_prefill": 0.75,
        "gen_ai.latency.time_in_model_decode": 2.0,
        "gen_ai.latency.time_in_model_inference": 2.75,
    }


def test_what_was_not_asked_for_is_not_there() -> None:
    found = attributes(Traced("req-1", "text_completion", SamplingParams(), 3, seconds=1.0), "m")
    assert set(found) == {
        *("gen_ai.operation.name", "gen_ai.provider.name", "gen_ai.request.model", "gen_ai.response.model", "gen_ai.response.id"),
        *("gen_ai.request.temperature", "gen_ai.request.top_p", "gen_ai.usage.input_tokens", "gen_ai.usage.output_tokens"),
        "gen_ai.latency.e2e",
    }


def test_a_request_that_never_ran_has_no_times_in_the_model() -> None:
    done = completion(0, FinishReason.ABORT, timing=Timing(None, 2.0))
    found = attributes(Traced("req-1", "chat", SamplingParams(), 3, seconds=2.0, completions=(done,)), "m")
    assert not [name for name in found if "time_in" in name]
    assert found["gen_ai.response.finish_reasons"] == ("abort",)


@pytest.mark.parametrize(
    ("seed", "told"), [(0, 0), (-1, -1), (2**63 - 1, 2**63 - 1), (2**63, -(2**63)), (2**64 - 1, -1), (-(2**63), -(2**63))]
)
def test_every_seed_is_an_integer_that_a_span_can_hold(seed: int, told: int) -> None:
    found = attributes(Traced("req-1", "chat", SamplingParams(seed=seed), 3, seconds=1.0), "m")
    assert found["gen_ai.request.seed"] == told


def test_a_span_is_as_long_as_the_request_and_belongs_to_its_caller() -> None:
    headers = ((b"traceparent", b"00-ab-cd-01"), (b"authorization", b"Bearer sesame"), (b"tracestate", b"a=\xfc"))
    request = Traced("req-1", "chat", SamplingParams(), 3, seconds=1.5, completions=(completion(2),), headers=headers)
    span = trace(request)
    assert span.name == "chat m"
    assert span.given.pop("attributes") == attributes(request, "m")
    assert span.given == {
        "context": ("context", {"traceparent": "00-ab-cd-01", "tracestate": "a=ü"}),
        "kind": "SERVER",
        "start_time": NOW - 1_500_000_000,
    }
    assert (span.statuses, span.ended) == ([], NOW)


@pytest.mark.parametrize(
    ("error", "reason", "word"),
    [("timeout", FinishReason.ABORT, "timeout"), (None, FinishReason.ERROR, "engine_error"), ("x", FinishReason.ERROR, "x")],
)
def test_a_request_that_failed_says_so(error: str | None, reason: FinishReason, word: str) -> None:
    span = trace(Traced("req-1", "chat", SamplingParams(), 3, seconds=1.5, completions=(completion(2, reason),), error=error))
    assert span.statuses == [("ERROR", word)]
    assert span.given["attributes"]["error.type"] == word


def test_what_cannot_be_traced_does_not_fail(caplog: pytest.LogCaptureFixture) -> None:
    class Broken(Tracer):
        def start_span(self, name: str, **given: Any) -> Span:
            super().start_span(name, **given)
            raise RuntimeError("no more spans")

    trace(Traced("req-1", "chat", SamplingParams(), 3, seconds=1.5), Broken())
    assert "req-1 could not be traced" in caplog.text


def test_without_an_endpoint_there_is_no_tracing() -> None:
    assert open_tracing(None, "m", "1") is None


@pytest.mark.parametrize(
    "missing", ["opentelemetry.trace", "opentelemetry.sdk.trace", "opentelemetry.exporter.otlp.proto.http.trace_exporter"]
)
def test_without_the_sdk_tracing_is_refused_with_its_name(missing: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, missing, None)
    with pytest.raises(UsageError, match=r"http://h:1 .*pip install opentelemetry-sdk opentelemetry-exporter-otlp-proto-http$"):
        open_tracing("http://h:1", "m", "1")


@pytest.mark.parametrize(
    "endpoint", ["", "localhost:4318", "grpc://h:4317", "http://", "http://h:x", "http://h:99999", "http://[::1", "/v1/traces"]
)
def test_an_endpoint_that_is_no_url_is_refused(endpoint: str) -> None:
    with pytest.raises(UsageError, match="the endpoint for traces: expected a URL"):
        open_tracing(endpoint, "m", "1")


class FakeSdk:
    """Modules in the place of the SDK's; keeps what they are asked for."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.tracer = Tracer()
        self.exporter: dict[str, Any] = {}
        self.processors: list[Any] = []
        self.resource: dict[str, str] = {}
        self.shut_down = 0
        fake = self

        class Provider:
            def __init__(self, resource: Any) -> None:
                fake.resource = resource

            def add_span_processor(self, processor: Any) -> None:
                fake.processors.append(processor)

            def get_tracer(self, name: str, version: str) -> Tracer:
                return fake.tracer

            def shutdown(self) -> None:
                fake.shut_down += 1

        class Context:
            def extract(self, carrier: dict[str, str]) -> dict[str, str]:
                return carrier

        class Named:
            SERVER, ERROR = "SERVER", "ERROR"
            create = staticmethod(dict)

        def exporter(**given: Any) -> str:
            fake.exporter = given
            return "exporter"

        modules: dict[str, dict[str, Any]] = {
            "opentelemetry": {},
            "opentelemetry.trace": {"SpanKind": Named, "StatusCode": Named},
            "opentelemetry.trace.propagation.tracecontext": {"TraceContextTextMapPropagator": Context},
            "opentelemetry.sdk.trace": {"TracerProvider": Provider},
            "opentelemetry.sdk.trace.export": {"BatchSpanProcessor": lambda exporter: ("batch", exporter)},
            "opentelemetry.sdk.resources": {"Resource": Named},
            "opentelemetry.exporter.otlp.proto.http.trace_exporter": {"OTLPSpanExporter": exporter},
        }
        for name, names in modules.items():
            for place in [".".join(name.split(".")[: i + 1]) for i in range(name.count(".") + 1)]:
                if place not in modules:
                    monkeypatch.setitem(sys.modules, place, type("Module", (), {}))  # type: ignore[arg-type]
            monkeypatch.setitem(sys.modules, name, type("Module", (), names))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("endpoint", "url"),
    [
        ("http://127.0.0.1:4318", "http://127.0.0.1:4318/v1/traces"),
        ("https://collector/", "https://collector/v1/traces"),
        ("http://h:1/custom/traces", "http://h:1/custom/traces"),
    ],
)
def test_with_the_sdk_spans_go_to_the_endpoint_in_batches(endpoint: str, url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    sdk = FakeSdk(monkeypatch)
    tracing = open_tracing(endpoint, "m", "1.2")
    assert tracing is not None
    tracing.record(Traced("req-1", "chat", SamplingParams(), 3, seconds=1.5, headers=((b"traceparent", b"t"),), error="x"))
    [span] = sdk.tracer.spans
    assert (span.given["context"], span.given["kind"], span.statuses) == ({"traceparent": "t"}, "SERVER", [("ERROR", "x")])
    assert sdk.exporter["endpoint"] == url
    assert sdk.exporter["timeout"] < 10
    assert sdk.processors == [("batch", "exporter")]
    assert sdk.resource == {"service.name": "arctool", "service.version": "1.2"}
    tracing.close()
    assert sdk.shut_down == 1
