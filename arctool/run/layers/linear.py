"""A linear layer over a flat batch: prepared weight, optional bias. Which kernel runs is the registry's affair."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch

from arctool.kernels.registry import Prepared, Registry, TokenClass
from arctool.run.step import Rows


class Projection(Protocol):
    """What a block asks of its linear layers; calibration puts others than `Linear` in their place."""

    def __call__(self, x: torch.Tensor, rows: Rows) -> torch.Tensor:
        """x: f32 [rows, in] → f32 [rows, out]."""
        ...


@dataclass(frozen=True)
class Linear:
    """y = x Wᵀ + b. `bias`: f32 [out] or None."""

    registry: Registry
    weight: Prepared
    bias: torch.Tensor | None = None

    def __call__(self, x: torch.Tensor, rows: Rows) -> torch.Tensor:
        """x: f32 [rows, in] → f32 [rows, out]. A token's class, never its company, decides which kernels compute it."""
        y = self._by_class(x, rows)
        return y if self.bias is None else y.add_(self.bias)

    def _by_class(self, x: torch.Tensor, rows: Rows) -> torch.Tensor:
        if rows.prefill == rows.total:
            return self.registry.linear(x, self.weight, TokenClass.PREFILL)
        if rows.prefill == 0:
            return self.registry.linear(x, self.weight, TokenClass.DECODE)
        prefill = self.registry.linear(x[: rows.prefill], self.weight, TokenClass.PREFILL)
        decode = self.registry.linear(x[rows.prefill :], self.weight, TokenClass.DECODE)
        return torch.cat((prefill, decode))


@dataclass(frozen=True)
class Embedding:
    """The token table [vocab, hidden]."""

    registry: Registry
    weight: Prepared

    def __call__(self, ids: torch.Tensor) -> torch.Tensor:
        """ids: i64 [tokens] → f32 [tokens, hidden]."""
        return self.registry.embedding(ids, self.weight)
