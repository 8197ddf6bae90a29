"""Mixtures of experts through the whole road: sources in stacks, every family, calibration under uneven routing, budgets, and running."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from fnmatch import fnmatchcase
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from safetensors.numpy import load_file, save_file

from arctool import SamplingParams
from arctool.artifacts import verify
from arctool.bake.budget.need import Need
from arctool.bake.calibration.hessian import damping
from arctool.bake.calibration.stream import Calibration, guests_of, one_thread_per_call
from arctool.bake.calibration.text import Windows
from arctool.bake.calibration.token_set import CalibrationSet
from arctool.bake.pipeline import LayerDone, bake, bake_in_memory
from arctool.bake.recipe import Recipe, RecipeFile, Rule
from arctool.bake.source.checkpoint import Checkpoint, open_checkpoint
from arctool.errors import FormatError, InterruptedByUser, SourceError
from arctool.kernels.registry import default_registry
from arctool.quant.tensor import DenseTensor
from arctool.run.evaluate import logits
from arctool.run.llm import LLM, ArtifactSource
from arctool.run.models.spec import EMBEDDING_KEY, Role
from arctool.run.weights import WeightSource, load_model
from arctool.uqff.container import ArtifactWriter, BakeInfo, open_artifact

NAMES = ("mixtral", "qwen3_moe")
IDS = np.random.default_rng(3).integers(3, 512, (5, 32)).astype(np.int32)
CHOSEN = CalibrationSet("a text", Windows(IDS, ()), 0)
TEXT = [int(i) for i in np.random.default_rng(4).integers(3, 512, 60)]
NO_STEP: Any = SimpleNamespace(rows=None)
"""For what reads hidden states row by row."""
PARAMS = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True)


def tree(directory: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in directory.iterdir()}


def logits_of(source: WeightSource) -> np.ndarray:
    return logits(load_model(source, default_registry()), TEXT)


def fused(directory: Path, target: Path) -> Path:
    """The checkpoint as transformers writes it under its own names."""
    model = transformers.AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32)
    model.save_pretrained(target, save_original_format=False)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (target / name).write_bytes((directory / name).read_bytes())
    return target


@pytest.mark.parametrize("name", NAMES)
def test_stacks_of_transformers_are_read_as_the_experts_by_themselves(name: str, tiny_checkpoints: dict[str, Path], tmp_path: Path) -> None:
    with open_checkpoint(str(tiny_checkpoints[name])) as want, open_checkpoint(str(fused(tiny_checkpoints[name], tmp_path / "m"))) as found:
        stored = load_file(tmp_path / "m" / "model.safetensors")
        assert {name.rpartition(".")[2] for name in stored if ".experts." in name} == {"gate_up_proj", "down_proj"}
        assert found.names() == want.names()
        assert found.config == want.config
        assert found.ignored == ()
        for tensor in want.names():
            np.testing.assert_array_equal(found.tensor(tensor), want.tensor(tensor), err_msg=tensor)
            key = tensor.removesuffix(".weight")
            np.testing.assert_array_equal(found.lazily(key).rows(slice(3, 11)).dense(), want.tensor(tensor)[3:11])
        assert logits_of(found).tobytes() == logits_of(want).tobytes()


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (
            lambda w: w.update({"model.layers.1.mlp.experts.down_proj": w["model.layers.1.mlp.experts.down_proj"][:3]}),
            r"\[4, 64, 96\].*\[3, 64",
        ),
        (lambda w: w.pop("model.layers.0.mlp.experts.gate_up_proj"), r"experts\.0\.w1\.weight .*missing"),
        (lambda w: w.update({"model.layers.0.block_sparse_moe.experts.2.w1.weight": np.ones((96, 64), np.float32)}), "both hold.*keep one"),
        (lambda w: w.update({"model.layers.0.mlp.experts.gate_proj": np.ones((4, 96, 64), np.float32)}), "both hold.*keep one"),
        (lambda w: w.update({"model.layers.0.mlp.experts.gate_up_proj_bias": np.ones((4, 192), np.float32)}), "no such tensor"),
        (lambda w: w.pop("model.layers.0.mlp.gate.weight"), r"block_sparse_moe\.gate\.weight .*missing"),
    ],
    ids=["shape", "missing", "twice", "two stacks", "bias", "router"],
)
def test_stacks_that_do_not_fit_are_refused_by_name(
    change: Callable[[dict[str, np.ndarray]], None], words: str, tiny_checkpoints: dict[str, Path], tmp_path: Path
) -> None:
    where = fused(tiny_checkpoints["mixtral"], tmp_path / "m") / "model.safetensors"
    weights = load_file(where)
    change(weights)
    save_file(weights, where)
    with pytest.raises(SourceError, match=words):
        open_checkpoint(str(tmp_path / "m"))


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("rung", ["qtip2-v4", "qtip4", "q8_0", "fp8"])
def test_a_baked_mixture_verifies_and_runs(name: str, rung: str, tiny_checkpoints: dict[str, Path], tmp_path: Path) -> None:
    with open_checkpoint(str(tiny_checkpoints[name])) as checkpoint:
        bake(checkpoint, tmp_path / "a", Recipe.uniform(rung), calibration=CHOSEN, measured=False)
        memory = bake_in_memory(checkpoint, Recipe.uniform(rung), calibration=CHOSEN)
        routers = {spec.name: checkpoint.tensor(spec.name) for spec in checkpoint.specs if spec.role is Role.ROUTER}
        experts = {spec.key for spec in checkpoint.specs if ".experts." in spec.name}
        truth, own = logits_of(checkpoint), logits_of(memory)
    report = verify(tmp_path / "a", str(tiny_checkpoints[name]))
    assert report.passed, report
    with open_artifact(tmp_path / "a") as artifact:
        assert set(routers) <= set(artifact.residual_names())
        assert all(artifact.residual(router).dense().tobytes() == values.tobytes() for router, values in routers.items())
        assert experts <= set(artifact.keys())
        assert {artifact.form(key).label for key in experts} == {artifact.form("model.layers.0.self_attn.q_proj").label}
    stored = LLM(tmp_path / "a").generate([TEXT], PARAMS)[0].token_ids
    assert stored == LLM(memory).generate([TEXT], PARAMS)[0].token_ids
    assert len(set(stored)) >= 4
    if rung == "q8_0":
        # Where two experts are all but equally probable, eight bits send a token elsewhere; unrelated logits would be at 1.4.
        assert 0 < np.abs(own - truth).mean() < 0.25 * np.abs(truth).mean()


def test_a_calibrated_mixture_is_the_same_bytes_however_it_is_run(tiny_checkpoints: dict[str, Path], tmp_path: Path) -> None:
    recipe = Recipe("qtip2-v4", (Rule("test", "q8_0", "*.experts.3.*"), Rule("test", "qtip4", "*.mlp.gate")))
    seen: list[LayerDone] = []
    with open_checkpoint(str(tiny_checkpoints["qwen3_moe"])) as checkpoint:
        for jobs in (1, 3):
            bake(checkpoint, tmp_path / str(jobs), recipe, jobs=jobs, calibration=CHOSEN, measured=False, progress=seen.append)
        assert tree(tmp_path / "1") == tree(tmp_path / "3")
        searched = [done for done in seen[: len(seen) // 2] if done.rung.startswith("qtip")]
        assert {done.rung for done in searched if done.key.endswith("mlp.gate")} == {"qtip4"}
        assert all(done.proxy_error is not None for done in searched)
        other = bake_in_memory(checkpoint, recipe, calibration=CalibrationSet("a text", Windows(IDS[::-1, ::-1], ()), 0))
        with open_artifact(tmp_path / "1") as artifact:
            same = {
                done.key for done in searched if artifact.weight(done.key).dense().tobytes() == other.weights[done.key].dense().tobytes()
            }
        assert not same, "the text must matter to every searched layer"
        index = next(done.index for done in searched if done.key.endswith("experts.4.up_proj"))

        def interrupt(done: LayerDone) -> None:
            if done.index == index:
                raise KeyboardInterrupt

        with pytest.raises(InterruptedByUser):
            bake(checkpoint, tmp_path / "broken", recipe, calibration=CHOSEN, measured=False, progress=interrupt)
        result = bake(checkpoint, tmp_path / "broken", recipe, calibration=CHOSEN, measured=False)
        assert result.resumed > 20
    assert tree(tmp_path / "broken") == tree(tmp_path / "1")


@pytest.fixture
def lonely(copy_checkpoint: Callable[[str], Path]) -> Path:
    """A mixture whose router sends every token of its last layer to expert 0 or 1 alone."""
    directory = copy_checkpoint("qwen3_moe")
    config = json.loads((directory / "config.json").read_text())
    (directory / "config.json").write_text(json.dumps({**config, "num_experts_per_tok": 1}))
    weights = load_file(directory / "model.safetensors")
    router = weights["model.layers.1.mlp.gate.weight"]
    router[1], router[2:] = -router[0], 0
    save_file(weights, directory / "model.safetensors")
    return directory


@pytest.fixture
def pool() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(2) as made, one_thread_per_call():
        yield made


def at_last_layer(checkpoint: Checkpoint, pool: ThreadPoolExecutor) -> Calibration:
    """The stream before the last layer."""
    norms = {spec.key: checkpoint.tensor(spec.name) for spec in checkpoint.specs if spec.role is Role.NORM}
    made = Calibration(checkpoint.config, norms, checkpoint.weight(EMBEDDING_KEY), IDS, pool)
    made.embed()
    for layer in range(made.layers - 1):
        for stage in made.stages(layer):
            _, inputs, _ = made.measure(stage, False)
            for linear in stage.linears:
                made.install(linear.key, checkpoint.weight(linear.key), None)
            made.advance(stage, inputs)
        made.release(layer)
    return made


def test_an_expert_that_no_token_reaches_has_the_moments_of_the_guests(lonely: Path, pool: ThreadPoolExecutor) -> None:
    entered = np.empty(0)
    rows: dict[str, list[int]] = {"up_proj": [], "down_proj": []}
    with open_checkpoint(str(lonely)) as checkpoint:
        calibration = at_last_layer(checkpoint, pool)
        for stage in calibration.stages(1):
            seen, inputs, _ = calibration.measure(stage, True)
            assert seen is not None
            assert seen.doubt is None
            key = stage.linears[-1].key
            if stage.routes is not None:
                entered = np.concatenate([stage.read(torch.from_numpy(states), NO_STEP).numpy() for states in calibration.states])
                np.testing.assert_allclose(seen.hessian, entered.T @ entered / len(entered), rtol=1e-3, atol=1e-3)
            if stage.expert is not None:
                rows[key.rpartition(".")[2]].append(seen.rows)
                if stage.expert > 1 and stage.adds is None:
                    guests = entered[np.arange(32) * 160 // 32]
                    np.testing.assert_allclose(seen.hessian, guests.T @ guests / 32, rtol=1e-3, atol=1e-3)
                    assert np.linalg.eigvalsh(seen.hessian + np.eye(64) * seen.hessian.trace() / 64).min() > 0.1
            for linear in stage.linears:
                calibration.install(linear.key, checkpoint.weight(linear.key), None)
            calibration.advance(stage, inputs)
    assert rows["up_proj"][2:] == [32] * 6
    assert rows["down_proj"][2:] == [16] * 6
    assert rows["up_proj"][0] + rows["up_proj"][1] == IDS.size + 64
    assert min(rows["up_proj"][:2]) > 50


def test_such_an_expert_is_baked_as_well_as_any(lonely: Path, tmp_path: Path) -> None:
    with open_checkpoint(str(lonely)) as checkpoint:
        result = bake(checkpoint, tmp_path / "a", Recipe.uniform("qtip2-v4"), calibration=CHOSEN, measured=False)
    details = {record.module: record.details for record in result.report.outputs[0].layers}
    experts = {key: found for key, found in details.items() if ".experts." in key}
    assert len(experts) == 24
    for key, found in experts.items():
        assert found is not None
        assert found.note is None, key
        assert found.relative_error is not None
        assert found.relative_error < 0.25, key
        assert found.proxy_error is not None
        assert 0 < found.proxy_error < 0.25, key
    assert verify(tmp_path / "a", str(lonely)).passed


@pytest.mark.parametrize(
    ("count", "width", "number"), [(160, 64, 32), (160, 32, 16), (160, 33, 17), (10, 64, 10), (1, 64, 1), (1 << 20, 4096, 2048)]
)
def test_guests_are_half_as_many_as_an_input_is_wide_and_evenly_spaced(count: int, width: int, number: int) -> None:
    guests = guests_of(count, width)
    assert len(guests) == len(set(guests.tolist())) == number
    assert guests[0] == 0
    assert guests.max() < count
    gaps = np.diff(guests)
    assert gaps.size == 0 or gaps.max() - gaps.min() <= 1


def test_of_a_mixture_one_expert_is_in_memory_at_a_time(tiny_checkpoints: dict[str, Path], pool: ThreadPoolExecutor) -> None:
    with open_checkpoint(str(tiny_checkpoints["qwen3_moe"])) as checkpoint:
        calibration = at_last_layer(checkpoint, pool)
        stages = calibration.stages(1)
        live = []
        for stage in stages:
            _, inputs, _ = calibration.measure(stage, True)
            for linear in stage.linears:
                calibration.install(linear.key, checkpoint.weight(linear.key), None)
            live.append(sum(linear.weight is not None for one in stages for linear in one.linears if ".experts." in linear.key))
            calibration.advance(stage, inputs)
    assert max(live) == 3
    assert Calibration.scratch_bytes(checkpoint.config, 1 << 21) == 4 * (1 << 21) * (64 + 128)


def test_routing_while_calibrating_is_that_of_the_router_as_it_will_be_stored(
    tiny_checkpoints: dict[str, Path], pool: ThreadPoolExecutor
) -> None:
    """Another router than the source's: other tokens reach the experts."""
    with open_checkpoint(str(tiny_checkpoints["mixtral"])) as checkpoint:
        found = []
        for sign in (1, -1):
            calibration, rows = at_last_layer(checkpoint, pool), []
            for stage in calibration.stages(1):
                seen, inputs, _ = calibration.measure(stage, stage.expert is not None)
                for linear in stage.linears:
                    weight = checkpoint.weight(linear.key)
                    weight = DenseTensor(sign * weight.dense()) if stage.routes is not None else weight
                    calibration.install(linear.key, weight, None)
                if seen is not None and stage.adds is None:
                    rows.append(seen.rows - 32)
                calibration.advance(stage, inputs)
            found.append(rows)
    assert [sum(rows) for rows in found] == [2 * IDS.size] * 2
    # Of four experts the two least probable ones are those that the two most probable ones are not.
    assert [a + b for a, b in zip(*found, strict=True)] == [IDS.size] * 4


def test_beside_the_unquantised_stream_an_expert_knows_how_far_its_own_tokens_have_drifted(
    tiny_checkpoints: dict[str, Path], pool: ThreadPoolExecutor
) -> None:
    """Against least squares in f64 over the rows of the tokens that the stored router sends to it, and the guests."""
    with open_checkpoint(str(tiny_checkpoints["mixtral"])) as checkpoint:
        stored, truth = at_last_layer(checkpoint, pool), at_last_layer(checkpoint, pool)
        stored.states += 0.1 * np.random.default_rng(1).standard_normal(stored.states.shape).astype(np.float32)
        flat = [stream.states.reshape(IDS.size, -1).copy() for stream in (stored, truth)]
        chosen, moved = np.empty(0), 0
        for stage, beside in zip(stored.stages(1), truth.stages(1), strict=True):
            measured, inputs, others = stored.measure(stage, True, (truth, beside))
            assert measured is not None
            assert measured.change is not None
            for calibration, part, rows in ((stored, stage, inputs), (truth, beside, others)):
                for linear in part.linears:
                    calibration.install(linear.key, checkpoint.weight(linear.key), None)
                calibration.advance(part, rows)
            if stage.adds is not None and stage.expert is None:
                flat = [stream.states.reshape(IDS.size, -1).copy() for stream in (stored, truth)]
            if stage.routes is not None:
                chosen, true = (stage.routes(torch.from_numpy(states), NO_STEP).experts.numpy() for states in flat)
                moved = int((chosen != true).any(-1).sum())
            if stage.expert is None or stage.adds is not None:
                continue
            tokens = np.concatenate([np.flatnonzero((chosen == stage.expert).any(-1)), np.arange(32) * IDS.size // 32])
            x, z = (stage.read(torch.from_numpy(states[tokens]), NO_STEP).double().numpy() for states in flat)
            damped = x.T @ x / len(x)
            damped += damping(64, len(x), 6.0) * np.eye(64) * np.diag(damped).mean()
            wanted = np.linalg.solve(damped, x.T @ (z - x) / len(x)).T
            np.testing.assert_allclose(measured.change.inputs, wanted, rtol=0, atol=1e-3 * np.abs(wanted).max())
            assert measured.rows == len(tokens)
    assert moved > 0, "some tokens must go elsewhere in the unquantised model"


def test_a_budget_counts_experts_and_gives_a_kind_of_them_one_rule(tiny_checkpoints: dict[str, Path]) -> None:
    with open_checkpoint(str(tiny_checkpoints["mixtral"])) as checkpoint:
        specs, layers = checkpoint.specs, checkpoint.config.num_layers
    need = Need.of(specs, layers, RecipeFile(), 3.0)
    linear = [spec for spec in specs if spec.role is Role.LINEAR]
    assert need.weights == sum(spec.shape[0] * spec.shape[1] for spec in linear) == 2 * (12288 + 4 * 3 * 96 * 64)
    assert sorted(key for group in need.groups for key in group.keys) == sorted(spec.key for spec in linear)
    names = ["qtip4" if ".experts." in group.keys[0] and group.layer == 1 else "qtip2-v4" for group in need.groups]
    recipe = need.recipe(names)
    given = {key: name for group, name in zip(need.groups, names, strict=True) for key in group.keys}
    assert {spec.key: recipe.choose(spec, layers).rung for spec in linear} == given
    assert {rule.match for rule in recipe.rules} <= {f"model.layers.1.block_sparse_moe.experts.*.w{i}" for i in (1, 2, 3)} | {
        f"model.layers.{i}.self_attn.{part}_proj" for i in (0, 1) for part in "qkvo"
    } | {f"model.layers.0.block_sparse_moe.experts.*.w{i}" for i in (1, 2, 3)}


def test_a_budget_leaves_alone_what_the_recipe_says_of_single_experts(tiny_checkpoints: dict[str, Path]) -> None:
    with open_checkpoint(str(tiny_checkpoints["mixtral"])) as checkpoint:
        specs, layers = checkpoint.specs, checkpoint.config.num_layers
    need = Need.of(specs, layers, RecipeFile(None, (Rule("pin", "q8_0", "*.layers.1.*.experts.2.w1"),)), 4.0)
    recipe = need.recipe(["qtip4" if group.layer else "qtip2-v4" for group in need.groups])
    given = {spec.key: recipe.choose(spec, layers).rung for spec in specs if spec.role is Role.LINEAR}
    assert given.pop("model.layers.1.block_sparse_moe.experts.2.w1") == "q8_0"
    assert {key: name for key, name in given.items() if name != "q8_0"} == given
    assert all(name == ("qtip4" if fnmatchcase(key, "model.layers.1.*") else "qtip2-v4") for key, name in given.items())


@pytest.mark.parametrize(
    ("experts", "beside", "words"), [(3, False, r"shape \[4, 64, 96\], found \[3, 64, 96\]"), (4, True, "no part of the model")]
)
def test_stacks_in_an_artifact_that_do_not_fit_are_refused(
    experts: int, beside: bool, words: str, tiny_checkpoints: dict[str, Path], tmp_path: Path
) -> None:
    """One expert too few, and a stack beside the experts that it holds."""
    at = "model.layers.0.block_sparse_moe.experts"
    with open_checkpoint(str(tiny_checkpoints["mixtral"])) as checkpoint:
        writer = ArtifactWriter(tmp_path / "a", "f32", config=checkpoint.config_json, assets=checkpoint.assets)
        with writer as out:
            out.add_layer(f"{at}.down_proj", DenseTensor(np.stack([checkpoint.tensor(f"{at}.{e}.w2.weight") for e in range(experts)])))
            for spec in checkpoint.specs:
                stacked = spec.key.startswith(f"{at}.") and spec.key.endswith(".w2") and not beside
                if spec.role is Role.NORM:
                    out.add_residual(spec.name, DenseTensor(checkpoint.tensor(spec.name)))
                elif not stacked:
                    out.add_layer(spec.key, checkpoint.weight(spec.key))
            out.finish(BakeInfo("f32", 0))
    report = verify(tmp_path / "a")
    assert not report.passed
    with open_artifact(tmp_path / "a") as artifact, pytest.raises(FormatError, match=words):
        load_model(ArtifactSource(artifact), default_registry())
