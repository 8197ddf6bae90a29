"""Where two JSON values differ, place by place. Plain data in and out."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Change:
    """A place, by its path, with what both sides have there; None where a side has nothing."""

    name: str
    a: Any
    b: Any


def changes(a: Any, b: Any, at: str = "") -> Iterator[Change]:
    """Where `a` and `b` differ. A number is one number however it is written; true is none, and null is not the same as nothing."""
    if isinstance(a, Mapping) and isinstance(b, Mapping):
        for key in dict.fromkeys((*a, *b)):
            path = f"{at}.{key}" if at else key
            if key in a and key in b:
                yield from changes(a[key], b[key], path)
            else:
                yield Change(path, a.get(key), b.get(key))
    elif isinstance(a, list) and isinstance(b, list) and len(a) == len(b):
        for index, (left, right) in enumerate(zip(a, b, strict=True)):
            yield from changes(left, right, f"{at}[{index}]")
    elif a != b or isinstance(a, bool) != isinstance(b, bool):
        yield Change(at, a, b)
