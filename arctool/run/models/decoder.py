"""The frame that decoder-only models share: embedding, pre-norm blocks, final norm, head. The blocks are the models' own."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch

from arctool.run.config import ModelConfig
from arctool.run.layers.attention import Attention
from arctool.run.layers.linear import Embedding, Projection
from arctool.run.layers.mlp import SwiGLU
from arctool.run.layers.moe import SparseMoe
from arctool.run.layers.rmsnorm import RMSNorm
from arctool.run.layers.rope import RopeTable
from arctool.run.models.spec import FINAL_NORM_KEY
from arctool.run.step import StepInputs


class Parts(Protocol):
    """The loaded parts of a model, by module path; what `Architecture.build` puts together."""

    def linear(self, key: str) -> Projection: ...

    def norm(self, key: str) -> RMSNorm: ...

    def embedding(self) -> Embedding: ...

    def head(self) -> Projection: ...


@dataclass(frozen=True)
class Block:
    """One decoder layer: x + attention(norm(x)), then x + mlp(norm(x))."""

    attention_norm: RMSNorm
    attention: Attention
    mlp_norm: RMSNorm
    mlp: SwiGLU | SparseMoe

    def __call__(self, x: torch.Tensor, step: StepInputs, rotation: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
        """x: f32 [tokens, hidden] → the same."""
        x = x + self.attention(self.attention_norm(x), step, rotation)
        return x + self.mlp(self.mlp_norm(x))


@dataclass(frozen=True)
class CausalLM:
    """A whole model. Called, it runs whole sequences as its layers define them; an engine runs its compiled form (`run.compiled`)."""

    config: ModelConfig
    embedding: Embedding
    blocks: tuple[Block, ...]
    norm: RMSNorm
    head: Projection
    rope: RopeTable

    @torch.inference_mode()
    def __call__(self, step: StepInputs) -> torch.Tensor:
        """Run whole sequences; returns the logits f32 [logit rows, vocab] of the rows that need them."""
        rotation = self.rope.at(torch.from_numpy(step.positions))
        x = self.embedding(torch.from_numpy(step.ids))
        for block in self.blocks:
            x = block(x, step, rotation)
        return self.head(self.norm(x[torch.from_numpy(step.logit_rows)]))


def assemble(config: ModelConfig, parts: Parts, blocks: tuple[Block, ...]) -> CausalLM:
    """Put a model's blocks into the frame."""
    return CausalLM(
        config=config,
        embedding=parts.embedding(),
        blocks=blocks,
        norm=parts.norm(FINAL_NORM_KEY),
        head=parts.head(),
        rope=RopeTable(config.rope, config.head_dim),
    )
