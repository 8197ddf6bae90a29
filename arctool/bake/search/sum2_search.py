"""Finds the constants of `sum2` that `quant/codebooks.py` holds: the least error among many random pairs of hashes, for one K.

Random pairs differ by two per cent, since a multiplier decides how evenly the 2^K branches of a trellis node spread. Three rounds on
ever more Gaussian rows keep the best share each time; the draws are seeded, so the same candidates are seen on every machine.

    python -m arctool.bake.search.sum2_search 4          # prints the best pairs and their errors
"""

from __future__ import annotations

import logging
import sys
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from arctool.bake.search.viterbi import Searcher
from arctool.quant.codebooks import Sum2Constants, sum2_values_of
from arctool.quant.trellis import Geometry

log = logging.getLogger(__name__)

ROW = 4096
GAINS = {4: 0.98, 6: 0.92, 8: 0.88}
"""Scale of unit Gaussian rows before the search, by K: near the rungs' gains, where the error is flat."""


@dataclass(frozen=True)
class Round:
    """`rows` of 4096 weights for each candidate; the best `kept` share goes on."""

    rows: int
    kept: float


ROUNDS = (Round(4, 0.06), Round(16, 0.3), Round(64, 1.0))


def draw(generator: np.random.Generator) -> Sum2Constants:
    """A random pair of (odd multiplier, increment)."""
    multipliers = [int(m) | 1 for m in generator.integers(1 << 16, 1 << 32, 2)]
    increments = [int(a) for a in generator.integers(0, 1 << 32, 2)]
    return (multipliers[0], increments[0]), (multipliers[1], increments[1])


def error(constants: Sum2Constants, k: int, rows: NDArray[np.float32]) -> float:
    """Mean squared error over variance of `rows` f32 [n, 4096], one fitted scale a row."""
    values = sum2_values_of(constants)
    states = Searcher(Geometry(k, 2, 16), values).search(rows * np.float32(GAINS[k]))
    decoded = values[states].reshape(rows.shape)
    scales = (rows * decoded).sum(axis=1) / (decoded * decoded).sum(axis=1)
    return float(((rows - scales[:, None] * decoded) ** 2).mean() / (rows**2).mean())


def search(k: int, candidates: int, seed: int, jobs: int) -> list[tuple[float, Sum2Constants]]:
    """The survivors of the last round with their errors, best first."""
    generator = np.random.Generator(np.random.PCG64([seed, k]))
    found = [(0.0, draw(generator)) for _ in range(candidates)]
    with ThreadPoolExecutor(jobs) as pool:
        for index, stage in enumerate(ROUNDS):
            rows = generator.standard_normal((stage.rows, ROW)).astype(np.float32)
            errors = pool.map(lambda one: error(one[1], k, rows), found)  # noqa: B023  # consumed before `rows` changes
            found = sorted(zip(errors, (constants for _, constants in found), strict=True))
            log.info("K%d round %d: %d candidates, best %.5f, median %.5f", k, index, len(found), found[0][0], found[len(found) // 2][0])
            found = found[: max(1, int(len(found) * stage.kept))]
    return found


def main(k: int, candidates: int = 4000, jobs: int = 2) -> None:
    """Print the best pairs for one K."""
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    for value, ((m0, a0), (m1, a1)) in search(k, candidates, 1, jobs)[:5]:
        log.info("%.5f ((0x%08X, 0x%08X), (0x%08X, 0x%08X))", value, m0, a0, m1, a1)


if __name__ == "__main__":
    main(*(int(argument) for argument in sys.argv[1:]))
