"""Types that need no search: what a tensor of a checkpoint becomes as bf16 or Q8_0, and which values each refuses by file and tensor."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType, quantize
from numpy.typing import NDArray
from safetensors.numpy import load_file, save_file

from arctool.bake.choices import CHOICES, misfit, searched, stored_bytes
from arctool.bake.direct import DirectTensor, as_blocks, store_directly
from arctool.bake.source.checkpoint import open_checkpoint
from arctool.errors import GeometryError, SourceError
from arctool.quant.codebooks import RUNGS
from arctool.quant.ggml import Q8_0
from arctool.quant.tensor import DenseTensor, GgmlTensor
from arctool.quant.trellis import pack_symbols

NAME = "model.layers.0.mlp.up_proj.weight"


@pytest.fixture
def stored(copy_checkpoint: Callable[[str], Path]) -> Callable[[Callable[[NDArray[np.float32]], object], str, str], DirectTensor]:
    """Stores a tensor of the tiny Llama as a type, after a change of its values."""

    def store(change: Callable[[NDArray[np.float32]], object], name: str, kind: str) -> DirectTensor:
        model = copy_checkpoint("llama")
        weights = load_file(model / "model.safetensors")
        change(weights[name])
        save_file(weights, model / "model.safetensors")
        with open_checkpoint(str(model)) as checkpoint:
            spec = next(spec for spec in checkpoint.specs if spec.name == name)
            return store_directly(checkpoint, spec, kind)

    return store


def test_a_linear_layer_becomes_the_blocks_of_gguf_with_its_error(tiny_llama: Path) -> None:
    with open_checkpoint(str(tiny_llama)) as checkpoint:
        spec = next(spec for spec in checkpoint.specs if spec.name == NAME)
        found, source = store_directly(checkpoint, spec, "q8_0"), checkpoint.tensor(NAME)
    assert isinstance(found.weight, GgmlTensor)
    assert found.weight.data.tobytes() == quantize(source, GGMLQuantizationType.Q8_0).tobytes()
    gap = ((found.weight.dense() - source).astype(np.float64) ** 2).sum() / (source.astype(np.float64) ** 2).sum()
    assert found.relative_error == pytest.approx(gap)
    assert 1e-5 < gap < 5e-5


def test_a_bf16_tensor_has_no_error_and_a_norm_keeps_its_type(tiny_llama: Path) -> None:
    with open_checkpoint(str(tiny_llama)) as checkpoint:
        specs = {spec.name: spec for spec in checkpoint.specs}
        table = store_directly(checkpoint, specs["model.embed_tokens.weight"], "bf16")
        norm = store_directly(checkpoint, specs["model.norm.weight"], "bf16")
    assert isinstance(table.weight, DenseTensor)
    assert (table.weight.label, table.relative_error) == ("bf16", None)
    assert (norm.weight.label, norm.relative_error) == ("f32", None)


def test_a_layer_of_zeros_has_no_error() -> None:
    assert as_blocks(np.zeros((2, 32), np.float32), "w", Q8_0).relative_error == 0.0


def test_values_too_large_for_a_scale_are_refused_by_file_and_tensor(stored: Callable[..., DirectTensor]) -> None:
    def damage(values: NDArray[np.float32]) -> None:
        values[3, 5] = 1e7

    with pytest.raises(SourceError, match=rf"/model\.safetensors: {NAME}: the q8_0 scale of row 3, block 0 .* choose bf16"):
        stored(damage, NAME, "q8_0")


def test_a_layer_whose_scales_vanish_in_f16_is_refused_by_file_and_tensor(stored: Callable[..., DirectTensor]) -> None:
    def shrink(values: NDArray[np.float32]) -> None:
        values *= np.float32(2.0**-30)

    with pytest.raises(SourceError, match=rf"/model\.safetensors: {NAME}: stored as q8_0 it would lose 1 of its power.*choose bf16"):
        stored(shrink, NAME, "q8_0")


def test_a_few_tiny_rows_are_no_reason_to_refuse_a_layer(stored: Callable[..., DirectTensor]) -> None:
    def shrink(values: NDArray[np.float32]) -> None:
        values[:4] *= np.float32(2.0**-30)

    found = stored(shrink, NAME, "q8_0")
    assert not found.weight.dense()[:4].any()
    assert found.relative_error is not None
    assert found.relative_error < 5e-5


def test_a_value_that_is_not_finite_is_refused() -> None:
    with pytest.raises(GeometryError, match=r"w: the value at \[1, 2\] is inf"):
        as_blocks(np.where(np.arange(64).reshape(2, 32) == 34, np.float32(np.inf), np.float32(1)), "w", Q8_0)


WIDTH = {"q2k": 256, "q3k": 256, "q4k": 256, "q5k": 256, "q6k": 256} | dict.fromkeys(("q4_0", "q4_1", "q5_0", "q5_1", "q8_0"), 32)
"""Weights of a block."""

PER_WEIGHT = {"bf16": 2, "f16": 2, "f32": 4, "fp8": 1}
"""Bytes of the types that have no blocks."""


@pytest.mark.parametrize("name", [name for name in CHOICES if name != "as-is"])
def test_every_choice_knows_its_widths_and_its_bytes(name: str) -> None:
    if name in RUNGS:
        geometry = RUNGS[name].geometry
        packed = pack_symbols(np.zeros((3, 64 // geometry.v), np.int64), geometry)
        assert (searched(name), stored_bytes(name, (3, 64))) == (True, packed.nbytes + 3 * 4)
        assert bool(misfit(name, 65)) == (geometry.v > 1)
        assert not misfit(name, 64)
        return
    assert not searched(name)
    if name in PER_WEIGHT:
        assert (stored_bytes(name, (3, 5)), misfit(name, 5)) == (15 * PER_WEIGHT[name], "")
        return
    block, block_bytes = GGML_QUANT_SIZES[GGMLQuantizationType[name.upper() if "_" in name else f"{name[:-1]}_k".upper()]]
    assert block == WIDTH[name]
    assert stored_bytes(name, (3, 512)) == 3 * 512 // block * block_bytes
    assert not misfit(name, 512)
    assert misfit(name, 48) == f"48 inputs are not a multiple of {name}'s block of {block}"


def test_the_choices_are_the_rungs_and_the_types_of_the_readme() -> None:
    assert set(CHOICES) == {*RUNGS, *WIDTH, *PER_WEIGHT, "as-is"}


@pytest.mark.parametrize("name", ["f16", "f32"])
def test_a_plain_type_keeps_every_value_that_it_can(stored: Callable[..., DirectTensor], name: str) -> None:
    seen = []

    def keep(values: NDArray[np.float32]) -> None:
        values[...] = values.astype(np.float16)
        seen.append(values.copy())

    found = stored(keep, NAME, name)
    assert len(np.unique(seen[0])) > 1000
    assert found.weight.dense().tobytes() == seen[0].tobytes()
    assert (found.weight.label, found.relative_error) == (name, None)


def test_fp8_is_torchs_cast_under_one_scale(stored: Callable[..., DirectTensor]) -> None:
    seen: list[NDArray[np.float32]] = []
    found = stored(lambda values: seen.append(values.copy()), NAME, "fp8")
    scale = np.abs(seen[0]).max() / np.float32(448)
    want = torch.from_numpy(seen[0] / scale).to(torch.float8_e4m3fn).float().numpy() * scale
    assert found.weight.dense().tobytes() == want.tobytes()
    assert found.relative_error == pytest.approx(float(np.square(want - seen[0]).sum() / np.square(seen[0]).sum()), rel=1e-4)
