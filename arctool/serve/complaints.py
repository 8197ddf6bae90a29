"""What pydantic says against a body, in our words: the field by its path in the body, what was expected, of which kind the value is."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from arctool.serve.problems import Problem

LONGEST_PATH = 200
KINDS = {dict: "an object", list: "a list", str: "a text", bool: "a truth value", int: "a number", float: "a number", type(None): "null"}
EXPECTED = {
    "bool_type": "true or false",
    "dict_type": "an object",
    "float_type": "a number",
    "int_type": "an integer",
    "list_type": "a list",
    "model_attributes_type": "an object",
    "model_type": "an object",
    "none_required": "null",
    "string_type": "a text",
    "union_tag_not_found": "an object with a type",
}


def of_validation(errors: Sequence[Mapping[str, Any]], body: Any = None) -> Problem:
    """One of pydantic's complaints about `body`: of the first field's, the one that lies deepest. What a value could have been otherwise
    (the other members of a union) is complained about too, and further up."""
    same = [error for error in errors if _parts(error)[:1] == _parts(errors[0])[:1]]
    found = max(same, key=lambda error: len(_parts(error)))
    param = _path(_parts(found), body, absent=found["type"] == "missing")
    if found["type"] == "extra_forbidden":
        text = f"{param}: no such field here; remove it (fields that are not honoured are refused)"
        return Problem(400, text, param=param, code="unknown_field")
    return Problem(400, f"{param}: {_complaint(found)}", param=param)


def _parts(error: Mapping[str, Any]) -> list[Any]:
    """Without the framework's word for the place where it looked."""
    return list(error["loc"][1:])


def _complaint(error: Mapping[str, Any]) -> str:
    kind, context, found = error["type"], error.get("ctx", {}), KINDS.get(type(error.get("input")), "something else")
    if kind == "missing":
        return "missing"
    if EXPECTED.get(kind) == found:  # a whole number that no floating-point number holds
        return "expected a smaller number"
    if kind in EXPECTED:
        return f"expected {EXPECTED[kind]}, found {found}"
    if kind == "literal_error":
        return f"expected {context['expected']}" + ("" if isinstance(error["input"], str) else f", found {found}")
    if kind == "union_tag_invalid":
        return f"expected a type among {context['expected_tags']}"
    if kind == "string_too_long":
        return f"expected at most {context['max_length']} characters"
    if kind == "too_long":
        return f"expected at most {context['max_length']} elements"
    return str(error["msg"]).removeprefix("Value error, ")


def _path(parts: Sequence[Any], body: Any, *, absent: bool) -> str:
    """messages[0].content: the parts that lead through `body`. Pydantic's own, which tell the members of a union apart, lead nowhere.

    `absent`: the last part is a field that is not there.
    """
    text, value = "", body
    for number, part in enumerate(parts):
        if isinstance(part, int) and isinstance(value, list) and part < len(value):
            text, value = f"{text}[{part}]", value[part]
        elif isinstance(value, dict) and (part in value or (absent and number == len(parts) - 1)):
            text, value = f"{text}.{part}" if text else str(part), value.get(part)
    return "".join(c if c.isprintable() else "?" for c in text)[:LONGEST_PATH] or "body"
