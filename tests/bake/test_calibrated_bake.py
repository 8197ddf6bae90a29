"""A bake under calibration: the same bytes however it is run and wherever it is broken off, and a model that survives bad activations."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.numpy import load_file, save_file

from arctool.bake import pipeline
from arctool.bake.calibration.text import Windows
from arctool.bake.calibration.token_set import CalibrationSet, choose_calibration
from arctool.bake.pipeline import BakeResult, LayerDone, MemoryModel, bake, bake_in_memory
from arctool.bake.recipe import Recipe, Rule
from arctool.bake.search.ldlq import METHOD, Method
from arctool.bake.source.checkpoint import open_checkpoint
from arctool.errors import InterruptedByUser, SourceError
from arctool.kernels.registry import default_registry
from arctool.run.divergence import compare
from arctool.run.evaluate import logits
from arctool.run.tokenizer import Tokenizer
from arctool.run.weights import WeightSource, load_model
from arctool.uqff.container import LayerDetails, open_artifact

IDS = np.random.default_rng(3).integers(3, 512, (5, 32)).astype(np.int32)
RECIPE = Recipe("qtip2-v4", (Rule("test", "qtip4", "*.down_proj"), Rule("test", "q8_0", "model.layers.0.mlp.up_proj")))
HEAD = Recipe("qtip2-v4", (Rule("test", "qtip4", "lm_head"),))


def windows(ids: np.ndarray = IDS, sampled: int = 0) -> CalibrationSet:
    return CalibrationSet("a text", Windows(ids, ()), sampled)


CHOSEN = windows()


def baked(model: Path, output: Path, recipe: Recipe = RECIPE, chosen: CalibrationSet | None = CHOSEN, **options: Any) -> BakeResult:
    with open_checkpoint(str(model)) as checkpoint:
        return bake(checkpoint, output, recipe, calibration=chosen, measured=False, **options)


def tree(directory: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in directory.iterdir()}


def details(result: BakeResult) -> dict[str, LayerDetails]:
    return {record.module: record.details for record in result.report.outputs[0].layers}


class Stop(Exception):
    """What a test breaks a bake off with."""


@pytest.fixture(scope="module")
def whole(tiny_llama: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, bytes]:
    """The tiny Llama baked as HEAD says, in one go."""
    output = tmp_path_factory.mktemp("whole") / "whole"
    baked(tiny_llama, output, HEAD)
    return tree(output)


@pytest.mark.parametrize(("name", "recipe"), [("llama", RECIPE), ("llama", HEAD), ("qwen2", RECIPE)], ids=["llama", "head", "qwen2"])
def test_file_and_memory_and_any_number_of_threads_give_the_same_bytes(
    name: str, recipe: Recipe, tiny_checkpoints: dict[str, Path], tmp_path: Path
) -> None:
    before = torch.get_num_threads()
    inside: set[int] = set()
    for jobs in (1, 2, 3):
        torch.set_num_threads(1 + jobs % 2)
        baked(tiny_checkpoints[name], tmp_path / str(jobs), recipe, jobs=jobs, progress=lambda _: inside.add(torch.get_num_threads()))
        assert torch.get_num_threads() == 1 + jobs % 2
    torch.set_num_threads(before)
    assert inside == {1}, "matrices of a real model are large enough for their sums to depend on it"
    found = [tree(tmp_path / str(jobs)) for jobs in (1, 2, 3)]
    assert found[0] == found[1] == found[2]
    with open_checkpoint(str(tiny_checkpoints[name])) as checkpoint, open_artifact(tmp_path / "1") as artifact:
        memory = bake_in_memory(checkpoint, recipe, jobs=2, calibration=CHOSEN)
        for key, weight in memory.weights.items():
            assert artifact.weight(key).dense().tobytes() == weight.dense().tobytes()
        other = bake_in_memory(checkpoint, recipe, calibration=windows(IDS[::-1, ::-1]))
        differing = {key for key, weight in memory.weights.items() if weight.dense().tobytes() != other.weights[key].dense().tobytes()}
    unsearched = {"model.embed_tokens", "model.layers.0.mlp.up_proj"} | (set() if recipe is HEAD else {"lm_head"})
    matrices = {key for key in memory.weights if not key.endswith("norm")}
    assert differing >= matrices - unsearched, "the text must matter to every searched layer"


@pytest.mark.parametrize("recipe", [RECIPE, HEAD], ids=["layers", "head"])
def test_broken_off_after_every_single_tensor_it_ends_with_the_same_bytes(recipe: Recipe, tiny_llama: Path, tmp_path: Path) -> None:
    """Each run goes one tensor further than the one before, the last one to the end."""
    seen: list[LayerDone] = []
    baked(tiny_llama, tmp_path / "whole", recipe, progress=seen.append)

    def interrupt_after(last: int) -> Callable[[LayerDone], None]:
        def interrupt(done: LayerDone) -> None:
            assert done.resumed == (done.index < last and done.key in kept)
            if done.index == last:
                raise KeyboardInterrupt

        return interrupt

    kept = {done.key for done in seen if done.rung not in ("bf16", "q8_0")}
    for index in range(1, len(seen) + 1):
        before = [done.key for done in seen[:index] if done.key in kept]
        words = f"{len(before)} of {len(kept)} layers are kept" if before else "there was nothing to keep yet"
        with pytest.raises(InterruptedByUser, match=words):
            baked(tiny_llama, tmp_path / "broken", recipe, progress=interrupt_after(index))
    assert baked(tiny_llama, tmp_path / "broken", recipe).resumed == len(kept)
    assert tree(tmp_path / "broken") == tree(tmp_path / "whole")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["broken", "whole"]


def stop_after(index: int) -> Callable[[LayerDone], None]:
    def stop(done: LayerDone) -> None:
        if done.index == index:
            raise Stop

    return stop


@pytest.mark.parametrize("index", [3, 9, 12, 20])
def test_broken_off_once_it_ends_with_the_same_bytes(index: int, tiny_llama: Path, tmp_path: Path, whole: dict[str, bytes]) -> None:
    with pytest.raises(Stop):
        baked(tiny_llama, tmp_path / "broken", HEAD, progress=stop_after(index))
    baked(tiny_llama, tmp_path / "broken", HEAD, jobs=2)
    assert tree(tmp_path / "broken") == whole


def test_broken_off_while_an_input_is_measured_it_ends_with_the_same_bytes(
    tiny_llama: Path, tmp_path: Path, whole: dict[str, bytes]
) -> None:
    """Each run is stopped at the first stage that the one before did not reach."""
    measured: list[str] = []

    def stop(saying: str) -> None:
        if saying.endswith(": measuring its input") and saying not in measured:
            measured.append(saying)
            raise Stop

    for _ in range(9):
        with pytest.raises(Stop):
            baked(tiny_llama, tmp_path / "broken", HEAD, status=stop)
    baked(tiny_llama, tmp_path / "broken", HEAD, status=stop)
    assert tree(tmp_path / "broken") == whole
    assert [what.split(":")[0].rpartition(".")[2] for what in measured] == [*["q_proj", "o_proj", "gate_proj", "down_proj"] * 2, "lm_head"]


def damage(path: Path) -> None:
    data = path.read_bytes()
    path.write_bytes(data[: len(data) // 2] + bytes([data[len(data) // 2] ^ 1]) + data[len(data) // 2 + 1 :])


def shorten(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-1])


@pytest.mark.parametrize(
    ("name", "hurt"),
    [
        ("states.array", damage),
        ("states.array", shorten),
        ("states.array", Path.unlink),
        ("truth.array", damage),
        ("00003.layer", damage),
        ("00003.layer", Path.unlink),
        ("00013.layer", shorten),
    ],
)
def test_whatever_the_journal_lost_it_ends_with_the_same_bytes(
    name: str, hurt: Callable[[Path], object], tiny_llama: Path, tmp_path: Path, whole: dict[str, bytes]
) -> None:
    """A layer that is gone although the states behind it are there must be searched under what it saw, like the first time."""
    with pytest.raises(Stop):
        baked(tiny_llama, tmp_path / "broken", HEAD, progress=stop_after(14))
    hurt(tmp_path / ".broken.arctool-journal" / name)
    baked(tiny_llama, tmp_path / "broken", HEAD)
    assert tree(tmp_path / "broken") == whole


@pytest.mark.parametrize(
    "options",
    [{"chosen": windows(IDS[:4])}, {"chosen": windows(IDS[:, ::-1])}, {"chosen": windows(sampled=1)}, {"seed": 1}, {"chosen": None}],
    ids=["fewer", "another", "sampled", "seed", "none"],
)
def test_a_journal_of_other_calibration_is_not_gone_on_with(
    options: dict[str, Any], tiny_llama: Path, tmp_path: Path, whole: dict[str, bytes]
) -> None:
    with pytest.raises(Stop):
        baked(tiny_llama, tmp_path / "a", HEAD, progress=stop_after(12), **options)
    assert list(tmp_path.glob(".a.arctool-journal/*.layer"))
    assert baked(tiny_llama, tmp_path / "a", HEAD).resumed == 0
    assert tree(tmp_path / "a") == whole


def test_without_calibration_every_row_is_rounded_by_itself(tiny_llama: Path, tmp_path: Path) -> None:
    seen: list[LayerDone] = []
    result = baked(tiny_llama, tmp_path / "a", chosen=None, progress=seen.append)
    assert result.report.bake is not None
    assert (result.report.bake.algorithm, result.report.bake.calibration) == ("round-rows-1", None)
    assert {done.proxy_error for done in seen} == {None}
    assert {(one.proxy_error, one.note) for one in details(result).values()} == {(None, None)}


def test_a_calibrated_bake_says_what_it_did(tiny_llama: Path, tmp_path: Path) -> None:
    seen: list[LayerDone] = []
    result = baked(tiny_llama, tmp_path / "a", progress=seen.append)
    assert result.report.bake is not None
    assert result.report.bake.algorithm.startswith("feedback-rows-")
    assert result.report.bake.calibration == {"text": CHOSEN.text.identity, "tokens": 160, "window": 32, "sampled": 0, "auto": False}
    searched = {done.key: done.proxy_error for done in seen if done.rung.startswith("qtip")}
    assert len(searched) == 13
    for key, one in details(result).items():
        assert one.proxy_error == searched.get(key)
        assert (one.dropped_rows, one.note) == (0, None)
        if one.proxy_error is not None:
            assert 0 < one.proxy_error < (0.01 if key.endswith("down_proj") else 0.09)


def test_a_recipe_without_a_searched_layer_calibrates_nothing(tiny_llama: Path, tmp_path: Path) -> None:
    said: list[str] = []
    result = baked(tiny_llama, tmp_path / "a", Recipe.uniform("q8_0"), status=said.append)
    assert result.report.bake is not None
    assert (result.report.bake.algorithm, result.report.bake.calibration) == ("round-rows-1", None)
    assert not [what for what in said if "measuring" in what]


@pytest.fixture(params=["llama", "qwen2", "qwen3", "mistral"])
def correlated(request: pytest.FixtureRequest, copy_checkpoint: Callable[[str], Path]) -> Path:
    """A tiny checkpoint whose activations are as correlated as a real model's, and whose layers do not amplify every error."""
    model = copy_checkpoint(request.param)
    generator = np.random.default_rng(1)
    weights = load_file(model / "model.safetensors")
    vocabulary, hidden = weights["model.embed_tokens.weight"].shape
    few = generator.standard_normal((vocabulary, 6)) @ generator.standard_normal((6, hidden))
    weights["model.embed_tokens.weight"] = (few + 0.1 * generator.standard_normal((vocabulary, hidden))).astype(np.float32)
    for name in weights:
        if name.endswith(("o_proj.weight", "down_proj.weight")):
            weights[name] = weights[name] * np.float32(0.2)
    save_file(weights, model / "model.safetensors")
    return model


def test_calibration_brings_the_model_nearer_to_its_source(correlated: Path) -> None:
    """On text that it has not seen: much by feedback, and some more by mending what earlier layers lost."""
    text = np.random.default_rng(9).integers(3, 512, (4, 48))
    chosen = windows(np.random.default_rng(3).integers(3, 512, (16, 48)).astype(np.int32))
    recipe = Recipe.uniform("qtip2-v4")
    with open_checkpoint(str(correlated)) as checkpoint:

        def answers(source: WeightSource) -> np.ndarray:
            return np.concatenate([logits(load_model(source, default_registry()), ids.tolist()) for ids in text])

        def error(model: MemoryModel) -> float:
            return float(((answers(model) - true) ** 2).mean() / true.var())

        true = answers(checkpoint)
        rounded = error(bake_in_memory(checkpoint, recipe))
        fed = error(bake_in_memory(checkpoint, recipe, calibration=chosen, method=Method(share=0)))
        mended = error(bake_in_memory(checkpoint, recipe, calibration=chosen))
    assert fed < 0.3 * rounded
    assert mended < 0.95 * fed


@pytest.mark.parametrize("name", ["llama", "qwen3"])
def test_even_a_few_dozen_tokens_do_no_harm(name: str, tiny_checkpoints: dict[str, Path], heldout_text: str, tmp_path: Path) -> None:
    """With H damped as if it were a mean over many rows, 75 tokens were worse than none at all."""
    (tmp_path / "short.txt").write_text(heldout_text[:150])
    recipe = Recipe.uniform("qtip2-v4")
    with open_checkpoint(str(tiny_checkpoints[name])) as checkpoint:
        tokens = Tokenizer(checkpoint.assets, checkpoint.config.vocab_size).encode(heldout_text[2000:6000], add_special_tokens=False)
        texts = [tuple(tokens[at : at + 256]) for at in range(0, 1024, 256)]
        chosen = choose_calibration(checkpoint, str(tmp_path / "short.txt"))
        assert 50 < chosen.tokens < 100
        source = load_model(checkpoint, default_registry())

        def divergence(calibration: CalibrationSet | None, method: Method = METHOD) -> float:
            made = bake_in_memory(checkpoint, recipe, calibration=calibration, method=method)
            return compare(source, load_model(made, default_registry()), texts).kl

        rounded, calibrated, trusting = divergence(None), divergence(chosen), divergence(chosen, Method(shrinkage=False))
    assert calibrated < rounded < trusting


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("gain", [3e37, 1e20])
def test_activations_that_overflow_are_named_and_survived(gain: float, copy_checkpoint: Callable[[str], Path], tmp_path: Path) -> None:
    """From the second layer's first norm on no row is of use; all before is calibrated, all behind is rounded, and says why."""
    model = copy_checkpoint("llama")
    weights = load_file(model / "model.safetensors")
    weights["model.layers.1.input_layernorm.weight"][:] = gain
    save_file(weights, model / "model.safetensors")
    result = baked(model, tmp_path / "a", HEAD)
    for key, one in details(result).items():
        if key.startswith("model.layers.0."):
            assert one.proxy_error is not None
            assert (one.dropped_rows, one.note) == (0, None)
        if key in {f"model.layers.1.self_attn.{name}_proj" for name in "qkvo"}:
            assert one.proxy_error is None
            assert one.dropped_rows == IDS.size
            assert one.note == "rounded without feedback: no calibration row reaches it with finite values"
    with open_checkpoint(str(model)) as checkpoint:
        rounded = bake_in_memory(checkpoint, HEAD)
    with open_artifact(tmp_path / "a") as artifact:
        key = "model.layers.1.self_attn.q_proj"
        assert artifact.weight(key).dense().tobytes() == rounded.weights[key].dense().tobytes()
    assert baked(model, tmp_path / "b", HEAD, jobs=2).report.outputs == result.report.outputs


def test_a_token_outside_the_vocabulary_is_refused_and_nothing_stays(tiny_llama: Path, tmp_path: Path) -> None:
    ids = IDS.copy()
    ids[4, 31] = 512
    with pytest.raises(SourceError, match="token 512 is not among the model's 512"):
        baked(tiny_llama, tmp_path / "a", chosen=windows(ids))
    assert list(tmp_path.iterdir()) == []


def test_text_that_the_model_writes_itself_is_written_once_and_kept(
    tiny_llama: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    said: list[str] = []
    chosen = windows(sampled=2)
    baked(tiny_llama, tmp_path / "whole", chosen=chosen, status=said.append)
    assert said[0].startswith("sampling calibration text, ")
    assert "of 64 tokens" in said[0]
    baked(tiny_llama, tmp_path / "other")
    assert tree(tmp_path / "other")["qtip2-v4-0.uqff"] != tree(tmp_path / "whole")["qtip2-v4-0.uqff"]

    sampled = itertools.count()
    sample = pipeline.sample_windows
    monkeypatch.setattr(pipeline, "sample_windows", lambda *given: (next(sampled), sample(*given))[1])
    before = torch.get_num_threads()
    for threads, hurt, total in ((2, False, 1), (1, False, 1), (2, True, 2)):
        torch.set_num_threads(threads)
        if hurt:
            damage(tmp_path / ".broken.arctool-journal" / "sampled.array")
        with pytest.raises(Stop):
            baked(tiny_llama, tmp_path / "broken", chosen=chosen, progress=stop_after(4))
        assert next(sampled) == total
        sampled = itertools.count(total)
    torch.set_num_threads(before)
    baked(tiny_llama, tmp_path / "broken", chosen=chosen)
    assert tree(tmp_path / "broken") == tree(tmp_path / "whole")
