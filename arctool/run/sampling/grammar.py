"""Constraints at work, through llguidance: a source is compiled once at the door, and each sequence walks its own copy.

Fails closed. A source that cannot be compiled, or only at a cost that would hold up everybody, is refused before anything runs; a walk
that meets a limit of the library ends its own request with an error. A token that the grammar does not allow is never offered.
"""

from __future__ import annotations

import json
import subprocess
import sys
import threading
from collections import OrderedDict
from collections.abc import Iterable, Sequence
from typing import Any

import llguidance
import numpy as np
from numpy.typing import NDArray

from arctool.errors import RequestError, SourceError
from arctool.run.sampling.constraint import Constraint
from arctool.run.tokenizer import TOKENIZER_FILE, Tokenizer

LIMITS: dict[str, Any] = {"max_lexer_states": 50_000, "step_lexer_fuel": 200_000, "step_max_items": 50_000, "max_grammar_size": 200_000}
"""The library's own: the states (1–2 kB each) that a walk may come to have, the work of one step (10–20 ms), the size of a grammar."""

COMPILE_SECONDS = 2
COMPILE_BYTES = 1 << 29
COMPILE_STACK = 1 << 20
"""An eighth of a thread's usual stack: what fits here cannot overflow the engine's."""
PATIENCE_SECONDS = 20
"""Until a trial that gets no processor is given up."""

KEPT = 16
"""Compiled grammars that are kept for further requests."""

TRIAL = """
import json, resource, sys, threading
from llguidance import LLMatcher, LLParserLimits, LLTokenizer
seconds, size, stack = map(int, sys.argv[1:])
resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
resource.setrlimit(resource.RLIMIT_CPU, (seconds, seconds))
resource.setrlimit(resource.RLIMIT_AS, (size, size))
given = json.load(sys.stdin)
def work():
    matcher = LLMatcher(LLTokenizer("byte"), given["grammar"], log_level=0, limits=LLParserLimits(verbose_errors=False, **given["limits"]))
    matcher.compute_bitmask()
    json.dump(matcher.get_error(), sys.stdout)
threading.stack_size(stack)
thread = threading.Thread(target=work)
thread.start()
thread.join()
"""
"""Compiles in a process of its own: some short sources take the library seconds, gigabytes or the whole stack (tests/run has some)."""


class GrammarState:
    """Where one sequence stands in its grammar."""

    def __init__(self, matcher: Any, ends: NDArray[np.int64]) -> None:
        self._matcher = matcher
        self._ends = ends

    @property
    def finished(self) -> bool:
        """Whether nothing can follow: the text is complete. Not true after an error."""
        return bool(self._matcher.is_stopped()) and not self._matcher.is_error()

    def fill(self, mask: NDArray[np.uint32], *, may_end: bool) -> str | None:
        """Write which tokens may come next, a bit for each, [⌈tokens / 32⌉]; or say why there are none.

        End tokens: where the text is complete as it stands and `may_end`; without it still where nothing else can follow.
        """
        if not self._matcher.is_error():
            self._matcher.unsafe_compute_mask_ptr(mask.ctypes.data, mask.nbytes)
        if self._matcher.is_error():
            mask[:] = 0
            return f"the constraint cannot be followed further: {_first_line(self._matcher.get_error())}"
        # The grammar's author may name an end token; where one may stand is not the author's to say.
        bits = (np.uint32(1) << (self._ends & 31).astype(np.uint32)).astype(np.uint32)
        np.bitwise_and.at(mask, self._ends >> 5, ~bits)
        if self._matcher.is_accepting() and (may_end or not mask.any()):
            np.bitwise_or.at(mask, self._ends >> 5, bits)
        return None if mask.any() else "the constraint leaves no token: it cannot be completed with this model's tokens"

    def push(self, token: int) -> None:
        """`token` joined the text. One that the grammar does not allow makes every later `fill` an error."""
        self._matcher.consume_token(token)

    def pop(self, count: int) -> None:
        """Take the last `count` tokens back."""
        if not self._matcher.rollback(count):
            raise ValueError(f"the constraint cannot take {count} tokens back: {_first_line(self._matcher.get_error())}")


class Grammars:
    """Compiles constraints for one model. Its tokens are given to the library when the first constraint comes."""

    def __init__(self, tokenizer: Tokenizer | None, end_tokens: Iterable[int]) -> None:
        self._tokenizer = tokenizer
        self._ends = () if tokenizer is None else tuple(sorted(token for token in set(end_tokens) if token < tokenizer.size))
        self._tokens: Any = None
        self._kept: OrderedDict[Constraint, Any] = OrderedDict()
        self._lock = threading.Lock()

    def open(self, constraint: Constraint) -> GrammarState:
        """A fresh walk; any thread may ask. Raises RequestError, by the kind's name, for a source that cannot be compiled at fair cost."""
        if self._tokenizer is None:
            raise RequestError(f"{constraint.kind}: a constraint needs a tokenizer, and this model came without one")
        with self._lock:
            matcher = self._kept.pop(constraint, None)
        if matcher is None:
            matcher = self._compiled(constraint)  # which takes a while: others need not wait for it
        with self._lock:
            self._kept[constraint] = matcher
            if len(self._kept) > KEPT:
                self._kept.popitem(last=False)
            return GrammarState(matcher.deep_copy(), np.array(self._ends, np.int64))

    def _compiled(self, constraint: Constraint) -> Any:
        assert self._tokenizer is not None
        if self._tokens is None:
            self._tokens = _library_tokens(self._tokenizer, self._ends)
        source = grammar_source(constraint)
        try_to_compile(constraint.kind, source)
        limits = llguidance.LLParserLimits(verbose_errors=False, **LIMITS)
        matcher = llguidance.LLMatcher(self._tokens, source, log_level=0, limits=limits)
        error = GrammarState(matcher.deep_copy(), np.array(self._ends, np.int64)).fill(
            np.zeros(-(-self._tokenizer.size // 32), np.uint32), may_end=True
        )
        if error is not None:
            raise RequestError(f"{constraint.kind}: {_first_line(matcher.get_error()) or error}")
        return matcher


def grammar_source(constraint: Constraint) -> str:
    """The library's own notation. Raises RequestError for what it cannot read."""
    try:
        if constraint.kind in ("json_schema", "json_object"):
            schema = constraint.source or '{"type": "object"}'
            # A schema may bring options for the library with it; this one is not the author's: unknown keywords are refused.
            return str(llguidance.LLMatcher.grammar_from_json_schema(schema, overrides={"lenient": False}))
        if constraint.kind == "regex":
            return str(llguidance.LLMatcher.grammar_from_regex(constraint.source))
        return str(llguidance.LLMatcher.grammar_from_lark(constraint.source))
    except ValueError as error:
        raise RequestError(f"{constraint.kind}: {_first_line(str(error))}") from error


def try_to_compile(kind: str, source: str) -> None:
    """Compile in another process, within bounds of time, memory and stack. Raises RequestError where it fails or passes them."""
    bounds = (COMPILE_SECONDS, COMPILE_BYTES, COMPILE_STACK)
    costly = f"{kind}: takes more than {COMPILE_SECONDS} s, {COMPILE_BYTES >> 20} MiB or its depth of stack to compile; make it simpler"
    try:
        done = subprocess.run(
            [sys.executable, "-P", "-c", TRIAL, *map(str, bounds)],
            input=json.dumps({"grammar": source, "limits": LIMITS}),
            capture_output=True,
            text=True,
            timeout=PATIENCE_SECONDS,
            check=False,
        )
    except subprocess.TimeoutExpired as error:
        raise RequestError(costly) from error
    if done.returncode != 0 or not done.stdout:
        raise RequestError(costly)
    complaint = json.loads(done.stdout)
    if complaint:
        raise RequestError(f"{kind}: {_first_line(complaint)}")


def _library_tokens(tokenizer: Tokenizer, ends: Sequence[int]) -> Any:
    try:
        return llguidance.LLTokenizer(tokenizer.to_json(), n_vocab=tokenizer.size, eos_token=list(ends) or None)
    except (KeyboardInterrupt, SystemExit):
        raise
    except BaseException as error:  # a panic inside the library is not an Exception
        raise SourceError(f"{TOKENIZER_FILE}: constraints cannot be used with it: {_first_line(str(error))}") from error


def _first_line(text: str) -> str:
    """What a message says first, without the library's dump of its state."""
    return text.split("\n<", 1)[0].split("\n", 1)[0].strip()[:200]
