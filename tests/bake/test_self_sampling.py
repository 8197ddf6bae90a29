"""Text that a model samples from itself: exact counts, the same tokens for a seed whatever the batch, and models that cannot."""

from __future__ import annotations

import hashlib
import json
import logging
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from arctool.bake.calibration import self_sampling
from arctool.bake.calibration.self_sampling import PROMPTS, SEQUENCE_TOKENS, engine_options, sample_texts
from arctool.bake.source.checkpoint import Checkpoint, open_checkpoint
from arctool.errors import SourceError, UsageError
from arctool.quant.tensor import Weight
from arctool.run.config import ModelConfig
from arctool.run.llm import LLM, EngineOptions
from arctool.run.sampling.params import SamplingParams


@dataclass
class Dressed:
    """A checkpoint with other files beside it."""

    checkpoint: Checkpoint
    assets: Mapping[str, bytes]

    @property
    def config(self) -> ModelConfig:
        return self.checkpoint.config

    def weight(self, key: str) -> Weight:
        return self.checkpoint.weight(key)

    def bias(self, key: str) -> NDArray[np.float32] | None:
        return self.checkpoint.bias(key)


@pytest.fixture(scope="module")
def checkpoint(tiny_llama: Path) -> Iterator[Checkpoint]:
    with_weights = open_checkpoint(str(tiny_llama))
    yield with_weights
    with_weights.close()


@pytest.fixture
def llm(checkpoint: Checkpoint) -> LLM:
    return LLM(checkpoint, engine_options(checkpoint.config))


def dressed(checkpoint: Checkpoint, drop: tuple[str, ...] = (), **tokenizer_config: Any) -> LLM:
    """The tiny model with changes in its tokenizer_config.json (None removes a field), and without the files of `drop`."""
    assets = {name: data for name, data in checkpoint.assets.items() if name not in drop}
    if "tokenizer_config.json" in assets:
        changed = json.loads(assets["tokenizer_config.json"]) | tokenizer_config
        assets["tokenizer_config.json"] = json.dumps({k: v for k, v in changed.items() if v is not None}).encode()
    return LLM(Dressed(checkpoint, assets), engine_options(checkpoint.config))


def with_bos(checkpoint: Checkpoint) -> LLM:
    """The tiny model with a tokenizer that puts <|im_start|> (1) before every text, as Llama's does with its own."""
    tokenizer = json.loads(checkpoint.assets["tokenizer.json"])
    tokenizer["post_processor"] = {
        "type": "TemplateProcessing",
        "single": [{"SpecialToken": {"id": "<|im_start|>", "type_id": 0}}, {"Sequence": {"id": "A", "type_id": 0}}],
        "pair": [{"Sequence": {"id": "A", "type_id": 0}}, {"Sequence": {"id": "B", "type_id": 1}}],
        "special_tokens": {"<|im_start|>": {"id": "<|im_start|>", "ids": [1], "tokens": ["<|im_start|>"]}},
    }
    assets = dict(checkpoint.assets) | {"tokenizer.json": json.dumps(tokenizer).encode()}
    return LLM(Dressed(checkpoint, assets), engine_options(checkpoint.config))


def seed_of(seed: int, index: int) -> int:
    return int.from_bytes(hashlib.sha256(f"arctool self-sampling {seed} {index}".encode()).digest()[:8], "little")


def test_there_are_as_many_tokens_as_asked_for_in_sequences_that_are_not_too_long(llm: LLM) -> None:
    for tokens in (1, 2, 255, 256, 257, 900):
        found = sample_texts(llm, tokens, 3)
        assert sum(map(len, found)) == tokens
        assert all(0 < len(ids) <= SEQUENCE_TOKENS for ids in found)


def test_the_same_seed_gives_the_same_tokens_whatever_the_batch_and_another_seed_others(checkpoint: Checkpoint, llm: LLM) -> None:
    found = sample_texts(llm, 900, 11)
    assert len({tuple(ids) for ids in found}) == len(found) >= 4
    assert sample_texts(llm, 900, 11) == found
    for at_once in (1, 3):
        assert sample_texts(LLM(checkpoint, EngineOptions(max_seqs=at_once)), 900, 11) == found
    other = sample_texts(llm, 900, 12)
    assert not {tuple(ids) for ids in other} & {tuple(ids) for ids in found}


def test_fewer_tokens_are_the_beginning_of_more(llm: LLM) -> None:
    many, few = sample_texts(llm, 1200, 5), sample_texts(llm, 700, 5)
    assert few[:-1] == many[: len(few) - 1]
    assert few[-1] == many[len(few) - 1][: len(few[-1])]


def test_sequences_are_what_the_engine_draws_at_temperature_one_with_nothing_filtered(llm: LLM) -> None:
    for i, ids in enumerate(sample_texts(llm, 900, 21)[:-1]):
        start = llm.encode_chat([{"role": "user", "content": PROMPTS[i // 2]}]) if i % 2 else ids[:1]
        params = SamplingParams(temperature=1.0, top_p=1.0, seed=seed_of(21, i), max_tokens=SEQUENCE_TOKENS - len(start))
        [done] = llm.engine.generate([start], [params])
        assert ids == [*start, *done.token_ids]
        assert len(ids) == SEQUENCE_TOKENS or ids[-1] in llm.eos_token_ids


def test_a_model_without_bos_starts_freely_from_tokens_that_are_text(llm: LLM) -> None:
    assert llm.tokenizer is not None
    starts = [ids[0] for ids in sample_texts(llm, 3000, 8)[::2]]
    assert len(set(starts)) > len(starts) / 2
    assert not any(llm.tokenizer.is_hidden(token) for token in starts)


def test_a_special_token_is_drawn_again(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    draws = iter([0.0, 1.1 / 512, 2.2 / 512, 77.5 / 512])  # <|endoftext|>, <|im_start|>, <|im_end|>, a letter
    monkeypatch.setattr(self_sampling, "uniform", lambda *_: next(draws, 77.5 / 512))
    assert sample_texts(llm, 10, 8)[0][0] == 77


def test_a_model_with_bos_starts_freely_from_it_alone(checkpoint: Checkpoint) -> None:
    found = sample_texts(with_bos(checkpoint), 1200, 8)[::2]
    assert all(ids[0] == 1 for ids in found)
    assert len({ids[1] for ids in found}) > 1


def test_the_prompts_are_answered_in_turn_and_begin_again(checkpoint: Checkpoint, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(self_sampling, "SEQUENCE_TOKENS", 64)
    monkeypatch.setattr(self_sampling, "PROMPTS", ("ab", "cd", "ef"))
    llm = LLM(checkpoint, engine_options(checkpoint.config))
    odd = sample_texts(llm, 900, 4)[1::2][:-1]
    assert len(odd) >= 5
    for i, ids in enumerate(odd):
        start = llm.encode_chat([{"role": "user", "content": ("ab", "cd", "ef")[i % 3]}])
        assert ids[: len(start)] == start


def test_there_are_two_dozen_short_prompts_of_many_kinds(llm: LLM) -> None:
    assert len(set(PROMPTS)) == 24
    assert max(map(len, PROMPTS)) < 100


def test_a_prompt_that_leaves_no_room_for_an_answer_is_left_out(checkpoint: Checkpoint, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(self_sampling, "PROMPTS", ("ab", "x" * 400))
    llm = LLM(checkpoint, engine_options(checkpoint.config))
    start = llm.encode_chat([{"role": "user", "content": "ab"}])
    assert all(ids[: len(start)] == start for ids in sample_texts(llm, 1200, 4)[1::2][:-1])


def test_a_model_without_a_template_runs_freely_in_every_sequence(checkpoint: Checkpoint) -> None:
    llm = dressed(checkpoint, chat_template=None)
    assert llm.template is None
    found = sample_texts(llm, 1000, 6)
    assert llm.tokenizer is not None
    assert not any(llm.tokenizer.is_hidden(ids[0]) for ids in found)


def test_a_model_without_a_tokenizer_gives_tokens_all_the_same(checkpoint: Checkpoint) -> None:
    found = sample_texts(dressed(checkpoint, drop=("tokenizer.json",)), 600, 6)
    assert sum(map(len, found)) == 600


def test_a_template_that_refuses_a_question_is_done_without(checkpoint: Checkpoint, caplog: pytest.LogCaptureFixture) -> None:
    llm = dressed(checkpoint, chat_template="{{ raise_exception('only with a system message') }}")
    with caplog.at_level(logging.WARNING):
        assert sum(map(len, sample_texts(llm, 300, 6))) == 300
    assert "self-sampling: without chat answers: chat template: only with a system message" in caplog.text


def test_a_template_that_asks_for_the_date_gets_always_the_same_one(checkpoint: Checkpoint) -> None:
    llm = dressed(checkpoint, chat_template="{{ strftime_now('%d %B %Y') }}: {{ messages[0].content }}")
    found = sample_texts(llm, 600, 6)[1]
    assert llm.tokenizer is not None
    assert llm.tokenizer.decode(found).startswith("15 January 2025: Explain how a refrigerator")


def test_progress_counts_up_to_the_tokens_asked_for(llm: LLM) -> None:
    calls: list[tuple[int, int]] = []
    sample_texts(llm, 700, 2, lambda done, wanted: calls.append((done, wanted)))
    assert calls == sorted(calls)
    assert {wanted for _, wanted in calls} == {700}
    assert len({done for done, _ in calls}) > 10
    assert calls[-1][0] <= 700


def test_an_interrupt_leaves_the_engine_idle_and_the_threads_as_they_were(llm: LLM) -> None:
    def interrupt(done: int, _: int) -> None:
        if done > 20:
            raise KeyboardInterrupt

    before = torch.get_num_threads()
    try:
        torch.set_num_threads(3)
        with pytest.raises(KeyboardInterrupt):
            sample_texts(llm, 700, 2, interrupt)
        assert torch.get_num_threads() == 3
    finally:
        torch.set_num_threads(before)
    assert not llm.engine.has_work()
    llm.engine.scheduler.check()
    assert sum(map(len, sample_texts(llm, 100, 2))) == 100


def poison(llm: LLM, monkeypatch: pytest.MonkeyPatch, bad: Any) -> None:
    """Make every row of logits NaN of which `bad(first token of its sequence)` holds."""
    real = llm.runner.run

    def run(work: Any, copies: Any) -> NDArray[np.float32]:
        logits = np.array(real(work, copies))
        for row, (sequence, _) in zip(logits, [w for w in work if w[1].emits], strict=True):
            if bad(sequence):
                row[:] = np.nan
        return logits

    monkeypatch.setattr(llm.runner, "run", run)


def test_a_sequence_that_the_model_fails_in_is_dropped_and_counted(
    llm: LLM, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    whole = sample_texts(llm, 1400, 9)
    poison(llm, monkeypatch, lambda sequence: sequence.seed == seed_of(9, 2) and sequence.length > 9)
    with caplog.at_level(logging.WARNING):
        found = sample_texts(llm, 1400, 9)
    assert found[:2] == whole[:2]
    assert found[2 : len(whole) - 2] == whole[3 : len(whole) - 1]
    assert sum(map(len, found)) == 1400
    assert "self-sampling: 1 of " in caplog.text


@pytest.mark.parametrize("good", [(), (0, 1, 5)])
def test_a_model_that_fails_in_most_sequences_is_refused(llm: LLM, monkeypatch: pytest.MonkeyPatch, good: tuple[int, ...]) -> None:
    poison(llm, monkeypatch, lambda sequence: sequence.seed not in {seed_of(9, i) for i in good})
    with pytest.raises(SourceError, match=rf"^self-sampling: 32 of {32 + len(good)} sequences met a logit that is not finite; calib"):
        sample_texts(llm, 100_000, 9)
    assert not llm.engine.has_work()


@pytest.mark.parametrize(("tokens", "seed"), [(0, 1), (-5, 1), (10, -1), (10, 1 << 64)])
def test_a_count_or_seed_that_makes_no_sense_is_refused(llm: LLM, tokens: int, seed: int) -> None:
    with pytest.raises(UsageError, match=r"^self-sampling: expected at least 1 token and a seed"):
        sample_texts(llm, tokens, seed)


def test_no_more_of_a_context_is_asked_for_than_the_model_has(checkpoint: Checkpoint) -> None:
    assert engine_options(checkpoint.config).max_model_len == 256
    assert engine_options(replace(checkpoint.config, max_position_embeddings=99)).max_model_len == 99
    assert engine_options(replace(checkpoint.config, max_position_embeddings=4096)).max_model_len == SEQUENCE_TOKENS
