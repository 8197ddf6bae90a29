"""The gated feed-forward block, SwiGLU (Shazeer, arXiv 2002.05202)."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from arctool.run.layers.linear import Projection


def silu(x: torch.Tensor) -> torch.Tensor:
    """x · sigmoid(x), elementwise.

    Spelled out because torch's own `silu` has a vector body and a scalar tail that differ in the last bit, which would make a
    row depend on its place in the batch; `exp` alone does not.
    """
    return x / torch.exp(-x).add_(1.0)


@dataclass(frozen=True)
class SwiGLU:
    """down(silu(gate(x)) · up(x))."""

    gate: Projection
    up: Projection
    down: Projection

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """x: f32 [tokens, hidden] → f32 [tokens, hidden]."""
        return self.down(self.inner(x))

    def inner(self, x: torch.Tensor) -> torch.Tensor:
        """What the down projection reads: f32 [tokens, intermediate]."""
        return silu(self.gate(x)) * self.up(x)
