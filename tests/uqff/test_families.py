"""Families: golden entries worked out by hand, round trips of every family, and every way a layer's entries can lie."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest
import uqff_samples as samples

from arctool.errors import ArctoolError, FormatError, GeometryError
from arctool.quant import rows
from arctool.quant.codebooks import Codebook
from arctool.quant.hadamard import Rotation
from arctool.quant.tensor import DenseTensor, GgmlTensor, TrellisTensor
from arctool.quant.trellis import Geometry
from arctool.uqff.entries import Entry
from arctool.uqff.families import decode, decode_bias, encode
from arctool.uqff.sections import TableRef
from arctool.uqff.wire.tables import read_table, table_entry, table_ref


def pool(ref: TableRef) -> Codebook:
    """The sample table of a geometry, by its number of states and values."""
    known = {table_ref(samples.trellis(n, samples.table(Geometry.parse(n)))): n for n in ("K8V4L12", "K3V1L12", "K4V2L16")}
    return samples.table(Geometry.parse(known[ref]))


def by_name(entries: list[Entry]) -> dict[str, Entry]:
    return {entry.name: entry for entry in entries}


def entry(name: str, dtype: str, shape: tuple[int, ...], data: bytes) -> Entry:
    return Entry(name, dtype, shape, np.frombuffer(data, np.uint8))


def tiny() -> TrellisTensor:
    """K4V2L16, 2 rows of 4 weights: 8 bits a row, one byte and three of padding."""
    packed = np.array([[0xA5, 0, 0, 0], [0x3C, 0, 0, 0]], np.uint8)
    signs = np.array([1, -1, -1, 1], np.int8), np.array([-1, 1], np.int8)
    scales = np.array([0.5, 2.0], np.float32)
    return TrellisTensor(Geometry(4, 2, 16), Codebook("sum2"), 4, packed, scales, Rotation(4, 2, *signs))


def test_a_tiny_trellis_layer_has_these_bytes() -> None:
    found = by_name(encode("a.b", tiny(), np.array([1.0, -2.0], np.float32)))
    expected = {
        "a.b.weight": ("U8", (2, 4), "a5000000 3c000000"),
        "a.b.weight.format": ("U8", (), "40"),
        "a.b.weight.shape": ("U32", (2,), "02000000 04000000"),
        "a.b.weight.scales": ("F32", (2,), "0000003f 00000040"),
        "a.b.weight.sections": ("U8", (4,), "02 04 02 01"),
        "a.b.weight.signs_in": ("U8", (1,), "06"),
        "a.b.weight.signs_out": ("U8", (1,), "01"),
        "a.b.bias": ("F32", (2,), "0000803f 000000c0"),
    }
    assert {name: (e.dtype, e.shape, e.raw.tobytes().hex()) for name, e in found.items()} == {
        name: (dtype, shape, data.replace(" ", "")) for name, (dtype, shape, data) in expected.items()
    }


def test_a_tiny_bf16_layer_is_a_ggml_layer_of_type_30() -> None:
    found = by_name(encode("e", DenseTensor(np.array([[0x3F80, 0x4000, 0xBF80]], np.uint16))))
    assert {name: (e.dtype, e.shape, e.raw.tobytes().hex()) for name, e in found.items()} == {
        "e.weight": ("U8", (6,), "803f004080bf"),
        "e.weight.format": ("U8", (), "00"),
        "e.weight.dtype": ("U32", (), "1e000000"),
        "e.weight.shape": ("U32", (2,), "0100000003000000"),
    }


def test_a_tiny_f32_layer_is_a_ggml_layer_of_type_0() -> None:
    found = by_name(encode("e", DenseTensor(np.array([[1.0]], np.float32))))
    assert found["e.weight"].raw.tobytes().hex() == "0000803f"
    assert found["e.weight.dtype"].raw.tobytes() == bytes(4)


@pytest.mark.parametrize("key", samples.layers())
def test_every_family_comes_back_bit_for_bit(key: str) -> None:
    weight, bias = samples.layers()[key]
    entries = by_name(encode(key, weight, bias))
    assert samples.same(decode(key, entries, pool), weight)
    found = decode_bias(key, entries, weight.shape, "f")
    assert (found is None) == (bias is None)
    assert bias is None or np.array_equal(found, bias)


def test_f16_blocks_are_read_as_their_exact_f32_values() -> None:
    entries = by_name(
        [
            entry("h.weight", "U8", (4,), b"\x00\x3c\x01\x00"),
            entry("h.weight.format", "U8", (), b"\x00"),
            entry("h.weight.dtype", "U32", (), b"\x01\0\0\0"),
            entry("h.weight.shape", "U32", (2,), b"\x01\0\0\0\x02\0\0\0"),
        ]
    )
    weight = decode("h", entries, pool)
    assert isinstance(weight, GgmlTensor)
    assert weight.label == "f16"
    assert weight.dense().tolist() == [[1.0, 2.0**-24]]


def test_odd_addresses_are_copied_and_decode_alike() -> None:
    weight = samples.dense(3, 4, dtype=np.float32)
    entries = by_name(encode("e", weight))
    whole = np.zeros(entries["e.weight"].nbytes + 1, np.uint8)
    whole[1:] = entries["e.weight"].raw
    assert whole[1:].ctypes.data % 4 != 0
    entries["e.weight"] = replace(entries["e.weight"], raw=whole[1:])
    found = decode("e", entries, pool)
    assert samples.same(found, weight)
    assert isinstance(found, DenseTensor)
    assert found.data.flags.aligned


Change = Callable[[dict[str, Entry]], object]


def put(suffix: str, dtype: str, shape: tuple[int, ...], data: bytes) -> Change:
    name = f"k.weight{suffix}"
    return lambda entries: entries.__setitem__(name, entry(name, dtype, shape, data))


def drop(suffix: str) -> Change:
    return lambda entries: entries.pop(f"k.weight{suffix}")


def u32(*values: int) -> bytes:
    return np.array(values, "<u4").tobytes()


TRELLIS_LIES: dict[str, tuple[Change, str]] = {
    "no format": (drop(".format"), "k.weight.format is missing"),
    "format as U32": (put(".format", "U32", (), u32(64)), r"k.weight.format: expected U8 \[\], found U32 \[\]"),
    "format of rank 1": (put(".format", "U8", (1,), b"@"), r"k.weight.format: expected U8 \[\], found U8 \[1\]"),
    "tag 1": (put(".format", "U8", (), b"\x01"), "k.weight.scales is not an entry of unquantised layers"),
    "tag 2": (put(".format", "U8", (), b"\x02"), r"HQQ \(tag 2\) is not readable by this version"),
    "tag 4": (put(".format", "U8", (), b"\x04"), "k.weight.biases is missing: AFQ layers need it"),
    "tag 5": (put(".format", "U8", (), b"\x05"), r"F8Q8 \(tag 5\) is not readable"),
    "a future tag": (put(".format", "U8", (), b"\x41"), "tag 65 is unknown to this version; known: 0, 1, 3, 4, 6, 64"),
    "tag 65": (put(".format", "U8", (), b"A"), "tag 65 is unknown to this version"),
    "tag 0 over trellis entries": (put(".format", "U8", (), b"\x00"), "k.weight.dtype is missing"),
    "no weight": (drop(""), "k.weight is missing"),
    "no scales": (drop(".scales"), "k.weight.scales is missing"),
    "no shape": (drop(".shape"), "k.weight.shape is missing"),
    "no sections": (drop(".sections"), "k.weight.sections is missing"),
    "an unknown suffix": (put(".crc32", "U8", (4,), bytes(4)), "k.weight.crc32 is not an entry of trellis layers"),
    "shape of rank 3": (put(".shape", "U32", (3,), u32(1, 5, 12)), "k.weight.shape: expected a U32 shape of 2 sizes"),
    "shape with a zero": (put(".shape", "U32", (2,), u32(0, 12)), "not the shape of a weight"),
    "more rows": (put(".shape", "U32", (2,), u32(6, 12)), r"k.weight: expected U8 \[6, 4\], found U8 \[5, 4\]"),
    "absurd rows": (put(".shape", "U32", (2,), u32(1 << 31, 1 << 31)), "not the shape of a weight"),
    "more inputs": (put(".shape", "U32", (2,), u32(5, 24)), r"k.weight: expected U8 \[5, 8\], found U8 \[5, 4\]"),
    "fewer inputs with an equal stride": (put(".shape", "U32", (2,), u32(5, 8)), "signs_in|padding"),
    "an odd input": (put(".shape", "U32", (2,), u32(5, 13)), "in_features 13 is not a positive multiple of V=2"),
    "flat streams": (put("", "U8", (20,), bytes(20)), r"expected U8 \[5, 4\], found U8 \[20\]"),
    "signed streams": (put("", "I8", (5, 4), bytes(20)), r"expected U8 \[5, 4\], found I8"),
    "set padding": (put("", "U8", (5, 4), b"\xff" * 20), "row 0 has set bits in the padding after bit 24"),
    "scales of another length": (put(".scales", "F32", (4,), bytes(16)), r"k.weight.scales: expected F32 \[5\], found F32 \[4\]"),
    "scales as U32": (put(".scales", "U32", (5,), bytes(20)), r"k.weight.scales: expected F32 \[5\], found U32"),
    "a NaN scale": (put(".scales", "F32", (5,), bytes(16) + b"\0\0\xc0\x7f"), "the scale of row 4 is not finite"),
    "an infinite scale": (put(".scales", "F32", (5,), b"\0\0\x80\x7f" + bytes(16)), "the scale of row 0 is not finite"),
    "the largest scale": (put(".scales", "F32", (5,), bytes(16) + b"\xff\xff\x7f\xff"), "the scale of row 4 is -3.4.* it is not finite"),
    "sections of rank 2": (put(".sections", "U8", (1, 1), b"\x02"), "k.weight.sections: expected"),
    "sections without end": (put(".sections", "U8", (300,), bytes(300)), "at most 256 bytes"),
    "another geometry": (put(".sections", "U8", (8,), b"\x03\x06\x10\x02\x02\x04\x02\x00"), r"expected U8 \[5, 8\]"),
    "a rotation section gone": (put(".sections", "U8", (1,), b"\x02"), "signs_in: no section 4"),
    "an input block that divides nothing": (put(".sections", "U8", (4,), b"\x02\x04\x03\x00"), "input block 8"),
    "an output block that divides nothing": (put(".sections", "U8", (4,), b"\x02\x04\x02\x01"), "output block 2"),
    "no input signs": (drop(".signs_in"), "signs_in is missing"),
    "no output signs": (drop(".signs_out"), "signs_out is missing"),
    "short signs": (put(".signs_in", "U8", (1,), b"\x00"), r"signs_in: expected U8 \[2\], found U8 \[1\]"),
    "signs after the last": (put(".signs_in", "U8", (2,), b"\x00\x10"), "signs_in: bits after sign 11 are set"),
    "output signs after the last": (put(".signs_out", "U8", (1,), b"\x20"), "signs_out: bits after sign 4 are set"),
}


@pytest.mark.parametrize("name", TRELLIS_LIES)
def test_a_lying_trellis_layer_is_refused_by_name(name: str) -> None:
    change, words = TRELLIS_LIES[name]
    entries = by_name(encode("k", samples.trellis("K4V2L16")))
    assert decode("k", entries, pool)
    change(entries)
    with pytest.raises(FormatError, match=f"^f.uqff: .*k.weight.*(?:{words})|^f.uqff: {words}"):
        decode("k", entries, pool, "f.uqff")


GGML_LIES: dict[str, tuple[Change, str]] = {
    "Q4_K": (put(".dtype", "U32", (), u32(12)), "q4k: in_features 5 is not a positive multiple of the block of 256"),
    "Q8_K": (put(".dtype", "U32", (), u32(15)), r"q8k \(ggml 15\) is not readable by this version; it reads f32 \(0\), f16 \(1\)"),
    "Q8_0": (put(".dtype", "U32", (), u32(8)), "q8_0: in_features 5 is not a positive multiple of the block of 32"),
    "type 16": (put(".dtype", "U32", (), u32(16)), "ggml type 16 is not readable"),
    "dtype as U8": (put(".dtype", "U8", (), b"\x1e"), r"k.weight.dtype: expected U32 \[\], found U8"),
    "no dtype": (drop(".dtype"), "k.weight.dtype is missing"),
    "no shape": (drop(".shape"), "k.weight.shape is missing"),
    "bytes too few": (put("", "U8", (29,), bytes(29)), r"bf16 \[3, 5\] takes 30 bytes as U8, found U8 \[29\]"),
    "bytes too many": (put("", "U8", (31,), bytes(31)), r"bf16 \[3, 5\] takes 30 bytes"),
    "bytes as U16": (put("", "U16", (15,), bytes(30)), r"takes 30 bytes as U8, found U16"),
    "another type of equal rank": (put(".dtype", "U32", (), u32(0)), r"f32 \[3, 5\] takes 60 bytes"),
    "shape of rank 0": (put(".shape", "U32", (), u32(15)), "k.weight.shape: expected a U32 shape"),
    "shape of rank 9": (put(".shape", "U32", (9,), u32(*[1] * 9)), "k.weight.shape: expected a U32 shape"),
    "shape as U8": (put(".shape", "U8", (2,), b"\x03\x05"), "k.weight.shape: expected a U32 shape"),
    "an enormous shape": (put(".shape", "U32", (3,), u32(*[1 << 31] * 3)), "not the shape of a weight"),
    "scales": (put(".scales", "F32", (3,), bytes(12)), "k.weight.scales is not an entry of GGML layers"),
}


@pytest.mark.parametrize("name", GGML_LIES)
def test_a_lying_ggml_layer_is_refused_by_name(name: str) -> None:
    change, words = GGML_LIES[name]
    entries = by_name(encode("k", samples.dense(3, 5)))
    assert decode("k", entries, pool)
    change(entries)
    with pytest.raises(FormatError, match=f"^f.uqff: .*(?:{words})"):
        decode("k", entries, pool, "f.uqff")


def test_an_entry_of_another_layer_is_refused() -> None:
    entries = by_name(encode("k", samples.dense(3, 5)) + encode("k2", samples.dense(1, 1)))
    with pytest.raises(FormatError, match=r"k2\.weight does not belong to layer k"):
        decode("k", entries, pool)


def test_a_table_that_was_altered_is_refused() -> None:
    weight = samples.trellis("K8V4L12", samples.table(Geometry(8, 4, 12)))
    ref, stored = table_ref(weight), table_entry(weight.codebook)
    assert ref is not None
    assert stored.name == f"arctool.table.{ref.sha256[:16]}"
    assert (stored.dtype, stored.shape) == ("U8", (4096 * 4 * 2,))
    assert read_table(stored, ref, "f").digest == weight.codebook.digest
    flipped = stored.raw.copy()
    flipped[1000] ^= 1
    with pytest.raises(FormatError, match=r"arctool\.table\..*the table was altered"):
        read_table(replace(stored, raw=flipped), ref, "f")
    with pytest.raises(FormatError, match=r"expected U8 \[32768\], found U8 \[32767\]"):
        read_table(replace(stored, raw=stored.raw[:-1], shape=(32767,)), ref, "f")


@pytest.mark.parametrize(("geometry", "poison"), [("K8V4L12", 0x7F80), ("K8V4L12", 0xFFC1), ("K4V2L16", np.float32("nan"))])
def test_a_table_with_a_value_that_is_not_finite_is_refused(geometry: str, poison: object) -> None:
    table = samples.table(Geometry.parse(geometry)).table
    assert table is not None
    table = table.copy()
    table[5, 1] = poison
    weight = samples.trellis(geometry, Codebook("table", table))
    ref = table_ref(weight)
    assert ref is not None
    name = f"arctool.table.{ref.sha256[:16]}"
    stored = entry(name, "U8", (table.nbytes,), table.tobytes())
    with pytest.raises(FormatError, match=rf"f: {name}: the value at \[5, 1\] is .*not finite"):
        read_table(stored, ref, "f")
    with pytest.raises(FormatError, match=rf"{name}: the value at \[5, 1\] is .*not finite"):
        table_entry(weight.codebook)


def test_a_value_that_is_not_finite_is_found_past_the_first_chunk(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rows.bounded_rows, "__kwdefaults__", {"most": 4})
    values = np.zeros((3, 5), np.float32)
    DenseTensor(values).check_values("x")
    values[2, 1] = values[2, 4] = np.inf
    with pytest.raises(FormatError, match=r"x: the value at \[2, 1\] is inf"):
        DenseTensor(values).check_values("x")


UNWRITABLE: dict[str, tuple[str, Callable[[], object], str]] = {
    "a bias of another length": ("k", lambda: (samples.dense(3, 5), np.zeros(5, np.float32)), "f32 bias"),
    "a bias of f64": ("k", lambda: (samples.dense(3, 5), np.zeros(3)), "f32 bias"),
    "a bias of NaN": ("k", lambda: (samples.dense(3, 5), np.array([0, np.nan, 0], np.float32)), "value 1 is not finite"),
    "an infinite f32 weight": (
        "k",
        lambda: (DenseTensor(np.array([[0, 1, 2], [3, 4, -np.inf]], np.float32)), None),
        r"k\.weight: the value at \[1, 2\] is -inf, which is not finite",
    ),
    "a bf16 NaN": ("k", lambda: (DenseTensor(np.array([[0x3F80], [0x7FC0]], np.uint16)), None), r"the value at \[1, 0\] is nan"),
    "a scale that takes the codebook past f32": (
        "k",
        lambda: (replace(tiny(), scales=np.array([1, 3e38], np.float32)), None),
        "the scale of row 1 is .* it is not finite",
    ),
    "no weights": ("k", lambda: (DenseTensor(np.zeros((0, 4), np.float32)), None), "at least one weight"),
    "no rank": ("k", lambda: (DenseTensor(np.zeros((), np.float32)), None), "at least one weight"),
    "an infinite scale": ("k", lambda: (replace(tiny(), scales=np.array([1, np.inf], np.float32)), None), "scale of row 1"),
    "set padding": ("k", lambda: (replace(tiny(), packed=np.full((2, 4), 255, np.uint8)), None), "padding"),
    "sum2 for V=4": ("k", lambda: (replace(tiny(), geometry=Geometry(8, 4, 12)), None), "sum2"),
    "a foreign table": ("k", lambda: (replace(tiny(), codebook=samples.table(Geometry(8, 4, 12))), None), "f32 table"),
    "an empty key": ("", lambda: (tiny(), None), "not a layer key"),
    "a key with .weight": ("a.weight", lambda: (tiny(), None), "not a layer key"),
    "a key with an empty part": ("a..b", lambda: (tiny(), None), "not a layer key"),
    "a key with a newline": ("a\nb", lambda: (tiny(), None), "not a layer key"),
    "a version's key": ("uqff.version", lambda: (tiny(), None), "not a layer key"),
}


@pytest.mark.parametrize("name", UNWRITABLE)
def test_what_could_not_be_read_is_never_written(name: str) -> None:
    key, make, words = UNWRITABLE[name]
    with pytest.raises(ArctoolError, match=words):
        encode(key, *make())  # type: ignore[misc]


def test_a_bias_in_the_file_is_checked_against_the_weight() -> None:
    entries = by_name(encode("k", samples.trellis("K4V2L16"), np.ones(5, np.float32)))
    assert decode_bias("k", entries, (5, 12), "f") is not None
    entries["k.bias"] = entry("k.bias", "F32", (4,), bytes(16))
    with pytest.raises(FormatError, match=r"f: k.bias: expected F32 \[5\], found F32 \[4\]"):
        decode_bias("k", entries, (5, 12), "f")
    entries["k.bias"] = entry("k.bias", "F32", (5,), b"\0\0\x80\xff" + bytes(16))
    with pytest.raises(FormatError, match=r"f: k\.bias: value 0 is not finite"):
        decode_bias("k", entries, (5, 12), "f")


def test_geometry_faults_are_geometry_errors() -> None:
    with pytest.raises(GeometryError):
        encode("k", replace(tiny(), in_features=6))
