"""Constraints at work, through llguidance: a source is compiled once at the door, and each sequence walks its own copy.

Fails closed. A source that cannot be compiled, or only at a cost that would hold up everybody, is refused before anything runs; a walk
that meets a limit of the library ends its own request with an error. A token that the grammar does not allow is never offered.
"""

from __future__ import annotations

import json
import subprocess
import sys
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, cast

import llguidance
import numpy as np
import tokenizers
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

TRIAL_STEPS = 2
"""Some sources cost nothing to compile and too much to begin."""

CHEAP_SECONDS = 0.1
"""What takes longer to compile is not compiled again while the engine waits."""

JSON_OPTIONS: dict[str, Any] = {"lenient": False, "whitespace_pattern": r"[\x20\x0A\x0D\x09]{1,32}"}
"""The library's, for JSON: unknown keywords are refused, and between two tokens of JSON there is room to indent, not to get lost in."""

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
    tokens = LLTokenizer(given["tokens"], n_vocab=given["size"])
    matcher = LLMatcher(tokens, given["grammar"], log_level=0, limits=LLParserLimits(verbose_errors=False, **given["limits"]))
    mask = matcher.compute_bitmask()
    for _ in range(given["steps"]):
        found = next((i for i in range(8 * len(mask)) if mask[i // 8] >> i % 8 & 1), None)
        if matcher.is_error() or found is None or not matcher.consume_token(found):
            break
        mask = matcher.compute_bitmask()
    error = matcher.get_error()
    json.dump("" if UNSATISFIED in error else error, sys.stdout)
UNSATISFIED = "doesn't satisfy the grammar"
threading.stack_size(stack)
thread = threading.Thread(target=work)
thread.start()
thread.join()
"""
"""Compiles in a process of its own and goes the first steps: some short sources take the library seconds, gigabytes or the whole stack.

Its tokens are the single bytes, and where a grammar names tokens by number (`<[5]>`), as many meaningless ones as the model has: one of
these may be offered and then not be taken, which says nothing about the model's own.
"""

NUMBERED = "<["
BYTES = 256


class GrammarState:
    """Where one sequence stands in its grammar.

    Walks of one grammar share what the library learns about it on the way, and its limits: if others have used them up, this one goes on
    with a matcher of its own, from `renew`, and only what it uses up itself ends it.
    """

    def __init__(self, matcher: Any, ends: NDArray[np.int64], renew: Callable[[], Any] | None = None) -> None:
        self._matcher = matcher
        self._ends = ends
        self._renew = renew
        self._tokens: list[int] = []

    @property
    def finished(self) -> bool:
        """Whether nothing can follow: the text is complete. Not true after an error."""
        return bool(self._matcher.is_stopped()) and not self._matcher.is_error()

    def fill(self, mask: NDArray[np.uint32], *, may_end: bool) -> str | None:
        """Write which tokens may come next, a bit for each, [⌈tokens / 32⌉]; or say why there are none.

        End tokens: where the text is complete as it stands and `may_end`; without it still where nothing else can follow.
        """
        if not (self._computed(mask) or (self._renewed() and self._computed(mask))):
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
        self._tokens.append(token)

    def pop(self, count: int) -> None:
        """Take the last `count` tokens back."""
        if not self._matcher.rollback(count):
            raise ValueError(f"the constraint cannot take {count} tokens back: {_first_line(self._matcher.get_error())}")
        del self._tokens[len(self._tokens) - count :]

    def _computed(self, mask: NDArray[np.uint32]) -> bool:
        if not self._matcher.is_error():
            self._matcher.unsafe_compute_mask_ptr(mask.ctypes.data, mask.nbytes)
        return not self._matcher.is_error()

    def _renewed(self) -> bool:
        """Walk the same way again alone, once."""
        if self._renew is None:
            return False
        self._matcher, self._renew = self._renew(), None
        self._matcher.consume_tokens(self._tokens)
        return not self._matcher.is_error()


@dataclass(frozen=True)
class Compiled:
    """A grammar that has passed its trial. `seconds`: what it takes to compile here."""

    matcher: Any
    source: str
    seconds: float


class Grammars:
    """Compiles constraints for one model. Its tokens are given to the library when the first constraint comes."""

    def __init__(self, tokenizer: Tokenizer | None, end_tokens: Iterable[int]) -> None:
        self._tokenizer = tokenizer
        self._ends = () if tokenizer is None else tuple(sorted(token for token in set(end_tokens) if token < tokenizer.size))
        self._tokens: Any = None
        self._kept: OrderedDict[Constraint, Compiled] = OrderedDict()
        self._lock = threading.Lock()

    def has(self, constraint: Constraint) -> bool:
        """Whether a constraint is compiled already, so that opening it takes no time worth a thread of its own."""
        with self._lock:
            return constraint in self._kept

    def open(self, constraint: Constraint) -> GrammarState:
        """A fresh walk; any thread may ask. Raises RequestError, by the kind's name, for a source that cannot be compiled at fair cost."""
        if self._tokenizer is None:
            raise RequestError(f"{constraint.kind}: a constraint needs a tokenizer, and this model came without one")
        with self._lock:
            found = self._kept.pop(constraint, None)
        if found is None:
            found = self._compiled(constraint)  # which takes a while: others need not wait for it
        elif self._complaint(found.matcher) is not None:  # earlier walks have used its limits up
            found = replace(found, matcher=self._matcher(found.source))
        with self._lock:
            self._kept[constraint] = found
            if len(self._kept) > KEPT:
                self._kept.popitem(last=False)
            renew = partial(self._matcher, found.source) if found.seconds <= CHEAP_SECONDS else None
            return GrammarState(found.matcher.deep_copy(), np.array(self._ends, np.int64), renew)

    def _compiled(self, constraint: Constraint) -> Compiled:
        assert self._tokenizer is not None
        if self._tokens is None:
            self._tokens = _library_tokens(self._tokenizer, self._ends)
        source = grammar_source(constraint)
        try_to_compile(constraint.kind, source, self._tokenizer.size if NUMBERED in source else 0)
        began = time.thread_time()
        matcher = self._matcher(source)
        error = self._complaint(matcher)
        if error is not None:
            raise RequestError(f"{constraint.kind}: {_first_line(matcher.get_error()) or error}")
        return Compiled(matcher, source, time.thread_time() - began)

    def _matcher(self, source: str) -> Any:
        limits = llguidance.LLParserLimits(verbose_errors=False, **LIMITS)
        return llguidance.LLMatcher(self._tokens, source, log_level=0, limits=limits)

    def _complaint(self, matcher: Any) -> str | None:
        """Why no text of a grammar can begin."""
        assert self._tokenizer is not None
        mask = np.zeros(-(-self._tokenizer.size // 32), np.uint32)
        return GrammarState(matcher.deep_copy(), np.array(self._ends, np.int64)).fill(mask, may_end=True)


def grammar_source(constraint: Constraint) -> str:
    """The library's own notation. Raises RequestError for what it cannot read."""
    try:
        if constraint.kind in ("json_schema", "json_object"):
            schema = constraint.source or '{"type": "object"}'
            # A schema may bring options for the library with it; these are not the author's.
            return str(llguidance.LLMatcher.grammar_from_json_schema(schema, overrides=cast(Any, JSON_OPTIONS)))
        if constraint.kind == "regex":
            if (len(constraint.source) - len(constraint.source.rstrip("\\"))) % 2:  # which the library drops
                raise RequestError("regex: ends with a backslash that stands before nothing")
            return str(llguidance.LLMatcher.grammar_from_regex(constraint.source))
        return str(llguidance.LLMatcher.grammar_from_lark(constraint.source))
    except ValueError as error:
        raise RequestError(f"{constraint.kind}: {_first_line(str(error))}") from error


def try_to_compile(kind: str, source: str, size: int = 0) -> None:
    """Compile in another process, within bounds of time, memory and stack. Raises RequestError where it fails or passes them.

    `size`: how many tokens the source may name by number.
    """
    bounds = (COMPILE_SECONDS, COMPILE_BYTES, COMPILE_STACK)
    costly = f"{kind}: takes more than {COMPILE_SECONDS} s, {COMPILE_BYTES >> 20} MiB or its depth of stack to compile; make it simpler"
    try:
        done = subprocess.run(
            [sys.executable, "-P", "-c", TRIAL, *map(str, bounds)],
            input=json.dumps({"grammar": source, "limits": LIMITS, "steps": TRIAL_STEPS, **_trial_tokens(size)}),
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


def _trial_tokens(size: int) -> dict[str, Any]:
    if not size:
        return {"tokens": "byte", "size": None}
    letters = tokenizers.pre_tokenizers.ByteLevel.alphabet()
    bytes_only = tokenizers.Tokenizer(tokenizers.models.BPE(vocab={letter: i for i, letter in enumerate(letters)}, merges=[]))
    bytes_only.decoder = tokenizers.decoders.ByteLevel()
    return {"tokens": bytes_only.to_str(), "size": max(size, BYTES)}


def _library_tokens(tokenizer: Tokenizer, ends: Sequence[int]) -> Any:
    try:
        return llguidance.LLTokenizer(tokenizer.to_json(), n_vocab=tokenizer.size, eos_token=list(ends) or None)
    except (KeyboardInterrupt, SystemExit):
        raise
    except BaseException as error:  # a panic inside the library is not an Exception
        raise SourceError(f"{TOKENIZER_FILE}: constraints cannot be used with it: {_first_line(str(error))}") from error


def _first_line(text: str) -> str:
    """What a message says, without the library's dump of its state and its drawings of a regular expression."""
    first, *more = text.split("\n<", 1)[0].split("\n")
    for line in more:
        if line.startswith("error: "):
            first = f"{first.removesuffix('regex parse error:').rstrip(' :')}: {line.removeprefix('error: ')}".removeprefix(": ")
    return {"NoExtensionBias": "can never be fulfilled: it leads back to itself"}.get(first.strip(), first.strip())[:200]
