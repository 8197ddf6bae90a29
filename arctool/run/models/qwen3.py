"""Qwen3, dense (arXiv 2505.09388): Llama's layers, an RMS norm on every head of q and k before rotation, a head width of its own."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import TYPE_CHECKING

from arctool.run.config import ModelConfig
from arctool.run.models import llama
from arctool.run.models.spec import Architecture, TensorSpec, decoder, norm

if TYPE_CHECKING:
    from arctool.run.layers.mlp import SwiGLU
    from arctool.run.layers.moe import SparseMoe
    from arctool.run.models.decoder import Block, CausalLM, Parts


def layer_tensors(c: ModelConfig, at: str, layer: int) -> Iterator[TensorSpec]:
    """The tensors of one decoder layer: Llama's and the two head norms."""
    yield from llama.layer_tensors(c, at, layer)
    yield from head_norms(c, at, layer)


def head_norms(c: ModelConfig, at: str, layer: int) -> Iterator[TensorSpec]:
    """The gains of the norms of q and k; `at` is the layer's module path."""
    yield norm(f"{at}.self_attn.q_norm", c.head_dim, layer)
    yield norm(f"{at}.self_attn.k_norm", c.head_dim, layer)


def block(c: ModelConfig, parts: Parts, layer: int, mlp: SwiGLU | SparseMoe | None = None) -> Block:
    """One decoder layer. `mlp`: its feed-forward block where that is not Llama's own."""
    at = f"model.layers.{layer}.self_attn"
    plain = llama.block(c, parts, layer, mlp)
    normed = replace(plain.attention, q_norm=parts.norm(f"{at}.q_norm"), k_norm=parts.norm(f"{at}.k_norm"))
    return replace(plain, attention=normed)


def tensors(c: ModelConfig) -> tuple[TensorSpec, ...]:
    """Every tensor of a checkpoint."""
    return decoder(c, layer_tensors)


def build(c: ModelConfig, parts: Parts) -> CausalLM:
    """The model from its parts."""
    from arctool.run.models.decoder import assemble

    return assemble(c, parts, tuple(block(c, parts, layer) for layer in range(c.num_layers)))


QWEN3 = Architecture("Qwen3ForCausalLM", tensors, build)
