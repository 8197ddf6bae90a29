"""Qwen3-MoE (arXiv 2505.09388): Qwen3's attention; feed-forward blocks are mixtures of experts, but for the layers that stay dense."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from arctool.run.config import ModelConfig
from arctool.run.models import llama, qwen3
from arctool.run.models.experts import QWEN3_NAMES, expert_tensors, mixture
from arctool.run.models.spec import Architecture, TensorSpec, decoder

if TYPE_CHECKING:
    from arctool.run.models.decoder import CausalLM, Parts


def layer_tensors(c: ModelConfig, at: str, layer: int) -> Iterator[TensorSpec]:
    """The tensors of one decoder layer; `at` is its module path."""
    yield from llama.attention_tensors(c, at, layer)
    yield from qwen3.head_norms(c, at, layer)
    if c.sparse(layer) is None:
        yield from llama.mlp_tensors(c, at, layer)
    else:
        yield from expert_tensors(c, QWEN3_NAMES, at, layer)


def tensors(c: ModelConfig) -> tuple[TensorSpec, ...]:
    """Every tensor of a checkpoint."""
    return decoder(c, layer_tensors)


def build(c: ModelConfig, parts: Parts) -> CausalLM:
    """The model from its parts."""
    from arctool.run.models.decoder import assemble

    return assemble(c, parts, tuple(qwen3.block(c, parts, i, mixture(c, parts, QWEN3_NAMES, i)) for i in range(c.num_layers)))


QWEN3_MOE = Architecture("Qwen3MoeForCausalLM", tensors, build, QWEN3_NAMES)
