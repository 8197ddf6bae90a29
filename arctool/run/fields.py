"""Typed, refusing access to the fields of a JSON mapping. It knows types and messages, not what any field means."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from arctool.errors import SourceError


@dataclass(frozen=True)
class Fields:
    """Typed access to the mapping; every refusal names the file and the field."""

    config: Mapping[str, Any]
    where: str

    def error(self, field: str, problem: str) -> SourceError:
        return SourceError(f"{self.where}: {field}: {problem}")

    def get(self, field: str) -> Any:
        """The value, or None if it is absent or null."""
        return self.config.get(field)

    def absent(self, field: str) -> bool:
        """Whether the file lacks the field; one that is null is there."""
        return field not in self.config

    def required(self, field: str) -> Any:
        value = self.get(field)
        if value is None:
            raise self.error(field, "missing; this field is required")
        return value

    def count(self, field: str, limit: int) -> int:
        return self.check_count(field, self.required(field), limit)

    def check_count(self, field: str, value: Any, limit: int) -> int:
        if isinstance(value, bool) or not isinstance(value, int) or not 1 <= value <= limit:
            raise self.error(field, f"expected an integer from 1 to {limit}, found {short(value)}")
        return value

    def positive(self, field: str) -> float:
        return self.check_positive(field, self.required(field))

    def check_positive(self, field: str, value: Any) -> float:
        try:
            number = math.nan if isinstance(value, bool) or not isinstance(value, int | float) else float(value)
        except OverflowError:
            number = math.inf
        if not math.isfinite(number) or number <= 0:
            raise self.error(field, f"expected a positive finite number, found {short(value)}")
        return number

    def flag(self, field: str, default: bool) -> bool:
        value = self.get(field)
        if value is None:
            return default
        if not isinstance(value, bool):
            raise self.error(field, f"expected true or false, found {short(value)}")
        return value

    def choice(self, field: str, known: tuple[str, ...], default: str) -> str:
        value = self.get(field)
        if value is None:
            return default
        if value not in known:
            raise self.error(field, f"expected one of {', '.join(known)}, found {short(value)}")
        return str(value)


def short(value: Any) -> str:
    """A value for a message: one line, bounded, and never an error of its own (huge ints refuse to print)."""
    try:
        text = repr(value)
    except ValueError:
        text = f"a {type(value).__name__} too large to print"
    return text if len(text) <= 60 else text[:57] + "..."
