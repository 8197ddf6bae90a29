"""What a mixture of experts is in numbers: `MoeConfig`, out of the fields that each architecture has for it.

Routing of any other kind (shared experts, groups of experts, scores that are no softmax) is refused by the field that asks for it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from arctool.run.fields import Fields, short

MAX_EXPERTS = 1 << 16
MAX_WIDTH = 1 << 24
"""More than any real model has; they keep a lying config from asking for the machine's whole memory."""

OTHER_ROUTING: Mapping[str, tuple[Any, ...]] = {
    **dict.fromkeys(("n_shared_experts", "num_shared_experts", "shared_expert_intermediate_size", "first_k_dense_replace"), (0,)),
    **dict.fromkeys(("n_group", "topk_group", "num_expert_group", "routed_scaling_factor", "moe_layer_freq"), (1,)),
    **dict.fromkeys(("scoring_func", "moe_router_activation_func"), ("softmax",)),
    **dict.fromkeys(("topk_method",), ("greedy",)),
    **dict.fromkeys(("router_bias", "moe_router_use_bias", "use_expert_bias", "e_score_correction_bias"), (False,)),
}
"""Fields of other architectures' routers, with the values that ask for nothing beyond a softmax and its largest entries."""


@dataclass(frozen=True)
class MoeConfig:
    """Layers whose feed-forward block is `num_experts` SwiGLUs of width `intermediate_size`, `top_k` of which each token goes through.

    A token's experts are the `top_k` most probable ones by the softmax over all; `normalised`: their weights are divided by their sum.
    `sparse[layer]`: whether the layer is such a one; the others have one SwiGLU of `ModelConfig.intermediate_size`.
    """

    num_experts: int
    top_k: int
    intermediate_size: int
    normalised: bool
    sparse: tuple[bool, ...]


def no_experts(fields: Fields, layers: int) -> MoeConfig | None:
    """A dense architecture: its code has no experts, so a file that counts some describes another model."""
    for field in ("num_local_experts", "num_experts", "n_routed_experts"):
        if fields.get(field) not in (None, 0):
            raise fields.error(field, f"this architecture has no experts, found {short(fields.get(field))}")
    return None


def mixtral_experts(fields: Fields, layers: int) -> MoeConfig:
    """Mixtral (arXiv 2401.04088): every layer, weights always divided by their sum (a softmax over the chosen logits)."""
    if not fields.flag("norm_topk_prob", True):
        raise fields.error("norm_topk_prob", "this architecture always divides the experts' weights by their sum, found false")
    return _moe(fields, fields.count("intermediate_size", MAX_WIDTH), True, (True,) * layers)


def qwen3_experts(fields: Fields, layers: int) -> MoeConfig:
    """Qwen3-MoE: every `decoder_sparse_step`-th layer that is not among `mlp_only_layers`; `norm_topk_prob` if it says so."""
    step = 1 if fields.get("decoder_sparse_step") is None else fields.count("decoder_sparse_step", MAX_WIDTH)
    dense = fields.get("mlp_only_layers")
    dense = [] if dense is None else dense
    if not isinstance(dense, list | tuple) or any(isinstance(at, bool) or not isinstance(at, int) or not 0 <= at < layers for at in dense):
        raise fields.error("mlp_only_layers", f"expected a list of layers from 0 to {layers - 1}, found {short(dense)}")
    sparse = tuple(layer not in dense and (layer + 1) % step == 0 for layer in range(layers))
    return _moe(fields, fields.count("moe_intermediate_size", MAX_WIDTH), fields.flag("norm_topk_prob", False), sparse)


def _moe(fields: Fields, width: int, normalised: bool, sparse: tuple[bool, ...]) -> MoeConfig:
    for field, neutral in OTHER_ROUTING.items():
        if fields.get(field) is not None and fields.get(field) not in neutral:
            raise fields.error(field, f"this architecture's routing has no such thing, found {short(fields.get(field))}")
    # transformers 5 takes the one for the other.
    names = [name for name in ("num_local_experts", "num_experts") if fields.get(name) is not None]
    experts = fields.count(names[0] if names else "num_experts", MAX_EXPERTS)
    if len(names) > 1 and fields.get(names[1]) != experts:
        raise fields.error(names[1], f"disagrees with {names[0]}: {short(fields.get(names[1]))} against {experts}")
    top_k = fields.count("num_experts_per_tok", MAX_EXPERTS)
    if top_k > experts:
        raise fields.error("num_experts_per_tok", f"expected at most the number of experts = {experts}, found {top_k}")
    return MoeConfig(experts, top_k, width, normalised, sparse)
