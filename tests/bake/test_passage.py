"""A model read layer by layer says what the engine says, whatever windows share a batch."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import torch
from small_text import SMALL

from arctool.bake.budget.passage import Passage, final_states, linear_keys, swapped
from arctool.bake.source.checkpoint import open_checkpoint
from arctool.kernels.registry import default_registry
from arctool.quant.tensor import DenseTensor
from arctool.run.evaluate import head_logits, logits
from arctool.run.weights import load_model


def test_the_logits_are_the_engines_for_every_architecture(tiny_checkpoint: Path) -> None:
    said: list[str] = []
    windows = SMALL.measured + SMALL.checked
    with open_checkpoint(str(tiny_checkpoint)) as checkpoint, ThreadPoolExecutor(2) as pool:
        states, head = final_states(checkpoint, windows, pool, said.append)
        model = load_model(checkpoint, default_registry())
        layers = checkpoint.config.num_layers
    assert said == [f"layer {i + 1} of {layers}" for i in range(layers)]
    for window, own in zip(windows, states, strict=True):
        expected = logits(model, window)
        assert expected.std() > 0.5
        np.testing.assert_allclose(head_logits(head, own), expected, atol=1e-4 * float(np.abs(expected).max()))


def test_windows_in_one_batch_do_not_see_each_other(tiny_checkpoint: Path) -> None:
    with open_checkpoint(str(tiny_checkpoint)) as checkpoint:
        passage = Passage(checkpoint)
        together = passage.laid_out(SMALL.measured)
        states = passage.embedded(together)
        apart = [passage.laid_out([window]) for window in SMALL.measured]
        separate = [passage.embedded(batch) for batch in apart]
        for layer in range(passage.layers):
            block = passage.block(layer)
            states = passage.through(block, states, together)
            separate = [passage.through(block, one, batch) for one, batch in zip(separate, apart, strict=True)]
    np.testing.assert_allclose(states.numpy(), torch.cat(separate).numpy(), rtol=1e-4, atol=1e-4)


def test_a_swap_replaces_the_named_layers_and_no_others(tiny_llama: Path) -> None:
    with open_checkpoint(str(tiny_llama)) as checkpoint:
        passage = Passage(checkpoint)
        block = passage.block(1)
        keys = linear_keys(block)
        assert keys == tuple(spec.key for spec in checkpoint.specs if spec.layer == 1 and spec.key.endswith("proj"))
        other = passage.linear(keys[2], DenseTensor(np.zeros((32, 64), np.float32)))
        changed = swapped(block, {keys[2]: other})
    assert changed.attention.v is other
    assert (changed.attention.q, changed.attention.k, changed.attention.o) == (block.attention.q, block.attention.k, block.attention.o)
    assert (changed.mlp, changed.attention_norm, changed.mlp_norm) == (block.mlp, block.attention_norm, block.mlp_norm)
    assert block.attention.v is not other
