"""The row stream: geometry arithmetic, states against a literal reading of the definition, padding, golden bytes."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from arctool.errors import GeometryError
from arctool.quant.codebooks import RUNGS
from arctool.quant.trellis import Geometry, check_packed, decode_rows, pack_symbols, row_states, unpack_symbols

GEOMETRIES = [rung.geometry for rung in RUNGS.values()]


def states_by_integer(row: bytes, geometry: Geometry, steps: int) -> list[int]:
    """The definition with Python's big integers: one little-endian number, one shift and mask a step."""
    stream = int.from_bytes(row, "little")
    states = []
    for t in range(steps):
        shift = geometry.k * (t + 1) - geometry.l
        window = stream >> shift if shift >= 0 else stream << -shift
        states.append(window & ((1 << geometry.l) - 1))
    return states


def test_the_worked_example_of_the_design_has_11_data_bytes_in_a_12_byte_stride() -> None:
    geometry = Geometry.parse("K9V4L12")
    assert (geometry.steps(36), geometry.data_bytes(36), geometry.stride(36)) == (9, 11, 12)


@pytest.mark.parametrize(("name", "rate"), [("K4V2L16", 2.0), ("K8V4L12", 2.0), ("K9V4L12", 2.25), ("K6V2L16", 3.0), ("K4V1L12", 4.0)])
def test_the_rate_is_k_over_v(name: str, rate: float) -> None:
    assert Geometry.parse(name).bits_per_weight == rate


@pytest.mark.parametrize("name", ["", "K4V2", "k4v2l16", "K4V2L16 ", "K0V2L16", "K17V2L16", "K4V3L16", "K4V2L17", "K12V2L8", "K-4V2L16"])
def test_a_name_that_is_no_geometry_is_refused(name: str) -> None:
    with pytest.raises(GeometryError):
        Geometry.parse(name)


@pytest.mark.parametrize("in_features", [0, -4, 6, 35])
def test_a_row_that_v_does_not_divide_is_refused(in_features: int) -> None:
    with pytest.raises(GeometryError, match=f"in_features {in_features}"):
        Geometry(8, 4, 12).stride(in_features)


@given(data=st.data(), geometry=st.sampled_from(GEOMETRIES), steps=st.integers(1, 90))
def test_states_equal_the_definition_read_from_one_big_integer(data: st.DataObject, geometry: Geometry, steps: int) -> None:
    symbols = data.draw(st.lists(st.integers(0, (1 << geometry.k) - 1), min_size=steps, max_size=steps))
    packed = pack_symbols(np.array([symbols]), geometry)
    assert row_states(packed, geometry, steps * geometry.v)[0].tolist() == states_by_integer(packed[0].tobytes(), geometry, steps)
    assert unpack_symbols(packed, geometry, steps * geometry.v)[0].tolist() == symbols


def test_a_row_starts_from_state_zero_and_shifts_symbols_in_at_the_top() -> None:
    geometry = Geometry(4, 2, 16)
    packed = pack_symbols(np.array([[0x1, 0x2, 0x3, 0x4, 0x5]]), geometry)
    assert packed.tobytes() == bytes([0x21, 0x43, 0x05, 0x00])
    assert row_states(packed, geometry, 10)[0].tolist() == [0x1000, 0x2100, 0x3210, 0x4321, 0x5432]


def test_nine_bit_symbols_cross_bytes_as_little_endian_bits() -> None:
    geometry = Geometry(9, 4, 12)
    packed = pack_symbols(np.array([[0x1FF, 0x000, 0x155]]), geometry)
    stream = 0x1FF | 0x000 << 9 | 0x155 << 18
    assert packed.tobytes() == stream.to_bytes(4, "little")
    assert row_states(packed, geometry, 12)[0].tolist() == [0x1FF << 3, 0b111, 0x155 << 3]


@pytest.mark.parametrize("geometry", GEOMETRIES, ids=lambda g: g.name)
def test_a_set_bit_anywhere_in_the_padding_is_refused_by_row(geometry: Geometry) -> None:
    in_features = 5 * geometry.v
    used, stride = geometry.k * 5, geometry.stride(in_features)
    assert used < 8 * stride, "the fixture must have padding"
    for bit in range(used, 8 * stride):
        packed = np.zeros((3, stride), np.uint8)
        packed[1, bit // 8] = 1 << (bit % 8)
        with pytest.raises(GeometryError, match="row 1 has set bits in the padding"):
            check_packed(packed, geometry, in_features, "layer")


@pytest.mark.parametrize("change", [-4, -1, 1, 4])
def test_a_wrong_stride_is_refused(change: int) -> None:
    geometry = Geometry(8, 4, 12)
    with pytest.raises(GeometryError, match="need u8"):
        check_packed(np.zeros((2, geometry.stride(36) + change), np.uint8), geometry, 36, "layer")


def test_a_symbol_outside_its_bits_is_refused() -> None:
    with pytest.raises(GeometryError, match="outside 0 … 15"):
        pack_symbols(np.array([[16]]), Geometry(4, 2, 16))


def test_decoding_multiplies_once_in_f32() -> None:
    geometry = Geometry(4, 1, 12)
    values = np.linspace(-3, 3, 4096, dtype=np.float32).reshape(4096, 1)
    packed = pack_symbols(np.array([[15, 1, 8]]), geometry)
    scale = np.float32(0.1)
    states = [0xF00, 0x1F0, 0x81F]
    expected = [np.float32(values[s, 0] * scale) for s in states]
    assert decode_rows(packed, geometry, values, np.array([scale]), 3)[0].tolist() == expected


def test_a_table_of_another_shape_or_type_is_refused() -> None:
    geometry = Geometry(8, 4, 12)
    packed = np.zeros((1, geometry.stride(8)), np.uint8)
    for values in (np.zeros((4096, 2), np.float32), np.zeros((4096, 4), np.float64), np.zeros((65536, 4), np.float32)):
        with pytest.raises(GeometryError, match="needs f32 codebook values"):
            decode_rows(packed, geometry, values, np.ones(1, np.float32), 8)  # type: ignore[arg-type]
