"""Tiny models for the engine's tests: a directory as a WeightSource, variants made by transformers, and its answers to compare with."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from numpy.typing import NDArray
from safetensors.numpy import load_file

from arctool.quant.tensor import DenseTensor
from arctool.run.config import ModelConfig

BASE: dict[str, Any] = {
    "vocab_size": 512,
    "hidden_size": 48,
    "intermediate_size": 100,
    "num_hidden_layers": 3,
    "num_attention_heads": 6,
    "num_key_value_heads": 3,
    "max_position_embeddings": 256,
    "initializer_range": 0.25,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 500.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
LINEAR_ROPE = {"rope_type": "linear", "rope_theta": 10000.0, "factor": 4.0}
DYNAMIC_ROPE = {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 3.0}
YARN_ROPE = {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0, "original_max_position_embeddings": 64}
"""With head widths of 8 to 24 its ramp lies over some of the pairs, so that all three kinds of pair are there."""
DEEPSEEK_YARN_ROPE = {**YARN_ROPE, "mscale": 0.7, "mscale_all_dim": 1.4, "beta_fast": 8, "beta_slow": 0.5, "truncate": False}

MIXTRAL = {"num_local_experts": 4, "num_experts_per_tok": 2}
QWEN3_MOE = {"num_experts": 8, "num_experts_per_tok": 3, "moe_intermediate_size": 20, "norm_topk_prob": True, "head_dim": 24}

# Every branch of the config readers and the layers that the committed checkpoints do not take.
VARIANTS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama-tied-llama3-rope": ("Llama", {"tie_word_embeddings": True, "rope_parameters": LLAMA3_ROPE}),
    "llama-linear-rope-wide-heads": ("Llama", {"rope_parameters": LINEAR_ROPE, "head_dim": 20}),
    "llama-biases": ("Llama", {"attention_bias": True, "mlp_bias": True, "num_key_value_heads": 6}),
    "llama-dynamic-rope": ("Llama", {"rope_parameters": DYNAMIC_ROPE}),
    "llama-yarn-rope": ("Llama", {"rope_parameters": YARN_ROPE}),
    "qwen3-deepseek-yarn-rope": ("Qwen3", {"rope_parameters": DEEPSEEK_YARN_ROPE, "head_dim": 24}),
    "mistral-no-window": ("Mistral", {"sliding_window": None}),
    "mistral-window-3": ("Mistral", {"sliding_window": 3}),
    "qwen2-window-on": ("Qwen2", {"use_sliding_window": True, "sliding_window": 9, "max_window_layers": 1}),
    "qwen2-one-head": ("Qwen2", {"num_attention_heads": 4, "num_key_value_heads": 1}),
    "qwen3-window-bias-tied": (
        "Qwen3",
        {
            "use_sliding_window": True,
            "sliding_window": 65,
            "max_window_layers": 2,
            "attention_bias": True,
            "tie_word_embeddings": True,
            "head_dim": 24,
        },
    ),
    "mixtral-window-5-tied": ("Mixtral", {**MIXTRAL, "sliding_window": 5, "tie_word_embeddings": True}),
    "mixtral-all-of-3-yarn": (
        "Mixtral",
        {**MIXTRAL, "num_local_experts": 3, "num_experts_per_tok": 3, "head_dim": 8, "rope_parameters": YARN_ROPE},
    ),
    "qwen3-moe-unnormalised-some-dense": ("Qwen3Moe", {**QWEN3_MOE, "norm_topk_prob": False, "mlp_only_layers": [1]}),
    "qwen3-moe-every-second-window-bias": (
        "Qwen3Moe",
        {**QWEN3_MOE, "decoder_sparse_step": 2, "use_sliding_window": True, "sliding_window": 9, "attention_bias": True},
    ),
    "qwen3-moe-one-expert-tied": ("Qwen3Moe", {**QWEN3_MOE, "num_experts_per_tok": 1, "tie_word_embeddings": True}),
}


class DirectorySource:
    """A Hugging Face directory with one safetensors file, as a WeightSource."""

    def __init__(self, directory: Path) -> None:
        self.tensors = load_file(directory / "model.safetensors")
        self.config = ModelConfig.from_hf(json.loads((directory / "config.json").read_text()), "config.json")
        files = [p for p in directory.iterdir() if p.suffix in (".json", ".jinja")]
        self.assets = {p.name: p.read_bytes() for p in files}

    def weight(self, key: str) -> DenseTensor:
        return DenseTensor(self.tensors[f"{key}.weight"])

    def bias(self, key: str) -> NDArray[np.float32] | None:
        return self.tensors.get(f"{key}.bias")


def make_variant(name: str, directory: Path) -> Path:
    """Write variant `name` as transformers writes it, with random biases and norms that are not one."""
    family, changes = VARIANTS[name]
    config = getattr(transformers, f"{family}Config")(**{**BASE, **changes})
    torch.manual_seed(sum(name.encode()))
    model = getattr(transformers, f"{family}ForCausalLM")(config)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim == 1:
                parameter.add_(torch.randn_like(parameter) * 0.3)
    model.save_pretrained(directory)
    return directory


@dataclass(frozen=True)
class Reference:
    """A model in transformers, f32."""

    model: Any

    def logits(self, ids: list[int]) -> NDArray[np.float32]:
        with torch.no_grad():
            return np.asarray(self.model(torch.tensor([ids])).logits[0].numpy())

    def greedy(self, ids: list[int], count: int) -> list[int]:
        """`count` greedy tokens; the end token does not end them."""
        prompt = torch.tensor([ids])
        mask = torch.ones_like(prompt)
        out = self.model.generate(
            prompt, attention_mask=mask, max_new_tokens=count, min_new_tokens=count, do_sample=False, eos_token_id=None
        )
        return [int(token) for token in out[0][len(ids) :]]


def reference(directory: Path) -> Reference:
    model = transformers.AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32)
    return Reference(model.eval())


def random_ids(seed: int, count: int, vocab: int = 512) -> list[int]:
    """Token ids above the special ones."""
    return [int(i) for i in np.random.default_rng(seed).integers(3, vocab, count)]
