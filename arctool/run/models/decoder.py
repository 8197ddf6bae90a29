"""The frame that decoder-only models share: embedding, pre-norm blocks, final norm, head. The blocks are the models' own."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch

from arctool.run.config import ModelConfig
from arctool.run.kv.cache import KVCache
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

    def __call__(self, x: torch.Tensor, step: StepInputs, rotation: tuple[torch.Tensor, torch.Tensor], cache: KVCache) -> torch.Tensor:
        """x: f32 [tokens, hidden] → the same."""
        x = x + self.attention(self.attention_norm(x), step, rotation, cache)
        return x + self.mlp(self.mlp_norm(x), step.rows)


@dataclass(frozen=True)
class CausalLM:
    """A whole model. It keeps no state between steps: the sequences' state is the cache."""

    config: ModelConfig
    embedding: Embedding
    blocks: tuple[Block, ...]
    norm: RMSNorm
    head: Projection
    rope: RopeTable

    @torch.inference_mode()
    def __call__(self, step: StepInputs, cache: KVCache) -> torch.Tensor:
        """Run one step; returns the logits f32 [step.logit_rows.total, vocab] of the rows that need them."""
        wanted = self.states(step, cache)
        if not step.logit_rows.total:
            return wanted.new_empty((0, self.config.vocab_size))
        return self.head(wanted, step.logit_rows)

    @torch.inference_mode()
    def states(self, step: StepInputs, cache: KVCache) -> torch.Tensor:
        """Run one step up to the head: what the head reads, f32 [step.logit_rows.total, hidden]."""
        rotation = self.rope.at(step.positions)
        x = self.embedding(step.ids)
        for block in self.blocks:
            x = block(x, step, rotation, cache)
        return self.norm(x[step.logit_indices])


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
