"""Which kernel serves which call: pure functions of plain values, so that their whole domain can be tested.

The class of a token decides, never the size of its batch: a token that is generated goes through the fused kernels, whose order
of reduction does not depend on its neighbours; a prompt token goes through dense tiles of one fixed shape. A token recomputed
after preemption is still a generated token. So nobody's values depend on who shares the step.
"""

from __future__ import annotations

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
