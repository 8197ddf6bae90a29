"""Grouped-query attention over the paged cache, in f32, one sequence and one tile of queries at a time.

A query's result depends on its sequence and its position alone: prefill works in tiles of fixed size that lie at fixed
positions of the sequence, whatever chunk a query arrives in; the decode class computes every query by itself. So neither the
company in a batch nor the way in which a prompt was cut can change a bit.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch

from arctool.kernels.registry import TokenClass
from arctool.run.kv.cache import KVCache
from arctool.run.layers.linear import Projection
from arctool.run.layers.rmsnorm import RMSNorm
from arctool.run.layers.rope import rotate
from arctool.run.step import Span, StepInputs

# Queries and keys of one prefill tile, both at multiples of these positions.
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

    def __call__(self, x: torch.Tensor, step: StepInputs, rotation: tuple[torch.Tensor, torch.Tensor], cache: KVCache) -> torch.Tensor:
        """x: f32 [tokens, hidden] → f32 [tokens, hidden]; the step's keys and values are in `cache` afterwards."""
        return self.o(self.mix(x, step, rotation, cache), step.rows)

    def mix(self, x: torch.Tensor, step: StepInputs, rotation: tuple[torch.Tensor, torch.Tensor], cache: KVCache) -> torch.Tensor:
        """What the output projection reads: f32 [tokens, heads · head_dim]; the step's keys and values are in `cache` afterwards."""
        queries, keys, values = (proj(x, step.rows).unflatten(-1, (-1, self.head_dim)) for proj in (self.q, self.k, self.v))
        if self.q_norm is not None and self.k_norm is not None:
            queries, keys = self.q_norm(queries), self.k_norm(keys)
        cache.write(self.layer, step.slots, rotate(keys, rotation), values)
        return attend(rotate(queries, rotation), step, self.layer, self.window, cache).flatten(1)


def attend(queries: torch.Tensor, step: StepInputs, layer: int, window: int | None, cache: KVCache) -> torch.Tensor:
    """queries: f32 [tokens, heads, head_dim], rotated; the cache holds this step's keys already. Returns the same shape."""
    out = torch.empty_like(queries)
    for span, start in zip(step.spans, step.starts, strict=True):
        for first, last, tile in _tiles(span):
            rows = slice(start + first - span.position, start + last - span.position)
            out[rows] = _attend_tile(queries[rows], span, first, tile, layer, window, cache)
    return out


def _tiles(span: Span) -> Iterator[tuple[int, int, int]]:
    """(first, last, tile): the positions [first, last) of each tile that the span touches, and the tile's full width."""
    tile = QUERY_TILE if span.token_class is TokenClass.PREFILL else 1
    first = span.position
    while first < span.context:
        last = min(span.context, (first // tile + 1) * tile)
        yield first, last, tile
        first = last


def _attend_tile(queries: torch.Tensor, span: Span, first: int, tile: int, layer: int, window: int | None, cache: KVCache) -> torch.Tensor:
    """queries: f32 [n, heads, head_dim] at positions first ... first+n−1, all inside one tile. Returns the same shape."""
    count, heads, dim = queries.shape
    base = first // tile * tile
    step = KEY_TILE if tile > 1 else 1
    oldest = 0 if window is None else max(0, base - window + 1) // step * step
    newest = -(-(base + tile) // step) * step
    present = min(newest, span.context)
    keys, values = cache.read(layer, span.blocks, oldest, present)
    groups = keys.shape[1]
    if tile > 1:
        # Full tiles, always: the shapes that a library sees then depend on the position only.
        queries = _pad(queries, first - base, tile)
        keys, values = (_pad(t, 0, newest - oldest) for t in (keys, values))
    # [tile, groups · share, dim] → [groups, share · tile, dim]: the heads that share a key head are more rows of one product.
    grouped = queries.unflatten(1, (groups, -1)).permute(1, 2, 0, 3).reshape(groups, -1, dim)
    scores = torch.matmul(grouped, keys.permute(1, 2, 0)).mul_(dim**-0.5)
    if tile > 1:
        hidden = ~_visible(base, tile, oldest, newest, window)
        scores = scores.unflatten(1, (-1, tile)).masked_fill_(hidden, float("-inf")).flatten(1, 2)
    mixed = torch.matmul(torch.softmax(scores, -1), values.transpose(0, 1))
    rows = mixed.unflatten(1, (-1, tile)).permute(2, 0, 1, 3).reshape(tile, heads, dim)
    return rows[first - base : first - base + count]


def _pad(x: torch.Tensor, before: int, total: int) -> torch.Tensor:
    """x: [n, ...] inside zeros of [total, ...], from row `before` on."""
    if x.shape[0] == total:
        return x
    out = x.new_zeros((total, *x.shape[1:]))
    out[before : before + x.shape[0]] = x
    return out


def _visible(base: int, tile: int, oldest: int, newest: int, window: int | None) -> torch.Tensor:
    """bool [tile, newest − oldest]: which keys each query of the tile may see: not later ones, and at most `window` of them."""
    query = torch.arange(base, base + tile)[:, None]
    key = torch.arange(oldest, newest)[None, :]
    causal = key <= query
    return causal if window is None else causal & (key > query - window)
