"""The policy over its whole domain."""

from __future__ import annotations

import itertools
from typing import get_args

from arctool.kernels.policy import PREFILL_TILE, KernelChoice, TokenClass, WeightKind, choose_linear


def test_generated_tokens_are_fused_and_prompt_tokens_go_through_tiles_whatever_the_weight() -> None:
    domain = list(itertools.product(TokenClass, get_args(WeightKind)))
    assert len(domain) == 8
    for token_class, kind in domain:
        expected = KernelChoice("fused", 0) if token_class is TokenClass.DECODE else KernelChoice("tiles", PREFILL_TILE)
        assert choose_linear(token_class, kind) == expected


def test_the_batch_size_cannot_be_asked_about() -> None:
    """The promise that neighbours change nothing rests on the policy not knowing how many there are."""
    assert set(choose_linear.__annotations__) == {"token_class", "kind", "return"}
