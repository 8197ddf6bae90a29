"""A step's attention as units of work: queries in tiles, and long contexts of single queries in chunks that lanes can share.

How the work is cut is free: no cut changes a bit (`attention`).
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from arctool.kernels.cpu.attention import KEY_CHUNK, QUERY_TILE

SPLIT_FROM = 4 * KEY_CHUNK
"""Context of a single query from which its chunks are computed apart: below, joining them costs more than it spares."""

MOST_SPLIT = 16
"""Spans of a step up to which any is split: more keep all lanes busy anyway."""

MOST_PARTS = 4096
"""Parts that one step may have: bounds the memory for them."""


def units_of(
    starts: Sequence[int], positions: Sequence[int], counts: Sequence[int], tables: Sequence[int], windows: Sequence[int]
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """(units i64 [n, 6], splits i64 [m, 3]) of spans: first row, first position, tokens, where the block table begins.

    `windows`: how many keys a query sees at most, 0 for all: one number for each kind of layer; a split serves them all.
    """
    units: list[tuple[int, int, int, int, int, int]] = []
    splits: list[tuple[int, int, int]] = []
    parts = 0
    unlimited, few = 0 in windows, len(starts) <= MOST_SPLIT
    for start, position, count, table in zip(starts, positions, counts, tables, strict=True):
        chunks = position // KEY_CHUNK + 1
        if few and count == 1 and unlimited and position >= SPLIT_FROM and parts + chunks <= MOST_PARTS:
            units.extend((start, 1, position, table, chunk, parts + chunk) for chunk in range(chunks))
            splits.append((start, parts, chunks))
            parts += chunks
            continue
        for first in range(0, count, QUERY_TILE):
            units.append((start + first, min(QUERY_TILE, count - first), position + first, table, -1, 0))
    return np.array(units, np.int64).reshape(-1, 6), np.array(splits, np.int64).reshape(-1, 3)
