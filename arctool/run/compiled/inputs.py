"""What changes from step to step: the numbers and arrays that a program's kernels read, at addresses that never change."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from arctool.kernels.cpu import attention
from arctool.kernels.cpu.attention_work import MOST_PARTS
from arctool.run.kv.blocks import blocks_for

TOKENS, UNITS, SPLITS, LOGITS, GATHER, GROUPED, GROUPS, NUMBERS = range(8)
"""The numbers of a step: how many tokens, units of attention, splits, and rows that need logits; whether experts are gathered, or grouped;
how many groups the pairs of a mixture fell into, which a kernel finds."""


@dataclass(frozen=True)
class StepLimits:
    """The largest step: tokens, rows with logits, sequences, and the longest of them."""

    tokens: int
    logits: int
    seqs: int
    model_len: int


@dataclass(frozen=True)
class Inputs:
    """What a step writes and kernels read, all i64."""

    ids: NDArray[np.int64]
    positions: NDArray[np.int64]
    slots: NDArray[np.int64]
    logit_rows: NDArray[np.int64]
    units: NDArray[np.int64]
    splits: NDArray[np.int64]
    tables: NDArray[np.int64]

    @classmethod
    def of(cls, limits: StepLimits, block_size: int) -> Inputs:
        def numbers(*shape: int) -> NDArray[np.int64]:
            return np.empty(shape, np.int64)

        tokens = limits.tokens
        table = limits.seqs * blocks_for(limits.model_len, block_size)
        units = numbers(tokens + MOST_PARTS, attention.UNIT)
        splits = numbers(limits.seqs, attention.JOIN)
        return cls(numbers(tokens), numbers(tokens), numbers(tokens), numbers(limits.logits), units, splits, numbers(table))
