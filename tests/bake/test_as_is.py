"""`as-is`: every tensor in the type that its source has. Blocks of a GGUF are copied, q and k rows put in order; nothing is rounded."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from gguf import GGMLQuantizationType, quantize
from numpy.typing import NDArray
from safetensors.numpy import load_file, save_file
from tiny_gguf import write_gguf

from arctool.api import bake_model
from arctool.artifacts import verify
from arctool.bake.choices import KEEP
from arctool.bake.plan import plan
from arctool.bake.recipe import Recipe
from arctool.bake.source.checkpoint import open_checkpoint
from arctool.errors import SourceError, UsageError
from arctool.quant.bf16 import to_bf16
from arctool.quant.tensor import DenseTensor, GgmlTensor
from arctool.run.models.spec import Role
from arctool.uqff.container import open_artifact

TYPES = ("Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "F16")
Q_PROJ, UP_PROJ = "model.layers.0.self_attn.q_proj", "model.layers.1.mlp.up_proj"


@pytest.mark.parametrize(("name", "arch"), [("llama", "llama"), ("qwen2", "qwen2"), ("mixtral", "llama"), ("qwen3_moe", "qwen3moe")])
@pytest.mark.parametrize("kind", TYPES)
def test_the_blocks_of_a_gguf_are_those_of_the_artifact(
    kind: str, name: str, arch: str, tiny_checkpoints: dict[str, Path], tmp_path: Path
) -> None:
    source = tiny_checkpoints[name]
    gguf = write_gguf(source, tmp_path / "a.gguf", arch, tensor_type=GGMLQuantizationType[kind])
    bake_model(str(gguf), tmp_path / "a", "as-is", calib=None)
    original = load_file(source / "model.safetensors")
    with open_artifact(tmp_path / "a") as artifact:
        for key in tuple(artifact.keys()):
            weight = artifact.weight(key)
            assert isinstance(weight, GgmlTensor), key
            assert weight.label == kind.lower()
            # Rows are quantised one by one, so the blocks of a row do not know where it stands.
            want = quantize(original[f"{key}.weight"], GGMLQuantizationType[kind])
            assert weight.data.tobytes() == want.tobytes(), key
    report = verify(tmp_path / "a", str(gguf))
    assert report.passed
    assert {error.relative_error for error in report.errors} == {0.0}


def test_q_and_k_rows_come_back_in_order_and_others_stay(tiny_llama: Path, tmp_path: Path) -> None:
    gguf = write_gguf(tiny_llama, tmp_path / "a.gguf", "llama", tensor_type=GGMLQuantizationType.Q8_0)
    original = load_file(tiny_llama / "model.safetensors")
    with open_checkpoint(str(gguf)) as checkpoint:
        for key in (Q_PROJ, UP_PROJ):
            blocks = checkpoint.blocks(f"{key}.weight")
            assert blocks is not None
            stored = quantize(original[f"{key}.weight"], GGMLQuantizationType.Q8_0)
            assert np.array_equal(blocks, stored)
        assert checkpoint.blocks("model.norm.weight") is None


def test_any_other_choice_copies_what_has_its_type_already(tiny_llama: Path, tmp_path: Path) -> None:
    """Quantising what was quantised would be a second rounding."""
    gguf = write_gguf(tiny_llama, tmp_path / "a.gguf", "llama", tensor_type=GGMLQuantizationType.Q5_1)
    result = bake_model(str(gguf), tmp_path / "a", "q5_1", calib=None)
    errors = {layer.stored: layer.details.relative_error for layer in result.report.outputs[0].layers}
    assert errors["q5_1"] == 0.0
    assert errors["q8_0"] is not None
    assert errors["q8_0"] > 0  # the embedding, which is Q5_1 in the file


@pytest.mark.parametrize(("dtype", "label"), [(np.float32, "f32"), (np.float16, "f16"), ("bf16", "bf16")])
def test_a_checkpoint_keeps_its_floats(dtype: object, label: str, copy_checkpoint: Callable[[str], Path], tmp_path: Path) -> None:
    source = copy_checkpoint("llama")
    tensors: dict[str, NDArray] = {}
    for name, values in load_file(source / "model.safetensors").items():
        tensors[name] = values if label == "bf16" else values.astype(np.float32).astype(dtype)  # type: ignore[call-overload]
    if label == "bf16":
        save_bf16(tensors, source / "model.safetensors")
    else:
        save_file(tensors, source / "model.safetensors")
    bake_model(str(source), tmp_path / "a", "as-is", calib=None)
    with open_checkpoint(str(source)) as checkpoint, open_artifact(tmp_path / "a") as artifact:
        for key in tuple(artifact.keys()):
            weight = artifact.weight(key)
            assert weight.label == label
            assert weight.dense().tobytes() == checkpoint.tensor(f"{key}.weight").tobytes()
        norm = artifact.residual("model.norm.weight")
        assert norm.dense().tobytes() == checkpoint.tensor("model.norm.weight").tobytes()


def save_bf16(tensors: dict[str, NDArray], path: Path) -> None:
    """Rounded to bf16, with the header written by torch's side of the library."""
    import torch
    from safetensors.torch import save_file as save

    bits = {name: torch.from_numpy(to_bf16(values).view(np.int16).copy()).view(torch.bfloat16) for name, values in tensors.items()}
    save(bits, path)


def test_a_type_that_no_artifact_holds_is_refused_by_tensor(tiny_llama: Path, tmp_path: Path) -> None:
    """A Q4_0 tensor is called IQ4_NL, whose blocks have the same size."""
    gguf = write_gguf(tiny_llama, tmp_path / "a.gguf", "llama", tensor_type=GGMLQuantizationType.Q4_0)
    name = b"blk.1.ffn_up.weight"
    data = bytearray(gguf.read_bytes())
    kind = data.index(name) + len(name) + 4 + 2 * 8  # behind the name: rank, two dimensions, then the type
    assert data[kind : kind + 4] == (2).to_bytes(4, "little")
    data[kind : kind + 4] = (20).to_bytes(4, "little")
    gguf.write_bytes(data)
    with pytest.raises(
        UsageError, match=rf"a\.gguf: {UP_PROJ}\.weight is stored as IQ4_NL, which no artifact can hold as-is; choose another"
    ):
        bake_model(str(gguf), tmp_path / "a", "as-is", calib=None)
    assert not (tmp_path / "a").exists()


def test_blocks_with_a_scale_that_is_no_number_are_refused_by_file_and_tensor(tiny_llama: Path, tmp_path: Path) -> None:
    gguf = write_gguf(tiny_llama, tmp_path / "a.gguf", "llama", tensor_type=GGMLQuantizationType.Q8_0)
    with open_checkpoint(str(gguf)) as checkpoint:
        blocks = checkpoint.blocks(f"{UP_PROJ}.weight")
    assert blocks is not None
    data = bytearray(gguf.read_bytes())
    at = data.index(blocks.tobytes())
    data[at : at + 2] = b"\x00\x7e"
    gguf.write_bytes(data)
    with pytest.raises(SourceError, match=rf"a\.gguf: {UP_PROJ}\.weight: the q8_0 scale of row 0, block 0 is not finite"):
        bake_model(str(gguf), tmp_path / "a", "as-is", calib=None)
    assert not (tmp_path / "a").exists()


def test_norms_and_biases_are_nobodys_blocks(tiny_checkpoints: dict[str, Path], tmp_path: Path) -> None:
    gguf = write_gguf(tiny_checkpoints["qwen2"], tmp_path / "a.gguf", "qwen2", tensor_type=GGMLQuantizationType.Q4_0)
    with open_checkpoint(str(gguf)) as checkpoint:
        tasks = {task.spec.key: task for task in plan(checkpoint, Recipe.uniform("as-is"))}
        assert {task.choice.rung for task in tasks.values() if task.spec.role is Role.NORM} == {KEEP}
        assert tasks[Q_PROJ].choice.rung == "q4_0"
    bake_model(str(gguf), tmp_path / "a", "as-is", calib=None)
    original = load_file(tiny_checkpoints["qwen2"] / "model.safetensors")
    with open_artifact(tmp_path / "a") as artifact:
        bias = artifact.bias(Q_PROJ)
        assert bias is not None
        assert np.array_equal(bias, original[f"{Q_PROJ}.bias"])
        assert isinstance(artifact.residual("model.norm.weight"), DenseTensor)
