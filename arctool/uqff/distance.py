"""How far stored weights are from the original ones, and how near any code of that rate could come. Weights in, numbers out."""

from __future__ import annotations

from typing import Final

import numpy as np

from arctool.quant import fp8
from arctool.quant.tensor import DenseTensor, Fp8Tensor, GgmlTensor, TrellisTensor, Weight
from arctool.uqff.chunks import Rowwise, chunks, run_length

DENSE_ERROR: Final = 2.0**-16
"""Relative error allowed to a tensor stored as bf16 or f32: rounding to 8 significant bits stays below 2^-18."""

FOREIGN_ERROR: Final = 0.5
"""Of a type that only others write, however they searched: a matrix of zeros has 1, one that has nothing to do with the layer 2."""


def relative_error(stored: Weight, original: Weight | Rowwise) -> float:
    """‖W−Ŵ‖²/‖W‖² of two weights of one shape; 0 for equal ones, inf where only the original is zero."""
    gap, power = gap_and_power(stored, original)
    return gap / power if power else (0.0 if gap == 0 else float("inf"))


def gap_and_power(stored: Weight, original: Weight | Rowwise) -> tuple[float, float]:
    """(‖W−Ŵ‖², ‖W‖²) of two weights of one shape, summed in f64. Both are decoded a block of rows at a time."""
    gap = power = 0.0
    rows = run_length(stored, original)
    for (_, found), (_, want) in zip(chunks(stored, rows), chunks(original, rows), strict=True):
        truth = want.astype(np.float64)
        gap += float(np.square(found - truth).sum())
        power += float(np.square(truth).sum())
    return gap, power


def bit_limit(weight: Weight) -> float | None:
    """`rate_limit` of the weight's bits, None for one that is dense."""
    if isinstance(weight, TrellisTensor):
        return rate_limit(weight.geometry.bits_per_weight)
    return None if isinstance(weight, DenseTensor) else rate_limit(weight.stored_bits / np.prod(weight.shape, dtype=float))


def worst_rounding(weight: Weight) -> float:
    """The most that rounding alone can cost a weight that is stored so; no bound of a trellis, whose search is another matter."""
    if isinstance(weight, DenseTensor):
        return DENSE_ERROR
    if isinstance(weight, GgmlTensor):
        return weight.type.worst_error
    return fp8.WORST_ERROR if isinstance(weight, Fp8Tensor) else FOREIGN_ERROR


def rate_limit(bits: float) -> float:
    """2^(−2·bits): the least mean squared error over variance that any code of `bits` a weight has for independent Gaussian weights."""
    return float(2.0 ** (-2 * bits))
