"""Whole artifacts: what is written comes back, other programs see the same bytes, and what does not belong together is refused."""

from __future__ import annotations

import hashlib
import json
import os
import re
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import uqff_samples as samples
from safetensors import deserialize, safe_open
from safetensors.numpy import load_file
from uqff_samples import raw_safetensors, unpack_safetensors

from arctool.errors import ArctoolError, FormatError, GeometryError, StorageError, UsageError
from arctool.quant.tensor import DenseTensor, TrellisTensor
from arctool.uqff.container import ArtifactWriter, BakeInfo, LayerDetails, open_artifact


def names(directory: Path) -> list[str]:
    return sorted(item.name for item in directory.iterdir())


def rewrite(path: Path, change: Callable[[dict[str, tuple[str, list[int], bytes]]], object]) -> None:
    """Take a shard apart, change it, and put it together again without the code under test."""
    tensors = unpack_safetensors(path.read_bytes())
    change(tensors)
    path.write_bytes(raw_safetensors(tensors))


@pytest.fixture
def artifact(tmp_path: Path) -> Path:
    samples.write(tmp_path / "a")
    return tmp_path / "a"


@pytest.mark.parametrize("shard_bytes", [10 << 30, 300, 1])
def test_an_artifact_comes_back_bit_for_bit(tmp_path: Path, shard_bytes: int) -> None:
    report = samples.write(tmp_path / "a", shard_bytes=shard_bytes)
    with open_artifact(tmp_path / "a") as found:
        assert found.keys() == tuple(samples.layers())
        for key, (weight, bias) in samples.layers().items():
            assert samples.same(found.weight(key), weight)
            got = found.bias(key)
            assert (got is None) == (bias is None)
            assert bias is None or np.array_equal(got, bias)
        assert samples.same(found.weight("model.norm"), samples.dense(12, dtype=np.float32))
        assert samples.same(found.residual("model.layers.0.norm.weight"), samples.dense(7))
        assert found.bias("model.norm") is None
        assert found.config_json == {"architectures": ["LlamaForCausalLM"], "hidden_size": 12}
        assert dict(found.assets) == samples.ASSETS
        assert found.report == report
        assert found.version == (1, 2, 0)
        assert len(found.shards) == {10 << 30: 1, 300: 5, 1: 7}[shard_bytes]


def test_a_layer_never_straddles_shards_and_a_table_is_stored_once(tmp_path: Path) -> None:
    samples.write(tmp_path / "a", shard_bytes=1)
    with open_artifact(tmp_path / "a") as found:
        keys = found.keys()
        for key in keys:
            holders = {shard.path for shard in found.shards for name in found.entries(key) if name in shard.header.tensors}
            assert len(holders) == 1
        assert len(found.table_names()) == 2
        k, v = found.weight("model.layers.0.k"), found.weight("model.layers.0.v")
        assert isinstance(k, TrellisTensor)
        assert isinstance(v, TrellisTensor)
        assert k.codebook is v.codebook


def test_the_safetensors_library_sees_the_same_bytes(artifact: Path) -> None:
    loaded = load_file(artifact / "qtip2b-0.uqff")
    with open_artifact(artifact) as found:
        (shard,) = found.shards
        assert set(loaded) == set(shard.header.tensors)
        assert len(loaded) > 40
        for name, array in loaded.items():
            assert array.tobytes() == shard.entry(name).raw.tobytes()
            assert list(array.shape) == list(shard.header.tensors[name].shape)
    residual = dict(deserialize((artifact / "residual.safetensors").read_bytes()))
    assert np.frombuffer(residual["model.norm.weight"]["data"], "<f4").tolist() == [i / 2 for i in range(12)]
    assert residual["model.layers.0.norm.weight"]["dtype"] == "BF16"
    assert residual["model.layers.0.norm.weight"]["shape"] == [7]
    with safe_open(artifact / "qtip2b-0.uqff", "numpy") as file:
        assert file.metadata() == {"arctool.version": "0.1.0", "uqff.producer": "arctool", "uqff.version": "1.2.0"}


def test_version_entries_are_scalars_in_shard_zero_only(tmp_path: Path) -> None:
    samples.write(tmp_path / "a", shard_bytes=300)
    for index, expected in enumerate([[1, 2, 0], []]):
        loaded = load_file(tmp_path / "a" / f"qtip2b-{index}.uqff")
        found = [loaded[n] for n in ("uqff.version.major", "uqff.version.minor", "uqff.version.patch") if n in loaded]
        assert [(int(v), v.shape, str(v.dtype)) for v in found] == [(value, (), "uint32") for value in expected]


GOLDEN = {
    "model.embed_tokens": "bf16",
    "model.layers.0.q": "trellis-default",
    "model.layers.0.o": "trellis-table",
    "lm_head": "f32",
}


def test_the_shard_of_one_bf16_layer_is_this_text_and_these_bytes(tmp_path: Path) -> None:
    with ArtifactWriter(tmp_path / "a", "q", config={}, assets={}, producer_version="0.1.0") as w:
        w.add_layer("e", DenseTensor(np.array([[0x3F80, 0x4000, 0xBF80]], np.uint16)))
        w.finish(BakeInfo("q", 0))
    found = (tmp_path / "a" / "q-0.uqff").read_bytes()
    text = (
        b'{"__metadata__":{"arctool.version":"0.1.0","uqff.producer":"arctool","uqff.version":"1.2.0"},'
        b'"uqff.version.major":{"dtype":"U32","shape":[],"data_offsets":[0,4]},'
        b'"uqff.version.minor":{"dtype":"U32","shape":[],"data_offsets":[4,8]},'
        b'"uqff.version.patch":{"dtype":"U32","shape":[],"data_offsets":[8,12]},'
        b'"e.weight.dtype":{"dtype":"U32","shape":[],"data_offsets":[12,16]},'
        b'"e.weight.shape":{"dtype":"U32","shape":[2],"data_offsets":[16,24]},'
        b'"e.weight":{"dtype":"U8","shape":[6],"data_offsets":[24,30]},'
        b'"e.weight.format":{"dtype":"U8","shape":[],"data_offsets":[30,31]}}'
    )
    data = "01000000 02000000 00000000 1e000000 01000000 03000000 803f 0040 80bf 00"
    length = int.from_bytes(found[:8], "little")
    assert found[8 : 8 + length].rstrip(b" ") == text
    assert 0 <= length - len(text) < 8
    assert found[8 + length :].hex() == data.replace(" ", "")


@pytest.mark.parametrize("key", GOLDEN)
def test_the_shard_of_one_layer_has_golden_bytes(tmp_path: Path, key: str) -> None:
    samples.write(tmp_path / "a", (key,))
    digest = hashlib.sha256((tmp_path / "a" / "qtip2b-0.uqff").read_bytes()).hexdigest()
    golden = json.loads((Path(__file__).parent / "golden.json").read_text())
    assert digest == golden[key]


def test_whole_words_are_aligned_whatever_odd_entries_there_are(artifact: Path) -> None:
    with open_artifact(artifact) as found:
        (shard,) = found.shards
        assert shard.header.data_start % 8 == 0
        infos = shard.header.tensors.values()
        assert any((info.end - info.begin) % 4 for info in infos)
        assert all(info.begin % 4 == 0 for info in infos if (info.end - info.begin) % 4 == 0)


def test_equal_calls_write_equal_files(tmp_path: Path) -> None:
    samples.write(tmp_path / "a", shard_bytes=300)
    samples.write(tmp_path / "elsewhere" / "b", shard_bytes=300)
    left, right = tmp_path / "a", tmp_path / "elsewhere" / "b"
    assert names(left) == names(right)
    assert len(names(left)) == 5 + 5  # shards, and residual, config, two assets, report
    for name in names(left):
        assert (left / name).read_bytes() == (right / name).read_bytes()
        assert str(tmp_path).encode() not in (left / name).read_bytes()
    assert names(tmp_path) == ["a", "elsewhere"]


def test_the_report_is_schema_1_with_our_facts_beside(artifact: Path) -> None:
    report = json.loads((artifact / "uqff_report.json").read_text())
    assert report["schema"] == 1
    assert report["generated_by"] == {"tool": "arctool", "arctool_version": "0.1.0"}
    assert (report["base_model"], report["uqff_version"]) == ("tiny/test", "1.2.0")
    (output,) = report["outputs"]
    assert output["shards"] == ["qtip2b-0.uqff"]
    assert (output["layers"], output["fallback_count"]) == (7, 0)
    assert output["actual_counts"] == {
        "bf16": 1,
        "f32": 1,
        "trellis-k3v1l12-bf16": 1,
        "trellis-k4v2l16-sum2": 1,
        "trellis-k6v2l16-sum2": 1,
        "trellis-k8v4l12-bf16": 2,
    }
    assert output["layer_details"][1] == {
        "module": "model.layers.0.q",
        "default_target": "qtip2b",
        "resolved_target": "qtip2b",
        "stored": "trellis-k4v2l16-sum2",
        "shape": [5, 12],
    }
    own = report["arctool"]
    assert (own["rung"], own["seed"], own["recipe"]) == ("qtip2b", 7, {"default": "qtip2b"})
    assert own["source"] == {"fingerprint": "abc", "licence": "mit"}
    # q: 5 rows of 4 bytes, 5 scales, 2 + 1 bytes of signs, for 60 weights
    assert own["layers"]["model.layers.0.q"] == {
        "bytes": 20 + 1 + 8 + 20 + 4 + 2 + 1 + 20,
        "bits_per_weight": (20 + 20 + 3) * 8 / 60,
        "relative_error": 0.0625,
    }
    config = (artifact / "config.json").read_bytes()
    assert own["sha256"]["files"]["config.json"] == hashlib.sha256(config).hexdigest()
    embed = samples.layers()["model.embed_tokens"][0]
    assert isinstance(embed, DenseTensor)
    assert own["sha256"]["entries"]["model.embed_tokens.weight"] == hashlib.sha256(embed.data.tobytes()).hexdigest()


def test_a_fallback_is_reported_with_its_reason(tmp_path: Path) -> None:
    with ArtifactWriter(tmp_path / "a", "q", config={}, assets={}) as w:
        w.add_layer("x", samples.dense(3, 5), None, LayerDetails("qtip2", "qtip2", "5 is no multiple of V=2"))
        w.finish(BakeInfo("qtip2", 0))
    (output,) = json.loads((tmp_path / "a" / "uqff_report.json").read_text())["outputs"]
    assert output["fallback_count"] == 1
    assert output["fallbacks"] == [{"module": "x", "from": "qtip2", "to": "bf16", "shape": [3, 5], "reason": "5 is no multiple of V=2"}]
    with open_artifact(tmp_path / "a") as found:
        assert found.output is not None
        assert found.output.layers[0].details.fallback_reason == "5 is no multiple of V=2"


def test_nested_quantization_configs_are_removed(tmp_path: Path) -> None:
    config = {"a": [{"quantization_config": 1, "b": 2}], "text": {"quantization_config": {}, "c": None}}
    with ArtifactWriter(tmp_path / "a", "q", config=config, assets={}) as w:
        w.finish(BakeInfo("qtip2", 0))
    assert json.loads((tmp_path / "a" / "config.json").read_text()) == {"a": [{"b": 2}], "text": {"c": None}}


@pytest.mark.parametrize("name", [".", "qtip2b-0.uqff", "uqff_report.json"])
def test_an_artifact_opens_by_directory_shard_or_report(artifact: Path, name: str) -> None:
    with open_artifact(artifact / name) as found:
        assert len(found.keys()) == 7


def test_arrays_are_views_and_outlive_the_artifact(artifact: Path) -> None:
    with open_artifact(artifact) as found:
        weight = found.weight("model.layers.0.q")
        assert isinstance(weight, TrellisTensor)
        assert not weight.packed.flags.owndata
        assert not weight.packed.flags.writeable
    assert weight.packed[0, 0] == 1
    with pytest.raises(StorageError, match="closed"):
        found.weight("model.layers.0.q")


def test_reading_without_a_report_finds_the_same_layers(tmp_path: Path) -> None:
    samples.write(tmp_path / "a", shard_bytes=300)
    (tmp_path / "a" / "uqff_report.json").unlink()
    with open_artifact(tmp_path / "a") as found:
        assert found.report is None
        assert found.keys() == tuple(samples.layers())
        assert dict(found.assets) == samples.ASSETS


def test_a_file_that_another_program_wrote_is_read(tmp_path: Path) -> None:
    shard = raw_safetensors(
        {
            "lm_head.weight": ("U8", [2, 4], b"\0\0\x80\x3f\0\0\0\x40"),
            "lm_head.weight.dtype": ("U32", [], bytes(4)),
            "lm_head.weight.format": ("U8", [], b"\0"),
            "lm_head.weight.shape": ("U32", [2], b"\1\0\0\0\2\0\0\0"),
            "uqff.version.major": ("U32", [], b"\1\0\0\0"),
            "uqff.version.minor": ("U32", [], b"\1\0\0\0"),
            "uqff.version.patch": ("U32", [], b"\x63\0\0\0"),
        },
        metadata={"uqff.producer": "mistral.rs"},
    )
    (tmp_path / "model.uqff").write_bytes(shard)
    (tmp_path / "residual.safetensors").write_bytes(raw_safetensors({"n.weight": ("F16", [1], b"\0\x3c")}))
    (tmp_path / "config.json").write_text("{}")
    with open_artifact(tmp_path / "model.uqff") as found:
        assert found.weight("lm_head").dense().tolist() == [[1.0, 2.0]]
        assert found.weight("n").dense().tolist() == [1.0]
        assert found.version == (1, 1, 99)


VERSIONS = {
    "a newer minor": ({"minor": 3}, "UQFF 1.3.0 is newer"),
    "a newer major": ({"major": 2, "minor": 0}, "UQFF 2.0.0 is newer"),
    "an older major": ({"major": 0}, "UQFF 0.2.0 is older"),
}


@pytest.mark.parametrize("name", VERSIONS)
def test_a_version_that_is_not_ours_is_refused_as_newer_or_older(artifact: Path, name: str) -> None:
    values, words = VERSIONS[name]
    rewrite(
        artifact / "qtip2b-0.uqff",
        lambda t: t.update({f"uqff.version.{p}": ("U32", [], v.to_bytes(4, "little")) for p, v in values.items()}),
    )
    with pytest.raises(FormatError, match=words):
        open_artifact(artifact)


SHARD_LIES: dict[str, tuple[Callable[[dict[str, tuple[str, list[int], bytes]]], object], str]] = {
    "no minor version": (lambda t: t.pop("uqff.version.minor"), "uqff.version.minor is missing.*older"),
    "version of rank 1": (lambda t: t.update({"uqff.version.patch": ("U32", [1], bytes(4))}), r"expected U32 \[\]"),
    "version as U8": (lambda t: t.update({"uqff.version.patch": ("U8", [], b"\0")}), r"expected U32 \[\], found U8"),
    "an entry of nobody": (lambda t: t.update({"note": ("U8", [1], b"\0")}), "entry 'note' belongs to no layer"),
    "a numeric key": (lambda t: t.update({"0": ("U8", [1], b"\0")}), "entry '0' belongs to no layer"),
    "an unknown uqff entry": (lambda t: t.update({"uqff.version.build": ("U32", [], bytes(4))}), "belongs to no layer"),
    "a suffix of a bias": (lambda t: t.update({"lm_head.bias.x": ("U8", [1], b"\0")}), "belongs to no layer"),
    "a bias without a layer": (lambda t: t.update({"other.bias": ("F32", [1], bytes(4))}), "layer other, which has no other.weight.format"),
    "a weight without format": (lambda t: t.pop("lm_head.weight.format"), "no lm_head.weight.format"),
    "a layer within a layer": (
        lambda t: t.update({"a.bias.b.weight.format": ("U8", [], b"\0")}),
        "belongs to no layer|is not a layer key",
    ),
}


@pytest.mark.parametrize("name", SHARD_LIES)
def test_a_lying_shard_is_refused_when_it_is_opened(artifact: Path, name: str) -> None:
    change, words = SHARD_LIES[name]
    rewrite(artifact / "qtip2b-0.uqff", change)
    with pytest.raises(FormatError, match=words):
        open_artifact(artifact)


def test_versions_that_differ_between_shards_are_refused_and_equal_ones_allowed(tmp_path: Path) -> None:
    samples.write(tmp_path / "a", shard_bytes=300)
    other = tmp_path / "a" / "qtip2b-1.uqff"
    rewrite(other, lambda t: t.update({"uqff.version.minor": ("U32", [], b"\2\0\0\0")}))
    open_artifact(tmp_path / "a").close()
    rewrite(other, lambda t: t.update({"uqff.version.minor": ("U32", [], b"\1\0\0\0")}))
    with pytest.raises(FormatError, match=r"qtip2b-1.uqff: uqff.version.minor is 1, qtip2b-0.uqff says 2"):
        open_artifact(tmp_path / "a")


def test_an_entry_in_two_shards_is_refused(tmp_path: Path) -> None:
    samples.write(tmp_path / "a", shard_bytes=300)
    first = unpack_safetensors((tmp_path / "a" / "qtip2b-0.uqff").read_bytes())
    name = "model.embed_tokens.weight"
    rewrite(tmp_path / "a" / "qtip2b-1.uqff", lambda t: t.update({name: first[name]}))
    with pytest.raises(FormatError, match=f"entry {re.escape(name)} occurs in qtip2b-0.uqff too"):
        open_artifact(tmp_path / "a")


def test_a_missing_table_is_named(artifact: Path) -> None:
    def drop(tensors: dict[str, tuple[str, list[int], bytes]]) -> None:
        for name in [name for name in tensors if name.startswith("arctool.table.")]:
            del tensors[name]

    rewrite(artifact / "qtip2b-0.uqff", drop)
    with open_artifact(artifact) as found:
        assert found.weight("model.layers.0.q")
        with pytest.raises(FormatError, match=r"table arctool\.table\.[0-9a-f]{16} is missing"):
            found.weight("model.layers.0.k")


def test_a_bias_that_only_the_residual_has_is_refused(artifact: Path) -> None:
    rewrite(artifact / "residual.safetensors", lambda t: t.update({"model.layers.0.q.bias": ("F32", [5], bytes(20))}))
    with pytest.raises(FormatError, match=r"model\.layers\.0\.q\.bias belongs to layer model\.layers\.0\.q of the shards"):
        open_artifact(artifact)


def test_a_residual_dtype_that_is_no_float_is_named(artifact: Path) -> None:
    rewrite(artifact / "residual.safetensors", lambda t: t.update({"x.weight": ("F8_E4M3", [1], b"\0")}))
    with open_artifact(artifact) as found, pytest.raises(FormatError, match=r"x\.weight: expected F32, BF16 or F16, found F8_E4M3"):
        found.weight("x")


def test_an_unknown_key_is_named(artifact: Path) -> None:
    with open_artifact(artifact) as found:
        with pytest.raises(FormatError, match=r"'nope\.weight' is neither a layer nor in residual"):
            found.weight("nope")
        with pytest.raises(FormatError, match="no layer 'nope' among 7"):
            found.entries("nope")


def replace_report(directory: Path, change: Callable[[dict], object]) -> None:  # type: ignore[type-arg]
    report = json.loads((directory / "uqff_report.json").read_text())
    change(report)
    (directory / "uqff_report.json").write_text(json.dumps(report))


def set_error(directory: Path, error: int) -> None:
    replace_report(directory, lambda r: r["arctool"]["layers"]["model.layers.0.q"].update(relative_error=error))


def nested(depth: int) -> object:
    value: object = 0
    for _ in range(depth):
        value = [value]
    return value


DIRECTORY_LIES: dict[str, tuple[Callable[[Path], object], type[ArctoolError], str]] = {
    "no residual": (lambda d: (d / "residual.safetensors").unlink(), FormatError, "residual.safetensors: the file is missing"),
    "no config": (lambda d: (d / "config.json").unlink(), FormatError, "config.json: the file is missing"),
    "config with a duplicate": (
        lambda d: (d / "config.json").write_text('{"a":1,"a":2}'),
        FormatError,
        "config.json: key 'a' occurs twice",
    ),
    "config that is a list": (lambda d: (d / "config.json").write_text("[]"), FormatError, "config.json: expected a JSON object"),
    "no asset": (lambda d: (d / "tokenizer.json").unlink(), FormatError, "tokenizer.json: the file is missing"),
    "no shard": (lambda d: (d / "qtip2b-0.uqff").unlink(), FormatError, "no .uqff file in it"),
    "a stray shard": (lambda d: (d / "z.uqff").write_bytes(b""), FormatError, "z.uqff is not in uqff_report.json"),
    "a report of rubbish": (lambda d: (d / "uqff_report.json").write_text("{"), FormatError, "uqff_report.json: not readable as JSON"),
    "schema 2": (lambda d: replace_report(d, lambda r: r.update(schema=2)), FormatError, "schema 2 is unknown"),
    "schema true": (lambda d: replace_report(d, lambda r: r.update(schema=True)), FormatError, "schema: expected int"),
    "no outputs": (lambda d: replace_report(d, lambda r: r.update(outputs=[])), FormatError, "outputs is empty"),
    "an output that is text": (
        lambda d: replace_report(d, lambda r: r.update(outputs=["a"])),
        FormatError,
        r"outputs\[0\]: expected an object",
    ),
    "a shard that is not there": (
        lambda d: replace_report(d, lambda r: r["outputs"][0]["shards"].append("qtip2b-1.uqff")),
        FormatError,
        "qtip2b-1.uqff: the file is missing",
    ),
    "a shard twice": (
        lambda d: replace_report(d, lambda r: r["outputs"][0]["shards"].append("qtip2b-0.uqff")),
        FormatError,
        "shards: expected a list of different file names",
    ),
    "a shard elsewhere": (
        lambda d: replace_report(d, lambda r: r["outputs"][0]["shards"].append("../x.uqff")),
        FormatError,
        "'../x.uqff' is not a plain file name",
    ),
    "an absolute shard": (
        lambda d: replace_report(d, lambda r: r["outputs"][0]["shards"].append("/etc/x.uqff")),
        FormatError,
        "'/etc/x.uqff' is not a plain file name",
    ),
    "an asset elsewhere": (
        lambda d: replace_report(d, lambda r: r["arctool"]["sha256"]["files"].update({"../passwd": "0" * 64})),
        FormatError,
        "'../passwd' is not a plain file name",
    ),
    "an infinite error": (
        lambda d: (d / "uqff_report.json").write_text(
            (d / "uqff_report.json").read_text().replace('"relative_error": 0.0625', '"relative_error": 1e999', 1)
        ),
        FormatError,
        r"uqff_report\.json: 1e999 is larger than any number that a reader knows",
    ),
    "an error of 401 digits": (lambda d: set_error(d, 10**400), FormatError, "relative_error: expected an integer of at most 64 bits"),
    "a seed of 401 digits": (
        lambda d: replace_report(d, lambda r: r["arctool"].update(seed=-(10**400))),
        FormatError,
        "seed: expected an integer of at most 64 bits, found one of 1329",
    ),
    "a shape of rank nine": (
        lambda d: replace_report(d, lambda r: r["outputs"][0]["layer_details"][0].update(shape=[1] * 9)),
        FormatError,
        "shape: expected at most 8 positive sizes",
    ),
    "half a character in the report": (
        lambda d: replace_report(d, lambda r: r.update(base_model="\ud800")),
        FormatError,
        r"uqff_report.json: '\\ud800' holds half of a surrogate pair",
    ),
    "a nested report": (lambda d: replace_report(d, lambda r: r.update(x=nested(900))), FormatError, "nested more than 64 deep"),
    "a nested config": (
        lambda d: (d / "config.json").write_text(json.dumps({"a": nested(900)})),
        FormatError,
        "config.json: nested more than 64 deep",
    ),
    "a hash that is none": (
        lambda d: replace_report(d, lambda r: r["arctool"]["sha256"]["files"].update({"config.json": 7})),
        FormatError,
        "'config.json': expected 64 hex digits",
    ),
    "a directory for a config": (
        lambda d: ((d / "config.json").unlink(), (d / "config.json").mkdir()),
        FormatError,
        "config.json: not a regular file",
    ),
}


@pytest.mark.parametrize("name", DIRECTORY_LIES)
def test_a_directory_that_does_not_hold_together_is_refused_by_name(artifact: Path, name: str) -> None:
    change, kind, words = DIRECTORY_LIES[name]
    change(artifact)
    with pytest.raises(kind, match=words):
        open_artifact(artifact)


@pytest.mark.parametrize("name", ["qtip2b-0.uqff", "residual.safetensors", "config.json", "tokenizer.json", "uqff_report.json"])
def test_a_link_is_refused(artifact: Path, tmp_path: Path, name: str) -> None:
    (artifact / name).rename(tmp_path / name)
    (artifact / name).symlink_to(tmp_path / name)
    with pytest.raises(FormatError, match=f"{name}: not a regular file but a symbolic link"):
        open_artifact(artifact)


def test_a_link_to_itself_and_a_pipe_are_refused_without_hanging(artifact: Path) -> None:
    (artifact / "config.json").unlink()
    (artifact / "config.json").symlink_to("config.json")
    with pytest.raises(ArctoolError, match=r"config\.json"):
        open_artifact(artifact)
    (artifact / "config.json").unlink()
    os.mkfifo(artifact / "config.json")
    with pytest.raises(FormatError, match="not a regular file"):
        open_artifact(artifact)


@pytest.mark.parametrize("gone", [0, 1])
def test_a_gap_in_the_shards_is_named_when_there_is_no_report(tmp_path: Path, gone: int) -> None:
    samples.write(tmp_path / "a", shard_bytes=300)
    (tmp_path / "a" / "uqff_report.json").unlink()
    (tmp_path / "a" / f"qtip2b-{gone}.uqff").unlink()
    with pytest.raises(FormatError, match=f"shard {gone} beside qtip2b-"):
        open_artifact(tmp_path / "a")


def test_two_outputs_in_a_directory_must_be_told_apart(artifact: Path) -> None:
    (artifact / "uqff_report.json").unlink()
    (artifact / "other-0.uqff").write_bytes((artifact / "qtip2b-0.uqff").read_bytes())
    with pytest.raises(UsageError, match=r"holds 2 outputs; name one by its file: other-0.uqff, qtip2b-0.uqff"):
        open_artifact(artifact)
    open_artifact(artifact / "other-0.uqff").close()


def test_a_place_that_is_no_artifact_is_named(tmp_path: Path) -> None:
    with pytest.raises(StorageError, match="no such file"):
        open_artifact(tmp_path / "x")
    with pytest.raises(FormatError, match=r"no \.uqff file in it"):
        open_artifact(tmp_path)
    (tmp_path / "readme.md").write_text("")
    with pytest.raises(UsageError, match="not an artifact"):
        open_artifact(tmp_path / "readme.md")


def test_the_writer_refuses_what_it_cannot_keep_apart(tmp_path: Path) -> None:
    with ArtifactWriter(tmp_path / "a", "q", config={}, assets={}) as w:
        w.add_layer("x", samples.dense(2, 2))
        w.add_residual("n.weight", samples.dense(2))
        for call in (
            lambda: w.add_layer("x", samples.dense(2, 2)),
            lambda: w.add_layer("n", samples.dense(2, 2)),
            lambda: w.add_residual("x.bias", samples.dense(2)),
            lambda: w.add_residual("x.weight", samples.dense(2)),
            lambda: w.add_residual("n.weight", samples.dense(2)),
            lambda: w.add_residual("a\nb", samples.dense(2)),
            lambda: w.add_layer("y", samples.dense(2, 2), None, LayerDetails(relative_error=float("nan"))),
            lambda: w.add_layer("y", DenseTensor(np.array([[1, np.inf]], np.float32))),
            lambda: w.add_residual("m.weight", DenseTensor(np.array([0x3F80, 0xFFC0], np.uint16))),
        ):
            with pytest.raises(FormatError):
                call()
        with pytest.raises(GeometryError):
            w.add_layer("y", TrellisTensor(**{**vars(samples.trellis("K4V2L16")), "in_features": 24}))
        w.finish(BakeInfo("q", 0))
    with open_artifact(tmp_path / "a") as found:
        assert found.keys() == ("x",)
    with pytest.raises(UsageError, match="not open"):
        w.add_layer("z", samples.dense(2, 2))


def test_what_json_cannot_say_is_refused(tmp_path: Path) -> None:
    with pytest.raises(FormatError, match=r"config\.json: cannot be written as JSON"):
        ArtifactWriter(tmp_path / "a", "q", config={"a": float("nan")}, assets={})
    with pytest.raises(FormatError, match=r"config\.json: nested more than 64 deep"):
        ArtifactWriter(tmp_path / "a", "q", config={"a": nested(5000)}, assets={})
    with (
        ArtifactWriter(tmp_path / "a", "q", config={}, assets={}) as w,
        pytest.raises(FormatError, match=r"uqff_report\.json: cannot be written as JSON"),
    ):
        w.finish(BakeInfo("q", 0, {"a": object()}))
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("name", ["../x", "a/b", "", ".hidden", "config.json", "residual.safetensors", "uqff_report.json", "m.uqff"])
def test_an_asset_cannot_take_a_reserved_or_strange_name(tmp_path: Path, name: str) -> None:
    with pytest.raises(UsageError, match="cannot name a file"):
        ArtifactWriter(tmp_path / "a", "q", config={}, assets={name: b""})
    with pytest.raises(UsageError, match="cannot name a file"):
        ArtifactWriter(tmp_path / "a", name, config={}, assets={})


@pytest.mark.parametrize(
    "name", ["model.safetensors", "model-1-of-2.safetensors", "model.safetensors.index.json", "pytorch_model.bin", "x.gguf"]
)
def test_an_asset_cannot_shadow_the_weights(tmp_path: Path, name: str) -> None:
    with pytest.raises(UsageError, match="cannot name a file"):
        ArtifactWriter(tmp_path / "a", "q", config={}, assets={name: b""})
