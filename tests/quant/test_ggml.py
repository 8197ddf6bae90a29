"""Q8_0, the block that all others are measured by: bytes worked out by hand, gguf-py's own quantiser bit for bit, exact decoding, and what
blocks cannot hold."""

from __future__ import annotations

import re
from functools import partial

import numpy as np
import pytest
from gguf import GGMLQuantizationType, dequantize, quantize
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays
from numpy.typing import NDArray

from arctool.errors import GeometryError
from arctool.quant.ggml import GGML_BY_ID, GGML_TYPES, Q8_0, block_type
from arctool.quant.rows import bounded_rows

HALVES = np.arange(1 << 16, dtype=np.uint16).view(np.float16)
FINITE = HALVES[np.isfinite(HALVES)]


def blocks_of(scales: NDArray[np.float16], codes: NDArray[np.int8]) -> NDArray[np.uint8]:
    """u8 [blocks, 34] put together here, from f16 [blocks] and int8 [blocks, 32]."""
    return np.concatenate([scales.astype("<f2")[:, None].view(np.uint8), codes.view(np.uint8)], axis=1)


def row(*values: float) -> NDArray[np.float32]:
    """One block: `values`, then zeros."""
    found = np.zeros((1, 32), np.float32)
    found[0, : len(values)] = values
    return found


def test_a_block_has_these_bytes() -> None:
    below_half = float(np.nextafter(np.float32(0.5), np.float32(0)))
    # The largest is 127, so the scale is 1.0 and every value its own code: halves go away from zero, just below a half goes to it.
    data = Q8_0.encode(row(127, -127, 0.5, -0.5, below_half, -below_half, 1.5, 2.5, -2.5, 126.49), "w")
    assert data.tobytes().hex() == "003c" + "7f8101ff000002" + "03fd7e" + "00" * 22


def test_the_scale_is_the_largest_magnitude_over_127_as_f16_and_the_codes_come_from_the_f32() -> None:
    # 1/127 is 0x2008 as f16 (0.0078735), and a code is w · 127: 0.25 → 31.75 → 32.
    data = Q8_0.encode(row(-1.0, 0.25), "w")
    assert data.tobytes().hex() == "0820" + "8120" + "00" * 30
    assert Q8_0.decode(data, 32)[0, :3].tolist() == [-127 * 0.0078735351562500, 32 * 0.0078735351562500, 0.0]


def test_a_block_of_zeros_of_either_sign_is_34_zero_bytes() -> None:
    assert Q8_0.encode(row(0.0, -0.0), "w").tobytes() == bytes(34)
    assert Q8_0.decode(np.zeros((3, 68), np.uint8), 64).tobytes() == bytes(3 * 64 * 4)


def test_a_row_is_its_blocks_in_order_and_a_matrix_its_rows() -> None:
    weights = np.arange(2 * 64, dtype=np.float32).reshape(2, 64)
    data = Q8_0.encode(weights, "w")
    assert data.shape == (2, 68)
    parts = [Q8_0.encode(weights.reshape(4, 1, 32)[i], "w").tobytes() for i in range(4)]
    assert data.tobytes() == b"".join(parts)
    assert len(set(parts)) == 4


MAGNITUDE = st.integers(-22, 22).map(lambda power: np.float32(2.0**power))
"""Of ordinary and of extreme weights: at 2^-22 most scales vanish in f16, at 2^22 the largest is just below overflow."""


@settings(max_examples=300)
@given(
    weights=arrays(np.float32, st.tuples(st.integers(1, 3), st.sampled_from([32, 96])), elements=st.floats(-1, 1, width=32)),
    magnitude=MAGNITUDE,
)
def test_the_bytes_and_the_values_are_those_of_gguf(weights: NDArray[np.float32], magnitude: np.float32) -> None:
    weights = weights * magnitude
    data = Q8_0.encode(weights, "w")
    sizes = np.abs(weights.reshape(-1, 32)).max(axis=1)
    if ((sizes == 0) | (sizes > 127 * 2.0**-126)).all():  # smaller ones: the next test
        assert data.tobytes() == quantize(weights, GGMLQuantizationType.Q8_0).tobytes()
    assert Q8_0.decode(data, weights.shape[1]).tobytes() == dequantize(data, GGMLQuantizationType.Q8_0).tobytes()


def test_gaussian_rows_are_those_of_gguf_and_lose_what_eight_bits_lose() -> None:
    weights = np.random.default_rng(0).standard_normal((64, 576)).astype(np.float32)
    data = Q8_0.encode(weights, "w")
    assert data.tobytes() == quantize(weights, GGMLQuantizationType.Q8_0).tobytes()
    gap = ((Q8_0.decode(data, 576) - weights).astype(np.float64) ** 2).sum() / (weights.astype(np.float64) ** 2).sum()
    assert 2e-5 < gap < 4e-5  # E[max of 32]² / (12 · 127²) = 2.4e-5, and a little more for the variance of the maximum


@pytest.mark.filterwarnings("error")
def test_blocks_whose_inverse_scale_is_beyond_f32_get_zero_codes_where_c_and_gguf_leave_them_undefined() -> None:
    tiny = row(1e-38, -1e-38, 0.0)
    assert Q8_0.encode(tiny, "w").tobytes() == bytes(34)
    with np.errstate(all="ignore"):
        theirs = quantize(tiny, GGMLQuantizationType.Q8_0)
    assert theirs[0, :2].tobytes() == bytes(2)  # the scale is zero there too, so the block decodes to zeros whatever its codes are


def test_every_finite_scale_times_every_code_is_decoded_without_rounding() -> None:
    codes = np.arange(-128, 128).astype(np.int8).reshape(8, 32)
    scales = np.concatenate([FINITE[::29], FINITE[:1100], FINITE[-3:]])  # a sample, all positive subnormals, the most negative
    data = blocks_of(np.repeat(scales, 8), np.tile(codes, (len(scales), 1))).reshape(len(scales), 8 * 34)
    exact = scales.astype(np.float64)[:, None] * np.arange(-128, 128)
    found = Q8_0.decode(data, 256)
    assert found.dtype == np.float32
    np.testing.assert_array_equal(found.astype(np.float64), exact)


def test_chunks_change_no_byte(monkeypatch: pytest.MonkeyPatch) -> None:
    weights = np.random.default_rng(1).standard_normal((7, 96)).astype(np.float32)
    whole = Q8_0.encode(weights, "w")
    decoded = Q8_0.decode(whole, 96)
    chunks = partial(bounded_rows, most=200)
    assert [(part.start, part.stop) for part in chunks(7, 96)] == [(0, 2), (2, 4), (4, 6), (6, 7)]
    monkeypatch.setattr(block_type, "bounded_rows", chunks)
    assert Q8_0.encode(weights, "w").tobytes() == whole.tobytes()
    assert Q8_0.decode(whole, 96).tobytes() == decoded.tobytes()


@pytest.mark.parametrize("in_features", [0, 1, 31, 33, 576 + 16])
def test_a_width_that_is_no_whole_number_of_blocks_is_refused(in_features: int) -> None:
    with pytest.raises(GeometryError, match=f"q8_0: in_features {in_features} is not a positive multiple of the block of 32"):
        Q8_0.row_bytes(in_features)
    with pytest.raises(GeometryError, match="multiple of the block of 32"):
        Q8_0.encode(np.zeros((2, in_features), np.float32), "w")


@pytest.mark.parametrize("poison", [np.nan, np.inf, -np.inf])
def test_a_value_that_is_not_finite_is_refused_with_its_place(poison: float, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(block_type, "bounded_rows", partial(bounded_rows, most=64))
    weights = np.ones((5, 64), np.float32)
    weights[3, 40] = weights[4, 1] = poison
    with pytest.raises(GeometryError, match=re.escape(f"a.b: the value at [3, 40] is {poison}, which is not finite")):
        Q8_0.encode(weights, "a.b")


@pytest.mark.filterwarnings("error")
def test_a_scale_beyond_f16_is_refused_and_the_largest_that_fits_is_not() -> None:
    """f16 ends at 65504; what rounds to it lies below 65520."""
    weights = np.zeros((3, 64), np.float32)
    weights[2, 35] = -127 * 65519
    assert Q8_0.encode(weights, "w")[2, 34:36].view("<f2")[0] == 65504
    weights[2, 35] = 127 * 65520
    with pytest.raises(
        GeometryError, match=r"^a\.b: the q8_0 scale of row 2, block 1 is not finite: values up to 8\.321e\+06 are too large"
    ):
        Q8_0.encode(weights, "a.b")


def test_bytes_that_are_no_rows_of_blocks_are_refused() -> None:
    good = Q8_0.encode(np.ones((2, 64), np.float32), "w")
    Q8_0.check(good, 64, "x")
    for bad in (good[:, :-1], good.reshape(-1), good.view(np.int8), good.reshape(4, 34)):
        with pytest.raises(GeometryError, match=r"x: q8_0 rows of 64 weights need u8 \[rows, 68\], found"):
            Q8_0.check(bad, 64, "x")
        with pytest.raises(GeometryError, match="x: q8_0 rows"):
            Q8_0.check_form(bad, 64, "x")
    for half in (0x7C00, 0xFC00, 0x7E01):
        bad = good.copy()
        bad[1, 34:36] = np.array([half], "<u2").view(np.uint8)
        Q8_0.check_form(bad, 64, "x")
        with pytest.raises(GeometryError, match="x: the q8_0 scale of row 1, block 1 is not finite"):
            Q8_0.check(bad, 64, "x")
        with pytest.raises(GeometryError, match="row 1, block 1 is not finite"):
            Q8_0.decode(bad, 64)


def test_the_worst_error_is_an_upper_bound_and_not_a_loose_one() -> None:
    """One weight of 1, the other 31 half a step below a code, and the scale that f16 rounds up the furthest."""
    worst = 0.0
    for size in np.linspace(1, 2, 97):
        step = size / 127
        for code in (40, 80, 120):
            weights = np.full((1, 32), (code - 0.49999) * step, np.float32)
            weights[0, 0] = size
            for small in (weights, np.where(np.arange(32) == 0, weights, np.float32(0.49999 * step))):
                small = small.astype(np.float32)
                gap = ((Q8_0.decode(Q8_0.encode(small, "w"), 32) - small).astype(np.float64) ** 2).sum()
                worst = max(worst, gap / (small.astype(np.float64) ** 2).sum())
    assert 0.7 * Q8_0.worst_error < worst <= Q8_0.worst_error


def test_descriptors_agree_with_gguf() -> None:
    from gguf.constants import GGML_QUANT_SIZES

    for kind in GGML_TYPES.values():
        theirs = GGMLQuantizationType(kind.id)
        assert theirs.name.lower().replace("_k", "k") == kind.name  # as mistral.rs spells them
        assert kind.block == 1 or GGML_QUANT_SIZES[theirs] == (kind.block, kind.block_bytes)
        assert GGML_BY_ID[kind.id] is kind
        assert all(offset + 2 <= kind.block_bytes for offset in kind.scales)
    rates = {kind.name: kind.bits_per_weight for kind in GGML_TYPES.values()}
    assert rates == {
        "q2k": 2.625,
        "q3k": 3.4375,
        "q4_0": 4.5,
        "q4_1": 5.0,
        "q4k": 4.5,
        "q5_0": 5.5,
        "q5_1": 6.0,
        "q5k": 5.5,
        "q6k": 6.5625,
        "q8_0": 8.5,
        "f16": 16.0,
    }
