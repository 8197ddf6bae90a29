"""A body's JSON, read strictly and at bounded cost; and the routes that see it as it was read. Knows no protocol."""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

from fastapi.routing import APIRoute
from starlette.requests import Request
from starlette.responses import Response

from arctool.serve.problems import Problem

MAX_NESTING = 100
"""Deeper than any honest request: a schema may be 64 deep, and lies some levels deep in a body itself."""

MAX_CONTAINERS = 50_000
"""Objects and lists in one body: ten thousand messages, or a thousand tools. Whoever reads a body spends time on each of them."""

ESCAPED = re.compile(r"\\.", re.DOTALL)
STRING = re.compile(r'"[^"]*"')


def parse_body(body: bytes) -> Any:
    """Strict JSON: UTF-8, no NaN, no name twice, no half surrogate pairs, nesting within MAX_NESTING. Raises Problem 400."""
    try:
        text = body.decode("utf-8")
    except UnicodeDecodeError as error:
        raise Problem(400, f"body: expected UTF-8: byte {error.start} is not", param="body") from error
    if _containers(text) > MAX_CONTAINERS:
        raise Problem(400, f"body: expected at most {MAX_CONTAINERS} objects and lists", param="body")
    try:
        value = json.loads(text, parse_constant=_no_number, object_pairs_hook=_object)
    except RecursionError as error:
        raise Problem(400, f"body: expected nesting of at most {MAX_NESTING}", param="body") from error
    except json.JSONDecodeError as error:
        reason = "it begins with a byte order mark" if text.startswith("\ufeff") else f"{error.msg} at character {error.pos}"
        raise Problem(400, f"body: expected JSON: {reason}", param="body") from error
    except Refused as error:
        raise Problem(400, f"body: expected JSON: {error}", param="body") from error
    except ValueError as error:  # Python's own guard: many digits take long to become a number
        raise Problem(400, "body: expected numbers of fewer digits", param="body") from error
    if not isinstance(value, dict):
        raise Problem(400, f"body: expected a JSON object, found a {type(value).__name__}", param="body")
    if _deeper_than(value, MAX_NESTING):
        raise Problem(400, f"body: expected nesting of at most {MAX_NESTING}", param="body")
    if "\\ud" in text.lower():  # an escaped surrogate, or a pair that makes a character
        try:
            json.dumps(value, ensure_ascii=False).encode("utf-8")
        except UnicodeEncodeError as error:
            raise Problem(400, "body: expected valid Unicode: it has half of a surrogate pair", param="body") from error
    return value


class Refused(ValueError):
    """What Python's reader of JSON would let pass."""


def _no_number(constant: str) -> Any:
    raise Refused(f"{constant} is no JSON number")


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """A field that is given twice would be honoured once."""
    found = dict(pairs)
    if len(found) != len(pairs):
        [(twice, _)] = Counter(name for name, _ in pairs).most_common(1)
        raise Refused(f"{twice!a:.60} is given twice in one object")
    return found


def _containers(text: str) -> int:
    """How many objects and lists a JSON text has, if it is one; brackets in its strings are counted only as long as they do not matter."""
    count = text.count("[") + text.count("{")
    if count > MAX_CONTAINERS:
        bare = STRING.sub("", ESCAPED.sub("", text))
        count = bare.count("[") + bare.count("{")
    return count


def _deeper_than(value: Any, most: int) -> bool:
    level = [value]
    for _ in range(most):
        level = [inner for outer in level for inner in _inside(outer)]
        if not level:
            return False
    return True


def _inside(outer: Any) -> Iterator[Any]:
    """Objects and lists in an object or list. Most long lists are of numbers: they are looked at in one stroke."""
    values = outer.values() if isinstance(outer, dict) else outer
    if not {dict, list}.isdisjoint(map(type, values)):
        yield from (inner for inner in values if isinstance(inner, dict | list))


class StrictRequest(Request):
    """A request whose JSON `Limits` has read."""

    async def json(self) -> Any:
        return self.scope["state"]["body"]


class StrictRoute(APIRoute):
    """A route that sees StrictRequests."""

    def get_route_handler(self) -> Callable[[Request], Any]:
        handler = super().get_route_handler()

        async def handle(request: Request) -> Response:
            response: Response = await handler(StrictRequest(request.scope, request.receive))
            return response

        return handle
