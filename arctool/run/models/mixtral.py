"""Mixtral (arXiv 2401.04088): Mistral's attention; every feed-forward block is a mixture of experts."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from arctool.run.config import ModelConfig
from arctool.run.models import llama
from arctool.run.models.experts import MIXTRAL_NAMES, expert_tensors, mixture
from arctool.run.models.spec import Architecture, TensorSpec, decoder

if TYPE_CHECKING:
    from arctool.run.models.decoder import CausalLM, Parts


def layer_tensors(c: ModelConfig, at: str, layer: int) -> Iterator[TensorSpec]:
    """The tensors of one decoder layer; `at` is its module path."""
    yield from llama.attention_tensors(c, at, layer)
    yield from expert_tensors(c, MIXTRAL_NAMES, at, layer)


def tensors(c: ModelConfig) -> tuple[TensorSpec, ...]:
    """Every tensor of a checkpoint."""
    return decoder(c, layer_tensors)


def build(c: ModelConfig, parts: Parts) -> CausalLM:
    """The model from its parts."""
    from arctool.run.models.decoder import assemble

    return assemble(c, parts, tuple(llama.block(c, parts, i, mixture(c, parts, MIXTRAL_NAMES, i)) for i in range(c.num_layers)))


MIXTRAL = Architecture("MixtralForCausalLM", tensors, build, MIXTRAL_NAMES)
