"""Second moments of a layer's inputs: right to rounding, blind to rows that are no numbers, and the same for any number of threads."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from arctool.bake.calibration.hessian import LARGEST, STRIPE, Moments, damping

FEATURES = 2 * STRIPE + 44
UNIT = 2.0**-24


def inputs(rows: int, features: int = FEATURES, seed: int = 0) -> NDArray[np.float32]:
    """Rows whose features have all sizes and a mean of their own."""
    generator = np.random.default_rng(seed)
    return ((generator.standard_normal((rows, features)) + 0.5) * np.geomspace(1e-3, 1e3, features)).astype(np.float32)


def moments(batches: list[NDArray[np.float32]], jobs: int = 1, gaps: list[NDArray[np.float32]] | None = None) -> Moments:
    """The sum over `batches`, each with its gap."""
    made = Moments(batches[0].shape[1], [] if gaps is None else [gaps[0].shape[1]])
    with ThreadPoolExecutor(jobs) as pool:
        for index, batch in enumerate(batches):
            made.add(torch.from_numpy(batch), pool, [] if gaps is None else [torch.from_numpy(gaps[index])])
    return made


def bound(left: NDArray[np.float32], right: NDArray[np.float32]) -> NDArray[np.float64]:
    """What f32 may lose in the mean of leftᵀ·right: a rounding for each of the row's products and sums, and one for the division."""
    wide = np.abs(left).astype(np.float64).T @ np.abs(right).astype(np.float64)
    return np.asarray((len(left) + 2) * UNIT * wide / len(left))


def test_they_are_the_mean_of_x_xt_over_all_batches() -> None:
    batches = [inputs(40, seed=1), inputs(7, seed=2), inputs(1, seed=3)]
    made = moments(batches)
    rows = np.concatenate(batches)
    wide = rows.astype(np.float64)
    found = made.mean()
    assert (made.rows, made.dropped, found.dtype) == (48, 0, np.float32)
    assert (np.abs(found - wide.T @ wide / 48) <= bound(rows, rows)).all()
    np.testing.assert_allclose(found, found.T, rtol=1e-5)


def test_gaps_are_taken_against_the_inputs_that_they_came_with() -> None:
    batches, gaps = [inputs(30, seed=4), inputs(9, seed=5)], [inputs(30, 5, seed=6), inputs(9, 5, seed=7)]
    made = moments(batches, gaps=gaps)
    rows, apart = np.concatenate(batches), np.concatenate(gaps)
    want = apart.astype(np.float64).T @ rows.astype(np.float64) / 39
    assert (np.abs(made.crossed(0) - want) <= bound(apart, rows)).all()


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf, 2 * LARGEST, -2 * LARGEST])
def test_a_row_that_is_no_number_or_too_large_is_left_out_and_counted(bad: float) -> None:
    rows, gap = inputs(20, 40), inputs(20, 3)
    hurt, torn = rows.copy(), gap.copy()
    hurt[4, 7] = hurt[11, 0] = hurt[11, 39] = bad
    torn[15, 1] = bad
    whole = [row for row in range(20) if row not in (4, 11, 15)]
    found, clean = moments([hurt], gaps=[torn]), moments([rows[whole]], gaps=[gap[whole]])
    assert (found.rows, found.dropped) == (17, 3)
    np.testing.assert_array_equal(found.crossed(0), clean.crossed(0))
    np.testing.assert_array_equal(found.mean(), clean.mean())


def test_the_largest_activations_that_are_kept_do_not_overflow() -> None:
    made = moments([np.full((2**15, 1), LARGEST, np.float32)])
    assert (made.rows, made.dropped) == (2**15, 0)
    assert made.mean() == LARGEST**2


def test_without_a_usable_row_there_is_no_mean() -> None:
    made = moments([np.full((3, 5), np.nan, np.float32)])
    assert (made.rows, made.dropped) == (0, 3)
    assert np.isnan(made.mean()).all()


def test_any_number_of_threads_gives_the_same_bits() -> None:
    batches, gaps = [inputs(33, seed=8), inputs(32, seed=9)], [inputs(33, 70, seed=10), inputs(32, 70, seed=11)]
    found = []
    for jobs in (1, 3):
        made = moments(batches, jobs, gaps)
        found.append((made.crossed(0).tobytes(), made.mean().tobytes()))
    assert found[0] == found[1]


@pytest.mark.parametrize(
    ("columns", "rows", "share"),
    [(576, 32768, 0.01), (1536, 32768, 0.0234375), (1536, 4096, 0.1875), (100, 50, 1.0), (100, 1, 1.0), (50, 2500, 0.01)],
)
def test_a_mean_over_few_rows_is_damped_by_as_much_as_it_is_uncertain(columns: int, rows: int, share: float) -> None:
    assert damping(columns, rows) == share
    assert damping(columns, rows, 0.0) == 0.01
