"""A linear layer over a flat batch: prepared weight, optional bias. Which kernel runs is the registry's affair."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch

from arctool.kernels.registry import Prepared, Registry


class Projection(Protocol):
    """What a block asks of its linear layers; calibration puts others than `Linear` in their place."""

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """x: f32 [tokens, in] → f32 [tokens, out]."""
        ...


@dataclass(frozen=True)
class Linear:
    """y = x Wᵀ + b. `bias`: f32 [out] or None."""

    registry: Registry
    weight: Prepared
    bias: torch.Tensor | None = None

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """x: f32 [tokens, in] → f32 [tokens, out]."""
        y = self.registry.linear(x, self.weight)
        return y if self.bias is None else y.add_(self.bias)


@dataclass(frozen=True)
class Embedding:
    """The token table [vocab, hidden]."""

    registry: Registry
    weight: Prepared

    def __call__(self, ids: torch.Tensor) -> torch.Tensor:
        """ids: i64 [tokens] → f32 [tokens, hidden]."""
        return self.registry.embedding(ids, self.weight)
