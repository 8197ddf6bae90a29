"""Layers of the real model under what they see in transformers: error feedback loses less of their output than rounding, on every one."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from arctool.bake.search.ldlq import feed_layer
from arctool.bake.search.rounding import RoundedLayer, RungTools, round_layer
from arctool.bake.source.checkpoint import open_checkpoint
from arctool.quant.codebooks import RUNGS
from arctool.quant.hadamard import Rotation

pytestmark = pytest.mark.real

LAYERS = (0, 29)
TOKENS = 2048


@pytest.fixture(scope="module")
def moments(smollm2_dir: Path, heldout_text: str) -> dict[str, tuple[NDArray[np.float32], NDArray[np.float32]]]:
    """Linear layer → (E[x xᵀ] over half of the text, E[x xᵀ] over the other half), both f32 [in, in]."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    torch.set_num_threads(1)
    model = AutoModelForCausalLM.from_pretrained(smollm2_dir, dtype=torch.float32)
    ids = AutoTokenizer.from_pretrained(smollm2_dir)(heldout_text, return_tensors="pt").input_ids[:, : 2 * TOKENS].reshape(4, -1)
    seen: dict[str, list[NDArray[np.float32]]] = {}
    for name, module in model.named_modules():
        if isinstance(module, torch.nn.Linear) and any(f"layers.{layer}." in name for layer in LAYERS):
            module.register_forward_hook(lambda _, given, __, name=name: seen.setdefault(name, []).append(given[0][0].numpy()))
    with torch.inference_mode():
        for window in ids:
            model(window[None])
    halves = {name: (np.concatenate(rows[:2]), np.concatenate(rows[2:])) for name, rows in seen.items()}
    return {name: (ours.T @ ours / len(ours), others.T @ others / len(others)) for name, (ours, others) in halves.items()}


def lost(layer: RoundedLayer, weight: NDArray[np.float32], hessian: NDArray[np.float32]) -> float:
    """tr(E H Eᵀ)/tr(W H Wᵀ) of the weights as they will be used."""
    wide = hessian.astype(np.float64)
    errors = weight.astype(np.float64) - layer.tensor.dense()
    return float(((errors @ wide) * errors).sum() / ((weight.astype(np.float64) @ wide) * weight).sum())


@pytest.mark.parametrize("name", ["qtip2-v4", "qtip4"])
def test_feedback_beats_rounding_on_every_layer_and_on_text_that_it_never_saw(
    name: str, smollm2_dir: Path, moments: dict[str, tuple[NDArray[np.float32], NDArray[np.float32]]]
) -> None:
    """Measured on layers 0, 15 and 29: 0.26 of what rounding loses at the most on its own text, 0.65 on the other."""
    tools = RungTools.of(RUNGS[name])
    gains, others = [], []
    with open_checkpoint(str(smollm2_dir)) as checkpoint, ThreadPoolExecutor(2) as pool:
        for spec in checkpoint.specs:
            if spec.key not in moments:
                continue
            hessian, other = moments[spec.key]
            # Rows are searched independently: a part of them is enough, and keeps this in seconds.
            rows = np.ascontiguousarray(checkpoint.tensor(spec.name)[::3])
            rotation = Rotation.seeded(0, spec.key, *rows.shape)
            rounded = round_layer(rows, spec.key, tools, rotation, pool)
            fed = feed_layer(rows, hessian, spec.key, tools, rotation, pool)
            assert fed.note is None, spec.key
            gains.append(lost(fed, rows, hessian) / lost(rounded, rows, hessian))
            others.append(lost(fed, rows, other) / lost(rounded, rows, other))
    assert len(gains) == 7 * len(LAYERS)
    assert max(gains) < 0.3
    assert max(others) < 0.7
