"""How far stored weights are from the original ones, and how near any code of that rate could come. Arrays in, numbers out."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

BLOCK = 1 << 20
"""Values that are widened to f64 at a time."""


def relative_error(stored: NDArray[np.float32], original: NDArray[np.float32]) -> float:
    """‖W−Ŵ‖²/‖W‖² of two arrays of one shape, summed in f64; 0 for equal ones, inf where only the original is zero."""
    flat, truth = stored.reshape(-1), original.reshape(-1)
    gap = power = 0.0
    for at in range(0, truth.size, BLOCK):
        want = truth[at : at + BLOCK].astype(np.float64)
        gap += float(np.square(flat[at : at + BLOCK] - want).sum())
        power += float(np.square(want).sum())
    return gap / power if power else (0.0 if gap == 0 else float("inf"))


def rate_limit(bits: float) -> float:
    """2^(−2·bits): the least mean squared error over variance that any code of `bits` a weight has for independent Gaussian weights."""
    return float(2.0 ** (-2 * bits))
