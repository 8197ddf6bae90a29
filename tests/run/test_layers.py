"""Layers against their formulas in f64, and row by row: no row's bits may depend on how many rows there are or where it stands."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import torch
from tiny_models import LINEAR_ROPE, LLAMA3_ROPE
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from arctool.run.layers.attention import attend
from arctool.run.layers.mlp import silu
from arctool.run.layers.rmsnorm import RMSNorm
from arctool.run.layers.rope import RopeTable, rotate
from arctool.run.rope_config import RopeConfig
from arctool.run.step import Span, build_step

WIDTHS = [4, 20, 36, 64, 100, 576, 1001]


def _norm(width: int) -> RMSNorm:
    return RMSNorm(torch.linspace(0.5, 2, width), 1e-5)


@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("layer", [lambda x: _norm(x.shape[-1])(x), silu], ids=["rmsnorm", "silu"])
def test_a_row_s_bits_do_not_depend_on_the_batch(layer: Callable[[torch.Tensor], torch.Tensor], width: int) -> None:
    x = torch.randn(67, width, generator=torch.Generator().manual_seed(width)) * 3
    whole = layer(x)
    for start in range(0, 60, 7):
        for count in (1, 2, 3, 5, 7):
            assert torch.equal(layer(x[start : start + count].clone()), whole[start : start + count])


@pytest.mark.parametrize("threads", [1, 2], indirect=True)
@pytest.mark.parametrize("width", [16384, 16385, 32768, 40000, 65536])
@pytest.mark.parametrize("layer", [lambda x: _norm(x.shape[-1])(x), silu], ids=["rmsnorm", "silu"])
def test_a_wide_row_s_bits_do_not_depend_on_the_batch_or_the_threads(
    layer: Callable[[torch.Tensor], torch.Tensor], width: int, threads: int
) -> None:
    x = torch.randn(5, width, generator=torch.Generator().manual_seed(width)) * 3
    whole = layer(x)
    for row in range(5):
        assert torch.equal(layer(x[row : row + 1].clone()), whole[row : row + 1])
    torch.set_num_threads(1)
    assert torch.equal(layer(x), whole)


def test_the_norm_is_its_formula() -> None:
    x = torch.randn(9, 48, generator=torch.Generator().manual_seed(1))
    wide = x.double().numpy()
    wanted = wide / np.sqrt((wide**2).mean(-1, keepdims=True) + 1e-5) * np.linspace(0.5, 2, 48)
    np.testing.assert_allclose(_norm(48)(x).numpy(), wanted, rtol=1e-6)


def test_silu_is_its_formula_from_end_to_end() -> None:
    x = torch.tensor([-1e4, -100.0, -20.0, -1.0, -0.0, 0.0, 1e-30, 1.0, 20.0, 100.0, 1e4])
    np.testing.assert_allclose(silu(x).numpy(), torch.nn.functional.silu(x.double()).numpy(), rtol=1e-6, atol=1e-37)


@pytest.mark.parametrize("scaling", [{"rope_type": "default", "rope_theta": 500.0}, LINEAR_ROPE, LLAMA3_ROPE], ids=lambda s: s["rope_type"])
def test_rotation_is_that_of_transformers_at_every_position(scaling: dict) -> None:
    theirs = LlamaRotaryEmbedding(LlamaConfig(hidden_size=64, num_attention_heads=4, rope_parameters=scaling))
    positions = torch.arange(0, 3000, 7)
    cos, sin = theirs(torch.zeros(1, 1, 1), positions[None])
    x = torch.randn(len(positions), 3, 16, generator=torch.Generator().manual_seed(2))
    turned = torch.cat((-x[..., 8:], x[..., :8]), -1)
    plain = {k: v for k, v in scaling.items() if k != "rope_theta"}
    table = RopeTable(RopeConfig(scaling["rope_theta"], None if scaling["rope_type"] == "default" else plain), 16)
    table.reserve(3000)
    wanted = x * cos[0, :, None] + turned * sin[0, :, None]
    np.testing.assert_allclose(rotate(x, table.at(positions)).numpy(), wanted.numpy(), atol=2e-5)


def test_a_rotary_table_s_bits_do_not_depend_on_its_length() -> None:
    whole, grown = (RopeTable(RopeConfig(10000.0, None), 20) for _ in range(2))
    whole.reserve(5000)
    for length in (1, 700, 1500, 1500, 5000):
        grown.reserve(length)
        positions = torch.arange(length)
        for a, b in zip(grown.at(positions), whole.at(positions), strict=True):
            assert torch.equal(a, b)


def _naive(q: np.ndarray, k: np.ndarray, v: np.ndarray, first: int, window: int | None) -> np.ndarray:
    """Attention in f64, query by query, head by head. q: [n, heads, d] at positions first ...; k, v: [context, groups, d]."""
    out = np.zeros(q.shape)
    share = q.shape[1] // k.shape[1]
    for i, position in enumerate(range(first, first + len(q))):
        oldest = 0 if window is None else max(0, position - window + 1)
        for head in range(q.shape[1]):
            keys, values = (t[oldest : position + 1, head // share].astype(np.float64) for t in (k, v))
            scores = keys @ q[i, head].astype(np.float64) / np.sqrt(q.shape[2])
            weights = np.exp(scores - scores.max())
            out[i, head] = weights @ values / weights.sum()
    return out


@pytest.mark.parametrize("window", [None, 1, 5, 63, 64, 65, 128])
def test_attention_is_its_formula_for_every_window(window: int | None) -> None:
    generator = torch.Generator().manual_seed(3)
    k, v = (torch.randn(331, 2, 16, generator=generator) for _ in range(2))
    q = torch.randn(331, 4, 16, generator=generator)
    lengths = [200, 1, 130]
    step = build_step([Span([0] * n, 0, range(30), 0) for n in lengths], 16)
    got = attend(q, k, v, step, window).numpy()
    for start, n in zip(step.starts, lengths, strict=True):
        rows = slice(start, start + n)
        np.testing.assert_allclose(got[rows], _naive(q[rows].numpy(), k[rows].numpy(), v[rows].numpy(), 0, window), atol=2e-6)


def test_layers_refuse_a_span_that_goes_on_where_another_step_ended() -> None:
    x = torch.zeros(3, 1, 4)
    with pytest.raises(ValueError, match="begins at position 2"):
        attend(x, x, x, build_step([Span([0] * 3, 2, [0], 0)], 16), None)


def test_a_step_lays_sequences_out_without_padding() -> None:
    step = build_step([Span([10, 11, 12], 2, [7, 3], 1), Span([20], 0, [5], 0), Span([30], 9, [1, 0, 6], 1)], block_size=4)
    assert step.starts == (0, 3, 4)
    assert step.ids.tolist() == [10, 11, 12, 20, 30]
    assert step.positions.tolist() == [2, 3, 4, 0, 9]
    assert step.slots.tolist() == [7 * 4 + 2, 7 * 4 + 3, 3 * 4 + 0, 5 * 4, 6 * 4 + 1]
    assert step.logit_rows.tolist() == [2, 4]
