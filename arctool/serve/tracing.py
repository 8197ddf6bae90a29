"""A span for every request, sent to an OpenTelemetry collector: only where somebody asks for it, by naming an endpoint.

A span is made when its request is over, from what the engine timed (60 µs), and sent by a thread of the SDK: tokens pay nothing for it, and
a collector that is slow or away delays nothing. It has numbers and names, no text of prompts or answers. Attributes are the GenAI semantic
conventions', and beside them vLLM's `gen_ai.latency.*`. The SDK is not one of our dependencies: see `PACKAGES`.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from importlib import import_module
from typing import Any
from urllib.parse import urlsplit

from arctool.errors import UsageError
from arctool.run.requests import Completion
from arctool.run.sampling.params import SamplingParams
from arctool.run.sequence import FinishReason

_log = logging.getLogger(__name__)

PACKAGES = ("opentelemetry-sdk", "opentelemetry-exporter-otlp-proto-http")
PATH = "/v1/traces"
"""Where collectors take spans over HTTP (OTLP)."""
CONTEXT_HEADERS = (b"traceparent", b"tracestate")
"""W3C Trace Context: how a caller says which span of its own a request belongs to."""
EXPORT_SECONDS = 5.0

Attributes = Mapping[str, str | int | float | tuple[str, ...]]


@dataclass(frozen=True)
class Traced:
    """A request that is over. `seconds`, `first_token`: from its arrival, by a monotonic clock. `headers`: as ASGI has them.

    `operation`: "chat" or "text_completion". `completions`: the samples that ended. `error`: one word of ours for what went wrong.
    """

    request_id: str
    operation: str
    params: SamplingParams
    prompt_tokens: int
    seconds: float
    first_token: float | None = None
    completions: tuple[Completion, ...] = ()
    headers: tuple[tuple[bytes, bytes], ...] = ()
    error: str | None = None


def attributes(request: Traced, model: str) -> Attributes:
    """What its span says of a request. What was not asked for or is not known is not there."""
    params, done = request.params, request.completions
    timing = done[0].timing if done else None
    found: dict[str, Any] = {
        "gen_ai.operation.name": request.operation,
        "gen_ai.provider.name": "arctool",
        "gen_ai.request.model": model,
        "gen_ai.response.model": model,
        "gen_ai.response.id": request.request_id,
        "gen_ai.request.temperature": params.temperature,
        "gen_ai.request.top_p": params.top_p,
        "gen_ai.request.top_k": params.top_k if params.top_k > 0 else None,
        "gen_ai.request.max_tokens": params.max_tokens,
        "gen_ai.request.frequency_penalty": params.frequency_penalty or None,
        "gen_ai.request.presence_penalty": params.presence_penalty or None,
        "gen_ai.request.seed": None if params.seed is None else _signed(params.seed),
        "gen_ai.request.choice.count": params.n if params.n > 1 else None,
        "gen_ai.usage.input_tokens": request.prompt_tokens,
        "gen_ai.usage.output_tokens": sum(len(one.token_ids) for one in done),
        "gen_ai.usage.cache_read.input_tokens": max((one.cached_tokens for one in done), default=None),
        "gen_ai.response.finish_reasons": tuple(one.finish_reason.value for one in sorted(done, key=lambda one: one.index)) or None,
        "gen_ai.latency.e2e": request.seconds,
        "gen_ai.latency.time_to_first_token": request.first_token,
        "gen_ai.latency.time_in_queue": None if timing is None else timing.scheduled,
        "error.type": _error_of(request),
    }
    if timing is not None and timing.scheduled is not None and timing.first_token is not None and timing.last_token is not None:
        found["gen_ai.latency.time_in_model_prefill"] = timing.first_token - timing.scheduled
        found["gen_ai.latency.time_in_model_decode"] = timing.last_token - timing.first_token
        found["gen_ai.latency.time_in_model_inference"] = timing.last_token - timing.scheduled
    return {name: value for name, value in found.items() if value is not None}


class Tracing:
    """Makes spans with an OpenTelemetry `tracer`. `open_tracing` makes one.

    `context_of` reads the caller's span from the headers that have it; `server` and `failed` are the API's kind and status; `wall` gives
    nanoseconds since 1970.
    """

    def __init__(
        self,
        tracer: Any,
        model: str,
        *,
        context_of: Callable[[Mapping[str, str]], Any],
        server: Any,
        failed: Any,
        shutdown: Callable[[], None] = lambda: None,
        wall: Callable[[], int] = time.time_ns,
    ) -> None:
        self._tracer = tracer
        self._model = model
        self._context_of = context_of
        self._server = server
        self._failed = failed
        self._shutdown = shutdown
        self._wall = wall

    def record(self, request: Traced) -> None:
        """Make the span of a request that ends now. Never raises: a request does not fail because it cannot be traced."""
        try:
            self._record(request)
        except Exception:
            _log.exception("request %s could not be traced", request.request_id)

    def close(self) -> None:
        """Send what waits; takes as long as the collector does, at most seconds. For a thread, not for an event loop."""
        self._shutdown()

    def _record(self, request: Traced) -> None:
        now = self._wall()
        span = self._tracer.start_span(
            f"{request.operation} {self._model}",
            context=self._context_of(_context_headers(request.headers)),
            kind=self._server,
            attributes=attributes(request, self._model),
            start_time=now - round(request.seconds * 1e9),  # its length is that of a clock that does not jump
        )
        if (error := _error_of(request)) is not None:
            span.set_status(self._failed, error)
        span.end(now)


def open_tracing(endpoint: str | None, model: str, version: str) -> Tracing | None:
    """Tracing to an OTLP collector, such as http://127.0.0.1:4318; without an endpoint there is none.

    Raises UsageError for an endpoint that is no URL, and where the SDK is not installed. Headers for the collector, resource and
    sampling come from the SDK's own environment variables (OTEL_...).
    """
    if endpoint is None:
        return None
    url = _checked(endpoint)
    try:
        api = import_module("opentelemetry.trace")
        w3c = import_module("opentelemetry.trace.propagation.tracecontext").TraceContextTextMapPropagator()
        sdk = import_module("opentelemetry.sdk.trace")
        batch = import_module("opentelemetry.sdk.trace.export").BatchSpanProcessor
        resource = import_module("opentelemetry.sdk.resources").Resource
        exporter = import_module("opentelemetry.exporter.otlp.proto.http.trace_exporter").OTLPSpanExporter
    except ImportError as error:
        raise UsageError(f"tracing to {endpoint} needs packages that are not installed: pip install {' '.join(PACKAGES)}") from error
    provider = sdk.TracerProvider(resource=resource.create({"service.name": "arctool", "service.version": version}))
    provider.add_span_processor(batch(exporter(endpoint=url, timeout=EXPORT_SECONDS)))
    return Tracing(
        provider.get_tracer("arctool", version),
        model,
        context_of=w3c.extract,
        server=api.SpanKind.SERVER,
        failed=api.StatusCode.ERROR,
        shutdown=provider.shutdown,
    )


def _checked(endpoint: str) -> str:
    try:
        url = urlsplit(endpoint)
        usable = url.scheme in ("http", "https") and bool(url.hostname) and (url.port is None or url.port > 0)
    except ValueError:
        usable = False
    if not usable:
        raise UsageError(f"the endpoint for traces: expected a URL such as http://127.0.0.1:4318{PATH}, found {endpoint!r:.80}")
    return endpoint if url.path.strip("/") else f"{endpoint.rstrip('/')}{PATH}"


def _context_headers(headers: Iterable[tuple[bytes, bytes]]) -> dict[str, str]:
    return {name.decode("ascii"): value.decode("latin-1") for name, value in headers if name in CONTEXT_HEADERS}


def _signed(seed: int) -> int:
    """The same 64 bits with a sign: attributes have no other integers, and the SDK would complain of each to its log."""
    return (seed + (1 << 63)) % (1 << 64) - (1 << 63)


def _error_of(request: Traced) -> str | None:
    """A word for what went wrong, of few."""
    failed = any(one.finish_reason is FinishReason.ERROR for one in request.completions)
    return request.error if request.error is not None else "engine_error" if failed else None
