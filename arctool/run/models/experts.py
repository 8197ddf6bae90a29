"""Mixtures of experts as architectures declare them: names and tensors of router and experts, and their assembly.

A checkpoint has each expert's matrices by themselves, under names of its own; here is also what mistral.rs and transformers call their
stacks of them, so that whoever finds a stack can take it apart. No torch and no files.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

from arctool.run.config import ModelConfig
from arctool.run.models.spec import TensorSpec, linear, router

if TYPE_CHECKING:
    from arctool.run.layers.moe import SparseMoe
    from arctool.run.models.decoder import Parts


@dataclass(frozen=True)
class ExpertNames:
    """What an architecture calls its mixture: the block in a decoder layer, and an expert's gate, up and down in it."""

    block: str
    gate: str
    up: str
    down: str

    def router(self, at: str) -> str:
        """Key of the router of the decoder layer at `at`."""
        return f"{at}.{self.block}.gate"

    def expert(self, at: str, expert: int) -> tuple[str, str, str]:
        """Keys of gate, up and down of one expert."""
        return tuple(f"{at}.{self.block}.experts.{expert}.{part}" for part in (self.gate, self.up, self.down))  # type: ignore[return-value]


MIXTRAL_NAMES = ExpertNames("block_sparse_moe", "w1", "w3", "w2")
QWEN3_NAMES = ExpertNames("mlp", "gate_proj", "up_proj", "down_proj")


def expert_tensors(c: ModelConfig, names: ExpertNames, at: str, layer: int) -> Iterator[TensorSpec]:
    """The tensors of the mixture of one decoder layer, whose module path is `at`."""
    moe = c.sparse(layer)
    assert moe is not None
    yield router(names.router(at), moe.num_experts, c.hidden_size, layer)
    for expert in range(moe.num_experts):
        gate, up, down = names.expert(at, expert)
        yield from linear(gate, moe.intermediate_size, c.hidden_size, layer)
        yield from linear(up, moe.intermediate_size, c.hidden_size, layer)
        yield from linear(down, c.hidden_size, moe.intermediate_size, layer)


def mixture(c: ModelConfig, parts: Parts, names: ExpertNames, layer: int) -> SparseMoe | None:
    """The mixture of a decoder layer, None where the layer is dense."""
    from arctool.run.layers.moe import SparseMoe
    from arctool.run.models.llama import swiglu

    moe = c.sparse(layer)
    if moe is None:
        return None
    at = f"model.layers.{layer}"
    experts = tuple(swiglu(parts, *names.expert(at, expert)) for expert in range(moe.num_experts))
    return SparseMoe(parts.linear(names.router(at)), experts, moe.top_k, moe.normalised)
