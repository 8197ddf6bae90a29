"""What a budget asks of a model: the range that is possible, what a recipe has fixed, and the answer as rules by exact names."""

from __future__ import annotations

from pathlib import Path

import pytest

from arctool.bake.budget.need import Need, check_bpw
from arctool.bake.choices import LADDER
from arctool.bake.recipe import RecipeFile, Rule, read_recipe
from arctool.bake.source.checkpoint import open_checkpoint
from arctool.errors import UsageError
from arctool.run.models.spec import Role, TensorSpec

LAYERS = 4
NAMES = ("self_attn.v_proj", "mlp.down_proj")


def model(in_features: int = 64) -> tuple[TensorSpec, ...]:
    """Four layers of two square matrices, an embedding and a head: 8 groups of 4096 weights."""
    table = (512, in_features)
    specs = [TensorSpec("model.embed_tokens.weight", table, Role.EMBEDDING), TensorSpec("lm_head.weight", table, Role.HEAD)]
    specs += [TensorSpec(f"model.layers.{i}.{name}.weight", (64, in_features), Role.LINEAR, i) for i in range(LAYERS) for name in NAMES]
    return tuple(specs)


def bits(rate: float) -> float:
    """Stored bits a weight of a 64 × 64 rung: the streams, 32 bits a row, a sign for each input and output."""
    return rate + 32 / 64 + 128 / 4096


def need(bpw: float, pins: RecipeFile | None = None) -> Need:
    return Need.of(model(), LAYERS, pins or RecipeFile(), bpw)


@pytest.mark.parametrize(("bpw", "name"), [(bits(2), "qtip2-v4"), (bits(3) - 1e-6, "qtip2.25-v4"), (bits(3), "qtip3"), (bits(4), "qtip4")])
def test_the_uniform_bake_is_the_highest_rung_within_the_budget(bpw: float, name: str) -> None:
    found = need(bpw)
    assert found.rung == name
    assert found.uniform == (name,) * 8
    assert found.rate(found.uniform) <= bpw


@pytest.mark.parametrize(("bpw", "name"), [(8.5, "q8_0"), (16.0, "bf16")])
def test_high_budgets_reach_what_is_no_trellis(bpw: float, name: str) -> None:
    assert need(bpw).rung == name
    assert need(bpw).rate((name,) * 8) == bpw


@pytest.mark.parametrize("bpw", [2.0, bits(2) - 1e-6, 16.001, 400.0])
def test_a_budget_outside_the_range_is_refused_with_the_range(bpw: float) -> None:
    with pytest.raises(UsageError) as caught:
        need(bpw)
    assert str(caught.value) == (
        f"--bpw: expected 2.532 (qtip2-v4 in all linear layers) to 16.000 (bf16) bits a weight of this model, scales and signs included; "
        f"found {bpw:g}"
    )
    assert need(2.532).rung == "qtip2-v4"


@pytest.mark.parametrize("bpw", [float("nan"), float("inf"), float("-inf"), 0.0, -2.5])
def test_what_is_no_rate_is_refused(bpw: float) -> None:
    with pytest.raises(UsageError, match=f"--bpw: expected a positive number of bits a weight, found {bpw:g}"):
        check_bpw(bpw)


def test_what_a_recipe_names_is_counted_and_not_allocated(tmp_path: Path) -> None:
    (tmp_path / "r.yml").write_text("3: {isq: qtip4}\nhead: bf16\nrules: [{match: '*.0.*.v_proj', isq: q8_0}]")
    pins = read_recipe(tmp_path / "r.yml")
    # Of eight matrices two are qtip4 and one is q8_0; five at qtip2-v4 are the least.
    least = (5 * bits(2) + 2 * bits(4) + 8.5) / 8
    found = need(least + 0.4, pins)
    assert [group.keys for group in found.groups] == [
        ("model.layers.0.mlp.down_proj",),
        *((f"model.layers.{layer}.{name}",) for layer in (1, 2) for name in NAMES),
    ]
    assert found.rung == "qtip2.25-v4"
    assert found.weights == 8 * 4096
    assert found.rate(("qtip2-v4",) * 5) == pytest.approx(least)
    recipe = found.recipe(found.allocated([1.0, 1e-3, 1e-3, 1e-3, 1e-3]))
    by_key = {spec.key: recipe.choose(spec, LAYERS).rung for spec in model()}
    assert by_key["model.layers.0.self_attn.v_proj"] == "q8_0"
    assert by_key["model.layers.3.mlp.down_proj"] == by_key["model.layers.3.self_attn.v_proj"] == "qtip4"
    assert (by_key["lm_head"], by_key["model.embed_tokens"]) == ("bf16", "q8_0")
    assert by_key["model.layers.0.mlp.down_proj"] in ("qtip3", "qtip4")
    with pytest.raises(UsageError, match=r"expected 3\.\d+ \(qtip2-v4 in all linear layers beside what the recipe says\)"):
        need(least - 0.001, pins)


def test_a_recipe_that_leaves_nothing_to_allocate_is_refused() -> None:
    pins = RecipeFile(rules=(Rule("r.yml: rules[0]", "qtip4", "*proj"),))
    with pytest.raises(UsageError, match="--bpw: the recipe says what every linear layer gets, nothing is left to allocate"):
        need(4, pins)


def test_a_recipe_that_names_nothing_of_the_model_is_refused() -> None:
    with pytest.raises(UsageError, match=r"r.yml: rules\[0\]: matches no tensor"):
        need(4, RecipeFile(rules=(Rule("r.yml: rules[0]", "qtip4", "*.z_proj"),)))


def test_the_answer_is_a_rule_by_exact_name_for_every_layer_that_differs_and_keeps_to_the_budget() -> None:
    found = need(3.0)
    names = found.allocated([1.0, *[1e-4] * 7])
    assert names[0] != found.rung
    assert found.rate(names) <= 3.0
    recipe = found.recipe(names)
    assert names.count(recipe.default) == max(map(names.count, names))
    differing = {group.keys[0]: name for group, name in zip(found.groups, names, strict=True) if name != recipe.default}
    assert 0 < len(differing) < 8
    assert {rule.match: rule.rung for rule in recipe.rules} == differing
    assert all(rule.first is None for rule in recipe.rules)
    given = {spec.key: recipe.choose(spec, LAYERS).rung for spec in model() if spec.role is Role.LINEAR}
    assert [given[group.keys[0]] for group in found.groups] == list(names)


def test_where_nothing_promises_more_the_uniform_bake_is_the_answer() -> None:
    rates = {"qtip2-v4": bits(2), "qtip3": bits(3), "qtip4": bits(4), "q8_0": 8.5, "bf16": 16.0}
    # (At 2.25 bits a row of 64 weights fills 18 of 20 bytes: half the layers at 2 and half at 3 are better.)
    assert rates.keys() == LADDER.keys() - {"qtip2.25-v4"}
    for name, rate in rates.items():
        found = need(rate)
        assert found.rung == name
        assert found.allocated([1.0] * 8) == found.uniform


def test_a_layer_whose_width_takes_only_some_rungs_is_uniform_at_the_next_one_up() -> None:
    specs = [spec if "down" not in spec.name else TensorSpec(spec.name, (64, 90), spec.role, spec.layer) for spec in model()]
    found = Need.of(specs, LAYERS, RecipeFile(), 3.4)
    assert found.rung == "qtip2.25-v4"
    recipe = found.recipe(found.uniform)
    given = {spec.key: recipe.choose(spec, LAYERS) for spec in specs if spec.role is Role.LINEAR}
    assert {key: choice.rung for key, choice in given.items()} == {key: "qtip3" if "down" in key else "qtip2.25-v4" for key in given}
    assert not any(choice.fallback for choice in given.values())


def test_as_is_is_no_obstacle_to_a_budget_unless_it_is_for_a_linear_layer(tiny_llama: Path) -> None:
    with open_checkpoint(str(tiny_llama)) as checkpoint:
        specs, layers = checkpoint.specs, checkpoint.config.num_layers
    vocabulary = RecipeFile(rules=(Rule("r: embedding", "as-is", "model.embed_tokens"), Rule("r: head", "as-is", "lm_head")))
    assert Need.of(specs, layers, vocabulary, 3.0).pinned == 0
    with pytest.raises(UsageError, match="r: rules: as-is says nothing of bits"):
        Need.of(specs, layers, RecipeFile(rules=(Rule("r: rules", "as-is", "*.v_proj"),)), 3.0)
