"""The search against exhaustive enumeration on tiny rows, its determinism, and its error on Gaussian rows, rung by rung."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from arctool.bake.search.codebook_training import gaussian_table
from arctool.bake.search.rounding import RungTools, relative_error, search_scales
from arctool.bake.search.viterbi import Searcher
from arctool.quant.codebooks import RUNGS
from arctool.quant.trellis import Geometry, pack_symbols, row_states


def every_stream(geometry: Geometry, steps: int) -> NDArray[np.int32]:
    """States [streams, steps] of all 2^(k·steps) streams, by way of the packing oracle."""
    symbols = np.array(list(itertools.product(range(1 << geometry.k), repeat=steps)))
    return row_states(pack_symbols(symbols, geometry), geometry, steps * geometry.v)


@pytest.mark.parametrize(
    ("geometry", "steps"),
    [
        (Geometry(1, 1, 1), 8),
        (Geometry(1, 1, 4), 10),
        (Geometry(2, 1, 5), 6),
        (Geometry(2, 2, 4), 6),
        (Geometry(3, 2, 7), 4),
        (Geometry(4, 2, 6), 3),
        (Geometry(4, 4, 8), 3),
        (Geometry(5, 1, 5), 3),
        (Geometry(6, 2, 9), 2),
        (Geometry(8, 4, 12), 1),
    ],
    ids=lambda value: getattr(value, "name", value),
)
@settings(max_examples=15)
@given(seed=st.integers(0, 2**32 - 1))
def test_the_search_finds_the_least_cost_of_all_streams_exactly(geometry: Geometry, steps: int, seed: int) -> None:
    """Small integers for values and targets make every sum exact in f32, so the comparison needs no tolerance."""
    generator = np.random.default_rng(seed)
    values = generator.integers(-9, 10, (geometry.states, geometry.v)).astype(np.float32)
    targets = generator.integers(-9, 10, (3, steps * geometry.v)).astype(np.float32)
    costs = ((values[every_stream(geometry, steps)].reshape(-1, steps * geometry.v)[None] - targets[:, None]) ** 2).sum(axis=2)
    found = Searcher(geometry, values).search(targets)
    cost = ((values[found].reshape(targets.shape) - targets) ** 2).sum(axis=1)
    np.testing.assert_array_equal(cost, costs.min(axis=1))


@pytest.mark.parametrize("geometry", [Geometry(2, 1, 5), Geometry(2, 2, 4), Geometry(4, 2, 6)], ids=lambda g: g.name)
def test_where_the_best_stream_is_unique_the_search_finds_that_stream(geometry: Geometry) -> None:
    generator = np.random.default_rng(0)
    values = generator.standard_normal((geometry.states, geometry.v)).astype(np.float32)
    targets = generator.standard_normal((40, 3 * geometry.v)).astype(np.float32)
    streams = every_stream(geometry, 3)
    decoded = values[streams].reshape(len(streams), -1).astype(np.float64)
    found = Searcher(geometry, values).search(targets)
    for row, states in zip(targets, found, strict=True):
        costs = ((decoded - row) ** 2).sum(axis=1)
        best, second = np.partition(costs, 1)[:2]
        assert second - best > 1e-5, "the fixture must have a unique best stream"
        assert states.tolist() == streams[int(np.argmin(costs))].tolist()


@pytest.mark.parametrize("name", list(RUNGS))
def test_a_found_path_is_a_stream_that_the_packing_gives_back(name: str) -> None:
    rung = RUNGS[name]
    tools = RungTools.of(rung)
    rows = np.random.default_rng(1).standard_normal((5, 24 * rung.geometry.v)).astype(np.float32)
    states = tools.searcher.search(rows)
    symbols = states >> (rung.geometry.l - rung.geometry.k)
    np.testing.assert_array_equal(row_states(pack_symbols(symbols, rung.geometry), rung.geometry, rows.shape[1]), states)


@pytest.mark.parametrize("name", list(RUNGS))
def test_a_decoded_row_is_found_again_without_error(name: str) -> None:
    """Rows that are themselves decoded streams have a stream at distance zero, wherever the search looks."""
    rung = RUNGS[name]
    tools, steps = RungTools.of(rung), 40
    symbols = np.random.default_rng(2).integers(0, 1 << rung.geometry.k, (4, steps))
    states = row_states(pack_symbols(symbols, rung.geometry), rung.geometry, steps * rung.geometry.v)
    rows = tools.values[states].reshape(4, -1)
    np.testing.assert_array_equal(tools.values[tools.searcher.search(rows)].reshape(4, -1), rows)


@pytest.mark.parametrize("rows", [1, 2, 3, 7])
def test_a_rows_stream_does_not_depend_on_the_rows_beside_it(rows: int) -> None:
    tools = RungTools.of(RUNGS["qtip2-v4"])
    targets = np.random.default_rng(3).standard_normal((rows, 256)).astype(np.float32)
    alone = np.concatenate([tools.searcher.search(targets[i : i + 1]) for i in range(rows)])
    np.testing.assert_array_equal(tools.searcher.search(targets), alone)


LIMITS = {
    "qtip2-v4": 0.0755,
    "qtip2.25-v4": 0.0565,
    "qtip3": 0.0187,
    "qtip4": 0.0050,
    "qtip3b": 0.0184,
    "qtip4b": 0.0048,
}
"""Mean squared error over variance that each rung has to keep on i.i.d. Gaussian rows of 4096 weights."""

UNREACHED = {"qtip2": (0.067, 0.0690), "qtip2b": (0.069, 0.0693)}
"""(limit that was asked for, limit that we hold): the last test shows why the former cannot be had at this row length."""


def gaussian_error(name: str, rows: int) -> float:
    """Mean squared error over variance on Gaussian rows of 4096 with the row scale search of a bake."""
    tools = RungTools.of(RUNGS[name])
    data = np.random.default_rng(20261129).standard_normal((rows, 4096)).astype(np.float32)
    return relative_error([search_scales(data, tools)], data)


@pytest.mark.parametrize("name", list(LIMITS))
def test_the_error_on_gaussian_rows_keeps_its_limit(name: str) -> None:
    assert gaussian_error(name, 32) <= LIMITS[name]


@pytest.mark.parametrize("name", list(UNREACHED))
def test_the_two_bit_sixteen_state_bit_rungs_miss_the_limit_that_was_asked_for_but_hold_their_own(name: str) -> None:
    asked, held = UNREACHED[name]
    assert asked < held
    assert gaussian_error(name, 16) <= held


def least_cost_from_any_state(values: NDArray[np.float64], k: int, targets: NDArray[np.float64]) -> float:
    """A second Viterbi, forwards and in f64: the least squared error of `targets` [steps, v] over all streams from all start states."""
    nodes = len(values) >> k
    before = np.zeros(nodes)
    low = np.arange(len(values)) & (nodes - 1)
    for target in targets:
        before = (((values - target) ** 2).sum(axis=1) + before[low]).reshape(nodes, 1 << k).min(axis=1)
    return float(before.min())


def test_the_limit_asked_of_qtip2_is_that_of_rows_of_256_with_a_free_start_state() -> None:
    """The figure 0.0658 was measured on rows of 256 whose first 12 bits of history are free: 12 bits that a stored row would have to pay.

    An independent search reproduces it there, and finds what ours finds on long rows, where the gift is spread over 4096 weights.
    """
    values = gaussian_table(Geometry(4, 2, 16), 1, 1.0)
    wide = values.astype(np.float64)
    generator = np.random.default_rng(5)
    short = generator.standard_normal((24, 128, 2))
    free = sum(least_cost_from_any_state(wide, 4, row) for row in short) / short.size
    assert free == pytest.approx(0.0658, abs=0.0012)
    long = generator.standard_normal((1, 2048, 2))
    free_long = least_cost_from_any_state(wide, 4, long[0]) / long.size
    flat = long.reshape(1, -1).astype(np.float32)
    ours = float(((values[Searcher(Geometry(4, 2, 16), values).search(flat)].reshape(1, -1) - flat) ** 2).mean())
    assert free_long <= ours <= free_long + 0.0003
    assert ours > 0.067
