"""A bake to a budget: fragile layers are found by measuring and get more, the budget holds in the file, the better bake is kept."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file
from small_text import SMALL

from arctool.bake import calibrated
from arctool.bake.account import Account, parse_account
from arctool.bake.budget import bake as budget
from arctool.bake.budget.bake import bake_to_budget
from arctool.bake.budget.sensitivity import Check
from arctool.bake.calibration.token_set import CalibrationSet, choose_calibration
from arctool.bake.choices import LADDER
from arctool.bake.pipeline import BakeResult, bake
from arctool.bake.recipe import Recipe, RecipeFile, Rule
from arctool.bake.source.checkpoint import Checkpoint, open_checkpoint
from arctool.errors import InterruptedByUser, SourceError, StorageError, UsageError
from arctool.run.models.spec import Role
from arctool.uqff.container import open_artifact

RATE = 3.3


def tree(directory: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in directory.iterdir()}


def baked(model: Path, output: Path, bpw: float = RATE, **options: Any) -> BakeResult:
    with open_checkpoint(str(model)) as checkpoint:
        return bake_to_budget(checkpoint, output, bpw, text=SMALL, **options)


def account(result: BakeResult) -> Account:
    assert result.report.bake is not None
    assert result.report.bake.budget is not None
    return parse_account(result.report.bake.budget, "report")


def rungs(result: BakeResult) -> dict[str, str]:
    """What the allocation gave each layer."""
    return {key: group.rung for group in account(result).groups for key in group.layers}


def effects(result: BakeResult) -> dict[str, float]:
    return {key: group.kl for group in account(result).groups for key in group.layers}


def linear(checkpoint: Checkpoint) -> list[str]:
    return [spec.key for spec in checkpoint.specs if spec.role is Role.LINEAR]


@contextmanager
def verdict(monkeypatch: pytest.MonkeyPatch, **given: float) -> Iterator[None]:
    """A check that says so much for "the uniform bake" and "the mixed bake"."""
    with monkeypatch.context() as patch:
        patch.setattr(Check, "divergence", lambda self, stored, name: given[name.split()[1]])
        yield


def test_the_budget_holds_in_the_file_and_the_recipe_there_names_every_layer_that_differs(tiny_checkpoint: Path, tmp_path: Path) -> None:
    result = baked(tiny_checkpoint, tmp_path / "a")
    found = account(result)
    assert (found.chosen, found.asked, found.rung) == ("mixed", RATE, "qtip2.25-v4")
    with open_checkpoint(str(tiny_checkpoint)) as checkpoint, open_artifact(tmp_path / "a") as artifact:
        keys = linear(checkpoint)
        weights = [artifact.weight(key) for key in keys]
    rate = sum(weight.stored_bits for weight in weights) / sum(weight.shape[0] * weight.shape[1] for weight in weights)
    assert 0.97 * RATE < rate <= RATE
    assert found.reached == rate
    assert result.report.bake is not None
    recipe = result.report.bake.recipe
    given = rungs(result)
    assert recipe["default"] in given.values()
    other = {re.sub(r"experts\.\d+", "experts.*", key): name for key, name in given.items() if name != recipe["default"]}
    assert {rule["match"]: rule["rung"] for rule in recipe["rules"]} == other
    assert {key: weight.label for key, weight in zip(keys, weights, strict=True)} == {key: LABELS[given[key]] for key in keys}
    assert len(set(given.values())) >= 3
    assert found.mixed.kl is not None
    assert found.uniform.kl is not None
    assert 0 < found.mixed.kl < found.uniform.kl
    assert os.listdir(tmp_path) == ["a"]


LABELS = {
    "qtip2-v4": "trellis-k8v4l12-bf16",
    "qtip2.25-v4": "trellis-k9v4l12-bf16",
    "qtip3": "trellis-k3v1l12-bf16",
    "qtip4": "trellis-k4v1l12-bf16",
    "q8_0": "q8_0",
}


@pytest.mark.parametrize(
    ("fragile", "norm"),
    [
        ("model.layers.0.self_attn.v_proj", "model.layers.0.input_layernorm"),
        ("model.layers.1.self_attn.v_proj", "model.layers.1.input_layernorm"),
        ("model.layers.1.mlp.up_proj", "model.layers.1.post_attention_layernorm"),
    ],
)
def test_a_fragile_layer_is_found_by_measuring_and_gets_more_bits(
    fragile: str, norm: str, tiny_llama: Path, copy_checkpoint: Callable[[str], Path], tmp_path: Path
) -> None:
    """One of its columns is 40 times as large as before, and its input there as much smaller: the same function, but rounding spends its
    precision on that column."""
    sound = baked(tiny_llama, tmp_path / "sound")
    model = copy_checkpoint("llama")
    weights = load_file(model / "model.safetensors")
    weights[f"{fragile}.weight"][:, 5] *= np.float32(40)
    weights[f"{norm}.weight"][5] /= np.float32(40)
    save_file(weights, model / "model.safetensors")
    planted = baked(model, tmp_path / "planted")
    order = list(LADDER)
    assert effects(planted)[fragile] > 4 * effects(sound)[fragile]
    assert order.index(rungs(planted)[fragile]) > order.index(rungs(sound)[fragile])
    assert order.index(rungs(planted)[fragile]) >= order.index("qtip3")
    if "layers.0" in fragile:
        assert effects(planted)[fragile] == max(effects(planted).values())
        assert rungs(planted)[fragile] == max(rungs(planted).values(), key=order.index)


def test_threads_move_no_byte(tiny_llama: Path, tmp_path: Path) -> None:
    with open_checkpoint(str(tiny_llama)) as checkpoint:
        calibration = choose_calibration(checkpoint, tokens=512)
    for jobs in (1, 2, 5):
        baked(tiny_llama, tmp_path / str(jobs), jobs=jobs, calibration=calibration)
    assert tree(tmp_path / "1") == tree(tmp_path / "2") == tree(tmp_path / "5")


class Stop:
    """Ctrl-C at the n-th word that a bake says, whatever it is busy with."""

    def __init__(self, at: int | None) -> None:
        self.at, self.said = at, []

    def __call__(self, what: object) -> None:
        self.said.append(str(what))
        if len(self.said) == self.at:
            raise KeyboardInterrupt


def with_calibration(model: Path) -> CalibrationSet:
    with open_checkpoint(str(model)) as checkpoint:
        return choose_calibration(checkpoint, tokens=512)


def test_interrupted_anywhere_the_same_command_goes_on_and_ends_with_the_same_bytes(tiny_llama: Path, tmp_path: Path) -> None:
    calibration = with_calibration(tiny_llama)
    whole = Stop(None)
    baked(tiny_llama, tmp_path / "whole", calibration=calibration, progress=whole, status=whole)
    expected = tree(tmp_path / "whole")
    phases = [
        i + 1 for i, line in enumerate(whole.said) if line.startswith(("measuring", "checking the mixed", "mixed bake: model.layers.1"))
    ]
    assert len(phases) >= 5
    place = tmp_path / "place"
    for at in (len(whole.said) // 8, len(whole.said) // 3, *phases[::3], phases[-1], len(whole.said)):
        place.mkdir()
        stop = Stop(at)
        with pytest.raises(InterruptedByUser, match=r"layers are kept in .*: run the same command to go on"):
            baked(tiny_llama, place / "a", calibration=calibration, progress=stop, status=stop)
        assert not (place / "a").exists()
        again = Stop(None)
        baked(tiny_llama, place / "a", calibration=calibration, progress=again, status=again)
        assert tree(place / "a") == expected, at
        assert os.listdir(place) == ["a"]
        for path in (place / "a").iterdir():
            path.unlink()
        (place / "a").rmdir()
        place.rmdir()


def test_what_was_measured_before_an_interruption_is_not_measured_again(
    tiny_llama: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    measured, searches, checks = [], [], []
    real_measure, real_search, real_check = budget.measure, calibrated.Bench.search, Check.divergence

    def measure(trial: Any, groups: Any, known: Any, keep: Any, say: Any) -> Any:
        measured.append(int(np.isnan(known).sum()))
        return real_measure(trial, groups, known, keep, say)

    monkeypatch.setattr(budget, "measure", measure)
    monkeypatch.setattr(
        calibrated.Bench, "search", lambda self, task, seen: searches.append(task.choice.rung) or real_search(self, task, seen)
    )
    monkeypatch.setattr(Check, "divergence", lambda self, stored, name: checks.append(name) or real_check(self, stored, name))
    stop = Stop(None)
    baked(tiny_llama, tmp_path / "whole", progress=stop, status=stop)
    assert (measured, checks, len(searches)) == ([14], ["the uniform bake", "the mixed bake"], 28)
    for log in (measured, searches, checks):
        log.clear()
    at = next(i for i, line in enumerate(stop.said) if "model.layers.1.mlp.down_proj" in line and i > len(stop.said) // 2)
    late = Stop(at + 1)
    with pytest.raises(InterruptedByUser, match="14 of 14 layers are kept"):
        baked(tiny_llama, tmp_path / "a", progress=late, status=late)
    baked(tiny_llama, tmp_path / "a")
    assert (measured, checks, len(searches)) == ([14, 0], ["the uniform bake", "the mixed bake"], 28)


@pytest.mark.parametrize(("uniform", "mixed"), [(0.5, 0.5), (0.5, 0.6), (0.5, float("inf")), (float("inf"), float("inf"))])
def test_where_the_mixed_bake_is_no_better_the_artifact_is_the_uniform_one_and_nothing_is_searched_again(
    uniform: float, mixed: float, tiny_llama: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    searched = []
    real = calibrated.Bench.search
    monkeypatch.setattr(calibrated.Bench, "search", lambda self, task, seen: searched.append(task.index) or real(self, task, seen))
    calibration = with_calibration(tiny_llama)
    with verdict(monkeypatch, uniform=uniform, mixed=mixed):
        result = baked(tiny_llama, tmp_path / "a", calibration=calibration)
    assert len(searched) == 28
    found = account(result)
    assert (found.chosen, found.reached) == ("uniform", found.uniform.bits_per_weight)
    assert found.mixed.bits_per_weight > found.reached
    assert (found.mixed.kl, found.uniform.kl) == (mixed if mixed < 1 else None, uniform if uniform < 1 else None)
    with open_checkpoint(str(tiny_llama)) as checkpoint:
        bake(checkpoint, tmp_path / "plain", Recipe.uniform("qtip2.25-v4"), calibration=calibration)
    for name in ("qtip2.25-v4-0.uqff", "residual.safetensors"):
        assert (tmp_path / "a" / name).read_bytes() == (tmp_path / "plain" / name).read_bytes()
    assert sorted(os.listdir(tmp_path)) == ["a", "plain"]


def test_a_uniform_bake_that_cannot_be_linked_is_made_again(tiny_llama: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def link(*_: object) -> None:
        raise OSError(95, "Operation not supported")

    with verdict(monkeypatch, uniform=0.1, mixed=0.2):
        baked(tiny_llama, tmp_path / "linked")
        monkeypatch.setattr(os, "link", link)
        baked(tiny_llama, tmp_path / "copied")
    assert tree(tmp_path / "linked") == tree(tmp_path / "copied")


def test_a_budget_that_moves_nothing_is_the_uniform_bake_unchecked(tiny_llama: Path, tmp_path: Path) -> None:
    result = baked(tiny_llama, tmp_path / "a", 16.0)
    found = account(result)
    assert (found.chosen, found.rung, found.reached) == ("uniform", "bf16", 16.0)
    assert (found.mixed.kl, found.uniform.kl) == (None, None)


def test_a_finished_bake_is_found_and_another_budget_is_refused_before_work(tiny_llama: Path, tmp_path: Path) -> None:
    first = baked(tiny_llama, tmp_path / "a")
    before = tree(tmp_path / "a")
    words = Stop(1)
    again = baked(tiny_llama, tmp_path / "a", progress=words, status=words)
    assert (again.resumed, again.report) == (21, first.report)
    for options in ({"bpw": 3.4}, {"seed": 1}, {"calibration": with_calibration(tiny_llama)}, {"pins": RecipeFile(fallback="qtip4")}):
        with pytest.raises(StorageError, match="already exists and is not this bake's"):
            baked(tiny_llama, tmp_path / "a", **options, progress=words, status=words)  # type: ignore[arg-type]
    assert words.said == []
    assert tree(tmp_path / "a") == before
    assert os.listdir(tmp_path) == ["a"]
    forced = baked(tiny_llama, tmp_path / "a", 3.4, overwrite=True)
    assert account(forced).asked == 3.4
    assert os.listdir(tmp_path) == ["a"]


def test_what_a_recipe_names_keeps_what_it_says(tiny_llama: Path, tmp_path: Path) -> None:
    pins = RecipeFile(
        rules=(
            Rule("r: rules[0]", "qtip4", "*.0.*.q_proj"),
            Rule("r: rules[1]", "bf16", "*.1.*.k_proj"),
            Rule("r: head", "bf16", "lm_head"),
        )
    )
    result = baked(tiny_llama, tmp_path / "a", 4.0, pins=pins)
    with open_artifact(tmp_path / "a") as artifact:
        keys = artifact.keys()
        labels = {key: artifact.weight(key).label for key in keys}
    assert labels["model.layers.0.self_attn.q_proj"] == "trellis-k4v1l12-bf16"
    assert labels["model.layers.1.self_attn.k_proj"] == "bf16"
    assert (labels["lm_head"], labels["model.embed_tokens"]) == ("bf16", "q8_0")
    assert {"model.layers.0.self_attn.q_proj", "model.layers.1.self_attn.k_proj"}.isdisjoint(rungs(result))
    assert len(rungs(result)) == 12
    assert account(result).reached <= 4.0


@pytest.mark.parametrize("bpw", [float("nan"), float("inf"), 0.0, -1.0, 1.0, 17.0])
def test_a_budget_that_cannot_be_is_refused_before_work(bpw: float, tiny_llama: Path, tmp_path: Path) -> None:
    words = Stop(1)
    with pytest.raises(UsageError, match="--bpw: expected"):
        baked(tiny_llama, tmp_path / "a", bpw, progress=words, status=words)
    assert (words.said, os.listdir(tmp_path)) == ([], [])


def test_a_kept_layer_that_is_damaged_meanwhile_is_named(tiny_llama: Path, tmp_path: Path) -> None:
    def damage(what: str) -> None:
        if what.startswith("measuring"):
            for path in tmp_path.glob(".a.arctool-uniform.arctool-journal/00003.layer"):
                path.write_bytes(path.read_bytes()[:-1])

    with pytest.raises(StorageError, match=r"the layer model\.layers\.0\.self_attn\.\w+ that was kept here is gone or damaged"):
        baked(tiny_llama, tmp_path / "a", status=damage)
    assert baked(tiny_llama, tmp_path / "a").resumed == 0
    assert os.listdir(tmp_path) == ["a"]


def test_a_second_bake_to_the_same_output_is_refused_while_the_first_measures(tiny_llama: Path, tmp_path: Path) -> None:
    def again(what: str) -> None:
        if what.startswith("measuring"):
            baked(tiny_llama, tmp_path / "a")

    with pytest.raises(StorageError, match="another bake to the same output is running"):
        baked(tiny_llama, tmp_path / "a", status=again)


def test_a_checkpoint_whose_own_predictions_are_no_numbers_is_refused(copy_checkpoint: Callable[[str], Path], tmp_path: Path) -> None:
    model = copy_checkpoint("llama")
    weights = load_file(model / "model.safetensors")
    weights["model.norm.weight"][:] = np.float32(3e38)
    weights["lm_head.weight"] *= np.float32(1e3)
    save_file(weights, model / "model.safetensors")
    with pytest.raises(SourceError, match="own logits are not finite on held-out text"):
        baked(model, tmp_path / "a")
