"""`diff`: one change at a time to a small artifact, and that change is all that is found."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import uqff_samples as samples

from arctool.errors import FormatError, StorageError
from arctool.quant.tensor import DenseTensor, TrellisTensor, Weight
from arctool.uqff import chunks as chunking
from arctool.uqff.container import ArtifactWriter, LayerDetails
from arctool.uqff.difference import Difference, difference
from arctool.uqff.json_changes import changes

Layers = dict[str, tuple[Weight, np.ndarray | None]]


def write(directory: Path, layers: Layers, residual: dict[str, DenseTensor] | None = None, **options: object) -> Path:
    settings = {"config": samples.CONFIG, "assets": samples.ASSETS, "producer_version": "0.1.0", **options}
    with ArtifactWriter(directory, "qtip2b", **settings) as writer:  # type: ignore[arg-type]
        for key, (weight, bias) in layers.items():
            writer.add_layer(key, weight, bias, LayerDetails("qtip2b", "qtip2b"))
        for name, tensor in (residual or {"model.norm.weight": samples.dense(12, dtype=np.float32)}).items():
            writer.add_residual(name, tensor)
        writer.finish(samples.INFO)
    return directory


@pytest.fixture
def compare(tmp_path: Path) -> Callable[..., Difference]:
    """The difference between the sample artifact and one of other layers, tensors or options."""

    def run(layers: Layers | None = None, residual: dict[str, DenseTensor] | None = None, **options: object) -> Difference:
        write(tmp_path / "a", samples.layers())
        write(tmp_path / "b", samples.layers() if layers is None else layers, residual, **options)
        found = difference(tmp_path / "a", tmp_path / "b")
        json.dumps(found.to_json(), allow_nan=False)
        return found

    return run


def test_an_artifact_does_not_differ_from_its_copy(tmp_path: Path) -> None:
    samples.write(tmp_path / "a")
    shutil.copytree(tmp_path / "a", tmp_path / "b")
    (tmp_path / "b" / ".hidden").touch()
    steps: list[tuple[int, int]] = []
    found = difference(tmp_path / "a", tmp_path / "b", progress=lambda done, total: steps.append((done, total)))
    assert found.same
    assert found.to_json()["same"] is True
    assert (found.tensors, found.files, found.notes, found.tensors_compared, found.relative_error) == ((), (), (), 9, None)
    assert steps == [(done, 9) for done in range(1, 10)]
    assert found.a.totals == replace(found.b.totals, nbytes=found.a.totals.nbytes)


@pytest.mark.parametrize("chunk", [1, 1 << 20])
def test_other_bytes_are_found_and_their_distance_is_that_of_the_dense_weights(
    chunk: int, compare: Callable[..., Difference], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(chunking, "CHUNK_WEIGHTS", chunk)
    layers = samples.layers()
    before, bias = layers["model.layers.0.q"]
    assert isinstance(before, TrellisTensor)
    after = replace(before, scales=before.scales * np.float32(1.5))
    layers["model.layers.0.q"] = (after, bias)
    other = DenseTensor(layers["model.embed_tokens"][0].dense())
    layers["model.embed_tokens"] = (DenseTensor(other.data + np.float32(0.25)), None)
    found = compare(layers)
    rows = {row.name: row for row in found.tensors}
    assert list(rows) == ["model.embed_tokens", "model.layers.0.q"]
    q, embedding = rows["model.layers.0.q"], rows["model.embed_tokens"]
    assert (q.what, q.entries, q.bias, q.a) == ("bytes", ("weight.scales",), None, q.b)
    gap = np.square(after.dense().astype(np.float64) - before.dense()).sum()
    assert q.relative_error == pytest.approx(gap / np.square(before.dense(), dtype=np.float64).sum(), rel=1e-12)
    assert q.relative_error == pytest.approx(0.25, rel=1e-6)
    assert (embedding.what, embedding.entries) == ("storage", ("weight", "weight.dtype"))
    assert embedding.a is not None
    assert embedding.b is not None
    assert (embedding.a.label, embedding.b.label, embedding.a.bits_per_weight, embedding.b.bits_per_weight) == ("bf16", "f32", 16, 32)
    truth = other.dense().astype(np.float64)
    assert embedding.relative_error == pytest.approx(15 * 0.0625 / np.square(truth).sum(), rel=1e-12)
    powers = np.square(before.dense(), dtype=np.float64).sum(), np.square(truth).sum()
    assert found.relative_error == pytest.approx((gap + 15 * 0.0625) / sum(powers), rel=1e-12)
    assert {row.name for row in found.files} == {"uqff_report.json"}
    assert found.notes == ("the report differs in what it says of the tensors",)
    assert (found.facts, found.config, found.tables) == ((), (), ())


def test_layers_of_one_side_other_shapes_and_tables_are_found(compare: Callable[..., Difference]) -> None:
    layers = samples.layers()
    del layers["model.layers.0.o"], layers["lm_head"]
    layers["model.layers.0.up"] = (samples.trellis("K6V2L16", rows=3), None)
    layers["model.layers.1.q"] = (samples.dense(2, 2), None)
    found = compare(layers)
    assert [(row.name, row.what) for row in found.tensors] == [
        ("model.layers.0.o", "only in A"),
        ("model.layers.0.up", "shape"),
        ("lm_head", "only in A"),
        ("model.layers.1.q", "only in B"),
    ]
    shapes = [[None if side is None else side.shape for side in (row.a, row.b)] for row in found.tensors]
    assert shapes == [[(3, 7), None], [(2, 12), (3, 12)], [(2, 3), None], [None, (2, 2)]]
    assert all(row.relative_error is None for row in found.tensors)
    ((name, what),) = [(row.name, row.what) for row in found.tables]
    assert (name, what) == (f"arctool.table.{samples.table(samples.Geometry.parse('K3V1L12')).digest[:16]}", "only in A")


@pytest.mark.parametrize(
    ("key", "bias", "said"),
    [
        ("model.layers.0.q", None, "only in A"),
        ("model.layers.0.q", np.zeros(5, np.float32), "differs"),
        ("model.layers.0.k", np.zeros(5, np.float32), "only in B"),
    ],
)
def test_a_bias_that_differs_is_found(key: str, bias: np.ndarray | None, said: str, compare: Callable[..., Difference]) -> None:
    layers = samples.layers()
    layers[key] = (layers[key][0], bias)
    (row,) = compare(layers).tensors
    assert (row.name, row.what, row.bias, row.entries, row.relative_error) == (key, "bias", said, (), None)


def test_residual_tensors_are_compared_and_what_is_a_layer_on_the_other_side_is_the_same_tensor(compare: Callable[..., Difference]) -> None:
    layers = samples.layers()
    del layers["lm_head"]
    changed = samples.dense(12, dtype=np.float32).data.copy()
    changed[3] += 2
    residual = {
        "model.norm.weight": DenseTensor(changed),
        "lm_head.weight": samples.dense(2, 3, dtype=np.float32),
        "model.extra": samples.dense(2),
    }
    rows = {row.name: row for row in compare(layers, residual).tensors}
    assert {name: row.what for name, row in rows.items()} == {
        "model.norm.weight": "bytes",
        "lm_head": "storage",
        "model.extra": "only in B",
    }
    assert rows["lm_head"].relative_error == 0
    assert rows["model.norm.weight"].relative_error == pytest.approx(4 / (506 / 4))  # Σ(k/2)² for k < 12 is 506/4


def test_config_facts_and_files_are_compared_by_value(compare: Callable[..., Difference]) -> None:
    config = {"architectures": ["LlamaForCausalLM"], "hidden_size": 12.0, "rope": {"theta": [1, True]}}
    assets = {"tokenizer.json": b'{"a": 2}\n', "vocab.txt": b"a"}
    found = compare(config=config, assets=assets, producer_version="0.2.0", shard_bytes=400)
    assert [(row.name, row.a, row.b) for row in found.config] == [("rope", None, {"theta": [1, True]})]
    facts = {row.name: (row.a, row.b) for row in found.facts}
    assert facts["producer version"] == ("0.1.0", "0.2.0")
    assert facts["shards"][0] == "qtip2b-0.uqff"
    assert facts["shards"][1].startswith("qtip2b-0.uqff, qtip2b-1.uqff")
    assert len(facts) == 2
    assert {(row.name, row.what) for row in found.files} == {
        ("tokenizer.json", "differs"),
        ("chat_template.jinja", "only in A"),
        ("vocab.txt", "only in B"),
        ("uqff_report.json", "differs"),
    }
    assert found.tensors == ()
    assert found.notes[0].startswith("the report differs at generated_by.arctool_version")


def test_json_values_are_compared_as_values() -> None:
    left = {"a": 1, "b": [1, {"c": None}], "d": True, "e": [1], "f": "x", "g": 0}
    right = {"a": 1.0, "b": [2, {"c": None}], "d": 1, "e": [1, 2], "f": "x", "h": 0}
    found = [(row.name, row.a, row.b) for row in changes(left, right, "")]
    assert found == [("b[0]", 1, 2), ("d", True, 1), ("e", [1], [1, 2]), ("g", 0, None), ("h", None, 0)]


@pytest.mark.parametrize(
    ("name", "text", "note"),
    [
        ("config.json", '{"hidden_size": 12, "architectures": ["LlamaForCausalLM"]}', "config.json: the same values, written differently"),
        ("README.md", "# other", "the model card differs"),
    ],
)
def test_a_file_that_only_reads_differently_is_a_difference_and_a_note(name: str, text: str, note: str, tmp_path: Path) -> None:
    samples.write(tmp_path / "a", assets={**samples.ASSETS, "README.md": b"# one"})
    shutil.copytree(tmp_path / "a", tmp_path / "b")
    (tmp_path / "b" / name).write_text(text)
    found = difference(tmp_path / "a", tmp_path / "b")
    assert not found.same
    assert ([(row.name, row.what) for row in found.files], found.notes, found.config) == ([(name, "differs")], (note,), ())


def test_tensors_in_another_order_are_a_difference_of_layout(tmp_path: Path) -> None:
    samples.write(tmp_path / "a")
    shutil.copytree(tmp_path / "a", tmp_path / "b")
    path = tmp_path / "b" / "residual.safetensors"
    before = path.read_bytes()
    metadata = json.loads(before[8 : 8 + int.from_bytes(before[:8], "little")])["__metadata__"]
    path.write_bytes(samples.raw_safetensors(dict(reversed(samples.unpack_safetensors(before).items())), metadata=metadata))
    found = difference(tmp_path / "a", tmp_path / "b")
    assert [(row.name, row.what) for row in found.files] == [("residual.safetensors", "differs")]
    assert found.notes == ("residual.safetensors: the same tensors, laid out differently",)
    assert (found.tensors, found.facts) == ((), ())
    assert not found.same
    path.write_bytes(samples.raw_safetensors(samples.unpack_safetensors(before), metadata={**metadata, "more": "b"}))
    assert [(row.name, row.a, row.b) for row in difference(tmp_path / "a", tmp_path / "b").facts] == [("metadata more", None, "b")]


def test_without_decoding_no_distance_is_measured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    layers = samples.layers()
    write(tmp_path / "a", layers)
    layers["model.layers.0.up"] = (samples.trellis("K6V2L16", rows=2, rotated=False), None)
    write(tmp_path / "b", layers)
    assert difference(tmp_path / "a", tmp_path / "b").tensors[0].relative_error is not None
    monkeypatch.setattr(TrellisTensor, "decode", None)
    found = difference(tmp_path / "a", tmp_path / "b", decode=False)
    assert [(row.name, row.what, row.relative_error) for row in found.tensors] == [("model.layers.0.up", "storage", None)]
    assert found.relative_error is None


def test_a_distance_that_is_no_number_is_none_and_spoils_no_sum(tmp_path: Path) -> None:
    for name in ("a", "b"):
        samples.write(tmp_path / name)
        path = tmp_path / name / "residual.safetensors"
        tensors = samples.unpack_safetensors(path.read_bytes())
        for tensor, value in (("model.norm.weight", np.nan), ("model.layers.0.norm.weight", None)):
            dtype, shape, payload = tensors[tensor]
            if name == "b" and value is not None:
                payload = np.float32(value).tobytes() + payload[4:]
            elif name == "b":
                payload = b"\0" * len(payload)
            tensors[tensor] = (dtype, shape, payload)
        path.write_bytes(samples.raw_safetensors(tensors))
    found = difference(tmp_path / "a", tmp_path / "b")
    assert {row.name: row.relative_error for row in found.tensors} == {"model.norm.weight": None, "model.layers.0.norm.weight": 1.0}
    assert found.relative_error == 1.0
    json.dumps(found.to_json(), allow_nan=False)
    back = difference(tmp_path / "b", tmp_path / "a")
    assert {row.name: row.relative_error for row in back.tensors} == {"model.norm.weight": None, "model.layers.0.norm.weight": None}


def test_a_missing_or_damaged_side_is_an_error(tmp_path: Path) -> None:
    samples.write(tmp_path / "a")
    with pytest.raises(StorageError, match="gone"):
        difference(tmp_path / "a", tmp_path / "gone")
    shutil.copytree(tmp_path / "a", tmp_path / "b")
    (shard,) = (tmp_path / "b").glob("*.uqff")
    shard.write_bytes(shard.read_bytes()[:-1])
    with pytest.raises(FormatError, match="truncated"):
        difference(tmp_path / "a", tmp_path / "b")
