"""e4m3: every code and every bf16 input against torch's own cast, and the matrix with one scale."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from arctool.errors import GeometryError
from arctool.quant.bf16 import from_bf16
from arctool.quant.fp8 import WORST_ERROR, Fp8Tensor, e4m3_values, to_e4m3


def torch_codes(x: np.ndarray) -> np.ndarray:
    """torch's cast, which gives NaN past 464: what saturates is clamped first, as `to_e4m3` says."""
    return torch.from_numpy(np.clip(x, -448, 448)).to(torch.float8_e4m3fn).view(torch.uint8).numpy()


def test_every_code_means_what_torch_says() -> None:
    theirs = torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn).float().numpy()
    ours = e4m3_values()
    numbers = np.isfinite(theirs)
    assert numbers.sum() == 254
    assert np.array_equal(np.isfinite(ours), numbers)
    assert ours[numbers].tobytes() == theirs[numbers].tobytes()


def test_every_bf16_number_rounds_as_in_torch() -> None:
    every = from_bf16(np.arange(1 << 16, dtype=np.uint16))
    numbers = every[np.isfinite(every)]
    assert np.array_equal(to_e4m3(numbers), torch_codes(numbers))
    assert len(np.unique(to_e4m3(numbers))) == 254


def test_f32_rounds_straight_and_not_through_bf16() -> None:
    # Just above the tie between 1 and 1.125: by way of bf16 it would be the tie, and go to the even 1.
    x = np.array([1.0625 + 2.0**-20, 1.0625, 1.0625 - 2.0**-20, -(1.0625 + 2.0**-20)], np.float32)
    assert e4m3_values()[to_e4m3(x)].tolist() == [1.125, 1.0, 1.0, -1.125]


def test_random_f32_of_every_size_rounds_as_in_torch() -> None:
    generator = np.random.default_rng(0)
    x = (generator.standard_normal(200_000) * 2.0 ** generator.integers(-14, 11, 200_000)).astype(np.float32)
    assert np.array_equal(to_e4m3(x), torch_codes(x))


def test_every_value_is_a_fixed_point() -> None:
    codes = np.array([code for code in range(256) if code & 0x7F != 0x7F], np.uint8)
    assert np.array_equal(to_e4m3(e4m3_values()[codes]), codes)


def test_a_matrix_uses_the_whole_range_and_stays_within_the_bound() -> None:
    weights = np.random.default_rng(1).standard_normal((64, 96)).astype(np.float32) * np.float32(0.01)
    weight = Fp8Tensor.encoded(weights, "w")
    assert (weight.codes & 0x7F).max() == 0x7E
    assert float(weight.scale) == pytest.approx(np.abs(weights).max() / 448)
    error = float(np.square(weight.decode() - weights).sum() / np.square(weights).sum())
    assert 1e-5 < error < WORST_ERROR
    assert weight.decode().tobytes() == (e4m3_values()[weight.codes] * weight.scale).tobytes()
    assert weight.rows(slice(3, 9)).decode().tobytes() == weight.decode()[3:9].tobytes()
    assert (weight.label, weight.stored_bits, weight.shape) == ("fp8", 64 * 96 * 8 + 32, (64, 96))


def test_zeros_stay_zeros_of_their_sign() -> None:
    weight = Fp8Tensor.encoded(np.array([[0.0, -0.0]], np.float32), "w")
    assert weight.decode().tobytes() == np.array([[0.0, -0.0]], np.float32).tobytes()
    weight.check("w")


@pytest.mark.parametrize("poison", [np.nan, np.inf, -np.inf])
def test_what_is_no_number_is_refused_by_place(poison: float) -> None:
    weights = np.ones((3, 4), np.float32)
    weights[2, 1] = poison
    with pytest.raises(GeometryError, match=r"w: the value at \[2, 1\] is .*not finite"):
        Fp8Tensor.encoded(weights, "w")


def test_weights_whose_scale_has_no_reciprocal_are_refused() -> None:
    """mistral.rs's file holds both."""
    with pytest.raises(GeometryError, match="w: values up to 1e-37 are too small for an FP8 scale of f32; choose bf16"):
        Fp8Tensor.encoded(np.full((2, 2), 1e-37, np.float32), "w")
    assert Fp8Tensor.encoded(np.full((2, 2), 1e-35, np.float32), "w").decode()[0, 0] == pytest.approx(1e-35)


@pytest.mark.parametrize("scale", [0.0, -1.0, np.nan, np.inf, 3e38])
def test_a_scale_that_gives_no_finite_weights_is_refused(scale: float) -> None:
    with pytest.raises(GeometryError, match="w: the scale"):
        Fp8Tensor(np.zeros((1, 2), np.uint8), np.float32(scale)).check("w")


@pytest.mark.parametrize("code", [0x7F, 0xFF])
def test_a_code_that_is_no_number_is_refused_by_place(code: int) -> None:
    codes = np.zeros((2, 3), np.uint8)
    codes[1, 2] = code
    with pytest.raises(GeometryError, match=r"w: the code at \[1, 2\] is NaN"):
        Fp8Tensor(codes, np.float32(1)).check("w")


def test_codes_are_a_matrix_of_bytes() -> None:
    with pytest.raises(GeometryError, match=r"w: e4m3 codes are u8 \[out, in\], found int8"):
        Fp8Tensor(np.zeros((1, 2), np.int8), np.float32(1)).check_form("w")  # type: ignore[arg-type]
    with pytest.raises(GeometryError, match=r"found uint8 \[2\]"):
        Fp8Tensor(np.zeros(2, np.uint8), np.float32(1)).check_form("w")
