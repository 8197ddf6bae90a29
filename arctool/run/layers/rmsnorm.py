"""Root-mean-square normalisation (Zhang and Sennrich, arXiv 1910.07467) over the last dimension."""

from __future__ import annotations

from dataclasses import dataclass

import torch

# torch shares the sum of one long row among its threads (from 32768 elements on), but adds each of several rows in one thread.
PIECE = 16384


@dataclass(frozen=True)
class RMSNorm:
    """y = x / sqrt(mean(x²) + eps) · gain. `gain`: f32 [width]."""

    gain: torch.Tensor
    eps: float

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """x: f32 [..., width], any leading shape.

        Square root and division are rounded correctly on every device; `rsqrt` is an approximation whose last bit is a
        library's own affair. Rows are added in pieces of fixed width, so that neither their number nor the threads' changes a bit.
        """
        total = torch.zeros_like(x[..., :1])
        for piece in x.square().split(PIECE, dim=-1):
            total += piece.sum(-1, keepdim=True)
        return x / total.div_(x.shape[-1]).add_(self.eps).sqrt_() * self.gain
