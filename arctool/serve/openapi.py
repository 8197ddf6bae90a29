"""/openapi.json: what FastAPI finds out about the routes by itself, and what it cannot know: errors, streams, keys."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any

from fastapi import FastAPI
from fastapi.openapi.utils import get_openapi

MODULE = re.compile(r"arctool__serve__protocol__([a-z]+)__")
"""What FastAPI puts before a name that several protocols use."""
STREAMED = ("/v1/chat/completions", "/v1/completions", "/v1/responses", "/v1/messages")
PROBES = ("/health", "/ready")
OPTIONAL_TEXT: Mapping[str, Any] = {"type": ["string", "null"]}

OPENAI_ERROR: Mapping[str, Any] = {
    "type": "object",
    "required": ["error"],
    "additionalProperties": False,
    "properties": {
        "error": {
            "type": "object",
            "required": ["message", "type", "param", "code"],
            "additionalProperties": False,
            "properties": {
                "message": {"type": "string", "description": "Begins with the field that is to blame, if one is."},
                "type": {"type": "string"},
                "param": OPTIONAL_TEXT,
                "code": OPTIONAL_TEXT,
            },
        }
    },
}
ANTHROPIC_ERROR: Mapping[str, Any] = {
    "type": "object",
    "required": ["type", "error"],
    "properties": {
        "type": {"const": "error"},
        "error": {
            "type": "object",
            "required": ["type", "message"],
            "properties": {"type": {"type": "string"}, "message": {"type": "string"}},
        },
    },
}
PROBE: Mapping[str, Any] = {
    "type": "object",
    "required": ["status"],
    "properties": {"status": {"type": "string"}, "reason": {"type": "string"}},
}


def describe(app: FastAPI, *, keys: bool) -> None:
    """Have `app` serve the document. `keys`: whether it asks for API keys."""
    made: dict[str, Any] = {}

    def document() -> dict[str, Any]:
        if not made:
            made.update(_document(app, keys))
        return made

    app.openapi = document  # type: ignore[method-assign]


def _document(app: FastAPI, keys: bool) -> dict[str, Any]:
    raw = json.dumps(get_openapi(title=app.title, version=app.version, routes=app.routes))
    found: dict[str, Any] = json.loads(MODULE.sub(lambda module: module[1].capitalize(), raw))
    schemas = found["components"]["schemas"]
    for name in ("HTTPValidationError", "ValidationError"):  # FastAPI's own errors, which never leave this server
        schemas.pop(name, None)
    schemas.update(Error=OPENAI_ERROR, AnthropicError=ANTHROPIC_ERROR, Probe=PROBE)
    for path, methods in found["paths"].items():
        for operation in methods.values():
            operation["responses"] = _responses(path)
    if keys:
        found["components"]["securitySchemes"] = {"key": {"type": "http", "scheme": "bearer"}}
        found["security"] = [{"key": []}]
    return found


def _responses(path: str) -> dict[str, Any]:
    error = "AnthropicError" if path.startswith("/v1/messages") else "Error"
    refused = {"description": "What is wrong", "content": _json(f"#/components/schemas/{error}")}
    if path in PROBES:
        probe = _json("#/components/schemas/Probe")
        return {"200": {"description": "Yes", "content": probe}, "503": {"description": "No", "content": probe}, "4XX": refused}
    if path == "/metrics":
        content: dict[str, Any] = {"text/plain": {"schema": {"type": "string"}}}
    else:
        content = {"application/json": {"schema": {"type": "object"}}}
    if path in STREAMED:
        content["text/event-stream"] = {
            "schema": {"description": "Where `stream` is true: events whose data are chunks, as in the protocol."}
        }
    return {"200": {"description": "The answer", "content": content}, "4XX": refused, "5XX": refused}


def _json(reference: str) -> dict[str, Any]:
    return {"application/json": {"schema": {"$ref": reference}}}
