"""The search for codes of K-quants: how little it loses, that it never falls behind plain rounding, and the blocks that trip searches."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays
from numpy.typing import NDArray

from arctool.quant.ggml import GGML_TYPES, Q2K, Q4K, Q6K, GgmlType, k_quants, k_search, k_types

KINDS = {name: GGML_TYPES[name] for name in ("q2k", "q3k", "q4k", "q5k", "q6k")}
FORMS = {"q2k": k_types.Q2K_FORM, "q3k": k_types.Q3K_FORM, "q4k": k_types.Q4K_FORM, "q5k": k_types.Q5K_FORM, "q6k": k_types.Q6K_FORM}

every = pytest.mark.parametrize("name", KINDS)


def gaussian(rows: int, seed: int = 0) -> NDArray[np.float32]:
    return np.random.default_rng(seed).standard_normal((rows, 256)).astype(np.float32)


def restored(kind: GgmlType, weights: NDArray[np.float32]) -> NDArray[np.float64]:
    return kind.decode(kind.encode(weights, "w"), weights.shape[-1]).astype(np.float64)


def relative(kind: GgmlType, weights: NDArray[np.float32]) -> float:
    """‖W−Ŵ‖²/‖W‖² after a round trip."""
    return float(np.square(restored(kind, weights) - weights).sum() / np.square(weights.astype(np.float64)).sum())


def rounded(weights: NDArray[np.float32], levels: int, sub: int) -> float:
    """What min-max rounding loses with real scales, which no super-block need hold: `levels` codes from the least to the largest weight."""
    parts = weights.astype(np.float64).reshape(-1, sub)
    low = parts.min(axis=1, keepdims=True)
    step = np.ptp(parts, axis=1, keepdims=True) / (levels - 1)
    return float(np.square(np.rint((parts - low) / step) * step + low - parts).sum() / np.square(parts).sum())


def absmax(weights: NDArray[np.float32], top: int, sub: int) -> float:
    """What rounding to −top … top loses, with real scales."""
    parts = weights.astype(np.float64).reshape(-1, sub)
    step = np.abs(parts).max(axis=1, keepdims=True) / top
    return float(np.square(np.rint(parts / step) * step - parts).sum() / np.square(parts).sum())


MEASURED = {"q2k": 0.0675, "q3k": 0.0208, "q4k": 0.00493, "q5k": 0.001208, "q6k": 0.000301}
"""Error over variance of Gaussian rows is 0.0669, 0.0206, 0.00489, 0.001196, 0.000298; ggml's own search, written out for a comparison,
loses 0.0892, 0.0234, 0.00515, 0.00131, 0.000315."""


@every
def test_gaussian_rows_lose_less_than_these(name: str) -> None:
    weights, form = gaussian(512), FORMS[name]
    found = relative(KINDS[name], weights)
    assert 0.95 * MEASURED[name] < found < MEASURED[name]
    plain = rounded(weights, form.high + 1, form.sub) if form.minimum_high else absmax(weights, form.high, form.sub)
    assert found < 0.9 * plain


@every
def test_heavy_tails_and_shifted_rows_lose_less_than_plain_rounding(name: str) -> None:
    generator, form = np.random.default_rng(5), FORMS[name]
    for weights in (generator.standard_t(3, (64, 256)), generator.laplace(size=(64, 256)), generator.uniform(-1, 1, (64, 256))):
        weights = weights.astype(np.float32)
        plain = rounded(weights, form.high + 1, form.sub) if form.minimum_high else absmax(weights, form.high, form.sub)
        assert relative(KINDS[name], weights) < 1.02 * plain


@every
def test_a_grid_that_the_type_holds_exactly_is_found_all_but_exactly(name: str) -> None:
    """Weights that are codes themselves, with scales of whole f16 numbers: the search must come back to them."""
    form, generator = FORMS[name], np.random.default_rng(2)
    codes = generator.integers(form.low, form.high + 1, (40, 256 // form.sub, form.sub))
    codes[:, :, :2] = form.low, form.high
    scales = np.full((40, 256 // form.sub, 1), 0.25)
    weights = (codes * scales - (0.5 if form.minimum_high else 0)).reshape(40, 256).astype(np.float32)
    assert relative(KINDS[name], weights) < 1e-6


@every
@pytest.mark.filterwarnings("error")
def test_zeros_of_either_sign_are_one_block_of_zero_scales(name: str) -> None:
    kind = KINDS[name]
    data = kind.encode(np.zeros((2, 256), np.float32), "w")
    assert not kind.decode(data, 256).any()
    assert all(not data[:, offset : offset + 2].any() for offset in kind.scales)
    assert kind.encode(np.full((2, 256), -0.0, np.float32), "w").tobytes() == data.tobytes()


@every
@pytest.mark.parametrize("value", [1.0, -1.0, 0.3, -0.7, 1000.0])
def test_constant_blocks_are_all_but_exact(name: str, value: float) -> None:
    assert relative(KINDS[name], np.full((1, 256), value, np.float32)) < 1e-6


@every
@pytest.mark.parametrize("sign", [1, -1])
def test_one_outlier_survives_and_the_rest_is_no_worse_than_lost(name: str, sign: int) -> None:
    weights = gaussian(8) * np.float32(0.01)
    weights[:, 77] = sign * 30
    found = restored(KINDS[name], weights)
    np.testing.assert_allclose(found[:, 77], weights[:, 77], rtol=2e-3)
    others = np.arange(256) != 77
    assert np.square(found - weights)[:, others].sum() <= np.square(weights.astype(np.float64))[:, others].sum() * 1.001


@every
def test_positive_and_negative_blocks_are_equally_well_kept(name: str) -> None:
    """Offsets only lower values: without the mirror image, positive weights far from zero would cost a type with minima dearly."""
    weights = 4 + gaussian(64) * np.float32(0.25)
    above, below = relative(KINDS[name], weights), relative(KINDS[name], -weights)
    assert above == pytest.approx(below, rel=0.02)
    if FORMS[name].minimum_high:
        span = np.square(weights).mean() / np.square(weights - 4).mean()
        assert above * span < 1.5 * relative(KINDS[name], gaussian(64))


@pytest.mark.parametrize("kind", [Q2K, Q4K], ids=lambda kind: kind.name)
def test_positive_blocks_are_stored_with_negative_factors(kind: GgmlType) -> None:
    data = kind.encode(4 + np.abs(gaussian(1)), "w")
    d, dmin = (float(data[0, offset : offset + 2].view("<f2")[0]) for offset in kind.scales)
    assert d < 0
    assert dmin < 0


@every
@pytest.mark.parametrize("power", [-3, 3, 8])
def test_a_power_of_two_changes_nothing_but_the_factors(name: str, power: int) -> None:
    kind, weights = KINDS[name], gaussian(16)
    factors = [place for offset in kind.scales for place in (offset, offset + 1)]
    ordinary, scaled = (np.delete(kind.encode(weights * np.float32(2.0**p), "w"), factors, axis=1) for p in (0, power))
    np.testing.assert_array_equal(ordinary, scaled)
    assert relative(kind, weights * np.float32(2.0**power)) == pytest.approx(relative(kind, weights), rel=1e-6)


@every
def test_weights_whose_factors_are_subnormal_are_kept_as_far_as_these_go(name: str) -> None:
    """A least d of 2^-24 still serves weights of its few multiples, where rounding to nearest would make it zero."""
    errors = [relative(KINDS[name], gaussian(8) * np.float32(2.0**-power)) for power in (14, 16, 18, 20, 24, 28)]
    assert all(error < 1.6 * MEASURED[name] for error in errors[:3])
    assert errors[3] < 3 * MEASURED[name]
    assert errors[4] < 0.12
    assert errors[5] == 1


@every
@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("size", [1e-45, 1e-38, 1e-30, 1e-20])
def test_blocks_too_tiny_for_any_factor_become_zeros(name: str, size: float) -> None:
    weights = np.sign(gaussian(2)) * np.float32(size)
    data = KINDS[name].encode(weights, "w")
    assert not KINDS[name].decode(data, 256).any()
    assert all(not data[:, offset : offset + 2].any() for offset in KINDS[name].scales)


@every
def test_huge_weights_are_kept_up_to_the_end_of_f16(name: str) -> None:
    form = FORMS[name]
    largest = 65504 * (form.minimum_high or form.scale_high * form.high)
    weights = gaussian(4)
    weights *= np.float32(0.4 * largest) / np.abs(weights).max()
    assert relative(KINDS[name], weights) < 1.3 * MEASURED[name]


@every
def test_a_blocks_bytes_do_not_depend_on_its_neighbours(name: str) -> None:
    weights = gaussian(k_search.BLOCKS + 3)
    whole = KINDS[name].encode(weights, "w")
    for row in (0, 1, k_search.BLOCKS - 1, k_search.BLOCKS, k_search.BLOCKS + 2):
        assert KINDS[name].encode(weights[row : row + 1], "w").tobytes() == whole[row].tobytes()
    assert len({row.tobytes() for row in whole}) == len(whole)


@every
@settings(max_examples=25, deadline=None)
@given(weights=arrays(np.float32, (1, 256), elements=st.floats(-1, 1, width=16)))
def test_the_search_never_falls_behind_the_plain_rounding_it_is_bounded_by(name: str, weights: NDArray[np.float32]) -> None:
    form, one = FORMS[name], np.ones(1, np.float32)
    x = np.ascontiguousarray(weights.reshape(1, -1, form.sub).transpose(2, 1, 0))
    with np.errstate(all="ignore"):
        plain = float(k_search.plain(x, k_search.Grid(form, one, one)).error.sum(dtype=np.float64))
    found = float(np.square(restored(KINDS[name], weights) - weights).sum())
    assert found <= plain * (1 + 1e-3) + 1e-7 * float(np.square(weights).sum())


@pytest.mark.parametrize("name", KINDS)
def test_packing_is_undone_by_unpacking(name: str) -> None:
    form, generator, kind = FORMS[name], np.random.default_rng(1), KINDS[name]
    subs, minima = 256 // form.sub, form.minimum_high
    codes = k_quants.Codes(
        generator.standard_normal((20, 2 if minima else 1)).astype(np.float16),
        generator.integers(0, form.high - form.low + 1, (20, 256)).astype(np.uint8),
        generator.integers(0, form.scale_high - form.scale_low + 1, (20, subs)).astype(np.uint8),
        generator.integers(0, minima + 1, (20, subs if minima else 0)).astype(np.uint8),
    )
    packed = getattr(k_quants, f"pack_{name}")(codes)
    assert packed.shape == (20, kind.block_bytes)
    found = getattr(k_quants, f"unpack_{name}")(packed)
    for part in ("factors", "codes", "scales", "minima"):
        np.testing.assert_array_equal(getattr(found, part), getattr(codes, part))


def test_a_q6k_block_worked_out_by_hand() -> None:
    """d = 0.5, every scale 2 (so a step of 1), weight j = j mod 64 − 32: its code is j mod 64."""
    low = bytes((j % 16) | (j % 16) << 4 for j in range(64)) * 2
    high = bytes(0b10001000 | (j // 16) * 0b01010101 for j in range(32)) * 2
    data = low + high + bytes([2]) * 16 + b"\x00\x38"
    weights = (np.arange(256) % 64 - 32).astype(np.float32)[None]
    np.testing.assert_array_equal(Q6K.decode(np.frombuffer(data, np.uint8)[None], 256), weights)
