"""A fuzzer for everything that reads an artifact: whatever the bytes are, they are refused with an ArctoolError or read soundly.

The first byte of an input chooses the reader (`TARGETS`, in order), the rest is what it reads. `one` is the whole check and needs no
fuzzer, so that the tests replay the corpus with it; `main` hands it to atheris, which mutates inputs towards code that was not reached:

    python fuzz/fuzz_artifact.py [-max_total_time=60] [libFuzzer options]
    python fuzz/fuzz_artifact.py fuzz/crashes/FILE       # what it was, without the fuzzer

The seeds are `fixtures/hostile/<target>/*`. New inputs go to `fuzz/corpus`, crashes to `fuzz/crashes`; neither is committed.
"""

from __future__ import annotations

import atexit
import contextlib
import importlib
import os
import shutil
import struct
import sys
import tempfile
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

SEEDS = ROOT / "fixtures" / "hostile"
CORPUS = ROOT / "fuzz" / "corpus"
CRASHES = ROOT / "fuzz" / "crashes"

MAX_LENGTH = 20_000
"""Bytes of the longest input: room for a table of K4V1L12."""

SUFFIXES = (
    "weight",
    "weight.format",
    "weight.shape",
    "weight.dtype",
    "weight.scales",
    "weight.sections",
    "weight.signs_in",
    "weight.signs_out",
)
MORE = (
    "bias",
    "weight.dequant_w_scale",
    "weight.dequant_x_scale",
    "weight.quant_scale",
    "weight.biases",
    "weight.scale",
    "weight.blocks",
    "weight.w",
    "weight.bits",
    "weight.group_size",
    "weight.zeros",
)
DTYPES = {"U8": 1, "U32": 4, "F32": 4, "BF16": 2, "F16": 2, "I32": 4, "F8_E4M3": 1, "I8": 1}


class Oracle:
    """The implementation that `verify` compares with: the oracle itself."""

    name = "oracle"
    zero_signs = True

    def accepts(self, weight: Any) -> bool:
        return True

    def decode(self, weight: Any) -> tuple[Any, Any]:
        import numpy as np

        return np.arange(weight.shape[1]), weight.decode()


def header(data: bytes) -> None:
    """Tensors tile the data; a header that is built from them says the same again."""
    from arctool.uqff.entries import DTYPE_BYTES
    from arctool.uqff.header import build_header, parse_header

    found = parse_header(memoryview(data), "f")
    at = 0
    infos = sorted(found.tensors.items(), key=lambda item: (item[1].begin, item[1].end))
    for name, info in infos:
        count = 1
        for size in info.shape:
            count *= size
        assert info.begin == at, name
        assert info.end - info.begin == count * DTYPE_BYTES[info.dtype], name
        at = info.end
    assert at == len(data) - found.data_start
    built = build_header([(name, info.dtype, info.shape) for name, info in infos], found.metadata)
    again = parse_header(memoryview(built + bytes(at)), "f")
    assert {name: again.tensors[name] for name in found.tensors} == dict(found.tensors)
    assert again.metadata == found.metadata


def artifact(data: bytes) -> None:
    """An artifact of one shard: opened, every layer decoded, verified, inspected."""
    from arctool.errors import ArctoolError, FormatError
    from arctool.uqff.container import open_artifact
    from arctool.uqff.detail import inspect_tensor
    from arctool.uqff.inspect import inspect
    from arctool.uqff.verify import verify

    place = directory()
    shard = place / "f-0.uqff"
    shard.unlink(missing_ok=True)
    shard.write_bytes(data)
    unreadable = []
    with open_artifact(place) as found:
        keys = found.keys()
        for key in found.keys():  # noqa: SIM118
            try:
                weight, bias = found.weight(key), found.bias(key)
                assert bias is None or bias.shape == weight.shape[:-1]
                if weight.shape[-1] < 5000:
                    assert weight.dense().shape == weight.shape
            except ArctoolError as error:
                unreadable.append(error)
    report = verify(place, implementations=[Oracle()])
    assert not (unreadable and report.passed), unreadable
    report.to_json()
    inspect(place).to_json()
    for key in keys[:2]:
        with contextlib.suppress(ArctoolError):  # refused by `verify` already, and by name
            inspect_tensor(place, key).to_json()
    if not report.container.passed:
        raise FormatError("\n".join(report.container.failures))


def layer(data: bytes) -> None:
    """A shard put together from a few bytes each: entry, dtype, rank, sizes, payload; mutation reaches the families through it sooner."""
    import json

    entries: dict[str, Any] = {}
    payload = b""
    for part, value in (("major", 1), ("minor", 2), ("patch", 0)):
        entries[f"uqff.version.{part}"] = ("U32", [], struct.pack("<I", value))
    at = 0
    while at + 3 <= len(data):
        names, dtypes = (*SUFFIXES, *MORE), tuple(DTYPES)
        name, dtype, rank = names[data[at] % len(names)], dtypes[data[at + 1] % len(dtypes)], data[at + 2] % 3
        shape = list(data[at + 3 : at + 3 + rank])
        at += 3 + len(shape)
        size = DTYPES[dtype]
        for count in shape:
            size *= count
        entries[f"x.{name}"] = (dtype, shape, data[at : at + size].ljust(size, b"\0"))
        at += size
    table: dict[str, Any] = {}
    for name, (dtype, shape, raw) in entries.items():
        table[name] = {"dtype": dtype, "shape": shape, "data_offsets": [len(payload), len(payload) + len(raw)]}
        payload += raw
    text = json.dumps(table).encode()
    artifact(len(text).to_bytes(8, "little") + text + payload)


def report(data: bytes) -> None:
    """What is read is written, and reads as the same."""
    from arctool.uqff.report_parse import parse_report

    first = parse_report(data, "f").to_bytes()
    again = parse_report(first, "f")
    assert again.to_bytes() == first


def text(data: bytes) -> None:
    """What is read can be written as strict JSON, and reads as the same."""
    from arctool.uqff.header import parse_json
    from arctool.uqff.report import json_bytes

    found = parse_json(data, "f")
    assert parse_json(json_bytes(found, "f"), "f") == found


def sections(data: bytes) -> None:
    """One spelling for each meaning."""
    from arctool.uqff.sections import decode_sections, encode_sections

    assert encode_sections(decode_sections(data, "f"), "f") == data


def gguf(data: bytes) -> None:
    """The front of a GGUF file, and every list in it."""
    from arctool.bake.source.gguf_file import GgufArray, read_gguf

    path = directory() / "f.gguf"
    path.unlink(missing_ok=True)
    path.write_bytes(data)
    found = read_gguf(path)
    for key, value in found.metadata.items():
        if isinstance(value, GgufArray):
            assert len(found.array(key)) == value.count
    for tensor in found.tensors.values():
        assert 0 <= tensor.offset <= tensor.offset + tensor.nbytes <= len(data)


TARGETS: dict[str, Callable[[bytes], None]] = {
    "artifact": artifact,
    "header": header,
    "report": report,
    "json": text,
    "sections": sections,
    "gguf": gguf,
    "layer": layer,
}
"""By the name of their folder of seeds, in the order of the first byte."""


@cache
def directory() -> Path:
    """A directory with all of an artifact but its shard, in memory where the system has such a place."""
    memory = Path("/dev/shm")
    parent = memory if os.access(memory, os.W_OK) else Path(tempfile.gettempdir())
    for old in parent.glob("arctool-fuzz-*-*"):  # libFuzzer leaves without cleaning up
        if not Path("/proc", old.name.split("-")[2]).exists():
            shutil.rmtree(old, ignore_errors=True)
    place = Path(tempfile.mkdtemp(prefix=f"arctool-fuzz-{os.getpid()}-", dir=parent))
    atexit.register(shutil.rmtree, place, ignore_errors=True)
    (place / "config.json").write_bytes(b"{}")
    (place / "residual.safetensors").write_bytes((2).to_bytes(8, "little") + b"{}")
    return place


def one(data: bytes) -> str:
    """Read `data`; returns the words of its refusal, empty where it is sound. Whatever else is raised is a fault."""
    from arctool.errors import ArctoolError

    if not data:
        return ""
    try:
        list(TARGETS.values())[data[0] % len(TARGETS)](data[1:])
    except ArctoolError as error:
        return str(error) or "a refusal without words"
    return ""


def seeds() -> dict[str, bytes]:
    """The corpus as inputs: file → its target's byte and its bytes."""
    names = list(TARGETS)
    found = {str(path.relative_to(SEEDS)): path for path in sorted(SEEDS.rglob("*")) if path.is_file()}
    return {name: bytes((names.index(name.split("/")[0]),)) + path.read_bytes() for name, path in found.items()}


def replay(files: list[Path]) -> None:
    """Read each file as one input: what a crash was, without the fuzzer."""
    for file in files:
        sys.stdout.write(f"{file}: {one(file.read_bytes()) or 'sound'}\n")


def main() -> None:
    if len(sys.argv) > 1 and all(Path(name).is_file() for name in sys.argv[1:]):
        replay([Path(name) for name in sys.argv[1:]])
        return
    import atheris

    with atheris.instrument_imports(include=["arctool.uqff", "arctool.bake.source.gguf_file"]):
        for name in ("arctool.bake.source.gguf_file", "arctool.uqff.detail", "arctool.uqff.inspect", "arctool.uqff.verify"):
            importlib.import_module(name)
    CORPUS.mkdir(exist_ok=True)
    CRASHES.mkdir(exist_ok=True)
    for name, raw in seeds().items():
        (CORPUS / f"seed-{name.replace('/', '-')}").write_bytes(raw)
    options = [f"-artifact_prefix={CRASHES}/", f"-max_len={MAX_LENGTH}", "-rss_limit_mb=768", "-timeout=10", "-print_final_stats=1"]

    def check(data: bytes) -> None:
        one(data)

    atheris.Setup([sys.argv[0], *options, *sys.argv[1:], str(CORPUS)], check)
    atheris.Fuzz()


if __name__ == "__main__":
    main()
