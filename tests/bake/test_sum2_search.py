"""The constants of `sum2` come out of the committed search: they are among its seeded draws, and a good pair beats a poor one."""

from __future__ import annotations

import numpy as np
import pytest

from arctool.bake.search.sum2_search import draw, error
from arctool.quant.codebooks import SUM2_CONSTANTS

CANDIDATES = {4: 6000, 6: 1000, 8: 4000}
"""How many pairs were drawn for each K, with seed 1."""


@pytest.mark.parametrize("k", list(SUM2_CONSTANTS))
def test_the_shipped_constants_are_among_the_seeded_draws(k: int) -> None:
    generator = np.random.Generator(np.random.PCG64([1, k]))
    assert SUM2_CONSTANTS[k] in [draw(generator) for _ in range(CANDIDATES[k])]


def test_the_search_tells_a_good_pair_from_a_poor_one() -> None:
    rows = np.random.default_rng(0).standard_normal((4, 4096)).astype(np.float32)
    twins = ((0x90EBF367, 0), (0x90EBF367, 0))
    assert error(SUM2_CONSTANTS[8], 8, rows) < 0.0052 < error(twins, 8, rows)
