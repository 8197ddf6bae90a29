"""GGML blocks, plain layers, FP8, AFQ and MXFP4 in the container: golden entries worked out by hand, round trips, and how they can lie."""

from __future__ import annotations

import re
import struct
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import uqff_samples as samples
from uqff_samples import Stored

from arctool.errors import ArctoolError, FormatError
from arctool.quant.fp8 import Fp8Tensor
from arctool.quant.ggml import GGML_TYPES
from arctool.quant.tensor import DenseTensor, GgmlTensor, Weight
from arctool.uqff.container import open_artifact
from arctool.uqff.entries import Entry
from arctool.uqff.families import decode, decode_bias, encode

FP8, AFQ, MXFP4 = "model.layers.0.fp8", "model.layers.0.afq3", "model.layers.0.mxfp4"


def no_table(ref: object) -> None:
    raise AssertionError("no table belongs to these families")


def layer(stored: dict[str, Stored]) -> dict[str, Entry]:
    """Entries as the reader gets them, all at odd addresses."""
    found = {}
    for name, (dtype, shape, data) in stored.items():
        whole = np.frombuffer(b"\0" + data, np.uint8)
        found[name] = Entry(name, dtype, tuple(shape), whole[1:])
    return found


def read(stored: dict[str, Stored], key: str = "k") -> Weight:
    return decode(key, layer(stored), no_table, "f.uqff")  # type: ignore[arg-type]


def hexed(entries: Iterable[Entry]) -> dict[str, tuple[str, tuple[int, ...], str]]:
    return {entry.name: (entry.dtype, entry.shape, entry.raw.tobytes().hex()) for entry in entries}


def u32(*values: int) -> bytes:
    return struct.pack(f"<{len(values)}I", *values)


def f32(*values: float) -> bytes:
    return struct.pack(f"<{len(values)}f", *values)


def tagged(tag: int, **parts: Stored) -> dict[str, Stored]:
    """A layer `k`; `weight` is its weight, other names are suffixes."""
    entries = {"k.weight" if name == "weight" else f"k.weight.{name}": entry for name, entry in parts.items()}
    return entries | {"k.weight.format": ("U8", [], bytes((tag,)))}


# ---- worked out by hand --------------------------------------------------------------------------------------------------------


def test_a_tiny_fp8_layer_has_these_bytes() -> None:
    # 224 = 448/2 gives the scale 1/2: ±1.0 is 0x38 with its sign, 448 is 0x7e, 2^-4 is 0x18, the smallest value 2^-9 is 0x01.
    weights = np.array([[224, -0.5, 0.0], [2.0**-5, -0.0, 2.0**-10]], np.float32)
    assert hexed(encode("k", Fp8Tensor.encoded(weights, "k"))) == {
        "k.weight": ("F8_E4M3", (2, 3), "7eb800" + "188001"),
        "k.weight.format": ("U8", (), "03"),
        "k.weight.dtype": ("U32", (), "09000000"),
        "k.weight.dequant_w_scale": ("F32", (), "0000003f"),
        "k.weight.dequant_x_scale": ("F32", (), "0000003f"),
        "k.weight.quant_scale": ("F32", (), "00000040"),
    }


def test_a_tiny_fp8_layer_reads_as_these_numbers() -> None:
    quarter, four = ("F32", [], f32(0.25)), ("F32", [], f32(4.0))
    code = ("F8_E4M3", [2, 3], bytes.fromhex("010708" + "7efe80"))
    found = read(tagged(3, weight=code, dtype=("U32", [], u32(9)), dequant_w_scale=quarter, dequant_x_scale=quarter, quant_scale=four))
    assert (found.label, found.shape) == ("fp8", (2, 3))
    assert found.dense().tolist() == [[2.0**-11, 7 * 2.0**-11, 2.0**-8], [112.0, -112.0, 0.0]]
    assert np.signbit(found.dense()[1, 2])


def test_the_reciprocal_of_an_fp8_scale_may_be_rounded_to_bf16() -> None:
    """As mistral.rs writes it: quant_scale 448/max|w| in bf16, the scale 1 over the exact number or over the rounded one."""
    for inverse in (4.0, 4.03125, 3.984375):
        entries = samples.stored(FP8) | {f"{FP8}.weight.quant_scale": ("F32", [], f32(2 * inverse))}
        assert samples.same(read(entries, FP8), samples.families()[FP8][0])


def test_a_tiny_afq3_layer_reads_as_these_numbers() -> None:
    # codes 1, 2, …, 5 at 10 (bits 30 to 32, across two words), 7 at 31 (bits 93 to 95); 1/2 · code − 1
    words = ("U32", [1, 3], u32(0x40000011, 0x00000001, 0xE0000000))
    found = read(
        tagged(
            4,
            weight=words,
            bits=("U8", [], b"\3"),
            group_size=("U8", [], b"\x20"),
            scales=("F32", [1, 1], f32(0.5)),
            biases=("F32", [1, 1], f32(-1)),
        )
    )
    expected = [-1.0] * 32
    expected[0], expected[1], expected[10], expected[31] = -0.5, 0.0, 1.5, 2.5
    assert (found.label, found.shape) == ("afq3", (1, 32))
    assert found.dense().tolist() == [expected]


def test_a_tiny_stack_of_afq2_with_f16_factors_reads_as_these_numbers() -> None:
    words = ("U32", [2, 1, 2], bytes.fromhex("e400000000000000" + "00000000000000c0"))
    found = read(
        tagged(
            4,
            weight=words,
            bits=("U8", [], b"\2"),
            group_size=("U8", [], b"\x20"),
            scales=("F16", [2, 1, 1], bytes.fromhex("003c0040")),
            biases=("F16", [2, 1, 1], bytes.fromhex("000000b8")),
        )
    )
    assert (found.label, found.shape) == ("afq2", (2, 1, 32))
    assert found.dense().tolist() == [[[0.0, 1.0, 2.0, 3.0] + [0.0] * 28], [[-0.5] * 31 + [5.5]]]


def test_a_tiny_afq8_layer_with_bf16_factors_reads_as_these_numbers() -> None:
    parts = {"bits": ("U8", [], b"\x08"), "group_size": ("U8", [], b"\x40"), "weight": ("U32", [1, 16], b"\xff\1" + bytes(62))}
    found = read(tagged(4, scales=("BF16", [1, 1], b"\0\x3f"), biases=("BF16", [1, 1], b"\x80\xbf"), **parts))
    assert found.dense()[0, :3].tolist() == [126.5, -0.5, -1.0]
    assert found.shape == (1, 64)


def test_a_tiny_stack_of_mxfp4_reads_as_these_numbers() -> None:
    codes = bytes.fromhex("1032547698badcfe") + bytes(8)
    found = read(tagged(6, weight=("U8", [2, 1, 16], codes + b"\x02" + bytes(15)), scales=("U8", [2, 1, 1], b"\x80\x7d")))
    first = [0, 1, 2, 3, 4, 6, 8, 12, -0.0, -1, -2, -3, -4, -6, -8, -12] + [0] * 16
    assert (found.label, found.shape) == ("mxfp4", (2, 1, 32))
    assert found.dense().tolist() == [[first], [[0.25] + [0.0] * 31]]
    assert np.signbit(found.dense()[0, 0, 8])


PLAIN = {
    "F32": ("F32", [1, 2], f32(0.1, -2), "f32", [[float(np.float32(0.1)), -2.0]]),
    "BF16": ("BF16", [2, 1], b"\x80\x3f\x40\xc0", "bf16", [[1.0], [-3.0]]),
    "F16": ("F16", [1, 2], b"\x00\x3c\x01\x80", "f16", [[1.0, -(2.0**-24)]]),
    "a stack of F16": ("F16", [2, 1, 1], b"\x00\x3c\x00\xc0", "f16", [[[1.0]], [[-2.0]]]),
    "a stack of F32": ("F32", [2, 1, 1], f32(1, 2), "f32", [[[1.0]], [[2.0]]]),
    "one dimension": ("F32", [2], f32(1, 2), "f32", [1.0, 2.0]),
}


@pytest.mark.parametrize("name", PLAIN)
def test_a_plain_layer_reads_as_these_numbers(name: str) -> None:
    dtype, shape, data, label, values = PLAIN[name]
    found = read(tagged(1, weight=(dtype, shape, data)))
    assert found.dense().tolist() == values
    assert (found.shape, found.stored_bits) == (tuple(shape), 8 * len(data))
    assert found.label == label


def test_a_q4k_block_reads_as_these_numbers() -> None:
    # d = 1, dmin = 1/2; scale 2 and minimum 3 of the first 32 weights, whose first code is 5; all else is zero
    block = bytes.fromhex("003c0038" + "02000000" + "03000000" + "00000000" + "05") + bytes(127)
    parts = {"dtype": ("U32", [], u32(12)), "shape": ("U32", [3], u32(1, 1, 256))}
    found = read(tagged(0, weight=("U8", [144], block), **parts))
    assert (found.label, found.shape) == ("q4k", (1, 1, 256))
    assert found.dense().reshape(-1).tolist() == [8.5] + [-1.5] * 31 + [0.0] * 224


# ---- round trips ---------------------------------------------------------------------------------------------------------------


def writable() -> dict[str, tuple[Weight, np.ndarray | None]]:
    """Every type that our writer takes, flat and stacked, with a bias and without."""
    found: dict[str, tuple[Weight, np.ndarray | None]] = {"fp8": (samples.fp8(3, 7), None)}
    for name, (_, block, _, _) in samples.BLOCKS.items():
        bias = np.arange(3, dtype=np.float32) - 1
        found[f"flat.{name}"] = (samples.blocks(name, 3, 2 * block), bias)
        found[f"experts.{name}"] = (samples.blocks(name, 2, 3, block), np.array([bias, 2 * bias]))
        found[f"alone.{name}"] = (samples.blocks(name, 1, block), None)
    for kind in (np.uint16, np.float32):
        found[f"experts.dense.{kind.__name__}"] = (samples.dense(2, 3, 5, dtype=kind), np.zeros((2, 3), np.float32))
    return found


def test_every_writable_family_comes_back_bit_for_bit(tmp_path: Path) -> None:
    known = writable()
    samples.write(tmp_path / "a", known=known, shard_bytes=900)
    with open_artifact(tmp_path / "a") as artifact:
        assert artifact.keys() == tuple(known)
        assert len(artifact.shards) > 3
        for key, (weight, bias) in known.items():
            found, form, added = artifact.weight(key), artifact.form(key), artifact.bias(key)
            assert samples.same(found, weight), key
            assert samples.same(form, weight), key
            assert found.dense().tobytes() == weight.dense().tobytes()
            assert (added is None) == (bias is None)
            assert bias is None or added is None or added.tobytes() == bias.tobytes()
    assert {weight.label for weight, _ in known.values()} == set(GGML_TYPES) | {"fp8", "bf16", "f32"}


@pytest.mark.parametrize("key", samples.families())
def test_a_foreign_layer_reads_as_what_was_stored(tmp_path: Path, key: str) -> None:
    weight, bias = samples.families()[key]
    samples.write_foreign(tmp_path / "a", (key,))
    with open_artifact(tmp_path / "a") as artifact:
        assert samples.same(artifact.weight(key), weight)
        found = artifact.bias(key)
        assert (None if found is None else found.tolist()) == (None if bias is None else bias.tolist())
    assert len(np.unique(weight.dense())) >= 4  # else a confusion of places would go unseen


@pytest.mark.parametrize("key", samples.WRITTEN)
def test_what_we_write_is_what_others_store(key: str) -> None:
    weight, bias = samples.families()[key]
    ours, theirs = hexed(encode(key, weight, bias)), hexed(layer(samples.stored(key)).values())
    assert {name: entry for name, entry in ours.items() if not name.endswith(".bias")} == {
        name: entry for name, entry in theirs.items() if not name.endswith(".bias")
    }


# ---- lies ----------------------------------------------------------------------------------------------------------------------

Lies = dict[str, tuple[dict[str, Stored | None], str]]
"""What is told → (entries by suffix that change, None for one that is left out; words of the refusal)."""


def missing(family: str, *suffixes: str) -> Lies:
    return {
        f"no {suffix or 'weight'}": ({suffix: None}, rf"{re.escape(suffix)} is missing: {family} layers need it") for suffix in suffixes
    }


def scales(w: float, x: float | None = None, inverse: float | None = None) -> dict[str, Stored | None]:
    three = (w, w if x is None else x, 1 / w if inverse is None else inverse)
    names = (".dequant_w_scale", ".dequant_x_scale", ".quant_scale")
    return {name: ("F32", [], f32(value)) for name, value in zip(names, three, strict=True)}


CONTRADICT = "contradict each other; expected two equal numbers and their reciprocal"

FP8_LIES: Lies = {
    **missing("FP8", "", ".dtype", ".dequant_w_scale", ".dequant_x_scale", ".quant_scale"),
    "scales beside them": ({".scales": ("F32", [3], f32(1, 1, 1))}, r"\.scales is not an entry of FP8 layers"),
    "a scale of blocks": ({".weight_scale_inv": ("F32", [1, 1], f32(1))}, r"\.weight_scale_inv is not an entry of FP8 layers"),
    "a shape": ({".shape": ("U32", [2], u32(3, 7))}, r"\.shape is not an entry of FP8 layers"),
    "codes as U8": ({"": ("U8", [3, 7], bytes(21))}, r"expected F8_E4M3 \[3, 7\], found U8 \[3, 7\]"),
    "codes of e5m2": ({"": ("F8_E5M2", [3, 7], bytes(21))}, r"expected F8_E4M3 \[3, 7\], found F8_E5M2"),
    "bf16 codes": ({"": ("BF16", [3, 7], bytes(42))}, r"expected F8_E4M3 \[3, 7\], found BF16"),
    "flat codes": ({"": ("F8_E4M3", [21], bytes(21))}, r"an FP8 weight is \[out, in\], found \[21\]"),
    "a stack": ({"": ("F8_E4M3", [1, 3, 7], bytes(21))}, r"an FP8 weight is \[out, in\], found \[1, 3, 7\]"),
    "no inputs": ({"": ("F8_E4M3", [3, 0], b"")}, r"an FP8 weight is \[out, in\], found \[3, 0\]"),
    "the number of F16": ({".dtype": ("U32", [], u32(4))}, r"\.dtype: 4 is not e4m3 \(9\)"),
    "ggml's number of e4m3": ({".dtype": ("U32", [], u32(8))}, r"\.dtype: 8 is not e4m3 \(9\)"),
    "the number as U8": ({".dtype": ("U8", [], b"\x09")}, r"\.dtype: expected U32 \[\], found U8 \[\]"),
    "the number of rank 1": ({".dtype": ("U32", [1], u32(9))}, r"\.dtype: expected U32 \[\], found U32 \[1\]"),
    "a scale a row": ({".dequant_w_scale": ("F32", [3, 1], f32(1, 1, 1))}, r"\.dequant_w_scale: expected F32 \[\], found F32 \[3, 1\]"),
    "a scale of rank 1": ({".dequant_w_scale": ("F32", [1], f32(0.125))}, r"\.dequant_w_scale: expected F32 \[\], found F32 \[1\]"),
    "a bf16 scale": ({".dequant_x_scale": ("BF16", [], b"\0\x3e")}, r"\.dequant_x_scale: expected F32 \[\], found BF16"),
    "two scales": (scales(0.125, 0.25, 8), CONTRADICT),
    "scales a bit apart": (scales(0.125, float(np.nextafter(np.float32(0.125), np.float32(1))), 8), CONTRADICT),
    "another reciprocal": (scales(0.125, 0.125, 8.1), CONTRADICT),
    "the scale for its reciprocal": (scales(0.125, 0.125, 0.125), CONTRADICT),
    "a NaN scale": (scales(float("nan")), CONTRADICT),
    "a NaN reciprocal": (scales(0.125, 0.125, float("nan")), CONTRADICT),
    "an infinite scale": (scales(float("inf")), CONTRADICT),
    "a scale of zero": (scales(0.0, 0.0, float("inf")), CONTRADICT),
    "zeros": (scales(0.0, 0.0, 0.0), CONTRADICT),
    "a negative scale": (scales(-0.125), r"the scale -0\.125 does not give finite weights; expected a positive number"),
    "a scale past f32": (scales(1e36), "the scale .* does not give finite weights"),
    "a NaN code": ({"": ("F8_E4M3", [3, 7], bytes(9) + b"\x7f" + bytes(11))}, r"the code at \[1, 2\] is NaN"),
    "a NaN code of the other sign": ({"": ("F8_E4M3", [3, 7], bytes(20) + b"\xff")}, r"the code at \[2, 6\] is NaN"),
}

GROUPS = "rows of AFQ with 3 bits are whole groups of 32 weights"

AFQ_LIES: Lies = {
    **missing("AFQ", "", ".bits", ".group_size", ".scales", ".biases"),
    "zeros beside them": ({".zeros": ("F32", [2, 2], f32(0, 0, 0, 0))}, r"\.zeros is not an entry of AFQ layers"),
    "a shape": ({".shape": ("U32", [2], u32(2, 64))}, r"\.shape is not an entry of AFQ layers"),
    **{f"{bits} bits": ({".bits": ("U8", [], bytes((bits,)))}, f"found {bits} bits in groups of 32") for bits in (0, 1, 5, 7, 16, 255)},
    **{f"groups of {group}": ({".group_size": ("U8", [], bytes((group,)))}, f"in groups of {group}") for group in (0, 1, 16, 48, 96, 255)},
    "2 bits": ({".bits": ("U8", [], b"\2")}, r"AFQ scales are floats \[2, 3\], found float32 \[2, 2\]"),
    "4 bits": ({".bits": ("U8", [], b"\4")}, "rows of AFQ with 4 bits are whole groups of 32"),
    "6 bits": ({".bits": ("U8", [], b"\6")}, r"AFQ scales are floats \[2, 1\], found float32 \[2, 2\]"),
    "groups of 64": ({".group_size": ("U8", [], b"\x40")}, r"AFQ scales are floats \[2, 1\], found float32 \[2, 2\]"),
    "6 bits in groups of 64": ({".bits": ("U8", [], b"\6"), ".group_size": ("U8", [], b"\x40")}, "whole groups of 64"),
    "bits as U32": ({".bits": ("U32", [], u32(3))}, r"\.bits: expected U8 \[\], found U32"),
    "group as U32": ({".group_size": ("U32", [], u32(32))}, r"\.group_size: expected U8 \[\], found U32"),
    "bits of rank 1": ({".bits": ("U8", [1], b"\3")}, r"\.bits: expected U8 \[\], found U8 \[1\]"),
    "words as bytes": ({"": ("U8", [2, 24], bytes(48))}, r"expected U32 \[2, 24\], found U8"),
    "signed words": ({"": ("I32", [2, 6], bytes(48))}, r"expected U32 \[2, 6\], found I32"),
    "flat words": ({"": ("U32", [12], bytes(48))}, r"expected codes \[out, …\] or \[experts, out, …\], found \[12\]"),
    "words of rank 4": ({"": ("U32", [1, 1, 2, 6], bytes(48))}, r"expected codes \[out, …\].*found \[1, 1, 2, 6\]"),
    "no words": ({"": ("U32", [2, 0], b"")}, r"expected codes .*found \[2, 0\]"),
    "a word short": ({"": ("U32", [2, 5], bytes(40))}, GROUPS),
    "a group short": ({"": ("U32", [2, 3], bytes(24))}, r"AFQ scales are floats \[2, 1\], found float32 \[2, 2\]"),
    "a row more": ({"": ("U32", [3, 6], bytes(72))}, r"AFQ scales are floats \[3, 2\], found float32 \[2, 2\]"),
    "a stack over flat factors": ({"": ("U32", [1, 2, 6], bytes(48))}, r"AFQ scales are floats \[1, 2, 2\], found float32 \[2, 2\]"),
    "flat scales": ({".scales": ("F32", [4], f32(1, 1, 1, 1))}, r"AFQ scales are floats \[2, 2\], found float32 \[4\]"),
    "a scale a row": ({".scales": ("F32", [2, 1], f32(1, 1))}, r"AFQ scales are floats \[2, 2\], found float32 \[2, 1\]"),
    "a bias more": ({".biases": ("F32", [2, 3], bytes(24))}, r"AFQ biases are floats \[2, 2\], found float32 \[2, 3\]"),
    "transposed biases": ({".biases": ("F32", [1, 4], bytes(16))}, r"AFQ biases are floats \[2, 2\], found float32 \[1, 4\]"),
    "scales as U32": ({".scales": ("U32", [2, 2], bytes(16))}, r"\.scales: expected F32, F16 or BF16, found U32"),
    "biases as F64": ({".biases": ("F64", [2, 2], bytes(32))}, r"\.biases: expected F32, F16 or BF16, found F64"),
    "scales as U16": ({".scales": ("U16", [2, 2], bytes(8))}, r"\.scales: expected F32, F16 or BF16, found U16"),
    "a NaN scale": ({".scales": ("F32", [2, 2], f32(1, 1, 1, float("nan")))}, r"group \[1, 1\] has scale nan .*its weights are not finite"),
    "an infinite scale": ({".scales": ("F32", [2, 2], f32(1, float("-inf"), 1, 1))}, r"group \[0, 1\] has scale -inf"),
    "a NaN bias": ({".biases": ("F32", [2, 2], f32(1, 1, float("nan"), 1))}, r"group \[1, 0\] has scale 0\.375 and bias nan"),
    "a scale past f32": ({".scales": ("F32", [2, 2], f32(1e38, 1, 1, 1))}, r"group \[0, 0\] has scale .*its weights are not finite"),
}

MXFP4_LIES: Lies = {
    **missing("MXFP4", "", ".scales"),
    "biases beside them": ({".biases": ("U8", [2, 2], bytes(4))}, r"\.biases is not an entry of MXFP4 layers"),
    "a shape": ({".shape": ("U32", [2], u32(2, 64))}, r"\.shape is not an entry of MXFP4 layers"),
    "a scale that is NaN": ({".scales": ("U8", [2, 2], b"\x7f\x7f\x7f\xff")}, r"the scale at \[1, 1\] is 2\^\(255 - 127\)"),
    "a scale past f32": ({".scales": ("U8", [2, 2], b"\x7f\xfd\x7f\x7f")}, r"the scale at \[0, 1\] is 2\^\(253 - 127\), at most 252"),
    "scales as E8M0": ({".scales": ("F8_E8M0", [2, 2], bytes(4))}, r"\.scales: expected U8 \[2, 2\], found F8_E8M0"),
    "f32 scales": ({".scales": ("F32", [2, 2], bytes(16))}, r"\.scales: expected U8 \[2, 2\], found F32"),
    "flat scales": ({".scales": ("U8", [4], bytes(4))}, r"MXFP4 scales are u8 \[2, 2\], found uint8 \[4\]"),
    "a scale short": ({".scales": ("U8", [2, 1], bytes(2))}, r"MXFP4 scales are u8 \[2, 2\], found uint8 \[2, 1\]"),
    "a scale more": ({".scales": ("U8", [2, 3], bytes(6))}, r"MXFP4 scales are u8 \[2, 2\], found uint8 \[2, 3\]"),
    "signed codes": ({"": ("I8", [2, 32], bytes(64))}, r"expected U8 \[2, 32\], found I8"),
    "packed words": ({"": ("U32", [2, 8], bytes(64))}, r"expected U8 \[2, 8\], found U32"),
    "flat codes": ({"": ("U8", [64], bytes(64))}, r"expected codes .*found \[64\]"),
    "codes of rank 4": ({"": ("U8", [1, 1, 2, 32], bytes(64))}, r"expected codes .*found \[1, 1, 2, 32\]"),
    "no codes": ({"": ("U8", [0, 32], b"")}, r"expected codes .*found \[0, 32\]"),
    "half a group": ({"": ("U8", [2, 24], bytes(48))}, r"MXFP4 codes are u8 \[out, in/2\] in groups of 32 weights, found uint8 \[2, 24\]"),
    "rows of half the length": ({"": ("U8", [4, 16], bytes(64))}, r"MXFP4 scales are u8 \[4, 1\], found uint8 \[2, 2\]"),
    "a stack over flat scales": ({"": ("U8", [1, 2, 32], bytes(64))}, r"MXFP4 scales are u8 \[1, 2, 2\], found uint8 \[2, 2\]"),
}

PLAIN_LIES: Lies = {
    **missing("unquantised", ""),
    "a dtype beside it": ({".dtype": ("U32", [], u32(0))}, r"\.dtype is not an entry of unquantised layers"),
    "a shape beside it": ({".shape": ("U32", [2], u32(2, 3))}, r"\.shape is not an entry of unquantised layers"),
    **{
        f"{dtype} values": ({"": (dtype, [2, 3], bytes(6 * width))}, f"expected F32, BF16 or F16, found {dtype}")
        for dtype, width in (("U8", 1), ("F8_E4M3", 1), ("I16", 2), ("U16", 2), ("U32", 4), ("F64", 8))
    },
    "no rank": ({"": ("F32", [], bytes(4))}, r"has one to three dimensions, all positive, found \[\]"),
    "rank 4": ({"": ("F32", [1, 1, 2, 3], bytes(24))}, r"has one to three dimensions, all positive, found \[1, 1, 2, 3\]"),
    "F16 of rank 4": ({"": ("F16", [1, 1, 2, 3], bytes(12))}, r"has one to three dimensions.*found \[1, 1, 2, 3\]"),
    "no values": ({"": ("F32", [2, 0], b"")}, r"has one to three dimensions, all positive, found \[2, 0\]"),
    "an F16 NaN": ({"": ("F16", [2, 3], bytes(10) + b"\x01\x7e")}, r"the f16 value at \[1, 2\] is not finite"),
    "an F16 infinity in a stack": (
        {"": ("F16", [1, 2, 3], bytes(6) + b"\0\xfc" + bytes(4))},
        r"the f16 value at \[0, 1, 0\] is not finite",
    ),
}

STACK_LIES: Lies = {
    "rank 4": ({".shape": ("U32", [4], u32(1, 2, 3, 32))}, r"expected a U32 shape of 1 to 3 sizes, found U32 \[4\]"),
    "rank 1": ({".shape": ("U32", [1], u32(192))}, r"q8_0 needs a weight .*found \[192\]"),
    "an expert more": ({".shape": ("U32", [3], u32(3, 3, 32))}, r"q8_0 \[3, 3, 32\] takes 306 bytes as U8, found U8 \[204\]"),
    "an expert less": ({".shape": ("U32", [3], u32(1, 3, 32))}, r"q8_0 \[1, 3, 32\] takes 102 bytes"),
    "no expert": ({".shape": ("U32", [3], u32(0, 3, 32))}, "is not the shape of a weight"),
    "half blocks": ({".shape": ("U32", [3], u32(2, 6, 16))}, "q8_0: in_features 16 is not a positive multiple of the block of 32"),
    "bytes of rank 3": ({"": ("U8", [2, 3, 34], bytes(204))}, r"takes 204 bytes as U8, found U8 \[2, 3, 34\]"),
    "a block short": ({"": ("U8", [170], bytes(170))}, r"takes 204 bytes as U8, found U8 \[170\]"),
    "a NaN scale": ({"": ("U8", [204], bytes(136) + b"\1\x7c" + bytes(66))}, r"the q8_0 scale of row \[1, 1\], block 0 is not finite"),
    **{
        f"type {kind}": ({".dtype": ("U32", [], u32(kind))}, rf"\(ggml {kind}\) is not readable|ggml type {kind} is not readable")
        for kind in (4, 5, 9, 15, 16, 17, 29, 31, 34, 35, 39, 1 << 31)
    },
    "type 12": ({".dtype": ("U32", [], u32(12))}, "q4k: in_features 32 is not a positive multiple of the block of 256"),
}

ALL_LIES = {
    FP8: FP8_LIES,
    AFQ: AFQ_LIES,
    MXFP4: MXFP4_LIES,
    "model.layers.0.plain.f32": PLAIN_LIES,
    "model.layers.0.experts.q8_0": STACK_LIES,
    "model.layers.0.experts.afq2": {
        "factors of two types": (
            {".biases": ("BF16", [2, 2, 1], bytes(8))},
            "scales|biases",
        ),
        "scales for all experts": ({".scales": ("F16", [2, 1], bytes(4))}, r"AFQ scales are floats \[2, 2, 1\], found float16 \[2, 1\]"),
    },
    "model.layers.0.experts.mxfp4": {
        "scales of one matrix": ({".scales": ("U8", [4, 1], bytes(4))}, r"MXFP4 scales are u8 \[2, 2, 1\], found uint8 \[4, 1\]"),
    },
}


@pytest.mark.parametrize(("key", "name"), [(key, name) for key, lies in ALL_LIES.items() for name in lies])
def test_a_lying_layer_is_refused_by_name(key: str, name: str) -> None:
    change, words = ALL_LIES[key][name]
    changed = samples.stored(key) | {f"{key}.weight{suffix}": entry for suffix, entry in change.items()}
    lying = {name: entry for name, entry in changed.items() if entry is not None}
    assert lying != samples.stored(key)
    with pytest.raises(FormatError, match=rf"^f\.uqff: (?=.*{re.escape(key)}\.weight).*(?:{words})"):
        read(lying, key)


@pytest.mark.parametrize("poison", [b"\x00\x7c", b"\x00\xfc", b"\x01\x7c", b"\xff\xff"], ids=["inf", "-inf", "signalling NaN", "NaN"])
@pytest.mark.parametrize(("kind", "factor"), [(kind, at) for kind, row in samples.BLOCKS.items() for at in row[3]])
def test_a_factor_that_is_no_number_is_refused_wherever_it_lies(kind: str, factor: int, poison: bytes) -> None:
    number, block, width, _ = samples.BLOCKS[kind]
    data = samples.blocks(kind, 2, 2 * block).data.copy()
    data[1, width + factor : width + factor + 2] = tuple(poison)
    shape = ("U32", [2], u32(2, 2 * block))
    words = r"f16 value at \[1, 1\]" if kind == "f16" else f"{kind} scale of row 1, block 1"
    with pytest.raises(FormatError, match=rf"^f\.uqff: k\.weight: the {words} is not finite"):
        read(tagged(0, weight=("U8", [data.size], data.tobytes()), dtype=("U32", [], u32(number)), shape=shape))
    with pytest.raises(FormatError, match=rf"^k\.weight: the {words} is not finite"):
        encode("k", GgmlTensor(GGML_TYPES[kind], 2 * block, data))


@pytest.mark.parametrize("kind", [kind for kind, row in samples.BLOCKS.items() if row[1] > 1])
def test_a_width_that_is_no_multiple_of_the_block_is_refused(kind: str) -> None:
    number, block, width, _ = samples.BLOCKS[kind]
    for inner in (block - 1, block + 1, block // 2, 1, 3 * block // 2):
        shape = ("U32", [2], u32(1, inner))
        for nbytes in (width, width * 2, -(-inner * width // block)):
            with pytest.raises(FormatError, match=rf"^f\.uqff: k\.weight: {kind}: in_features {inner} is not a positive multiple"):
                read(tagged(0, weight=("U8", [nbytes], bytes(nbytes)), dtype=("U32", [], u32(number)), shape=shape))


BIAS_LIES: dict[str, tuple[str, Stored, str]] = {
    "F8_E4M3": (FP8, ("F8_E4M3", [3], b"\x38" * 3), "a bias is F32, F16, BF16, found F8_E4M3; it cannot be added to anything"),
    "U8": (AFQ, ("U8", [2], bytes(2)), "a bias is F32, F16, BF16, found U8"),
    "F64": (MXFP4, ("F64", [2], bytes(16)), "a bias is F32, F16, BF16, found F64"),
    "another length": (FP8, ("F32", [7], bytes(28)), r"expected F32 \[3\], found F32 \[7\]"),
    "a column": (AFQ, ("F32", [2, 1], bytes(8)), r"expected F32 \[2\], found F32 \[2, 1\]"),
    "no rank": (MXFP4, ("BF16", [], bytes(2)), r"expected BF16 \[2\], found BF16 \[\]"),
    "one for all experts": ("model.layers.0.experts.q8_0", ("F32", [3], bytes(12)), r"expected F32 \[2, 3\], found F32 \[3\]"),
    "one an expert": ("model.layers.0.experts.q8_0", ("F32", [2], bytes(8)), r"expected F32 \[2, 3\], found F32 \[2\]"),
    "flat": ("model.layers.0.experts.q8_0", ("F16", [6], bytes(12)), r"expected F16 \[2, 3\], found F16 \[6\]"),
    "transposed": ("model.layers.0.experts.q8_0", ("F32", [3, 2], bytes(24)), r"expected F32 \[2, 3\], found F32 \[3, 2\]"),
    "an infinite F16": (FP8, ("F16", [3], bytes(4) + b"\0\x7c"), "value 2 is not finite"),
    "a BF16 NaN": (AFQ, ("BF16", [2], b"\xc0\x7f\0\0"), "value 0 is not finite"),
    "an infinity in a stack": ("model.layers.0.experts.mxfp4", ("F32", [2, 2], f32(0, 0, 0, float("inf"))), "value 3 is not finite"),
}


@pytest.mark.parametrize("name", BIAS_LIES)
def test_a_lying_bias_is_refused_by_name(name: str) -> None:
    key, lie, words = BIAS_LIES[name]
    entries = layer(samples.stored(key) | {f"{key}.bias": lie})
    shape = decode(key, entries, no_table, "f.uqff").shape  # type: ignore[arg-type]
    with pytest.raises(FormatError, match=rf"^f\.uqff: {re.escape(key)}\.bias: {words}"):
        decode_bias(key, entries, shape, "f.uqff")


UNWRITABLE: dict[str, tuple[Weight, np.ndarray | None, str]] = {
    "FP8 with a bias": (samples.fp8(3, 7), np.zeros(3, np.float32), r"k\.bias: mistral\.rs cannot add a bias to an FP8 layer"),
    "AFQ": (samples.afq(4, 64, 2, 64), None, r"k\.weight: afq4 is read, not written; decode the layer and choose another type"),
    "MXFP4": (samples.mxfp4(2, 32), None, r"k\.weight: mxfp4 is read, not written"),
    "a stack of FP8": (replace(samples.fp8(3, 7), codes=np.zeros((1, 3, 7), np.uint8)), None, r"e4m3 codes are u8 \[out, in\]"),
    "a NaN code": (replace(samples.fp8(1, 2), codes=np.array([[0, 0x7F]], np.uint8)), None, r"the code at \[0, 1\] is NaN"),
    "a negative scale": (replace(samples.fp8(1, 2), scale=np.float32(-1)), None, "expected a positive number"),
    "a scale of zero": (replace(samples.fp8(1, 2), scale=np.float32(0)), None, "expected a positive number"),
    "a bias for one expert of two": (samples.blocks("q8_0", 2, 3, 32), np.zeros(3, np.float32), r"takes an f32 bias \[2, 3\]"),
    "a row of another length": (replace(samples.blocks("q4k", 2, 256), in_features=512), None, "q4k rows of 512 weights need"),
}


@pytest.mark.parametrize("name", UNWRITABLE)
def test_what_is_not_written_is_refused_with_the_reason(name: str) -> None:
    weight, bias, words = UNWRITABLE[name]
    with pytest.raises(ArctoolError, match=words):
        encode("k", weight, bias)


EXTREMES: dict[str, Weight] = {
    "the smallest scale of FP8": Fp8Tensor(np.ones((1, 2), np.uint8), np.float32(1e-45)),
    "the largest scale of FP8": Fp8Tensor(np.ones((1, 2), np.uint8), np.float32(7.5e35)),
    "blocks of rank 4": samples.blocks("q8_0", 1, 2, 3, 32),
    "plain values of rank 9": samples.dense(*[1] * 9),
    "plain values of rank 1": samples.dense(5),
    "the largest f16": GgmlTensor(GGML_TYPES["f16"], 1, np.array([[0xFF, 0x7B]], np.uint8)),
    "the largest factors": GgmlTensor(GGML_TYPES["q2k"], 256, np.full((1, 84), 0xFB, np.uint8)),
}


@pytest.mark.parametrize("name", EXTREMES)
def test_what_is_written_can_be_read(name: str) -> None:
    """Refused on write, or read as the same; nothing between."""
    weight = EXTREMES[name]
    try:
        with np.errstate(all="ignore"):
            entries = {entry.name: entry for entry in encode("k", weight)}
    except ArctoolError:
        return
    assert samples.same(decode("k", entries, no_table, "f.uqff"), weight)  # type: ignore[arg-type]


def test_plain_values_have_one_to_three_dimensions_under_either_tag() -> None:
    shape = ("U32", [4], u32(1, 1, 1, 2))
    for kind, width in ((0, 4), (30, 2)):
        with pytest.raises(FormatError, match=r"k\.weight\.shape: expected a U32 shape of 1 to 3 sizes, found U32 \[4\]"):
            read(tagged(0, weight=("U8", [2 * width], bytes(2 * width)), dtype=("U32", [], u32(kind)), shape=shape))
    assert isinstance(read(tagged(1, weight=("F32", [1, 1, 2], bytes(8)))), DenseTensor)
