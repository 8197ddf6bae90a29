"""Log-probabilities and perplexity against their definitions and transformers."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest
import torch
from tiny_models import DirectorySource, Reference, random_ids

from arctool.errors import RequestError, VerificationError
from arctool.kernels.registry import Registry
from arctool.run import evaluate
from arctool.run.weights import load_model


def theirs(expected: Reference, ids: list[int]) -> np.ndarray:
    """ln p of every token but the first, by torch in f64."""
    table = torch.log_softmax(torch.tensor(expected.logits(ids)).double(), -1)
    return np.array([float(table[i, token]) for i, token in enumerate(ids[1:])])


def test_token_log_probabilities_are_those_of_transformers(tiny: DirectorySource, expected: Reference, registry: Registry) -> None:
    ids = random_ids(1, 200)
    mine = evaluate.token_logprobs(load_model(tiny, registry), ids)
    assert mine.shape == (199,)
    np.testing.assert_allclose(mine, theirs(expected, ids), atol=2e-4)


def test_perplexity_reads_windows_that_do_not_overlap(tiny: DirectorySource, expected: Reference, registry: Registry) -> None:
    ids = random_ids(2, 121)
    windows = [ids[:50], ids[50:100], ids[100:]]
    scores = np.concatenate([theirs(expected, window) for window in windows])
    assert evaluate.perplexity(load_model(tiny, registry), ids, window=50) == pytest.approx(math.exp(-scores.mean()), rel=1e-4)
    # A last window of one token has nothing to predict.
    scores = np.concatenate([theirs(expected, ids[:60]), theirs(expected, ids[60:120])])
    assert evaluate.perplexity(load_model(tiny, registry), ids, window=60) == pytest.approx(math.exp(-scores.mean()), rel=1e-4)


def test_logits_do_not_depend_on_the_chunk(llama: DirectorySource, registry: Registry) -> None:
    model, ids = load_model(llama, registry), random_ids(3, 130)
    assert np.array_equal(evaluate.logits(model, ids, chunk=130), evaluate.logits(model, ids, chunk=9))


@pytest.mark.parametrize(("count", "window"), [(1, 10), (0, 10), (10, 1)])
def test_nothing_to_predict_is_refused(llama: DirectorySource, registry: Registry, count: int, window: int) -> None:
    with pytest.raises(RequestError, match=r"^perplexity: "):
        evaluate.perplexity(load_model(llama, registry), [5] * count, window)


def test_a_window_past_the_context_is_refused(llama: DirectorySource, registry: Registry) -> None:
    with pytest.raises(RequestError, match="257 tokens exceed the model's context of 256"):
        evaluate.logits(load_model(llama, registry), [5] * 257)


@pytest.mark.parametrize("token", [-1, 512])
def test_a_token_out_of_the_vocabulary_is_refused(llama: DirectorySource, registry: Registry, token: int) -> None:
    with pytest.raises(RequestError, match=f"expected tokens from 0 to 511, found {token}"):
        evaluate.logits(load_model(llama, registry), [5, token])


def test_windows_are_cut_one_after_the_other_and_each_may_have_an_opening() -> None:
    ids = list(range(10, 20))
    assert evaluate.cut_windows(ids, 4) == ((10, 11, 12, 13), (14, 15, 16, 17), (18, 19))
    assert evaluate.cut_windows(ids, 3) == ((10, 11, 12), (13, 14, 15), (16, 17, 18))
    assert evaluate.cut_windows(ids, 4, [1]) == ((1, 10, 11, 12), (1, 13, 14, 15), (1, 16, 17, 18), (1, 19))
    assert evaluate.cut_windows([7], 4, [1]) == ((1, 7),)
    for tokens, window, opening in ((ids, 1, []), ([7], 4, []), ([], 4, [1, 2]), (ids, 2, [1, 2])):
        with pytest.raises(RequestError, match="expected at least 2 tokens and windows of at least"):
            evaluate.cut_windows(tokens, window, opening)


def test_a_logit_that_is_not_finite_is_named(llama: DirectorySource, registry: Registry) -> None:
    model = load_model(llama, registry)
    loud = replace(model, norm=replace(model.norm, gain=model.norm.gain * 1e38))
    with pytest.raises(VerificationError, match=r"^ids: after token 0 the logit of entry \d+ is -?inf"):
        evaluate.token_logprobs(loud, random_ids(1, 20))
