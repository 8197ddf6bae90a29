"""Rows of a weight: how some are named, and how many at a time keep memory bounded."""

from __future__ import annotations

import math
from collections.abc import Iterator

import numpy as np
from numpy.typing import NDArray

CHUNK_WEIGHTS = 1 << 20
"""Weights that are quantised, checked or decoded at a time: a table of a hundred million needs no second f32 copy of itself."""

Rows = slice | NDArray[np.int64]
"""Which rows of a weight: a run of them (a view), or some by number (a copy)."""


def bounded_rows(rows: int, *inner: int, most: int = CHUNK_WEIGHTS) -> Iterator[slice]:
    """Slices of the first axis of a [rows, *inner] array, of about `most` values each, at least one row."""
    step = max(1, most // max(1, math.prod(inner)))
    return (slice(start, min(rows, start + step)) for start in range(0, rows, step))


def first_wrong(right: NDArray[np.bool_]) -> tuple[int, ...] | None:
    """The index of the first False, None where all is True."""
    if right.all():
        return None
    return tuple(int(part) for part in np.unravel_index(int(np.argmin(right)), right.shape))
