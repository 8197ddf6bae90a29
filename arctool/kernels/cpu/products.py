"""The CPU's operations over prepared weights as single calls: f32 arrays in, f32 arrays out, each a short program of its own.

The engine runs whole steps as one program (`run.compiled`); these serve whoever needs one product: calibration, `verify`, tests.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from arctool.errors import GeometryError
from arctool.kernels.cpu import linear, stages
from arctool.kernels.cpu.operands import Rows, padded_width
from arctool.kernels.cpu.program import Program
from arctool.kernels.prepared import Prepared, PreparedRotation

Array = NDArray[np.float32]

TOKENS = 0
"""The one number of a step that these programs have."""


def multiply(x: Array, rows: Rows, rotation: PreparedRotation | None) -> Array:
    """y f32 [tokens, out] = x f32 [tokens, in] · Wᵀ, each dot product in the order of `ir.dot_oracle`."""
    tokens, inputs = x.shape
    program = Program(np.array([tokens], np.int64))
    width = padded_width(inputs)
    contiguous = np.ascontiguousarray(x)
    activations = contiguous
    if rotation is not None or width != inputs:
        activations = np.zeros((tokens, width), np.float32)
        program.add(stages.add_and_norm, turned(contiguous, activations, rotation), scratch=4 * width)
    y = np.empty((tokens, int(rows.operands[linear.ROWS])), np.float32)
    program.add(linear.product(rows.kind), placed(rows, activations, y), scratch=rows.scratch)
    program.seal()
    program.run()
    return y


def turned(x: Array, out: Array, rotation: PreparedRotation | None) -> NDArray[np.int64]:
    """Operands of `stages.add_and_norm` that only copies f32 [tokens, in] to `out`, rotated where there is a rotation."""
    operands = np.zeros(stages.N_SPREAD + stages.TARGET, np.int64)
    operands[stages.N_X], operands[stages.N_X_PITCH], operands[stages.N_WIDTH] = x.ctypes.data, x.shape[1], x.shape[1]
    operands[stages.N_COUNT], operands[stages.N_TARGETS] = TOKENS, 1
    signs, block = (0, 0) if rotation is None else (rotation.signs_in.ctypes.data, rotation.block_in)
    operands[stages.N_SPREAD :] = (out.ctypes.data, out.shape[1], signs, block)
    return operands


def placed(rows: Rows, x: Array | NDArray[np.int64], y: Array) -> NDArray[np.int64]:
    """The operands of a weight with those of a call on x and y."""
    operands = rows.operands.copy()
    operands[linear.X], operands[linear.X_PITCH] = x.ctypes.data, x.shape[-1]
    operands[linear.Y], operands[linear.Y_PITCH], operands[linear.COUNT] = y.ctypes.data, y.shape[1], TOKENS
    return operands


def decode_into(rows: Rows, dense: Array) -> None:
    """Write the weights f32 [out, in] of any kind into `dense`; rotated ones stay in the rotated basis."""
    program = Program(np.zeros(1, np.int64))
    program.add(linear.expansion(rows.kind), placed(rows, dense, dense), scratch=rows.scratch)
    program.seal()
    program.run()


def gather(prepared: Prepared, rows: Rows, ids: NDArray[np.int64]) -> Array:
    """Rows `ids` of the original matrix, f32 [tokens, in]: the bits of `weight.dense()[ids]`, and no other row is decoded."""
    if len(ids) and not 0 <= ids.min() <= ids.max() < prepared.out_features:
        raise IndexError(f"expected rows from 0 to {prepared.out_features - 1}, found {ids.min()} to {ids.max()}")
    y = np.empty((len(ids), prepared.in_features), np.float32)
    wanted = np.ascontiguousarray(ids, np.int64)
    program = Program(np.array([len(ids)], np.int64))
    program.add(linear.gathering(rows.kind), looked_up(prepared, rows, wanted, y), scratch=rows.scratch)
    program.seal()
    program.run()
    return y


def looked_up(prepared: Prepared, rows: Rows, ids: NDArray[np.int64], y: Array) -> NDArray[np.int64]:
    """Operands of `linear.gathering`. Raises GeometryError where rows of the weight are mixed."""
    rotation, operands = prepared.rotation, placed(rows, ids, y)
    operands[linear.BLOCK] = 0
    if rotation is not None:
        if rotation.block_out > 1:
            mixes = f"this {prepared.weight.label} mixes {rotation.block_out} of them"
            raise GeometryError(f"an embedding's rows are read one by one, and {mixes}; bake it again")
        operands[linear.BLOCK], operands[linear.BIAS] = rotation.block_in, rotation.signs_in.ctypes.data
    return operands
