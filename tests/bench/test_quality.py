"""The quality table's arithmetic: a model against itself, and perplexity against the engine's own definition."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from arctool.bake.checkpoint import open_checkpoint
from arctool.bake.pipeline import bake_in_memory
from arctool.bake.recipe import Recipe
from arctool.bench.quality import log_softmax, measure
from arctool.kernels.registry import default_registry
from arctool.run.evaluate import perplexity
from arctool.run.tokenizer import Tokenizer
from arctool.run.weights import load_model


def test_a_model_diverges_from_itself_by_nothing_and_from_a_quantised_twin_by_something(tiny_llama: Path, heldout_text: str) -> None:
    with open_checkpoint(str(tiny_llama)) as checkpoint:
        same, fine, coarse = measure(checkpoint, heldout_text[:2000], ["bf16", "qtip4", "qtip2-v4"], window=64, windows=3)
        ids = Tokenizer(checkpoint.assets, checkpoint.config.vocab_size).encode(heldout_text[:2000], add_special_tokens=False)[: 3 * 64]
        model = load_model(bake_in_memory(checkpoint, Recipe.uniform("bf16")), default_registry())
    assert (same.kl, same.same_top1, same.bits, same.tokens) == (0.0, 1.0, 16.0, 3 * 63)
    assert same.perplexity == pytest.approx(perplexity(model, ids, window=64), rel=1e-6)
    assert 0 < fine.kl < coarse.kl
    assert 4 < fine.bits < 5


def test_log_probabilities_sum_to_one_even_for_large_logits() -> None:
    rows = np.array([[1000.0, 1000.0, -1000.0], [0.0, 1.0, 2.0]], np.float32)
    np.testing.assert_allclose(np.exp(log_softmax(rows)).sum(axis=1), 1.0, rtol=1e-12)
    assert log_softmax(rows)[0, 0] == pytest.approx(np.log(0.5))
