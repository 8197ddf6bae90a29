"""The policy over its whole domain, and the names that the registry counts under."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
import torch

from arctool.kernels.cpu import products
from arctool.kernels.policy import KINDS, PREFILL_TILE, KernelChoice, TokenClass, choose_linear
from arctool.kernels.registry import default_registry, linear_name
from arctool.quant.tensor import DenseTensor


def test_prompts_go_through_tiles_where_those_are_independent_and_everything_else_is_fused() -> None:
    domain = list(itertools.product(TokenClass, (False, True)))
    assert len(domain) == 4
    for token_class, independent in domain:
        tiled = token_class is TokenClass.PREFILL and independent
        assert choose_linear(token_class, independent) == (KernelChoice("tiles", PREFILL_TILE) if tiled else KernelChoice("fused", 0))


def test_the_batch_size_cannot_be_asked_about() -> None:
    """The promise that neighbours change nothing rests on the policy not knowing how many there are."""
    assert set(choose_linear.__annotations__) == {"token_class", "tiles_independent", "return"}


def test_every_linear_kernel_that_can_be_counted_is_listed_by_name() -> None:
    listed = {item.name for item in default_registry().implementations if item.operation == "linear" and not item.unavailable}
    assert listed == {linear_name(kernel, kind) for kernel in ("fused", "tiles") for kind in KINDS}


@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize(("out_features", "in_features"), [(5, 7), (3, 15), (8, 577), (9, 33), (12, 64), (192, 576)])
def test_a_prompt_rows_bits_do_not_depend_on_its_place_or_company_at_any_width(out_features: int, in_features: int, threads: int) -> None:
    """Narrow matrices are where a library's edge kernels differ from row to row of a tile; the self-check must catch them."""
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        generator = np.random.default_rng(0)
        registry = default_registry()
        weight = registry.prepare(DenseTensor(generator.standard_normal((out_features, in_features)).astype(np.float32)))
        x = torch.from_numpy(generator.standard_normal((70, in_features)).astype(np.float32))
        together = registry.linear(x, weight, TokenClass.PREFILL)
        for place in (0, 1, 5, 62, 63, 64, 69):
            alone = registry.linear(x[place : place + 1], weight, TokenClass.PREFILL)
            assert torch.equal(alone[0], together[place]), place
    finally:
        torch.set_num_threads(before)


def test_a_shape_that_fails_the_self_check_is_served_by_the_fused_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("arctool.kernels.registry.tiles_independent", lambda matrix: False)
    registry = default_registry()
    registry.linear(torch.ones((3, 16)), registry.prepare(DenseTensor(np.ones((4, 16), np.float32))), TokenClass.PREFILL)
    assert registry.engagement() == {"cpu.fused.dense-f32": 1}


def test_the_self_check_sees_a_product_that_treats_places_differently(monkeypatch: pytest.MonkeyPatch) -> None:
    matrix = np.random.default_rng(0).standard_normal((16, 64)).astype(np.float32)
    assert products.tiles_independent(matrix)
    honest = products.tiles

    for place in (0, 1, 62, 63):

        def crooked(x: np.ndarray, matrix: np.ndarray, place: int = place) -> np.ndarray:
            y = honest(x, matrix)
            y[place : place + 1] = np.nextafter(y[place : place + 1], np.float32(np.inf))
            return y

        monkeypatch.setattr(products, "tiles", crooked)
        assert not products.tiles_independent(matrix), place


def test_the_self_check_sees_a_row_that_feels_its_company(monkeypatch: pytest.MonkeyPatch) -> None:
    matrix = np.random.default_rng(0).standard_normal((16, 64)).astype(np.float32)
    honest = products.tiles

    def sociable(x: np.ndarray, matrix: np.ndarray) -> np.ndarray:
        return honest(x, matrix) + np.float32(len(x) > 1)

    monkeypatch.setattr(products, "tiles", sociable)
    assert not products.tiles_independent(matrix)
