"""Second moments of a layer's inputs over calibration rows: the Hessian of its output's squared error, up to a factor.

Knows rows of activations, not where they come from. The sum goes in stripes of columns, each by one thread and in the order of the
batches, so that the number of threads moves no bit.
"""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import Executor

import numpy as np
import torch
from numpy.typing import NDArray

STRIPE = 256
"""Columns of one task."""

LARGEST = 2.0**56
"""Larger activations, squared and summed over 2^16 rows, could pass the largest f32; no working layer comes near."""


LEAST_DAMPING = 0.01
"""Of H's mean diagonal is added to it at the least: what calibration saw too little of must not look free (QTIP's figure)."""

MOST_DAMPING = 1.0

SHRINKAGE = 0.5
"""Times columns / rows is the damping where that is more: a mean over few rows is itself uncertain by so much."""


def damping(columns: int, rows: int, shrinkage: float = SHRINKAGE) -> float:
    """What share of its mean diagonal is to be added to an H f32 [columns, columns] that is the mean over `rows` rows."""
    return min(MOST_DAMPING, max(LEAST_DAMPING, shrinkage * columns / rows))


class Moments:
    """Σ x xᵀ of rows x f32 [features], in f32: 2^24 rows would be needed for a sum to stall, and H's rounding error of some 1e−6 of its
    largest entry vanishes in a damping of 1e−2 of its mean diagonal. `rows`: how many were added; `dropped`: not finite, or too large.

    Given gaps g f32 of each row it also keeps Σ g xᵀ for each kind of gap, f32 [width of the gap, features].
    """

    def __init__(self, features: int, gaps: Sequence[int] = ()) -> None:
        """`gaps`: widths of the gaps that come with every row."""
        self._sum = torch.zeros(features, features)
        self._crossed = [torch.zeros(width, features) for width in gaps]
        self.rows = 0
        self.dropped = 0

    def add(self, inputs: torch.Tensor, pool: Executor, gaps: Sequence[torch.Tensor] = ()) -> None:
        """Add rows f32 [n, features] and their gaps, f32 [n, width] each."""
        usable = inputs.abs().amax(dim=1) <= LARGEST
        for gap in gaps:
            usable &= gap.abs().amax(dim=1) <= LARGEST
        if not usable.all():
            inputs, gaps = inputs[usable], [gap[usable] for gap in gaps]
        self.rows += inputs.shape[0]
        self.dropped += usable.shape[0] - inputs.shape[0]
        starts = range(0, inputs.shape[1], STRIPE)
        list(pool.map(lambda first: self._add_stripe(inputs, first), starts))
        for total, gap in zip(self._crossed, gaps, strict=True):
            list(pool.map(lambda first, total=total, gap=gap: _add_crossed(total, gap, inputs, first), starts))

    def mean(self) -> NDArray[np.float32]:
        """E[x xᵀ] f32 [features, features], in the memory of the sum, which is used up; NaN where no row was usable."""
        whole, self._sum = self._sum, torch.empty(0)
        for first in range(0, len(whole), STRIPE):
            whole[first : first + STRIPE, first:] = whole[first:, first : first + STRIPE].T.clone()
        return (whole.div_(self.rows) if self.rows else whole.fill_(torch.nan)).numpy()

    def crossed(self, kind: int) -> NDArray[np.float32]:
        """E[g xᵀ] f32 [width, features] for one kind of gap, in the memory of its sum."""
        return self._crossed[kind].div_(max(self.rows, 1)).numpy()

    @torch.inference_mode()
    def _add_stripe(self, rows: torch.Tensor, first: int) -> None:
        """The lower triangle's share of columns [first, first + STRIPE)."""
        last = min(first + STRIPE, rows.shape[1])
        self._sum[first:, first:last].addmm_(rows[:, first:].T, rows[:, first:last])


@torch.inference_mode()
def _add_crossed(total: torch.Tensor, gap: torch.Tensor, rows: torch.Tensor, first: int) -> None:
    """The share of columns [first, first + STRIPE) in Σ g xᵀ."""
    last = min(first + STRIPE, rows.shape[1])
    total[:, first:last].addmm_(gap.T, rows[:, first:last])
