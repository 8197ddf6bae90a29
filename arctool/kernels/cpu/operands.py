"""A prepared weight as the kernels of `linear` take it: which expander reads its rows, and where everything lies."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from arctool.kernels.cpu import linear
from arctool.kernels.cpu.ggml import EXPAND
from arctool.kernels.cpu.ir import LANES
from arctool.kernels.cpu.scaled import parts_of, row_decoder_of
from arctool.kernels.cpu.streams_ir import OVERRUN, expander
from arctool.kernels.cpu.tile_ir import host_tile
from arctool.kernels.prepared import Prepared
from arctool.quant.mxfp4 import Mxfp4Tensor
from arctool.quant.tensor import DenseTensor, GgmlTensor, ScaledTensor, TrellisTensor


def padded_width(features: int) -> int:
    """Floats of a row of activations: whole groups of 16, the rest zero."""
    return -(-features // LANES) * LANES


@dataclass(frozen=True)
class Rows:
    """`operands`: i64 [linear.OPERANDS] whose fields of the call are zero. `kind`: how the rows are read. `kept`: the arrays behind them."""

    operands: NDArray[np.int64]
    kind: linear.RowKind
    kept: tuple[NDArray[Any], ...]

    @property
    def scratch(self) -> int:
        """Bytes of memory that a lane needs to expand a panel."""
        return int(4 * self.operands[linear.PITCH] * max(self.operands[linear.PANEL], host_tile()[0]))


def rows_of(prepared: Prepared) -> Rows:
    """The operands of a weight [out, in] of any family; those of a stack are its experts' (`Prepared.rows`)."""
    weight, rows, inputs = prepared.weight, prepared.out_features, prepared.in_features
    fields, kept = np.zeros(linear.OPERANDS, np.int64), []

    def put(field: int, array: NDArray[Any]) -> None:
        kept.append(array)
        fields[field] = array.ctypes.data

    width = padded_width(inputs)
    fields[linear.ROWS], fields[linear.INPUTS], fields[linear.WIDTH], fields[linear.TAIL_FIRST] = rows, inputs, width, rows
    scales: NDArray[np.float32] = np.ones(rows, np.float32)
    pitch = width
    if isinstance(weight, TrellisTensor):
        packed = np.ascontiguousarray(weight.packed)
        computed = prepared.kind == "trellis-sum2"
        unit = expander(weight.geometry, computed)
        kind, scales = linear.trellis_rows(weight.geometry, computed), np.require(weight.scales, np.float32, ("C", "A"))
        put(linear.DATA, packed)
        put(linear.TABLE, prepared.table)
        put(linear.TAIL, _tail(packed))
        fields[linear.ROW_BYTES], fields[linear.PERIODS] = packed.shape[1], unit.periods(inputs)
        fields[linear.TAIL_FIRST] = max(0, rows - _tail_rows(packed))
        pitch = unit.periods(inputs) * unit.weights
    elif isinstance(weight, GgmlTensor):
        data = np.ascontiguousarray(weight.data)
        put(linear.DATA, data)
        fields[linear.ROW_BYTES], fields[linear.PERIODS] = data.shape[1], inputs // weight.type.block
        kind = linear.block_rows(EXPAND[weight.type.name])
    elif isinstance(weight, ScaledTensor):
        codes, beside, offsets = (np.ascontiguousarray(part) for part in parts_of(weight))
        put(linear.DATA, codes)
        put(linear.SIDE_A, beside)
        put(linear.SIDE_B, offsets)
        put(linear.TABLE, prepared.table)
        fields[linear.ROW_BYTES], fields[linear.PERIODS] = codes.shape[1], prepared.table.size
        fields[linear.SIDE_A_BYTES], fields[linear.SIDE_B_BYTES] = (beside[:1].nbytes, offsets[:1].nbytes)
        kind = linear.scaled_rows(row_decoder_of(weight), isinstance(weight, Mxfp4Tensor))
    else:
        assert isinstance(weight, DenseTensor)
        put(linear.DATA, weight.data)
        fields[linear.ROW_BYTES] = weight.data.itemsize * inputs
        kind = linear.BF16_ROWS if prepared.kind == "dense-bf16" else linear.F32_ROWS
    put(linear.SCALES, scales)
    fields[linear.PITCH] = pitch
    fields[linear.PANEL] = panel_rows(pitch)
    rotation = prepared.rotation
    block = 0 if rotation is None else rotation.block_out
    if rotation is not None:
        put(linear.SIGNS, rotation.signs_out)
    fields[linear.BLOCK], fields[linear.TASK] = block, max(linear.TASK_ROWS, block)
    return Rows(fields, kind, tuple(kept))


def panel_rows(pitch: int) -> int:
    """Rows that a lane expands at a time: whole tiles, as many as `linear.PANEL_BYTES` hold, at least one tile."""
    tile = host_tile()[0]
    return max(tile, min(linear.LONGEST_PANEL, linear.PANEL_BYTES // (4 * pitch)) // tile * tile)


def _tail_rows(packed: NDArray[np.uint8]) -> int:
    """Rows at the end whose last period could read behind the array."""
    return min(packed.shape[0], -(-OVERRUN // packed.shape[1]))


def _tail(packed: NDArray[np.uint8]) -> NDArray[np.uint8]:
    """A copy of those rows with `OVERRUN` bytes behind them."""
    last = packed[packed.shape[0] - _tail_rows(packed) :].reshape(-1)
    return np.concatenate([last, np.zeros(OVERRUN, np.uint8)])
