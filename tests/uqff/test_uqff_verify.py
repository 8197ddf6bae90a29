"""`verify` on artifacts that are sound, altered, lied about, shadowed, or decoded wrongly: each question catches its own."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import pytest
import uqff_samples as samples

from arctool.errors import SourceError, StorageError
from arctool.quant.codebooks import SUM2_SHA256, ShippedTable
from arctool.quant.tensor import DenseTensor, TrellisTensor, Weight
from arctool.uqff.comparison import MAX_ROW
from arctool.uqff.container import ArtifactWriter, BakeInfo, open_artifact
from arctool.uqff.verify import VerifyReport, verify

SHIPPED = {name: ShippedTable(f"{name}.bin", "bf16", samples.table(samples.Geometry.parse(name)).digest) for name in ("K8V4L12", "K3V1L12")}
WEIGHTS = 60 * 3 + 21 + 24


@dataclass
class Oracle:
    """An implementation that is right, unless told otherwise."""

    name: str = "oracle"
    only: str = ""
    fault: Callable[[np.ndarray], np.ndarray] = lambda values: values
    largest: int = 0
    zero_signs: bool = True

    def accepts(self, weight: TrellisTensor) -> bool:
        return self.only in weight.label

    def decode(self, weight: TrellisTensor) -> tuple[np.ndarray, np.ndarray]:
        assert getattr(weight, "rotation", None) is None
        self.largest = max(self.largest, weight.shape[0] * weight.shape[1])
        return np.arange(weight.in_features), self.fault(weight.decode())


class Sampler(Oracle):
    """Gives the chosen columns only."""

    columns: tuple[object, ...] = (0, 3)

    def decode(self, weight: TrellisTensor) -> tuple[np.ndarray, np.ndarray]:
        columns = np.array(self.columns)
        return columns, self.fault(weight.decode())[:, columns.astype(int)]


class Truth:
    """A source whose weights are the stored ones, with chosen changes."""

    def __init__(self, changed: dict[str, Weight | None] | None = None, biases: dict[str, np.ndarray | None] | None = None) -> None:
        self.known = {key: weight for key, (weight, _) in samples.layers().items()}
        self.known |= {"model.norm": samples.dense(12, dtype=np.float32), "model.layers.0.norm": samples.dense(7)}
        self.known |= changed or {}  # type: ignore[arg-type]
        self.biases = {key: bias for key, (_, bias) in samples.layers().items()} | (biases or {})

    def lazily(self, key: str) -> Weight:
        found = self.known.get(key)
        if found is None:
            raise SourceError(f"no tensor {key}")
        return DenseTensor(found.dense())

    def bias(self, key: str) -> np.ndarray | None:
        return self.biases.get(key)


@pytest.fixture
def artifact(tmp_path: Path) -> Path:
    samples.write(tmp_path / "a", shard_bytes=300)
    return tmp_path / "a"


def check(path: Path, **more: object) -> VerifyReport:
    return verify(path, **({"implementations": [Oracle()], "shipped": SHIPPED} | more))  # type: ignore[arg-type]


def test_a_sound_artifact_passes_every_question_with_its_counts(artifact: Path) -> None:
    report = check(artifact, source=Truth(), tables=lambda name: samples.table(samples.Geometry.parse(name)).table)
    assert report.passed, report
    assert all(answer.asked and answer.passed for answer in report.answers)
    assert report.container.counts["layers"] == 7
    assert report.container.counts["residual tensors"] == 2
    assert report.container.counts["files"] == 10
    with open_artifact(artifact) as found:
        entries = sum(len(shard.header.tensors) for shard in found.shards)
    assert report.container.counts["hashes"] == entries + 5 + 4  # and the shards' headers, residual, config, two assets
    assert report.implementations.counts == {"tensors compared": 5, "trellis tensors": 5, "weights by oracle": WEIGHTS}
    assert (report.coverage[0].tensors, report.coverage[0].weights, report.coverage[0].differing) == (5, WEIGHTS, 0)
    assert report.tables.counts == {
        "layers with sum2": 2,
        "layers with a table": 3,
        "tables": 4,  # two geometries with sum2, two tables
        "tables regenerated": 2,
    }
    assert report.source.counts == {"tensors compared": 9, "biases compared": 1}
    assert {error.relative_error for error in report.errors} == {0.0}
    assert {error.key: error.limit for error in report.errors}["model.layers.0.q"] == 1 / 16
    assert json.loads(json.dumps(report.to_json()))["passed"] is True


def flips() -> list[str]:
    kinds = ["", ".format", ".shape", ".scales", ".sections", ".signs_in", ".signs_out"]
    names = [f"model.layers.0.q.weight{kind}" for kind in kinds]
    return [*names, "model.layers.0.q.bias", "lm_head.weight", "lm_head.weight.dtype", "table", "uqff.version.patch"]


@pytest.mark.parametrize("name", flips())
def test_a_flipped_bit_in_any_kind_of_entry_is_found(artifact: Path, name: str) -> None:
    with open_artifact(artifact) as found:
        name = found.table_names()[0] if name == "table" else name
        shard = next(shard for shard in found.shards if name in shard.header.tensors)
        info, start, path = shard.header.tensors[name], shard.header.data_start, shard.path
    data = bytearray(path.read_bytes())
    data[start + info.begin] ^= 1
    path.write_bytes(data)
    report = check(artifact)
    assert not report.passed
    assert not report.container.passed
    assert any(name.removeprefix("model.").split(".weight")[0] in failure for failure in report.container.failures)


def test_a_flipped_bit_in_any_byte_of_a_shard_is_found(tmp_path: Path) -> None:
    samples.write(tmp_path / "a", ("model.layers.0.up",))
    path = tmp_path / "a" / "qtip2b-0.uqff"
    whole = path.read_bytes()
    assert check(tmp_path / "a").passed
    for at in range(len(whole)):
        changed = bytearray(whole)
        changed[at] ^= 1 << at % 8
        path.write_bytes(changed)
        assert not check(tmp_path / "a", implementations=[]).container.passed, f"byte {at}"


@pytest.mark.parametrize("name", ["residual.safetensors", "config.json", "tokenizer.json", "chat_template.jinja"])
def test_an_altered_file_is_found(artifact: Path, name: str) -> None:
    data = bytearray((artifact / name).read_bytes())
    data[-2] ^= 1
    (artifact / name).write_bytes(data)
    report = check(artifact)
    assert any(name in failure for failure in report.container.failures)
    assert not report.passed


LIES: dict[str, tuple[Callable[[dict], object], str]] = {  # type: ignore[type-arg]
    "another label": (
        lambda r: r["outputs"][0]["layer_details"][1].update(stored="trellis-k4v2l16-f32"),
        r"outputs\[0\]\.(actual_counts|layer_details\[1\]\.stored)",
    ),
    "another shape": (lambda r: r["outputs"][0]["layer_details"][0].update(shape=[5, 3]), r"layer_details\[0\]\.shape\[0\]"),
    "another count": (lambda r: r["outputs"][0]["actual_counts"].update(bf16=2), r"actual_counts\.bf16: the report claims 2"),
    "a layer fewer": (lambda r: r["outputs"][0].update(layers=6), r"outputs\[0\]\.layers: the report claims 6"),
    "fewer bits": (lambda r: r["arctool"]["bits_per_weight"].update(all=1.0), r"arctool\.bits_per_weight\.all"),
    "fewer bits in a layer": (
        lambda r: r["arctool"]["layers"]["model.layers.0.q"].update(bits_per_weight=2.0),
        r"arctool\.layers\.model\.layers\.0\.q\.bits_per_weight",
    ),
    "fewer bytes": (lambda r: r["arctool"]["layers"]["lm_head"].update(bytes=1), r"arctool\.layers\.lm_head\.bytes"),
    "another version": (lambda r: r.update(uqff_version="1.1.0"), "uqff_version"),
    "another tool": (lambda r: r["generated_by"].update(tool="mistralrs"), r"generated_by\.tool"),
    "another rung": (lambda r: r["outputs"][0].update(quant="qtip4"), r"outputs\[0\]\.quant"),
    "a hidden fallback": (lambda r: r["outputs"][0].update(fallback_count=1), r"fallback_count"),
    "an invented field": (lambda r: r["arctool"].update(praise="best"), r"arctool\.praise"),
    "a hash": (
        lambda r: r["arctool"]["sha256"]["entries"].update({"lm_head.weight": "0" * 64}),
        r"entry lm_head\.weight: SHA-256 [0-9a-f]{64} is not the 0000",
    ),
    "an invented entry": (
        lambda r: r["arctool"]["sha256"]["entries"].update({"x.weight": "0" * 64}),
        r"entry x\.weight: listed in uqff_report\.json but not in",
    ),
    "a forgotten entry": (
        lambda r: r["arctool"]["sha256"]["entries"].pop("lm_head.weight"),
        r"entry lm_head\.weight: in the artifact but not listed",
    ),
    "a forgotten file": (
        lambda r: r["arctool"]["sha256"]["files"].pop("residual.safetensors"),
        r"file residual\.safetensors: in the artifact but not listed",
    ),
}


@pytest.mark.parametrize("name", LIES)
def test_a_lying_report_is_found_by_field(artifact: Path, name: str) -> None:
    change, words = LIES[name]
    report = json.loads((artifact / "uqff_report.json").read_text())
    change(report)
    (artifact / "uqff_report.json").write_text(json.dumps(report))
    answer = check(artifact).container
    assert not answer.passed
    assert [failure for failure in answer.failures if re.search(words, failure)], answer.failures


def test_a_report_that_was_removed_is_missed(artifact: Path) -> None:
    (artifact / "uqff_report.json").unlink()
    report = check(artifact)
    assert "it was removed" in report.container.failures[0]
    assert not report.passed


STRAYS = ["model.safetensors", "model-00001-of-2.safetensors", "model.safetensors.index.json", "consolidated.00.safetensors"]


@pytest.mark.parametrize("name", [*STRAYS, "pytorch_model.bin"])
def test_a_file_that_shadows_the_weights_is_found(artifact: Path, name: str) -> None:
    (artifact / name).write_bytes(b"")
    report = check(artifact)
    assert report.container.failures == (f"{artifact / name}: other programs load this file instead of the artifact's; remove it",)
    assert not report.passed


def test_a_stray_file_is_found_and_a_readme_is_only_noted(artifact: Path) -> None:
    (artifact / "README.md").write_text("")
    (artifact / ".cache").mkdir()
    report = check(artifact)
    assert report.passed
    noted = [note for note in report.container.notes if "not part of the artifact" in note]
    assert [Path(note.split(":")[0]).name for note in noted] == [".cache", "README.md"]
    (artifact / "added_tokens.json").write_text("{}")
    assert "added_tokens.json: a stray file" in check(artifact).container.failures[0]


def test_a_file_that_cannot_be_opened_is_a_failed_report_and_a_missing_one_an_error(artifact: Path, tmp_path: Path) -> None:
    (artifact / "qtip2b-0.uqff").write_bytes(b"\xff" * 100)
    report = check(artifact, source=Truth())
    assert not report.passed
    assert "claims 18446744073709551615 bytes" in report.container.failures[0]
    assert not any(answer.asked for answer in report.answers[1:])
    with pytest.raises(StorageError):
        check(tmp_path / "nowhere")


def expected() -> dict[str, tuple[int, ...]]:
    shapes = {f"{key}.weight": weight.shape for key, (weight, _) in samples.layers().items()}
    return shapes | {"model.layers.0.q.bias": (5,), "model.norm.weight": (12,), "model.layers.0.norm.weight": (7,)}


def test_shapes_are_held_against_the_model(artifact: Path) -> None:
    assert check(artifact, expected=expected()).passed
    assert check(artifact, expected=expected()).container.counts["shapes"] == 10
    lies = {
        "lm_head.weight": (3, 2),
        "model.layers.1.q.weight": (5, 12),
        "model.layers.0.k.bias": (5,),
        "model.norm.weight": (13,),
    }
    for name, shape in lies.items():
        answer = check(artifact, expected=expected() | {name: shape}).container
        assert not answer.passed
        assert name in answer.failures[0]
    missing = expected()
    del missing["lm_head.weight"]
    assert "layer lm_head is no part of the model" in check(artifact, expected=missing).container.failures[0]


def test_a_layer_that_no_model_could_run_costs_the_oracle_nothing(artifact: Path) -> None:
    shapes = expected() | {"model.layers.0.q.weight": (5, 14)}
    del shapes["model.layers.0.o.weight"]
    decoder = Oracle()
    seen: list[str] = []
    decoder.fault = lambda values: seen.append(str(values.shape)) or values  # type: ignore[func-returns-value]
    report = check(artifact, expected=shapes, implementations=[decoder])
    assert report.container.failure_count == 2
    assert report.implementations.failures == (
        "model.layers.0.q: the model has no such layer of shape [5, 12], so nothing was compared",
        "model.layers.0.o: the model has no such layer of shape [3, 7], so nothing was compared",
    )
    assert sorted(seen) == ["(2, 12)", "(5, 12)", "(5, 12)"]
    wrong_bias = expected() | {"model.layers.0.q.bias": (6,)}
    report = check(artifact, expected=wrong_bias)
    assert not report.container.passed
    assert report.implementations.passed


def test_rows_past_the_bound_are_refused_by_name_and_not_decoded(tmp_path: Path) -> None:
    assert MAX_ROW >= 2 * 53248  # the widest row of Llama 3.1 405B
    with ArtifactWriter(tmp_path / "a", "q", config={}, assets={}) as w:
        w.add_layer("x", samples.trellis("K4V2L16", rows=1, inner=MAX_ROW + 2, rotated=False))
        w.finish(BakeInfo("q", 0))
    decoder = Oracle()
    report = check(tmp_path / "a", implementations=[decoder])
    assert report.container.passed
    assert report.implementations.failures == (
        f"x: rows of {MAX_ROW + 2} weights are longer than the {MAX_ROW} that are ever compared, so nothing was compared",
    )
    assert decoder.largest == 0


def test_a_row_of_just_the_bound_is_compared(artifact: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("arctool.uqff.comparison.MAX_ROW", 12)
    assert check(artifact).passed
    monkeypatch.setattr("arctool.uqff.comparison.MAX_ROW", 11)
    assert check(artifact).implementations.failure_count == 4  # all but the row of 7


def test_a_config_that_gives_no_shapes_fails_the_container(artifact: Path) -> None:
    report = check(artifact, config_error="config.json: hidden_size: expected a positive integer, found 'x'")
    assert report.container.failures == ("config.json: hidden_size: expected a positive integer, found 'x'",)
    assert report.implementations.passed
    assert not report.passed


POISON: dict[str, tuple[str, str, tuple[str, list[int], bytes], str]] = {
    "an f32 layer": (
        "qtip2b-0.uqff",
        "lm_head.weight",
        ("U8", [24], bytes(16) + b"\0\0\x80\xff" * 2),
        r"lm_head\.weight: the value at \[1, 1\] is -inf",
    ),
    "a bf16 layer": (
        "qtip2b-0.uqff",
        "model.embed_tokens.weight",
        ("U8", [30], bytes(12) + b"\xc0\x7f" * 9),
        r"the value at \[1, 1\] is nan",
    ),
    "a norm": (
        "residual.safetensors",
        "model.norm.weight",
        ("F32", [12], bytes(8) + b"\0\0\x80\x7f" * 10),
        r"model\.norm\.weight: the value at \[2\] is inf",
    ),
    "an f16 norm": (
        "residual.safetensors",
        "model.norm.weight",
        ("F16", [12], bytes(22) + b"\0\x7c"),
        r"model\.norm\.weight: the value at \[11\] is inf",
    ),
    "a residual bias": ("residual.safetensors", "x.bias", ("F32", [1], b"\0\0\xc0\x7f"), r"x\.bias: the value at \[0\] is nan"),
}


@pytest.mark.parametrize("name", POISON)
def test_a_stored_value_that_is_not_finite_is_named_with_its_index(tmp_path: Path, name: str) -> None:
    file, entry, stored, words = POISON[name]
    samples.write(tmp_path / "a", ("model.embed_tokens", "model.layers.0.q", "lm_head"))
    tensors = samples.unpack_safetensors((tmp_path / "a" / file).read_bytes())
    tensors[entry] = stored
    (tmp_path / "a" / file).write_bytes(samples.raw_safetensors(tensors, metadata={"uqff.producer": "mistral.rs"}))
    if file == "residual.safetensors":
        shard = samples.unpack_safetensors((tmp_path / "a" / "qtip2b-0.uqff").read_bytes())
        (tmp_path / "a" / "qtip2b-0.uqff").write_bytes(samples.raw_safetensors(shard, metadata={"uqff.producer": "mistral.rs"}))
    (tmp_path / "a" / "uqff_report.json").unlink()
    answer = check(tmp_path / "a").container
    assert answer.failure_count == 1, answer.failures
    assert re.search(words, answer.failures[0]), answer.failures


def wrong_bit(values: np.ndarray) -> np.ndarray:
    values = values.copy()
    values.view(np.uint32)[1, 2] ^= 1
    return values


def negative_zero(values: np.ndarray) -> np.ndarray:
    return np.where(values == 0, np.float32(-0.0), values)


FAULTS = {
    "one bit": (wrong_bit, r"model.layers.0.q: broken: row 1, column 2: expected .* \(0x[0-9a-f]{8}\), found"),
    "f64": (lambda values: values.astype(np.float64), r"gave float64 \[5, 12\], expected float32 \[5, 12\]"),
    "transposed": (lambda values: values.T, r"gave float32 \[12, 5\]"),
    "an exception": (lambda values: values[99], "raised IndexError"),
}


@pytest.mark.parametrize("name", FAULTS)
def test_a_broken_decoder_is_found_beside_a_sound_one(artifact: Path, name: str) -> None:
    fault, words = FAULTS[name]
    report = check(artifact, implementations=[Oracle(), Oracle("broken", "k4v2", fault)])
    answer = report.implementations
    assert not report.passed
    assert answer.failure_count == 1
    assert re.search(words, answer.failures[0]), answer.failures
    assert [(c.implementation, c.tensors, c.differing > 0) for c in report.coverage] == [("oracle", 5, False), ("broken", 1, True)]


def test_a_zero_of_the_wrong_sign_is_a_difference(tmp_path: Path) -> None:
    weight = samples.trellis("K8V4L12", samples.table(samples.Geometry(8, 4, 12)))
    still = replace(weight, packed=np.zeros_like(weight.packed))  # state 0 throughout, whose first value is 0.0
    assert np.count_nonzero(still.decode() == 0) == 15
    with ArtifactWriter(tmp_path / "a", "q", config={}, assets={}) as w:
        w.add_layer("x", still)
        w.finish(BakeInfo("q", 0))
    report = check(tmp_path / "a", implementations=[Oracle("broken", "", negative_zero)])
    assert report.container.passed
    assert not report.passed
    assert report.coverage[0].differing == 15
    through_a_sum = Oracle("sum", "", negative_zero, zero_signs=False)
    report = check(tmp_path / "a", implementations=[through_a_sum])
    assert report.implementations.passed
    through_a_sum.fault = lambda values: np.where(values == 0, np.float32(1e-45), values)
    assert check(tmp_path / "a", implementations=[through_a_sum]).coverage[0].differing == 15
    through_a_sum.fault = np.zeros_like  # a zero where the oracle has none is no matter of signs
    assert check(tmp_path / "a", implementations=[through_a_sum]).coverage[0].differing == 45


def test_what_a_sampling_decoder_does_not_give_is_not_counted(artifact: Path) -> None:
    report = check(artifact, implementations=[Sampler("sampled")])
    assert report.passed
    assert report.coverage[0].weights == 2 * (5 * 3 + 3 + 2)  # two columns of rows 5, 5, 5, 3, 2
    assert report.implementations.counts["weights by sampled"] == report.coverage[0].weights
    faulty = Sampler("sampled", "k4v2", lambda values: np.where(np.arange(values.shape[1]) == 3, values + 1, values))
    report = check(artifact, implementations=[Oracle(), faulty])
    assert report.implementations.failures[0].startswith("model.layers.0.q: sampled: row 0, column 3: expected")
    assert report.coverage[1].differing == 5


@pytest.mark.parametrize("columns", [(), (3, 0), (0, 0), (-1, 2), (0, 12), (0.0, 1.0)])
def test_columns_that_no_row_has_are_no_answer(artifact: Path, columns: tuple[object, ...]) -> None:
    class Liar(Sampler):
        def decode(self, weight: TrellisTensor) -> tuple[np.ndarray, np.ndarray]:
            return np.array(columns), np.zeros((weight.shape[0], len(columns)), np.float32)

    report = check(artifact, implementations=[Oracle(), Liar("liar", "k4v2")])
    assert "model.layers.0.q: liar: gave" in report.implementations.failures[0]
    assert "as columns, expected rising ones from 0 to 11" in report.implementations.failures[0]
    assert (report.coverage[1].weights, report.coverage[1].differing) == (0, 60)


@pytest.mark.parametrize("only", ["nothing", "sum2"])
def test_a_tensor_that_nobody_compared_is_no_pass(artifact: Path, only: str) -> None:
    report = check(artifact, implementations=[Oracle(only=only)])
    assert not report.implementations.passed
    assert "no implementation accepts" in report.implementations.failures[0]
    assert not check(artifact, implementations=[]).passed


def test_decoding_is_compared_in_blocks_of_bounded_size(artifact: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("arctool.uqff.comparison.BLOCK_WEIGHTS", 25)
    decoder = Oracle()
    report = check(artifact, implementations=[decoder])
    assert report.passed
    assert report.coverage[0].weights == WEIGHTS
    assert decoder.largest == 24


def test_a_table_that_does_not_ship_is_found(artifact: Path) -> None:
    assert "no table ships for K8V4L12" in check(artifact, shipped={"K3V1L12": SHIPPED["K3V1L12"]}).tables.failures[0]
    other = SHIPPED | {"K8V4L12": replace(SHIPPED["K8V4L12"], sha256="0" * 64)}
    report = check(artifact, shipped=other)
    assert "is not the 0000" in report.tables.failures[0]
    assert not report.passed


def test_a_table_that_its_recipe_does_not_give_is_found(artifact: Path) -> None:
    def remake(name: str) -> np.ndarray | None:
        table = samples.table(samples.Geometry.parse(name)).table
        assert table is not None
        return None if name == "K3V1L12" else table[::-1]

    answer = check(artifact, tables=remake).tables
    assert "the recipe of K8V4L12 gives" in answer.failures[0]
    assert answer.notes == ("K3V1L12: table not regenerated, compared by digest only",)


def test_a_machine_that_computes_another_sum2_is_found(artifact: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    digest = hashlib.sha256(b"").hexdigest()
    monkeypatch.setattr("arctool.uqff.verify.SUM2_SHA256", SUM2_SHA256 | {"K6V2L16": digest})
    answer = check(artifact).tables
    assert answer.failure_count == 1
    assert answer.failures[0].startswith("model.layers.0.up: sum2 computes")
    assert f"for K6V2L16, expected {digest}" in answer.failures[0]


@pytest.mark.parametrize("k", [4, 6, 8])
def test_the_pinned_sum2_is_the_one_that_is_computed_here(k: int) -> None:
    """Fails when the constants of `sum2` change: then every artifact that uses it means something else."""
    values = samples.Codebook("sum2").values(samples.Geometry(k, 2, 16))
    assert hashlib.sha256(values.astype("<f4").tobytes()).hexdigest() == SUM2_SHA256[f"K{k}V2L16"]


SOURCES: dict[str, tuple[Truth, str]] = {
    "a missing tensor": (Truth({"model.layers.0.q": None}), "model.layers.0.q: no tensor"),
    "another shape": (Truth({"lm_head": samples.dense(3, 2)}), r"lm_head: stored as \[2, 3\], the source has \[3, 2\]"),
    "another layer's weights": (
        Truth({"model.layers.0.q": samples.trellis("K4V2L16", rotated=False)}),
        "model.layers.0.q: relative error .* at most 0.25 is plausible",
    ),
    "a zero layer": (Truth({"lm_head": DenseTensor(np.zeros((2, 3), np.float32))}), "lm_head: relative error inf"),
    "a changed norm": (Truth({"model.norm": samples.dense(12)}), "model.norm: relative error"),
    "a dropped bias": (Truth(biases={"model.layers.0.k": np.zeros(5, np.float32)}), "model.layers.0.k: the source has a bias"),
    "an invented bias": (Truth(biases={"model.layers.0.q": None}), "model.layers.0.q: the artifact has a bias"),
    "another bias": (Truth(biases={"model.layers.0.q": np.zeros(5, np.float32)}), "the bias is not the source's"),
}


@pytest.mark.parametrize("name", SOURCES)
def test_a_layer_that_is_not_its_source_is_found(artifact: Path, name: str) -> None:
    source, words = SOURCES[name]
    report = check(artifact, source=source)
    assert report.container.passed
    assert not report.passed
    assert report.source.failure_count == 1
    assert re.search(words, report.source.failures[0]), report.source.failures


def test_a_calibrated_layer_may_be_further_from_its_source_but_not_another_layer(artifact: Path) -> None:
    rounded = check(artifact, source=Truth())
    path = artifact / "uqff_report.json"
    report = json.loads(path.read_text())
    report["arctool"]["calibration"] = {"tokens": 8192}
    path.write_text(json.dumps(report))
    key = "model.layers.0.q"
    for found, limit in ((rounded, 0.25), (check(artifact, source=Truth()), 0.9)):
        assert {error.key: error.plausible for error in found.errors}[key] == limit
    other = check(artifact, source=Truth({key: samples.trellis("K4V2L16", rotated=False)})).source
    assert re.search(r"model.layers.0.q: relative error .* at most 0.9 is plausible", other.failures[0])


def test_the_relative_error_is_the_squared_norm_over_the_sources(artifact: Path) -> None:
    # stored 0, 0.5, …, 2.5: ‖W‖² = 55/4; one value off by a half: 1/4 over ‖source‖² = (55 + 11) / 4
    source = np.array([[0, 0.5, 1.0], [1.5, 2.0, 3.0]], np.float32)
    report = check(artifact, source=Truth({"lm_head": DenseTensor(source)}))
    assert {error.key: error.relative_error for error in report.errors}["lm_head"] == pytest.approx(1 / 66)


def test_progress_counts_every_question_to_its_end(artifact: Path) -> None:
    seen: dict[str, list[tuple[int, int]]] = {}
    check(artifact, source=Truth(), progress=lambda question, done, total: seen.setdefault(question, []).append((done, total)))
    assert {question: steps[-1] for question, steps in seen.items()} == {
        "container": (7, 7),
        "implementations": (5, 5),
        "source": (9, 9),
    }
