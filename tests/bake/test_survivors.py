"""The fast error-feedback search against its oracle, state for state, and what it costs against a search that may see the whole row."""

from __future__ import annotations

from collections.abc import Callable
from fractions import Fraction
from typing import Any

import numba
import numpy as np
import pytest
from feedback_oracle import Search, fused, search_row
from numpy.typing import NDArray

from arctool.bake.search import survivors, vector_ir
from arctool.bake.search.ldlq import feedback
from arctool.bake.search.select_ir import least_of
from arctool.bake.search.survivor_ir import BLOCK, TRAIL
from arctool.bake.search.survivors import CROWD, MARGIN, Feedback, exact_metric, layout, rows_per_chunk, search_rows, workspace
from arctool.bake.search.viterbi import Searcher
from arctool.quant.codebooks import RUNGS
from arctool.quant.trellis import Geometry, decode_rows, pack_symbols

BY_GEOMETRY = {rung.geometry: rung for rung in reversed(RUNGS.values())}
"""The first rung of every geometry that there is."""

geometries = pytest.mark.parametrize("geometry", list(BY_GEOMETRY), ids=lambda geometry: geometry.name)


def table_of(geometry: Geometry) -> NDArray[np.float32]:
    return BY_GEOMETRY[geometry].codebook().values(geometry)


def hessian(columns: int, seed: int) -> NDArray[np.float64]:
    """Positive definite and far from diagonal: a random Gram matrix, one direction that dominates, a little of everything."""
    generator = np.random.default_rng(seed)
    wide, loud = generator.standard_normal((columns, columns)), generator.standard_normal(columns)
    return np.asarray(wide @ wide.T / columns + 0.3 * np.outer(loud, loud) + 0.02 * np.eye(columns))


def plain(columns: int, geometry: Geometry) -> Feedback:
    """H = I: nothing to feed back."""
    return feedback(np.eye(columns), geometry)


def oracle(targets: NDArray[np.float32], values: NDArray[np.float32], given: Feedback, geometry: Geometry) -> NDArray[np.int64]:
    nodes = 1 << (geometry.l - geometry.k)
    margin = MARGIN * geometry.v * 2.0 ** (-2 * geometry.k / geometry.v) if nodes > CROWD else None
    exact = exact_metric(geometry)
    what = Search(geometry, values, given.metrics, given.far, BLOCK, given.delay, exact, margin)
    return np.stack([search_row(what, row) for row in targets])


def gaussian(rows: int, columns: int, seed: int) -> NDArray[np.float32]:
    return np.random.default_rng(seed).standard_normal((rows, columns)).astype(np.float32)


def test_the_oracles_fused_multiply_add_rounds_once() -> None:
    """Against rationals; the first product lies just under half an f32 unit of c, which f64 cannot tell from half."""
    generator = np.random.default_rng(0)
    a, b, c = (generator.standard_normal(300).astype(np.float32) for _ in range(3))
    c[100:200] *= np.float32(2.0) ** generator.integers(-40, 40, 100)
    c[200:] = -a[200:] * b[200:]
    a[0], b[0], c[0] = 1 + 2.0**-23, 1 - 2.0**-23, 2.0**24 + 2
    found = fused(a, b, c)
    for value, x, y, z in zip(found, a, b, c, strict=True):
        exact = Fraction(float(x)) * Fraction(float(y)) + Fraction(float(z))
        near = [value, np.nextafter(value, np.float32(np.inf)), np.nextafter(value, np.float32(-np.inf))]
        assert abs(Fraction(float(value)) - exact) == min(abs(Fraction(float(one)) - exact) for one in near)
    assert found[0] == 2.0**24 + 2 != np.float32(np.float64(a[0]) * np.float64(b[0]) + np.float64(c[0]))
    assert found[200:].any(), "the fixture must have sums that are all rounding"


@geometries
@pytest.mark.parametrize("columns", [16, 52, 96, 148])
def test_the_states_are_the_oracles(geometry: Geometry, columns: int) -> None:
    """A full chunk, so two rows to a pass over the table; one block, widths that are no multiple of 16, more than the delay."""
    values, given = table_of(geometry), feedback(hessian(columns, columns), geometry)
    targets = gaussian(rows_per_chunk(geometry), columns, 1)
    found = search_rows(targets, layout(values, geometry), given, geometry)
    some = slice(None, None, max(1, len(targets) // 4))
    np.testing.assert_array_equal(found[some], oracle(targets[some], values, given, geometry))


@pytest.mark.parametrize("rows", [1, 3])
@pytest.mark.parametrize("name", ["K8V4L12", "K4V2L16"])
def test_the_last_rows_of_a_layer_are_searched_like_any_others(name: str, rows: int) -> None:
    geometry = Geometry.parse(name)
    values, given = table_of(geometry), feedback(hessian(76, 3), geometry)
    targets = gaussian(rows, 76, 2)
    found = search_rows(targets, layout(values, geometry), given, geometry)
    np.testing.assert_array_equal(found, oracle(targets, values, given, geometry))


@pytest.mark.parametrize("delay", [0, 16, 32, 96])
def test_other_delays_are_searched_as_the_oracle_does(delay: int) -> None:
    geometry = Geometry.parse("K8V4L12")
    values, given = table_of(geometry), feedback(hessian(148, 4), geometry, delay=delay)
    targets = gaussian(rows_per_chunk(geometry), 148, 9)
    found = search_rows(targets, layout(values, geometry), given, geometry)
    np.testing.assert_array_equal(found[::16], oracle(targets[::16], values, given, geometry))
    assert (found != search_rows(targets, layout(values, geometry), feedback(hessian(148, 4), geometry), geometry)).any()


@geometries
def test_among_equals_the_lowest_symbol_and_the_lowest_node_win(geometry: Geometry) -> None:
    """A table of four different values and targets halfway between them: at every step many streams cost the same."""
    values = np.resize(np.array([[-1.0], [1.0], [1.0], [-1.0]], np.float32), (geometry.states, geometry.v))
    targets = np.zeros((rows_per_chunk(geometry), 64), np.float32)
    targets[:, ::5] = 1
    given = plain(64, geometry)
    found = search_rows(targets, layout(values, geometry), given, geometry)
    np.testing.assert_array_equal(found[:1], oracle(targets[:1], values, given, geometry))
    np.testing.assert_array_equal(found, np.repeat(found[:1], len(found), axis=0))


@geometries
def test_the_width_of_a_register_moves_no_bit(geometry: Geometry, monkeypatch: pytest.MonkeyPatch) -> None:
    """Compiled here with the lanes of another machine, past every cache."""
    lanes = {8: 16, 16: 8}[vector_ir.LANES]
    values, given = layout(table_of(geometry), geometry), feedback(hessian(52, 4), geometry)
    targets = gaussian(2, 52, 3)
    usual = search_rows(targets, values, given, geometry)
    made: list[Any] = []

    def uncached() -> Callable[[Any], Any]:
        return lambda function: made.append(numba.njit(nogil=True)(function)) or made[-1]

    monkeypatch.setattr(vector_ir, "LANES", lanes)
    monkeypatch.setattr(survivors, "jit", uncached)
    monkeypatch.setattr(survivors, "feedback_kernel", survivors.feedback_kernel.__wrapped__)
    other = search_rows(targets, values, given, geometry)
    (code,) = made[-1].inspect_llvm().values()
    assert f"@llvm.fma.v{lanes}f32" in code
    assert (f"@llvm.fma.v{24 - lanes}f32" in code) == (lanes == 16 and 1 << (geometry.l - geometry.k) == 8)
    np.testing.assert_array_equal(other, usual)


@geometries
def test_streams_start_in_state_0_and_are_what_is_packed(geometry: Geometry) -> None:
    values = table_of(geometry)
    targets = gaussian(rows_per_chunk(geometry), 84, 5)
    states = search_rows(targets, layout(values, geometry), feedback(hessian(84, 6), geometry), geometry)
    nodes = 1 << (geometry.l - geometry.k)
    before = np.concatenate([np.zeros((len(states), 1), np.int32), states[:, :-1]], axis=1)
    np.testing.assert_array_equal(states & (nodes - 1), before >> geometry.k)
    packed = pack_symbols(states >> (geometry.l - geometry.k), geometry)
    scales = np.ones(len(states), np.float32)
    np.testing.assert_array_equal(decode_rows(packed, geometry, values, scales, 84), values[states].reshape(len(states), 84))
    assert len(np.unique(states)) > states.size / 4


def decided_late(targets: NDArray[np.float32], values: NDArray[np.float64], geometry: Geometry, delay: int) -> NDArray[np.int64]:
    """A plain Viterbi search in f64 of one row [steps, v] that commits BLOCK columns as soon as it is `delay` further."""
    nodes, symbols = 1 << (geometry.l - geometry.k), 1 << geometry.k
    left = np.arange(geometry.states) % nodes
    cost, paths = np.full(nodes, np.inf), np.zeros((nodes, 0), np.int64)
    cost[0] = 0
    for t, target in enumerate(targets, 1):
        arriving = (cost[left] + ((values - target) ** 2).sum(axis=1)).reshape(nodes, symbols)
        chosen = np.arange(nodes) * symbols + arriving.argmin(axis=1)
        cost, paths = arriving.min(axis=1), np.concatenate([paths[left[chosen]], chosen[:, None]], axis=1)
        late = t - delay // geometry.v
        if t * geometry.v % BLOCK == 0 and late > 0 and t < len(targets):
            cost[(paths[:, :late] != paths[cost.argmin(), :late]).any(axis=1)] = np.inf
    return np.asarray(paths[cost.argmin()])


@pytest.mark.parametrize("name", ["K8V4L12", "K9V4L12", "K4V1L12"])
def test_without_feedback_it_is_a_viterbi_search_that_decides_late(name: str) -> None:
    geometry = Geometry.parse(name)
    values = table_of(geometry)
    targets = gaussian(rows_per_chunk(geometry), 240, 7)
    found = search_rows(targets, layout(values, geometry), feedback(np.eye(240), geometry, delay=32), geometry)
    wanted = [decided_late(row.reshape(-1, geometry.v), values.astype(np.float64), geometry, 32) for row in targets[:2]]
    np.testing.assert_array_equal(found[:2], wanted)
    whole = Searcher(geometry, values).search(targets)
    assert (found != whole).any(), "the fixture must have decisions that the delay changes"


@geometries
def test_deciding_late_costs_at_most_three_hundredths_over_a_search_of_the_whole_row(geometry: Geometry) -> None:
    values, rows = table_of(geometry), 32
    targets = gaussian(rows, 1024, 8)
    table, given = layout(values, geometry), plain(1024, geometry)
    size = rows_per_chunk(geometry)
    states = np.concatenate([search_rows(targets[at : at + size], table, given, geometry) for at in range(0, rows, size)])
    whole = Searcher(geometry, values).search(targets)
    late, least = (((values[found].reshape(targets.shape) - targets).astype(np.float64) ** 2).mean() for found in (states, whole))
    assert least < late <= 1.03 * least


@pytest.mark.parametrize("count", [4, 8, 64])
def test_the_least_of_values_is_found_in_every_place(count: int) -> None:
    least = numba.njit(lambda values: least_of(values, count))
    values = np.random.default_rng(count).uniform(-5, 5, count).astype(np.float32)
    for place in range(count):
        found = values.copy()
        found[place] = -6 - place
        assert least(found) == -6 - place


def test_the_survivors_feedback_begins_at_a_cache_line_and_at_zero() -> None:
    for geometry in BY_GEOMETRY:
        nodes = 1 << (geometry.l - geometry.k)
        trails, beyond = workspace(geometry, 3, 48)
        assert (trails.shape, beyond.shape) == ((2, 3, TRAIL * nodes), (2, 3, 48 * nodes))
        for space in (trails, beyond):
            assert space.ctypes.data % 64 == 0
            assert not space.any()
