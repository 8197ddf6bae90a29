"""The artifact loaded back computes what the bake in memory computes, bit for bit, for every architecture; and what that is worth."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from arctool.bake.pipeline import bake, bake_in_memory
from arctool.bake.recipe import Recipe
from arctool.bake.source.checkpoint import open_checkpoint
from arctool.kernels.registry import default_registry
from arctool.run.evaluate import logits
from arctool.run.llm import LLM, ArtifactSource
from arctool.run.sampling.params import SamplingParams
from arctool.run.weights import WeightSource, load_model
from arctool.uqff.container import open_artifact

IDS = [1, 77, 300, 5, 5, 211, 499, 38, 150, 400, 12, 260, 91, 333, 7, 64, 180, 222, 45, 310]


def logits_of(source: WeightSource, ids: list[int]) -> np.ndarray:
    return logits(load_model(source, default_registry()), ids)


@pytest.mark.parametrize("rung", ["qtip4", "qtip2-v4", "qtip3b"])
def test_the_artifact_gives_the_logits_of_the_bake_in_memory_bit_for_bit(tiny_checkpoint: Path, tmp_path: Path, rung: str) -> None:
    recipe = Recipe.uniform(rung)
    with open_checkpoint(str(tiny_checkpoint)) as checkpoint:
        bake(checkpoint, tmp_path / "a", recipe, seed=5, jobs=2)
        memory = bake_in_memory(checkpoint, recipe, seed=5, jobs=1)
        other = bake_in_memory(checkpoint, recipe, seed=6)
        with open_artifact(tmp_path / "a") as artifact:
            stored = logits_of(ArtifactSource(artifact), IDS)
        assert stored.tobytes() == logits_of(memory, IDS).tobytes()
        # Guards: the weights were changed by the bake, by the seed, and no two positions are alike.
        original = logits_of(checkpoint, IDS)
        assert np.abs(stored - original).max() > 0.01
        assert np.abs(stored - logits_of(other, IDS)).max() > 0.01
        assert len({row.tobytes() for row in stored}) == len(IDS)


def test_generated_tokens_are_the_same_from_file_and_memory(tiny_checkpoint: Path, tmp_path: Path) -> None:
    recipe, params = Recipe.uniform("qtip4"), SamplingParams(temperature=0, max_tokens=24, ignore_eos=True)
    with open_checkpoint(str(tiny_checkpoint)) as checkpoint:
        bake(checkpoint, tmp_path / "a", recipe)
        memory = bake_in_memory(checkpoint, recipe)
    stored = LLM(tmp_path / "a").generate([IDS], params)[0].token_ids
    assert stored == LLM(memory).generate([IDS], params)[0].token_ids
    assert len(set(stored)) >= 4
