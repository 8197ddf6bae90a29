"""Our engine runs what mistral.rs wrote, in every family that it writes and we read, and `verify` accepts it."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from pathlib import Path

import foreign_models
import gguf
import numpy as np
import pytest
from exchange import load, ours, stored_types, upstream
from safetensors.numpy import load_file

from arctool.artifacts import verify
from arctool.bake.pipeline import bake_in_memory
from arctool.bake.recipe import Recipe, Rule
from arctool.bake.source.checkpoint import open_checkpoint
from arctool.kernels.registry import default_registry
from arctool.quant.ggml import GGML_TYPES, Q8_0
from arctool.quant.tensor import DenseTensor, GgmlTensor, Weight
from arctool.run.evaluate import logits
from arctool.run.llm import ArtifactSource
from arctool.run.weights import load_model
from arctool.uqff.container import ArtifactWriter, BakeInfo, open_artifact

MISSING = importlib.util.find_spec("mistralrs") is None
pytestmark = [pytest.mark.interop, pytest.mark.skipif(MISSING, reason="mistralrs has no wheel for this platform")]

PROMPT = ("abc def",)
MIXTURE_PROMPTS = ("abc def", "In 1814 she", "What is?")


@pytest.mark.real
@pytest.mark.parametrize(
    ("kind", "tokens", "labels"),
    [("q8_0", 16, {"q8_0"}), ("q4k", 16, {"q4_1", "q4k", "q5_1"}), ("afq4", 16, {"afq4", "afq6"}), ("fp8", 5, {"fp8"})],
)
def test_our_engine_says_what_mistralrs_said(
    kind: str, tokens: int, labels: set[str], theirs: Callable[..., tuple[Path, list[str]]]
) -> None:
    artifact, texts = theirs(kind, tokens)
    assert texts[0].startswith(" Paris.")
    assert ours(artifact, tokens=tokens) == texts
    with open_artifact(artifact) as found:
        assert stored_types(found) == labels


@pytest.mark.real
def test_eight_bits_are_the_same_bytes_in_both_programs(
    baked: Callable[[str], Path], theirs: Callable[..., tuple[Path, list[str]]]
) -> None:
    with open_artifact(baked("q8_0")) as left, open_artifact(theirs("q8_0", 16)[0]) as right:
        assert set(left.keys()) == set(right.keys())
        for key in tuple(left.keys()):
            ours_, theirs_ = left.form(key), right.form(key)
            assert isinstance(ours_, GgmlTensor)
            assert isinstance(theirs_, GgmlTensor)
            assert ours_.data.tobytes() == theirs_.data.tobytes(), key


@pytest.mark.real
def test_verify_accepts_theirs_and_shows_what_its_name_hides(theirs: Callable[..., tuple[Path, list[str]]]) -> None:
    report = verify(theirs("q4k", 16)[0])
    assert report.passed, report
    assert report.container.counts["report layers"] == 211
    assert any("says q4k: 180 of 210 layers are stored otherwise (180 q4_1)" in note for note in report.container.notes)


WORST = {
    **{"q4_0": 0.01, "q4_1": 0.01, "q5_0": 0.003, "q5_1": 0.003, "q8_0": 5e-5},
    **{"q2k": 0.15, "q3k": 0.03, "q4k": 0.007, "q5k": 0.002, "q6k": 5e-4},
    **{"afq2": 0.27, "afq3": 0.04, "afq4": 0.01, "afq6": 6e-4, "afq8": 5e-5, "mxfp4": 0.06, "fp8": 0.002},
}
"""Relative error of Gaussian weights as mistral.rs stores them, with a third to spare: what a misread byte order would pass by far."""


K_QUANTS = ("q2k", "q3k", "q4k", "q5k", "q6k")
"""Found by a search: theirs follows ggml's reference, ours has less error on every layer."""


def relative_error(weight: Weight, want: np.ndarray) -> float:
    return float(np.square(weight.dense() - want).sum() / np.square(want).sum())


@pytest.fixture(scope="module")
def wide(tmp_path_factory: pytest.TempPathFactory, qwen3_dir: Path) -> Path:
    """A random Llama of one layer whose widths every type divides."""
    return foreign_models.wide_llama(tmp_path_factory.mktemp("wide") / "llama", qwen3_dir)


@pytest.mark.parametrize("kind", list(WORST))
def test_every_type_of_theirs_is_read_as_what_it_was_made_from(kind: str, wide: Path, tmp_path: Path) -> None:
    text = upstream({"model": str(wide), "write": [str(tmp_path / f"{kind}.uqff"), kind]}, PROMPT, 3)
    source = load_file(wide / "model.safetensors")
    report = verify(tmp_path, str(wide))
    assert not [failure for answer in report.answers for failure in answer.failures if answer.asked]
    with open_artifact(tmp_path) as found:
        assert kind in {found.form(key).label for key in tuple(found.keys()) if ".layers." in key}
        for key in tuple(found.keys()):
            weight = found.weight(key)
            want = source[f"{key}.weight"].astype(np.float64)
            error = relative_error(weight, want)
            assert 0 < error < WORST[kind], key
            if kind in ("q4_1", "q5_1", "q8_0") and weight.label == kind:
                assert isinstance(weight, GgmlTensor)
                theirs_ = gguf.quants.quantize(source[f"{key}.weight"], gguf.GGMLQuantizationType[kind.upper()])
                assert weight.data.tobytes() == theirs_.tobytes()
            if kind in K_QUANTS and weight.label == kind:
                assert relative_error(GgmlTensor.encoded(GGML_TYPES[kind], source[f"{key}.weight"], key), want) < error, key
    assert text != [""]
    assert ours(tmp_path, PROMPT, 3) != [""]


def test_stacked_experts_are_the_same_bytes_in_both_programs(tmp_path: Path, qwen3_dir: Path) -> None:
    source = tmp_path / "moe"
    tensors = foreign_models.moe(source, qwen3_dir)
    written = tmp_path / "theirs"
    written.mkdir()
    texts = upstream({"model": str(source), "write": [str(written / "q8_0.uqff"), "q8_0"]}, PROMPT, 10)
    assert len(set(texts[0])) > 4
    copy = tmp_path / "ours"
    with open_artifact(written) as found:
        stacks = [key for key in tuple(found.keys()) if ".experts." in key]
        assert len(stacks) == 6
        writer = ArtifactWriter(copy, "q8_0", config=found.config_json, assets=found.assets)
        with writer as out:
            for key in tuple(found.keys()):
                out.add_layer(key, stored(tensors, key))
            for name in found.residual_names():
                out.add_residual(name, DenseTensor(tensors[name]))
            out.finish(BakeInfo("q8_0", 0))
        with open_artifact(copy) as again:
            for key in stacks:
                left, right = found.entries(key), again.entries(key)
                assert {name: (e.dtype, e.shape, e.raw.tobytes()) for name, e in left.items()} == {
                    name: (e.dtype, e.shape, e.raw.tobytes()) for name, e in right.items()
                }
                assert again.weight(key).shape[0] == foreign_models.EXPERTS
    assert load(copy, PROMPT, 10) == texts


@pytest.mark.parametrize("name", ["mixtral", "qwen3_moe"])
def test_a_mixture_that_mistralrs_stacked_is_our_own_bake_of_it(name: str, tiny_checkpoints: dict[str, Path], tmp_path: Path) -> None:
    """Bit for bit: the stacks are taken apart as they were put together. (Of Mixtral mistral.rs quantises the router too.)

    Its own products round activations to eight bits, and random experts are all but equally probable now and then: texts begin alike.
    """
    source = tiny_checkpoints[name]
    texts = upstream({"model": str(source), "write": [str(tmp_path / "q8_0.uqff"), "q8_0"]}, MIXTURE_PROMPTS, 12)
    assert len(set(texts)) == len(texts)
    assert all(a[0] == b[0] for a, b in zip(texts, ours(tmp_path, MIXTURE_PROMPTS, 12), strict=True))
    recipe = Recipe("q8_0", (Rule("test", "q8_0", "*.block_sparse_moe.gate"),) if name == "mixtral" else ())
    ids = [1, 77, 300, 5, 5, 211, 499, 38, 150, 400]
    with open_checkpoint(str(source)) as checkpoint, open_artifact(tmp_path) as artifact:
        theirs_, ours_ = (
            logits(load_model(one, default_registry()), ids) for one in (ArtifactSource(artifact), bake_in_memory(checkpoint, recipe))
        )
    assert theirs_.tobytes() == ours_.tobytes()
    report = verify(tmp_path, str(source))
    assert report.passed, report
    assert sum(".experts." in error.key for error in report.errors) == 3 * {"mixtral": 2, "qwen3_moe": 1}[name]


def stored(tensors: dict[str, np.ndarray], key: str) -> GgmlTensor:
    """Layer `key` in Q8_0: one matrix, or the experts' matrices in the order of their numbers."""
    if ".experts." not in key:
        return GgmlTensor.encoded(Q8_0, tensors[f"{key}.weight"], key)
    at, part = key.rsplit(".", 1)
    stack = np.stack([tensors[f"{at}.{expert}.{part}.weight"] for expert in range(foreign_models.EXPERTS)])
    return GgmlTensor.encoded(Q8_0, stack, key)
