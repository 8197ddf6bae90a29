"""The comparison of one layer: what is decoded ahead is bounded, and each block is compared once, in order."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future
from typing import Any

import numpy as np
import pytest

from arctool.quant.ggml import Q8_0
from arctool.quant.tensor import GgmlTensor, PackedTensor
from arctool.uqff import comparison
from arctool.uqff.answers import Tally


class Counting:
    """An executor that works at once and counts; and a decoder that is right and counts."""

    name, zero_signs = "counting", True

    def __init__(self) -> None:
        self.ahead = self.most = 0
        self.rows: list[int] = []

    def submit(self, function: Callable[[], Any]) -> Future[Any]:
        self.ahead += 1
        self.most = max(self.most, self.ahead)
        future: Future[Any] = Future()
        future.set_result(function())
        return future

    def accepts(self, weight: PackedTensor) -> bool:
        return True

    def decode(self, weight: PackedTensor) -> tuple[np.ndarray, np.ndarray]:
        self.ahead -= 1
        self.rows.append(weight.shape[0])
        return np.arange(weight.in_features), weight.decode()


def test_only_so_many_blocks_are_decoded_ahead(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(comparison, "BLOCK_WEIGHTS", 64)
    weights = np.random.default_rng(0).standard_normal((41, 32)).astype(np.float32)
    weight, counting, tally = GgmlTensor.encoded(Q8_0, weights, "w"), Counting(), Tally("implementations")
    finished: list[int] = []
    counts = comparison.compare_layer("w", weight, [counting], tally, counting, lambda: finished.append(len(counting.rows)))  # type: ignore[arg-type]
    assert counts == {"counting": (41 * 32, 0)}
    assert counting.rows == [2] * 20 + [1]
    assert counting.most == comparison.AHEAD + 1
    assert finished == list(range(1, 22))
    assert tally.answer().passed
