"""Rotary scalings: read in both spellings, refused by field, and the angles, tables and factors of transformers."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from test_config import LLAMA, LLAMA3, read, refused
from tiny_models import DEEPSEEK_YARN_ROPE, DYNAMIC_ROPE, LINEAR_ROPE, LLAMA3_ROPE, YARN_ROPE, DirectorySource, make_variant, random_ids
from tiny_models import reference as theirs
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from arctool.errors import UsageError
from arctool.run.config import ModelConfig
from arctool.run.kv.cache import plan_cache
from arctool.run.layers.rope import RopeTable

YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32}
ROPES: dict[str, dict[str, Any]] = {
    "default": {"rope_type": "default", "rope_theta": 500.0},
    "linear": LINEAR_ROPE,
    "dynamic": DYNAMIC_ROPE,
    "dynamic-of-no-round-factor": {**DYNAMIC_ROPE, "factor": 1.3},
    "llama3": LLAMA3_ROPE,
    "llama3-of-the-whole-context": {k: v for k, v in LLAMA3_ROPE.items() if k != "original_max_position_embeddings"},
    "yarn": YARN_ROPE,
    "yarn-of-the-whole-context": {k: v for k, v in YARN_ROPE.items() if k != "original_max_position_embeddings"},
    "yarn-without-a-number": {**YARN_ROPE, "factor": None},
    "yarn-shorter": {**YARN_ROPE, "factor": 0.5},
    "yarn-attention": {**YARN_ROPE, "attention_factor": 0.7},
    "yarn-attention-before-mscale": {**DEEPSEEK_YARN_ROPE, "attention_factor": 1.5},
    "yarn-betas": {**YARN_ROPE, "beta_fast": 4, "beta_slow": 2.5},
    "yarn-untruncated": {**YARN_ROPE, "truncate": False},
    "yarn-truncated": {**YARN_ROPE, "truncate": True},
    "yarn-one-mscale": {**YARN_ROPE, "mscale": 0.5},
    "yarn-no-mscale-all-dim": {**YARN_ROPE, "mscale": 0.5, "mscale_all_dim": 0},
    "yarn-deepseek": DEEPSEEK_YARN_ROPE,
    "yarn-of-a-tiny-base": {**YARN_ROPE, "rope_theta": 3.0},
    "yarn-where-the-ramp-has-no-width": {**YARN_ROPE, "original_max_position_embeddings": 1},
    "yarn-as-its-authors-wrote-it": {**YARN_ROPE, "finetuned": True},
}


def theirs_at(rope: dict[str, Any], positions: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """cos and sin f32 [positions, 16] of transformers."""
    config = transformers.LlamaConfig(hidden_size=128, num_attention_heads=4, max_position_embeddings=3000, rope_parameters=dict(rope))
    cos, sin = LlamaRotaryEmbedding(config)(torch.zeros(1, 1, 1), positions[None])
    return cos[0, :, :16], sin[0, :, :16]


@pytest.mark.parametrize("name", ROPES)
def test_the_tables_are_those_of_transformers_up_to_the_whole_context(name: str) -> None:
    positions = torch.arange(0, 3000, 13)
    config = read(max_position_embeddings=3000, rope_theta=None, rope_parameters=ROPES[name])
    table = RopeTable(config.rope, 32)
    table.reserve(3000)
    cos, sin = (found[:, 0] for found in table.at(positions))
    for found, wanted in zip((cos, sin), theirs_at(ROPES[name], positions), strict=True):
        # An ulp of an inverse frequency moves the angle of position 3000 by two hundred-thousandths.
        np.testing.assert_allclose(found.numpy(), wanted.numpy(), atol=1e-4 * config.rope.attention_factor)
        np.testing.assert_allclose(found[:4].numpy(), wanted[:4].numpy(), atol=1e-6)


def test_no_two_of_these_scalings_have_the_same_tables_unless_they_mean_the_same() -> None:
    """Else a field that is not read would go unseen above."""
    same = [
        {"dynamic", "dynamic-of-no-round-factor"},
        {"yarn", "yarn-truncated", "yarn-one-mscale", "yarn-no-mscale-all-dim", "yarn-as-its-authors-wrote-it"},
    ]
    tables = {name: torch.cat(theirs_at(rope, torch.arange(50)), -1) for name, rope in ROPES.items()}
    for one in ROPES:
        for other in ROPES:
            if one < other and not any({one, other} <= group for group in same):
                assert (tables[one] - tables[other]).abs().max() > 1e-3, (one, other)


def test_both_spellings_of_transformers_mean_the_same() -> None:
    new = read(rope_theta=None, rope_parameters={**YARN, "rope_theta": 500.0})
    old = read(rope_theta=500.0, rope_scaling=YARN)
    legacy = read(rope_theta=500.0, rope_scaling={"type": "yarn", "factor": 4.0}, original_max_position_embeddings=32)
    assert new.rope == old.rope == legacy.rope
    assert new.rope.attention_factor == pytest.approx(0.1 * np.log(4.0) + 1)
    for kind in ("linear", "dynamic"):
        assert read(rope_scaling={"type": kind, "factor": 2}).rope == read(rope_parameters={"rope_type": kind, "factor": 2.0}).rope


def test_what_transformers_writes_is_what_we_read() -> None:
    for rope in ROPES.values():
        written = json.loads(transformers.LlamaConfig(**LLAMA_FIELDS, rope_parameters=dict(rope)).to_json_string(use_diff=False))
        again = ModelConfig.from_hf(written | {"architectures": ["LlamaForCausalLM"]}, "config.json")
        assert again.rope == read(rope_theta=None, rope_parameters=rope).rope


LLAMA_FIELDS = {k: v for k, v in LLAMA.items() if k not in ("architectures", "rope_theta")}


@pytest.mark.parametrize(
    ("scaling", "field"),
    [
        ({"rope_type": "longrope", "factor": 4.0, "long_factor": [1.0], "short_factor": [1.0]}, "rope_scaling.rope_type"),
        ({"rope_type": "proportional", "factor": 4.0}, "rope_scaling.rope_type"),
        ({"rope_type": "YARN", "factor": 4.0}, "rope_scaling.rope_type"),
        ({"rope_type": "mrope", "mrope_section": [16, 24, 24]}, "rope_scaling.rope_type"),
        ({"type": "default", "mrope_section": [16, 24, 24]}, "rope_scaling.mrope_section"),
        ({"rope_type": "dynamic", "factor": 2.0, "alpha": 1000.0}, "rope_scaling.alpha"),
        ({"rope_type": "linear", "factor": 2.0, "short_factor": [1.0]}, "rope_scaling.short_factor"),
        ({"rope_type": "dynamic"}, "rope_scaling.factor"),
        ({"rope_type": "dynamic", "factor": 0}, "rope_scaling.factor"),
        ({"rope_type": "yarn"}, "rope_scaling.factor"),
        ({**YARN, "factor": "4"}, "rope_scaling.factor"),
        ({**YARN, "original_max_position_embeddings": 32.0}, "rope_scaling.original_max_position_embeddings"),
        ({**LLAMA3, "original_max_position_embeddings": 0}, "rope_scaling.original_max_position_embeddings"),
        ({**YARN, "attention_factor": 0}, "rope_scaling.attention_factor"),
        ({**YARN, "mscale": "a", "mscale_all_dim": 1}, "rope_scaling.mscale"),
        ({**YARN, "mscale": False, "mscale_all_dim": 1}, "rope_scaling.mscale"),
        ({**YARN, "mscale_all_dim": -1}, "rope_scaling.mscale_all_dim"),
        ({**YARN, "beta_fast": 0}, "rope_scaling.beta_fast"),
        ({**YARN, "beta_slow": -1.0}, "rope_scaling.beta_slow"),
        ({**YARN, "beta_fast": 1, "beta_slow": 2}, "rope_scaling.beta_fast"),
        ({**YARN, "truncate": None}, "rope_scaling.truncate"),
        ({**YARN, "truncate": 1}, "rope_scaling.truncate"),
    ],
    ids=str,
)
def test_what_we_would_misread_is_refused_by_field(scaling: dict[str, Any], field: str) -> None:
    assert f"{field}: " in refused(rope_scaling=scaling)


def test_two_original_contexts_that_disagree_are_refused_and_a_base_of_one_has_no_ramp() -> None:
    assert "original_max_position_embeddings: disagrees" in refused(rope_scaling=YARN, original_max_position_embeddings=64)
    assert "rope_theta: expected more than 1" in refused(rope_scaling=YARN, rope_theta=1.0)


def test_a_context_beyond_the_original_one_of_dynamic_scaling_is_refused_and_says_why(llama: DirectorySource) -> None:
    config = read(rope_scaling={"rope_type": "dynamic", "factor": 2.0})
    assert plan_cache(config).max_model_len == plan_cache(config, max_model_len=128).max_model_len == 128
    with pytest.raises(
        UsageError, match=r"max_model_len: expected 2 to .* = 128, found 129: beyond it dynamic rope scaling turns the keys"
    ):
        plan_cache(config, max_model_len=129)
    with pytest.raises(UsageError, match=r"= 256, found 257$"):
        plan_cache(llama.config, max_model_len=257)


def test_beyond_its_context_transformers_itself_has_no_one_answer_for_dynamic_scaling(tmp_path: Path) -> None:
    """Why we refuse: the same tokens in one pass and token by token have other logits there, and the same ones before."""
    model = theirs(make_variant("llama-dynamic-rope", tmp_path)).model
    ids = torch.tensor([random_ids(1, 290)])

    def stepwise(count: int) -> torch.Tensor:
        cache = transformers.DynamicCache(config=model.config)
        parts = [model(ids[:, :200], cache=cache, use_cache=True).logits]
        for at in range(200, count):
            parts.append(model(ids[:, at : at + 1], cache=cache, use_cache=True).logits)
        return torch.cat(parts, 1)

    with torch.no_grad():
        within = (stepwise(256) - model(ids[:, :256]).logits).abs().max()
        beyond = (stepwise(290) - model(ids).logits).abs().max()
    assert within < 1e-3
    assert beyond > 0.1
