"""A recipe says for every tensor what it becomes and why; anything in the file that would be ignored is refused by name."""

from __future__ import annotations

from pathlib import Path

import pytest

from arctool.bake.recipe import Choice, Recipe, Rule, load_recipe
from arctool.errors import UsageError
from arctool.quant.codebooks import RUNGS
from arctool.run.models.spec import Role, TensorSpec

LAYERS = 4


def linear(layer: int, module: str, in_features: int = 64) -> TensorSpec:
    return TensorSpec(f"model.layers.{layer}.{module}.weight", (32, in_features), Role.LINEAR, layer)


EMBEDDING = TensorSpec("model.embed_tokens.weight", (512, 64), Role.EMBEDDING)
HEAD = TensorSpec("lm_head.weight", (512, 64), Role.HEAD)


def model(in_features: int = 64) -> tuple[TensorSpec, ...]:
    """Four layers of v_proj (with bias), down_proj and a norm, an embedding and a head."""
    specs = [EMBEDDING]
    for layer in range(LAYERS):
        specs += [
            linear(layer, "self_attn.v_proj", in_features),
            TensorSpec(f"model.layers.{layer}.self_attn.v_proj.bias", (32,), Role.BIAS, layer),
            linear(layer, "mlp.down_proj", in_features),
            TensorSpec(f"model.layers.{layer}.input_layernorm.weight", (64,), Role.NORM, layer),
            TensorSpec(f"model.layers.{layer}.mlp.gate.weight", (4, 64), Role.ROUTER, layer),
        ]
    return (*specs, HEAD)


def recipe(tmp_path: Path, text: str) -> Recipe:
    (tmp_path / "recipe.yaml").write_text(text)
    return load_recipe(tmp_path / "recipe.yaml", "qtip2b")


def chosen(found: Recipe, module: str) -> list[str]:
    """The rungs of `module` in layers 0 to 3."""
    return [found.choose(linear(layer, module), LAYERS).rung for layer in range(LAYERS)]


def vocabulary(found: Recipe) -> tuple[str, str]:
    """What embedding and head get."""
    return found.choose(EMBEDDING, LAYERS).rung, found.choose(HEAD, LAYERS).rung


def refusal(tmp_path: Path, text: str, specs: tuple[TensorSpec, ...] | None = None) -> str:
    with pytest.raises(UsageError) as caught:
        recipe(tmp_path, text).check(specs or model())
    message = str(caught.value)
    assert "recipe.yaml: " in message
    assert "\n" not in message
    assert len(message) < 1000
    return message


@pytest.mark.parametrize("name", [*RUNGS, "q8_0", "bf16"])
def test_a_uniform_recipe_gives_every_linear_layer_its_choice_and_the_vocabulary_8_bits_unless_nothing_is_quantised(name: str) -> None:
    found = Recipe.uniform(name)
    found.check(model())
    by_role = {role: {found.choose(spec, LAYERS).rung for spec in model() if spec.role is role} for role in Role}
    table = "bf16" if name == "bf16" else "q8_0"
    kept = {role: {"bf16"} for role in (Role.NORM, Role.BIAS, Role.ROUTER)}
    assert by_role == {Role.LINEAR: {name}, Role.EMBEDDING: {table}, Role.HEAD: {table}, **kept}


@pytest.mark.parametrize("name", ["bf16", "q8_0", *RUNGS])
def test_embedding_and_head_take_any_choice_by_their_keys(name: str, tmp_path: Path) -> None:
    for text, expected in (
        (f"embedding: {name}", (name, "q8_0")),
        (f"head: {name}", ("q8_0", name)),
        (f"embedding: {name}\nhead: qtip3", (name, "qtip3")),
    ):
        found = recipe(tmp_path, text)
        found.check(model())
        assert vocabulary(found) == expected
        assert chosen(found, "mlp.down_proj") == ["qtip2b"] * 4


def test_what_is_for_all_layers_does_not_touch_embedding_and_head(tmp_path: Path) -> None:
    text = "default: {isq: qtip4}\n0-4: {isq: qtip3}\nfallback: qtip3\nrules: [{match: '*', isq: qtip2}, {match: '**', isq: qtip2b}]"
    found = recipe(tmp_path, text)
    found.check(model())
    assert vocabulary(found) == ("q8_0", "q8_0")
    assert vocabulary(recipe(tmp_path, "rules: [{match: '*', skip: true}]")) == ("q8_0", "q8_0")
    assert vocabulary(recipe(tmp_path, "default: {isq: bf16}\n0-4: {isq: qtip3}")) == ("bf16", "bf16")
    assert vocabulary(recipe(tmp_path, "default: {isq: bf16}\nembedding: q8_0")) == ("q8_0", "bf16")


def test_a_rule_that_names_them_wins_over_their_keys_wherever_it_stands(tmp_path: Path) -> None:
    text = "rules: [{match: '*embed*', isq: qtip4b}, {match: lm_head.weight, skip: true}]\nembedding: qtip3\nhead: qtip3\n"
    found = recipe(tmp_path, text)
    found.check(model())
    assert vocabulary(found) == ("qtip4b", "bf16")
    assert found.choose(EMBEDDING, LAYERS).reason == "recipe.yaml: rules[0] '*embed*'"


def test_a_recipe_of_exact_keys_needs_no_file() -> None:
    """What an allocator builds."""
    rules = [Rule("budget", "qtip4b", spec.key) for spec in model() if spec.role in (Role.LINEAR, Role.EMBEDDING)]
    found = Recipe("qtip2", tuple(rules))
    found.check(model())
    assert {found.choose(spec, LAYERS).rung for spec in model() if spec.role in (Role.LINEAR, Role.EMBEDDING)} == {"qtip4b"}
    assert found.choose(HEAD, LAYERS) == Choice("q8_0", "default of the head")


@pytest.mark.parametrize(
    ("hidden", "text", "expected", "reason"),
    [
        (36, "", "bf16", "fallback: 36 inputs are not a multiple of q8_0's block of 32"),
        (36, "embedding: qtip2-v4", "qtip2-v4", "recipe.yaml: embedding"),
        (34, "embedding: qtip2-v4\nfallback: qtip2b", "bf16", "fallback: 34 inputs are not a multiple of qtip2-v4's V=4"),
        (96, "", "q8_0", "default of the embedding"),
    ],
)
def test_a_vocabulary_that_its_choice_cannot_take_stays_bf16_and_says_so(
    hidden: int, text: str, expected: str, reason: str, tmp_path: Path
) -> None:
    spec = TensorSpec("model.embed_tokens.weight", (512, hidden), Role.EMBEDDING)
    choice = recipe(tmp_path, text or "fallback: qtip2b").choose(spec, LAYERS)
    assert (choice.rung, choice.reason) == (expected, reason)
    assert choice.fallback == reason.startswith("fallback")


def test_the_head_of_a_tied_model_is_refused_by_name(tmp_path: Path) -> None:
    tied = model()[:-1]
    for text in ("head: qtip4b", "rules: [{match: lm_head, isq: qtip4b}]"):
        message = refusal(tmp_path, text, tied)
        assert "the model has no lm_head: its head is its embedding; say embedding: qtip4b" in message
    recipe(tmp_path, "embedding: qtip4b").check(tied)


def test_an_unknown_rung_on_the_command_line_is_refused_with_the_known_ones() -> None:
    with pytest.raises(UsageError, match=r"--isq: unknown rung 'qtip9'.*qtip4b.*bf16"):
        Recipe.uniform("qtip9")


def test_the_end_of_a_range_is_exclusive_and_a_number_is_one_layer(tmp_path: Path) -> None:
    found = recipe(tmp_path, "0-2: {isq: qtip4b}\n3: {isq: bf16}\n")
    assert chosen(found, "mlp.down_proj") == ["qtip4b", "qtip4b", "qtip2b", "bf16"]


def test_the_file_default_wins_over_the_command_line(tmp_path: Path) -> None:
    assert chosen(recipe(tmp_path, "default: {isq: qtip3b}"), "mlp.down_proj") == ["qtip3b"] * 4


def test_later_ranges_win_over_earlier_and_rules_over_ranges(tmp_path: Path) -> None:
    text = """
    rules:
      - {match: "*.v_proj", layers: "0-3", isq: qtip4b}
      - {match: "model.layers.1.*_proj", skip: true}
      - {match: "*.v_proj", layers: 2, isq: qtip3b}
    0-4: {isq: qtip3b}
    1-3: {isq: qtip2b}
    """
    found = recipe(tmp_path, text)
    found.check(model())
    assert chosen(found, "self_attn.v_proj") == ["qtip4b", "bf16", "qtip3b", "qtip3b"]
    assert chosen(found, "mlp.down_proj") == ["qtip3b", "bf16", "qtip2b", "qtip3b"]


def test_what_a_recipe_is_does_not_tell_where_it_was_written(tmp_path: Path) -> None:
    text = '0-2: {isq: qtip4}\nrules: [{match: "*.v_proj.weight", layers: 3, skip: true}]\n'
    assert recipe(tmp_path, text).to_json() == {
        "default": "qtip2b",
        "fallback": "auto",
        "vocabulary": "q8_0",
        "rules": [{"rung": "qtip4", "match": "*", "first": 0, "end": 2}, {"rung": "bf16", "match": "*.v_proj", "first": 3, "end": 4}],
    }


def test_a_choice_says_which_line_made_it(tmp_path: Path) -> None:
    found = recipe(tmp_path, 'rules: [{match: "*.v_proj", isq: qtip4b}]\n')
    assert found.choose(linear(0, "mlp.down_proj"), LAYERS) == Choice("qtip2b", "default")
    assert found.choose(linear(0, "self_attn.v_proj"), LAYERS).reason == "recipe.yaml: rules[0] '*.v_proj'"
    assert found.choose(EMBEDDING, LAYERS) == Choice("q8_0", "default of the embedding")
    assert found.choose(model()[4], LAYERS) == Choice("bf16", "norm is not quantised")


@pytest.mark.parametrize(
    ("rung", "fallback", "in_features", "expected"),
    [
        ("qtip2-v4", "bf16", 64, "qtip2-v4"),
        ("qtip2-v4", "bf16", 66, "bf16"),
        ("qtip2-v4", "qtip3", 66, "qtip3"),
        ("qtip2-v4", "qtip3b", 66, "qtip3b"),
        ("qtip2-v4", "qtip3b", 65, "bf16"),
        ("qtip2b", "bf16", 65, "bf16"),
        ("qtip3", "bf16", 65, "qtip3"),
        ("q8_0", "bf16", 64, "q8_0"),
        ("q8_0", "bf16", 48, "bf16"),
        ("q8_0", "qtip2-v4", 48, "qtip2-v4"),
        ("qtip2-v4", "q8_0", 66, "bf16"),
    ],
)
def test_a_width_that_the_rung_cannot_take_falls_back_and_says_so(
    rung: str, fallback: str, in_features: int, expected: str, tmp_path: Path
) -> None:
    found = recipe(tmp_path, f"default: {{isq: {rung}}}\nfallback: {fallback}\n")
    choice = found.choose(linear(0, "mlp.down_proj", in_features), LAYERS)
    assert choice.rung == expected
    assert (choice.reason == "default") == (expected == rung)
    assert choice.instead_of == (None if expected == rung else rung)
    if expected != rung:
        unit = "block of " if rung == "q8_0" else "V="
        assert choice.reason.startswith(f"fallback: {in_features} inputs are not a multiple of {rung}'s {unit}")


@pytest.mark.parametrize(
    ("text", "parts"),
    [
        ("0-9: {isq: qtip4b}", ["0-9", "layer 8", "0 to 3"]),
        ("4: {isq: qtip4b}", ["4: reaches to layer 4"]),
        ("2-2: {isq: qtip4b}", ["2-2", "empty"]),
        ("3-1: {isq: qtip4b}", ["3-1", "empty"]),
        ("-1: {isq: qtip4b}", ["-1"]),
        ("0-x: {isq: qtip4b}", ["0-x", "range"]),
        ("true: {isq: qtip4b}", ["True"]),
        ("defaults: {isq: qtip4b}", ["defaults", "unknown key"]),
        ("default: qtip4b", ["default", "{isq: RUNG}"]),
        ("default: {isq: qtip5}", ["default", "qtip5", "qtip4b"]),
        ("default: {isq: 4}", ["default", "'4'"]),
        ("default: {}", ["default", "isq"]),
        ("0-2: {isq: qtip4b, device: cpu}", ["0-2", "device"]),
        ("0-2: null", ["0-2", "None"]),
        ("fallback: q4m", ["fallback", "q4m"]),
        ("fallback: as-is", ["fallback", "as-is fits every layer"]),
        ("fallback: [qtip3]", ["fallback", "qtip3"]),
        ("'/v_proj$/': {isq: qtip4b}", ["/v_proj$/", "rules"]),
        ("rules: {match: '*'}", ["rules", "list"]),
        ("rules: [3]", ["rules[0]"]),
        ("rules: [{match: '*.v_proj'}]", ["rules[0]", "neither"]),
        ("rules: [{match: '*.v_proj', isq: qtip3b, skip: true}]", ["rules[0]", "both"]),
        ("rules: [{match: '*.v_proj', skip: 1}]", ["rules[0]", "skip"]),
        ("rules: [{isq: qtip3b}]", ["rules[0]", "match"]),
        ("rules: [{match: '*.v_proj', isq: qtip3b, layer: 0}]", ["rules[0]", "'layer'", "layers"]),
        ("rules: [{match: '*.v_proj', isq: qtip3b, layers: all}]", ["rules[0]", "layers", "all"]),
        ("rules: [{match: '*.x_proj', isq: qtip3b}]", ["rules[0]", "*.x_proj", "matches no tensor"]),
        ("rules: [{match: '*.v_proj', layers: 7, isq: qtip3b}]", ["rules[0]", "layer 7"]),
        ("rules: [{match: '*layernorm', isq: qtip4b}]", ["rules[0]", "matches nothing to quantise; norm is not"]),
        ("rules: [{match: 'model.embed_tokens', layers: 0, isq: q8_0}]", ["rules[0]", "matches no tensor"]),
        ("embedding: q4_m", ["embedding", "unknown rung 'q4_m'", "q8_0, fp8, bf16"]),
        ("embedding: {isq: q8_0}", ["embedding", "isq", "qtip4b"]),
        ("head: null", ["head", "'None'"]),
        ("embeddings: q8_0", ["embeddings", "unknown key"]),
        ("0-2: {isq: qtip4b}\n0-2: {isq: qtip3b}", ["0-2", "twice"]),
        ("rules: [{match: a, match: b, isq: qtip3b}]", ["match", "twice"]),
        ("- a", ["mapping", "list"]),
        ("", ["mapping", "found nothing"]),
        ("a: [", ["not valid YAML"]),
        ("!!python/object/apply:os.system ['true']", ["not valid YAML"]),
        ("[" * 5000, ["not valid YAML"]),
    ],
)
def test_what_a_recipe_cannot_mean_is_refused_by_file_and_key(text: str, parts: list[str], tmp_path: Path) -> None:
    message = refusal(tmp_path, text)
    for part in parts:
        assert part in message


def test_nested_aliases_do_not_blow_up_the_message(tmp_path: Path) -> None:
    bomb = "a: &a [x, x, x, x, x, x, x, x]\n" + "".join(
        f"{name}: &{name} [{', '.join([f'*{previous}'] * 8)}]\n" for previous, name in zip("abcdefgh", "bcdefghi", strict=True)
    )
    refusal(tmp_path, f"rules: [{{match: 3, isq: qtip3b}}]\n{bomb}")
    refusal(tmp_path, bomb)


def test_a_head_may_be_named_to_stay_as_it_is(tmp_path: Path) -> None:
    found = recipe(tmp_path, "rules: [{match: lm_head, isq: bf16}, {match: '*', isq: qtip3b}]")
    found.check(model())
    assert found.choose(model()[-1], LAYERS).rung == "bf16"


def test_a_missing_recipe_is_refused_by_path(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"absent\.yaml: cannot be read"):
        load_recipe(tmp_path / "absent.yaml", "qtip2b")


@pytest.mark.parametrize(
    ("name", "width", "biased", "expected", "why"),
    [
        ("q4k", 512, False, "q4k", ""),
        ("q2k", 96, False, "q4_0", "96 inputs are not a multiple of q2k's block of 256"),
        ("q3k", 96, False, "q4_0", "block of 256"),
        ("q4k", 96, False, "q4_1", "block of 256"),
        ("q5k", 96, False, "q5_1", "block of 256"),
        ("q6k", 96, False, "q8_0", "block of 256"),
        ("q4k", 48, False, "bf16", "48 inputs are not a multiple of q4_1's block of 32"),
        ("q8_0", 48, False, "bf16", "block of 32"),
        ("fp8", 96, False, "fp8", ""),
        ("fp8", 96, True, "q8_0", "mistral.rs cannot add a bias to an fp8 layer"),
        ("fp8", 48, True, "bf16", "48 inputs are not a multiple of q8_0's block of 32"),
        ("qtip2", 7, False, "bf16", "7 inputs are not a multiple of qtip2's V=2"),
    ],
)
def test_a_layer_that_a_choice_cannot_take_gets_its_next_of_kin(name: str, width: int, biased: bool, expected: str, why: str) -> None:
    spec = TensorSpec("model.layers.0.mlp.up_proj.weight", (8, width), Role.LINEAR, 0, biased)
    found = Recipe.uniform(name).choose(spec, 1)
    assert (found.rung, found.fallback) == (expected, bool(why))
    assert why in found.reason


def test_a_named_fallback_is_taken_at_its_word() -> None:
    spec = TensorSpec("model.layers.0.mlp.up_proj.weight", (8, 96), Role.LINEAR, 0)
    assert Recipe("q4k", fallback="bf16").choose(spec, 1).rung == "bf16"
    assert Recipe("q4k", fallback="qtip4").choose(spec, 1).rung == "qtip4"


@pytest.mark.parametrize("name", ["bf16", "f16", "f32", "as-is"])
def test_what_quantises_nothing_leaves_embedding_and_head_alone_too(name: str) -> None:
    assert vocabulary(Recipe.uniform(name)) == (name, name)


def test_llama_cpps_spelling_of_a_type_is_ours() -> None:
    assert Recipe.uniform("q4_k") == Recipe.uniform("q4k")


@pytest.mark.parametrize(
    ("name", "hint"),
    [
        ("q4_k_m", "llama.cpp's mixes are recipes here, their base is q4k"),
        ("Q3_K_L", "their base is q3k"),
        ("afq4", "afq4 is read and not written"),
        ("MXFP4", "mxfp4 is read and not written"),
    ],
)
def test_a_type_of_others_that_is_none_of_ours_says_what_to_do(name: str, hint: str) -> None:
    with pytest.raises(UsageError, match=hint):
        Recipe.uniform(name)


def test_capitals_are_no_other_type() -> None:
    assert Recipe.uniform("Q8_0") == Recipe.uniform("q8_0")
    assert Recipe.uniform("Q4_K") == Recipe.uniform("q4k")
    assert Recipe.uniform("BF16") == Recipe.uniform("bf16")


@pytest.mark.parametrize(
    ("match", "named"),
    [
        ("*", False),
        ("*.mlp.*", False),
        ("*gate*", False),
        ("*.gate_proj", False),
        ("model.layers.0.*", False),
        ("*.gate", True),
        ("model.layers.0.mlp.gate", True),
    ],
)
def test_a_router_is_quantised_by_a_rule_of_its_very_name_alone(match: str, named: bool, tmp_path: Path) -> None:
    router = TensorSpec("model.layers.0.mlp.gate.weight", (4, 64), Role.ROUTER, 0)
    loaded = recipe(tmp_path, f'rules: [{{match: "{match}", isq: q8_0}}]')
    assert loaded.choose(router, LAYERS).rung == ("q8_0" if named else "bf16")
    ranged = recipe(tmp_path, f"0-{LAYERS}: {{isq: qtip4}}")
    assert ranged.choose(router, LAYERS) == Choice("bf16", "router is not quantised")
