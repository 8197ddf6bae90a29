"""AFQ and MXFP4: decoded value by value from their definitions, at every width and place, and every way their parts can disagree."""

from __future__ import annotations

import struct
from dataclasses import replace

import gguf
import numpy as np
import pytest

from arctool.errors import GeometryError
from arctool.quant.afq import GROUPS, WIDTHS, AfqTensor
from arctool.quant.bf16 import from_bf16, to_bf16
from arctool.quant.mxfp4 import Mxfp4Tensor
from arctool.quant.tensor import as_matrix


def afq(bits: int, group: int, *lead: int, groups: int = 3, seed: int = 0) -> AfqTensor:
    generator = np.random.default_rng(seed)
    shape = (*lead, groups)
    packed = generator.integers(0, 256, (*lead, groups * group * bits // 8), np.uint8)
    scales, offsets = (generator.standard_normal(shape).astype(np.float32) for _ in range(2))
    return AfqTensor(bits, group, packed, scales, offsets)


def by_hand(weight: AfqTensor) -> np.ndarray:
    """One integer for the whole row, and a Python shift for each code."""
    rows = weight.packed.reshape(-1, weight.packed.shape[-1])
    scales, offsets = (part.reshape(len(rows), -1) for part in (weight.scales, weight.offsets))
    out = np.empty((len(rows), weight.in_features), np.float32)
    for r, row in enumerate(rows):
        stream = int.from_bytes(row.tobytes(), "little")
        for j in range(weight.in_features):
            code = (stream >> (j * weight.bits)) & ((1 << weight.bits) - 1)
            product = np.float32(np.float32(code) * scales[r, j // weight.group])
            out[r, j] = np.float32(product + offsets[r, j // weight.group])
    return out.reshape(weight.shape)


@pytest.mark.parametrize("group", GROUPS)
@pytest.mark.parametrize("bits", WIDTHS)
def test_afq_decodes_code_by_code(bits: int, group: int) -> None:
    weight = afq(bits, group, 4)
    weight.check("w")
    assert weight.shape == (4, 3 * group)
    assert weight.decode().tobytes() == by_hand(weight).tobytes()
    assert len(np.unique(weight.codes())) >= 4
    assert weight.rows(slice(1, 3)).decode().tobytes() == weight.decode()[1:3].tobytes()


def test_stacked_afq_is_its_matrices() -> None:
    weight = afq(3, 64, 2, 5)
    assert weight.shape == (2, 5, 192)
    assert as_matrix(weight).decode().tobytes() == weight.decode().tobytes() == by_hand(weight).tobytes()


@pytest.mark.parametrize("kind", ["bf16", "f16"])
def test_afq_with_narrow_factors_is_afq_with_the_same_factors_in_f32(kind: str) -> None:
    wide = afq(6, 32, 3)
    narrow = [to_bf16(part) if kind == "bf16" else part.astype(np.float16) for part in (wide.scales, wide.offsets)]
    widened = [from_bf16(part) if kind == "bf16" else part.astype(np.float32) for part in narrow]
    small = replace(wide, scales=narrow[0], offsets=narrow[1])
    small.check("w")
    assert small.decode().tobytes() == replace(wide, scales=widened[0], offsets=widened[1]).decode().tobytes()
    assert small.stored_bits < wide.stored_bits


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"bits": 5}, "found 5 bits in groups of 64"),
        ({"group": 48}, "found 4 bits in groups of 48"),
        ({"packed": np.zeros((4, 95), np.uint8)}, "whole groups of 64 weights"),
        ({"packed": np.zeros((4, 96), np.int8)}, "whole groups of 64 weights, found int8"),
        ({"scales": np.ones((4, 2), np.float32)}, r"AFQ scales are floats \[4, 3\], found float32 \[4, 2\]"),
        ({"offsets": np.ones((4, 3))}, r"AFQ biases are floats \[4, 3\], found float64"),
    ],
)
def test_afq_parts_that_disagree_are_refused(change: dict[str, object], message: str) -> None:
    with pytest.raises(GeometryError, match=f"w: .*{message}"):
        replace(afq(4, 64, 4), **change).check("w")  # type: ignore[arg-type]


@pytest.mark.parametrize(("part", "value"), [("scales", np.nan), ("scales", 3e38), ("offsets", np.inf)])
def test_an_afq_group_without_finite_weights_is_refused_by_place(part: str, value: float) -> None:
    weight = afq(4, 64, 4)
    factors = getattr(weight, part).copy()
    factors[2, 1] = value
    with pytest.raises(GeometryError, match=r"w: group \[2, 1\] has scale"):
        replace(weight, **{part: factors}).check("w")


def mxfp4(*lead: int, groups: int = 3, seed: int = 0) -> Mxfp4Tensor:
    generator = np.random.default_rng(seed)
    codes = generator.integers(0, 256, (*lead, groups * 16), np.uint8)
    return Mxfp4Tensor(codes, generator.integers(0, 253, (*lead, groups), np.uint8))


def test_mxfp4_decodes_value_by_value() -> None:
    weight = mxfp4(7)
    weight.check("w")
    values = [0, 0.5, 1, 1.5, 2, 3, 4, 6]
    want = np.empty((7, 96), np.float32)
    for r in range(7):
        for j in range(96):
            byte = int(weight.codes[r, j // 2])
            code = byte >> 4 if j % 2 else byte & 15
            sign = -1.0 if code & 8 else 1.0
            want[r, j] = sign * values[code & 7] * 2.0 ** (int(weight.scales[r, j // 32]) - 127)
    assert weight.decode().tobytes() == want.tobytes()
    assert weight.rows(slice(2, 5)).decode().tobytes() == want[2:5].tobytes()


def test_mxfp4_agrees_with_ggufs_reading_of_the_same_numbers() -> None:
    """ggml's MXFP4 has the scale before the codes and halves instead of pairs; its values are the same."""
    weight = mxfp4(5, groups=1)
    weight = replace(weight, scales=np.clip(weight.scales, 2, 250))
    codes = np.stack([weight.codes & 15, weight.codes >> 4], axis=-1).reshape(5, 32)
    blocks = np.concatenate([weight.scales, codes[:, :16] | (codes[:, 16:] << 4)], axis=1).astype(np.uint8)
    theirs = gguf.quants.dequantize(blocks, gguf.GGMLQuantizationType.MXFP4)
    assert np.array_equal(theirs, weight.decode())


def test_the_least_and_the_largest_scale_are_exact() -> None:
    weight = Mxfp4Tensor(np.full((1, 32), 0x71, np.uint8), np.array([[0, 252]], np.uint8))
    weight.check("w")
    decoded = weight.decode()[0]
    assert decoded[0] == np.float32(2.0**-128)
    assert decoded[32 + 1] == struct.unpack("<f", struct.pack("<f", 6 * 2.0**125))[0]


def test_stacked_mxfp4_is_its_matrices() -> None:
    weight = mxfp4(2, 5)
    assert weight.shape == (2, 5, 96)
    assert as_matrix(weight).decode().tobytes() == weight.decode().tobytes()


@pytest.mark.parametrize("scale", [253, 254, 255])
def test_an_mxfp4_scale_past_f32_is_refused_by_place(scale: int) -> None:
    weight = mxfp4(3)
    scales = weight.scales.copy()
    scales[1, 2] = scale
    with pytest.raises(GeometryError, match=rf"w: the scale at \[1, 2\] is 2\^\({scale} - 127\)"):
        replace(weight, scales=scales).check("w")


@pytest.mark.parametrize(
    ("codes", "scales", "message"),
    [
        ((3, 40), (3, 2), "in groups of 32 weights"),
        ((48,), (3,), "in groups of 32 weights"),
        ((3, 48), (3, 2), r"scales are u8 \[3, 3\], found uint8 \[3, 2\]"),
    ],
)
def test_mxfp4_parts_that_disagree_are_refused(codes: tuple[int, ...], scales: tuple[int, ...], message: str) -> None:
    with pytest.raises(GeometryError, match=f"w: .*{message}"):
        Mxfp4Tensor(np.zeros(codes, np.uint8), np.zeros(scales, np.uint8)).check("w")
