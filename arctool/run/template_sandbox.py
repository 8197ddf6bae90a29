"""A Jinja environment for templates that come with a model, that is, from a stranger: no way out, and no way to run for ever.

Jinja's immutable sandbox keeps a template away from Python's insides. It does not bound work, so here only the filters, tests,
methods and globals that chat templates use exist, nothing is evaluated while a template compiles, and everything that runs is
paid for by a `Meter`: loop turns, calls, filters, comparisons, every text and list that is made or printed. What could make a huge
value from a small one, or walk a small one for ever, is weighed before it runs.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import wraps
from typing import Any, cast

from jinja2 import nodes
from jinja2.exceptions import SecurityError, TemplateError
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.runtime import Context, LoopContext, Macro, Undefined
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Namespace, pass_context

from arctool.run.template_filters import FILTERS, ITERATING, SHALLOW, check_filter, check_join, check_replace
from arctool.run.template_meter import (
    ELEMENT,
    PIECE,
    STEP,
    Meter,
    check_format,
    check_percent,
    check_pieces,
    check_search,
    lines,
    within,
    words,
)
from arctool.run.template_rewrite import metered

MAX_RANGE = 100_000
MAX_BITS = 4096
MAX_KEY = 1000

# fmt: off
STRING_METHODS = frozenset((
    "strip", "lstrip", "rstrip", "split", "rsplit", "splitlines", "startswith", "endswith", "upper", "lower", "title",
    "capitalize", "replace", "join", "find", "rfind", "index", "count", "removeprefix", "removesuffix", "partition",
    "rpartition", "isdigit", "isalpha", "isalnum", "isspace", "isupper", "islower", "format",
))
# Tests that ask for a type or an identity; the others compare, and what they compare is weighed.
TYPE_TESTS = frozenset((
    "boolean", "callable", "defined", "escaped", "false", "float", "integer", "iterable", "mapping", "none", "number",
    "sameas", "sequence", "string", "true", "undefined",
))
NUMBER_TESTS = frozenset(("odd", "even", "divisibleby"))
COMPARING_TESTS = frozenset((
    "==", "eq", "equalto", "!=", "ne", ">", "gt", "greaterthan", ">=", "ge", "<", "lt", "lessthan", "<=", "le", "in", "lower", "upper",
))
# fmt: on
METHODS: tuple[tuple[type | tuple[type, ...], frozenset[str]], ...] = (
    (str, STRING_METHODS),
    ((list, tuple), frozenset(("count", "index", "grouper", "list"))),  # the last two: fields of what `groupby` yields
    (Mapping, frozenset(("copy", "get", "items", "keys", "values"))),
    ((int, float, bytes, type), frozenset()),
)
GLOBALS = ("dict", "namespace")
BINARY_OPERATORS = frozenset(("+", "-", "*", "/", "//", "%", "**"))


class MeteredEnvironment(ImmutableSandboxedEnvironment):
    """Renders one template at a time; `meter` belongs to the rendering in progress."""

    intercepted_binops = BINARY_OPERATORS

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        # Not optimized: Jinja would run constant expressions, filters included, while it compiles, before any meter runs.
        super().__init__(trim_blocks=True, lstrip_blocks=True, optimized=False, extensions=[loopcontrols, GenerationTag])
        self._clock = clock
        self.meter = Meter(clock)
        self.finalize = pass_context(lambda _, value: self._printed(value))  # with a context, or constants run at compile time
        filters = {name: f for name, f in self.filters.items() if name in FILTERS} | {"tojson": self._tojson}
        self.filters = {name: self._limited_filter(name, f) for name, f in filters.items()} | {
            "_looped": lambda items: self.meter.loop(items),
            "_concatenated": self._printed,
            "_compared": self._compared,
            "_key": self._key,
            "_made": lambda value: self.meter.made(value),
            "_written": self._written,
        }
        tests = TYPE_TESTS | NUMBER_TESTS | COMPARING_TESTS
        self.tests = {name: self._limited_test(name, cast(Callable[..., Any], f)) for name, f in self.tests.items() if name in tests}
        self.globals = {name: self.globals[name] for name in GLOBALS} | {"range": _range}

    def restart(self) -> None:
        """Begin a rendering with a fresh meter."""
        self.meter = Meter(self._clock)

    def _parse(self, source: str, name: str | None, filename: str | None) -> nodes.Template:
        """Parse, then put under the meter what has no hook of its own."""
        return metered(super()._parse(source, name, filename))

    def is_safe_attribute(self, obj: Any, attr: str, value: Any) -> bool:
        allowed = next((attr in names for kind, names in METHODS if isinstance(obj, kind)), True)
        return allowed and super().is_safe_attribute(obj, attr, value)

    def getitem(self, obj: Any, argument: Any) -> Any:
        """obj[argument]; Python hashes the argument."""
        return super().getitem(obj, argument if isinstance(argument, str | int) else self._key(argument))

    def call(self, context: Context, obj: Any, /, *args: Any, **kwargs: Any) -> Any:
        """Every call of a template, macros included, comes through here."""
        self.meter.charge(STEP + (len(args) + len(kwargs)) * ELEMENT)
        if isinstance(obj, Namespace | list | tuple | Mapping):
            raise SecurityError(f"a {type(obj).__name__} cannot be called")
        if isinstance(obj, LoopContext) and args:
            args = (self.meter.loop(args[0]), *args[1:])
        elif not isinstance(obj, Macro):
            self._weigh_all(*args, *(v for k, v in kwargs.items() if k not in ("_loop_vars", "_block_vars")))
            owner, name = getattr(obj, "__self__", None), getattr(obj, "__name__", "")
            if isinstance(owner, str):
                return self._call_text_method(context, obj, owner, args, kwargs)
            if name in ("count", "index"):
                self.meter.weigh(owner)
        return self.meter.made(super().call(context, obj, *args, **kwargs))

    def _call_text_method(self, context: Context, obj: Any, text: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """A method of `text`, after a look at how large its result, or how long its search, could be."""
        name = obj.__name__
        within(len(text))
        if name in ("strip", "lstrip", "rstrip", "rfind", "rsplit", "rpartition"):
            check_search(text, *args, *kwargs.values())
        if name in ("split", "rsplit"):
            check_pieces(words(text, args[0] if args else kwargs.get("sep")))
        elif name == "splitlines":
            check_pieces(lines(text))
        elif name == "replace" and len(args) > 1:
            check_replace(text, *args)
        elif name == "join" and args:
            args = (self._elements(args[0]), *args[1:])
            check_join(self.meter, args[0], text)
        return self.meter.made(super().call(context, obj, *args, **kwargs), PIECE)

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        self.meter.step()
        numbers = isinstance(left, int | float) and isinstance(right, int | float)
        if numbers:
            _check_numbers(operator, left, right)
        elif operator == "*":
            each = 1 if isinstance(left, str) or isinstance(right, str) else ELEMENT
            within(_size(left) * _size(right) * each)
        elif operator == "%" and isinstance(left, str):
            check_percent(left, self.meter.weigh(right, shown=True))
        elif operator != "+" and not isinstance(left, Undefined) and not isinstance(right, Undefined):
            raise SecurityError(f"{operator} of a {type(left).__name__} and a {type(right).__name__}")
        return self.meter.made(super().call_binop(context, operator, left, right))

    def wrap_str_format(self, value: Any) -> Callable[..., str] | None:
        """Jinja's stand-in for `str.format`, behind the check on its result's size."""
        wrapped = super().wrap_str_format(value)
        if wrapped is None:
            return None
        method, template = wrapped, value.__self__

        def limited(*args: Any, **kwargs: Any) -> str:
            check_format(template, self.meter.weigh((args, kwargs), shown=True))
            return cast(str, self.meter.made(method(*args, **kwargs)))

        return limited

    def _limited_filter(self, name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        """A filter that pays, is weighed first if it looks into its arguments, and leaves no lazy work behind."""
        # Jinja passes itself, its context or its evaluation context first where a filter asks for one.
        lead = 1 if hasattr(function, "jinja_pass_arg") else 0

        @wraps(function)
        def limited(*args: Any, **kwargs: Any) -> Any:
            self.meter.charge(STEP + (len(args) + len(kwargs)) * ELEMENT)
            first, values = args[:lead], args[lead:]
            if values and (name in ITERATING or name == "list"):
                values = (self._elements(values[0], ELEMENT if name == "list" else 4 * ELEMENT), *values[1:])
            if name not in SHALLOW:
                self._weigh_all(*values, *kwargs.values(), shown=True)
                check_filter(self.meter, name, values, kwargs)
            result = function(*first, *values, **kwargs)
            if isinstance(result, Iterator):
                return iter(list(self.meter.loop(result, PIECE)))  # an iterator still: true even if empty, as in Jinja
            return self.meter.made(result, 4 * ELEMENT)

        return limited

    def _limited_test(self, name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        """A test that pays, and weighs what it compares."""

        def limited(*args: Any, **kwargs: Any) -> Any:
            self.meter.step()
            if name in COMPARING_TESTS:
                self._weigh_all(*args, *kwargs.values(), shown=name in ("lower", "upper"))
            if name in NUMBER_TESTS and not all(isinstance(a, int | float) for a in (*args, *kwargs.values())):
                raise SecurityError(f"{name}: expected numbers")
            return function(*args, **kwargs)

        return limited

    def _weigh_all(self, *values: Any, shown: bool = False) -> None:
        within(sum(self.meter.weigh(value, shown) for value in values))

    def _elements(self, value: Any, cost: int = ELEMENT) -> Any:
        """`value`, whose elements are about to be visited, paid for; iterators and texts become lists."""
        if isinstance(value, list | tuple | Mapping):
            self.meter.charge(len(value) * cost)
            return value
        if not isinstance(value, Iterable):
            return value  # for the filter itself to judge: some take None for nothing
        if isinstance(value, str):
            check_pieces(len(value))
        return list(self.meter.loop(value, PIECE))

    def _printed(self, value: Any, share: int = 1) -> Any:
        """`value`, about to become text of at most 1/share of the limit."""
        weight = self.meter.weigh(value, shown=True)
        within(weight * share)
        self.meter.charge(ELEMENT + weight)
        return value

    def _written(self, size: int) -> str:
        """Nothing to print; `size` characters of the template's own text are about to be."""
        self.meter.charge(size)
        return ""

    def _compared(self, value: Any) -> Any:
        """`value`, about to be compared, or searched for a value."""
        self.meter.step()
        self.meter.weigh(value)
        return value

    def _key(self, value: Any) -> Any:
        """`value`, about to be hashed."""
        if not isinstance(value, str) and self.meter.weigh(value) > MAX_KEY:
            raise SecurityError(f"a key of more than {MAX_KEY} elements")
        return value

    def _tojson(self, value: Any, ensure_ascii: bool = False, indent: Any = None, separators: Any = None, sort_keys: bool = False) -> str:
        """JSON as templates expect it: not escaped for HTML, unlike Jinja's own filter; paid for piece by piece."""
        if isinstance(indent, int | str):
            within(indent if isinstance(indent, int) else len(indent))
        encoder = json.JSONEncoder(ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)
        pieces: list[str] = []
        size = 0
        for piece in encoder.iterencode(value):
            self.meter.charge(ELEMENT + len(piece))
            size = within(size + len(piece))
            pieces.append(piece)
        return "".join(pieces)


class GenerationTag(Extension):
    """`{% generation %} ... {% endgeneration %}` marks the assistant's words for training; here it is only what it encloses."""

    tags = {"generation"}  # noqa: RUF012 (the name and form are Jinja's)

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return list(parser.parse_statements(("name:endgeneration",), drop_needle=True))


def raise_exception(message: Any) -> None:
    """What templates call to refuse a conversation."""
    raise TemplateError(message if isinstance(message, str) else f"a refusal without words (a {type(message).__name__})")


def _range(*args: int) -> range:
    numbers = range(*args)
    if len(numbers) > MAX_RANGE:
        raise SecurityError(f"a range of more than {MAX_RANGE} numbers")
    return numbers


def _check_numbers(operator: str, left: float, right: float) -> None:
    """Refuse arithmetic whose integers would grow without bound."""
    if operator == "**" and max(abs(left), abs(right)) > 64:
        raise SecurityError("a number too large")
    if any(isinstance(n, int) and n.bit_length() > MAX_BITS for n in (left, right)):
        raise SecurityError(f"a number of more than {MAX_BITS} bits")


def _size(value: Any) -> int:
    return abs(value) if isinstance(value, int) else len(value) if hasattr(value, "__len__") else 1
