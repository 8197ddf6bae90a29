"""Llama 2, 3 and relatives such as SmolLM2 (arXiv 2302.13971): RMS norms before attention and SwiGLU, rotary, grouped queries."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from arctool.run.config import ModelConfig
from arctool.run.models.spec import Architecture, TensorSpec, decoder, linear, norm

if TYPE_CHECKING:
    from arctool.run.layers.mlp import SwiGLU
    from arctool.run.layers.moe import SparseMoe
    from arctool.run.models.decoder import Block, CausalLM, Parts

# Layers are imported by what puts them together: whoever asks only for tensors' names and shapes must not wait for torch.


def layer_tensors(c: ModelConfig, at: str, layer: int) -> Iterator[TensorSpec]:
    """The tensors of one decoder layer; `at` is its module path."""
    yield from attention_tensors(c, at, layer)
    yield from mlp_tensors(c, at, layer)


def attention_tensors(c: ModelConfig, at: str, layer: int) -> Iterator[TensorSpec]:
    """Those of its attention and of both norms."""
    queries, keys = c.num_heads * c.head_dim, c.num_kv_heads * c.head_dim
    yield norm(f"{at}.input_layernorm", c.hidden_size, layer)
    yield from linear(f"{at}.self_attn.q_proj", queries, c.hidden_size, layer, c.attention_bias)
    yield from linear(f"{at}.self_attn.k_proj", keys, c.hidden_size, layer, c.attention_bias)
    yield from linear(f"{at}.self_attn.v_proj", keys, c.hidden_size, layer, c.attention_bias)
    yield from linear(f"{at}.self_attn.o_proj", c.hidden_size, queries, layer, c.attention_bias)
    yield norm(f"{at}.post_attention_layernorm", c.hidden_size, layer)


def mlp_tensors(c: ModelConfig, at: str, layer: int) -> Iterator[TensorSpec]:
    """Those of its feed-forward block."""
    yield from linear(f"{at}.mlp.gate_proj", c.intermediate_size, c.hidden_size, layer, c.mlp_bias)
    yield from linear(f"{at}.mlp.up_proj", c.intermediate_size, c.hidden_size, layer, c.mlp_bias)
    yield from linear(f"{at}.mlp.down_proj", c.hidden_size, c.intermediate_size, layer, c.mlp_bias)


def block(c: ModelConfig, parts: Parts, layer: int, mlp: SwiGLU | SparseMoe | None = None) -> Block:
    """One decoder layer. `mlp`: its feed-forward block where that is not Llama's own."""
    from arctool.run.layers.attention import Attention
    from arctool.run.models.decoder import Block

    at = f"model.layers.{layer}"
    return Block(
        attention_norm=parts.norm(f"{at}.input_layernorm"),
        attention=Attention(
            layer=layer,
            head_dim=c.head_dim,
            window=c.sliding_windows[layer],
            q=parts.linear(f"{at}.self_attn.q_proj"),
            k=parts.linear(f"{at}.self_attn.k_proj"),
            v=parts.linear(f"{at}.self_attn.v_proj"),
            o=parts.linear(f"{at}.self_attn.o_proj"),
        ),
        mlp_norm=parts.norm(f"{at}.post_attention_layernorm"),
        mlp=swiglu(parts, f"{at}.mlp.gate_proj", f"{at}.mlp.up_proj", f"{at}.mlp.down_proj") if mlp is None else mlp,
    )


def swiglu(parts: Parts, gate: str, up: str, down: str) -> SwiGLU:
    """A feed-forward block by the keys of its layers."""
    from arctool.run.layers.mlp import SwiGLU

    return SwiGLU(gate=parts.linear(gate), up=parts.linear(up), down=parts.linear(down))


def tensors(c: ModelConfig) -> tuple[TensorSpec, ...]:
    """Every tensor of a checkpoint."""
    return decoder(c, layer_tensors)


def build(c: ModelConfig, parts: Parts) -> CausalLM:
    """The model from its parts."""
    from arctool.run.models.decoder import assemble

    return assemble(c, parts, tuple(block(c, parts, layer) for layer in range(c.num_layers)))


LLAMA = Architecture("LlamaForCausalLM", tensors, build)
