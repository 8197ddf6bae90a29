"""Prompts of exactly as many tokens as were asked for, as the server counts them; and what is said where that cannot be known."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from openai_stand_in import StandIn

from arctool.bench.serving.client import Server
from arctool.bench.serving.exchange import Endpoint
from arctool.bench.serving.plan import Load, Plan, Workload
from arctool.bench.serving.prompts import WORDS, Fitted, Ids, Words, load_tokenizer
from arctool.bench.serving.session import Result, Voicing, measure
from arctool.errors import SourceError, UsageError


def bench(stand_in: StandIn, voicing: Voicing | None = None, **changes: Any) -> Result:
    """Four requests of 24 tokens each, measured."""
    plan = Plan(
        **{"loads": (Load(clients=2),), "input_len": 24, "output_len": 5, "requests": 4, "warmups": 0, "cancel_after": 2, **changes}
    )
    with stand_in.running() as url:
        return measure(Server.at(url, 20), plan, voicing)


def prompts(stand_in: StandIn) -> list[Any]:
    return [body.get("prompt") or body["messages"] for body in stand_in.asked]


@pytest.mark.parametrize("endpoint", list(Endpoint))
@pytest.mark.parametrize("overhead", [0, 1, 9])
def test_words_are_counted_with_what_the_server_adds(endpoint: Endpoint, overhead: int) -> None:
    stand_in = StandIn(overhead=overhead)
    found = bench(stand_in, endpoint=endpoint)
    assert not found.failed
    assert [stand_in.prompt_tokens(body) for body in stand_in.asked] == [24] * 4
    assert (found.prompts, found.overhead) == ("random words of one token each", overhead)
    figures = found.rows[0].figures
    assert figures is not None
    assert figures.prompt_lengths == (24, 24)
    assert len({str(prompt) for prompt in prompts(stand_in)}) == 4


def test_words_of_several_tokens_are_estimated_and_said_so() -> None:
    stand_in = StandIn(tokens_a_word=3, overhead=2)
    found = bench(stand_in, input_len=60)
    assert found.prompts == "random words of about 3.00 tokens each"
    assert not found.failed
    assert all(abs(stand_in.prompt_tokens(body) - 60) <= 3 for body in stand_in.asked)


def test_ids_below_a_bound_are_sent_and_a_bos_is_one_of_the_tokens() -> None:
    stand_in = StandIn(overhead=1)
    found = bench(stand_in, Voicing(vocab_size=50))
    assert (found.prompts, found.failed) == ("random token ids", False)
    sent = prompts(stand_in)
    assert [len(ids) for ids in sent] == [23] * 4
    assert all(0 <= one < 50 for ids in sent for one in ids)
    assert len({tuple(ids) for ids in sent}) == 4


def test_a_tokenizer_gives_ids_that_are_no_special_tokens(tiny_llama: Path) -> None:
    stand_in = StandIn()
    assert not bench(stand_in, Voicing(tokenizer=tiny_llama), input_len=4000).failed
    tokenizer = load_tokenizer(tiny_llama / "tokenizer.json")
    special = {number for number, token in tokenizer.get_added_tokens_decoder().items() if token.special}
    sent = {one for ids in prompts(stand_in) for one in ids}
    assert special
    assert sent == set(tokenizer.get_vocab(with_added_tokens=True).values()) - special


def test_text_is_fitted_where_the_server_takes_no_ids_and_for_a_chat(tiny_llama: Path) -> None:
    tokenizer = load_tokenizer(tiny_llama)
    source = Fitted(tokenizer)
    random = np.random.default_rng(1)
    texts = [source.make(random, length) for length in (1, 2, 7, 24, 100) for _ in range(5)]
    lengths = [len(tokenizer.encode(text, add_special_tokens=False).ids) for text in texts]
    assert lengths == [length for length in (1, 2, 7, 24, 100) for _ in range(5)]
    for changes, stand_in in (({}, StandIn(takes_ids=False)), ({"endpoint": Endpoint.CHAT}, StandIn())):
        stand_in.prompt_tokens = lambda body: len(  # type: ignore[method-assign]
            tokenizer.encode(body.get("prompt") or body["messages"][0]["content"], add_special_tokens=False).ids
        )
        found = bench(stand_in, Voicing(tokenizer=tiny_llama), **changes)
        assert (found.prompts, found.failed) == ("random words, fitted with the tokenizer", False)


def test_a_text_that_does_not_fit_is_made_anew_and_the_nearest_must_do() -> None:
    class Odd:
        """A word is a token; a text that begins with one of the first letters has more than it was cut to."""

        def __init__(self, last: str) -> None:
            self._last = last

        def encode(self, text: str, add_special_tokens: bool) -> Any:
            words = text.split()
            return SimpleNamespace(ids=words + ["!"] * (words[0] <= self._last))

        def decode(self, ids: list[str], skip_special_tokens: bool) -> str:
            return " ".join(word for word in ids if word != "!")

    random = np.random.default_rng(0)
    assert all(Fitted(Odd("M")).make(random, 8)[0] > "M" for _ in range(10))
    assert len(Fitted(Odd("Z")).make(random, 8).split()) == 8


def test_ids_that_the_server_refuses_are_refused_by_the_option_that_asked_for_them() -> None:
    with pytest.raises(UsageError, match=r"^--vocab-size: the server takes no such token ids: HTTP 422: prompt: expected text"):
        bench(StandIn(takes_ids=False), Voicing(vocab_size=50))


def test_a_prompt_shorter_than_what_the_server_adds_is_refused() -> None:
    for workload, option in ((Workload.RANDOM, "--input-len"), (Workload.SHARED_PREFIX, "--prefix-len")):
        with pytest.raises(UsageError, match=f"^{option}: the server itself adds 30 tokens"):
            bench(StandIn(overhead=30), workload=workload, prefix_len=30, endpoint=Endpoint.CHAT)


def test_a_server_that_cuts_prompts_is_no_measurement() -> None:
    found = bench(StandIn(faults={2: "cut prompt"}))
    assert found.rows[0].failure == "1 of 4 requests failed; 1 of them: the server counted 19 prompt tokens where 24 were sent"


def test_a_tokenizer_that_is_none_is_refused_by_its_name(tmp_path: Path) -> None:
    (tmp_path / "tokenizer.json").write_text("{}")
    for path, words in ((tmp_path, "not a tokenizer"), (tmp_path / "gone", "no such tokenizer")):
        with pytest.raises(SourceError, match=words):
            load_tokenizer(path)


def test_the_words_are_all_different_and_sources_make_what_they_claim() -> None:
    assert len(set(WORDS)) == len(WORDS) == 70
    random = np.random.default_rng(0)
    words = Words()
    assert [len(words.make(random, length).split()) for length in (1, 2, 50)] == [1, 2, 50]
    assert words.join(["A the", "B new"]) == "A the B new"
    ids = Ids(np.array([3, 5]))
    assert set(ids.make(random, 100)) == {3, 5}
    assert ids.join([[3], [5, 5]]) == [3, 5, 5]


@pytest.mark.real
def test_every_word_and_letter_is_one_token_of_a_real_vocabulary(smollm2_dir: Path) -> None:
    tokenizer = load_tokenizer(smollm2_dir)
    assert len(tokenizer.encode(" ".join(["A", *WORDS]), add_special_tokens=False).ids) == 1 + len(WORDS)
    random = np.random.default_rng(3)
    source = Words(known="proven")
    for length in (1, 16, 128, 1000):
        assert len(tokenizer.encode(source.make(random, length), add_special_tokens=False).ids) == length
