"""What a group costs is what a whole model with that one group replaced says, and it does not depend on who measures beside it."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray
from small_text import SMALL, Replaced

from arctool.bake.budget import sensitivity
from arctool.bake.budget.allocation import Group, grouped
from arctool.bake.budget.sensitivity import BROKEN, Check, Trial, measure
from arctool.bake.pipeline import bake_in_memory
from arctool.bake.recipe import Recipe
from arctool.bake.source.checkpoint import Checkpoint, open_checkpoint
from arctool.errors import SourceError
from arctool.kernels.registry import default_registry
from arctool.quant.tensor import DenseTensor
from arctool.run.evaluate import logits
from arctool.run.models.spec import Role
from arctool.run.weights import WeightSource, load_model


def log_softmax(rows: NDArray[np.float32]) -> NDArray[np.float64]:
    wide = rows.astype(np.float64)
    wide -= wide.max(axis=1, keepdims=True)
    return wide - np.log(np.exp(wide).sum(axis=1, keepdims=True))


def divergence(base: WeightSource, other: WeightSource, windows: tuple[tuple[int, ...], ...]) -> float:
    """Mean Σ p (ln p − ln q) over all tokens, of two models that the engine runs."""
    models = [load_model(source, default_registry()) for source in (base, other)]
    parts = []
    for window in windows:
        p, q = (log_softmax(logits(model, window)) for model in models)
        parts.append((np.exp(p) * (p - q)).sum(axis=1))
    return float(np.concatenate(parts).mean())


def groups_of(checkpoint: Checkpoint, weights: int = 1) -> tuple[Group, ...]:
    linear = [spec for spec in checkpoint.specs if spec.role is Role.LINEAR]
    return grouped(linear, checkpoint.config.num_layers, weights)


def unknown(groups: tuple[Group, ...]) -> NDArray[np.float64]:
    return np.full(len(groups), np.nan)


def run(
    base: WeightSource, stored: WeightSource, groups: tuple[Group, ...], known: NDArray[np.float64] | None = None, jobs: int = 2
) -> tuple[NDArray[np.float64], list[NDArray[np.float64]]]:
    """(the effects, what was kept after each wave)."""
    kept: list[NDArray[np.float64]] = []
    with ThreadPoolExecutor(jobs) as pool:
        trial = Trial(base, stored, SMALL.measured, pool)
        found = measure(trial, groups, unknown(groups) if known is None else known, lambda e: kept.append(e.copy()), lambda _: None)
    return found, kept


def test_the_effect_of_a_group_is_the_divergence_of_the_model_that_has_only_it_replaced(tiny_checkpoint: Path) -> None:
    with open_checkpoint(str(tiny_checkpoint)) as checkpoint:
        stored = bake_in_memory(checkpoint, Recipe.uniform("qtip3"))
        groups = groups_of(checkpoint)
        effects, _ = run(checkpoint, stored, groups)
        for group, effect in zip(groups, effects, strict=True):
            alone = Replaced(checkpoint, {key: stored.weight(key) for key in group.keys})
            assert effect == pytest.approx(divergence(checkpoint, alone, SMALL.measured), rel=2e-3), group.keys
    assert len(set(effects)) == len(groups) >= 14
    assert min(effects) > 1e-5


def test_layers_of_one_group_are_replaced_together(tiny_llama: Path) -> None:
    with open_checkpoint(str(tiny_llama)) as checkpoint:
        stored = bake_in_memory(checkpoint, Recipe.uniform("qtip3"))
        singles = groups_of(checkpoint)
        pair = (Group((*singles[0].specs, *singles[1].specs)),)
        (effect,), _ = run(checkpoint, stored, pair)
        both = Replaced(checkpoint, {key: stored.weight(key) for key in pair[0].keys})
        assert len(pair[0].keys) == 2
        assert effect == pytest.approx(divergence(checkpoint, both, SMALL.measured), rel=2e-3)


def test_waves_and_threads_and_what_was_known_before_change_no_bit(
    tiny_checkpoints: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    with open_checkpoint(str(tiny_checkpoints["qwen2"])) as checkpoint:
        stored = bake_in_memory(checkpoint, Recipe.uniform("qtip2-v4"))
        groups = groups_of(checkpoint)
        whole, kept = run(checkpoint, stored, groups, jobs=1)
        assert [effects.tobytes() for effects in kept] == [whole.tobytes()]
        assert checkpoint.config.num_layers == 3
        monkeypatch.setattr(sensitivity, "WAVE", 1)
        waves, kept = run(checkpoint, stored, groups, jobs=3)
        assert waves.tobytes() == whole.tobytes()
        assert [int(np.isfinite(effects).sum()) for effects in kept] == [7, 14, 21]
        again, later = run(checkpoint, stored, groups, known=kept[0])
        assert again.tobytes() == whole.tobytes()
        assert [int(np.isfinite(effects).sum()) for effects in later] == [14, 21]
        hole = np.where(np.arange(21) == 9, np.nan, whole + 1)
        filled, _ = run(checkpoint, stored, groups, known=hole)
        assert np.flatnonzero(filled == whole).tolist() == [9]
        monkeypatch.setattr(sensitivity, "CHUNK", 16)
        assert run(checkpoint, stored, groups)[0] == pytest.approx(whole, rel=1e-6)
        done, none = run(checkpoint, stored, groups, known=whole)
        assert (done.tobytes(), none) == (whole.tobytes(), [])


def test_a_group_that_breaks_the_model_counts_as_worse_than_any_that_does_not(tiny_llama: Path) -> None:
    with open_checkpoint(str(tiny_llama)) as checkpoint:
        groups = groups_of(checkpoint)
        (key,) = groups[9].keys
        bad = checkpoint.weight(key).dense().copy()
        bad[0] = np.inf
        stored = Replaced(checkpoint, {key: DenseTensor(bad)})
        effects, _ = run(checkpoint, stored, groups)
    assert effects[9] == BROKEN
    assert np.abs(np.delete(effects, 9)).max() == 0


def test_a_model_whose_own_predictions_are_no_numbers_is_refused(tiny_llama: Path) -> None:
    with open_checkpoint(str(tiny_llama)) as checkpoint, ThreadPoolExecutor(1) as pool:
        gains = np.full(64, np.nan, np.float32)
        broken = Replaced(checkpoint, {"model.norm": DenseTensor(gains)})
        with pytest.raises(SourceError, match="the unquantised model's own logits are not finite on held-out text"):
            run(broken, checkpoint, groups_of(checkpoint))
        with pytest.raises(SourceError, match="not finite on held-out text"):
            Check(broken, SMALL.checked, pool, lambda _: None).divergence(checkpoint, "x")


def test_a_check_says_how_far_a_whole_model_is_and_reads_the_source_once(tiny_checkpoint: Path) -> None:
    said: list[str] = []
    with open_checkpoint(str(tiny_checkpoint)) as checkpoint, ThreadPoolExecutor(2) as pool:
        check = Check(checkpoint, SMALL.checked, pool, said.append)
        assert said == []
        for name in ("qtip2-v4", "qtip4"):
            stored = bake_in_memory(checkpoint, Recipe.uniform(name))
            expected = divergence(checkpoint, stored, SMALL.checked)
            assert check.divergence(stored, name) == pytest.approx(expected, rel=2e-3)
        assert check.divergence(checkpoint, "itself") == 0
        layers = checkpoint.config.num_layers
    for who in ("the unquantised model", "qtip2-v4", "qtip4", "itself"):
        of_it = [line for line in said if line.startswith(f"checking {who}: ")]
        assert of_it == [f"checking {who}: layer {i + 1} of {layers}" for i in range(layers)]


def test_a_stored_model_that_is_broken_is_infinitely_far(tiny_llama: Path) -> None:
    with open_checkpoint(str(tiny_llama)) as checkpoint, ThreadPoolExecutor(1) as pool:
        weight = np.full((64, 64), np.nan, np.float32)
        broken = Replaced(checkpoint, {"model.layers.0.self_attn.q_proj": DenseTensor(weight)})
        assert Check(checkpoint, SMALL.checked, pool, lambda _: None).divergence(broken, "x") == np.inf
