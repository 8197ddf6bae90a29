"""Root-mean-square normalisation (Zhang and Sennrich, arXiv 1910.07467) over the last dimension."""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class RMSNorm:
    """y = x / sqrt(mean(x²) + eps) · gain. `gain`: f32 [width]."""

    gain: torch.Tensor
    eps: float

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """x: f32 [..., width], any leading shape.

        Square root and division are rounded correctly on every device; `rsqrt` is an approximation whose last bit is a
        library's own affair.
        """
        mean = x.square().mean(-1, keepdim=True)
        return x / mean.add_(self.eps).sqrt_() * self.gain
