"""`verify` on artifacts of every family: reports of other programs, names that promise, headers alone, threads, and stacks of experts."""

from __future__ import annotations

import json
import re
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import uqff_samples as samples
from test_uqff_verify import SHIPPED, Oracle, check
from uqff_samples import Stored

from arctool.quant.tensor import PackedTensor
from arctool.uqff.container import open_artifact
from arctool.uqff.shard import Shard
from arctool.uqff.verify import VerifyReport, verify

REPORT = "uqff_report.json"
STACK = "model.layers.0.experts.q8_0"


def edit(directory: Path, change: Callable[[dict[str, Any]], object]) -> None:
    path = directory / REPORT
    report = json.loads(path.read_text())
    change(report)
    path.write_text(json.dumps(report))


def patch(directory: Path, changed: dict[str, Stored | None], file: str = "mix-0.uqff") -> None:
    """Entries of a shard replaced, added or (None) left out."""
    tensors: dict[str, Stored | None] = dict(samples.unpack_safetensors((directory / file).read_bytes()))
    tensors |= changed
    kept = {name: entry for name, entry in tensors.items() if entry is not None}
    (directory / file).write_bytes(samples.raw_safetensors(kept, metadata=samples.MISTRALRS))


def shapes(*keys: str) -> dict[str, tuple[int, ...]]:
    """What the model needs of the named layers, by default all of `families`."""
    known = {key: value for key, value in samples.families().items() if not keys or key in keys}
    found = {f"{key}.weight": weight.shape for key, (weight, _) in known.items()}
    found |= {f"{key}.bias": bias.shape for key, (_, bias) in known.items() if bias is not None}
    return found | {"model.norm.weight": (12,), "model.layers.0.norm.weight": (7,)}


@pytest.fixture
def foreign(tmp_path: Path) -> Path:
    """Every family, with a report of mistral.rs, in two shards."""
    samples.write_foreign(tmp_path / "a", report=True, shards=2)
    return tmp_path / "a"


# ---- what others say of their artifacts ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("report", [True, False])
@pytest.mark.parametrize("shards", [1, 3])
def test_an_artifact_of_another_program_passes_and_says_what_was_not_checked(tmp_path: Path, report: bool, shards: int) -> None:
    samples.write_foreign(tmp_path / "a", report=report, shards=shards)
    found = check(tmp_path / "a", expected=shapes())
    assert found.passed, found
    assert found.container.counts == {
        "layers": 16,
        "residual tensors": 2,
        "files": 4 + report + shards,
        "shapes": len(shapes()),
        **({"report layers": 16} if report else {}),
    }
    words = f"{REPORT}: without hashes; only shapes and types were compared" if report else f"no {REPORT}, so no hash could be checked"
    assert len(found.container.notes) == 1
    assert words in found.container.notes[0]


def rows(report: dict[str, Any]) -> dict[str, dict[str, Any]]:
    return {row["module"]: row for row in report["outputs"][0]["layer_details"]}


REPORT_LIES: dict[str, tuple[Callable[[dict[str, Any]], object], str]] = {
    "another type": (lambda r: rows(r)["model.layers.0.q4k"].update(stored="q6k"), r"model\.layers\.0\.q4k is claimed as q6k, found q4k"),
    "a type of the same bytes": (lambda r: rows(r)["model.layers.0.q4k"].update(stored="q4_0"), r"q4k is claimed as q4_0, found q4k"),
    "quantised, and it is not": (
        lambda r: rows(r)["model.layers.0.plain.f16"].update(stored="fp8"),
        r"plain\.f16 is claimed as fp8, found f16",
    ),
    "not quantised, and it is": (lambda r: rows(r)["model.layers.0.fp8"].update(stored="unquant"), r"fp8 is claimed as unquant, found fp8"),
    "other bits": (lambda r: rows(r)["model.layers.0.afq3"].update(stored="afq4"), r"afq3 is claimed as afq4, found afq3"),
    "another shape": (
        lambda r: rows(r)["model.layers.0.q6k"].update(shape=[256, 1]),
        r"model\.layers\.0\.q6k is claimed as \[256, 1\], found \[1, 256\]",
    ),
    "the shape of a matrix for a stack": (
        lambda r: rows(r)[STACK].update(shape=[6, 32]),
        r"experts\.q8_0 is claimed as \[6, 32\], found \[2, 3, 32\]",
    ),
    "the bytes of blocks for a shape": (
        lambda r: rows(r)["model.layers.0.q4_0"].update(shape=[72]),
        r"model\.layers\.0\.q4_0 is claimed as \[72\], found \[2, 64\]",
    ),
    "words of another number": (
        lambda r: rows(r)["model.layers.0.afq3"].update(shape=[2, 8]),
        r"afq3 is claimed as \[2, 8\], found \[2, 64\]",
    ),
    "a layer that is not there": (
        lambda r: rows(r)["model.layers.0.fp8"].update(module="model.layers.1.fp8"),
        r"model\.layers\.1\.fp8 is claimed, and there is no such layer",
    ),
    "one layer twice, for another": (
        lambda r: rows(r)["model.layers.0.f16"].update(rows(r)["model.layers.0.fp8"]),
        r"model\.layers\.0\.(f16|fp8)",
    ),
    "a layer more": (lambda r: r["outputs"][0].update(layers=17), r"claims 17 layers in .*, the shards hold 16 in"),
    "a layer less": (lambda r: r["outputs"][0].update(layers=15), r"claims 15 layers"),
    "another count of a type": (lambda r: r["outputs"][0]["actual_counts"].update(mxfp4=3), r"'mxfp4': 3.*the shards hold .*'mxfp4': 2"),
    "a type that is not there": (lambda r: r["outputs"][0]["actual_counts"].update(q3k=1), r"'q3k': 1"),
    "a type left out": (lambda r: r["outputs"][0]["actual_counts"].pop("afq8"), r"the shards hold .*'afq8': 1"),
}


@pytest.mark.parametrize("name", REPORT_LIES)
def test_a_foreign_report_that_lies_is_refused_by_layer(foreign: Path, name: str) -> None:
    change, words = REPORT_LIES[name]
    edit(foreign, change)
    for fast in (False, True):
        answer = check(foreign, fast=fast).container
        assert not answer.passed
        assert all(REPORT in failure for failure in answer.failures)
        assert [failure for failure in answer.failures if re.search(words, failure)], answer.failures


@pytest.mark.parametrize("stored", ["unquant", "f32", "bf16", "f16"])
def test_a_plain_layer_may_be_called_by_any_plain_name(tmp_path: Path, stored: str) -> None:
    """mistral.rs calls all of tag 1 `unquant`, and what it casts on loading by another name."""
    samples.write_foreign(tmp_path / "a", ("model.layers.0.plain.f32",), report=True)
    edit(
        tmp_path / "a",
        lambda r: (r["outputs"][0].update(actual_counts={stored: 1}), rows(r)["model.layers.0.plain.f32"].update(stored=stored)),
    )
    assert check(tmp_path / "a").passed


def test_a_foreign_report_need_not_detail_its_layers_and_may_know_more(foreign: Path) -> None:
    edit(
        foreign, lambda r: (r["outputs"][0].pop("layer_details"), r["outputs"][0].pop("fallbacks"), r.update(repo_id="x/y", new={"a": [1]}))
    )
    found = check(foreign)
    assert found.passed, found
    assert "report layers" not in found.container.counts


@pytest.mark.parametrize("report", [True, False])
def test_our_own_artifact_without_our_own_part_of_the_report_fails(tmp_path: Path, report: bool) -> None:
    samples.write_foreign(tmp_path / "a", report=report, producer="arctool")
    answer = check(tmp_path / "a").container
    assert answer.failure_count == 1
    assert re.search(r"it was removed$", answer.failures[0])
    assert ("without the part `arctool`, which holds the hashes" in answer.failures[0]) == report
    assert not verify(tmp_path / "a", fast=True).passed


NAMES: dict[str, tuple[str, tuple[str, ...], str]] = {
    "as stored": ("q4k", ("q4k",), ""),
    "in capitals": ("Q4K", ("q4k",), ""),
    "no type": ("my-mix", ("q4k", "fp8"), ""),
    "another type": ("q4k", ("q4_0",), "says q4k: 1 of 1 layers are stored otherwise (1 q4_0), the first is model.layers.0.q4_0"),
    "some of another": (
        "q4k",
        ("q4k", "q4_0", "fp8"),
        "says q4k: 2 of 3 layers are stored otherwise (1 q4_0, 1 fp8), the first is model.layers.0.q4_0",
    ),
    "most frequent first": (
        "afq4",
        ("fp8", "mxfp4", "experts.mxfp4"),
        "says afq4: 3 of 3 layers are stored otherwise (2 mxfp4, 1 fp8), the first is model.layers.0.fp8",
    ),
    "four types and more": (
        "q8_0",
        ("q4_0", "q5_1", "q2k", "q4k", "q6k", "experts.q8_0"),
        "says q8_0: 5 of 6 layers are stored otherwise (1 q4_0, 1 q5_1, 1 q2k, 1 q4k, …), the first is model.layers.0.q4_0",
    ),
    "plain": ("unquant", ("plain.f32", "plain.f16", "plain.bf16"), ""),
    "bf16 and other plain": ("bf16", ("plain.f32", "plain.bf16"), "says bf16: 1 of 2 layers are stored otherwise (1 f32), the first is"),
    "a rung": ("qtip4", ("q4k",), "says qtip4: 1 of 1 layers are stored otherwise (1 q4k)"),
    "a rung with a hyphen": ("qtip2-v4", ("q4k",), "says qtip2-v4: 1 of 1 layers are stored otherwise (1 q4k)"),
}


@pytest.mark.parametrize("said", ["report", "stem", "whole name"])
@pytest.mark.parametrize("name", NAMES)
def test_a_name_that_is_not_what_is_stored_is_noted_with_counts(tmp_path: Path, name: str, said: str) -> None:
    quant, keys, words = NAMES[name]
    chosen = tuple(f"model.layers.0.{key}" for key in keys)
    samples.write_foreign(tmp_path / "a", chosen, report=said == "report", stem=quant)
    source = REPORT if said == "report" else f"{quant}-0.uqff"
    if said == "whole name":
        source = f"{quant}.uqff"
        (tmp_path / "a" / f"{quant}-0.uqff").rename(tmp_path / "a" / source)
    for fast in (False, True):
        found = check(tmp_path / "a", fast=fast)
        assert found.container.passed
        notes = [note for note in found.container.notes if "stored otherwise" in note]
        assert len(notes) == bool(words)
        assert not words or notes[0].startswith(f"{source} {words}")
    named = re.search(r"(\d+) of (\d+)", words)
    if quant != "my-mix":
        assert found.container.counts["layers as named"] == (int(named[2]) - int(named[1]) if named else len(keys))


def test_tables_over_the_vocabulary_are_not_counted_against_a_name(tmp_path: Path) -> None:
    samples.write_foreign(tmp_path / "a", ("model.layers.0.q4k", "model.layers.0.q6k"), stem="q4k")
    tensors = samples.unpack_safetensors((tmp_path / "a" / "q4k-0.uqff").read_bytes())
    renamed = {name.replace("model.layers.0.q6k", "lm_head"): entry for name, entry in tensors.items()}
    (tmp_path / "a" / "q4k-0.uqff").write_bytes(samples.raw_safetensors(renamed, metadata=samples.MISTRALRS))
    found = check(tmp_path / "a").container
    assert found.passed
    assert not [note for note in found.notes if "stored otherwise" in note]
    assert found.counts["layers as named"] == 1


# ---- headers alone -------------------------------------------------------------------------------------------------------------


def poisoned() -> dict[str, tuple[str, Stored]]:
    """Layer → (entry, the same with a value that is no number)."""
    found: dict[str, tuple[str, Stored]] = {}
    for key, (weight, _) in samples.families().items():
        suffix = ".scales" if weight.label.startswith(("afq", "mx")) else ""
        dtype, shape, data = samples.stored(key)[f"{key}.weight{suffix}"]
        found[key] = (f"{key}.weight{suffix}", (dtype, shape, b"\xff" * len(data)))
    found["a bias"] = (f"{STACK}.bias", ("F32", [2, 3], b"\0\0\xc0\x7f" * 6))
    found["an f16 bias"] = ("model.layers.0.q5_1.bias", ("F16", [3], b"\0\x7c" * 3))
    return found


@pytest.mark.parametrize("name", poisoned())
def test_fast_looks_at_no_data(tmp_path: Path, name: str) -> None:
    entry, lie = poisoned()[name]
    key = re.split(r"\.weight|\.bias", entry)[0]
    samples.write_foreign(tmp_path / "a", (key,))
    patch(tmp_path / "a", {entry: lie})
    fast = verify(tmp_path / "a", fast=True, expected=shapes(key))
    whole = check(tmp_path / "a", expected=shapes(key))
    assert not whole.container.passed
    assert re.search(r"not finite|NaN|at most 252", whole.container.failures[0]), whole.container.failures
    assert fast.passed, fast.container.failures
    assert fast.fast
    assert not any(answer.asked for answer in fast.answers[1:])


def test_fast_looks_at_no_residual_values_either(foreign: Path) -> None:
    norm = ("F32", [12], b"\0\0\xc0\x7f" * 12)
    patch(foreign, {"model.norm.weight": norm}, "residual.safetensors")
    assert "model.norm.weight" in check(foreign).container.failures[0]
    assert verify(foreign, fast=True).passed


LARGE: dict[str, tuple[int, dict[str, Stored], dict[str, tuple[str, list[int]]]]] = {
    "q8_0": (0, {".dtype": ("U32", [], b"\x08\0\0\0"), ".shape": ("U32", [2], b"\0\0\x20\0\x20\0\0\0")}, {"": ("U8", [34 << 21])}),
    "f16": (0, {".dtype": ("U32", [], b"\1\0\0\0"), ".shape": ("U32", [2], b"\0\0\x10\0\x20\0\0\0")}, {"": ("U8", [1 << 26])}),
    "bf16": (0, {".dtype": ("U32", [], b"\x1e\0\0\0"), ".shape": ("U32", [2], b"\0\0\x10\0\x20\0\0\0")}, {"": ("U8", [1 << 26])}),
    "f32": (0, {".dtype": ("U32", [], b"\0\0\0\0"), ".shape": ("U32", [2], b"\0\0\x10\0\x10\0\0\0")}, {"": ("U8", [1 << 26])}),
    "plain f32": (1, {}, {"": ("F32", [1 << 20, 16])}),
    "plain f16": (1, {}, {"": ("F16", [1 << 20, 32])}),
    "afq4": (
        4,
        {".bits": ("U8", [], b"\4"), ".group_size": ("U8", [], b"\x20")},
        {"": ("U32", [1 << 20, 16]), ".scales": ("F32", [1 << 20, 4]), ".biases": ("F32", [1 << 20, 4])},
    ),
    "mxfp4": (6, {}, {"": ("U8", [1 << 20, 64]), ".scales": ("U8", [1 << 20, 4])}),
}
"""A layer of 64 MB: its tag, its small entries, and dtype and shape of those that are holes in a sparse file."""


def write_large(directory: Path, kind: str, shift: int) -> None:
    """An artifact of that layer, `shift` bytes off the alignment that mistral.rs gives it."""
    tag, small, large = LARGE[kind]
    samples.write_foreign(directory, ())
    widths = {"U8": 1, "F16": 2, "U32": 4, "F32": 4}
    tensors: dict[str, Any] = {}
    at = 0
    for suffix, (dtype, shape) in large.items():
        end = at + int(np.prod(shape)) * widths[dtype]
        tensors[f"k.weight{suffix}"] = {"dtype": dtype, "shape": shape, "data_offsets": [at, end]}
        at = end
    tail = b""
    for name, (dtype, shape, raw) in (
        {"k.weight.format": ("U8", [], bytes((tag,)))} | {f"k.weight{suffix}": entry for suffix, entry in small.items()} | samples.VERSION
    ).items():
        begin = at + len(tail)
        tail += raw
        tensors[name] = {"dtype": dtype, "shape": shape, "data_offsets": [begin, begin + len(raw)]}
    text = json.dumps(tensors).encode()
    text += b" " * ((shift - len(text)) % 8)
    with (directory / "mix-0.uqff").open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        file.seek(at, 1)
        file.write(tail)


def measured(directory: Path, *, fast: bool) -> tuple[VerifyReport, int]:
    """The report, and the most bytes that were allocated on the way to it; what is mapped is not counted."""
    tracemalloc.start()
    try:
        before = tracemalloc.get_traced_memory()[0]
        report = verify(directory, fast=fast, jobs=1)
        return report, tracemalloc.get_traced_memory()[1] - before
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize("shift", [0, 1])
@pytest.mark.parametrize("kind", LARGE)
def test_a_layer_is_never_held_whole_at_whatever_address_it_lies(tmp_path: Path, kind: str, shift: int) -> None:
    """Our own writer puts entries at odd addresses. A whole reading holds chunks of 2^20 weights, headers alone hold nothing."""
    write_large(tmp_path / "a", kind, shift)
    for fast, most in ((True, 1 << 20), (False, 24 << 20)):
        report, peak = measured(tmp_path / "a", fast=fast)
        assert report.container.passed, report.container.failures
        assert report.container.counts["layers"] == 1
        assert peak < most, f"{'fast' if fast else 'whole'}: {peak} bytes for a layer of 64 MB"


def test_fast_hashes_headers_and_texts_only(tmp_path: Path) -> None:
    directory = own(tmp_path / "a")
    fast, whole = verify(directory, fast=True).container, check(directory).container
    with open_artifact(directory) as artifact:
        entries = sum(len(shard.header.tensors) for shard in artifact.shards)
    assert fast.passed
    assert whole.passed
    assert fast.counts["hashes"] == 1 + 3  # the shard's header, config.json, two assets
    assert whole.counts["hashes"] == 1 + 3 + 1 + entries


def own(directory: Path) -> Path:
    samples.write(directory, samples.WRITTEN, known=samples.families())
    return directory


def flip(path: Path, at: int) -> None:
    data = bytearray(path.read_bytes())
    data[at] ^= 1
    path.write_bytes(data)


ALTERED: dict[str, tuple[Callable[[Path], object], str]] = {
    "a header": (
        lambda d: (d / "qtip2b-0.uqff").write_bytes((d / "qtip2b-0.uqff").read_bytes().replace(b'"0.1.0"', b'"0.1.1"', 1)),
        r"header of qtip2b-0\.uqff: SHA-256|arctool_version",
    ),
    "the config": (lambda d: flip(d / "config.json", -3), r"config\.json"),
    "an asset": (lambda d: flip(d / "tokenizer.json", -2), r"file tokenizer\.json: SHA-256 .* the bytes were altered"),
    "an asset that is gone": (lambda d: (d / "chat_template.jinja").unlink(), r"chat_template\.jinja"),
    "a stray file": (lambda d: (d / "x.json").write_text("{}"), r"x\.json: a stray file"),
    "weights in the shadow": (lambda d: (d / "model.safetensors").write_bytes(b""), r"model\.safetensors: other programs load this"),
    "a forgotten entry": (
        lambda d: edit(d, lambda r: r["arctool"]["sha256"]["entries"].pop("model.layers.0.fp8.weight")),
        r"entry model\.layers\.0\.fp8\.weight: in the artifact but not listed",
    ),
    "an invented entry": (
        lambda d: edit(d, lambda r: r["arctool"]["sha256"]["entries"].update({"model.layers.0.x.weight": "0" * 64})),
        r"entry model\.layers\.0\.x\.weight: listed in uqff_report\.json but not",
    ),
    "a claim of the report": (
        lambda d: edit(d, lambda r: r["arctool"]["layers"]["model.layers.0.q6k"].update(bytes=1)),
        r"arctool\.layers\.model\.layers\.0\.q6k\.bytes: the report claims 1",
    ),
}


@pytest.mark.parametrize("name", ALTERED)
def test_fast_still_refuses_what_headers_and_texts_say(tmp_path: Path, name: str) -> None:
    directory = own(tmp_path / "a")
    assert verify(directory, fast=True, expected=shapes(*samples.WRITTEN)).passed
    ALTERED[name][0](directory)
    report = verify(directory, fast=True)
    assert not report.passed
    assert [words for words in report.container.failures if re.search(ALTERED[name][1], words)], report.container.failures


def test_fast_leaves_the_data_of_our_own_artifact_alone(tmp_path: Path) -> None:
    """Flipped bits of payload and residual are for the hashes to find, which take a whole reading."""
    directory = own(tmp_path / "a")
    flip(directory / "residual.safetensors", -1)
    tensors = directory / "qtip2b-0.uqff"
    length = int.from_bytes(tensors.read_bytes()[:8], "little")
    begin = json.loads(tensors.read_bytes()[8 : 8 + length])["model.layers.0.q6k.weight"]["data_offsets"][0]
    flip(tensors, 8 + length + begin)
    assert verify(directory, fast=True).passed
    failures = check(directory).container.failures
    assert [words.split(":")[0] for words in failures] == ["file residual.safetensors", "entry model.layers.0.q6k.weight"]


STRUCTURE: dict[str, tuple[str, dict[str, Stored | None], str]] = {
    "a length": (STACK, {".weight": ("U8", [203], bytes(203))}, r"q8_0 \[2, 3, 32\] takes 204 bytes"),
    "codes and scales": ("model.layers.0.mxfp4", {".weight.scales": ("U8", [2, 1], bytes(2))}, r"MXFP4 scales are u8 \[2, 2\]"),
    "bits": ("model.layers.0.afq3", {".weight.bits": ("U8", [], b"\5")}, "found 5 bits in groups of 32"),
    "a missing entry": ("model.layers.0.fp8", {".weight.quant_scale": None}, r"quant_scale is missing: FP8 layers need it"),
    "an additional entry": ("model.layers.0.q2k", {".weight.crc32": ("U8", [4], bytes(4))}, r"crc32 is not an entry of GGML layers"),
    "a bias of another length": (STACK, {".bias": ("F32", [3], bytes(12))}, r"\.bias: expected F32 \[2, 3\]"),
    "a bias of e4m3": ("model.layers.0.q5_1", {".bias": ("F8_E4M3", [3], bytes(3))}, "it cannot be added to anything"),
    "scales that contradict": ("model.layers.0.fp8", {".weight.quant_scale": ("F32", [], bytes(4))}, "contradict each other"),
    "no bias, and the model has one": (STACK, {".bias": None}, r"experts\.q8_0\.bias: the model needs \[2, 3\], found nothing"),
    "another shape": (
        "model.layers.0.q4_0",
        {".weight.shape": ("U32", [2], b"\1\0\0\0\x80\0\0\0")},
        r"q4_0\.weight: the model needs \[2, 64\], found \[1, 128\]",
    ),
    "a matrix for a stack": (
        "model.layers.0.experts.q8_0",
        {".weight.shape": ("U32", [2], b"\6\0\0\0\x20\0\0\0"), ".bias": ("F32", [6], bytes(24))},
        r"experts\.q8_0\.weight: the model needs \[2, 3, 32\], found \[6, 32\]",
    ),
    "transposed fp8": (
        "model.layers.0.fp8",
        {".weight": ("F8_E4M3", [7, 3], bytes(21))},
        r"fp8\.weight: the model needs \[3, 7\], found \[7, 3\]",
    ),
    "afq of as many words": (
        "model.layers.0.afq8",
        {".weight.bits": ("U8", [], b"\4"), ".weight.group_size": ("U8", [], b"\x80")},
        r"afq8\.weight: the model needs \[3, 64\], found \[3, 128\]",
    ),
    "a plain layer turned round": (
        "model.layers.0.plain.f32",
        {".weight": ("F32", [3, 2], bytes(24))},
        r"plain\.f32\.weight: the model needs \[2, 3\], found \[3, 2\]",
    ),
}


@pytest.mark.parametrize("fast", [True, False])
@pytest.mark.parametrize("name", STRUCTURE)
def test_lengths_and_shapes_are_held_to_the_model_with_data_and_without(tmp_path: Path, name: str, fast: bool) -> None:
    key, change, words = STRUCTURE[name]
    samples.write_foreign(tmp_path / "a", (key,))
    patch(tmp_path / "a", {f"{key}{suffix}": entry for suffix, entry in change.items()})
    report = check(tmp_path / "a", fast=fast, expected=shapes(key))
    assert not report.container.passed
    assert re.search(words, report.container.failures[0]), report.container.failures
    assert key in report.container.failures[0]


# ---- threads -------------------------------------------------------------------------------------------------------------------


def broken(directory: Path) -> Path:
    """Faults in many layers, one of which cannot be read even by its form."""
    samples.write_foreign(directory, report=True)
    changed: dict[str, Stored | None] = {entry: lie for name, (entry, lie) in poisoned().items() if "q" in name}
    patch(directory, changed | {"model.layers.0.fp8.weight.dtype": None})
    return directory


@pytest.mark.parametrize("fast", [True, False])
@pytest.mark.parametrize("which", ["foreign", "own", "broken"])
def test_the_number_of_threads_changes_no_word_of_a_report(tmp_path: Path, which: str, fast: bool) -> None:
    directory = tmp_path / "a"
    if which == "foreign":
        samples.write_foreign(directory, report=True, shards=3)
    else:
        (own if which == "own" else broken)(directory)

    def ask(jobs: int) -> VerifyReport:
        wrong = Oracle("wrong", "", lambda values: values + np.float32(1))
        return verify(directory, implementations=[Oracle(), wrong], shipped=SHIPPED, expected=shapes(), fast=fast, jobs=jobs)

    first = ask(1)
    assert first.container.passed == (which == "foreign")
    assert which != "broken" or first.container.failure_count > (0 if fast else 5)
    assert fast or first.coverage[1].differing > 200
    for jobs in (2, 4, 4):
        assert ask(jobs).to_json() == first.to_json()


LAST: dict[str, tuple[str, int, bytes, str]] = {
    "q5_1": ("", 48, b"\0\x7c", "the q5_1 scale of row 2, block 0"),
    "experts.q8_0": ("", 170, b"\0\x7c", "the q8_0 scale of row [1, 2], block 0"),
    "q2k": ("", 166, b"\0\x7c", "the q2k scale of row 1, block 0"),
    "f16": ("", 28, b"\0\xfc", "the f16 value at [2, 4]"),
    "fp8": ("", 20, b"\xff", "the code at [2, 6]"),
    "afq3": (".biases", 12, b"\0\0\xc0\x7f", "group [1, 1] has scale"),
    "experts.afq2": (".scales", 6, b"\0\x7c", "group [1, 1, 0] has scale inf"),
    "mxfp4": (".scales", 3, b"\xff", "the scale at [1, 1] is"),
    "experts.mxfp4": (".scales", 3, b"\xff", "the scale at [1, 1, 0] is"),
    "plain.f32": ("", 20, b"\0\0\x80\x7f", "the value at [1, 2] is inf"),
    "plain.f16": ("", 10, b"\0\x7c", "the f16 value at [1, 2]"),
    "plain.bf16": ("", 28, b"\xc0\x7f", "the value at [2, 4] is nan"),
}
"""Layer → (entry, byte, what is put there, how the place is called): a value that is no number, in the last row."""


@pytest.mark.parametrize("chunk", [1, 70, 1 << 24])
@pytest.mark.parametrize("name", LAST)
def test_a_value_that_is_no_number_has_its_place_in_the_whole_layer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, chunk: int
) -> None:
    """However few rows are looked at together."""
    suffix, at, poison, words = LAST[name]
    key = f"model.layers.0.{name}"
    samples.write_foreign(tmp_path / "a", (key,))
    dtype, shape, data = samples.stored(key)[f"{key}.weight{suffix}"]
    patch(tmp_path / "a", {f"{key}.weight{suffix}": (dtype, shape, data[:at] + poison + data[at + len(poison) :])})
    monkeypatch.setattr("arctool.uqff.soundness.CHECKED", chunk)
    answer = check(tmp_path / "a").container
    assert answer.failure_count == 1
    assert f"{key}.weight: {words}" in answer.failures[0]


# ---- stacks of experts ---------------------------------------------------------------------------------------------------------

STACKS = tuple(key for key in samples.families() if ".experts." in key)
STACK_WEIGHTS = 2 * 3 * 32 + 2 * 2 * 128 + 2 * 2 * 32


def test_stacks_of_experts_are_compared_in_full(tmp_path: Path) -> None:
    samples.write_foreign(tmp_path / "a", STACKS)
    seen: list[tuple[int, ...]] = []

    class Recorder(Oracle):
        def decode(self, weight: PackedTensor) -> tuple[np.ndarray, np.ndarray]:
            seen.append(weight.shape)
            return super().decode(weight)  # type: ignore[arg-type]

    report = check(tmp_path / "a", implementations=[Recorder()])
    assert report.passed
    assert seen == [(6, 32), (4, 128), (4, 32)]
    assert (report.coverage[0].tensors, report.coverage[0].weights, report.coverage[0].differing) == (3, STACK_WEIGHTS, 0)
    assert report.implementations.counts == {"block tensors": 3, "tensors compared": 3, "weights by oracle": STACK_WEIGHTS}


@pytest.mark.parametrize("block", [1, 33, 100, 1 << 20])
@pytest.mark.parametrize("at", [(0, 0, 0), (0, 2, 31), (1, 0, 5), (1, 2, 31)])
def test_a_wrong_weight_in_any_expert_is_found_and_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, at: tuple[int, int, int], block: int
) -> None:
    """Whatever part of the stack is looked at together, the place is that of the row among all rows of all experts."""
    samples.write_foreign(tmp_path / "a", (STACK,))
    monkeypatch.setattr("arctool.uqff.comparison.BLOCK_WEIGHTS", block)
    weight = samples.families()[STACK][0].dense()
    target, row = weight[at], at[0] * 3 + at[1]
    assert np.count_nonzero(weight == target) == 1

    def fault(values: np.ndarray) -> np.ndarray:
        return np.where(values == target, np.nextafter(target, np.float32(9), dtype=np.float32), values)

    report = check(tmp_path / "a", implementations=[Oracle(fault=fault)])
    assert (report.coverage[0].weights, report.coverage[0].differing) == (192, 1)
    found = re.search(r"row (\d+), column (\d+): .*\(rows counted from (\d+)\)", report.implementations.failures[0])
    assert found is not None
    assert (int(found[1]) + int(found[3]), int(found[2])) == (row, at[2])


def test_an_expert_that_is_missing_or_too_many_is_the_models_affair(tmp_path: Path) -> None:
    samples.write_foreign(tmp_path / "a", (STACK,))
    wrong = shapes(STACK) | {f"{STACK}.weight": (3, 3, 32), f"{STACK}.bias": (3, 3)}
    report = check(tmp_path / "a", expected=wrong)
    assert report.container.failures == (
        f"a: {STACK}.weight: the model needs [3, 3, 32], found [2, 3, 32]",
        f"a: {STACK}.bias: the model needs [3, 3], found [2, 3]",
    )
    assert "the model has no such layer of shape [2, 3, 32], so nothing was compared" in report.implementations.failures[0]
    assert report.coverage[0].weights == 0


def test_every_entry_of_a_shard_is_given_back_to_the_system(foreign: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    released: set[str] = set()
    release = Shard.release
    monkeypatch.setattr(Shard, "release", lambda self, name: (released.add(name), release(self, name))[1])
    assert check(foreign).passed
    stored = {name for key in samples.families() for name in samples.stored(key)}
    with open_artifact(foreign) as artifact:
        assert released == stored | set(artifact.residual_names())
