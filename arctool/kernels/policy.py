"""Which families of weights there are, by the kernels that they need: plain values, so that a policy's whole domain can be tested."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, get_args

WeightKind = Literal[
    "trellis-table",
    "trellis-sum2",
    "ggml-q2k",
    "ggml-q3k",
    "ggml-q4_0",
    "ggml-q4_1",
    "ggml-q4k",
    "ggml-q5_0",
    "ggml-q5_1",
    "ggml-q5k",
    "ggml-q6k",
    "ggml-q8_0",
    "ggml-f16",
    "fp8",
    "afq",
    "mxfp4",
    "dense-bf16",
    "dense-f32",
]
KINDS: tuple[WeightKind, ...] = get_args(WeightKind)


EXPERT_TILE = 16
"""Rows of one tile of a grouped product of experts: an expert's bytes are read once for each tile of the tokens that it has."""

GROUPED_FROM = 8
"""Tokens of a step from which experts are grouped. Measured on a GPU (facts/engine.md, A2): grouped wins at 16 tokens and from there on,
however empty its tiles are, and loses more than half at 1; 9 to 15 were not measured and go with their larger neighbours."""

ExpertKernel = Literal["gather", "grouped"]


def choose_experts(tokens: int, experts: int, top_k: int) -> ExpertKernel:
    """How a step of `tokens` tokens goes through a mixture of `experts`, `top_k` a token; total over its domain.

    gather: one product a (token, expert) pair. grouped: one product an expert and tile of its tokens. An expert's bits for a token are the
    same either way. A single expert is a dense layer: nothing is there to gather.
    """
    return "grouped" if tokens >= GROUPED_FROM or experts == 1 else "gather"


def gather_bytes(tokens: int, top_k: int, expert_bytes: int) -> int:
    """Bytes of weights that the gather kernel asks for: every pair reads its expert's."""
    return tokens * top_k * expert_bytes


def grouped_bytes(pairs: Sequence[int], expert_bytes: int) -> int:
    """Bytes of weights that the grouped kernel asks for, where expert e has `pairs[e]` tokens: one reading for each tile of them."""
    return sum(-(-count // EXPERT_TILE) for count in pairs) * expert_bytes
