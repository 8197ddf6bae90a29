"""Random numbers without a state: each is a function of a seed, a counter and a stream, so that no row can disturb another."""

from __future__ import annotations

import numpy as np

# Streams of random numbers under one seed. Stream 1 belongs to calibration (`bake/calibration/self_sampling.py`); a drafter of
# speculative tokens will need its own, disjoint from these.
DRAW_STREAM = 0
CHILD_STREAM = 2


def philox(seed: int, counter: int, stream: int) -> int:
    """64 bits: the first word of Philox-4x64-10 (Salmon et al., SC 2011) under the key (seed, stream), as numpy counts."""
    key = np.array([seed % (1 << 64), stream], np.uint64)
    return int(np.random.Philox(key=key, counter=np.array([counter, 0, 0, 0], np.uint64)).random_raw())


def uniform(seed: int, position: int, stream: int = DRAW_STREAM) -> float:
    """A number in [0, 1) that depends on its arguments only: the upper 53 bits of `philox`."""
    return (philox(seed, position, stream) >> 11) * 2.0**-53


def child_seed(seed: int, index: int) -> int:
    """The seed of sample `index` of a request with n > 1. Sample 0 keeps the request's seed, so that n = 1 is a case of n > 1.

    The others take 64 bits of Philox from a stream of their own. Asking for more samples never changes the first ones.
    """
    return seed if index == 0 else philox(seed, index, CHILD_STREAM)
