"""A Jinja environment for templates that come with a model, that is, from a stranger: no way out, and no way to run for ever.

Jinja's immutable sandbox keeps a template away from Python's insides. It does not bound work, so here only the filters, methods
and globals that chat templates use exist, every loop turn, call and filter costs a tick, ticks and seconds run out, and whatever
could make a huge value from a small one (repetition, replacing, joining, printing nested lists) is weighed before it runs.
"""

from __future__ import annotations

import json
import re
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import wraps
from typing import Any, cast

from jinja2 import nodes
from jinja2.exceptions import SecurityError, TemplateError
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.runtime import Context
from jinja2.sandbox import ImmutableSandboxedEnvironment

MAX_TICKS = 500_000
MAX_SECONDS = 2.0
MAX_ELEMENTS = 8_000_000
MAX_RANGE = 100_000
MAX_WIDTH = 1000

# fmt: off
FILTERS = frozenset((
    "abs", "attr", "capitalize", "count", "d", "default", "dictsort", "e", "escape", "first", "float", "format",
    "groupby", "indent", "int", "items", "join", "last", "length", "list", "lower", "map", "max", "min", "reject",
    "rejectattr", "replace", "reverse", "round", "safe", "select", "selectattr", "sort", "string", "sum", "title",
    "trim", "truncate", "unique", "upper", "wordcount",
))
# fmt: on
# fmt: off
STRING_METHODS = frozenset((
    "strip", "lstrip", "rstrip", "split", "rsplit", "splitlines", "startswith", "endswith", "upper", "lower", "title",
    "capitalize", "replace", "join", "find", "rfind", "index", "count", "removeprefix", "removesuffix", "partition",
    "rpartition", "isdigit", "isalpha", "isalnum", "isspace", "isupper", "islower", "format",
))
# fmt: on
GLOBALS = ("dict", "namespace")
# Widths, nested fields and arguments of format strings: "%9999d", "{:>9999}", "{:{width}}", "%*d".
WIDE_FORMAT = re.compile(r"\d{4,}|\{[^{}]*\{|%[-+ #0]*\*")


class Meter:
    """What one rendering has used up."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._deadline = clock() + MAX_SECONDS
        self._ticks = 0

    def tick(self) -> None:
        """Pay for one turn of a loop, one call or one element."""
        self._ticks += 1
        if self._ticks > MAX_TICKS:
            raise SecurityError(f"more than {MAX_TICKS} loop turns and calls")
        if self._clock() > self._deadline:
            raise SecurityError(f"more than {MAX_SECONDS:g} seconds")

    def loop(self, items: Iterable[Any]) -> Iterator[Any]:
        """`items`, paid for one by one."""
        for item in items:
            self.tick()
            yield item

    def checked(self, value: Any) -> Any:
        """`value`, unless it is a text or list of absurd size."""
        if isinstance(value, str | list | tuple | dict) and len(value) > MAX_ELEMENTS:
            raise SecurityError(f"a value of more than {MAX_ELEMENTS} elements")
        return value

    def weighed(self, value: Any, share: int = 1) -> Any:
        """`value`, unless its text would be more than 1/share of the limit: nested lists are small until they are printed."""
        if self.weigh(value) > MAX_ELEMENTS // share:
            raise SecurityError(f"a value of more than {MAX_ELEMENTS} elements")
        return value

    def weigh(self, value: Any) -> int:
        """Characters and elements of `value`, nested ones included."""
        if isinstance(value, str):
            return len(value)
        if not isinstance(value, list | tuple | Mapping):
            return 1
        total = 0
        for item in (x for pair in value.items() for x in pair) if isinstance(value, Mapping) else value:
            self.tick()
            total += self.weigh(item)
            if total > MAX_ELEMENTS:
                raise SecurityError(f"a value of more than {MAX_ELEMENTS} elements")
        return total


class MeteredEnvironment(ImmutableSandboxedEnvironment):
    """Renders one template at a time; `meter` belongs to the rendering in progress."""

    intercepted_binops = frozenset(("+", "*", "**", "%"))

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        super().__init__(trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols, GenerationTag])
        self._clock = clock
        self.meter = Meter(clock)
        self.finalize = lambda value: self.meter.weighed(value)  # sees every value that is about to be printed
        self.filters = {name: self._limited(name, f) for name, f in self.filters.items() if name in FILTERS}
        self.filters["tojson"] = self._limited("tojson", _tojson)
        self.filters["_metered_loop"] = lambda items: self.meter.loop(items)
        self.filters["_weighed"] = lambda value, share: self.meter.weighed(value, share)
        self.globals = {name: self.globals[name] for name in GLOBALS} | {"range": _range}

    def restart(self) -> None:
        """Begin a rendering with a fresh meter."""
        self.meter = Meter(self._clock)

    def _parse(self, source: str, name: str | None, filename: str | None) -> nodes.Template:
        """Parse, then put every loop and every operand of `~` under the meter."""
        tree = super()._parse(source, name, filename)
        for loop in list(tree.find_all(nodes.For)):
            loop.iter = _filtered(loop.iter, "_metered_loop")
        for concat in list(tree.find_all(nodes.Concat)):
            share: nodes.Expr = nodes.Const(len(concat.nodes))
            concat.nodes = [_filtered(operand, "_weighed", share) for operand in concat.nodes]
        return tree

    def is_safe_attribute(self, obj: Any, attr: str, value: Any) -> bool:
        allowed = attr in STRING_METHODS if isinstance(obj, str) else True
        return allowed and super().is_safe_attribute(obj, attr, value)

    def call(self, context: Context, obj: Any, /, *args: Any, **kwargs: Any) -> Any:
        """Every call of a template, macros included, comes through here."""
        self.meter.tick()
        owner = getattr(obj, "__self__", None)
        if isinstance(owner, str):
            self._check_growth(obj.__name__, owner, *args)
        return self.meter.checked(super().call(context, obj, *args, **kwargs))

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        self.meter.tick()
        numbers = isinstance(left, int | float) and isinstance(right, int | float)
        if operator == "*" and not numbers and _size(left) * _size(right) > MAX_ELEMENTS:
            raise SecurityError(f"a repetition of more than {MAX_ELEMENTS} elements")
        if operator in ("*", "**") and numbers and max(abs(left), abs(right)) > (1 << 64 if operator == "*" else 64):
            raise SecurityError("a number too large")
        if operator == "%" and isinstance(left, str):
            self._check_growth("format", left, right)
        return self.meter.checked(super().call_binop(context, operator, left, right))

    def wrap_str_format(self, value: Any) -> Callable[..., str] | None:
        """Jinja's stand-in for `str.format`, behind the check on its result's size."""
        wrapped = super().wrap_str_format(value)
        if wrapped is None:
            return None
        method, template = wrapped, value.__self__

        def limited(*args: Any, **kwargs: Any) -> str:
            self._check_growth("format", template, args, kwargs)
            return method(*args, **kwargs)

        return limited

    def _limited(self, name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        """A filter that ticks, and is weighed first if it makes text."""

        @wraps(function)
        def limited(*args: Any, **kwargs: Any) -> Any:
            self.meter.tick()
            # Jinja passes itself, its context or its evaluation context first where a filter asks for one.
            values = args[1:] if hasattr(function, "jinja_pass_arg") else args
            if name in ("replace", "join", "format", "indent", "string", "tojson"):
                self._check_growth(name, *values, *kwargs.values())
            return self.meter.checked(function(*args, **kwargs))

        return limited

    def _check_growth(self, name: str, subject: Any, *args: Any) -> None:
        """Refuse a text operation whose result would be absurdly long, before it runs."""
        weight = self.meter.weigh(subject)
        others = sum(self.meter.weigh(arg) for arg in args)
        if name == "replace" and len(args) > 1:
            # At most one replacement for every occurrence, and one more between characters if the old text is empty.
            weight += (str(subject).count(str(args[0])) + 1) * self.meter.weigh(args[1])
        elif name == "join":
            # text.join(list) and list|join(text): elements plus a separator for each.
            weight += others + max(_size(subject) if isinstance(a, str) else _size(a) for a in (subject, *args)) * min(weight, others)
        elif name == "format":
            if WIDE_FORMAT.search(str(subject)):
                raise SecurityError("a format with a width of four digits or more, or taken from an argument")
            weight += (str(subject).count("{") + str(subject).count("%")) * others
        elif name in ("indent", "tojson"):
            widths = [a if isinstance(a, int) else len(a) for a in args if isinstance(a, int | str)]
            if max(widths, default=0) > MAX_WIDTH:
                raise SecurityError(f"an indent of more than {MAX_WIDTH}")
            weight += (str(subject).count("\n") + 1 if name == "indent" else 1) * max(widths, default=0)
        if weight > MAX_ELEMENTS:
            raise SecurityError(f"a value of more than {MAX_ELEMENTS} elements")


class GenerationTag(Extension):
    """`{% generation %} ... {% endgeneration %}` marks the assistant's words for training; here it is only what it encloses."""

    tags = {"generation"}  # noqa: RUF012 (the name and form are Jinja's)

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return list(parser.parse_statements(("name:endgeneration",), drop_needle=True))


def raise_exception(message: str) -> None:
    """What templates call to refuse a conversation."""
    raise TemplateError(str(message))


def _tojson(value: Any, ensure_ascii: bool = False, indent: int | None = None, separators: Any = None, sort_keys: bool = False) -> str:
    """JSON as templates expect it: not escaped for HTML, unlike Jinja's own filter."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _range(*args: int) -> range:
    numbers = range(*args)
    if len(numbers) > MAX_RANGE:
        raise SecurityError(f"a range of more than {MAX_RANGE} numbers")
    return numbers


def _filtered(node: nodes.Node, name: str, *args: nodes.Expr) -> nodes.Filter:
    place = {"lineno": node.lineno, "environment": node.environment}
    return nodes.Filter(cast(nodes.Expr, node), name, list(args), [], None, None, **place)


def _size(value: Any) -> int:
    return abs(value) if isinstance(value, int) else len(value) if hasattr(value, "__len__") else 1
