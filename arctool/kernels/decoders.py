"""Every implementation of the trellis decode on this machine, in the form in which `verify` asks them."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from arctool.kernels.policy import TokenClass
from arctool.kernels.registry import Registry
from arctool.quant.tensor import TrellisTensor


@dataclass(frozen=True)
class CpuDecoder:
    """The numba decode that the dense path of the CPU engine uses; its row decoders are those of the fused kernels."""

    registry: Registry
    name: str = "cpu.decode"

    def accepts(self, weight: TrellisTensor) -> bool:
        """The row decoders are general over geometries."""
        return True

    def decode(self, weight: TrellisTensor) -> NDArray[np.float32]:
        """f32 [rows, in] in the rotated basis."""
        return self.registry.decode(weight)


@dataclass(frozen=True)
class FusedProbe:
    """The fused kernel asked for its weights one column at a time: x = e_j gives scale · value exactly, for sampled columns.

    A dot product with a unit vector adds zeros to one product, so it has the oracle's bits if the row decoder has. Columns that are
    not sampled are filled from the CPU decoder, which is compared in full by itself.
    """

    registry: Registry
    name: str = "cpu.fused (sampled columns)"
    columns: int = 8

    def accepts(self, weight: TrellisTensor) -> bool:
        """As the fused kernels: every geometry."""
        return True

    def decode(self, weight: TrellisTensor) -> NDArray[np.float32]:
        """f32 [rows, in] in the rotated basis."""
        dense = self.registry.decode(weight)
        chosen = np.unique(np.linspace(0, weight.in_features - 1, self.columns).astype(np.int64))
        units = np.zeros((len(chosen), weight.in_features), np.float32)
        units[np.arange(len(chosen)), chosen] = 1.0
        products = self.registry.linear(torch.from_numpy(units), self.registry.prepare(weight), TokenClass.DECODE)
        dense[:, chosen] = products.numpy().T
        return dense


def decoders(registry: Registry) -> tuple[CpuDecoder | FusedProbe, ...]:
    """What this machine has."""
    return (CpuDecoder(registry), FusedProbe(registry))
