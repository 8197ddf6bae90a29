"""Bits to groups: never over the budget, as good as trying everything, and never more for who feels less. Sizes are what is stored."""

from __future__ import annotations

import itertools
import re
from pathlib import Path

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from locations import ROOT

from arctool.bake.budget.allocation import (
    FLOOR_SHARE,
    Group,
    allocate,
    floored,
    grouped,
    lowest_from,
    predicted,
    uniform_bits,
    uniform_rung,
)
from arctool.bake.choices import CHOICES, LADDER, misfit, stored_bits
from arctool.bake.pipeline import bake_in_memory
from arctool.bake.recipe import Recipe, Rule
from arctool.bake.source.checkpoint import open_checkpoint
from arctool.quant.bf16 import from_bf16, to_bf16
from arctool.quant.ggml import GGML_TYPES, Q8_0
from arctool.quant.tensor import GgmlTensor
from arctool.run.models.spec import Role, TensorSpec

Table = list[list[float]]
Sizes = list[list[int]]


@st.composite
def problems(draw: st.DrawFn) -> tuple[Table, Sizes]:
    """Up to five groups of up to four choices, each dearer and better than the one before."""
    effects, sizes = [], []
    for _ in range(draw(st.integers(1, 5))):
        steps = draw(st.lists(st.integers(1, 40), min_size=1, max_size=4))
        gains = draw(st.lists(st.floats(1e-4, 10), min_size=len(steps), max_size=len(steps)))
        sizes.append([sum(steps[: i + 1]) for i in range(len(steps))])
        effects.append([sum(gains[i:]) for i in range(len(gains))])
    return effects, sizes


def least_by_trying(effects: Table, sizes: Sizes, budget: int) -> float:
    """The smallest sum of effects of all assignments that fit."""
    every = itertools.product(*(range(len(row)) for row in sizes))
    fitting = (choice for choice in every if sum(row[j] for row, j in zip(sizes, choice, strict=True)) <= budget)
    return min(sum(row[j] for row, j in zip(effects, choice, strict=True)) for choice in fitting)


def total(table: Table | Sizes, choice: tuple[int, ...]) -> float:
    return sum(row[j] for row, j in zip(table, choice, strict=True))


@given(problems(), st.integers(0, 200))
@example(([[2.0, 1.0], [2.0, 1.0]], [[1, 3], [1, 3]]), 1)
def test_an_allocation_fits_and_is_as_good_as_trying_everything(problem: tuple[Table, Sizes], above: int) -> None:
    effects, sizes = problem
    budget = sum(row[0] for row in sizes) + above
    found = allocate(effects, sizes, budget)
    assert total(sizes, found) <= budget
    assert total(effects, found) == pytest.approx(least_by_trying(effects, sizes, budget), rel=1e-9)


@given(problems(), st.integers(0, 150), st.integers(0, 50))
def test_a_larger_budget_never_does_worse(problem: tuple[Table, Sizes], above: int, more: int) -> None:
    effects, sizes = problem
    budget = sum(row[0] for row in sizes) + above
    less, larger = (total(effects, allocate(effects, sizes, room)) for room in (budget, budget + more))
    assert larger <= less * (1 + 1e-12)


@given(
    st.lists(st.floats(1e-6, 1.0), min_size=2, max_size=12),
    st.integers(0, 11),
    st.integers(0, 11),
    st.floats(0.0, 1.0),
    st.integers(1, 10**6),
)
def test_a_group_with_a_hundred_times_the_effect_never_gets_fewer_bits_than_another_of_its_size(
    kls: list[float], strong: int, weak: int, share: float, scale: int
) -> None:
    strong, weak = strong % len(kls), weak % len(kls)
    if strong == weak:
        return
    kls[strong] = 100 * kls[weak]
    row = [round(bits * scale) for bits in (2, 2.25, 3, 4, 8.5, 16)]
    errors = list(LADDER.values())
    effects = [[kl * error for error in errors] for kl in kls]
    low, high = len(kls) * row[0], len(kls) * row[-1]
    found = allocate(effects, [row] * len(kls), int(low + share * (high - low)))
    assert row[found[strong]] >= row[found[weak]]


def test_a_budget_below_the_least_size_is_refused() -> None:
    with pytest.raises(ValueError, match="the least size is 12 bits, the budget 11"):
        allocate([[1.0], [1.0]], [[5], [7]], 11)
    assert allocate([[1.0], [1.0]], [[5], [7]], 12) == (0, 0)


def test_of_a_large_model_nearly_every_bit_is_spent_and_nearly_as_well_as_if_bits_could_be_split() -> None:
    """Against the bound of a continuous relaxation, whose multiplier is found here by bisection."""
    random = np.random.default_rng(5)
    weights = random.choice([196_608, 589_824, 1_769_472], 200)
    kls = random.lognormal(-7, 1.5, 200)
    rates = np.array([2.05, 2.3, 3.05, 4.05, 8.5, 16])
    errors = np.array(list(LADDER.values()))
    sizes = [[int(rate * count) for rate in rates] for count in weights]
    effects = [[float(kl * error / errors[0]) for error in errors] for kl in kls]
    budget = int(2.5 * weights.sum())
    found = allocate(effects, sizes, budget)
    assert 0.998 * budget < total(sizes, found) <= budget
    low, high = 0.0, 1.0
    for _ in range(100):
        price = (low + high) / 2
        picked = np.argmin(np.array(effects) + price * np.array(sizes), axis=1)
        spent = np.take_along_axis(np.array(sizes), picked[:, None], 1).sum()
        low, high = (price, high) if spent > budget else (low, price)
    bound = (np.array(effects) + high * np.array(sizes)).min(axis=1).sum() - high * budget
    assert bound <= total(effects, found) < 1.01 * bound
    assert total(effects, found) < 0.6 * sum(row[0] for row in effects)


def test_the_errors_of_the_ladder_are_those_of_the_readme_and_of_gaussian_rows() -> None:
    rows = re.findall(r"^\| `([\w.-]+)` \|.*\| (0\.\d+) \| [\d.]+ \| [\d.]+ \|$", (ROOT / "README.md").read_text(), re.MULTILINE)
    readme = {name: float(error) for name, error in rows}
    for name in ("qtip2-v4", "qtip2.25-v4", "qtip3", "qtip4"):
        assert LADDER[name] == readme[name]
    values = np.random.default_rng(1).standard_normal((64, 4096)).astype(np.float32)
    for name, back in (("q8_0", Q8_0.decode(Q8_0.encode(values, "x"), 4096)), ("bf16", from_bf16(to_bf16(values)))):
        assert LADDER[name] == pytest.approx(float(((back - values) ** 2).sum() / (values**2).sum()), rel=0.05)


def test_what_a_layer_is_counted_at_is_what_its_tensor_says_it_stores(tiny_llama: Path) -> None:
    with open_checkpoint(str(tiny_llama)) as checkpoint:
        linear = [spec for spec in checkpoint.specs if spec.role is Role.LINEAR]
        # Its widths are 64 and 96: no K-quant fits, and `as-is` is a type by another name.
        names = [name for name in CHOICES if name != "as-is" and not misfit(name, 64)]
        assert len(names) == len(CHOICES) - 6 == 17
        half = len(names) // 2
        models = []
        for part in (names[:half], names[half:]):
            rules = tuple(Rule("test", name, spec.key) for name, spec in zip(part, linear, strict=False))
            models.append((part, bake_in_memory(checkpoint, Recipe("bf16", rules))))
    for part, model in models:
        for name, spec in zip(part, linear, strict=False):
            assert stored_bits(name, spec.shape) == model.weight(spec.key).stored_bits, name


def test_a_k_quant_is_counted_at_its_blocks() -> None:
    weights = np.random.default_rng(0).standard_normal((3, 512)).astype(np.float32)
    for name in ("q2k", "q3k", "q4k", "q5k", "q6k"):
        assert stored_bits(name, (3, 512)) == GgmlTensor.encoded(GGML_TYPES[name], weights, name).stored_bits


def layer_specs(layers: int, hidden: int = 64, inner: int = 96) -> list[TensorSpec]:
    """The seven matrices of each of `layers` decoder layers."""
    shapes = {"self_attn.q_proj": (hidden, hidden), "self_attn.k_proj": (32, hidden), "self_attn.v_proj": (32, hidden)}
    shapes |= {"self_attn.o_proj": (hidden, hidden), "mlp.gate_proj": (inner, hidden), "mlp.up_proj": (inner, hidden)}
    shapes |= {"mlp.down_proj": (hidden, inner)}
    return [TensorSpec(f"model.layers.{i}.{name}.weight", shape, Role.LINEAR, i) for i in range(layers) for name, shape in shapes.items()]


def test_edges_are_measured_tensor_by_tensor_and_the_middle_in_pairs_with_v_by_itself() -> None:
    groups = grouped(layer_specs(6), 6, 10**9)
    by_layer = [[[key.rpartition(".")[2] for key in g.keys] for g in groups if g.layer == layer] for layer in range(6)]
    alone = [["q_proj"], ["k_proj"], ["v_proj"], ["o_proj"], ["gate_proj"], ["up_proj"], ["down_proj"]]
    paired = [["q_proj", "k_proj"], ["v_proj"], ["o_proj"], ["gate_proj", "up_proj"], ["down_proj"]]
    assert by_layer == [alone, alone, paired, paired, alone, alone]
    assert sorted(key for g in groups for key in g.keys) == sorted(spec.key for spec in layer_specs(6))


def test_a_tensor_that_is_a_large_share_of_all_is_measured_by_itself() -> None:
    def names(weights: int) -> list[tuple[str, ...]]:
        return [tuple(key.rpartition(".")[2] for key in g.keys) for g in grouped(layer_specs(6), 6, weights) if g.layer == 2]

    assert ("gate_proj", "up_proj") in names(96 * 64 * 100)
    assert ("gate_proj",) in names(96 * 64 * 100 - 1)
    assert ("q_proj", "k_proj") in names(96 * 64 * 100 - 1)


def test_a_width_without_a_rung_gets_the_next_one_up_and_counts_so() -> None:
    odd = Group((TensorSpec("model.layers.0.mlp.down_proj.weight", (64, 90), Role.LINEAR, 0),))
    even = Group((TensorSpec("model.layers.0.mlp.up_proj.weight", (96, 64), Role.LINEAR, 0),))
    assert odd.ladder == ("qtip3", "qtip4", "bf16")
    assert [lowest_from(name, odd) for name in LADDER] == ["qtip3", "qtip3", "qtip3", "qtip4", "bf16", "bf16"]
    # Streams of 3 · 90 bits in 36 bytes and of 2 · 64 in 16, a scale a row, a sign for each input and output.
    assert uniform_bits("qtip2-v4", (odd, even)) == 8 * (64 * (36 + 4) + 8 + 12 + 96 * (16 + 4) + 12 + 8)
    least = uniform_bits("qtip2-v4", (odd, even))
    assert uniform_rung((odd, even), least - 1) is None
    assert uniform_rung((odd, even), least) == "qtip2-v4"
    assert uniform_rung((odd, even), uniform_bits("qtip4", (odd, even))) == "qtip4"
    assert uniform_rung((odd, even), 10**9) == "bf16"


def test_effects_lost_in_noise_count_as_a_small_share_of_the_median_weight_for_weight() -> None:
    big, small = (
        Group((TensorSpec(f"model.layers.0.mlp.{n}.weight", (rows, 64), Role.LINEAR, 0),)) for n, rows in (("up_proj", 96), ("x", 32))
    )
    assert floored([3.0, 1.0], [big, small]) == pytest.approx([3.0, 1.0])
    raised = floored([3.0, -1e-9, 3.0], [big, small, big])
    assert raised == pytest.approx([3.0, FLOOR_SHARE * 1.0, 3.0])
    assert min(floored([0.0, -1.0], [big, small])) > 0


@settings(max_examples=20)
@given(st.floats(1e-6, 10))
def test_the_effect_at_another_rung_follows_the_errors(kl: float) -> None:
    group = Group((TensorSpec("model.layers.0.mlp.down_proj.weight", (64, 90), Role.LINEAR, 0),))
    found = predicted(group, kl, "qtip3")
    assert found == pytest.approx([kl, kl * 0.0047 / 0.0181, kl * 2.8e-6 / 0.0181])
