"""What the registry counts, and the promise that a token's bits are its own: at any width, place, company and number of threads."""

from __future__ import annotations

import numba
import numpy as np
import pytest
import torch

from arctool.kernels.cpu.operands import panel_rows
from arctool.kernels.cpu.tile_ir import tile_shape
from arctool.kernels.policy import KINDS
from arctool.kernels.registry import default_registry, linear_name
from arctool.quant.tensor import DenseTensor


def test_every_linear_kernel_that_can_be_counted_is_listed_by_name() -> None:
    listed = {item.name for item in default_registry().implementations if item.operation == "linear" and not item.unavailable}
    assert listed == {linear_name(kind) for kind in KINDS}


@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize(("out_features", "in_features"), [(1, 1), (5, 7), (3, 15), (8, 577), (9, 33), (33, 64), (192, 576)])
def test_a_rows_bits_do_not_depend_on_its_place_or_company_at_any_width(out_features: int, in_features: int, threads: int) -> None:
    before = numba.get_num_threads()
    numba.set_num_threads(min(threads, numba.config.NUMBA_NUM_THREADS))
    try:
        generator = np.random.default_rng(0)
        registry = default_registry()
        weight = registry.prepare(DenseTensor(generator.standard_normal((out_features, in_features)).astype(np.float32)))
        x = torch.from_numpy(generator.standard_normal((70, in_features)).astype(np.float32))
        together = registry.linear(x, weight)
        assert together.unique().numel() > min(out_features, 5)
        for place in (0, 1, 5, 62, 63, 64, 69):
            assert torch.equal(registry.linear(x[place : place + 1], weight)[0], together[place]), place
        for count in (2, 3, 4, 5, 7, 17):
            assert torch.equal(registry.linear(x[3 : 3 + count], weight), together[3 : 3 + count]), count
    finally:
        numba.set_num_threads(before)


def test_a_tile_fits_the_registers_and_panels_are_whole_tiles() -> None:
    assert tile_shape(wide_registers=True) == (4, 4)
    assert tile_shape(wide_registers=False) == (2, 2)
    for pitch in (16, 576, 1536, 14336, 1 << 20):
        rows = panel_rows(pitch)
        assert rows % panel_rows(1 << 30) == 0
        assert rows <= 32
        assert rows == panel_rows(1 << 30) or 4 * pitch * rows <= 256 << 10
