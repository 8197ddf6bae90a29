"""The flat token batch of one step: what every layer reads, and all that it may know of the sequences behind the tokens.

Tokens of all sequences lie one after the other, without padding. Tokens of the prefill class come first, so that a layer can
hand each class to its kernels as one block of rows.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from arctool.kernels.registry import TokenClass


@dataclass(frozen=True)
class Span:
    """One sequence's share of a step.

    `ids`: its tokens to compute, at positions `position ...` of the sequence; `blocks`: its block table, which covers them;
    `logit_tokens`: how many of its last tokens need logits (0: none; 1: it is decoded; more: verified or evaluated).
    """

    ids: Sequence[int]
    position: int
    blocks: Sequence[int]
    token_class: TokenClass
    logit_tokens: int

    @property
    def context(self) -> int:
        """Tokens of the sequence that are in the cache once this step is done."""
        return self.position + len(self.ids)


@dataclass(frozen=True)
class Rows:
    """Rows `[0, prefill)` of a batch of `total` are of the prefill class, the others of the decode class."""

    prefill: int
    total: int


@dataclass(frozen=True)
class StepInputs:
    """One step. `ids`, `positions`, `slots` (block · block_size + offset): i64 [tokens]; `starts[i]`: first row of `spans[i]`.

    `logit_indices`: i64 [logit rows], the rows of the batch whose logits are wanted, in the order of the spans.
    """

    spans: tuple[Span, ...]
    starts: tuple[int, ...]
    ids: torch.Tensor
    positions: torch.Tensor
    slots: torch.Tensor
    rows: Rows
    logit_indices: torch.Tensor
    logit_rows: Rows


def build_step(spans: Sequence[Span], block_size: int) -> StepInputs:
    """Lay `spans` out as one flat batch. Spans of the prefill class must come first."""
    ids: list[int] = []
    positions: list[int] = []
    slots: list[int] = []
    starts: list[int] = []
    wanted: list[int] = []
    prefill = prefill_wanted = 0
    for span in spans:
        starts.append(len(ids))
        ids.extend(span.ids)
        positions.extend(range(span.position, span.context))
        slots.extend(span.blocks[p // block_size] * block_size + p % block_size for p in range(span.position, span.context))
        wanted.extend(range(len(ids) - span.logit_tokens, len(ids)))
        if span.token_class is TokenClass.PREFILL:
            if prefill != starts[-1]:
                raise ValueError("spans of the prefill class must come before those of the decode class")
            prefill, prefill_wanted = len(ids), len(wanted)
    return StepInputs(
        spans=tuple(spans),
        starts=tuple(starts),
        ids=torch.tensor(ids, dtype=torch.int64),
        positions=torch.tensor(positions, dtype=torch.int64),
        slots=torch.tensor(slots, dtype=torch.int64),
        rows=Rows(prefill, len(ids)),
        logit_indices=torch.tensor(wanted, dtype=torch.int64),
        logit_rows=Rows(prefill_wanted, len(wanted)),
    )
