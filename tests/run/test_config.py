"""A config.json is read in both spellings of transformers, and refused field by field."""

from __future__ import annotations

import json
import math
from typing import Any

import pytest
import transformers

from arctool.errors import SourceError
from arctool.run.config import ModelConfig

LLAMA: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 100,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "hidden_act": "silu",
    "rms_norm_eps": 1e-5,
    "max_position_embeddings": 128,
    "rope_theta": 10000.0,
    "tie_word_embeddings": False,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}


def read(**changes: Any) -> ModelConfig:
    return ModelConfig.from_hf({**LLAMA, **changes}, "config.json")


def refused(**changes: Any) -> str:
    with pytest.raises(SourceError) as caught:
        read(**changes)
    message = str(caught.value)
    assert "\n" not in message
    assert len(message) < 400
    assert message.startswith("config.json: ")
    return message


def test_a_plain_llama_config_is_read() -> None:
    config = read()
    assert (config.num_layers, config.num_heads, config.num_kv_heads, config.head_dim) == (3, 4, 2, 16)
    assert config.sliding_windows == (None, None, None)
    assert config.eos_token_ids == (2,)
    assert config.rope.theta == 10000.0
    assert config.rope.scaling is None


@pytest.mark.parametrize(
    "field",
    ["vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "max_position_embeddings"],
)
@pytest.mark.parametrize("value", [0, -1, 1.5, "64", True, None, [], 10**30, 2**40])
def test_every_count_must_be_a_positive_integer_of_sane_size(field: str, value: Any) -> None:
    assert field in refused(**{field: value})


@pytest.mark.parametrize("field", ["architectures", "vocab_size", "rms_norm_eps", "max_position_embeddings"])
def test_a_missing_field_is_named(field: str) -> None:
    config = {k: v for k, v in LLAMA.items() if k != field}
    with pytest.raises(SourceError, match=f"config.json: {field}: missing"):
        ModelConfig.from_hf(config, "config.json")


@pytest.mark.parametrize("value", [math.nan, math.inf, 0.0, -1e-5, "1e-5", True, 10**400])
def test_an_epsilon_that_is_no_positive_number_is_refused(value: Any) -> None:
    assert "rms_norm_eps" in refused(rms_norm_eps=value)


@pytest.mark.parametrize(
    ("changes", "field"),
    [
        ({"architectures": ["GPT2LMHeadModel"]}, "architectures"),
        ({"architectures": "LlamaForCausalLM"}, "architectures"),
        ({"architectures": []}, "architectures"),
        ({"num_key_value_heads": 3}, "num_key_value_heads"),
        ({"num_key_value_heads": 8}, "num_key_value_heads"),
        ({"num_attention_heads": 6, "num_key_value_heads": 6}, "num_attention_heads"),
        ({"head_dim": 15}, "head_dim"),
        ({"head_dim": 0}, "head_dim"),
        ({"hidden_act": "gelu"}, "hidden_act"),
        ({"tie_word_embeddings": "yes"}, "tie_word_embeddings"),
        ({"eos_token_id": 100}, "eos_token_id"),
        ({"eos_token_id": [2, -1]}, "eos_token_id"),
        ({"eos_token_id": 2.0}, "eos_token_id"),
        ({"bos_token_id": "a"}, "bos_token_id"),
        ({"sliding_window": 8}, "sliding_window"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor"),
        ({"rope_theta": math.nan}, "rope_theta"),
        ({"rope_theta": 0}, "rope_theta"),
        ({"num_experts": 8}, "num_experts"),
        ({"architectures": ["Qwen3ForCausalLM"], "num_local_experts": 2}, "num_local_experts"),
        ({"rope_scaling": {"rope_type": "longrope", "factor": 2.0}}, "rope_scaling.rope_type"),
        ({"rope_scaling": {"rope_type": 3}}, "rope_scaling.rope_type"),
        ({"rope_scaling": {"rope_type": "linear"}}, "rope_scaling.factor"),
        ({"rope_scaling": {"rope_type": "linear", "factor": math.inf}}, "rope_scaling.factor"),
        ({"rope_scaling": {"rope_type": "linear", "type": "llama3"}}, "rope_scaling.rope_type"),
        ({"rope_scaling": {**LLAMA3, "low_freq_factor": 4.0}}, "low_freq_factor"),
        ({"rope_scaling": {k: v for k, v in LLAMA3.items() if k != "high_freq_factor"}}, "high_freq_factor"),
        ({"rope_scaling": "linear"}, "rope_scaling"),
        ({"rope_parameters": {"full_attention": {"rope_type": "default"}}}, "rope_parameters"),
        ({"rope_parameters": {"rope_type": "default", "rope_theta": 5.0}}, "rope_theta"),
        (
            {"rope_parameters": {"rope_type": "linear", "factor": 2.0}, "rope_scaling": {"type": "linear", "factor": 3.0}},
            "rope_scaling",
        ),
        ({"layer_types": ["full_attention"]}, "layer_types"),
        ({"layer_types": ["full_attention"] * 2 + ["linear_attention"]}, "layer_types"),
        ({"layer_types": ["sliding_attention"] * 3}, "layer_types"),
        ({"architectures": ["MistralForCausalLM"], "attention_bias": True}, "attention_bias"),
        ({"architectures": ["Qwen3ForCausalLM"], "mlp_bias": True}, "mlp_bias"),
        ({"architectures": ["MistralForCausalLM"], "sliding_window": 0}, "sliding_window"),
    ],
)
def test_what_we_would_misread_is_refused_by_field(changes: dict[str, Any], field: str) -> None:
    assert field in refused(**changes)


def test_transformers_5_and_4_spellings_of_rope_mean_the_same() -> None:
    old = read(rope_theta=500.0, rope_scaling=LLAMA3)
    new = read(rope_theta=None, rope_parameters={**LLAMA3, "rope_theta": 500.0})
    legacy = read(rope_theta=500.0, rope_scaling={**{k: v for k, v in LLAMA3.items() if k != "rope_type"}, "type": "llama3"})
    assert old.rope == new.rope == legacy.rope
    assert old.rope.theta == 500.0
    assert old.rope.scaling is not None
    assert old.rope.scaling["factor"] == 8.0


def test_a_null_head_dim_follows_from_the_heads_except_in_qwen3() -> None:
    assert read(head_dim=None).head_dim == 16
    assert read(architectures=["Qwen3ForCausalLM"]).head_dim == transformers.Qwen3Config().head_dim == 128


EXPERTS = {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
FAMILIES = ["Llama", "Mistral", "Qwen2", "Qwen3", "Mixtral", "Qwen3Moe"]


def config_of(family: str, config: dict[str, Any]) -> dict[str, Any]:
    """The same for another family, with experts where that has them."""
    return {**config, "architectures": [f"{family}ForCausalLM"], **(EXPERTS if family in ("Mixtral", "Qwen3Moe") else {})}


def theirs_of(family: str, config: dict[str, Any]) -> Any:
    """What the configuration class of transformers makes of the same file."""
    return getattr(transformers, f"{family}Config")(**{k: v for k, v in config.items() if k != "architectures"})


@pytest.mark.parametrize("family", FAMILIES)
def test_null_key_value_heads_mean_as_many_as_queries(family: str) -> None:
    assert read(**config_of(family, {"num_key_value_heads": None})).num_kv_heads == 4


@pytest.mark.parametrize("family", FAMILIES)
def test_absent_key_value_heads_mean_what_the_class_of_transformers_says(family: str) -> None:
    config = {k: v for k, v in LLAMA.items() if k != "num_key_value_heads"}
    config = config_of(family, config | {"num_attention_heads": 64, "hidden_size": 128})
    theirs = theirs_of(family, config)
    assert ModelConfig.from_hf(config, "config.json").num_kv_heads == theirs.num_key_value_heads
    numbers = {"Llama": 64, "Mistral": 8, "Qwen2": 32, "Qwen3": 32, "Mixtral": 8, "Qwen3Moe": 4}
    assert theirs.num_key_value_heads == numbers[family]


@pytest.mark.parametrize("family", FAMILIES)
def test_an_absent_base_of_the_rotation_is_the_class_s_own(family: str) -> None:
    config = config_of(family, {k: v for k, v in LLAMA.items() if k != "rope_theta"})
    found = ModelConfig.from_hf(config, "config.json").rope.theta
    assert found == theirs_of(family, config).rope_parameters["rope_theta"] == (1e6 if family == "Mixtral" else 1e4)


@pytest.mark.parametrize("family", ["Mistral", "Qwen2", "Qwen3"])
@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"sliding_window": None},
        {"sliding_window": 7},
        {"use_sliding_window": True},
        {"use_sliding_window": True, "max_window_layers": 1},
        {"use_sliding_window": True, "sliding_window": None, "max_window_layers": 1},
    ],
    ids=str,
)
def test_an_absent_window_is_the_class_s_own_and_a_null_one_is_none(family: str, fields: dict[str, Any]) -> None:
    fields = fields if family.startswith("Qwen") else {k: v for k, v in fields.items() if k == "sliding_window"}
    config = {**LLAMA, "architectures": [f"{family}ForCausalLM"], "num_hidden_layers": 30, **fields}
    theirs = theirs_of(family, config)
    kinds = getattr(theirs, "layer_types", None) or ["sliding_attention"] * 30
    wanted = tuple(theirs.sliding_window if kind == "sliding_attention" else None for kind in kinds)
    assert ModelConfig.from_hf(config, "config.json").sliding_windows == wanted
    if family == "Mistral" and not fields:
        assert wanted == (4096,) * 30


QWEN_WINDOWS = [
    ({"use_sliding_window": False, "sliding_window": 8, "max_window_layers": 1}, (None, None, None)),
    ({"sliding_window": 8, "max_window_layers": 1}, (None, None, None)),
    ({"use_sliding_window": True, "sliding_window": 8, "max_window_layers": 1}, (None, 8, 8)),
    ({"use_sliding_window": True, "sliding_window": 8, "max_window_layers": 0}, (8, 8, 8)),
    ({"use_sliding_window": True, "sliding_window": 8, "max_window_layers": 3}, (None, None, None)),
    ({"use_sliding_window": True, "sliding_window": None, "max_window_layers": 1}, (None, None, None)),
    (
        {
            "use_sliding_window": True,
            "sliding_window": 8,
            "max_window_layers": 3,
            "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
        },
        (8, None, 8),
    ),
]


@pytest.mark.parametrize("name", ["Qwen2", "Qwen3"])
@pytest.mark.parametrize(("fields", "windows"), QWEN_WINDOWS, ids=lambda v: str(v)[:40])
def test_qwen_windows_follow_the_rule_of_transformers(name: str, fields: dict[str, Any], windows: tuple) -> None:
    config = {**LLAMA, "architectures": [f"{name}ForCausalLM"], **fields}
    assert ModelConfig.from_hf(config, "config.json").sliding_windows == windows
    theirs = getattr(transformers, f"{name}Config")(**{k: v for k, v in config.items() if k != "architectures"})
    kinds = ["full_attention" if window is None else "sliding_attention" for window in windows]
    assert theirs.layer_types == kinds


def test_qwen_windows_need_to_know_where_they_begin() -> None:
    assert "max_window_layers" in refused(
        architectures=["Qwen2ForCausalLM"], use_sliding_window=True, sliding_window=8, max_window_layers="1"
    )


def test_a_mistral_window_holds_for_every_layer() -> None:
    assert read(architectures=["MistralForCausalLM"], sliding_window=8).sliding_windows == (8, 8, 8)
    assert read(architectures=["MistralForCausalLM"], sliding_window=None).sliding_windows == (None, None, None)


@pytest.mark.parametrize(("name", "attention", "qk"), [("Llama", False, False), ("Qwen2", True, False), ("Qwen3", False, True)])
def test_biases_and_head_norms_belong_to_the_architecture(name: str, attention: bool, qk: bool) -> None:
    config = read(architectures=[f"{name}ForCausalLM"])
    assert (config.attention_bias, config.qk_norm) == (attention, qk)


def test_a_config_survives_json_as_transformers_writes_it() -> None:
    theirs = transformers.LlamaConfig(**{k: v for k, v in LLAMA.items() if k != "architectures"})
    written = json.loads(theirs.to_json_string(use_diff=False)) | {"architectures": ["LlamaForCausalLM"]}
    assert ModelConfig.from_hf(written, "config.json") == read()
