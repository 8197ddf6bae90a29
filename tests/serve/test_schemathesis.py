"""The OpenAPI document, and a machine that reads it: whatever it makes up, the server answers as it says there, and never with a 5xx."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator
from typing import Any

import pytest
import schemathesis
from hypothesis import HealthCheck, given, settings
from live import Live, live
from schemathesis.checks import positive_data_acceptance
from schemathesis.generation import GenerationMode
from scripted import scripted
from wire import get

OPERATIONS = [
    ("POST", "/v1/chat/completions"),
    ("POST", "/v1/completions"),
    ("POST", "/v1/responses"),
    ("POST", "/v1/messages"),
    ("POST", "/v1/messages/count_tokens"),
    ("POST", "/tokenize"),
    ("POST", "/detokenize"),
    ("GET", "/v1/models"),
    ("GET", "/v1/models/{name}"),
    ("GET", "/health"),
    ("GET", "/ready"),
    ("GET", "/metrics"),
    ("GET", "/status"),
]
POSTS = [(method, path) for method, path in OPERATIONS if method == "POST"]
EXAMPLES = 25


@pytest.fixture(scope="module")
def server() -> Iterator[Live]:
    with live(scripted({"": "yes"})) as running:
        yield running


@pytest.fixture(scope="module")
def document(server: Live) -> dict[str, Any]:
    found: dict[str, Any] = get(server.port, "/openapi.json").json
    return found


@pytest.fixture(scope="module")
def api(server: Live) -> schemathesis.BaseSchema:
    return schemathesis.openapi.from_url(f"{server.url}/openapi.json")


HINDRANCES = ("model", "tools", "tool_choice", "chat_template_kwargs", "reasoning_effort", "stop_token_ids", "logit_bias", "best_of")
"""Fields whose values are refused unless they fit the model or each other."""
MOST = {"max_tokens": 20, "max_completion_tokens": 20, "max_output_tokens": 20, "min_tokens": 5, "n": 3}


def softened(body: Any) -> Any:
    """A made-up body that has a chance to be answered."""
    if not isinstance(body, dict):
        return body
    kept = {name: value for name, value in body.items() if name not in HINDRANCES}
    if "messages" in kept:
        messages = [{"role": one["role"], "content": one.get("content") or "Hi"} for one in kept["messages"] or () if one["role"] != "tool"]
        kept["messages"] = messages[:3] or [{"role": "user", "content": "Hi"}]
    if kept.get("timeout") is not None:
        kept["timeout"] = 60  # a shorter one may rightly pass
    return {name: min(value, MOST[name]) if name in MOST and type(value) is int else value for name, value in kept.items()}


def statuses(api: schemathesis.BaseSchema, method: str, path: str, mode: GenerationMode, *, soft: bool = False) -> Counter[int]:
    """What an endpoint answers to what is made up for it; every answer is checked against the document."""
    found: Counter[int] = Counter()

    @settings(max_examples=EXAMPLES, deadline=None, derandomize=True, database=None, suppress_health_check=list(HealthCheck))
    @given(case=api[path][method].as_strategy(generation_mode=mode))
    def check(case: schemathesis.Case) -> None:
        if soft:
            case.body = softened(case.body)
        reply = case.call()
        found[reply.status_code] += 1
        # The rules of the document are not all there are: a prompt may be too long, or say of itself what is not so.
        case.validate_response(reply, excluded_checks=[positive_data_acceptance])

    check()
    return found


@pytest.mark.parametrize(("method", "path"), OPERATIONS)
def test_what_follows_the_document_is_answered_as_it_says(method: str, path: str, api: schemathesis.BaseSchema) -> None:
    found = statuses(api, method, path, GenerationMode.POSITIVE)
    assert set(found) <= {200, 400, 404}


@pytest.mark.parametrize(("method", "path"), POSTS)
def test_what_follows_it_and_fits_the_model_is_served_at_times(method: str, path: str, api: schemathesis.BaseSchema) -> None:
    found = statuses(api, method, path, GenerationMode.POSITIVE, soft=True)
    assert set(found) <= {200, 400}
    assert found[200] > 0


@pytest.mark.parametrize(("method", "path"), POSTS)
def test_what_does_not_follow_it_is_refused(method: str, path: str, api: schemathesis.BaseSchema) -> None:
    found = statuses(api, method, path, GenerationMode.NEGATIVE)
    assert set(found) <= {400, 404, 415}
    assert found.total() >= EXAMPLES


def test_the_document_lists_these_operations_and_says_what_is_so(document: dict[str, Any]) -> None:
    found = {(method.upper(), path) for path, methods in document["paths"].items() for method in methods}
    assert found == set(OPERATIONS)
    text = json.dumps(document)
    for wrong in ("422", "HTTPValidationError", "arctool__", "protocol__"):
        assert wrong not in text
    chat = document["paths"]["/v1/chat/completions"]["post"]
    assert set(chat["responses"]["200"]["content"]) == {"application/json", "text/event-stream"}
    assert chat["responses"]["4XX"]["content"]["application/json"]["schema"] == {"$ref": "#/components/schemas/Error"}
    messages = document["paths"]["/v1/messages"]["post"]["responses"]
    assert messages["5XX"]["content"]["application/json"]["schema"] == {"$ref": "#/components/schemas/AnthropicError"}
    assert "security" not in document
    fields = document["components"]["schemas"]["ChatBody"]["properties"]
    assert (fields["temperature"]["minimum"], fields["temperature"]["maximum"]) == (0, 2)
    assert all("$ref" not in place or _there(document, place["$ref"]) for place in _objects(document))


def test_with_keys_the_document_says_so() -> None:
    with live(scripted({"": "yes"}), api_keys=("a-secret-key",)) as server:
        assert get(server.port, "/openapi.json").status == 401
        found = get(server.port, "/openapi.json", {"Authorization": "Bearer a-secret-key"}).json
        assert found["components"]["securitySchemes"] == {"key": {"type": "http", "scheme": "bearer"}}
        assert found["security"] == [{"key": []}]


def _objects(value: Any) -> Iterator[dict[str, Any]]:
    if isinstance(value, dict):
        yield value
    for inner in value.values() if isinstance(value, dict) else value if isinstance(value, list) else ():
        yield from _objects(inner)


def _there(document: Any, reference: str) -> bool:
    for part in reference.removeprefix("#/").split("/"):
        document = document[part]
    return isinstance(document, dict)
