"""The filters that a chat template may use, and what each must be asked before it runs.

Some look at no element of what they are given, some run Python code for each, some make a long text of short ones. This room knows
Jinja's filters by name and argument; weights and budgets are the meter's.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from jinja2.exceptions import SecurityError

from arctool.run.template_meter import ELEMENT, PIECE, Meter, check_percent, check_pieces, check_search, lines, within

MAX_NUMBER_TEXT = 1000
MAX_PRECISION = 64

# fmt: off
# Filters that look at no element, or hand each one to another filter, test or comparison that is metered by itself.
SHALLOW = frozenset((
    "attr", "count", "d", "default", "first", "items", "last", "length", "list", "map", "reject", "rejectattr", "reverse",
    "select", "selectattr", "tojson",
))
FILTERS = SHALLOW | frozenset((
    "abs", "capitalize", "dictsort", "e", "escape", "float", "format", "groupby", "indent", "int", "join", "lower", "max",
    "min", "replace", "round", "safe", "sort", "string", "sum", "title", "trim", "truncate", "unique", "upper", "wordcount",
))
# Filters that run Python code for every element of their first argument.
ITERATING = frozenset((
    "groupby", "join", "map", "max", "min", "reject", "rejectattr", "select", "selectattr", "sort", "sum", "unique",
))
# fmt: on


def check_filter(meter: Meter, name: str, values: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
    """Refuse a filter whose result would be absurdly long, or its work. `values`, the subject first, have been weighed.

    Raises SecurityError.
    """
    if not values:
        return
    subject = values[0]

    def argument(index: int, key: str, default: Any) -> Any:
        return values[index] if len(values) > index else kwargs.get(key, default)

    if name == "join":
        check_join(meter, subject, argument(1, "d", ""))
    elif name == "replace":
        check_replace(str(subject), argument(1, "old", ""), argument(2, "new", ""))
    elif name == "format":
        check_percent(str(subject), meter.weigh([values[1:], kwargs]))
    elif name == "indent":
        width = argument(1, "width", 4)
        check_pieces(lines(str(subject)))
        within(lines(str(subject)) * (ELEMENT + (len(width) if isinstance(width, str) else int(width))))
    elif name in ("e", "escape"):
        within(6 * meter.weigh(subject))  # "&#34;" and "&amp;" for one character
    elif name in ("title", "wordcount"):
        meter.charge(len(str(subject)) * PIECE)
    elif name == "trim":
        check_search(str(subject), argument(1, "chars", ""))
    elif name == "int" and isinstance(subject, str) and len(subject) > MAX_NUMBER_TEXT:
        raise SecurityError(f"a number of more than {MAX_NUMBER_TEXT} digits")
    elif name == "round":
        precision = argument(1, "precision", 0)
        if not isinstance(precision, int) or abs(precision) > MAX_PRECISION:
            raise SecurityError(f"round: a precision of more than {MAX_PRECISION} digits")
    elif name == "sum" and not isinstance(argument(2, "start", 0), int | float):
        raise SecurityError("sum: only numbers can be summed")


def check_join(meter: Meter, elements: Any, separator: Any) -> None:
    """Refuse to join what would be too long. Raises SecurityError."""
    within(meter.weigh(elements, shown=True) + len(elements) * meter.weigh(separator, shown=True))


def check_replace(text: str, old: Any, new: Any, count: Any = -1) -> None:
    """Refuse a replacement whose result would be too long, whatever `count` is. Raises SecurityError.

    At most one replacement for every occurrence, and one more between characters if the old text is empty.
    """
    within(len(text) + (text.count(str(old)) + 1) * len(str(new)))
