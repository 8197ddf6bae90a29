"""Routing, grouping and adding up of a mixture, each by itself: what is chosen, where pairs lie, in which order outputs are added."""

from __future__ import annotations

import numpy as np
import pytest

from arctool.kernels.cpu import experts
from arctool.kernels.cpu.exp_ir import exp_oracle
from arctool.kernels.cpu.program import Program

TOKENS, GROUPS, GATHER = range(3)


def routed(logits: np.ndarray, top_k: int, normalised: bool, gather: bool) -> dict[str, np.ndarray]:
    """The arrays that `route` and `group` write for logits f32 [tokens, experts]."""
    tokens, count = logits.shape
    pairs = tokens * top_k
    found = {
        "chosen": np.full((tokens, top_k), -1, np.int64),
        "weights": np.full((tokens, top_k), np.nan, np.float32),
        "places": np.full(pairs, -1, np.int64),
        "order": np.full(pairs, -1, np.int64),
        "groups": np.full((max(pairs, count), experts.GROUP), -1, np.int64),
        "step": np.array([tokens, -1, int(gather)], np.int64),
    }
    operands = np.zeros(experts.ROUTE_OPERANDS, np.int64)
    operands[:] = (
        logits.ctypes.data, count, count, top_k, int(normalised), found["chosen"].ctypes.data, found["weights"].ctypes.data,
        found["places"].ctypes.data, found["order"].ctypes.data, found["groups"].ctypes.data, TOKENS, GROUPS, GATHER,
    )  # fmt: skip
    program = Program(found["step"])
    program.add(experts.route, operands, scratch=4 * count)
    program.add(experts.group, operands, scratch=16 * count)
    program.seal()
    program._memory[:] = 0xFF
    program.run()
    found["groups"] = found["groups"][: found["step"][GROUPS]]
    return found


@pytest.mark.parametrize("normalised", [False, True])
def test_the_most_probable_are_chosen_in_the_order_of_their_numbers_and_ties_go_to_the_lower(normalised: bool) -> None:
    logits = np.array([[1, 3, 2, 0], [0, 0, 0, 0], [5, 1, 5, 5], [-1, 2, 2, 2]], np.float32)
    found = routed(logits, 2, normalised, gather=False)
    assert found["chosen"].tolist() == [[1, 2], [0, 1], [0, 2], [1, 2]]
    for row, chosen, weights in zip(logits, found["chosen"], found["weights"], strict=True):
        powers = exp_oracle(row - row.max())
        total = np.float32(0)
        for power in powers:
            total += power
        want = (powers / total)[chosen]
        best_first = want[np.argsort(-want, kind="stable")]
        np.testing.assert_array_equal(weights, want / (best_first[0] + best_first[1]) if normalised else want)


@pytest.mark.parametrize("gather", [False, True])
def test_every_pair_lies_in_the_group_of_its_expert_once(gather: bool) -> None:
    logits = np.random.default_rng(0).standard_normal((23, 5)).astype(np.float32)
    found = routed(logits, 3, True, gather)
    pairs = 23 * 3
    assert sorted(found["order"].tolist()) == list(range(pairs))
    np.testing.assert_array_equal(found["order"][found["places"]], np.arange(pairs))
    covered = []
    for expert, first, count in found["groups"]:
        assert (found["chosen"].reshape(-1)[found["order"][first : first + count]] == expert).all()
        covered += range(first, first + count)
    assert covered == list(range(pairs))
    assert len(found["groups"]) == (pairs if gather else 5)


def test_outputs_are_added_from_nothing_in_the_order_of_the_experts_numbers() -> None:
    generator = np.random.default_rng(1)
    tokens, top_k, width = 6, 4, 40
    y = (generator.standard_normal((tokens * top_k, width)) * 2.0 ** generator.integers(-20, 20, (tokens * top_k, 1))).astype(np.float32)
    places = generator.permutation(tokens * top_k).astype(np.int64)
    weights = generator.standard_normal((tokens, top_k)).astype(np.float32)
    out = np.full((tokens, width), np.nan, np.float32)
    operands = np.zeros(experts.COMBINE_OPERANDS, np.int64)
    operands[:] = (y.ctypes.data, width, out.ctypes.data, width, width, top_k, places.ctypes.data, weights.ctypes.data, TOKENS)
    program = Program(np.array([tokens], np.int64))
    program.add(experts.combine, operands)
    program.seal()
    program.run()
    want, falling = np.zeros((2, tokens, width), np.float32)
    for rank in range(top_k):
        for sums, at in ((want, rank), (falling, top_k - 1 - rank)):
            sums += y[places.reshape(tokens, top_k)[:, at]] * weights[:, at : at + 1]
    assert not np.array_equal(want, falling), "the order would not show"
    np.testing.assert_array_equal(out, want)
