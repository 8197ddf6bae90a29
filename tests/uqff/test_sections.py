"""The wire-tag grammar: one golden blob for each meaning, and every refusal of docs/formats.md."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from arctool.errors import ArctoolError, FormatError, GeometryError
from arctool.quant.trellis import Geometry
from arctool.uqff.sections import Sections, TableRef, decode_sections, encode_sections

DIGEST = bytes(range(32))
K8V4L12 = b"\x03\x08\x0c\x04"
TABLE_L12 = b"\x01\x01\x04\x0c" + DIGEST
TABLE_L16 = b"\x01\x00\x02\x10" + DIGEST


def ref(dtype: str, v: int, log2_rows: int) -> TableRef:
    return TableRef(dtype, v, log2_rows, DIGEST.hex())  # type: ignore[arg-type]


GOLDEN = {
    "default sum2": (Sections(Geometry(4, 2, 16), None, None), b"\x02"),
    "default sum2 rotated": (Sections(Geometry(4, 2, 16), None, (64, 128)), b"\x02\x04\x06\x07"),
    "default table": (Sections(Geometry(4, 2, 16), ref("f32", 2, 16), None), TABLE_L16),
    "K6V2L16 sum2": (Sections(Geometry(6, 2, 16), None, (1, 1)), b"\x03\x06\x10\x02\x02\x04\x00\x00"),
    "K8V4L12 table": (Sections(Geometry(8, 4, 12), ref("bf16", 4, 12), (4, 8)), K8V4L12 + TABLE_L12 + b"\x04\x02\x03"),
    "K3V1L12 table": (Sections(Geometry(3, 1, 12), ref("bf16", 1, 12), None), b"\x03\x03\x0c\x01\x01\x01\x01\x0c" + DIGEST),
}


@pytest.mark.parametrize("name", GOLDEN)
def test_a_meaning_has_exactly_the_golden_blob(name: str) -> None:
    sections, blob = GOLDEN[name]
    assert encode_sections(sections, "w") == blob
    assert decode_sections(blob, "w") == sections


REFUSED_ON_READ = {
    "empty": (b"", "no codebook section"),
    "geometry alone": (K8V4L12, "no codebook section"),
    "rotation alone": (b"\x04\x06\x06", "no codebook section"),
    "unknown tag": (b"\x05", "unknown section tag 5 at byte 0"),
    "future tag after the codebook": (b"\x02\x09\x01", "unknown section tag 9 at byte 1"),
    "trailing zero": (b"\x02\x00", "unknown section tag 0 at byte 1"),
    "trailing bytes after the rotation": (b"\x02\x04\x01\x01\xff\xff", "unknown section tag 255 at byte 4"),
    "truncated geometry": (b"\x03\x08\x0c", "section 3 .geometry. at byte 0 is truncated: expected 4 bytes, found 3"),
    "truncated table": (K8V4L12 + TABLE_L12[:-1], "section 1 .table. at byte 4 is truncated: expected 36 bytes, found 35"),
    "truncated rotation": (b"\x02\x04\x06", "section 4 .rotation. at byte 1 is truncated"),
    "repeated geometry": (K8V4L12 + K8V4L12 + TABLE_L12, "section 3 .geometry. at byte 4 is repeated"),
    "repeated table": (K8V4L12 + TABLE_L12 + TABLE_L12, "section 1 .table. at byte 40 is repeated"),
    "repeated sum2": (b"\x02\x02", "section 2 .sum2. at byte 1 is repeated"),
    "two codebooks": (TABLE_L16 + b"\x02", "section 2 .sum2. at byte 36 is repeated"),
    "repeated rotation": (b"\x02\x04\x01\x01\x04\x01\x01", "section 4 .rotation. at byte 4 is repeated"),
    "geometry after the codebook": (b"\x02\x03\x06\x10\x02", "section 3 .geometry. at byte 1 is misplaced"),
    "codebook after the rotation": (b"\x04\x01\x01\x02", "section 2 .sum2. at byte 3 is misplaced"),
    "geometry after the rotation": (b"\x02\x04\x01\x01\x03\x06\x10\x02", "section 3 .geometry. at byte 4 is misplaced"),
    "explicit default": (b"\x03\x04\x10\x02\x02", "states the default K4V2L16"),
    "K of zero": (b"\x03\x00\x0c\x04" + TABLE_L12, "K0V4L12"),
    "K above L": (b"\x03\x0d\x0c\x04" + TABLE_L12, "K13V4L12"),
    "L above 16": (b"\x03\x08\x11\x02\x02", "K8V2L17"),
    "V of three": (b"\x03\x06\x0c\x03" + TABLE_L12, "K6V3L12"),
    "sum2 with V=4": (b"\x03\x08\x10\x04\x02", "sum2 .* cannot serve K8V4L16"),
    "sum2 with L=12": (b"\x03\x04\x0c\x02\x02", "sum2 .* cannot serve K4V2L12"),
    "sum2 with K=5": (b"\x03\x05\x10\x02\x02", "sum2 .* cannot serve K5V2L16"),
    "table dtype code": (b"\x01\x02\x02\x10" + DIGEST, "dtype code 2 is unknown"),
    "f32 table for L12": (K8V4L12 + b"\x01\x00\x04\x0c" + DIGEST, "K8V4L12 needs a bf16 table .* found f32"),
    "bf16 table for L16": (b"\x01\x01\x02\x10" + DIGEST, "K4V2L16 needs a f32 table"),
    "table of another length": (K8V4L12 + b"\x01\x01\x04\x0b" + DIGEST, r"needs a bf16 table \[4096, 4\], found bf16 \[2\^11, 4\]"),
    "table of absurd length": (K8V4L12 + b"\x01\x01\x04\xff" + DIGEST, r"found bf16 \[2\^255, 4\]"),
    "table of another V": (K8V4L12 + b"\x01\x01\x02\x0c" + DIGEST, r"found bf16 \[2\^12, 2\]"),
    "input block of 256": (b"\x02\x04\x08\x00", "input block 2.8 is larger than 128"),
    "output block of 2^255": (b"\x02\x04\x00\xff", "output block 2.255 is larger than 128"),
}


@pytest.mark.parametrize("name", REFUSED_ON_READ)
def test_a_broken_blob_is_refused_by_name(name: str) -> None:
    blob, words = REFUSED_ON_READ[name]
    with pytest.raises(FormatError, match=f"^x.weight.sections: .*{words}"):
        decode_sections(blob, "x.weight.sections")


REFUSED_ON_WRITE = {
    "sum2 with V=4": (Sections(Geometry(8, 4, 16), None, None), "sum2"),
    "sum2 with L=12": (Sections(Geometry(4, 2, 12), None, None), "sum2"),
    "f32 table for L12": (Sections(Geometry(8, 4, 12), ref("f32", 4, 12), None), "needs a bf16 table"),
    "bf16 table for L16": (Sections(Geometry(4, 2, 16), ref("bf16", 2, 16), None), "needs a f32 table"),
    "table of another length": (Sections(Geometry(8, 4, 12), ref("bf16", 4, 16), None), "needs a bf16 table"),
    "table of another V": (Sections(Geometry(8, 4, 12), ref("bf16", 2, 12), None), "needs a bf16 table"),
    "digest that is none": (Sections(Geometry(8, 4, 12), TableRef("bf16", 4, 12, "AB" * 32), None), "SHA-256"),
    "block of 256": (Sections(Geometry(4, 2, 16), None, (256, 1)), "block 256"),
    "block of 3": (Sections(Geometry(4, 2, 16), None, (1, 3)), "block 3"),
    "block of 0": (Sections(Geometry(4, 2, 16), None, (0, 1)), "block 0"),
}


@pytest.mark.parametrize("name", REFUSED_ON_WRITE)
def test_contradicting_sections_are_never_written(name: str) -> None:
    sections, words = REFUSED_ON_WRITE[name]
    with pytest.raises(GeometryError, match=f"^x: .*{words}"):
        encode_sections(sections, "x")


@given(st.binary(max_size=80) | st.lists(st.sampled_from([K8V4L12, TABLE_L12, TABLE_L16, b"\x02", b"\x04\x01\x02"])).map(b"".join))
def test_what_can_be_read_is_the_one_blob_that_would_be_written(blob: bytes) -> None:
    try:
        sections = decode_sections(blob, "x")
    except ArctoolError:
        return
    assert encode_sections(sections, "x") == blob


def test_the_manual_lists_every_refusal_that_is_tested_here() -> None:
    manual = (Path(__file__).parents[2] / "docs" / "formats.md").read_text()
    table = manual[manual.index("<!-- refusals -->") : manual.index("<!-- /refusals -->")]
    listed = {row.split("|")[1].strip() for row in table.splitlines() if row.startswith("|")} - {"blob", "---"}
    assert listed == set(REFUSED_ON_READ) | set(REFUSED_ON_WRITE)
