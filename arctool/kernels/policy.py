"""Which kernel serves which call: pure functions of plain values, so that their whole domain can be tested.

The class of a token decides, never the size of its batch: a token that is generated goes through the fused kernels, whose order
of reduction does not depend on its neighbours; a prompt token goes through dense tiles of one fixed shape. A token recomputed
after preemption is still a generated token. So nobody's values depend on who shares the step.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Literal, get_args

PREFILL_TILE = 64
"""Rows of every dense prefill product: one fixed shape, padded with zeros, whatever the number of prompt tokens."""


class TokenClass(Enum):
    """How a token came to be: read from a prompt, or generated."""

    PREFILL = "prefill"
    DECODE = "decode"


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
Kernel = Literal["fused", "tiles"]


@dataclass(frozen=True)
class KernelChoice:
    """`kernel`: fused reads stored rows once a call; tiles decodes to a dense f32 matrix first. `tile`: rows a product, 0 for fused."""

    kernel: Kernel
    tile: int


def choose_linear(token_class: TokenClass, tiles_independent: bool) -> KernelChoice:
    """The linear kernel for one call; total over its domain.

    `tiles_independent`: whether the library's product of this shape was seen to give a row the same bits at every place of a tile. Where
    it does not (some libraries have special code for narrow matrices), prompts go through the fused kernel too: slower, but true.
    """
    if token_class is TokenClass.PREFILL and tiles_independent:
        return KernelChoice("tiles", PREFILL_TILE)
    return KernelChoice("fused", 0)


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
