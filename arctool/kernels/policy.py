"""Which kernel serves which call: pure functions of plain values, so that their whole domain can be tested.

The class of a token decides, never the size of its batch: a token that is generated goes through the fused kernels, whose order
of reduction does not depend on its neighbours; a prompt token goes through dense tiles of one fixed shape. A token recomputed
after preemption is still a generated token. So nobody's values depend on who shares the step.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from typing import Literal

PREFILL_TILE = 64
"""Rows of every dense prefill product. One fixed shape, padded with zeros, makes each row independent of how many others there are."""


class TokenClass(Enum):
    """How a token came to be: read from a prompt, or generated."""

    PREFILL = "prefill"
    DECODE = "decode"


WeightKind = Literal["trellis-table", "trellis-sum2", "dense-bf16", "dense-f32"]


@dataclass(frozen=True)
class KernelChoice:
    """`kernel`: fused reads packed rows once a call; tiles decodes to a dense f32 matrix first. `tile`: rows a product, 0 for fused."""

    kernel: Literal["fused", "tiles"]
    tile: int


def choose_linear(token_class: TokenClass, kind: WeightKind) -> KernelChoice:
    """The linear kernel for one call; total over its domain."""
    del kind  # Every kind has both kernels today; it stays in the signature because a GPU's choice will differ by kind.
    if token_class is TokenClass.DECODE:
        return KernelChoice("fused", 0)
    return KernelChoice("tiles", PREFILL_TILE)
