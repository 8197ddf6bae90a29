"""Writes GGUF files from the tiny Hugging Face checkpoints with the `gguf` library, the way llama.cpp's converter does."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from gguf import GGMLQuantizationType, GGUFWriter
from gguf.quants import quantize
from numpy.typing import NDArray
from safetensors.numpy import load_file

NAMES = (
    ("model.embed_tokens", "token_embd"),
    ("model.norm", "output_norm"),
    ("lm_head", "output"),
    ("model.layers.", "blk."),
    ("input_layernorm", "attn_norm"),
    ("post_attention_layernorm", "ffn_norm"),
    ("self_attn.q_proj", "attn_q"),
    ("self_attn.k_proj", "attn_k"),
    ("self_attn.v_proj", "attn_v"),
    ("self_attn.o_proj", "attn_output"),
    ("self_attn.q_norm", "attn_q_norm"),
    ("self_attn.k_norm", "attn_k_norm"),
    ("block_sparse_moe.gate", "ffn_gate_inp"),
    ("mlp.gate.", "ffn_gate_inp."),
    ("mlp.gate_proj", "ffn_gate"),
    ("mlp.up_proj", "ffn_up"),
    ("mlp.down_proj", "ffn_down"),
)


def gguf_name(name: str) -> str:
    for hugging_face, llama_cpp in NAMES:
        name = name.replace(hugging_face, llama_cpp)
    return name


def permute(rows: NDArray[np.float32], heads: int) -> NDArray[np.float32]:
    """llama.cpp's order of the rows of q and k, one head after the other: first of half 0, first of half 1, second of half 0 ..."""
    head_dim = rows.shape[0] // heads
    order = [head * head_dim + half * head_dim // 2 + i for head in range(heads) for i in range(head_dim // 2) for half in (0, 1)]
    return rows[order]


EXPERT = re.compile(r"(model\.layers\.\d+)\.\w+\.experts\.\d+\.(\w+)\.weight")
STACKS = {"w1": "gate", "w3": "up", "w2": "down", "gate_proj": "gate", "up_proj": "up", "down_proj": "down"}


def with_stacks(tensors: Mapping[str, NDArray[np.float32]]) -> dict[str, NDArray[np.float32]]:
    """The tensors with all experts of a kind and layer one above the other, [experts, out, in]: they come in the order of their numbers."""
    found: dict[str, Any] = {}
    for name in sorted(tensors, key=lambda name: [int(part) if part.isdigit() else 0 for part in name.split(".")]):
        match = EXPERT.fullmatch(name)
        if match is None:
            found[name] = tensors[name]
        else:
            found.setdefault(f"{match[1]}.ffn_{STACKS[match[2]]}_exps.weight", []).append(tensors[name])
    return {name: np.stack(values) if isinstance(values, list) else values for name, values in found.items()}


def write_gguf(
    directory: Path,
    target: Path,
    arch: str,
    *,
    pre: str = "smollm",
    tensor_type: GGMLQuantizationType = GGMLQuantizationType.F32,
    metadata: Mapping[str, Any] | None = None,
    tensors: Mapping[str, NDArray[np.float32]] | None = None,
) -> Path:
    """`directory` as the GGUF file `target`. `metadata` and `tensors` are added last; a metadata value of None leaves a key out."""
    config = json.loads((directory / "config.json").read_text())
    fields = {**_fields(config, arch), **_tokenizer_fields(directory, config, pre), **(metadata or {})}
    writer = GGUFWriter(target, arch)
    for key, value in fields.items():
        _add(writer, key, value)
    heads = {"q_proj": config["num_attention_heads"], "k_proj": config["num_key_value_heads"]}
    for name, values in with_stacks(load_file(directory / "model.safetensors")).items():
        part = name.split(".")[-2]
        rows = permute(values, heads[part]) if arch == "llama" and part in heads else values
        kind = tensor_type if rows.ndim >= 2 and not name.endswith("gate.weight") else GGMLQuantizationType.F32
        writer.add_tensor(gguf_name(name), quantize(rows, kind), raw_dtype=kind)
    for name, values in (tensors or {}).items():
        writer.add_tensor(name, values)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return target


def _fields(config: Mapping[str, Any], arch: str) -> dict[str, Any]:
    return {
        f"{arch}.block_count": config["num_hidden_layers"],
        f"{arch}.context_length": config["max_position_embeddings"],
        f"{arch}.embedding_length": config["hidden_size"],
        f"{arch}.feed_forward_length": config["intermediate_size"],
        f"{arch}.attention.head_count": config["num_attention_heads"],
        f"{arch}.attention.head_count_kv": config["num_key_value_heads"],
        f"{arch}.attention.key_length": config["head_dim"],
        f"{arch}.attention.value_length": config["head_dim"],
        f"{arch}.attention.layer_norm_rms_epsilon": config["rms_norm_eps"],
        f"{arch}.rope.freq_base": config["rope_theta"],
        "general.license": "apache-2.0",
        **_expert_fields(config, arch),
    }


def _expert_fields(config: Mapping[str, Any], arch: str) -> dict[str, Any]:
    experts = config.get("num_local_experts", config.get("num_experts"))
    if experts is None:
        return {}
    fields = {f"{arch}.expert_count": experts, f"{arch}.expert_used_count": config["num_experts_per_tok"]}
    width = config.get("moe_intermediate_size")
    return fields if width is None else {**fields, f"{arch}.expert_feed_forward_length": width}


def _tokenizer_fields(directory: Path, config: Mapping[str, Any], pre: str) -> dict[str, Any]:
    tokenizer = json.loads((directory / "tokenizer.json").read_text())
    vocab = tokenizer["model"]["vocab"]
    special = {token["content"] for token in tokenizer["added_tokens"]}
    tokens = sorted(vocab, key=vocab.__getitem__)
    return {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": pre,
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": [3 if token in special else 1 for token in tokens],
        "tokenizer.ggml.merges": [" ".join(merge) for merge in tokenizer["model"]["merges"]],
        "tokenizer.ggml.bos_token_id": config["bos_token_id"],
        "tokenizer.ggml.eos_token_id": config["eos_token_id"],
        "tokenizer.ggml.padding_token_id": config["pad_token_id"],
        "tokenizer.chat_template": json.loads((directory / "tokenizer_config.json").read_text())["chat_template"],
    }


def _add(writer: GGUFWriter, key: str, value: Any) -> None:
    if isinstance(value, bool):
        writer.add_bool(key, value)
    elif isinstance(value, int):
        writer.add_uint32(key, value)
    elif isinstance(value, np.float64):
        writer.add_float64(key, value)
    elif isinstance(value, float):
        writer.add_float32(key, value)
    elif isinstance(value, str):
        writer.add_string(key, value)
    elif isinstance(value, list):
        writer.add_array(key, value)
