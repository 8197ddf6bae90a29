"""Qwen2 and Qwen2.5 (arXiv 2407.10671): Llama's layers with biases on q, k and v, never on o; later layers may have a window."""

from __future__ import annotations

from collections.abc import Iterator

from arctool.run.config import ModelConfig
from arctool.run.models import llama
from arctool.run.models.spec import Architecture, TensorSpec, decoder, linear, norm


def layer_tensors(c: ModelConfig, at: str, layer: int) -> Iterator[TensorSpec]:
    """The tensors of one decoder layer; `at` is its module path."""
    queries, keys = c.num_heads * c.head_dim, c.num_kv_heads * c.head_dim
    yield norm(f"{at}.input_layernorm", c.hidden_size, layer)
    yield from linear(f"{at}.self_attn.q_proj", queries, c.hidden_size, layer, bias=True)
    yield from linear(f"{at}.self_attn.k_proj", keys, c.hidden_size, layer, bias=True)
    yield from linear(f"{at}.self_attn.v_proj", keys, c.hidden_size, layer, bias=True)
    yield from linear(f"{at}.self_attn.o_proj", c.hidden_size, queries, layer)
    yield norm(f"{at}.post_attention_layernorm", c.hidden_size, layer)
    yield from linear(f"{at}.mlp.gate_proj", c.intermediate_size, c.hidden_size, layer)
    yield from linear(f"{at}.mlp.up_proj", c.intermediate_size, c.hidden_size, layer)
    yield from linear(f"{at}.mlp.down_proj", c.hidden_size, c.intermediate_size, layer)


def tensors(c: ModelConfig) -> tuple[TensorSpec, ...]:
    """Every tensor of a checkpoint."""
    return decoder(c, layer_tensors)


QWEN2 = Architecture("Qwen2ForCausalLM", tensors, llama.build)
