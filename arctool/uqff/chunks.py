"""The weights of one stored tensor in the basis of the model, a run of rows at a time: what lets a tensor of any size be measured.

A tensor of any rank is seen as a matrix: its last axis is a row, all axes before it count the rows. One of rank 1 has a value a row.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace
from typing import Final, Protocol

import numpy as np
from numpy.typing import NDArray

from arctool.errors import FormatError
from arctool.quant.rows import CHUNK_WEIGHTS
from arctool.quant.tensor import DenseTensor, GgmlTensor, ScaledTensor, TrellisTensor, Weight, as_matrix

MAX_ROW: Final = 1 << 17
"""Weights of the longest row that is decoded: no model has rows of half this length."""


class Rowwise(Protocol):
    """What gives some of its rows in the basis of the model: a weight, or a tensor of a source that is read as it is asked for."""

    @property
    def shape(self) -> tuple[int, ...]: ...

    def rows(self, which: slice, /) -> Rowwise: ...

    def dense(self) -> NDArray[np.float32]: ...


def matrix_shape(shape: tuple[int, ...]) -> tuple[int, int]:
    """(rows, weights of a row) of a tensor: [E, out, in] has E·out rows, [n] has n rows of one value."""
    if len(shape) < 2:
        return math.prod(shape), 1
    return math.prod(shape[:-1]), shape[-1]


def grain(weight: Weight | Rowwise) -> int:
    """Rows that can only be decoded together: a block of a rotation that mixes them."""
    return weight.rotation.block_out if isinstance(weight, TrellisTensor) and weight.rotation is not None else 1


def run_length(*weights: Weight | Rowwise) -> int:
    """Rows of a chunk of about `CHUNK_WEIGHTS` that suits all `weights`, which have one shape.

    Raises FormatError for rows of more than `MAX_ROW` weights, of which one alone would take a hundred times its bytes to decode.
    """
    together = math.lcm(*map(grain, weights))
    width = max(1, matrix_shape(weights[0].shape)[1])
    if width > MAX_ROW:
        raise FormatError(f"rows of {width} weights are longer than the {MAX_ROW} that are ever decoded; no model has them")
    return max(1, CHUNK_WEIGHTS // (width * together)) * together


def chunks(weight: Weight | Rowwise, rows: int) -> Iterator[tuple[int, NDArray[np.float32]]]:
    """(first row, weights f32 [≤ rows, width]) from the first row to the last: together exactly `weight.dense()`.

    `rows`: a multiple of `grain(weight)`, as `run_length` gives it.
    """
    count, width = matrix_shape(weight.shape)
    if isinstance(weight, GgmlTensor | ScaledTensor):
        weight = as_matrix(weight)
    for start in range(0, count if width else 0, rows):
        with np.errstate(over="ignore", invalid="ignore"):  # a hostile tensor's infinities are for the reader of the values to count
            values = _run(weight, start, min(rows, count - start))
        yield start, values.reshape(-1, width)


def _run(weight: Weight | Rowwise, start: int, count: int) -> NDArray[np.float32]:
    which = slice(start, start + count)
    if isinstance(weight, DenseTensor):
        return DenseTensor(weight.data.reshape(matrix_shape(weight.shape))).rows(which).dense()
    if isinstance(weight, TrellisTensor):
        rotated = weight.rows(which).decode()
        rotation = weight.rotation
        return rotated if rotation is None else replace(rotation, signs_out=rotation.signs_out[which]).restore(rotated)
    return weight.rows(which).dense()
