"""What a layer should be so that the model comes back to what it was, although the layer's input has drifted away.

With x what reaches the layer through the layers as they are stored and z what would reach it through the unquantised ones, the weights
that minimise E‖W z − V x‖² are V = W E[z xᵀ] H⁻¹ = W + W E[(z − x) xᵀ] H⁻¹, H = E[x xᵀ]. Where the layer's output joins the hidden
states, r and s of them, unquantised and stored, it can make good what those have lost as well: V also has E[(r − s) xᵀ] H⁻¹. So the
search aims at V, and every layer mends what a linear map of its input can mend. (GPTAQ, arXiv 2504.02692, feeds the first difference back
column by column.) Knows matrices only.
"""

from __future__ import annotations

from concurrent.futures import Executor
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

SHARE = 0.5
"""How much of the way to V is gone; see docs/calibration.md for the curve."""

COMPENSATION_SHRINKAGE = 6.0
"""That of `hessian.damping`: what is fitted to the drift holds for other text only as far as many rows agree on it."""

STRIPE = 256
"""Rows of one task; fixed, so that the number of threads moves no bit."""


@dataclass(frozen=True)
class Change:
    """V = W + W · `inputs` + `states`: `inputs` f32 [in, in] for the drift of the layer's inputs, `states` f32 [out, in] for that of the
    hidden states which its output joins, None where it joins none.
    """

    inputs: NDArray[np.float32]
    states: NDArray[np.float32] | None


def change(
    hessian: NDArray[np.float32], share: float, drift: NDArray[np.float32], lag: NDArray[np.float32] | None, pool: Executor
) -> Change | None:
    """The change for H = `hessian`, to which `share` of its mean diagonal is added (`hessian.damping`), `drift` = E[(z − x) xᵀ] f32
    [in, in] and `lag` = E[(r − s) xᵀ] f32 [hidden, in], which it overwrites.

    Solved in f64. None where the damped H has no factor or the result is not finite.
    """
    damped = torch.from_numpy(hessian.astype(np.float64))
    damped.diagonal().add_(share * float(damped.diagonal().mean()))
    factor, failed = torch.linalg.cholesky_ex(damped)
    del damped
    if failed.item() or not torch.isfinite(factor.diagonal()).all():
        return None
    for part in (drift, lag):
        if part is not None:
            _divide(torch.from_numpy(part), factor, pool)
            if not np.isfinite(part).all():
                return None
    return Change(drift, lag)


def _divide(matrix: torch.Tensor, factor: torch.Tensor, pool: Executor) -> None:
    """Replace `matrix` f32 [n, in] by matrix · (L Lᵀ)⁻¹ for the Cholesky factor L f64 [in, in]."""

    def solve(first: int) -> None:
        rows = matrix[first : first + STRIPE]
        rows.copy_(torch.cholesky_solve(rows.T.double(), factor).T)

    list(pool.map(solve, range(0, len(matrix), STRIPE)))


def compensated(weight: NDArray[np.float32], wanted: Change, pool: Executor, share: float = SHARE) -> NDArray[np.float32]:
    """W + share · (V − W) f32 [out, in] for `weight` W f32 [out, in]."""
    source, matrix = torch.from_numpy(weight), torch.from_numpy(wanted.inputs)
    target = np.empty_like(weight)

    def shift(first: int) -> None:
        rows = source[first : first + STRIPE]
        moved = torch.addmm(rows, rows, matrix, alpha=share)
        if wanted.states is not None:
            moved.add_(torch.from_numpy(wanted.states[first : first + STRIPE]), alpha=share)
        target[first : first + STRIPE] = moved.numpy()

    list(pool.map(shift, range(0, len(weight), STRIPE)))
    return target
