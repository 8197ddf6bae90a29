"""A little held-out text for tests of budgets, and a source of weights whose layers can be replaced."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from arctool.bake.budget.held_out import HeldOut
from arctool.bake.source.checkpoint import Checkpoint
from arctool.quant.tensor import Weight
from arctool.run.config import ModelConfig

SMALL = HeldOut(
    measured=tuple(
        tuple(int(token) for token in np.random.default_rng(seed).integers(3, 512, length)) for seed, length in ((1, 40), (2, 9))
    ),
    checked=tuple(tuple(int(token) for token in np.random.default_rng(seed).integers(3, 512, 64)) for seed in (3, 4)),
)


@dataclass(frozen=True)
class Replaced:
    """The checkpoint with other weights under some keys."""

    checkpoint: Checkpoint
    weights: Mapping[str, Weight]

    @property
    def config(self) -> ModelConfig:
        return self.checkpoint.config

    @property
    def assets(self) -> Mapping[str, bytes]:
        return self.checkpoint.assets

    def weight(self, key: str) -> Weight:
        return self.weights[key] if key in self.weights else self.checkpoint.weight(key)

    def bias(self, key: str) -> NDArray[np.float32] | None:
        return self.checkpoint.bias(key)
