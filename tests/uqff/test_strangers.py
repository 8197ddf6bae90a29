"""What an artifact holds beyond its model is refused by `verify` and by the engine alike; and what is no file, by whatever name."""

from __future__ import annotations

import json
import os
import shutil
import tracemalloc
from pathlib import Path

import numpy as np
import pytest
import uqff_samples as samples
from locations import FIXTURES

from arctool import LLM
from arctool.artifacts import inspect_tensor, verify
from arctool.errors import FormatError
from arctool.quant.ggml import GGML_TYPES
from arctool.quant.tensor import GgmlTensor
from arctool.uqff import verify as checks
from arctool.uqff.answers import Tally
from arctool.uqff.chunks import MAX_ROW
from arctool.uqff.container import open_artifact

GOLDEN = FIXTURES / "golden" / "mistralrs-mxfp4"


@pytest.fixture
def artifact(tmp_path: Path) -> Path:
    """One of mistral.rs, whose report has no hashes to betray a change."""
    return Path(shutil.copytree(GOLDEN, tmp_path / "artifact"))


def with_residual(artifact: Path, **more: tuple[str, list[int], bytes]) -> None:
    path = artifact / "residual.safetensors"
    path.write_bytes(samples.raw_safetensors({**samples.unpack_safetensors(path.read_bytes()), **more}))


def refusal(artifact: Path) -> str:
    """What both say: the first failure of `verify`, which the engine's error begins with."""
    report = verify(artifact)
    assert not report.passed
    assert not verify(artifact, fast=True).passed
    with pytest.raises(FormatError) as caught:
        LLM(artifact)
    (failure,) = [line for line in report.container.failures if str(caught.value).startswith(line)]
    return failure


def test_the_artifact_is_sound_as_it_is(artifact: Path) -> None:
    assert verify(artifact).passed
    assert LLM(artifact)


def test_layers_past_the_configs_number_are_refused_and_not_left_out(artifact: Path) -> None:
    config = json.loads((artifact / "config.json").read_text())
    (artifact / "config.json").write_text(json.dumps({**config, "num_hidden_layers": 1}))
    assert "layer model.layers.1.mlp.down_proj is no part of the model" in refusal(artifact)


def test_a_bias_that_the_model_does_not_have_is_refused(artifact: Path) -> None:
    path = artifact / "mxfp4-0.uqff"
    bias = {"model.layers.0.self_attn.q_proj.bias": ("F32", [64], bytes(4 * 64))}
    path.write_bytes(samples.raw_safetensors({**samples.unpack_safetensors(path.read_bytes()), **bias}))
    assert "model.layers.0.self_attn.q_proj.bias: config.json implies no such bias" in refusal(artifact)


def test_an_infinity_in_a_scalar_of_the_residual_is_found(artifact: Path) -> None:
    with_residual(artifact, scalar=("F32", [], np.float32(np.inf).tobytes()))
    assert any("scalar: the value at [] is inf" in line for line in verify(artifact).container.failures)


@pytest.mark.parametrize("name", ["model.norm.bias", "model.layers.9.input_layernorm.weight", "lm_head.scales", "extra"])
def test_a_residual_tensor_that_no_model_has_is_refused(name: str, artifact: Path) -> None:
    with_residual(artifact, **{name: ("F32", [2], bytes(8))})
    assert refusal(artifact).endswith(f"residual.safetensors: {name} is no part of the model that config.json describes")


def test_a_buffer_that_follows_from_the_config_is_tolerated(artifact: Path) -> None:
    with_residual(artifact, **{"model.layers.0.self_attn.rotary_emb.inv_freq": ("F32", [2], bytes(8))})
    assert verify(artifact).passed
    assert LLM(artifact)


def test_a_residual_tensor_of_no_weights_type_is_refused_and_shown(artifact: Path) -> None:
    from arctool.artifacts import inspect

    with_residual(artifact, ids=("I64", [2], bytes(16)))
    failures = verify(artifact).container.failures
    assert any("residual.safetensors: ids: expected F32, BF16 or F16, found I64" in line for line in failures)
    assert {row.key: row.label for row in inspect(artifact).residual}["ids"] == "i64"


@pytest.mark.parametrize("name", ["README.md", "LICENSE", "folder", "notes"])
def test_what_is_neither_file_nor_directory_fails_whatever_its_name(name: str, artifact: Path) -> None:
    for make in (lambda path: path.symlink_to("/etc"), lambda path: path.symlink_to("config.json"), os.mkfifo):
        make(artifact / name)
        report = verify(artifact, fast=True)
        assert any(f"{artifact / name}: neither a file nor a directory" in line for line in report.container.failures)
        (artifact / name).unlink()
    (artifact / "folder").mkdir(exist_ok=True)
    assert verify(artifact, fast=True).passed


def stack(directory: Path, *shape: int) -> Path:
    """An artifact of one Q2_K layer of zeros of that shape."""
    kind = GGML_TYPES["q2k"]
    from arctool.uqff.container import ArtifactWriter, BakeInfo

    with ArtifactWriter(directory, "q2k", config=samples.CONFIG, assets={}) as writer:
        writer.add_layer("x", GgmlTensor(kind, shape[-1], np.zeros((*shape[:-1], kind.row_bytes(shape[-1])), np.uint8)))
        writer.finish(BakeInfo("q2k", 0))
    return directory


class Nothing:
    name, zero_signs = "nothing", True

    def accepts(self, weight: object) -> bool:
        return True

    def decode(self, weight: GgmlTensor) -> tuple[np.ndarray, np.ndarray]:
        return np.arange(1), np.zeros((weight.shape[0], 1), np.float32)


def test_a_stack_of_experts_takes_no_more_memory_than_a_matrix(tmp_path: Path) -> None:
    """4 experts of 16 million weights each: one of them in f32 would be 67 MB, and the oracle needs several times that."""
    place = stack(tmp_path / "a", 4, 4096, 4096)
    tracemalloc.start()
    try:
        report = checks.verify(place, implementations=[Nothing()])  # type: ignore[list-item]
        detail = inspect_tensor(place, "x")
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert report.implementations.passed
    assert detail.statistics.count == 4 * 4096 * 4096
    assert peak < 64e6


def test_a_row_that_no_model_has_is_refused_before_it_is_decoded(tmp_path: Path) -> None:
    place = stack(tmp_path / "a", 1, 2 * MAX_ROW)
    with pytest.raises(FormatError, match=f"rows of {2 * MAX_ROW} weights are longer than the {MAX_ROW}"):
        inspect_tensor(place, "x")


def test_a_file_named_for_another_type_than_its_report_is_shown(artifact: Path) -> None:
    report = json.loads((artifact / "uqff_report.json").read_text())
    report["outputs"][0]["shards"] = ["q8_0-0.uqff"]
    (artifact / "uqff_report.json").write_text(json.dumps(report))
    (artifact / "mxfp4-0.uqff").rename(artifact / "q8_0-0.uqff")
    notes = verify(artifact).container.notes
    assert any("q8_0-0.uqff says q8_0: 14 of 14 layers are stored otherwise (14 mxfp4)" in note for note in notes)
    assert not any("says mxfp4" in note for note in notes)


def test_questions_without_an_object_are_not_asked(artifact: Path) -> None:
    report = verify(artifact)
    assert (report.tables.asked, report.tables.notes) == (False, ("not asked: no layer is a trellis",))
    assert report.implementations.asked
    assert Tally("x").answer().passed  # why it must not be called an answer


def test_an_f16_matrix_of_the_residual_stays_f16(artifact: Path) -> None:
    values = np.arange(6, dtype=np.float16).reshape(2, 3)
    with_residual(artifact, wide=("F16", [2, 3], values.tobytes()))
    with open_artifact(artifact) as found:
        assert found.residual_form("wide").label == "f16"
        assert found.residual("wide").dense().tolist() == values.astype(np.float32).tolist()
