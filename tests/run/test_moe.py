"""Mixtures of experts: their configs, which experts a token goes through, in which order they are added, and that nobody else matters."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from test_config import LLAMA
from tiny_models import DirectorySource, random_ids

from arctool.errors import SourceError
from arctool.kernels import policy
from arctool.kernels.registry import Registry
from arctool.run.compiled.model import CompiledModel, StepLimits
from arctool.run.config import ModelConfig
from arctool.run.kv.cache import KVCache
from arctool.run.layers.moe import SparseMoe, route, shares
from arctool.run.models import Role, architecture
from arctool.run.moe_config import MoeConfig
from arctool.run.step import Span, build_step
from arctool.run.weights import load_model

MIXTRAL: dict[str, Any] = {"architectures": ["MixtralForCausalLM"], "num_local_experts": 4, "num_experts_per_tok": 2}
QWEN3_MOE: dict[str, Any] = {
    "architectures": ["Qwen3MoeForCausalLM"],
    "num_experts": 8,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
}


def read(base: dict[str, Any], **changes: Any) -> ModelConfig:
    return ModelConfig.from_hf({**LLAMA, **base, **changes}, "config.json")


def test_every_layer_of_mixtral_is_a_mixture_of_the_width_of_its_mlp() -> None:
    config = read(MIXTRAL)
    assert config.moe == MoeConfig(num_experts=4, top_k=2, intermediate_size=96, normalised=True, sparse=(True, True, True))
    assert config.sparse(2) is config.moe
    assert not config.qk_norm


def test_which_layers_of_qwen3_moe_are_dense_is_as_in_transformers() -> None:
    for step, dense in itertools.product((1, 2, 3, 4), ([], [0], [1, 2], [0, 1, 2])):
        config = read(QWEN3_MOE, decoder_sparse_step=step, mlp_only_layers=dense)
        theirs = transformers.Qwen3MoeConfig(
            **{k: v for k, v in {**LLAMA, **QWEN3_MOE}.items() if k != "architectures"}, decoder_sparse_step=step, mlp_only_layers=dense
        )
        with torch.device("meta"):
            model = transformers.Qwen3MoeForCausalLM(theirs)
        assert config.moe is not None
        assert config.moe.sparse == tuple(hasattr(layer.mlp, "experts") for layer in model.model.layers), (step, dense)


def test_absent_fields_of_qwen3_moe_mean_what_its_class_says() -> None:
    config, theirs = read(QWEN3_MOE), transformers.Qwen3MoeConfig()
    assert config.moe == MoeConfig(8, 2, 32, theirs.norm_topk_prob, (True, True, True))
    assert (theirs.norm_topk_prob, theirs.decoder_sparse_step, theirs.mlp_only_layers) == (False, 1, [])
    assert config.qk_norm
    assert read(QWEN3_MOE, mlp_only_layers=None, decoder_sparse_step=None, norm_topk_prob=None) == config


def test_both_names_of_the_number_of_experts_are_read_as_transformers_does() -> None:
    renamed = {k: v for k, v in QWEN3_MOE.items() if k != "num_experts"} | {"num_local_experts": 8}
    assert read(renamed) == read(QWEN3_MOE) == read(QWEN3_MOE, num_local_experts=8)
    renamed = {k: v for k, v in MIXTRAL.items() if k != "num_local_experts"} | {"num_experts": 4}
    assert read(renamed) == read(MIXTRAL)


@pytest.mark.parametrize(
    ("base", "changes", "windows"),
    [
        (MIXTRAL, {}, (None, None, None)),
        (MIXTRAL, {"sliding_window": None}, (None, None, None)),
        (MIXTRAL, {"sliding_window": 7}, (7, 7, 7)),
        (QWEN3_MOE, {"sliding_window": 7}, (None, None, None)),
        (QWEN3_MOE, {"sliding_window": 7, "use_sliding_window": True}, (7, 7, 7)),
        (QWEN3_MOE, {"sliding_window": 7, "use_sliding_window": True, "max_window_layers": 2}, (7, 7, 7)),
        (QWEN3_MOE, {"use_sliding_window": True}, (4096, 4096, 4096)),
        (QWEN3_MOE, {"sliding_window": 7, "use_sliding_window": True, "layer_types": ["sliding_attention"] * 3}, (7, 7, 7)),
    ],
    ids=str,
)
def test_windows_are_one_for_all_layers(base: dict[str, Any], changes: dict[str, Any], windows: tuple[int | None, ...]) -> None:
    assert read(base, **changes).sliding_windows == windows


@pytest.mark.parametrize(
    ("base", "changes", "field"),
    [
        (MIXTRAL, {"num_local_experts": 0}, "num_local_experts"),
        (MIXTRAL, {"num_local_experts": "4"}, "num_local_experts"),
        (MIXTRAL, {"num_local_experts": None}, "num_experts"),
        (MIXTRAL, {"num_experts": 5}, "num_experts"),
        (MIXTRAL, {"num_experts_per_tok": 5}, "num_experts_per_tok"),
        (MIXTRAL, {"num_experts_per_tok": 0}, "num_experts_per_tok"),
        (MIXTRAL, {"num_experts_per_tok": None}, "num_experts_per_tok"),
        (MIXTRAL, {"norm_topk_prob": False}, "norm_topk_prob"),
        (MIXTRAL, {"attention_bias": True}, "attention_bias"),
        (MIXTRAL, {"layer_types": ["full_attention", "full_attention", "conv"]}, "layer_types"),
        (MIXTRAL, {"sliding_window": 7, "layer_types": ["full_attention"] * 2 + ["sliding_attention"]}, "layer_types"),
        (QWEN3_MOE, {"moe_intermediate_size": None}, "moe_intermediate_size"),
        (QWEN3_MOE, {"decoder_sparse_step": 0}, "decoder_sparse_step"),
        (QWEN3_MOE, {"mlp_only_layers": [3]}, "mlp_only_layers"),
        (QWEN3_MOE, {"mlp_only_layers": [-1]}, "mlp_only_layers"),
        (QWEN3_MOE, {"mlp_only_layers": [True]}, "mlp_only_layers"),
        (QWEN3_MOE, {"mlp_only_layers": 1}, "mlp_only_layers"),
        (QWEN3_MOE, {"norm_topk_prob": 1}, "norm_topk_prob"),
        (QWEN3_MOE, {"shared_expert_intermediate_size": 64}, "shared_expert_intermediate_size"),
        (QWEN3_MOE, {"n_shared_experts": 1}, "n_shared_experts"),
        (QWEN3_MOE, {"n_group": 2}, "n_group"),
        (QWEN3_MOE, {"routed_scaling_factor": 2.5}, "routed_scaling_factor"),
        (QWEN3_MOE, {"scoring_func": "sigmoid"}, "scoring_func"),
        (QWEN3_MOE, {"topk_method": "noaux_tc"}, "topk_method"),
        (QWEN3_MOE, {"moe_router_use_bias": True}, "moe_router_use_bias"),
        (QWEN3_MOE, {"hidden_act": "gelu"}, "hidden_act"),
    ],
    ids=str,
)
def test_what_we_would_misread_is_refused_by_field(base: dict[str, Any], changes: dict[str, Any], field: str) -> None:
    with pytest.raises(SourceError) as caught:
        read(base, **changes)
    assert f"config.json: {field}: " in str(caught.value)
    assert len(str(caught.value)) < 300


def test_fields_that_ask_for_nothing_are_read_over() -> None:
    nothing = {"shared_expert_intermediate_size": 0, "n_group": 1, "scoring_func": "softmax", "router_jitter_noise": 0.1}
    assert read(QWEN3_MOE, **nothing, output_router_logits=True, router_aux_loss_coef=0.01) == read(QWEN3_MOE)


def test_a_router_has_a_role_of_its_own_and_every_expert_is_three_linear_layers(tiny_checkpoints: dict[str, Path]) -> None:
    config = DirectorySource(tiny_checkpoints["mixtral"]).config
    specs = [spec for spec in architecture("MixtralForCausalLM", "here").tensors(config) if "block_sparse_moe" in spec.name]
    routers = [spec for spec in specs if spec.role is Role.ROUTER]
    assert [(spec.name, spec.shape, spec.layer) for spec in routers] == [
        (f"model.layers.{i}.block_sparse_moe.gate.weight", (4, 64), i) for i in range(2)
    ]
    assert {spec.role for spec in specs if spec not in routers} == {Role.LINEAR}
    shapes = {spec.key: spec.shape for spec in specs}
    parts = {"w1": (96, 64), "w2": (64, 96), "w3": (96, 64)}
    wanted = {
        f"model.layers.{i}.block_sparse_moe.experts.{e}.{name}": shape for i in (0, 1) for e in range(4) for name, shape in parts.items()
    }
    assert {key: shape for key, shape in shapes.items() if ".experts." in key} == wanted


def test_the_most_probable_experts_are_chosen_and_listed_by_number() -> None:
    routing = route(torch.tensor([[0.0, 3.0, 1.0, 2.0], [5.0, 4.0, 3.0, 2.0], [-3.0, -2.0, -1.0, 0.0]]), 2, False)
    assert routing.experts.tolist() == [[1, 3], [0, 1], [2, 3]]
    wanted = torch.softmax(torch.tensor([0.0, 3.0, 1.0, 2.0]).double(), -1)[[1, 3]]
    np.testing.assert_allclose(routing.weights[0].numpy(), wanted.numpy(), rtol=1e-6)


def test_weights_are_divided_by_their_sum_if_asked() -> None:
    logits = torch.randn(50, 8, generator=torch.Generator().manual_seed(0))
    plain, normed = (route(logits, 3, normalised) for normalised in (False, True))
    assert torch.equal(plain.experts, normed.experts)
    assert float(plain.weights.sum(-1).max()) < 0.99
    np.testing.assert_allclose(normed.weights.sum(-1).numpy(), 1, rtol=1e-6)
    np.testing.assert_allclose((plain.weights / plain.weights.sum(-1, keepdim=True)).numpy(), normed.weights.numpy(), rtol=1e-6)


@pytest.mark.parametrize("experts", [4, 8, 17, 64, 128, 300])
def test_of_equally_probable_experts_the_lower_ones_are_chosen_in_every_batch(experts: int) -> None:
    tied = torch.zeros(40, experts)
    tied[:, experts // 2] = 1.0
    for logits in (tied, tied[:1], torch.cat((torch.randn(9, experts), tied))[9:]):
        routing = route(logits, 3, True)
        assert set(map(tuple, routing.experts.tolist())) == {(0, 1, experts // 2)}


@pytest.mark.parametrize(("experts", "top_k"), [(1, 1), (4, 2), (8, 3), (60, 4), (128, 8), (256, 8)])
@pytest.mark.parametrize("normalised", [True, False])
def test_a_token_s_routing_does_not_depend_on_its_neighbours(experts: int, top_k: int, normalised: bool) -> None:
    logits = torch.randn(67, experts, generator=torch.Generator().manual_seed(experts)) * 3
    whole = route(logits, top_k, normalised)
    for start in range(0, 60, 7):
        for count in (1, 2, 3, 5, 7):
            part = route(logits[start : start + count].clone(), top_k, normalised)
            assert torch.equal(part.experts, whole.experts[start : start + count])
            assert torch.equal(part.weights, whole.weights[start : start + count])


def test_every_pair_of_token_and_expert_is_in_one_share() -> None:
    routing = route(torch.randn(30, 8, generator=torch.Generator().manual_seed(3)), 3, True)
    found = shares(routing)
    assert [share.expert for share in found] == sorted({share.expert for share in found})
    pairs = {(int(token), share.expert): float(w) for share in found for token, w in zip(share.tokens, share.weights[:, 0], strict=True)}
    assert len(pairs) == sum(len(share.tokens) for share in found) == 90
    assert all(share.tokens.tolist() == sorted(share.tokens.tolist()) for share in found)
    for token in range(30):
        listed = zip(routing.experts[token].tolist(), routing.weights[token].tolist(), strict=True)
        assert all(pairs[token, expert] == weight for expert, weight in listed)


def layer_of(directory: Path, registry: Registry, layer: int) -> SparseMoe:
    mlp = load_model(DirectorySource(directory), registry).blocks[layer].mlp
    assert isinstance(mlp, SparseMoe)
    return mlp


@pytest.mark.parametrize("name", ["mixtral", "qwen3_moe"])
def test_the_layer_is_the_one_of_transformers(name: str, tiny_checkpoints: dict[str, Path], registry: Registry) -> None:
    theirs = transformers.AutoModelForCausalLM.from_pretrained(tiny_checkpoints[name], dtype=torch.float32).model.layers[1].mlp
    x = torch.randn(50, 64, generator=torch.Generator().manual_seed(4))
    with torch.no_grad():
        wanted = theirs(x[None])[0]
    with torch.inference_mode():
        found = layer_of(tiny_checkpoints[name], registry, 1)(x)
    np.testing.assert_allclose(found.numpy(), wanted.numpy(), atol=2e-6 * float(wanted.abs().max()))


@pytest.mark.parametrize("name", ["mixtral", "qwen3_moe"])
def test_experts_are_added_in_the_order_of_their_numbers(name: str, tiny_checkpoints: dict[str, Path], registry: Registry) -> None:
    """Bit for bit, token by token: the lower expert's output first, whichever of them has the larger weight."""
    layer = layer_of(tiny_checkpoints[name], registry, 1)
    x = torch.randn(20, 64, generator=torch.Generator().manual_seed(5))
    rising = 0
    with torch.inference_mode():
        together = layer(x)
        for token in range(20):
            one = x[token : token + 1]
            routing = layer.route(one)
            sums = torch.zeros(1, 64)
            for expert, weight in zip(routing.experts[0].tolist(), routing.weights[0], strict=True):
                sums += layer.experts[expert](one) * weight
            assert torch.equal(together[token : token + 1], sums)
            rising += bool(routing.weights[0, 0] < routing.weights[0, 1])
    assert 4 <= rising <= 16, "in both orders of weight"


def test_a_token_s_output_does_not_depend_on_its_neighbours(tiny_checkpoints: dict[str, Path], registry: Registry) -> None:
    layer = layer_of(tiny_checkpoints["qwen3_moe"], registry, 1)
    x = torch.randn(24, 64, generator=torch.Generator().manual_seed(6))
    with torch.inference_mode():
        whole = layer(x)
        for token in range(24):
            assert torch.equal(layer(x[token : token + 1]), whole[token : token + 1])
        assert layer(x[:0]).shape == (0, 64)


@pytest.mark.parametrize("name", ["mixtral", "qwen3_moe"])
@pytest.mark.parametrize("way", ["gather", "grouped"])
def test_gathered_and_grouped_experts_have_the_same_bits(
    name: str, way: str, tiny_checkpoints: dict[str, Path], registry: Registry, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whole steps, so that one which took the other way by the policy is the reference."""
    ids = random_ids(8, 60)
    source = DirectorySource(tiny_checkpoints[name])
    model = load_model(source, registry)

    def logits(sizes: list[int]) -> np.ndarray:
        compiled = CompiledModel(model, KVCache(source.config, 4, 16), StepLimits(60, 60, 1, 60))
        found, first = [], 0
        for size in sizes:
            found.append(compiled.run(build_step([Span(ids[first : first + size], first, range(4), size)], 16)).copy())
            first += size
        return np.concatenate(found)

    whole = logits([60])
    assert len({int(row.argmax()) for row in whole}) >= 4
    asked = []
    honest = policy.choose_experts

    def forced(tokens: int, experts: int, top_k: int) -> str:
        asked.append(honest(tokens, experts, top_k))
        return way

    monkeypatch.setattr("arctool.run.compiled.model.choose_experts", forced)
    np.testing.assert_array_equal(logits([60]), whole)
    np.testing.assert_array_equal(logits([1, 2, 7, 8, 9, 33]), whole)
    assert asked == ["grouped", *["gather"] * 3, *["grouped"] * 3]
