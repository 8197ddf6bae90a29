"""Rotary position embedding (RoFormer, arXiv 2104.09864) in the half-split layout of Hugging Face checkpoints.

A position's angles follow from the config alone, never from the length of a sequence: keys lie turned in the cache. So dynamic NTK
scaling is what it is up to the model's own context, no scaling, and longer contexts are refused (`RopeConfig.no_further`).
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch

from arctool.run.rope_config import RopeConfig

# Tables grow in blocks of fixed shape, so that an entry does not depend on how long the table is.
TABLE_BLOCK = 1024


def inverse_frequencies(rope: RopeConfig, head_dim: int) -> torch.Tensor:
    """f32 [head_dim / 2]: theta^(−2i/head_dim), after the config's scaling."""
    exponents = torch.arange(0, head_dim, 2, dtype=torch.float32) / head_dim
    wavelengths = rope.theta**exponents
    frequencies = 1.0 / wavelengths
    kind = "default" if rope.scaling is None else rope.scaling["rope_type"]
    if rope.scaling is None or kind == "dynamic":
        return frequencies
    if kind == "linear":
        return frequencies / rope.scaling["factor"]
    if kind == "yarn":
        return _yarn(wavelengths, rope.theta, head_dim, rope.scaling)
    if kind == "llama3":
        return _llama3(frequencies, rope.scaling)
    raise ValueError(f"rope_type {kind!r} has been read and is not computed")


def _llama3(frequencies: torch.Tensor, scaling: Mapping[str, Any]) -> torch.Tensor:
    """Llama 3.1: long waves are slowed by `factor`, short ones kept, those between blended linearly in context / wavelength."""
    factor, low, high = scaling["factor"], scaling["low_freq_factor"], scaling["high_freq_factor"]
    waves_in_context = scaling["original_max_position_embeddings"] * frequencies / (2 * math.pi)
    kept = ((waves_in_context - low) / (high - low)).clamp(0.0, 1.0)
    return (1.0 - kept) * frequencies / factor + kept * frequencies


def _yarn(wavelengths: torch.Tensor, theta: float, head_dim: int, scaling: Mapping[str, Any]) -> torch.Tensor:
    """YaRN (arXiv 2309.00071): pairs that turn seldom in the original context are slowed by `factor`, fast ones kept, a ramp between.

    `wavelengths`: f32 [head_dim / 2], in positions over 2π. The ramp goes over the pairs' numbers (as published models have it, and
    not over their rotations, as in the paper's equation 18).
    """

    def pair_with(rotations: float) -> float:
        """The pair, not whole, that turns so often within the original context."""
        return head_dim * math.log(scaling["original_max_position_embeddings"] / (rotations * 2 * math.pi)) / (2 * math.log(theta))

    first, last = pair_with(scaling["beta_fast"]), pair_with(scaling["beta_slow"])
    if scaling["truncate"]:
        first, last = math.floor(first), math.ceil(last)
    first, last = max(first, 0), min(last, head_dim - 1)
    if first == last:
        last += 0.001
    kept = 1 - ((torch.arange(head_dim // 2, dtype=torch.float32) - first) / (last - first)).clamp(0, 1)
    return 1.0 / (scaling["factor"] * wavelengths) * (1 - kept) + 1.0 / wavelengths * kept


class RopeTable:
    """cos and sin of every position below `length`, f32 [length, head_dim / 2], computed once per model.

    Both are multiplied by the config's attention factor, so that a product of a query and a key has its square.
    """

    def __init__(self, rope: RopeConfig, head_dim: int) -> None:
        self._frequencies = inverse_frequencies(rope, head_dim)
        self._factor = rope.attention_factor
        self._cos = torch.empty(0, head_dim // 2)
        self._sin = torch.empty(0, head_dim // 2)

    @property
    def length(self) -> int:
        return self._cos.shape[0]

    def reserve(self, length: int) -> None:
        """Make positions below `length` available; a runner calls it once with the longest context that it serves."""
        if length <= self.length:
            return
        starts = range(self.length, length, TABLE_BLOCK)
        angles = [torch.arange(s, s + TABLE_BLOCK, dtype=torch.float32)[:, None] * self._frequencies for s in starts]
        self._cos = torch.cat((self._cos, *(a.cos().mul_(self._factor) for a in angles)))
        self._sin = torch.cat((self._sin, *(a.sin().mul_(self._factor) for a in angles)))

    def tables(self) -> tuple[torch.Tensor, torch.Tensor]:
        """cos and sin of all reserved positions, f32 [length, head_dim / 2]."""
        return self._cos, self._sin

    def at(self, positions: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """positions: i64 [tokens] → cos, sin: f32 [tokens, 1, head_dim / 2], ready to broadcast over heads."""
        return self._cos[positions].unsqueeze(1), self._sin[positions].unsqueeze(1)


def rotate(x: torch.Tensor, rotation: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
    """x: f32 [tokens, heads, head_dim]; dimension i is paired with i + head_dim / 2."""
    cos, sin = rotation
    first, second = x.chunk(2, dim=-1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)
