"""What exists, what it accepts, and what really ran: the one door through which the engine calls kernels.

A `Registry` is made once and passed along. It asks the policy which kernel serves a call, runs it, and counts it, so that a
measurement or a test that claims a path can read the counter.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

import numpy as np
import torch
from numpy.typing import NDArray

from arctool.kernels.cpu.linear import decode_trellis, fused_bf16, fused_f32, fused_trellis, pad_columns, padded_width
from arctool.kernels.cpu.rotation import restore_output, rotate_input
from arctool.kernels.policy import TokenClass, choose_linear
from arctool.kernels.prepared import Prepared, prepare_dense, prepare_trellis
from arctool.quant.codebooks import RUNGS
from arctool.quant.tensor import DenseTensor, TrellisTensor, Weight

__all__ = ["Implementation", "Prepared", "Registry", "TokenClass", "default_registry"]


@dataclass(frozen=True)
class Implementation:
    """One line of `arctool doctor`: `operation` on `backend`, what it accepts, and why it is unavailable (empty if it is not)."""

    name: str
    operation: str
    backend: str
    accepts: str
    unavailable: str = ""


class Registry:
    """Kernels of one device. Not shared between threads that run at the same time: it owns a scratch matrix."""

    def __init__(self, implementations: tuple[Implementation, ...]) -> None:
        self.implementations = implementations
        self._counts: Counter[str] = Counter()
        self._tables: dict[str, NDArray[np.float32]] = {}
        self._scratch = np.empty(0, np.float32)

    def engagement(self) -> Mapping[str, int]:
        """How many calls each implementation has served."""
        return dict(self._counts)

    def prepare(self, weight: Weight) -> Prepared:
        """Make a weight ready. Raises GeometryError where its parts do not agree."""
        if isinstance(weight, DenseTensor):
            return prepare_dense(weight)
        weight.check("weight")
        if weight.codebook.kind == "sum2":
            return prepare_trellis(weight, np.empty(0, np.float32))
        digest = weight.codebook.digest
        if digest not in self._tables:
            self._tables[digest] = np.ascontiguousarray(weight.codebook.values(weight.geometry)).reshape(-1)
        return prepare_trellis(weight, self._tables[digest])

    def embedding(self, ids: torch.Tensor, weight: Prepared) -> torch.Tensor:
        """Rows f32 [tokens, hidden] of a dense embedding for int64 ids [tokens]."""
        self._counts["cpu.embedding"] += 1
        dense = weight.weight
        if not isinstance(dense, DenseTensor):
            raise TypeError("an embedding is dense in this version; the recipe refuses any other rung for it")
        return torch.from_numpy(np.ascontiguousarray(DenseTensor(dense.data[ids.numpy()]).dense()))

    def linear(self, x: torch.Tensor, weight: Prepared, token_class: TokenClass) -> torch.Tensor:
        """y f32 [tokens, out] = x f32 [tokens, in] · Wᵀ, by the kernel that the policy names for tokens of this class."""
        choice = choose_linear(token_class, weight.kind)
        self._counts[f"cpu.{choice.kernel}.{weight.kind}"] += 1
        inputs = x.numpy()
        if weight.rotation is not None:
            rotated = np.zeros((inputs.shape[0], padded_width(inputs.shape[1])), np.float32)
            rotate_input(np.ascontiguousarray(inputs), weight.rotation.signs_in, weight.rotation.block_in, rotated)
        else:
            rotated = pad_columns(inputs)
        if choice.kernel == "fused":
            outputs = self._fused(rotated, weight)
        else:
            outputs = self._tiles(rotated[:, : inputs.shape[1]], weight, choice.tile)
        if weight.rotation is not None:
            restore_output(outputs, weight.rotation.signs_out, weight.rotation.block_out)
        return torch.from_numpy(outputs)

    def decode(self, weight: TrellisTensor) -> NDArray[np.float32]:
        """The trellis weights f32 [out, in] in the rotated basis, for comparison with the oracle."""
        self._counts["cpu.decode"] += 1
        dense = np.empty(weight.shape, np.float32)
        self._decode_into(self.prepare(weight), dense)
        return dense

    def _fused(self, x: NDArray[np.float32], prepared: Prepared) -> NDArray[np.float32]:
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

    def _tiles(self, x: NDArray[np.float32], prepared: Prepared, tile: int) -> NDArray[np.float32]:
        """Products of exactly `tile` rows each, the last one padded with zeros."""
        matrix = torch.from_numpy(self._dense_matrix(prepared)).T
        tokens = x.shape[0]
        padded = torch.zeros((-(-tokens // tile) * tile, x.shape[1]))
        padded[:tokens] = torch.from_numpy(x)
        y = torch.cat([part @ matrix for part in padded.split(tile)]) if tokens else torch.zeros((0, prepared.out_features))
        return np.ascontiguousarray(y.numpy()[:tokens])

    def _dense_matrix(self, prepared: Prepared) -> NDArray[np.float32]:
        """The f32 matrix [out, in]; decoded ones share one scratch buffer, which the next call overwrites."""
        weight = prepared.weight
        if isinstance(weight, DenseTensor) and weight.data.dtype == np.float32:
            return weight.dense()
        size = prepared.out_features * prepared.in_features
        if self._scratch.size < size:
            self._scratch = np.empty(size, np.float32)
        dense = self._scratch[:size].reshape(prepared.out_features, prepared.in_features)
        if isinstance(weight, DenseTensor):
            np.left_shift(weight.data.astype(np.uint32), 16, out=dense.view(np.uint32))
        else:
            self._decode_into(prepared, dense)
        return dense

    def _decode_into(self, prepared: Prepared, dense: NDArray[np.float32]) -> None:
        weight = prepared.weight
        assert isinstance(weight, TrellisTensor)
        kernel = decode_trellis(weight.geometry, prepared.kind == "trellis-sum2")
        kernel(weight.packed, prepared.table, weight.scales, dense)


def geometries_of(kind: Literal["sum2", "table"]) -> str:
    """Names of the geometries of all rungs with that kind of codebook, each once."""
    found = (rung.geometry.name for rung in RUNGS.values() if (rung.codebook_name == "sum2") == (kind == "sum2"))
    return ", ".join(dict.fromkeys(found))


def default_registry() -> Registry:
    """The CPU kernels, and what this machine lacks for others."""
    triton = "" if torch.cuda.is_available() else "no CUDA device; Triton kernels come with the GPU engine"
    return Registry(
        (
            Implementation("cpu.fused.trellis-table", "linear", "numba", f"tables: {geometries_of('table')}; generated tokens"),
            Implementation("cpu.fused.trellis-sum2", "linear", "numba", f"sum2: {geometries_of('sum2')}; generated tokens"),
            Implementation("cpu.fused.dense-bf16", "linear", "numba", "bf16 rows; generated tokens"),
            Implementation("cpu.fused.dense-f32", "linear", "numba", "f32 rows; generated tokens"),
            Implementation("cpu.tiles", "linear", "numba + torch", "every weight; prompt tokens, 64 rows a product"),
            Implementation("cpu.decode", "decode", "numba", "every trellis weight; bit-exact with the oracle"),
            Implementation("cpu.embedding", "embedding", "numpy", "bf16 and f32 embeddings"),
            Implementation("triton.linear", "linear", "triton", "trellis weights on a GPU", triton or "not built in this version"),
        )
    )
