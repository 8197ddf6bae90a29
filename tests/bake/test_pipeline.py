"""The bake as a library: the plan, what is stored how, progress, identity, refusal to overwrite, and the model in memory."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch

from arctool.bake.pipeline import LayerDone, bake, bake_in_memory, plan
from arctool.bake.recipe import Recipe, Rule
from arctool.bake.source.checkpoint import open_checkpoint
from arctool.errors import StorageError, UsageError
from arctool.kernels.registry import default_registry
from arctool.quant.bf16 import from_bf16
from arctool.quant.tensor import DenseTensor, GgmlTensor, TrellisTensor
from arctool.run.llm import LLM
from arctool.run.sampling.params import SamplingParams
from arctool.uqff.container import open_artifact

QTIP4 = Recipe.uniform("qtip4")


def tree(directory: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in directory.iterdir()}


def test_the_plan_has_every_tensor_once_and_no_bias(tiny_checkpoint: Path) -> None:
    with open_checkpoint(str(tiny_checkpoint)) as checkpoint:
        tasks = plan(checkpoint, QTIP4)
        assert [task.spec.name for task in tasks] == [name for name in checkpoint.names() if not name.endswith(".bias")]
        assert [task.index for task in tasks] == list(range(len(tasks)))
        quantised = [task.spec.key for task in tasks if task.choice.rung == "qtip4"]
        assert all(key.startswith("model.layers.") and key.endswith(("_proj", ".w1", ".w2", ".w3")) for key in quantised)
        experts = {"mixtral": 2 * 4, "qwen3_moe": 1 + 8}.get(tiny_checkpoint.name, checkpoint.config.num_layers)
        assert len(quantised) == 4 * checkpoint.config.num_layers + 3 * experts


def test_progress_counts_every_tensor_and_names_rung_and_error(tiny_llama: Path, tmp_path: Path) -> None:
    seen: list[LayerDone] = []
    with open_checkpoint(str(tiny_llama)) as checkpoint:
        result = bake(checkpoint, tmp_path / "a", QTIP4, progress=seen.append)
        sizes = {name.removesuffix(".weight"): checkpoint.tensor(name).size for name in checkpoint.names()}
    assert [done.index for done in seen] == list(range(1, 22))
    assert {done.total for done in seen} == {21}
    assert {done.key: done.weights for done in seen} == sizes
    errors = {rung: [done.relative_error for done in seen if done.rung == rung] for rung in ("bf16", "q8_0", "qtip4")}
    assert [len(errors[rung]) for rung in errors] == [5, 2, 14]
    assert set(errors["bf16"]) == {None}
    assert all(error is not None and 1e-5 < error < 5e-5 for error in errors["q8_0"])
    assert all(error is not None and 0.0039 < error < 0.012 for error in errors["qtip4"])
    assert not any(done.resumed for done in seen)
    assert (result.resumed, result.ignored, result.path) == (0, (), tmp_path / "a")


def test_weights_are_near_the_source_and_norms_and_biases_are_the_source(tiny_checkpoint: Path, tmp_path: Path) -> None:
    with open_checkpoint(str(tiny_checkpoint)) as checkpoint:
        bake(checkpoint, tmp_path / "a", QTIP4)
        with open_artifact(tmp_path / "a") as artifact:
            for spec in checkpoint.specs:
                source = checkpoint.tensor(spec.name)
                if spec.name.endswith(".bias"):
                    stored = artifact.bias(spec.key)
                    assert stored is not None
                    assert stored.tobytes() == source.tobytes()
                elif spec.name.endswith(("norm.weight", ".gate.weight")):
                    assert artifact.residual(spec.name).dense().tobytes() == source.tobytes()
                else:
                    weight = artifact.weight(spec.key)
                    error = ((weight.dense() - source) ** 2).sum() / (source**2).sum()
                    layer = spec.name.endswith(("_proj.weight", ".w1.weight", ".w2.weight", ".w3.weight"))
                    assert isinstance(weight, TrellisTensor if layer else GgmlTensor)
                    assert 0 < error < (0.012 if layer else 5e-5)


def test_the_model_in_memory_holds_the_very_tensors_of_the_artifact(tiny_checkpoint: Path, tmp_path: Path) -> None:
    with open_checkpoint(str(tiny_checkpoint)) as checkpoint:
        bake(checkpoint, tmp_path / "a", QTIP4, seed=9)
        memory = bake_in_memory(checkpoint, QTIP4, seed=9)
    with open_artifact(tmp_path / "a") as artifact:
        for key, weight in memory.weights.items():
            stored = artifact.weight(key)
            assert type(stored) is type(weight)
            if isinstance(weight, DenseTensor | GgmlTensor):
                assert isinstance(stored, DenseTensor | GgmlTensor)
                assert stored.data.tobytes() == weight.data.tobytes()
            else:
                assert isinstance(stored, TrellisTensor)
                assert stored.packed.tobytes() == weight.packed.tobytes()
                assert stored.scales.tobytes() == weight.scales.tobytes()
                assert stored.dense().tobytes() == weight.dense().tobytes()
        for key, bias in memory.biases.items():
            stored_bias = artifact.bias(key)
            assert stored_bias is not None
            assert stored_bias.tobytes() == bias.tobytes()


@pytest.mark.parametrize("name", ["llama", "qwen2"])
def test_an_embedding_on_a_trellis_is_stored_unmixed_and_read_row_by_row(
    name: str, tiny_checkpoints: dict[str, Path], tmp_path: Path
) -> None:
    recipe = Recipe("qtip4b", (Rule("test", "qtip4b", "model.embed_tokens"),))
    with open_checkpoint(str(tiny_checkpoints[name])) as checkpoint:
        bake(checkpoint, tmp_path / "a", recipe)
        source = checkpoint.tensor("model.embed_tokens.weight")
    with open_artifact(tmp_path / "a") as artifact:
        table, layer = artifact.weight("model.embed_tokens"), artifact.weight("model.layers.0.mlp.up_proj")
        registry = default_registry()
        rows = registry.embedding(torch.tensor([0, 511, 7]), registry.prepare(table)).numpy()
    (completion,) = LLM(tmp_path / "a").generate(["The"], SamplingParams(temperature=0, max_tokens=3))
    assert len(completion.token_ids) == 3
    assert isinstance(table, TrellisTensor)
    assert isinstance(layer, TrellisTensor)
    assert (table.rotation is not None, layer.rotation is not None) == (True, True)
    assert (table.rotation.block_in, table.rotation.block_out, layer.rotation.block_out) == (64, 1, 32)  # type: ignore[union-attr]
    np.testing.assert_array_equal(rows.view(np.uint32), table.dense()[[0, 511, 7]].view(np.uint32))
    assert ((rows - source[[0, 511, 7]]) ** 2).sum() < 0.012 * (source[[0, 511, 7]] ** 2).sum()


def test_a_bake_at_q8_0_stores_every_matrix_so_and_journals_nothing(tiny_llama: Path, tmp_path: Path) -> None:
    def peek(done: LayerDone) -> None:
        assert list(tmp_path.glob(".a.arctool-journal/*.layer")) == []

    with open_checkpoint(str(tiny_llama)) as checkpoint:
        report = bake(checkpoint, tmp_path / "a", Recipe.uniform("q8_0"), progress=peek).report
    assert dict(report.outputs[0].actual_counts) == {"q8_0": 16}
    assert report.bake is not None
    assert dict(report.bake.tables) == {}
    assert {layer.details.default_target for layer in report.outputs[0].layers} == {"q8_0"}


def test_a_norm_stored_as_bf16_stays_bf16(copy_checkpoint: Callable[[str], Path], tmp_path: Path) -> None:
    import torch
    from safetensors.torch import load_file, save_file

    model = copy_checkpoint("llama")
    weights = load_file(model / "model.safetensors")
    save_file({name: values.to(torch.bfloat16) for name, values in weights.items()}, model / "model.safetensors")
    with open_checkpoint(str(model)) as checkpoint:
        bake(checkpoint, tmp_path / "a", QTIP4)
    with open_artifact(tmp_path / "a") as artifact:
        norm = artifact.residual("model.norm.weight").data
    assert norm.dtype == np.uint16
    assert np.array_equal(from_bf16(norm), weights["model.norm.weight"].to(torch.bfloat16).float().numpy())


def test_a_width_that_the_rung_cannot_take_falls_back_and_the_report_says_so(
    copy_checkpoint: Callable[[str], Path], tmp_path: Path
) -> None:
    from safetensors.numpy import load_file, save_file

    model = copy_checkpoint("llama")
    config = json.loads((model / "config.json").read_text())
    (model / "config.json").write_text(json.dumps({**config, "intermediate_size": 90}))
    weights = load_file(model / "model.safetensors")
    for name, values in weights.items():
        if "mlp" in name:
            weights[name] = np.ascontiguousarray(values[:, :90] if "down" in name else values[:90])
    save_file(weights, model / "model.safetensors")
    with open_checkpoint(str(model)) as checkpoint:
        report = bake(checkpoint, tmp_path / "a", Recipe(default="qtip2-v4", fallback="qtip3")).report
    reasons = {record.module: record.details.fallback_reason for record in report.outputs[0].layers}
    fallen = {key for key, reason in reasons.items() if reason is not None}
    (rows,) = ({row["from"] for row in output["fallbacks"]} for output in report.to_json()["outputs"])
    assert rows == {"qtip2-v4"}
    assert fallen == {f"model.layers.{index}.mlp.down_proj" for index in (0, 1)}
    assert all("90 inputs are not a multiple of qtip2-v4's V=4" in str(reasons[key]) for key in fallen)


def test_no_path_of_this_machine_gets_into_the_artifact(tiny_llama: Path, tmp_path: Path) -> None:
    with open_checkpoint(str(tiny_llama)) as checkpoint:
        bake(checkpoint, tmp_path / "a", QTIP4)
    for name, data in tree(tmp_path / "a").items():
        assert str(tiny_llama.parent).encode() not in data, name
        assert str(tmp_path).encode() not in data, name


def test_a_finished_bake_is_found_and_anything_else_is_refused_before_work(tiny_llama: Path, tmp_path: Path) -> None:
    seen: list[LayerDone] = []
    with open_checkpoint(str(tiny_llama)) as checkpoint:
        first = bake(checkpoint, tmp_path / "a", QTIP4)
        before = tree(tmp_path / "a")
        again = bake(checkpoint, tmp_path / "a", QTIP4, progress=seen.append)
        assert (again.resumed, again.report) == (21, first.report)
        with pytest.raises(StorageError, match="already exists and is not this bake's"):
            bake(checkpoint, tmp_path / "a", QTIP4, seed=1, progress=seen.append)
        with pytest.raises(StorageError, match="already exists"):
            bake(checkpoint, tmp_path / "a", Recipe(default="qtip4", fallback="qtip3"), progress=seen.append)
        for link in ("dangling", "link"):
            (tmp_path / link).symlink_to("nowhere" if link == "dangling" else "a")
        with pytest.raises(StorageError, match="dangling: already exists"):
            bake(checkpoint, tmp_path / "dangling", QTIP4, progress=seen.append)
    assert seen == []
    assert tree(tmp_path / "a") == before
    assert sorted(os.listdir(tmp_path)) == ["a", "dangling", "link"]


@pytest.mark.parametrize("seed", [-1, 1 << 64])
def test_a_seed_that_a_report_could_not_hold_is_refused(tiny_llama: Path, tmp_path: Path, seed: int) -> None:
    with open_checkpoint(str(tiny_llama)) as checkpoint:
        with pytest.raises(UsageError, match="--seed: expected 0 to 18446744073709551615"):
            bake(checkpoint, tmp_path / "a", QTIP4, seed=seed)
        with pytest.raises(UsageError, match="--seed"):
            bake_in_memory(checkpoint, QTIP4, seed=seed)
    assert os.listdir(tmp_path) == []


def test_the_largest_seed_is_read_back(tiny_llama: Path, tmp_path: Path) -> None:
    with open_checkpoint(str(tiny_llama)) as checkpoint:
        bake(checkpoint, tmp_path / "a", QTIP4, seed=(1 << 64) - 1)
        again = bake(checkpoint, tmp_path / "a", QTIP4, seed=(1 << 64) - 1)
    assert again.report.bake is not None
    assert again.report.bake.seed == (1 << 64) - 1
