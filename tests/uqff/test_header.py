"""Safetensors headers: what every reader takes, and a battery of hostile ones that must be refused by name and cost nothing."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from safetensors.numpy import load

from arctool.errors import FormatError, StorageError
from arctool.uqff.header import build_header, parse_header, parse_json
from arctool.uqff.shard import Shard


def file_of(header: object, data: bytes = b"") -> bytes:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return len(text).to_bytes(8, "little") + text + data


def tensor(dtype: object = "U8", shape: object = (4,), offsets: object = (0, 4), **more: object) -> dict[str, object]:
    return {"dtype": dtype, "shape": shape, "data_offsets": offsets, **more}


FOUR = b"\1\2\3\4"

HOSTILE = {
    "empty": (b"", "too short"),
    "seven bytes": (b"\0" * 7, "too short"),
    "a terabyte claimed": ((1 << 40).to_bytes(8, "little") + b"{}", "claims 1099511627776 bytes"),
    "2^64-1 claimed": (b"\xff" * 8 + b"{}", "claims 18446744073709551615 bytes"),
    "one byte more than there is": ((3).to_bytes(8, "little") + b"{}", "claims 3 bytes"),
    "a zip": (b"PK\x03\x04" + b"\0" * 30, "a zip archive"),
    "a pickle": (b"\x80\x04\x95" + b"\0" * 30, "a pickle"),
    "a GGUF file": (b"GGUF\x03\0\0\0" + b"\0" * 30, "a GGUF file"),
    "a pickle of protocol 2": (b"\x80\x02}q\0X" + b"\1" * 30, "a pickle"),
    "a pickle of protocol 3": (b"\x80\x03}q\0X" + b"\1" * 30, "a pickle"),
    "a pickle of protocol 5": (b"\x80\x05\x95" + b"\xff" * 30, "a pickle"),
    "a gzip archive": (b"\x1f\x8b\x08" + b"\xff" * 30, "a gzip archive"),
    "a program": (b"\x7fELF\2\1\1\0" + bytes(30), "a program"),
    "an error page": (b"<!doctype html><html></html>", "a web page, perhaps the error page of a download"),
    "an error page in capitals": (b"<HTML><BODY>404</BODY></HTML>", "a web page"),
    "a Git LFS pointer": (b"version https://git-lfs.github.com/spec/v1\n", "a Git LFS pointer: fetch the file itself"),
    "a number past every float": (file_of(b'{"a": -1e999}'), "-1e999 is larger than any number"),
    "no JSON": (file_of(b"hello"), "not readable as JSON"),
    "no UTF-8": (file_of(b'{"\xff": 1}'), "not readable as JSON"),
    "a list": (file_of([1]), "expected a JSON object, found list"),
    "nesting": (file_of(b'{"a":' * 100_000), "nested more than 64 deep"),
    "nesting of 65": (file_of(b'{"a":' * 64 + b"{}" + b"}" * 64), "nested more than 64 deep"),
    "nesting of lists": (file_of(b'{"a":' + b"[" * 64 + b"]" * 64 + b"}"), "nested more than 64 deep"),
    "a number of 10,000 digits": (file_of(b'{"a":' + b"9" * 10_000 + b"}"), "not readable as JSON"),
    "NaN": (file_of(b'{"a": NaN}'), "NaN is not JSON"),
    "a duplicate tensor": (file_of(b'{"a":{},"b":{},"a":{}}'), "key 'a' occurs twice"),
    "a duplicate field": (
        file_of(b'{"a":{"dtype":"U8","dtype":"I8","shape":[4],"data_offsets":[0,4]}}', FOUR),
        "key 'dtype' occurs twice",
    ),
    "metadata of numbers": (file_of({"__metadata__": {"a": 1}}), "__metadata__ must map"),
    "metadata list": (file_of({"__metadata__": []}), "__metadata__ must map"),
    "a tensor that is a list": (file_of({"a": []}), "'a': expected exactly"),
    "an additional field": (file_of({"a": tensor(crc=1)}, FOUR), "'a': expected exactly"),
    "a missing field": (file_of({"a": {"dtype": "U8", "shape": [4]}}, FOUR), "'a': expected exactly"),
    "an empty name": (file_of({"": tensor()}, FOUR), "not a tensor name"),
    "a lone surrogate": (
        file_of(b'{"\\ud800":{"dtype":"U8","shape":[4],"data_offsets":[0,4]}}', FOUR),
        r"'\\ud800' holds half of a surrogate",
    ),
    "a lone surrogate in metadata": (file_of(b'{"__metadata__":{"uqff.producer":"a\\udfff"}}'), r"'a\\udfff' holds half of a surrogate"),
    "a newline in a name": (file_of({"a\nb": tensor()}, FOUR), "not a tensor name"),
    "an unknown dtype": (file_of({"a": tensor("U4")}, FOUR), "dtype 'U4' is unknown"),
    "a dtype that is a list": (file_of({"a": tensor(["U8"])}, FOUR), "dtype .* is unknown"),
    "a negative size": (file_of({"a": tensor(shape=[-4])}, FOUR), "'a': shape"),
    "a size of 2^63": (file_of({"a": tensor(shape=[1 << 63])}, FOUR), "'a': shape"),
    "sizes whose product wraps to 4": (file_of({"a": tensor(shape=[1 << 62, 4, 1 << 2])}, FOUR), "takes 73786976294838206464 bytes"),
    "a float size": (file_of({"a": tensor(shape=[4.0])}, FOUR), "'a': shape"),
    "a true size": (file_of({"a": tensor(shape=[True])}, FOUR), "'a': shape"),
    "rank nine": (file_of({"a": tensor(shape=[1] * 8 + [4])}, FOUR), "'a': shape"),
    "a shape that is a number": (file_of({"a": tensor(shape=4)}, FOUR), "'a': shape"),
    "backward offsets": (file_of({"a": tensor(offsets=[4, 0])}, FOUR), "'a': data_offsets"),
    "three offsets": (file_of({"a": tensor(offsets=[0, 2, 4])}, FOUR), "'a': data_offsets"),
    "offsets that are too few for the shape": (file_of({"a": tensor(offsets=[0, 3])}, FOUR), "takes 4 bytes, .* give 3"),
    "a hole at the start": (file_of({"a": tensor(offsets=[1, 5])}, FOUR + b"\0"), "leaves a hole .* expected byte 0"),
    "a hole in between": (
        file_of({"a": tensor(), "b": tensor(offsets=[5, 9])}, FOUR + b"\0" + FOUR),
        "'b': data at byte 5 leaves a hole",
    ),
    "an overlap": (file_of({"a": tensor(), "b": tensor(offsets=[2, 6])}, FOUR + b"\0\0"), "'b': data at byte 2 overlaps"),
    "the same bytes twice": (file_of({"a": tensor(), "b": tensor()}, FOUR), "overlaps"),
    "a truncated file": (file_of({"a": tensor()}, FOUR[:3]), "is truncated"),
    "trailing bytes": (file_of({"a": tensor()}, FOUR + b"\0"), "has trailing bytes"),
    "trailing bytes without tensors": (file_of({}, b"\0"), "has trailing bytes"),
}


@pytest.mark.parametrize("name", HOSTILE)
def test_a_hostile_header_is_refused_by_name(name: str) -> None:
    data, words = HOSTILE[name]
    with pytest.raises(FormatError, match=f"^f.uqff: .*{words}"):
        parse_header(memoryview(data), "f.uqff")


def test_json_of_the_deepest_kind_allowed_and_whole_surrogate_pairs_are_fine() -> None:
    found = parse_json(b'{"a":' * 63 + b'{"\\ud83d\\ude00": 1}' + b"}" * 63, "f")
    for _ in range(63):
        found = found["a"]
    assert found == {"\U0001f600": 1}


def test_a_header_of_many_duplicates_is_refused_quickly() -> None:
    names = b",".join(b'"%d":0' % i for i in range(200_000))
    with pytest.raises(FormatError, match="key '199999' occurs twice"):
        parse_header(memoryview(file_of(b"{" + names + b',"199999":0}')), "f")


def test_unaligned_offsets_and_an_unpadded_header_are_fine() -> None:
    data = file_of({"b": tensor("U32", [], [1, 5]), "a": tensor("U8", [1], [0, 1])}, b"\x07\x01\x00\x00\x00")
    header = parse_header(memoryview(data), "f")
    assert (header.tensors["b"].begin, header.tensors["b"].shape) == (1, ())
    assert header.data_start == len(data) - 5


def test_a_built_header_is_what_the_safetensors_library_reads() -> None:
    header = build_header([("b", "U32", (2,)), ("ä.weight", "U8", (3,)), ("s", "F32", ())], {"who": "we"})
    assert len(header) % 8 == 0
    loaded = load(header + (1).to_bytes(4, "little") + (2).to_bytes(4, "little") + b"\7\10\11" + b"\0\0\x80\x3f")
    assert loaded["b"].tolist() == [1, 2]
    assert loaded["ä.weight"].tolist() == [7, 8, 9]
    assert (loaded["s"].shape, float(loaded["s"])) == ((), 1.0)


def test_a_header_whose_length_looks_like_a_pickle_is_read() -> None:
    text = b"{}" + b" " * 0x27E
    assert (len(text)).to_bytes(8, "little").startswith(b"\x80\x02")
    assert parse_header(memoryview(file_of(text)), "f").tensors == {}


@given(st.dictionaries(st.text(st.characters(codec="ascii", categories=["L"]), min_size=1), st.lists(st.integers(0, 3), max_size=3)))
def test_a_built_header_reads_back(shapes: dict[str, list[int]]) -> None:
    shapes.pop("__metadata__", None)
    header = build_header([(name, "U8", tuple(shape)) for name, shape in shapes.items()], {"k": "v"})
    size = sum(int(np.prod(shape)) for shape in shapes.values())
    read = parse_header(memoryview(header + bytes(size)), "f")
    assert {name: list(info.shape) for name, info in read.tensors.items()} == shapes
    assert read.metadata == {"k": "v"}


def test_a_terabyte_claim_allocates_nothing(tmp_path: Path) -> None:
    path = tmp_path / "big.uqff"
    with path.open("wb") as file:  # a sparse file: two claimed terabytes, no disk
        file.write((90_000_000).to_bytes(8, "little"))
        file.truncate(80_000_000)
    script = (
        "import resource, sys\n"
        "from pathlib import Path\n"
        "from arctool.errors import FormatError\n"
        "from arctool.uqff.shard import Shard\n"
        "before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss\n"
        "try: Shard(Path(sys.argv[1]))\n"
        "except FormatError as error: print(error)\n"
        "print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before)\n"
    )
    for claim in (90_000_000, 1 << 40):
        with path.open("r+b") as file:
            file.write(claim.to_bytes(8, "little"))
        result = subprocess.run([sys.executable, "-c", script, str(path)], capture_output=True, text=True, check=True)
        message, grown = result.stdout.splitlines()
        assert f"claims {claim} bytes" in message
        assert int(grown) < 4_000  # KiB


def test_an_empty_file_and_a_directory_are_refused(tmp_path: Path) -> None:
    (tmp_path / "e.uqff").write_bytes(b"")
    with pytest.raises(FormatError, match="empty"):
        Shard(tmp_path / "e.uqff")
    with pytest.raises(StorageError, match="cannot read"):
        Shard(tmp_path)
