"""Constrained text is what was asked for, whatever the logits; what cannot be compiled in reason is refused; nothing fails open."""

from __future__ import annotations

import json
import re
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import regex
from numpy.typing import NDArray
from tiny_models import DirectorySource

from arctool.errors import RequestError, SourceError
from arctool.run.llm import LLM
from arctool.run.sampling import grammar as grammar_room
from arctool.run.sampling.constraint import MAX_NESTING, Constraint, Kind
from arctool.run.sampling.grammar import Grammars, GrammarState
from arctool.run.sampling.params import SamplingParams
from arctool.run.sampling.sampler import SampleRow, sample
from arctool.run.sampling.state import open_state
from arctool.run.tokenizer import TOKENIZER_FILE, Tokenizer

VOCAB = 512
END, OTHER_END = 2, 0
SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 6},
        "age": {"type": "integer", "minimum": 0, "maximum": 150},
        "tags": {"type": "array", "items": {"enum": ["a", "bc", "é"]}, "maxItems": 3},
    },
    "required": ["name", "age"],
    "additionalProperties": False,
}
REGEX = r"(ab|c[0-9]{2,4}|é)+-[A-Z]{1,3}"
LARK = 'start: sum\nsum: NUMBER | "(" sum "+" sum ")"\nNUMBER: /[0-9]{1,2}/'


@pytest.fixture(scope="module")
def tokenizer(tiny_llama: Path) -> Tokenizer:
    return Tokenizer({TOKENIZER_FILE: (tiny_llama / TOKENIZER_FILE).read_bytes()}, VOCAB)


@pytest.fixture(scope="module")
def grammars(tokenizer: Tokenizer) -> Grammars:
    return Grammars(tokenizer, [END, OTHER_END])


def walk(grammars: Grammars, tokenizer: Tokenizer, params: SamplingParams, seed: int, spread: float = 3.0) -> tuple[list[int], bool]:
    """Random logits, sampled to the end of the text or to max_tokens. Returns the tokens without an end token, and whether it ended."""
    rng = np.random.default_rng(seed)
    state = open_state(params, (1,), grammars)
    tokens: list[int] = []
    while len(tokens) < (params.max_tokens or 1000):
        logits = (rng.standard_normal((1, VOCAB)) * spread).astype(np.float32)
        row = SampleRow(params, seed, len(tokens), len(tokens), (END, OTHER_END), state.history, state.grammar)
        [found] = sample(logits, [row])
        assert found.error is None
        assert found.token is not None
        state.push(found.token)
        if found.token in (END, OTHER_END):
            assert state.finished
            return tokens, True
        tokens.append(found.token)
        if state.finished:
            return tokens, True
    return tokens, False


def holds_schema(text: str) -> None:
    value = json.loads(text)
    assert set(value) <= {"name", "age", "tags"}
    assert isinstance(value["name"], str)
    assert len(value["name"]) <= 6
    assert type(value["age"]) is int
    assert 0 <= value["age"] <= 150
    assert all(tag in ("a", "bc", "é") for tag in value.get("tags", []))
    assert len(value.get("tags", [])) <= 3


def holds_object(text: str) -> None:
    assert isinstance(json.loads(text), dict)


def holds_regex(text: str) -> None:
    assert re.fullmatch(REGEX, text)


def holds_sum(text: str) -> None:
    while re.search(r"\(\d\d?\+\d\d?\)", text):
        text = re.sub(r"\(\d\d?\+\d\d?\)", "1", text)
    assert re.fullmatch(r"\d\d?", text)


def begins_json(text: str) -> None:
    """A cut text: whatever the parser misses, it misses at the end."""
    failed = None
    try:
        json.loads(text)
    except json.JSONDecodeError as error:
        failed = error
    if failed is not None:
        tail = text[failed.pos :].strip()
        in_string = failed.msg.startswith(("Unterminated", "Invalid \\")) or tail.startswith('"')
        literal = any(word.startswith(tail) for word in ("true", "false", "null"))
        assert in_string or literal or re.fullmatch(r"-?(\d+(\.\d*)?([eE][+-]?\d*)?)?", tail), (text, failed)


def begins_regex(text: str) -> None:
    assert regex.fullmatch(REGEX, text.rstrip("\ufffd"), partial=True)


KINDS: list[tuple[Kind, str, Callable[[str], None], Callable[[str], None] | None]] = [
    ("json_schema", json.dumps(SCHEMA), holds_schema, begins_json),
    ("json_object", "", holds_object, begins_json),
    ("regex", REGEX, holds_regex, begins_regex),
    ("grammar", LARK, holds_sum, None),
]


@pytest.mark.parametrize(("kind", "source", "holds", "begins"), KINDS, ids=[k[0] for k in KINDS])
@pytest.mark.parametrize(
    "fields",
    [
        {"temperature": 2.0},
        {"temperature": 0},
        {"temperature": 2.0, "ignore_eos": True},
        {"temperature": 2.0, "min_tokens": 25},
        {"temperature": 1.0, "top_k": 3, "top_p": 0.5, "typical_p": 0.8, "repetition_penalty": 2.0, "logit_bias": {END: 100.0, 5: 100}},
        {"temperature": 2.0, "max_tokens": 6},
    ],
    ids=lambda fields: " ".join(fields),
)
def test_every_text_is_what_the_constraint_says(
    grammars: Grammars,
    tokenizer: Tokenizer,
    kind: Kind,
    source: str,
    holds: Callable[[str], None],
    begins: Callable[[str], None] | None,
    fields: dict[str, Any],
) -> None:
    params = SamplingParams(**{"max_tokens": 120, "constraint": Constraint(kind, source), **fields})
    texts, ended = set(), 0
    for seed in range(25):
        tokens, whole = walk(grammars, tokenizer, params, seed)
        text = tokenizer.decode(tokens)
        texts.add(text)
        ended += whole
        if whole:
            holds(text)
        elif begins is not None:
            begins(text)
    assert len(texts) > 5, "texts that hardly differ would prove nothing"
    if "max_tokens" in fields:
        assert ended < 25
    elif kind != "json_object":
        assert ended > 5


def test_without_the_constraint_hardly_any_text_would_hold(grammars: Grammars, tokenizer: Tokenizer) -> None:
    """The tests above can fail."""
    params = SamplingParams(max_tokens=8, logit_bias={END: -100, OTHER_END: -100})
    texts = [tokenizer.decode(walk(grammars, tokenizer, params, seed)[0]) for seed in range(25)]
    for holds in (holds_schema, holds_object, holds_regex, holds_sum):
        for text in texts:
            with pytest.raises((AssertionError, ValueError, TypeError, KeyError)):
                holds(text)


def mask_of(state: GrammarState, *, may_end: bool = True) -> set[int]:
    mask: NDArray[np.uint32] = np.zeros(VOCAB // 32, np.uint32)
    assert state.fill(mask, may_end=may_end) is None
    return {i for i in range(VOCAB) if mask[i // 32] >> (i % 32) & 1}


def ids(tokenizer: Tokenizer, *texts: str) -> set[int]:
    return {found for text in texts if (found := tokenizer.token_id(text)) is not None}


def test_end_tokens_are_offered_where_the_text_is_complete_and_only_there(grammars: Grammars, tokenizer: Tokenizer) -> None:
    state = grammars.open(Constraint("regex", "ab?"))
    a, b = (tokenizer.token_id(letter) for letter in "ab")
    assert a is not None
    assert b is not None
    assert mask_of(state) == ids(tokenizer, "a", "ab")
    state.push(a)
    assert mask_of(state) == {b, END, OTHER_END}
    assert mask_of(state, may_end=False) == {b}
    assert not state.finished
    state.push(b)
    assert state.finished
    assert mask_of(state, may_end=False) == {END, OTHER_END}, "where nothing else can follow the end comes anyway"


def test_a_grammar_may_name_any_token_of_the_model_by_its_number_and_no_other(grammars: Grammars) -> None:
    state = grammars.open(Constraint("grammar", 'start: <[40]> <[511]> "x"'))
    for token in (40, 511):
        assert mask_of(state) == {token}
        state.push(token)
    with pytest.raises(RequestError, match=r"^grammar: .*512"):
        grammars.open(Constraint("grammar", "start: <[512]>"))


@pytest.mark.parametrize("end", [END, OTHER_END])
def test_any_end_token_finishes_the_text(grammars: Grammars, tokenizer: Tokenizer, end: int) -> None:
    state = grammars.open(Constraint("regex", "ab?"))
    a = tokenizer.token_id("a")
    assert a is not None
    state.push(a)
    state.push(end)
    assert state.finished


@pytest.mark.parametrize("name", ["<|im_end|>", "<[2]>"])
def test_a_grammar_that_names_an_end_token_cannot_end_early(grammars: Grammars, tokenizer: Tokenizer, name: str) -> None:
    try:
        state = grammars.open(Constraint("grammar", f'start: "a" {name} "b"'))
    except RequestError:
        return
    a = tokenizer.token_id("a")
    assert a is not None
    state.push(a)
    mask = np.zeros(VOCAB // 32, np.uint32)
    assert "leaves no token" in str(state.fill(mask, may_end=True))


def test_tokens_can_be_taken_back(grammars: Grammars, tokenizer: Tokenizer) -> None:
    params = SamplingParams(constraint=Constraint("regex", "abab"), frequency_penalty=1)
    state = open_state(params, (7,), grammars)
    assert state.grammar is not None
    assert state.history is not None
    a, b = (tokenizer.token_id(letter) for letter in "ab")
    assert a is not None
    assert b is not None
    start = mask_of(state.grammar)
    for token in (a, b, a, b):
        state.push(token)
    assert state.finished
    state.pop([b])
    assert not state.finished
    state.pop([a, b, a][::-1])
    assert mask_of(state.grammar) == start
    assert state.history.arrays()[1].sum() == 0
    with pytest.raises(ValueError, match="cannot take 3 tokens back"):
        state.grammar.pop(3)


def test_sequences_of_one_constraint_walk_apart(grammars: Grammars, tokenizer: Tokenizer) -> None:
    one, other = (grammars.open(Constraint("regex", "ab?")) for _ in range(2))
    before = mask_of(other)
    a = tokenizer.token_id("a")
    assert a is not None
    one.push(a)
    assert mask_of(other) == before != mask_of(one)


def test_a_walk_that_went_wrong_ends_its_row_and_no_other(grammars: Grammars, tokenizer: Tokenizer) -> None:
    params = SamplingParams(constraint=Constraint("regex", "ab?"))
    lost, good = (open_state(params, (), grammars) for _ in range(2))
    lost.push(5)
    assert not lost.finished
    rows = [SampleRow(params, 0, 3, grammar=state.grammar) for state in (good, lost)]
    first, failed, free, unready = sample(
        np.zeros((4, VOCAB), np.float32), [*rows, SampleRow(SamplingParams(), 0, 3), SampleRow(params, 0, 3)]
    )
    assert first.token in ids(tokenizer, "a", "ab")
    assert free.token is not None
    assert (failed.token, unready.token) == (None, None)
    assert "no token is left to choose at position 3: the constraint cannot be followed further" in str(failed.error)
    assert "was not compiled" in str(unready.error)


USED_UP = Constraint("regex", "(a|b)*a(a|b){14}")
"""Each text of a's and b's leads to states of its own, and the library counts those of all walks of a grammar together."""


def use_up(grammars: Grammars, tokenizer: Tokenizer) -> None:
    a, b = (tokenizer.token_id(letter) for letter in "ab")
    greedy, error = grammars.open(USED_UP), None
    for letter in np.random.default_rng(0).choice([a, b], 3000).tolist():  # type: ignore[arg-type]
        error = error or greedy.fill(np.zeros(VOCAB // 32, np.uint32), may_end=True)
        greedy.push(letter)
    assert error is not None
    assert "too many states" in error


def test_what_one_walk_of_a_grammar_uses_up_does_not_end_others(tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(grammar_room.LIMITS, "max_lexer_states", 500)
    a, b = (tokenizer.token_id(letter) for letter in "ab")
    assert a is not None
    assert b is not None
    own = Grammars(tokenizer, [END])
    one, alone = own.open(USED_UP), Grammars(tokenizer, [END]).open(USED_UP)
    for state in (one, alone):
        state.push(a)
    use_up(own, tokenizer)
    for letter in (b, a, a, b) * 5:
        assert mask_of(one) == mask_of(alone)
        one.push(letter)
        alone.push(letter)
    one.pop(3)
    alone.pop(3)
    assert mask_of(one) == mask_of(alone)


def test_a_grammar_that_is_used_up_is_compiled_anew_for_the_next_request(tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(grammar_room.LIMITS, "max_lexer_states", 500)
    monkeypatch.setattr(grammar_room, "CHEAP_SECONDS", -1.0)  # too costly to be compiled while the engine waits
    own = Grammars(tokenizer, [END])
    one = own.open(USED_UP)
    use_up(own, tokenizer)
    assert one.fill(np.zeros(VOCAB // 32, np.uint32), may_end=True) is not None
    assert mask_of(own.open(USED_UP)) == mask_of(Grammars(tokenizer, [END]).open(USED_UP))


def nested(depth: int) -> str:
    schema: dict[str, Any] = {"type": "integer"}
    for _ in range(depth // 2):
        schema = {"type": "array", "items": schema}
    return json.dumps(schema)


BAD: list[tuple[Kind, str]] = [
    ("json_schema", '{"type": "bogus"}'),
    ("json_schema", '{"type": "object"'),
    ("json_schema", "[]"),
    ("json_schema", ""),
    ("json_schema", '{"minimum": NaN}'),
    ("regex", "a\\"),
    ("regex", "a{1000000}"),
    ("json_schema", '{"type": "integer", "type": "string"}'),
    ("json_schema", '{"$ref": "#"}'),
    ("json_schema", '{"$defs": {"a": {"$ref": "#/$defs/b"}, "b": {"$ref": "#/$defs/a"}}, "$ref": "#/$defs/a"}'),
    ("json_schema", '{"$ref": "#/nowhere"}'),
    ("json_schema", '{"$ref": "http://example.com/schema"}'),
    ("json_schema", '{"type": "array", "uniqueItems": true}'),
    ("json_schema", '{"type": "array", "uniqueItems": true, "x-guidance": {"lenient": true}}'),
    ("json_schema", '{"type": "integer", "minimum": 5, "maximum": 3}'),
    ("json_schema", '{"enum": ["%s"]}' % ("x" * (1 << 16))),
    ("json_schema", "[" * 100_000),
    ("regex", "[a-c"),
    ("regex", r"(a)\1"),
    ("regex", "(?=a)b"),
    ("regex", r"[^\s\S]"),
    ("regex", "(" * 65 + "a" + ")" * 65),
    ("regex", "a" * ((1 << 16) + 1)),
    ("regex", "é" * (1 << 15) + "a"),
    ("regex", "a\ud800"),
    ("grammar", "start: foo"),
    ("grammar", 'start: start "a" | start'),
    ("grammar", ""),
    ("json_object", "{}"),
]


@pytest.mark.parametrize(("kind", "source"), BAD, ids=lambda value: value[:30])
def test_what_cannot_be_a_constraint_is_refused_by_name(grammars: Grammars, kind: Kind, source: str) -> None:
    with pytest.raises(RequestError, match=f"^{kind}: ") as caught:
        grammars.open(Constraint(kind, source))
    assert len(str(caught.value)) < 400
    assert "\n" not in str(caught.value).strip()


BOMBS: list[tuple[Kind, str, int, int]] = [
    ("json_schema", '{"type": "integer", "multipleOf": 999983}', grammar_room.COMPILE_SECONDS, 1 << 33),  # seconds
    ("json_schema", '{"type": "integer", "multipleOf": 999983}', 60, 1 << 28),  # 700 MB
    ("grammar", "start: a0\n" + "\n".join(f"a{i}: a{i + 1}" for i in range(3000)) + '\na3000: "x"', 60, 1 << 33),  # the whole stack
]


@pytest.mark.parametrize(("kind", "source", "seconds", "memory"), BOMBS, ids=["time", "memory", "stack"])
def test_what_takes_too_much_to_compile_is_refused_in_seconds(
    grammars: Grammars, kind: Kind, source: str, seconds: int, memory: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(grammar_room, "COMPILE_SECONDS", seconds)
    monkeypatch.setattr(grammar_room, "COMPILE_BYTES", memory)
    began = time.monotonic()
    with pytest.raises(RequestError, match=f"^{kind}: takes more than"):
        grammars.open(Constraint(kind, source))
    assert time.monotonic() - began < 15


def test_a_walk_that_grows_past_its_limits_fails_and_does_not_wander_off(
    grammars: Grammars, tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """2²⁰⁰ letters: compiled lazily in a moment, and never to be finished. A trial that goes some steps refuses it at once."""
    monkeypatch.setattr(grammar_room, "TRIAL_STEPS", 0)
    params = SamplingParams(temperature=0, constraint=Constraint("regex", "a" + "{2}" * 200))
    state = open_state(params, (), grammars)
    for step in range(200):
        [found] = sample(np.zeros((1, VOCAB), np.float32), [SampleRow(params, 0, step, step, (END,), grammar=state.grammar)])
        if found.token is None:
            assert "the constraint cannot be followed further" in str(found.error)
            return
        assert found.token in ids(tokenizer, "a")
        state.push(found.token)


def test_a_trial_that_gets_no_processor_is_a_refusal(monkeypatch: pytest.MonkeyPatch) -> None:
    def forever(*arguments: object, **options: Any) -> None:
        raise subprocess.TimeoutExpired("python", options["timeout"])

    monkeypatch.setattr(grammar_room.subprocess, "run", forever)
    with pytest.raises(RequestError, match=r"^regex: takes more than"):
        grammar_room.try_to_compile("regex", "x")


def test_nesting_is_refused_above_its_bound_and_served_at_it(grammars: Grammars) -> None:
    grammars.open(Constraint("json_schema", nested(MAX_NESTING - 2)))
    with pytest.raises(RequestError, match=r"^json_schema: expected nesting of at most 64, found 65"):
        Constraint("json_schema", json.dumps({"const": json.loads("[" * 64 + "]" * 64)}))
    Constraint("json_schema", json.dumps({"const": "[" * 99 + '"' + "{" * 99}))
    Constraint("regex", r"\(" * 99)


def test_a_schema_that_contains_itself_is_served(grammars: Grammars, tokenizer: Tokenizer) -> None:
    item = {"type": "object", "properties": {"x": {"$ref": "#/$defs/t"}}, "additionalProperties": False}
    schema = json.dumps({"$defs": {"t": item}, "$ref": "#/$defs/t"})
    params = SamplingParams(temperature=2, max_tokens=80, constraint=Constraint("json_schema", schema))
    for seed in range(10):
        tokens, whole = walk(grammars, tokenizer, params, seed)
        if whole:
            json.loads(tokenizer.decode(tokens))


def test_a_compiled_constraint_is_kept_and_only_so_many(tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch) -> None:
    tried = []
    monkeypatch.setattr(grammar_room, "try_to_compile", lambda kind, source, size: tried.append(source))
    own = Grammars(tokenizer, [END])
    for number in (*range(grammar_room.KEPT), 0, grammar_room.KEPT, 0, 1):
        own.open(Constraint("regex", f"a{{{number + 1}}}"))
    assert len(tried) == grammar_room.KEPT + 2


def test_a_refused_constraint_is_refused_again(tokenizer: Tokenizer) -> None:
    own = Grammars(tokenizer, [END])
    for _ in range(2):
        with pytest.raises(RequestError, match=r"^regex"):
            own.open(Constraint("regex", "[a"))


def test_a_model_without_end_tokens_still_stops_where_nothing_can_follow(tokenizer: Tokenizer) -> None:
    own = Grammars(tokenizer, [VOCAB + 5])  # an end token that the tokenizer does not have
    for seed in range(5):
        tokens, whole = walk(own, tokenizer, SamplingParams(temperature=2, constraint=Constraint("regex", "[a-z]{3}")), seed)
        assert whole
        assert re.fullmatch("[a-z]{3}", tokenizer.decode(tokens))


def test_without_a_tokenizer_no_constraint_is_served() -> None:
    with pytest.raises(RequestError, match=r"^regex: a constraint needs a tokenizer"):
        Grammars(None, [END]).open(Constraint("regex", "a"))


def test_a_tokenizer_that_the_library_cannot_read_is_named() -> None:
    class Broken:
        size = 3

        def to_json(self) -> str:
            return '{"version": "1.0"}'

    with pytest.raises(SourceError, match=r"tokenizer\.json: constraints cannot be used"):
        Grammars(Broken(), [END]).open(Constraint("regex", "a"))  # type: ignore[arg-type]


@pytest.mark.parametrize("kind", ["xml", "", None, 3, []])
def test_an_unknown_kind_is_refused(kind: Any) -> None:
    with pytest.raises(RequestError, match=r"^constraint: expected one of json_schema, json_object, regex, grammar"):
        Constraint(kind, "a")


def test_white_space_in_json_has_an_end(llama: DirectorySource) -> None:
    """A model that would write white space for ever is led on after 32 characters of it."""
    llm = LLM(llama)
    assert llm.tokenizer is not None
    bias = {token: 100.0 for token in range(llm.tokenizer.size) if llm.tokenizer.token_bytes(token).strip(b" \n\t\r") == b""}
    params = SamplingParams(temperature=0, max_tokens=100, logit_bias=bias, constraint=Constraint("json_object"))
    [completion] = llm.generate([[5, 6]], params)
    runs = re.findall(r"\s+", re.sub(r'"[^"]*"?', '""', completion.text))
    assert max(map(len, runs)) == 32
