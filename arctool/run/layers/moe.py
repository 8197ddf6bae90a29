"""A mixture of experts: a router sends each token through a few of many SwiGLU blocks (Mixtral, arXiv 2401.04088).

What a token gets depends on its own row alone. The router is a linear layer like any other, whose sums do not depend on the batch. Among
equal probabilities the lower expert's goes first. The experts' outputs are added in the order of their numbers, whatever their rank,
starting from nothing (which is the order of transformers too). An expert computes its own tokens only, and no row there sees another.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from arctool.run.layers.linear import Projection
from arctool.run.layers.mlp import SwiGLU


@dataclass(frozen=True)
class Routing:
    """`experts`: i64 [tokens, top_k], the chosen ones of each token in the order of their numbers; `weights`: f32, theirs."""

    experts: torch.Tensor
    weights: torch.Tensor


@dataclass(frozen=True)
class Share:
    """The tokens of one expert: `tokens` i64 [n], ascending, and the weight f32 [n, 1] of the expert for each."""

    expert: int
    tokens: torch.Tensor
    weights: torch.Tensor


@dataclass(frozen=True)
class SparseMoe:
    """Σ over a token's `top_k` experts of weight · expert(x). `normalised`: the weights are divided by their sum."""

    router: Projection
    experts: tuple[SwiGLU, ...]
    top_k: int
    normalised: bool

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """x: f32 [tokens, hidden] → f32 [tokens, hidden]."""
        out = torch.zeros_like(x)
        for share in shares(self.route(x)):
            out.index_add_(0, share.tokens, self.experts[share.expert](x[share.tokens]) * share.weights)
        return out

    def route(self, x: torch.Tensor) -> Routing:
        """Which experts each token of x f32 [tokens, hidden] goes through, and with which weights."""
        return route(self.router(x), self.top_k, self.normalised)


def route(logits: torch.Tensor, top_k: int, normalised: bool) -> Routing:
    """logits: f32 [tokens, experts]. The `top_k` most probable experts of each token by the softmax over all.

    A stable descending sort keeps equal ones in the order of their numbers (`topk` promises nothing there).
    """
    probabilities = _softmax(logits)
    ranked, order = torch.sort(probabilities, dim=-1, descending=True, stable=True)
    weights, chosen = ranked[:, :top_k].contiguous(), order[:, :top_k]
    if normalised:
        weights = weights / weights.sum(-1, keepdim=True)
    experts, places = torch.sort(chosen, dim=-1)
    return Routing(experts, weights.gather(-1, places))


def shares(routing: Routing) -> list[Share]:
    """The tokens of every expert that has any, experts in the order of their numbers."""
    found = []
    for expert in torch.unique(routing.experts).tolist():
        # At most one place of a token has the expert.
        tokens, places = torch.nonzero(routing.experts == expert, as_tuple=True)
        found.append(Share(expert, tokens, routing.weights[tokens, places].unsqueeze(-1)))
    return found


def _softmax(logits: torch.Tensor) -> torch.Tensor:
    """Row by row, of `exp` and sums of whole rows alone, whose bits do not depend on how many rows there are (`layers.mlp`, `rmsnorm`)."""
    powers = torch.exp(logits - logits.amax(-1, keepdim=True))
    return powers / powers.sum(-1, keepdim=True)
