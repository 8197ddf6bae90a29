"""The CPU's linear products over prepared weights, in the form in which the registry calls them: f32 arrays in, f32 arrays out.

Joins the jitted kernels to the families of weights; the rotation and the choice between the two products are the registry's.
"""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray

from arctool.kernels.cpu.linear import decode_trellis, fused_bf16, fused_f32, fused_trellis
from arctool.kernels.policy import PREFILL_TILE
from arctool.kernels.prepared import Prepared
from arctool.quant.tensor import DenseTensor, TrellisTensor

Array = NDArray[np.float32]


def fused(x: Array, prepared: Prepared) -> Array:
    """y f32 [tokens, out] for x f32 [tokens, in padded to 16], each dot product in the order of `ir.dot_oracle`."""
    y = np.empty((x.shape[0], prepared.out_features), np.float32)
    weight = prepared.weight
    if isinstance(weight, TrellisTensor):
        kernel = fused_trellis(weight.geometry, prepared.kind == "trellis-sum2")
        kernel(weight.packed, prepared.table, weight.scales, x, weight.in_features, y)
    elif prepared.kind == "dense-bf16":
        fused_bf16(weight.data, x, y)
    else:
        fused_f32(weight.data, x, y)
    return y


def decode_into(prepared: Prepared, dense: Array) -> None:
    """Write the weights f32 [out, in] of any kind into `dense`; trellis ones stay in the rotated basis."""
    weight = prepared.weight
    if isinstance(weight, DenseTensor):
        if prepared.kind == "dense-bf16":
            np.left_shift(weight.data.astype(np.uint32), 16, out=dense.view(np.uint32))
        else:
            dense[...] = weight.data
        return
    kernel = decode_trellis(weight.geometry, prepared.kind == "trellis-sum2")
    kernel(weight.packed, prepared.table, weight.scales, dense)


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
