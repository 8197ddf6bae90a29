"""Every implementation of the decode on this machine, in the form in which `verify` asks them."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from arctool.kernels.cpu.ir import LANES
from arctool.kernels.registry import Registry
from arctool.quant.tensor import PackedTensor


@dataclass(frozen=True)
class CpuDecoder:
    """The CPU's decode of whole rows; its row decoders are those of the products."""

    registry: Registry
    name: str = "cpu.decode"
    zero_signs: bool = True

    def accepts(self, weight: PackedTensor) -> bool:
        """The row decoders are general over geometries, and each GGML type has one."""
        return True

    def decode(self, weight: PackedTensor) -> tuple[NDArray[np.int64], NDArray[np.float32]]:
        """(all columns, their weights f32 [rows, in] in the basis that is stored)."""
        return np.arange(weight.in_features), self.registry.decode(weight)


@dataclass(frozen=True)
class ProductProbe:
    """The product, asked for sampled columns by unit vectors: x = e_j gives value · scale, with the oracle's one rounding.

    A dot product with a unit vector adds zeros to one product, so it has the oracle's bits if the row decoder has; but −0.0 + 0.0 is
    0.0, so the sign of a zero is lost before the scale is applied. Every column would cost as much as the oracle on rows of 1,500
    weights, and more on longer ones, since each costs a whole dot product. So: sixteen columns and the last, spread over the row so
    that each partial sum and each place within a trellis step is hit.
    """

    registry: Registry
    name: str = "cpu.linear (sampled columns)"
    zero_signs: bool = False

    def accepts(self, weight: PackedTensor) -> bool:
        """As the products: every geometry and GGML type."""
        return True

    def decode(self, weight: PackedTensor) -> tuple[NDArray[np.int64], NDArray[np.float32]]:
        """(sampled columns [n], their weights f32 [rows, n] in the basis that is stored)."""
        columns = sampled_columns(weight.in_features)
        units = np.zeros((len(columns), weight.in_features), np.float32)
        units[np.arange(len(columns)), columns] = 1.0
        prepared = self.registry.prepare(weight)
        return columns, self.registry.linear(torch.from_numpy(units), prepared).numpy().T


def sampled_columns(in_features: int) -> NDArray[np.int64]:
    """Rising columns of a row: all of a short one, else one in each of the 16 residues mod 16, from the first group to the last column."""
    if in_features <= LANES:
        return np.arange(in_features)
    groups = np.linspace(0, in_features // LANES - 1, LANES).astype(np.int64)
    return np.unique(np.append(groups * LANES + np.arange(LANES), in_features - 1))


def decoders(registry: Registry) -> tuple[CpuDecoder | ProductProbe, ...]:
    """What this machine has."""
    return (CpuDecoder(registry), ProductProbe(registry))
