"""Random checkpoints for mistral.rs to quantise: a Llama that every type's blocks fit, and a mixture of experts."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import save_file

HIDDEN, EXPERT, EXPERTS, LAYERS, HEADS, HEAD_DIM = 64, 96, 4, 2, 4, 16
PARTS = {"gate_proj": (EXPERT, HIDDEN), "up_proj": (EXPERT, HIDDEN), "down_proj": (HIDDEN, EXPERT)}

COMMON: dict[str, Any] = {
    "num_key_value_heads": 2,
    "hidden_act": "silu",
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000.0,
    "max_position_embeddings": 256,
    "attention_bias": False,
    "tie_word_embeddings": False,
    "torch_dtype": "float32",
}


class Maker:
    """Tensors drawn one after the other from one generator: norms about 1, weights of standard deviation a quarter."""

    def __init__(self, seed: int) -> None:
        self.tensors: dict[str, np.ndarray] = {}
        self._generator = np.random.default_rng(seed)

    def put(self, name: str, *shape: int) -> None:
        values = self._generator.standard_normal(shape).astype(np.float32)
        self.tensors[f"{name}.weight"] = 1 + values / 10 if len(shape) == 1 else values / 4

    def write(self, directory: Path, tokenizer_from: Path, config: dict[str, Any]) -> None:
        """The checkpoint, with the tokenizer of another one."""
        directory.mkdir()
        save_file(self.tensors, directory / "model.safetensors")
        for name in ("tokenizer.json", "tokenizer_config.json", "generation_config.json"):
            shutil.copy(tokenizer_from / name, directory / name)
        source = json.loads((tokenizer_from / "config.json").read_text())
        kept = {name: source[name] for name in ("vocab_size", "bos_token_id", "eos_token_id") if name in source}
        (directory / "config.json").write_text(json.dumps({**COMMON, **kept, **config}))


def vocabulary(tokenizer_from: Path) -> int:
    return int(json.loads((tokenizer_from / "config.json").read_text())["vocab_size"])


def wide_llama(directory: Path, tokenizer_from: Path) -> Path:
    """One Llama layer of width 256."""
    maker, width = Maker(3), 256
    maker.put("model.embed_tokens", vocabulary(tokenizer_from), width)
    at = "model.layers.0"
    for name, rows in (("q", width), ("k", width // 2), ("v", width // 2), ("o", width)):
        maker.put(f"{at}.self_attn.{name}_proj", rows, width)
    for name, shape in (("gate", (512, width)), ("up", (512, width)), ("down", (width, 512))):
        maker.put(f"{at}.mlp.{name}_proj", *shape)
    for name in (f"{at}.input_layernorm", f"{at}.post_attention_layernorm", "model.norm"):
        maker.put(name, width)
    maker.put("lm_head", vocabulary(tokenizer_from), width)
    config = {"architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": width, "intermediate_size": 512}
    heads = {"num_hidden_layers": 1, "num_attention_heads": 4, "head_dim": 64, "mlp_bias": False}
    maker.write(directory, tokenizer_from, {**config, **heads})
    return directory


def moe(directory: Path, tokenizer_from: Path) -> dict[str, np.ndarray]:
    """A Qwen3-MoE checkpoint; returns its tensors f32 by name."""
    maker = Maker(7)
    maker.put("model.embed_tokens", vocabulary(tokenizer_from), HIDDEN)
    for layer in range(LAYERS):
        at = f"model.layers.{layer}"
        for name, rows in (("q", HEADS), ("k", 2), ("v", 2)):
            maker.put(f"{at}.self_attn.{name}_proj", rows * HEAD_DIM, HIDDEN)
        maker.put(f"{at}.self_attn.o_proj", HIDDEN, HEADS * HEAD_DIM)
        for norm, width in (("self_attn.q_norm", HEAD_DIM), ("self_attn.k_norm", HEAD_DIM), ("input_layernorm", HIDDEN)):
            maker.put(f"{at}.{norm}", width)
        maker.put(f"{at}.post_attention_layernorm", HIDDEN)
        maker.put(f"{at}.mlp.gate", EXPERTS, HIDDEN)
        for expert in range(EXPERTS):
            for part, shape in PARTS.items():
                maker.put(f"{at}.mlp.experts.{expert}.{part}", *shape)
    maker.put("model.norm", HIDDEN)
    maker.put("lm_head", vocabulary(tokenizer_from), HIDDEN)
    config = {
        "architectures": ["Qwen3MoeForCausalLM"],
        "model_type": "qwen3_moe",
        "hidden_size": HIDDEN,
        "intermediate_size": 2 * HIDDEN,
        "moe_intermediate_size": EXPERT,
        "num_experts": EXPERTS,
        "num_experts_per_tok": 2,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
        "norm_topk_prob": True,
        "num_hidden_layers": LAYERS,
        "num_attention_heads": HEADS,
        "head_dim": HEAD_DIM,
        "use_sliding_window": False,
        "max_window_layers": LAYERS,
        "sliding_window": None,
        "router_aux_loss_coef": 0.001,
    }
    maker.write(directory, tokenizer_from, config)
    return maker.tensors
