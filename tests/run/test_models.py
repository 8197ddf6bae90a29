"""Every architecture gives the logits and the greedy tokens of transformers, however the work is cut."""

from __future__ import annotations

import copy
import itertools
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from tiny_models import DirectorySource, Reference, random_ids

from arctool.errors import FormatError, SourceError
from arctool.kernels.cpu.attention_work import SPLIT_FROM
from arctool.kernels.registry import Registry, default_registry
from arctool.quant.codebooks import RUNGS, Codebook
from arctool.quant.hadamard import Rotation
from arctool.quant.tensor import TrellisTensor
from arctool.run import evaluate
from arctool.run.compiled.model import CompiledModel, StepLimits
from arctool.run.config import ModelConfig
from arctool.run.dialects import DIALECTS
from arctool.run.kv.cache import CachePlan, KVCache, plan_cache
from arctool.run.models import ARCHITECTURES, Role, architecture
from arctool.run.runner import ModelRunner
from arctool.run.step import Span, build_step
from arctool.run.weights import load_model

# Longer than every window, than a query tile, than a chunk; not a multiple of anything.
LENGTH = 150
TOLERANCE = 1e-4


def _poisoned_runner(tiny: DirectorySource, registry: Registry, block_size: int = 16) -> ModelRunner:
    """A runner whose cache is full of NaN: whoever reads a slot that was not written gets caught."""
    plan = plan_cache(tiny.config, max_seqs=2, block_size=block_size)
    runner = ModelRunner(load_model(tiny, registry), plan, max_tokens=256, max_seqs=256)
    for store in (*runner.cache.keys, *runner.cache.values):
        store.fill_(float("nan"))
    return runner


def run(runner: ModelRunner, spans: list[Span]) -> np.ndarray:
    """A copy of the step's logits: the runner's own are good until the next step."""
    return runner.run_spans(spans).copy()


def _scattered_blocks(runner: ModelRunner) -> list[int]:
    """A block table that is in no order."""
    blocks = np.random.default_rng(5).permutation(runner.plan.num_blocks)
    return [int(b) for b in blocks[: -(-LENGTH // runner.plan.block_size)]]


@pytest.mark.parametrize("chunks", [[150], [1, 2, 3, 5, 7, 11, 13, 17, 19, 23, 29, 20], [64, 64, 22], [149, 1]], ids=str)
def test_prefill_in_any_chunks_gives_the_logits_of_transformers_at_every_position(
    tiny: DirectorySource, expected: Reference, registry: Registry, chunks: list[int]
) -> None:
    ids = random_ids(1, LENGTH)
    runner = _poisoned_runner(tiny, registry)
    blocks, parts, first = _scattered_blocks(runner), [], 0
    for size in chunks:
        parts.append(run(runner, [Span(ids[first : first + size], first, blocks, size)]))
        first += size
    assert first == LENGTH
    np.testing.assert_allclose(np.concatenate(parts), expected.logits(ids), atol=TOLERANCE, rtol=0)


@pytest.mark.parametrize("prompt", [1, 70])
def test_decoding_token_by_token_gives_the_logits_of_transformers_at_every_position(
    tiny: DirectorySource, expected: Reference, registry: Registry, prompt: int
) -> None:
    ids = random_ids(2, LENGTH)
    runner = _poisoned_runner(tiny, registry)
    blocks = _scattered_blocks(runner)
    parts = [run(runner, [Span(ids[:prompt], 0, blocks, prompt)])]
    parts += [run(runner, [Span([ids[i]], i, blocks, 1)]) for i in range(prompt, LENGTH)]
    np.testing.assert_allclose(np.concatenate(parts), expected.logits(ids), atol=TOLERANCE, rtol=0)


def test_several_tokens_in_one_step_give_the_bits_of_one_at_a_time(tiny: DirectorySource, registry: Registry) -> None:
    ids = random_ids(3, 40)
    runner = _poisoned_runner(tiny, registry)
    blocks = _scattered_blocks(runner)
    together = run(runner, [Span(ids, 0, blocks, 40)])
    apart = [run(runner, [Span([ids[i]], i, blocks, 1)]) for i in range(40)]
    assert np.array_equal(together, np.concatenate(apart))


@pytest.mark.parametrize("threads", [1, 2], indirect=True)
@pytest.mark.usefixtures("threads")
def test_chunks_and_block_tables_change_no_bit_of_a_prompt(tiny: DirectorySource, registry: Registry) -> None:
    ids = random_ids(4, LENGTH)
    whole = evaluate.logits(load_model(tiny, registry), ids)
    runner = _poisoned_runner(tiny, registry)
    blocks = _scattered_blocks(runner)
    cuts = [0, 1, 30, 64, 65, 128, LENGTH]
    parts = [run(runner, [Span(ids[a:b], a, blocks, b - a)]) for a, b in itertools.pairwise(cuts)]
    assert np.array_equal(np.concatenate(parts), whole)


@pytest.mark.parametrize("threads", [1, 2], indirect=True)
@pytest.mark.usefixtures("threads")
def test_a_neighbour_in_the_batch_changes_no_bit(tiny: DirectorySource, registry: Registry) -> None:
    ids, others = random_ids(6, 60), random_ids(7, 50)
    runner = _poisoned_runner(tiny, registry)
    mine, theirs = _scattered_blocks(runner)[:4], _scattered_blocks(runner)[4:]
    prefill = Span(ids[:59], 0, mine, 59)
    decode = Span(ids[59:], 59, mine, 1)
    alone = [run(runner, [prefill]), run(runner, [decode])]
    before = Span(others[:33], 0, theirs, 2)
    mixed = [run(runner, [before, prefill])[2:]]
    run(runner, [Span(others[33:49], 33, theirs, 0)])
    mixed.append(run(runner, [Span(others[49:], 49, theirs, 1), decode])[1:])
    assert np.array_equal(np.concatenate(mixed), np.concatenate(alone))


def test_the_registry_of_configs_and_of_models_know_the_same_architectures() -> None:
    assert set(DIALECTS) == set(ARCHITECTURES)


def test_an_unknown_architecture_is_refused_with_the_known_ones() -> None:
    with pytest.raises(SourceError, match=r"config\.json.*GPT2LMHeadModel.*LlamaForCausalLM, MistralForCausalLM, Mixtral.*Qwen3Moe"):
        architecture("GPT2LMHeadModel", "config.json")


def test_the_declared_tensors_are_exactly_those_that_transformers_writes(tiny: DirectorySource) -> None:
    specs = architecture(tiny.config.architecture, "config.json").tensors(tiny.config)
    declared = {spec.name: spec.shape for spec in specs}
    assert len(declared) == len(specs)
    assert declared == {name: tensor.shape for name, tensor in tiny.tensors.items()}
    assert {s.role for s in specs if s.layer is None} <= {Role.EMBEDDING, Role.HEAD, Role.NORM}


def test_tensor_specs_know_their_key_role_and_layer(llama: DirectorySource) -> None:
    specs = {s.name: s for s in architecture("LlamaForCausalLM", "here").tensors(llama.config)}
    down = specs["model.layers.1.mlp.down_proj.weight"]
    assert (down.key, down.role, down.layer) == ("model.layers.1.mlp.down_proj", Role.LINEAR, 1)
    assert specs["lm_head.weight"].role is Role.HEAD
    assert specs["model.embed_tokens.weight"].role is Role.EMBEDDING
    assert specs["model.norm.weight"].role is Role.NORM


class _Changed(DirectorySource):
    """A source with some tensors replaced."""

    def __init__(self, source: DirectorySource, changes: dict[str, np.ndarray | None]) -> None:
        self.config, self.assets = source.config, source.assets
        self.tensors = {k: v for k, v in {**source.tensors, **changes}.items() if v is not None}


def test_a_tensor_of_the_wrong_shape_is_refused_by_name(llama: DirectorySource, registry: Registry) -> None:
    key = "model.layers.0.mlp.up_proj.weight"
    changed = _Changed(llama, {key: llama.tensors[key][:-1]})
    with pytest.raises(SourceError, match=r"model\.layers\.0\.mlp\.up_proj\.weight: .*\[96, 64\], found \[95, 64\]"):
        load_model(changed, registry)


def test_a_bias_that_nobody_would_add_is_refused_by_name(llama: DirectorySource, registry: Registry) -> None:
    changed = _Changed(llama, {"model.layers.1.self_attn.o_proj.bias": np.ones(64, np.float32)})
    with pytest.raises(SourceError, match=r"layers\.1\.self_attn\.o_proj\.bias: config\.json implies no such bias"):
        load_model(changed, registry)


def test_a_missing_bias_and_one_of_wrong_shape_are_refused_by_name(tiny_checkpoints: dict, registry: Registry) -> None:
    source = DirectorySource(tiny_checkpoints["qwen2"])
    key = "model.layers.0.self_attn.k_proj.bias"
    with pytest.raises(SourceError, match=r"layers\.0\.self_attn\.k_proj\.bias: missing"):
        load_model(_Changed(source, {key: None}), registry)
    with pytest.raises(SourceError, match=r"layers\.0\.self_attn\.k_proj\.bias: .*\[32\], found \[1\]"):
        load_model(_Changed(source, {key: np.ones(1, np.float32)}), registry)


@pytest.mark.parametrize(("mixed", "label"), [(True, "trellis-k8v2l16-sum2"), (False, "")])
def test_an_embedding_whose_rows_are_mixed_is_refused_by_name_when_the_model_loads(llama: DirectorySource, mixed: bool, label: str) -> None:
    geometry = RUNGS["qtip4b"].geometry
    streams = np.zeros((512, geometry.stride(64)), np.uint8)
    rotation = Rotation.seeded(0, "model.embed_tokens", 512, 64, mix_rows=mixed)
    table = TrellisTensor(geometry, Codebook("sum2"), 64, streams, np.ones(512, np.float32), rotation)

    class TrellisTable(_Changed):
        def weight(self, key: str) -> Any:
            return table if key == "model.embed_tokens" else super().weight(key)

    if mixed:
        with pytest.raises(FormatError, match=rf"^model\.embed_tokens\.weight: no kernel .* this {label} mixes 128 of them"):
            load_model(TrellisTable(llama, {}), default_registry())
    else:
        load_model(TrellisTable(llama, {}), default_registry())


def test_loading_a_model_engages_no_kernel(llama: DirectorySource) -> None:
    registry = default_registry()
    load_model(llama, registry)
    assert registry.engagement() == {}


def test_a_tied_table_is_prepared_once(tiny_checkpoints: dict, registry: Registry) -> None:
    model = load_model(DirectorySource(tiny_checkpoints["qwen2"]), registry)
    assert model.head.weight is model.embedding.weight


def test_the_compiled_step_computes_what_the_layers_define(tiny: DirectorySource, registry: Registry) -> None:
    model, prompts = load_model(tiny, registry), [random_ids(10, 70), random_ids(11, 33)]
    model.rope.reserve(70)
    step = build_step([Span(ids, 0, range(5 * i, 5 * i + 5), len(ids)) for i, ids in enumerate(prompts)], 16)
    defined = model(step).numpy()
    compiled = CompiledModel(model, KVCache(tiny.config, 10, 16), StepLimits(103, 103, 2, 70)).run(step)
    np.testing.assert_allclose(compiled, defined, atol=TOLERANCE, rtol=0)
    assert not np.array_equal(compiled, defined), "two ways of computing would hardly agree in every bit"


def test_a_step_engages_every_kernel_of_the_model_once_a_layer(llama: DirectorySource) -> None:
    registry = default_registry()
    runner = ModelRunner(load_model(llama, registry), plan_cache(llama.config), max_tokens=8, max_seqs=1)
    run(runner, [Span([5, 6], 0, [0], 1)])
    assert registry.engagement() == {"cpu.embedding.dense-f32": 1, "cpu.linear.dense-f32": 2 * 7 + 1, "cpu.attention": 2}


@pytest.mark.parametrize("kv_dtype", ["f32", "bf16"])
def test_a_context_that_is_split_over_lanes_has_the_bits_of_a_whole_prompt(llama: DirectorySource, kv_dtype: str) -> None:
    ids = random_ids(12, SPLIT_FROM + 40)
    registry = default_registry()
    source = copy.copy(llama)
    source.config = replace(llama.config, max_position_embeddings=2048)
    plan = plan_cache(source.config, max_seqs=1, max_model_len=1200, kv_dtype=kv_dtype)
    runner = ModelRunner(load_model(source, registry), plan, max_tokens=len(ids), max_seqs=len(ids))
    whole = run(runner, [Span(ids, 0, range(75), len(ids))])
    assert registry.engagement().get("cpu.attention.split", 0) == 0
    for store in (*runner.cache.keys, *runner.cache.values):
        store.fill_(float("nan"))
    parts = [run(runner, [Span(ids[: SPLIT_FROM - 3], 0, range(75), SPLIT_FROM - 3)])]
    parts += [run(runner, [Span([ids[i]], i, range(75), 1)]) for i in range(SPLIT_FROM - 3, len(ids))]
    assert registry.engagement()["cpu.attention.split"] == 40 * source.config.num_layers
    assert np.array_equal(np.concatenate(parts), whole)


def test_a_step_past_the_longest_sequence_is_refused(llama: DirectorySource, registry: Registry) -> None:
    runner = ModelRunner(load_model(llama, registry), plan_cache(llama.config, max_model_len=32), max_tokens=8, max_seqs=1)
    with pytest.raises(RuntimeError, match="reaches 33 tokens"):
        runner.run_spans([Span([5], 32, [0, 1, 2], 1)])


def test_a_step_without_logits_engages_no_head(llama: DirectorySource) -> None:
    registry = default_registry()
    runner = ModelRunner(load_model(llama, registry), plan_cache(llama.config), max_tokens=8, max_seqs=1)
    runner.run_spans([Span([5, 6], 0, [0], 0)])
    assert registry.engagement()["cpu.linear.dense-f32"] == 2 * 7


def test_a_step_that_is_larger_than_planned_is_refused(llama: DirectorySource, registry: Registry) -> None:
    runner = ModelRunner(load_model(llama, registry), plan_cache(llama.config), max_tokens=8, max_seqs=1)
    with pytest.raises(RuntimeError, match="a step of 9 tokens"):
        run(runner, [Span([5] * 9, 0, [0], 1)])


def test_a_step_that_needs_no_logits_gives_none(llama: DirectorySource, registry: Registry) -> None:
    runner = ModelRunner(load_model(llama, registry), CachePlan(4, 16, 64, plan_cache(llama.config).dtype), max_tokens=8, max_seqs=1)
    assert run(runner, [Span([5, 6], 0, [0], 0)]).shape == (0, llama.config.vocab_size)


def test_a_bf16_cache_stays_close_to_an_f32_one(llama: DirectorySource, registry: Registry) -> None:
    ids = random_ids(9, 80)
    model = load_model(llama, registry)
    exact = evaluate.logits(model, ids)
    runner = ModelRunner(model, plan_cache(llama.config, kv_dtype="bf16"), max_tokens=80, max_seqs=80)
    rounded = run(runner, [Span(ids, 0, range(16), 80)])
    # bf16 keeps 8 bits: visible, and small against logits of this size.
    difference = float(np.abs(rounded - exact).mean())
    assert 0 < difference < 0.05 * float(np.abs(exact).mean())


def test_model_config_is_the_source_s_own(tiny: DirectorySource) -> None:
    assert isinstance(tiny.config, ModelConfig)
    assert len(tiny.config.sliding_windows) == tiny.config.num_layers
