"""A conversation with calls in it, as chat templates take it: OpenAI writes arguments as text, templates want them as objects."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from arctool.errors import RequestError
from arctool.run.chat import Message, check_messages
from arctool.run.sampling import checks
from arctool.serve.output.families import ToolFamily
from arctool.serve.output.tools import check_name

MAX_CALLS = 128
"""In one message."""

MAX_ID = 256


def template_messages(messages: Sequence[Message], family: ToolFamily | None = None) -> list[dict[str, Any]]:
    """`messages` for a template that has a place for tools: arguments as objects, ids as `family`'s templates accept them.

    An empty `tool_calls` is left out, as if it had not been given. Raises RequestError, by index and field.
    """
    check_messages(messages)
    return [_message(f"messages[{i}]", message, family) for i, message in enumerate(messages)]


def _message(where: str, message: Message, family: ToolFamily | None) -> dict[str, Any]:
    made = {key: value for key, value in message.items() if key != "tool_calls" or value}
    if "tool_calls" in made:
        calls = made["tool_calls"]
        if message["role"] != "assistant":
            raise RequestError(f"{where}.tool_calls: only an assistant calls tools, not {message['role']}")
        if not isinstance(calls, Sequence) or isinstance(calls, str) or len(calls) > MAX_CALLS:
            raise RequestError(f"{where}.tool_calls: expected a list of at most {MAX_CALLS} calls, found {checks.short(calls)}")
        made["tool_calls"] = [_call(f"{where}.tool_calls[{j}]", call, family) for j, call in enumerate(calls)]
    if message["role"] == "tool":
        made["tool_call_id"] = _id(f"{where}.tool_call_id", message.get("tool_call_id"), family)
    return made


def _call(where: str, call: Any, family: ToolFamily | None) -> dict[str, Any]:
    if not isinstance(call, Mapping) or call.get("type", "function") != "function" or not isinstance(call.get("function"), Mapping):
        raise RequestError(f"{where}: expected an object with id, type function and function, found {checks.short(call)}")
    check_name(f"{where}.function.name", call["function"].get("name"))
    arguments = _arguments(f"{where}.function.arguments", call["function"].get("arguments"))
    function = {"name": call["function"]["name"], "arguments": arguments}
    return {"id": _id(f"{where}.id", call.get("id"), family), "type": "function", "function": function}


def _arguments(where: str, given: Any) -> dict[str, Any]:
    if not isinstance(given, str):
        raise RequestError(f"{where}: expected a JSON object as text, found {checks.short(given)}")
    if not given.strip():
        return {}  # what some clients send for a call without arguments
    try:
        value = json.loads(given, strict=False, parse_constant=_refuse)
    except (ValueError, RecursionError) as error:
        raise RequestError(f"{where}: expected a JSON object as text: {error}") from error
    if not isinstance(value, dict):
        raise RequestError(f"{where}: expected a JSON object as text, found a {type(value).__name__}")
    return value


def _refuse(constant: str) -> None:
    raise ValueError(f"{constant} is no JSON")


def _id(where: str, given: Any, family: ToolFamily | None) -> str:
    checks.text(where, given, MAX_ID)
    if not given:
        raise RequestError(f"{where}: expected an id, found an empty text")
    return str(given) if family is None else family.fitting_id(given)
