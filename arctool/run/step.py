"""The flat token batch of one step: what every layer reads, and all that it may know of the sequences behind the tokens.

Tokens of all sequences lie one after the other, without padding.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray


@dataclass(frozen=True)
class Span:
    """One sequence's share of a step.

    `ids`: its tokens to compute, at positions `position ...` of the sequence; `blocks`: its block table, which covers them;
    `logit_tokens`: how many of its last tokens need logits (0: none; 1: the last one; more: verified or evaluated).
    """

    ids: Sequence[int]
    position: int
    blocks: Sequence[int]
    logit_tokens: int

    @property
    def context(self) -> int:
        """Tokens of the sequence that are in the cache once this step is done."""
        return self.position + len(self.ids)


@dataclass(frozen=True)
class StepInputs:
    """One step. `ids`, `positions`, `slots` (block · block_size + offset): i64 [tokens]; `starts[i]`: first row of `spans[i]`.

    `logit_rows`: i64 [logit rows], the rows of the batch whose logits are wanted, in the order of the spans.
    """

    spans: tuple[Span, ...]
    starts: tuple[int, ...]
    ids: NDArray[np.int64]
    positions: NDArray[np.int64]
    slots: NDArray[np.int64]
    logit_rows: NDArray[np.int64]


def build_step(spans: Sequence[Span], block_size: int) -> StepInputs:
    """Lay `spans` out as one flat batch."""
    ids: list[int] = []
    positions: list[int] = []
    slots: list[int] = []
    starts: list[int] = []
    wanted: list[int] = []
    for span in spans:
        starts.append(len(ids))
        ids.extend(span.ids)
        positions.extend(range(span.position, span.context))
        slots.extend(span.blocks[p // block_size] * block_size + p % block_size for p in range(span.position, span.context))
        wanted.extend(range(len(ids) - span.logit_tokens, len(ids)))
    return StepInputs(tuple(spans), tuple(starts), *(np.array(values, np.int64) for values in (ids, positions, slots, wanted)))
