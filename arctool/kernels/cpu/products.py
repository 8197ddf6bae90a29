"""The CPU's linear products over prepared weights, in the form in which the registry calls them: f32 arrays in, f32 arrays out.

Joins the jitted kernels to the families of weights; the rotation of activations and the choice between the two products are the registry's.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from arctool.errors import GeometryError
from arctool.kernels.cpu.ggml import decode_blocks, fused_blocks
from arctool.kernels.cpu.linear import decode_trellis, fused_bf16, fused_f32, fused_trellis
from arctool.kernels.cpu.rotation import restore_output
from arctool.kernels.cpu.scaled import kernels_of, parts_of
from arctool.kernels.policy import PREFILL_TILE
from arctool.kernels.prepared import Prepared
from arctool.quant.tensor import GgmlTensor, ScaledTensor, TrellisTensor

Array = NDArray[np.float32]


TILE_WEIGHTS = 1 << 24
"""Weights that are decoded for tiles at a time: 64 MB of f32, so that a table over the vocabulary needs no second copy of itself."""


def fused(x: Array, prepared: Prepared) -> Array:
    """y f32 [tokens, out] for x f32 [tokens, in padded to 16], each dot product in the order of `ir.dot_oracle`."""
    y = np.empty((x.shape[0], prepared.out_features), np.float32)
    weight = prepared.weight
    if isinstance(weight, TrellisTensor):
        kernel = fused_trellis(weight.geometry, prepared.kind == "trellis-sum2")
        kernel(frozen(weight.packed), prepared.table, frozen(weight.scales), x, weight.in_features, y)
    elif isinstance(weight, GgmlTensor):
        fused_blocks(weight.type.name)(frozen(weight.data), x, y)
    elif isinstance(weight, ScaledTensor):
        kernel, _ = kernels_of(weight)
        kernel(*map(frozen, parts_of(weight)), prepared.table, x, weight.in_features, y)
    elif prepared.kind == "dense-bf16":
        fused_bf16(weight.data, x, y)
    else:
        fused_f32(weight.data, x, y)
    return y


def decode_into(prepared: Prepared, dense: Array) -> None:
    """Write the weights f32 [out, in] of any kind into `dense`; trellis ones stay in the rotated basis."""
    weight = prepared.weight
    if isinstance(weight, TrellisTensor):
        kernel = decode_trellis(weight.geometry, prepared.kind == "trellis-sum2")
        kernel(frozen(weight.packed), prepared.table, frozen(weight.scales), dense)
    elif isinstance(weight, GgmlTensor):
        decode_blocks(weight.type.name)(frozen(weight.data), dense)
    elif isinstance(weight, ScaledTensor):
        _, kernel = kernels_of(weight)
        kernel(*map(frozen, parts_of(weight)), prepared.table, dense)
    elif prepared.kind == "dense-bf16":
        np.left_shift(weight.data.astype(np.uint32), 16, out=dense.view(np.uint32))
    else:
        dense[...] = weight.data


def gather(prepared: Prepared, ids: NDArray[np.int64]) -> Array:
    """Rows `ids` of the original matrix, f32 [tokens, in]: the bits of `weight.dense()[ids]`, and no other row is decoded.

    A rotated row is restored in the oracle's order (H_in, S_in, S_out). Raises GeometryError where rows of the trellis are mixed.
    """
    rotation = prepared.rotation
    if rotation is not None and rotation.block_out > 1:
        raise GeometryError(
            f"an embedding's rows are read one by one, and this {prepared.weight.label} mixes {rotation.block_out} of them; bake it again"
        )
    rows = np.empty((len(ids), prepared.in_features), np.float32)
    decode_into(prepared.rows(ids), rows)
    if rotation is not None:
        restore_output(rows, rotation.signs_in, rotation.block_in)
        rows *= rotation.signs_out[ids][:, None]
    return rows


def row_parts(prepared: Prepared) -> list[slice]:
    """The rows in as few runs of at most `TILE_WEIGHTS` weights as it takes, all but equal, so that none is narrow."""
    rows, in_features = prepared.out_features, prepared.in_features
    count = min(rows, -(-rows * in_features // TILE_WEIGHTS))
    return [slice(rows * i // count, rows * (i + 1) // count) for i in range(count)]


def frozen(array: NDArray[Any]) -> NDArray[Any]:
    """A read-only view, as mapped files give them: one machine code of each kernel serves artifacts and memory alike."""
    view = array.view()
    view.flags.writeable = False
    return view


def tiles(x: Array, matrix: Array) -> Array:
    """y f32 [tokens, out] = x · matrixᵀ for x f32 [tokens, in], in products of exactly `PREFILL_TILE` rows, the last padded with zeros."""
    tokens = x.shape[0]
    if not tokens:
        return np.empty((0, matrix.shape[0]), np.float32)
    padded = torch.zeros((-(-tokens // PREFILL_TILE) * PREFILL_TILE, x.shape[1]))
    padded[:tokens] = torch.from_numpy(x)
    transposed = torch.from_numpy(matrix).T
    y = torch.cat([part @ transposed for part in padded.split(PREFILL_TILE)])
    return np.ascontiguousarray(y.numpy()[:tokens])


def tiles_independent(matrix: Array) -> bool:
    """Whether a tile's product with `matrix` f32 [out, in] gives a row the same bits at every place and in any company.

    Two fixed random rows, so that the verdict does not depend on which request comes first: they take turns over all places of two
    tiles, and one of them stands alone among zeros.
    """
    probes = np.random.Generator(np.random.PCG64(0)).standard_normal((2, matrix.shape[1])).astype(np.float32)
    turns = np.arange(PREFILL_TILE) % 2
    first, second = (tiles(probes[order], matrix).view(np.uint32) for order in (turns, 1 - turns))
    alone = tiles(probes[:1], matrix).view(np.uint32)[0]
    places = np.where(turns[:, None] == 0, first, second), np.where(turns[:, None] == 1, first, second)
    return bool((places[0] == alone).all() and (places[1] == places[1][0]).all())
