"""Checks of single fields of a request. Each refuses by a RequestError that begins with the field's name and shows what was found."""

from __future__ import annotations

import operator
from typing import Any

from arctool.errors import RequestError


def number(field: str, value: Any, low: float, high: float, *, above: bool = False) -> None:
    """A number from `low` to `high`, or with `above` more than `low`; no truth value, no NaN (the comparisons fail for it)."""
    good = isinstance(value, int | float) and not isinstance(value, bool)
    if not good or not low <= value <= high or (above and value == low):
        wanted = f"more than {low:g} and at most {high:g}" if above else f"a number from {low:g} to {high:g}"
        raise RequestError(f"{field}: expected {wanted}, found {short(value)}")


def integer(field: str, value: Any, low: int, high: int) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or not low <= value <= high:
        raise RequestError(f"{field}: expected an integer from {low} to {high}, found {short(value)}")


def truth(field: str, value: Any) -> None:
    if not isinstance(value, bool):
        raise RequestError(f"{field}: expected true or false, found {short(value)}")


def text(field: str, value: Any, longest: int) -> None:
    """Text of at most `longest` characters that is valid Unicode."""
    if not isinstance(value, str) or len(value) > longest:
        raise RequestError(f"{field}: expected text of at most {longest} characters, found {short(value)}")
    try:
        value.encode("utf-8")
    except UnicodeEncodeError as error:
        raise RequestError(f"{field}: expected text that is valid Unicode: {error.reason} at {error.start}") from error


def as_token_id(value: Any) -> int | None:
    """`value` as an int if it is an integer of any kind (numpy's and torch's included), but no truth value; else None."""
    if isinstance(value, bool) or str(getattr(value, "dtype", "")).endswith("bool"):
        return None
    try:
        return operator.index(value)
    except TypeError:
        return None


def token_id(field: str, value: Any) -> int:
    """`value` as a token id that may exist: an integer of any kind from 0 to 2³¹ − 1."""
    known = as_token_id(value)
    integer(field, value if known is None else known, 0, (1 << 31) - 1)
    return operator.index(value)


def short(value: Any) -> str:
    try:
        shown = repr(value)
    except (ValueError, RecursionError):
        return f"a {type(value).__name__} too large to print"
    return shown if len(shown) <= 40 else shown[:37] + "..."
