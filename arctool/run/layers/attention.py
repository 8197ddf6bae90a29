"""Grouped-query attention over whole sequences, in f32, one sequence and one tile of queries at a time.

Tiles have a fixed size and lie at fixed positions of the sequence, so a query's result depends on its sequence and its position alone.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from arctool.run.layers.linear import Projection
from arctool.run.layers.rmsnorm import RMSNorm
from arctool.run.layers.rope import rotate
from arctool.run.step import StepInputs

# Queries and keys of one tile, both at multiples of these positions.
QUERY_TILE = 64
KEY_TILE = 64


@dataclass(frozen=True)
class Attention:
    """Projections, per-head norms of q and k (Qwen3), rotary embedding, attention. `window`: keys a query sees, or None."""

    layer: int
    head_dim: int
    window: int | None
    q: Projection
    k: Projection
    v: Projection
    o: Projection
    q_norm: RMSNorm | None = None
    k_norm: RMSNorm | None = None

    def __call__(self, x: torch.Tensor, step: StepInputs, rotation: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
        """x: f32 [tokens, hidden] → f32 [tokens, hidden]."""
        return self.o(self.mix(x, step, rotation))

    def mix(self, x: torch.Tensor, step: StepInputs, rotation: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
        """What the output projection reads: f32 [tokens, heads · head_dim]."""
        queries, keys, values = (proj(x).unflatten(-1, (-1, self.head_dim)) for proj in (self.q, self.k, self.v))
        if self.q_norm is not None and self.k_norm is not None:
            queries, keys = self.q_norm(queries), self.k_norm(keys)
        return attend(rotate(queries, rotation), rotate(keys, rotation), values, step, self.window).flatten(1)


def attend(queries: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, step: StepInputs, window: int | None) -> torch.Tensor:
    """queries: f32 [tokens, heads, head_dim], keys and values: f32 [tokens, kv_heads, head_dim], both rotated. Returns the queries' shape.

    Every span of the step begins its sequence: what it attends to stands in the step itself.
    """
    out = torch.empty_like(queries)
    for span, start in zip(step.spans, step.starts, strict=True):
        if span.position:
            raise ValueError(f"a span begins at position {span.position}; these layers run whole sequences")
        rows = slice(start, start + span.context)
        for first in range(0, span.context, QUERY_TILE):
            tile = queries[rows][first : first + QUERY_TILE]
            out[start + first : start + first + len(tile)] = _attend_tile(tile, keys[rows], values[rows], first, window)
    return out


def _attend_tile(queries: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, base: int, window: int | None) -> torch.Tensor:
    """queries: f32 [n, heads, head_dim] of a tile that begins at position `base`, a multiple of its width. Returns the same shape."""
    count, heads, dim = queries.shape
    oldest = 0 if window is None else max(0, base - window + 1) // KEY_TILE * KEY_TILE
    newest = -(-(base + QUERY_TILE) // KEY_TILE) * KEY_TILE
    groups = keys.shape[1]
    # Full tiles, always: the shapes that a library sees then depend on the position only.
    queries = _pad(queries, QUERY_TILE)
    keys, values = (_pad(t[oldest:newest], newest - oldest) for t in (keys, values))
    # [tile, groups · share, dim] → [groups, share · tile, dim]: the heads that share a key head are more rows of one product.
    grouped = queries.unflatten(1, (groups, -1)).permute(1, 2, 0, 3).reshape(groups, -1, dim)
    scores = torch.matmul(grouped, keys.permute(1, 2, 0)).mul_(dim**-0.5)
    hidden = ~_visible(base, QUERY_TILE, oldest, newest, window)
    scores = scores.unflatten(1, (-1, QUERY_TILE)).masked_fill_(hidden, float("-inf")).flatten(1, 2)
    mixed = torch.matmul(torch.softmax(scores, -1), values.transpose(0, 1))
    return mixed.unflatten(1, (-1, QUERY_TILE)).permute(2, 0, 1, 3).reshape(QUERY_TILE, heads, dim)[:count]


def _pad(x: torch.Tensor, total: int) -> torch.Tensor:
    """x: [n, ...] and zeros behind it up to [total, ...]."""
    if x.shape[0] == total:
        return x
    out = x.new_zeros((total, *x.shape[1:]))
    out[: x.shape[0]] = x
    return out


def _visible(base: int, tile: int, oldest: int, newest: int, window: int | None) -> torch.Tensor:
    """bool [tile, newest − oldest]: which keys each query of the tile may see: not later ones, and at most `window` of them."""
    query = torch.arange(base, base + tile)[:, None]
    key = torch.arange(oldest, newest)[None, :]
    causal = key <= query
    return causal if window is None else causal & (key > query - window)
