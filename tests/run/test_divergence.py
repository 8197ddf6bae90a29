"""Divergence against closed forms, torch's own KL and transformers' logits; stored references; and everything that must be refused."""

from __future__ import annotations

import math
import shutil
import tracemalloc
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from safetensors.numpy import load_file, save_file
from tiny_models import DirectorySource, random_ids, reference

from arctool.errors import RequestError, VerificationError
from arctool.kernels.registry import Registry
from arctool.run import divergence, evaluate
from arctool.run.divergence import Comparison, TokenScores, compare, score_rows, token_scores
from arctool.run.evaluate import logit_chunks
from arctool.run.models.decoder import CausalLM
from arctool.run.weights import load_model

WINDOWS = (random_ids(11, 90), random_ids(12, 90), random_ids(13, 40))


@pytest.fixture(scope="session")
def pair(llama: DirectorySource, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """(a base, the same with every matrix disturbed by a tenth), as directories."""
    base = Path(__file__).parents[2] / "fixtures" / "checkpoints" / "llama"
    other = Path(shutil.copytree(base, tmp_path_factory.mktemp("pair") / "other"))
    rng = np.random.default_rng(5)
    weights = load_file(base / "model.safetensors")
    disturbed = {n: (w + 0.1 * w.std() * rng.standard_normal(w.shape)).astype(np.float32) if w.ndim == 2 else w for n, w in weights.items()}
    save_file(disturbed, other / "model.safetensors")
    return base, other


@pytest.fixture(scope="session")
def models(pair: tuple[Path, Path], registry: Registry) -> tuple[CausalLM, CausalLM]:
    return tuple(load_model(DirectorySource(path), registry) for path in pair)  # type: ignore[return-value]


def by_torch(pair: tuple[Path, Path], windows: Sequence[list[int]]) -> dict[str, NDArray[np.float64]]:
    """The scores of `TokenScores`, from transformers' logits by torch in f64."""
    columns: dict[str, list[NDArray[np.float64]]] = {"base_logprob": [], "logprob": [], "kl": [], "same_top1": []}
    for window in windows:
        p, q = (torch.log_softmax(torch.tensor(reference(path).logits(window)[:-1]).double(), -1) for path in pair)
        targets = torch.tensor(window[1:])[:, None]
        columns["base_logprob"].append(p.gather(1, targets)[:, 0].numpy())
        columns["logprob"].append(q.gather(1, targets)[:, 0].numpy())
        columns["kl"].append(torch.nn.functional.kl_div(q, p, log_target=True, reduction="none").sum(1).numpy())
        columns["same_top1"].append((p.argmax(1) == q.argmax(1)).numpy())
    return {name: np.concatenate(parts) for name, parts in columns.items()}


def ln(*probabilities: float) -> NDArray[np.float32]:
    return np.log(np.array([probabilities])).astype(np.float32)


@pytest.mark.parametrize("shift", [0.0, 1000.0, -1000.0])
def test_distributions_that_one_can_work_out_by_hand(shift: float) -> None:
    p, q = ln(0.5, 0.25, 0.25) + np.float32(shift), ln(0.25, 0.25, 0.5)
    found = score_rows(p, q, np.array([2]))
    assert found.kl == pytest.approx([0.5 * math.log(2) - 0.25 * math.log(2)], abs=1e-4)
    assert found.base_logprob == pytest.approx([math.log(0.25)], abs=1e-4)
    assert found.logprob == pytest.approx([math.log(0.5)], abs=1e-6)
    assert not found.same_top1[0]
    # The other way round it is another number for other distributions: KL is no distance.
    forth = score_rows(ln(0.9, 0.05, 0.05), ln(0.4, 0.3, 0.3), np.array([0]))
    back = score_rows(ln(0.4, 0.3, 0.3), ln(0.9, 0.05, 0.05), np.array([0]))
    assert forth.kl == pytest.approx([0.9 * math.log(9 / 4) + 0.1 * math.log(1 / 6)], abs=1e-6)
    assert back.kl == pytest.approx([0.4 * math.log(4 / 9) + 0.6 * math.log(6)], abs=1e-6)
    assert forth.same_top1[0]


def test_rows_agree_with_torch_and_a_row_does_not_depend_on_those_beside_it() -> None:
    rng = np.random.default_rng(0)
    p, q = ((rng.standard_normal((21, 700)) * 6).astype(np.float32) for _ in range(2))
    targets = rng.integers(0, 700, 21)
    found = score_rows(p, q, targets)
    ln_p, ln_q = (torch.log_softmax(torch.tensor(rows).double(), -1) for rows in (p, q))
    np.testing.assert_allclose(found.kl, torch.nn.functional.kl_div(ln_q, ln_p, log_target=True, reduction="none").sum(1), rtol=1e-12)
    np.testing.assert_allclose(found.base_logprob, ln_p[range(21), targets], rtol=1e-12)
    np.testing.assert_allclose(found.logprob, ln_q[range(21), targets], rtol=1e-12)
    assert found.kl.dtype == np.float64
    alone = [score_rows(p[i : i + 1], q[i : i + 1], targets[i : i + 1]).kl[0] for i in range(21)]
    assert found.kl.tolist() == alone


def test_equal_rows_diverge_by_exactly_nothing_and_nearly_equal_ones_by_the_fisher_form() -> None:
    rows = (np.random.default_rng(1).standard_normal((9, 5000)) * 4).astype(np.float32)
    assert score_rows(rows, rows + np.float32(0), np.zeros(9, np.int64)).kl.tolist() == [0.0] * 9
    # For q = p + ε the divergence is half the variance of ε under p, to second order: far below what f32 could show.
    step = np.random.default_rng(2).standard_normal(rows.shape).astype(np.float32) * np.float32(2.0**-12)
    p = np.exp(rows.astype(np.float64) - rows.max(1, keepdims=True))
    p /= p.sum(1, keepdims=True)
    moved = (rows + step).astype(np.float64) - rows
    expected = 0.5 * ((p * moved**2).sum(1) - (p * moved).sum(1) ** 2)
    assert expected.max() < 1e-6
    np.testing.assert_allclose(score_rows(rows, rows + step, np.zeros(9, np.int64)).kl, expected, rtol=2e-3)


def test_a_comparison_is_that_of_transformers_and_torch(models: tuple[CausalLM, CausalLM], pair: tuple[Path, Path]) -> None:
    expected = by_torch(pair, WINDOWS)
    scores = token_scores(*models, WINDOWS)
    for name, values in expected.items():
        np.testing.assert_allclose(getattr(scores, name), values, atol=3e-4, rtol=2e-3)
    found = compare(*models, WINDOWS)
    assert found.tokens == 89 + 89 + 39
    assert found.perplexity == pytest.approx(math.exp(-expected["logprob"].mean()), rel=1e-4)
    assert found.base_perplexity == pytest.approx(math.exp(-expected["base_logprob"].mean()), rel=1e-4)
    assert found.kl == pytest.approx(expected["kl"].mean(), rel=1e-3)
    assert found.kl_p99 == pytest.approx(np.sort(expected["kl"])[int(0.99 * 216)], rel=0.1)
    assert found.kl_max == pytest.approx(expected["kl"].max(), rel=1e-3)
    assert found.same_top1 == pytest.approx(expected["same_top1"].mean(), abs=1e-9)
    # Guards: the pair differs, and not in everything.
    assert 0.01 < found.kl < found.kl_p99 < found.kl_max
    assert 0.1 < found.same_top1 < 1


def test_a_stored_reference_gives_the_very_bits_of_the_model_itself(models: tuple[CausalLM, CausalLM]) -> None:
    base, other = models
    stored = divergence.reference(base, WINDOWS)
    for window, states in zip(WINDOWS, stored.states, strict=True):
        assert states.shape == (len(window) - 1, base.config.hidden_size)
    live, kept = token_scores(base, other, WINDOWS), token_scores(stored, other, WINDOWS)
    for name in ("base_logprob", "logprob", "kl", "same_top1"):
        assert getattr(live, name).tobytes() == getattr(kept, name).tobytes()
    assert len(set(kept.kl.tolist())) > 200


def test_a_model_against_itself_is_zero_and_one(models: tuple[CausalLM, CausalLM]) -> None:
    found = compare(models[0], models[0], WINDOWS)
    assert (found.kl, found.kl_p99, found.kl_max, found.same_top1) == (0.0, 0.0, 0.0, 1.0)
    assert found.perplexity == found.base_perplexity


def test_every_window_begins_with_an_empty_context(models: tuple[CausalLM, CausalLM]) -> None:
    whole = token_scores(*models, WINDOWS)
    parts = [token_scores(*models, [window]) for window in WINDOWS]
    assert whole.kl.tobytes() == np.concatenate([part.kl for part in parts]).tobytes()
    long = token_scores(*models, [WINDOWS[0] + WINDOWS[1]])
    assert long.kl[:89].tobytes() == whole.kl[:89].tobytes()
    assert not np.allclose(long.kl[90:179], whole.kl[89:178])


@pytest.mark.parametrize("size", [1, 7, 89])
def test_another_programs_logits_may_come_in_blocks_of_any_size(models: tuple[CausalLM, CausalLM], size: int) -> None:
    base, other = models

    def predictor(ids: Sequence[int]) -> Iterator[NDArray[np.float32]]:
        return logit_chunks(other, ids, chunk=size)

    assert compare(base, predictor, WINDOWS[:1]) == compare(base, other, WINDOWS[:1])


def test_the_numbers_are_mean_quantile_maximum_and_share() -> None:
    kl = np.arange(101, dtype=np.float64)[::-1]
    ones = np.full(101, -2.0)
    found = Comparison.of(TokenScores(ones, ones * 1.5, kl, np.arange(101) < 25))
    assert found == Comparison(101, pytest.approx(math.exp(3)), pytest.approx(math.exp(2)), 50.0, 99.0, 100.0, 25 / 101)


def test_a_surprise_beyond_any_perplexity_is_refused_not_infinite() -> None:
    fine = np.full(3, -1.0)
    with pytest.raises(VerificationError, match=r"surprise of 1e\+04 nats a token"):
        Comparison.of(TokenScores(fine, np.full(3, -1e4), fine * 0, np.ones(3, bool)))


def test_f64_is_made_of_a_few_rows_at_a_time() -> None:
    rows = np.zeros((256, 20_000), np.float32)
    tracemalloc.start()
    score_rows(rows, rows, np.zeros(256, np.int64))
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < rows.nbytes / 2


def test_at_most_one_chunk_of_logits_of_each_model_is_made_at_a_time(
    models: tuple[CausalLM, CausalLM], monkeypatch: pytest.MonkeyPatch
) -> None:
    base, other = (replace(m, config=replace(m.config, max_position_embeddings=1000)) for m in models)
    seen: list[tuple[str, int]] = []

    def spy(name: str) -> object:
        return lambda head, states: seen.append((name, len(states))) or evaluate_head(head, states)

    evaluate_head = evaluate.head_logits
    monkeypatch.setattr(divergence, "head_logits", spy("base"))
    monkeypatch.setattr(evaluate, "head_logits", spy("model"))
    compare(base, other, [random_ids(3, 700)])
    assert seen == [(name, count) for count in (256, 256, 187) for name in ("model", "base")]


def test_progress_counts_predicted_tokens(models: tuple[CausalLM, CausalLM]) -> None:
    seen: list[tuple[int, int]] = []
    compare(*models, WINDOWS, progress=lambda done, total: seen.append((done, total)))
    assert seen == [(89, 217), (178, 217), (217, 217)]
    seen.clear()
    divergence.reference(models[0], WINDOWS, progress=lambda done, total: seen.append((done, total)))
    assert seen == [(89, 217), (178, 217), (217, 217)]


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_a_logit_that_is_not_finite_is_named_by_window_token_and_entry(models: tuple[CausalLM, CausalLM], value: float) -> None:
    base, other = models

    def predictor(ids: Sequence[int]) -> Iterator[NDArray[np.float32]]:
        for number, rows in enumerate(logit_chunks(other, ids, chunk=10)):
            if list(ids) == WINDOWS[1][:-1] and number == 2:
                rows[4, 33] = value
            yield rows

    with pytest.raises(VerificationError, match=rf"^window 1: after token 24 the logit of entry 33 is {value}"):
        compare(base, predictor, WINDOWS)


def test_a_base_whose_states_or_logits_are_not_finite_is_named(models: tuple[CausalLM, CausalLM]) -> None:
    base, other = models
    broken = replace(base, norm=replace(base.norm, gain=base.norm.gain * float("nan")))
    with pytest.raises(VerificationError, match=r"^base: window 0: the state after token 0 is not finite"):
        compare(broken, other, WINDOWS)
    overflow = torch.full_like(base.norm.gain, 1e38)
    with pytest.raises(VerificationError, match=r"^base: window 0: after token 0 the logit of entry \d+ is -?(inf|nan)"):
        compare(
            replace(divergence.reference(base, WINDOWS), states=tuple(overflow.expand(len(w) - 1, -1) for w in WINDOWS)), other, WINDOWS
        )


def test_what_cannot_be_compared_is_refused_by_name(models: tuple[CausalLM, CausalLM]) -> None:
    base, other = models
    stored = divergence.reference(base, WINDOWS[:1])
    small = replace(other, config=replace(other.config, vocab_size=500))
    for call, words in (
        (lambda: compare(base, other, []), "windows: expected at least one"),
        (lambda: compare(base, other, [WINDOWS[0], [5]]), "window 1: expected at least 2 tokens, found 1"),
        (lambda: compare(base, other, [[5] * 257]), "window 0: 257 tokens exceed the model's context of 256"),
        (lambda: compare(base, other, [[5, 512]]), "window 0: expected tokens from 0 to 511, found 512"),
        (lambda: compare(base, other, [[-1, 5]]), "window 0: expected tokens from 0 to 511, found -1"),
        (lambda: compare(stored, other, WINDOWS), "windows: expected the 1 that the reference was made of"),
        (lambda: compare(base, small, WINDOWS), "vocabulary: the base has 512 entries, the model 500"),
        (lambda: compare(stored, small, WINDOWS[:1]), "vocabulary: the base has 512 entries, the model 500"),
        (lambda: compare(stored, lambda ids: [np.zeros((len(ids), 511), np.float32)], WINDOWS[:1]), "the model 511"),
        (lambda: compare(stored, lambda ids: [np.zeros((len(ids) - 1, 512), np.float32)], WINDOWS[:1]), "after 89 tokens, found 88"),
        (lambda: compare(stored, lambda ids: [np.zeros((len(ids) + 1, 512), np.float32)], WINDOWS[:1]), "after 89 tokens, found 90"),
        (lambda: compare(stored, lambda ids: [], WINDOWS[:1]), "after 89 tokens, found 0"),
    ):
        with pytest.raises(RequestError, match=words):
            call()
