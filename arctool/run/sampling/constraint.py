"""What a request may demand of its text, and what can be said against it before any grammar is compiled (`grammar.py` does that)."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Literal, get_args

from arctool.errors import RequestError
from arctool.run.sampling import checks

Kind = Literal["json_schema", "json_object", "regex", "grammar"]
KINDS: tuple[str, ...] = get_args(Kind)

MAX_SOURCE_BYTES = 1 << 16
MAX_NESTING = 64


@dataclass(frozen=True)
class Constraint:
    """The text must be: JSON of a schema; any JSON object (`source` is empty); a full match of a regular expression; of a Lark grammar.

    Raises RequestError, by the name of the kind, for a source that is too large, nested too deeply or no JSON.
    """

    kind: Kind
    source: str = ""

    def __post_init__(self) -> None:
        if self.kind not in KINDS:
            raise RequestError(f"constraint: expected one of {', '.join(KINDS)}, found {checks.short(self.kind)}")
        checks.text(self.kind, self.source, MAX_SOURCE_BYTES)
        size = len(self.source.encode())
        if size > MAX_SOURCE_BYTES:
            raise RequestError(f"{self.kind}: expected at most {MAX_SOURCE_BYTES} bytes, found {size}")
        if self.kind == "json_object" and self.source:
            raise RequestError(f"json_object: expected no source, found {checks.short(self.source)}")
        depth = nesting(self.source, json_text=self.kind == "json_schema")
        if depth > MAX_NESTING:
            raise RequestError(f"{self.kind}: expected nesting of at most {MAX_NESTING}, found {depth}")
        if self.kind == "json_schema":
            _check_schema(self.source)


def nesting(source: str, *, json_text: bool) -> int:
    """How deep brackets of any kind lie in one another: in JSON those outside strings, elsewhere those without a backslash before them.

    Exact for JSON. Elsewhere a first sieve, which knows no character classes: what slips through meets the limits of `grammar.py`.
    """
    depth = deepest = 0
    quoted = escaped = False
    for character in source:
        if escaped:
            escaped = False
        elif character == "\\":
            escaped = True
        elif character == '"' and json_text:
            quoted = not quoted
        elif character in "([{" and not quoted:
            depth += 1
            deepest = max(deepest, depth)
        elif character in ")]}" and not quoted:
            depth = max(depth - 1, 0)
    return deepest


def _check_schema(source: str) -> None:
    def refuse(constant: str) -> None:
        raise ValueError(f"{constant} is no JSON")

    def once(pairs: list[tuple[str, object]]) -> dict[str, object]:
        found = dict(pairs)
        if len(found) != len(pairs):
            raise ValueError("a key is given twice")
        return found

    try:
        schema = json.loads(source, parse_constant=refuse, object_pairs_hook=once)
    except (ValueError, RecursionError) as error:
        raise RequestError(f"json_schema: expected JSON: {error}") from error
    if not isinstance(schema, dict):
        raise RequestError(f"json_schema: expected a JSON object, found a {type(schema).__name__}")
