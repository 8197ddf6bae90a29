"""What one rendering of a stranger's template may use: a budget of units, a limit on every value, two seconds of clock.

A unit is about a byte: a character costs one, an element of a list eight, a turn of a loop or a call 128, whatever Python
really does for them. `charge` also looks at the clock, so whoever charges often cannot run for long. Values are weighed before an
operation inside the interpreter (comparing, hashing, printing) walks them, because that walk cannot be interrupted: lists that
share their elements are small in memory and endless to walk. This room knows values, not templates.
"""

from __future__ import annotations

import re
from collections.abc import Callable, ItemsView, Iterable, Iterator, KeysView, Mapping, ValuesView
from string import Formatter
from typing import Any

from jinja2.exceptions import SecurityError
from jinja2.runtime import Undefined

MAX_SECONDS = 2.0
BUDGET = 64_000_000
MAX_ELEMENTS = 8_000_000
"""The largest weight of one value: its characters, and ELEMENT for each element, nested ones as often as they are seen."""
STEP = 128
ELEMENT = 8
PIECE = 64
"""A small text or tuple or an entry of a dict, made in bulk: what such an object takes in memory."""
MAX_DIGITS = 999
# The longest text of a float ("%f" of 1e308) and of the widths that may surround it.
MAX_FIELD = 330 + 2 * MAX_DIGITS
LINE_BREAKS = "\n\r\v\f\x1c\x1d\x1e\x85\u2028\u2029"

# A width or precision of a %-format stands behind "%", behind the ")" of a key, or behind a dot.
WIDE_PERCENT = re.compile(r"[%).][-+ #0]*(?:\d{4,}|\*)")
WIDE_SPEC = re.compile(r"\d{4,}|\{")


class Meter:
    """What one rendering has used up. Every method may raise SecurityError."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._deadline = clock() + MAX_SECONDS
        self._left = BUDGET

    def charge(self, units: int) -> None:
        """Pay for work or memory."""
        self._left -= units
        if self._left < 0:
            raise SecurityError(f"more work than {BUDGET} units (a character is one, a loop turn or a call is {STEP})")
        if self._clock() > self._deadline:
            raise SecurityError(f"more than {MAX_SECONDS:g} seconds")

    def step(self) -> None:
        """Pay for one turn of a loop or one call."""
        self.charge(STEP)

    def loop(self, items: Iterable[Any], cost: int = STEP) -> Iterator[Any]:
        """`items`, paid for one by one."""
        for item in items:
            self.charge(cost)
            yield item

    def made(self, value: Any, each: int = ELEMENT) -> Any:
        """`value`, paid for as new. `each`: units for an element of a list or tuple."""
        if isinstance(value, str):
            self._pay(len(value))
        elif isinstance(value, list | tuple):
            self._pay(len(value) * each)
        elif isinstance(value, dict):
            self._pay(len(value) * PIECE)
        return value

    def _pay(self, units: int) -> None:
        within(units)
        self.charge(units)

    def weigh(self, value: Any, shown: bool = False) -> int:
        """Weight of `value`, nested elements included; more than MAX_ELEMENTS is refused. Pays for the elements that it visits.

        `shown`: the value's text is wanted, or attributes of its elements, so things of Jinja's own (namespaces, macros, loops)
        are refused: their text and attributes have no weight that could be seen from here.
        """
        total = 0
        stack = [value]
        while stack:
            item = stack.pop()
            if isinstance(item, str):
                total += len(item)
            elif isinstance(item, int):
                total += item.bit_length()
            elif isinstance(item, list | tuple | KeysView | ValuesView | ItemsView):
                total += len(item) * ELEMENT
                self._visit(total, len(item))
                stack.extend(item)
            elif isinstance(item, Mapping):
                total += 2 * len(item) * ELEMENT
                self._visit(total, 2 * len(item))
                stack.extend(item.keys())
                stack.extend(item.values())
            elif shown and type(item).__module__.startswith("jinja2.") and not isinstance(item, Undefined):
                raise SecurityError(f"a {type(item).__name__} cannot be printed or sorted")
            else:
                total += ELEMENT * 4  # the longest float has 24 characters
        return within(total)

    def _visit(self, total: int, elements: int) -> None:
        within(total)
        self.charge(elements * ELEMENT)


def within(weight: int) -> int:
    """`weight`, unless it is more than one value may have."""
    if weight > MAX_ELEMENTS:
        raise SecurityError(f"a value of more than {MAX_ELEMENTS} units (a character is one, an element is {ELEMENT})")
    return weight


def check_percent(form: str, weight: int) -> None:
    """Refuse `form % arguments`, whose arguments weigh `weight`, if its text could be absurdly long."""
    if WIDE_PERCENT.search(form):
        raise SecurityError("a format with a width of four digits or more, or taken from an argument")
    within(len(form) + form.count("%") * (weight + MAX_FIELD))


def check_format(form: str, weight: int) -> None:
    """The same for `form.format(arguments)`. Raises ValueError where `form` is no format."""
    fields = 0
    for _, name, spec, _ in Formatter().parse(form):
        fields += name is not None
        if spec and WIDE_SPEC.search(spec):
            raise SecurityError("a format with a width of four digits or more, or taken from an argument")
    within(len(form) + fields * (weight + MAX_FIELD))


def check_pieces(pieces: int) -> None:
    """Refuse to cut a text into more pieces than the budget could hold."""
    if pieces * PIECE > BUDGET:
        raise SecurityError(f"more than {BUDGET // PIECE} pieces of a text")


def words(text: str, separator: Any = None) -> int:
    """How many pieces `str.split` can make of `text`, at most. No separator: at white space."""
    return text.count(separator) + 1 if isinstance(separator, str) and separator else len(text) // 2 + 1


def lines(text: str) -> int:
    """How many lines `str.splitlines` can find in `text`, at most."""
    return sum(text.count(mark) for mark in LINE_BREAKS) + 1


def check_search(text: str, *wanted: Any) -> None:
    """Refuse searches backwards and strips whose worst case, length times length, takes long."""
    longest = max((len(w) for w in wanted if isinstance(w, str)), default=0)
    if len(text) * longest > BUDGET:
        raise SecurityError(f"a search of {longest} characters in {len(text)}")
