"""The tools that a request offers, as OpenAI's API gives them, checked once at the door. Refusals are RequestErrors that name the field."""

from __future__ import annotations

import json
import string
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from arctool.errors import RequestError
from arctool.run.sampling import checks
from arctool.run.sampling.constraint import Constraint

MAX_TOOLS = 128
MAX_NAME = 64
MAX_DESCRIPTION = 1 << 16
NAME_LETTERS = string.ascii_letters + string.digits + "_.-"
NO_ARGUMENTS: Mapping[str, Any] = {"type": "object", "properties": {}}

Mode = Literal["none", "auto", "required"]


@dataclass(frozen=True)
class Tool:
    """A function that the model may call. `parameters`: the JSON schema of its arguments, an object."""

    name: str
    description: str | None = None
    parameters: Mapping[str, Any] = field(default_factory=lambda: NO_ARGUMENTS)
    strict: bool = False

    def as_given(self) -> dict[str, Any]:
        """The tool as chat templates expect it."""
        described = {} if self.description is None else {"description": self.description}
        return {"type": "function", "function": {"name": self.name, **described, "parameters": dict(self.parameters)}}


@dataclass(frozen=True)
class ToolChoice:
    """Whether the model must call. With `name` (mode "required") it must call that tool."""

    mode: Mode
    name: str | None = None


def read_tools(given: Any) -> tuple[Tool, ...]:
    """`tools` of a request; None or an empty list offers none."""
    if given is None:
        return ()
    if not isinstance(given, Sequence) or isinstance(given, str) or len(given) > MAX_TOOLS:
        raise RequestError(f"tools: expected a list of at most {MAX_TOOLS} tools, found {_counted(given)}")
    tools: list[Tool] = []
    for i, one in enumerate(given):
        tools.append(_tool(f"tools[{i}]", one))
        if tools[-1].name in (tool.name for tool in tools[:-1]):
            raise RequestError(f"tools[{i}].function.name: {tools[-1].name!r} is the name of an earlier tool; give each its own")
    return tuple(tools)


def read_choice(given: Any, tools: Sequence[Tool]) -> ToolChoice:
    """`tool_choice` of a request that offers `tools`; None: "auto" where there are any, else "none"."""
    if given is None:
        return ToolChoice("auto" if tools else "none")
    if given == "none":
        return ToolChoice("none")
    name = None
    if isinstance(given, Mapping):
        _only("tool_choice", given, ("type", "function"))
        function = _object("tool_choice.function", given.get("function"), given.get("type"), "tool_choice.type")
        _only("tool_choice.function", function, ("name",))
        name = function.get("name")
        if name not in [tool.name for tool in tools]:
            raise RequestError(f"tool_choice.function.name: expected the name of one of the tools, found {checks.short(name)}")
    elif given not in ("auto", "required"):
        raise RequestError(f"tool_choice: expected none, auto, required or an object that names a function, found {checks.short(given)}")
    if not tools:
        raise RequestError("tool_choice: there are no tools to choose from; give some in tools")
    return ToolChoice("auto" if given == "auto" else "required", name)


def check_name(where: str, given: Any) -> str:
    """A function's name. Raises RequestError, by `where`, for what is none."""
    if not isinstance(given, str) or not 0 < len(given) <= MAX_NAME or not set(given) <= set(NAME_LETTERS):
        raise RequestError(f"{where}: expected 1 to {MAX_NAME} of the characters a-z A-Z 0-9 _ . -, found {checks.short(given)}")
    return given


def _tool(where: str, given: Any) -> Tool:
    if not isinstance(given, Mapping):
        raise RequestError(f"{where}: expected an object with type and function, found {checks.short(given)}")
    _only(where, given, ("type", "function"))
    function = _object(f"{where}.function", given.get("function"), given.get("type"), f"{where}.type")
    _only(f"{where}.function", function, ("name", "description", "parameters", "strict"))
    name, description, strict = (function.get(key) for key in ("name", "description", "strict"))
    checked = check_name(f"{where}.function.name", name)
    if description is not None:
        checks.text(f"{where}.function.description", description, MAX_DESCRIPTION)
    if strict is not None:
        checks.truth(f"{where}.function.strict", strict)
    return Tool(checked, description, _parameters(f"{where}.function.parameters", function.get("parameters")), bool(strict))


def _parameters(where: str, given: Any) -> Mapping[str, Any]:
    if given is None or given == {}:
        return NO_ARGUMENTS
    if not isinstance(given, Mapping) or given.get("type") != "object":
        raise RequestError(f'{where}: expected a JSON schema of "type": "object", found {checks.short(given)}')
    try:
        Constraint("json_schema", json.dumps(given, allow_nan=False))  # its bounds: size and nesting
    except RequestError as error:
        raise RequestError(f"{where}: {str(error).removeprefix('json_schema: ')}") from error
    except (ValueError, TypeError, RecursionError) as error:
        raise RequestError(f"{where}: expected JSON: {error}") from error
    return given


def _object(where: str, given: Any, kind: Any, kind_where: str) -> Mapping[str, Any]:
    if kind != "function":
        raise RequestError(f"{kind_where}: expected function, found {checks.short(kind)}")
    if not isinstance(given, Mapping):
        raise RequestError(f"{where}: expected an object, found {checks.short(given)}")
    return given


def _only(where: str, given: Mapping[str, Any], known: tuple[str, ...]) -> None:
    for key in given:
        if key not in known:
            raise RequestError(f"{where}.{key!s:.60}: not known here; expected only {', '.join(known)}")


def _counted(given: Any) -> str:
    return f"{len(given)}" if isinstance(given, Sequence) and not isinstance(given, str) else f"a {type(given).__name__}"
