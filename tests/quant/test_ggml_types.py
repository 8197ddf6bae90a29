"""Every GGML type against gguf-py, bit for bit: what bytes decode to, and the bytes of the types whose rounding ggml defines. And what all
types share: stacks, pools, refusals, bounds."""

from __future__ import annotations

import pickle
import re
from concurrent.futures import ThreadPoolExecutor
from functools import partial

import numpy as np
import pytest
from gguf import GGMLQuantizationType, dequantize, quantize
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays
from numpy.typing import NDArray

from arctool.errors import GeometryError
from arctool.quant.ggml import F16, GGML_TYPES, Q4_0, Q4_1, Q5_0, Q5_1, Q6K, GgmlType, block_type
from arctool.quant.rows import bounded_rows
from arctool.quant.tensor import GgmlTensor

HALVES = np.arange(1 << 16, dtype=np.uint16)
FINITE = HALVES[np.isfinite(HALVES.view(np.float16))]
EVERY = list(GGML_TYPES.values())
DEFINED = [kind for kind in EVERY if "k" not in kind.name]
"""Types whose rounding ggml and gguf-py define."""

every_type = pytest.mark.parametrize("kind", EVERY, ids=lambda kind: kind.name)


def put_scales(data: NDArray[np.uint8], kind: GgmlType, halves: NDArray[np.uint16]) -> NDArray[np.uint8]:
    """`data` u8 [rows, row_bytes] with every f16 factor drawn from `halves`."""
    blocks = data.copy().reshape(-1, kind.block_bytes)
    for offset in kind.scales:
        blocks[:, offset : offset + 2] = np.resize(halves, len(blocks)).astype("<u2")[:, None].view(np.uint8)
    return blocks.reshape(data.shape)


def random_bytes(kind: GgmlType, rows: int, blocks: int, seed: int = 0) -> NDArray[np.uint8]:
    """Any bytes at all, but for the factors: finite halves of every size and sign."""
    generator = np.random.default_rng(seed)
    data = generator.integers(0, 256, (rows, blocks * kind.block_bytes)).astype(np.uint8)
    return put_scales(data, kind, generator.permutation(FINITE))


def theirs(data: NDArray[np.uint8], kind: GgmlType) -> NDArray[np.float32]:
    return dequantize(data, GGMLQuantizationType(kind.id))


def gaussian(rows: int, in_features: int, seed: int = 0) -> NDArray[np.float32]:
    return np.random.default_rng(seed).standard_normal((rows, in_features)).astype(np.float32)


def relative(kind: GgmlType, weights: NDArray[np.float32]) -> float:
    """‖W−Ŵ‖²/‖W‖² after a round trip."""
    wide = weights.astype(np.float64)
    return float(np.square(kind.decode(kind.encode(weights, "w"), weights.shape[-1]) - wide).sum() / np.square(wide).sum())


@every_type
def test_random_bytes_decode_as_in_gguf(kind: GgmlType) -> None:
    data = random_bytes(kind, 300, 6)
    found = kind.decode(data, 6 * kind.block)
    assert found.dtype == np.float32
    assert len(np.unique(found)) > 100
    assert found.tobytes() == theirs(data, kind).tobytes()


@every_type
@pytest.mark.parametrize("byte", [0x00, 0xFF, 0x0F, 0xF0, 0x55, 0xAA, 0x80, 0x01])
def test_extreme_bytes_under_extreme_scales_decode_as_in_gguf(kind: GgmlType, byte: int) -> None:
    """Largest, subnormal and zero factors of either sign, so that −0.0 and cancellation are told apart too."""
    edges = np.array([0x0000, 0x8000, 0x0001, 0x8001, 0x03FF, 0x0400, 0x3C00, 0xBC00, 0x7BFF, 0xFBFF], np.uint16)
    data = np.full((len(edges), 2 * kind.block_bytes), byte, np.uint8)
    for halves in (edges, edges[::-1]):
        mixed = put_scales(data, kind, halves)
        assert kind.decode(mixed, 2 * kind.block).tobytes() == theirs(mixed, kind).tobytes()


@every_type
@pytest.mark.parametrize("bit", range(8))
def test_every_bit_of_a_block_is_where_gguf_has_it(kind: GgmlType, bit: int) -> None:
    """One bit set at a time: no two bits may trade places unseen."""
    places = [place for place in range(kind.block_bytes) if not any(offset <= place < offset + 2 for offset in kind.scales)]
    data = np.zeros((max(1, len(places)), kind.block_bytes), np.uint8)
    data[np.arange(len(places)), places] = 1 << bit
    data = put_scales(data, kind, np.array([0x3C00], np.uint16))
    assert kind.decode(data, kind.block).tobytes() == theirs(data, kind).tobytes()


@pytest.mark.parametrize("kind", DEFINED, ids=lambda kind: kind.name)
@settings(max_examples=60)
@given(
    weights=arrays(np.float32, (3, 64), elements=st.floats(-1, 1, width=32)),
    magnitude=st.integers(-20, 10).map(lambda power: np.float32(2.0**power)),
)
def test_the_bytes_are_those_of_gguf(kind: GgmlType, weights: NDArray[np.float32], magnitude: np.float32) -> None:
    weights = np.where(np.abs(weights) < 1e-20, np.float32(0), weights) * magnitude  # tinier ones: a test of their own
    ranges = np.ptp(weights.reshape(-1, 32), axis=1)
    if ((ranges == 0) | (ranges > 1e-30)).all():
        assert kind.encode(weights, "w").tobytes() == quantize(weights, GGMLQuantizationType(kind.id)).tobytes()


@pytest.mark.parametrize("kind", DEFINED, ids=lambda kind: kind.name)
def test_ordinary_and_degenerate_blocks_have_the_bytes_of_gguf(kind: GgmlType) -> None:
    special = [np.zeros(64), np.full(64, 0.3), np.full(64, -0.3), np.r_[np.zeros(31), 5, np.zeros(31), -5], np.arange(64) / 64 - 0.5]
    halves = np.r_[[1.0, -1.0], np.arange(-31, 31) / 32]
    weights = np.concatenate([np.array([*special, halves], np.float32), gaussian(50, 64), gaussian(4, 64) * 8e3, gaussian(4, 64) * 1e-7])
    if kind is F16:
        weights = weights[:-8]
    assert kind.encode(weights, "w").tobytes() == quantize(weights, GGMLQuantizationType(kind.id)).view(np.uint8).tobytes()


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("kind", [Q4_0, Q4_1, Q5_0, Q5_1], ids=lambda kind: kind.name)
def test_blocks_whose_inverse_scale_is_beyond_f32_get_a_zero_scale(kind: GgmlType) -> None:
    tiny = np.zeros((1, 32), np.float32)
    tiny[0, :2] = 1e-39, -1e-39
    data = kind.encode(tiny, "w")
    assert data[0, :2].tobytes() in (b"\0\0", b"\0\x80")
    assert not kind.decode(data, 32).any()
    assert data.tobytes() == kind.encode(tiny, "w").tobytes()


def test_f16_rounds_to_nearest_even_and_refuses_what_becomes_infinite() -> None:
    ulp = 2.0**-10
    values = np.array([[1 + ulp / 2, 1 + 3 * ulp / 2, 1 + 0.51 * ulp, 65519, -(2.0**-25), 2.0**-24 * 1.5]], np.float32)
    assert F16.encode(values, "w").view("<f2")[0].tolist() == [1.0, 1 + 2 * ulp, 1 + ulp, 65504.0, -0.0, 2.0**-23]
    with pytest.raises(GeometryError, match=r"^a\.b: the f16 value at \[0, 3\] is not finite: values up to 6\.552e\+04 are too large"):
        F16.encode(np.where(values == 65519, np.float32(65520), values), "a.b")
    assert F16.row_bytes(7) == 14


@every_type
@pytest.mark.filterwarnings("error")
def test_values_too_large_for_the_factors_are_refused_by_place(kind: GgmlType) -> None:
    weights = np.zeros((3, 2 * max(kind.block, 2)), np.float32)
    weights[2, -1] = 1e30
    where = f"scale of row 2, block {1}" if kind.block > 1 else r"value at \[2, 3\]"
    with pytest.raises(GeometryError, match=rf"^a\.b: the {kind.name} {where} is not finite: values up to 1e\+30 are too large"):
        kind.encode(weights, "a.b")


@every_type
def test_a_value_that_is_not_finite_is_refused_with_its_place_in_the_stack(kind: GgmlType) -> None:
    weights = np.ones((2, 3, 256), np.float32)
    weights[1, 2, 17] = np.nan
    with pytest.raises(GeometryError, match=re.escape("a.b: the value at [1, 2, 17] is nan, which is not finite")):
        kind.encode(weights, "a.b")


@every_type
def test_a_stack_is_its_matrices(kind: GgmlType) -> None:
    weights = gaussian(30, 512).reshape(2, 3, 5, 512)
    data = kind.encode(weights, "w")
    assert data.shape == (2, 3, 5, kind.row_bytes(512))
    flat = kind.encode(weights.reshape(30, 512), "w")
    assert data.tobytes() == flat.tobytes()
    assert kind.decode(data, 512).tobytes() == kind.decode(flat, 512).tobytes()
    tensor = GgmlTensor.encoded(kind, weights, "w")
    assert (tensor.shape, tensor.stored_bits) == ((2, 3, 5, 512), flat.nbytes * 8)
    np.testing.assert_array_equal(tensor.rows(slice(1, 2)).decode(), tensor.decode()[1:])
    with pytest.raises(GeometryError, match=r"need u8 \[rows, "):
        kind.check(data[0, 0, 0], 512, "x")


def test_a_bad_scale_in_a_stack_is_named_with_all_its_indices() -> None:
    data = Q6K.encode(gaussian(6, 512).reshape(2, 3, 512), "w")
    data[1, 2, 418:420] = 0, 0x7C
    Q6K.check_form(data, 512, "x")
    with pytest.raises(GeometryError, match=re.escape("x: the q6k scale of row [1, 2], block 1 is not finite")):
        Q6K.check_values(data, 512, "x")


@every_type
def test_a_pool_and_small_chunks_change_no_byte(kind: GgmlType, monkeypatch: pytest.MonkeyPatch) -> None:
    weights = gaussian(23, 512, seed=3)
    whole = kind.encode(weights, "w")
    monkeypatch.setattr(block_type, "bounded_rows", partial(bounded_rows, most=1024))
    assert kind.encode(weights, "w").tobytes() == whole.tobytes()
    with ThreadPoolExecutor(3) as pool:
        assert kind.encode(weights, "w", pool.map).tobytes() == whole.tobytes()
        weights[22, 5] = np.inf
        with pytest.raises(GeometryError, match=r"\[22, 5\] is inf"):
            kind.encode(weights, "w", pool.map)
    assert kind.encode(weights[11:12], "w").tobytes() == whole[11].tobytes()


@every_type
def test_values_are_checked_a_chunk_at_a_time(kind: GgmlType, monkeypatch: pytest.MonkeyPatch) -> None:
    data = kind.encode(gaussian(9, 256), "w")
    data[7, kind.scales[-1] : kind.scales[-1] + 2] = 0, 0x7C
    sizes = []

    def spy(blocks: NDArray[np.uint8], offset: int) -> NDArray[np.float16]:
        sizes.append(blocks.size)
        return f16_column(blocks, offset)

    f16_column = block_type.f16_column
    monkeypatch.setattr(block_type, "f16_column", spy)
    monkeypatch.setattr(block_type, "bounded_rows", partial(bounded_rows, most=512))
    place = "row 7, block 0" if kind.block > 1 else r"\[7, 0\]"
    with pytest.raises(GeometryError, match=rf"x: the {kind.name} (scale|value) (of|at) {place} is not finite"):
        kind.check(data, 256, "x")
    assert max(sizes) <= 2 * data.shape[1]


ADVERSE = st.sampled_from([-1.0, -0.875, -0.5, -0.26, -1 / 15, 0.0, 1 / 31, 1 / 6, 0.334, 0.5, 0.9, 1.0])


@every_type
@settings(max_examples=25, deadline=None)
@given(weights=arrays(np.float32, (2, 256), elements=ADVERSE | st.floats(-1, 1, width=16)))
def test_no_ordinary_tensor_loses_more_than_the_worst_error(kind: GgmlType, weights: NDArray[np.float32]) -> None:
    weights = np.where(np.abs(weights) < 1e-3, np.float32(0), weights)
    if weights.any():
        assert relative(kind, weights) <= kind.worst_error


@every_type
def test_the_worst_error_is_below_one_and_a_tensor_beyond_f16_exceeds_it(kind: GgmlType) -> None:
    assert kind.worst_error < 1
    weights = gaussian(4, 256)
    assert relative(kind, weights) < kind.worst_error / 3
    assert relative(kind, weights * np.float32(1e-12)) == 1.0


@every_type
def test_a_type_survives_being_sent_to_another_process(kind: GgmlType) -> None:
    again = pickle.loads(pickle.dumps(kind))
    weights = gaussian(2, 256)
    assert again.encode(weights, "w").tobytes() == kind.encode(weights, "w").tobytes()
