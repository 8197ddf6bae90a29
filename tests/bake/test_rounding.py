"""A layer's rounding: scales, degenerate rows, determinism over threads, golden bytes."""

from __future__ import annotations

import hashlib
import tracemalloc
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
from numpy.typing import NDArray

from arctool.bake.search.rounding import GAIN_FACTORS, RungTools, excess_exponent, round_layer, round_rows, search_scales
from arctool.errors import SourceError
from arctool.quant.codebooks import RUNGS
from arctool.quant.hadamard import Rotation

LAYER = np.random.default_rng(0).standard_normal((70, 192)).astype(np.float32)


def rotation(seed: int, weight: NDArray[np.float32] = LAYER) -> Rotation:
    return Rotation.seeded(seed, "layer", *weight.shape)


@pytest.mark.parametrize("name", ["qtip2-v4", "qtip4b"])
def test_any_number_of_threads_gives_the_same_bytes(name: str) -> None:
    tools = RungTools.of(RUNGS[name])
    results = []
    for jobs in (1, 2, 5):
        with ThreadPoolExecutor(jobs) as pool:
            results.append(round_layer(LAYER, "layer", tools, rotation(3), pool))
    for other in results[1:]:
        np.testing.assert_array_equal(results[0].tensor.packed, other.tensor.packed)
        np.testing.assert_array_equal(results[0].tensor.scales, other.tensor.scales)
        assert results[0].relative_error == other.relative_error


def test_the_reported_error_is_that_of_the_decoded_layer() -> None:
    tools = RungTools.of(RUNGS["qtip3"])
    with ThreadPoolExecutor(2) as pool:
        layer = round_layer(LAYER, "layer", tools, rotation(0), pool)
    error = ((layer.tensor.dense().astype(np.float64) - LAYER) ** 2).sum() / (LAYER.astype(np.float64) ** 2).sum()
    assert layer.relative_error == pytest.approx(error, rel=1e-4)
    assert 0.01 < error < 0.03


def test_another_seed_rotates_otherwise() -> None:
    tools = RungTools.of(RUNGS["qtip2-v4"])
    with ThreadPoolExecutor(1) as pool:
        first, second = (round_layer(LAYER, "layer", tools, rotation(seed), pool) for seed in (0, 1))
    assert not np.array_equal(first.tensor.packed, second.tensor.packed)


def test_rows_of_zeros_decode_to_zeros_and_others_are_not_disturbed() -> None:
    tools = RungTools.of(RUNGS["qtip4"])
    rows = np.random.default_rng(1).standard_normal((4, 64)).astype(np.float32)
    rows[2] = 0
    result = round_rows(rows, tools, tools.rung.gain)
    assert result.scales[2] == 0
    assert result.errors[2] == 0
    assert (result.scales[[0, 1, 3]] > 0).all()
    assert not search_scales(rows[2:3], tools).scales.any()


@pytest.mark.parametrize("factor", [1e-30, 1e-6, 1e6, 1e30])
def test_the_error_does_not_depend_on_the_size_of_the_weights(factor: float) -> None:
    tools = RungTools.of(RUNGS["qtip4"])
    rows = np.random.default_rng(2).standard_normal((4, 256)).astype(np.float32)
    plain = round_rows(rows, tools, 1.0).errors / (rows.astype(np.float64) ** 2).sum(axis=1)
    scaled = rows * np.float32(factor)
    errors = round_rows(scaled, tools, 1.0).errors / (scaled.astype(np.float64) ** 2).sum(axis=1)
    np.testing.assert_allclose(errors, plain, rtol=0.05)


def test_refitting_the_scale_never_makes_a_row_worse() -> None:
    tools = RungTools.of(RUNGS["qtip2-v4"])
    rows = np.random.default_rng(3).standard_normal((8, 256)).astype(np.float32)
    rms = np.sqrt((rows.astype(np.float64) ** 2).mean(axis=1))
    states = tools.searcher.search((rows / rms[:, None]).astype(np.float32))
    unfitted = ((rows - tools.values[states].reshape(rows.shape) * rms[:, None]) ** 2).sum(axis=1)
    assert (round_rows(rows, tools, 1.0).errors <= unfitted * (1 + 1e-6)).all()


def test_the_scale_search_keeps_the_best_gain_of_each_row() -> None:
    tools = RungTools.of(RUNGS["qtip4"])
    rows = np.random.default_rng(4).standard_normal((24, 128)).astype(np.float32)
    found = search_scales(rows, tools)
    tried = np.stack([round_rows(rows, tools, tools.rung.gain * factor).errors for factor in GAIN_FACTORS])
    np.testing.assert_array_equal(found.errors, tried.min(axis=0))
    assert len(set(tried.argmin(axis=0))) > 1, "the fixture must have rows that want different gains"


@pytest.mark.filterwarnings("error")
def test_a_layer_of_huge_weights_is_rounded_as_the_same_layer_scaled_down() -> None:
    """A row along the rotation's own signs sums up to 64 times its values, beyond f32. A power of two is nothing but an exponent."""
    tools = RungTools.of(RUNGS["qtip4"])
    weight = LAYER / 64
    weight[5] += rotation(3).signs_in
    with ThreadPoolExecutor(1) as pool:
        plain = round_layer(weight, "layer", tools, rotation(3), pool)
        huge = round_layer(np.ldexp(weight, 123), "layer", tools, rotation(3), pool)
    np.testing.assert_array_equal(huge.tensor.packed, plain.tensor.packed)
    np.testing.assert_array_equal(huge.tensor.scales, np.ldexp(plain.tensor.scales, 123))
    assert huge.relative_error == plain.relative_error
    np.testing.assert_array_equal(huge.tensor.dense(), np.ldexp(plain.tensor.dense(), 123))


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("largest", [float(np.finfo(np.float32).max), -float(np.finfo(np.float32).max)])
def test_a_layer_that_f32_cannot_hold_once_it_is_rotated_is_refused_by_name(largest: float) -> None:
    weight = np.full((64, 64), largest, np.float32)
    with ThreadPoolExecutor(1) as pool, pytest.raises(SourceError, match=r"^a\.b\.weight: holds values up to 3\.4e\+38"):
        round_layer(weight, "a.b", RungTools.of(RUNGS["qtip4"]), rotation(0, weight), pool)


def test_denormal_weights_are_not_scaled() -> None:
    tiny = np.full((4, 8), 3, np.uint32).view(np.float32)
    assert excess_exponent(tiny) == excess_exponent(np.zeros((4, 8), np.float32)) == 0
    assert excess_exponent(np.array([[1.0, -(2.0**99)]], np.float32)) == 0
    assert excess_exponent(np.array([[1.0, -(2.0**100)]], np.float32)) == 1
    assert excess_exponent(np.array([[np.finfo(np.float32).max]])) == 28


def test_after_the_rotation_no_second_copy_of_the_layer_is_made(monkeypatch: pytest.MonkeyPatch) -> None:
    weight = np.random.default_rng(5).standard_normal((1024, 256)).astype(np.float32)
    tools = RungTools.of(RUNGS["qtip2-v4"])
    rotate = Rotation.rotate

    def then_reset(self: Rotation, given: np.ndarray) -> np.ndarray:
        rotated = rotate(self, given)
        peaks.append(tracemalloc.get_traced_memory()[1])
        tracemalloc.reset_peak()
        return rotated

    monkeypatch.setattr(Rotation, "rotate", then_reset)
    peaks: list[int] = []
    with ThreadPoolExecutor(1) as pool:
        round_layer(weight[:2], "layer", tools, rotation(0, weight[:2]), pool)  # compiled before anything is measured
        peaks.clear()
        tracemalloc.start()
        try:
            round_layer(weight, "layer", tools, rotation(0, weight), pool)
            peaks.append(tracemalloc.get_traced_memory()[1])
        finally:
            tracemalloc.stop()
    in_rotation, after = (peak / weight.nbytes for peak in peaks)
    workspace = tools.searcher.workspace_bytes(256) / weight.nbytes
    assert in_rotation < 5.1
    assert after < 1 + 2 / 32 + workspace + 0.6


@pytest.mark.parametrize("name", list(RUNGS))
def test_the_packed_bytes_and_scales_of_a_fixed_matrix_are_golden(name: str) -> None:
    """Multiples of 1/8 in a fixed pattern, so that no generator and no library decides what is baked."""
    matrix = ((np.arange(6 * 32).reshape(6, 32) * 37 % 41) - 20).astype(np.float32) / 8
    signs = Rotation.seeded(0, "model.layers.0.self_attn.q_proj", *matrix.shape)
    with ThreadPoolExecutor(1) as pool:
        tensor = round_layer(matrix, "a.b", RungTools.of(RUNGS[name]), signs, pool).tensor
    digests = [hashlib.sha256(data).hexdigest()[:16] for data in (tensor.packed.tobytes(), tensor.scales.astype("<f4").tobytes())]
    assert tuple(digests) == GOLDEN[name]


GOLDEN = {
    "qtip2": ("37cc4f439a8ab5f3", "f47adfdec88d7f28"),
    "qtip2b": ("0a4283c201f4e5b7", "ff5c50fa02cc88c2"),
    "qtip2-v4": ("366fa35bd4b32935", "b78fd9c6f7de1b55"),
    "qtip2.25-v4": ("36e6dc302a36a620", "3d07d1586cceba93"),
    "qtip3": ("5ca6a2553abc45f4", "2f668c8e8c471aef"),
    "qtip3b": ("c8e086b1a73b3325", "dca25a51ed0a4a50"),
    "qtip4": ("837c163e35cda1c6", "ee726926511b8d3c"),
    "qtip4b": ("731cc237d083e74e", "7248af7dc82066b9"),
}
