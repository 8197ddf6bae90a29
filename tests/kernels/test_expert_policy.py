"""Gather or grouped, over the whole domain, and what each reads of the experts' weights."""

from __future__ import annotations

import pytest

from arctool.kernels.policy import EXPERT_TILE, GROUPED_FROM, choose_experts, gather_bytes, grouped_bytes

MIB = 1 << 20


def test_few_tokens_are_gathered_and_more_are_grouped_whatever_the_mixture() -> None:
    assert GROUPED_FROM == 8
    for experts in (2, 3, 8, 64, 128, 256, 512):
        for top_k in (1, 2, 6, 8):
            found = {tokens: choose_experts(tokens, experts, min(top_k, experts)) for tokens in range(1, 1025)}
            assert {tokens for tokens, kernel in found.items() if kernel == "gather"} == set(range(1, 8))
            assert set(found.values()) == {"gather", "grouped"}


@pytest.mark.parametrize("tokens", [0, 7, 8, 9, 15, 16, 682, 683])
def test_the_fill_of_the_tiles_decides_nothing(tokens: int) -> None:
    """A rule that waited for full tiles (683 tokens of 6 in 256 experts) kept the grouped kernel from every decode step."""
    assert choose_experts(tokens, 256, 6) == ("gather" if tokens < 8 else "grouped")


@pytest.mark.parametrize("tokens", [0, 1, 7, 8, 100])
def test_one_expert_is_one_matrix(tokens: int) -> None:
    assert choose_experts(tokens, 1, 1) == "grouped"


def test_the_bytes_of_gathering_grow_with_the_tokens() -> None:
    """facts/engine.md, A2: 2 MiB a matrix, 129 products a step, 6 experts a token."""
    gib = [129 * gather_bytes(tokens, 6, 2 * MIB) / (1 << 30) for tokens in (1, 8, 64, 512)]
    assert gib == pytest.approx([1.5, 12.1, 96.8, 774.0], abs=0.05)


def test_the_bytes_of_grouping_are_flat_until_an_expert_has_more_than_a_tile() -> None:
    assert 129 * grouped_bytes([12] * 256, 2 * MIB) / (1 << 30) == pytest.approx(64.5, abs=0.05)
    assert EXPERT_TILE == 16
    counted = {pairs: grouped_bytes([pairs], 10) for pairs in (0, 1, 15, 16, 17, 32, 33)}
    assert counted == {0: 0, 1: 10, 15: 10, 16: 10, 17: 20, 32: 20, 33: 30}
    assert grouped_bytes([], 10) == 0
    assert grouped_bytes([0, 1, 16, 17], 10) == 40


def test_grouping_never_reads_more_than_gathering() -> None:
    for pairs in ([1, 1, 1], [40, 0, 3], [16] * 8, [7]):
        assert grouped_bytes(pairs, 3) <= gather_bytes(sum(pairs), 1, 3)
