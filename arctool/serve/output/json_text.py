"""JSON read character by character, as it is generated: what is taken so far is always the beginning of a valid text.

Readers are generators that wait for the next character by `yield`. Each is given the character at hand, and passes every character that it
accepts to `take`; it raises `Malformed` at the first that cannot stand where it stands. One turn per character, no looking back.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Generator
from typing import TypeVar

T = TypeVar("T")
Steps = Generator[None, str, T]
Take = Callable[[str], object]

WHITESPACE = " \t\n\r"
MAX_DEPTH = 64
"""Objects and arrays within one another."""

DIGITS = "0123456789"
HEX = "0123456789abcdefABCDEF"
CLOSING = {"{": "}", "[": "]"}
LITERALS = {"t": "true", "f": "false", "n": "null"}
NUMBER: dict[str, dict[str, str]] = {
    "minus": {"0": "zero"} | dict.fromkeys(DIGITS[1:], "whole"),
    "zero": {".": "point", "e": "exponent", "E": "exponent"},
    "whole": {".": "point", "e": "exponent", "E": "exponent"} | dict.fromkeys(DIGITS, "whole"),
    "point": dict.fromkeys(DIGITS, "fraction"),
    "fraction": {"e": "exponent", "E": "exponent"} | dict.fromkeys(DIGITS, "fraction"),
    "exponent": {"+": "sign", "-": "sign"} | dict.fromkeys(DIGITS, "power"),
    "sign": dict.fromkeys(DIGITS, "power"),
    "power": dict.fromkeys(DIGITS, "power"),
}
"""RFC 8259's number: where one is in it → what may follow, and where that leads."""
WHOLE_NUMBERS = ("zero", "whole", "fraction", "power")


class Malformed(Exception):
    """The character at hand cannot follow what was read."""


def space(c: str, take: Take) -> Steps[str]:
    """White space from `c` on; returns the first character behind it."""
    while c in WHITESPACE:
        take(c)
        c = yield
    return c


def word(c: str, text: str) -> Steps[None]:
    """Exactly `text`, of which `c` is the first character; ends with its last."""
    for expected in text[:-1]:
        if c != expected:
            raise Malformed
        c = yield
    if c != text[-1]:
        raise Malformed


def value(c: str, take: Take, depth: int = 0) -> Steps[str]:
    """Any JSON value from `c` on; returns the character behind it."""
    if c in CLOSING:
        yield from container(c, take, depth)
        return (yield)
    if c == '"':
        yield from string(c, take)
        return (yield)
    if c not in LITERALS:
        return (yield from _number(c, take))
    for expected in LITERALS[c]:
        if c != expected:
            raise Malformed
        take(c)
        c = yield
    return c


def container(c: str, take: Take, depth: int = 0) -> Steps[None]:
    """An object or array from its bracket `c` to the one that closes it, where it ends: nothing behind that is waited for."""
    close, is_object = CLOSING[c], c == "{"
    if depth == MAX_DEPTH:
        raise Malformed
    take(c)
    c = yield from space((yield), take)
    if c == close:
        take(c)
        return
    while True:
        if is_object:
            yield from string(c, take)
            c = yield from space((yield), take)
            if c != ":":
                raise Malformed
            take(c)
            c = yield from space((yield), take)
        c = yield from value(c, take, depth + 1)
        c = yield from space(c, take)
        if c not in (",", close):
            raise Malformed
        take(c)
        if c == close:
            return
        c = yield from space((yield), take)


def string(c: str, take: Take) -> Steps[None]:
    """A string from its quote `c` to the one that closes it.

    A control character in it, a line feed say, is no JSON, but what models write in long strings: it is taken as its escape.
    """
    if c != '"':
        raise Malformed
    take(c)
    while (c := (yield)) != '"':
        take(c if c >= " " else json.dumps(c)[1:-1])
        if c == "\\":
            c = yield
            if c not in '"\\/bfnrtu':
                raise Malformed
            take(c)
            for _ in range(4 if c == "u" else 0):
                c = yield
                if c not in HEX:
                    raise Malformed
                take(c)
    take(c)


def _number(c: str, take: Take) -> Steps[str]:
    if c != "-" and c not in DIGITS:
        raise Malformed
    at = "minus" if c == "-" else NUMBER["minus"][c]
    take(c)
    while (c := (yield)) in NUMBER[at]:
        at = NUMBER[at][c]
        take(c)
    if at not in WHOLE_NUMBERS:
        raise Malformed
    return c


def object_text(text: str) -> str:
    """`text` as that of one JSON object, control characters in its strings escaped. Raises Malformed if it is none."""
    text = text.strip(WHITESPACE)
    if not text.startswith("{"):
        raise Malformed
    pieces: list[str] = []
    steps = container("{", pieces.append)
    next(steps)
    rest = iter(text[1:])
    for c in rest:
        try:
            steps.send(c)
        except StopIteration:
            if next(rest, None) is None:
                return "".join(pieces)
            break
    raise Malformed
