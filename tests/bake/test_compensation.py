"""What a layer should be when its input has drifted: against ridge regression solved by numpy in f64."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import Executor, ThreadPoolExecutor

import numpy as np
import pytest
import torch

from arctool.bake.calibration import compensation
from arctool.bake.calibration.compensation import Change, change, compensated
from arctool.bake.calibration.hessian import Moments

ROWS, WIDTH, OUT = 900, 48, 20


@pytest.fixture
def pool() -> Iterator[Executor]:
    with ThreadPoolExecutor(2) as executor:
        yield executor


@pytest.fixture
def rng() -> np.random.Generator:
    return np.random.default_rng(7)


def inputs(rng: np.random.Generator) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """(x, z, states that were lost f32 [rows, out], weight): z is x plus a linear drift and noise."""
    mixing = rng.standard_normal((WIDTH, WIDTH)) / 6
    x = rng.standard_normal((ROWS, WIDTH)) @ (np.eye(WIDTH) + mixing)
    z = x + 0.3 * x @ rng.standard_normal((WIDTH, WIDTH)) / 7 + 0.05 * rng.standard_normal((ROWS, WIDTH))
    lost = x @ rng.standard_normal((WIDTH, OUT)) / 9 + 0.1 * rng.standard_normal((ROWS, OUT))
    return (*(part.astype(np.float32) for part in (x, z, lost)), rng.standard_normal((OUT, WIDTH)).astype(np.float32))


def measured(x: np.ndarray, z: np.ndarray, lost: np.ndarray | None, pool: Executor) -> Change | None:
    gaps = [torch.from_numpy(z - x)] + ([] if lost is None else [torch.from_numpy(lost)])
    moments = Moments(WIDTH, [gap.shape[1] for gap in gaps])
    moments.add(torch.from_numpy(x), pool, gaps)
    return change(moments.mean(), 0.03, moments.crossed(0), None if lost is None else moments.crossed(1), pool)


def ridge(wanted: np.ndarray, x: np.ndarray) -> np.ndarray:
    """argmin over V of mean ‖wanted − V x‖² + damping ‖V − 0‖², f64 [out, in]."""
    wide = x.astype(np.float64)
    moments = wide.T @ wide / len(wide)
    damped = moments + np.eye(WIDTH) * 0.03 * np.diag(moments).mean()
    return np.linalg.solve(damped, wide.T @ wanted.astype(np.float64) / len(wide)).T


@pytest.mark.parametrize("share", [1.0, 0.5])
def test_the_target_is_the_ridge_regression_of_what_the_unquantised_layer_would_give(
    pool: Executor, rng: np.random.Generator, share: float
) -> None:
    x, z, _, weight = inputs(rng)
    found = measured(x, z, None, pool)
    assert found is not None
    assert found.states is None
    expected = weight + share * ridge((z - x) @ weight.T, x)
    np.testing.assert_allclose(compensated(weight, found, pool, share), expected, atol=2e-4)
    assert np.abs(expected - weight).max() > 0.1


def test_what_the_hidden_states_have_lost_is_asked_of_the_layer_whose_output_joins_them(pool: Executor, rng: np.random.Generator) -> None:
    x, z, lost, weight = inputs(rng)
    found = measured(x, z, lost, pool)
    assert found is not None
    assert found.states is not None
    np.testing.assert_allclose(found.states, ridge(lost, x), atol=2e-4)
    np.testing.assert_allclose(compensated(weight, found, pool, 1.0), weight + ridge((z - x) @ weight.T + lost, x), atol=3e-4)


def test_the_target_comes_nearer_to_the_unquantised_output_than_the_weight_itself(pool: Executor, rng: np.random.Generator) -> None:
    x, z, lost, weight = inputs(rng)
    found = measured(x, z, lost, pool)
    assert found is not None
    wanted = z @ weight.T + lost
    before, after = (np.square(wanted - x @ v.T).mean() for v in (weight, compensated(weight, found, pool, 1.0)))
    assert after < before / 3


def test_without_drift_nothing_changes(pool: Executor, rng: np.random.Generator) -> None:
    x, _, _, weight = inputs(rng)
    found = measured(x, x, np.zeros((ROWS, OUT), np.float32), pool)
    assert found is not None
    assert np.array_equal(compensated(weight, found, pool, 1.0), weight)


@pytest.mark.parametrize("value", [np.nan, 0.0], ids=["not finite", "zero"])
def test_moments_without_a_factor_give_no_change(pool: Executor, value: float) -> None:
    assert change(np.full((WIDTH, WIDTH), value, np.float32), 0.03, np.ones((WIDTH, WIDTH), np.float32), None, pool) is None


def test_a_drift_that_is_not_finite_gives_no_change(pool: Executor) -> None:
    drift = np.ones((WIDTH, WIDTH), np.float32)
    drift[3, 4] = np.inf
    assert change(np.eye(WIDTH, dtype=np.float32), 0.03, drift, None, pool) is None


def test_the_number_of_threads_moves_no_bit(rng: np.random.Generator, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compensation, "STRIPE", 8)
    x, z, lost, weight = inputs(rng)
    results = []
    for threads in (1, 3):
        with ThreadPoolExecutor(threads) as executor:
            found = measured(x, z, lost, executor)
            assert found is not None
            results.append(compensated(weight, found, executor, 0.5))
    assert np.array_equal(*results)
    assert not np.array_equal(results[0], weight)
