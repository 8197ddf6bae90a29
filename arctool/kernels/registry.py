"""What exists, what it accepts, and what really ran: the one door through which the engine calls kernels.

A `Registry` is made once and passed along. It runs a call, or hands its kernels to a compiled step, and counts both under the names that
`arctool doctor` prints, so that a measurement or a test that claims a path can read the counter.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

import numpy as np
import torch
from numpy.typing import NDArray

from arctool.kernels.cpu.operands import rows_of
from arctool.kernels.cpu.products import decode_into, gather, multiply
from arctool.kernels.cpu.scaled import table_of
from arctool.kernels.policy import KINDS, WeightKind
from arctool.kernels.prepared import Prepared, prepare_dense, prepare_ggml, prepare_scaled, prepare_trellis
from arctool.quant.tensor import DenseTensor, GgmlTensor, PackedTensor, ScaledTensor, Weight

__all__ = ["Implementation", "Prepared", "Registry", "default_registry", "embedding_name", "linear_name"]

DECODE = "cpu.decode"
ATTENTION = "cpu.attention"
SPLIT_ATTENTION = "cpu.attention.split"
GATHERED_EXPERTS, GROUPED_EXPERTS = "cpu.experts.gather", "cpu.experts.grouped"


@dataclass(frozen=True)
class Implementation:
    """One kernel: its name is its counter. `accepts` is for people; `unavailable` says why it cannot run here, empty if it can."""

    name: str
    operation: Literal["linear", "decode", "embedding", "attention", "experts"]
    backend: str
    accepts: str
    unavailable: str = ""


def linear_name(kind: WeightKind) -> str:
    """Name of a CPU linear kernel, for the table and for the counter."""
    return f"cpu.linear.{kind}"


def embedding_name(kind: WeightKind) -> str:
    """Name of a CPU embedding kernel, for the table and for the counter."""
    return f"cpu.embedding.{kind}"


class Registry:
    """Kernels of one device. Not shared between threads that run at the same time."""

    def __init__(self, implementations: tuple[Implementation, ...]) -> None:
        self.implementations = implementations
        self._counts: Counter[str] = Counter()
        self._tables: dict[str, NDArray[np.float32]] = {}

    def engagement(self) -> Mapping[str, int]:
        """How many calls each implementation has served, by name."""
        return dict(self._counts)

    def engaged(self, counts: Mapping[str, int]) -> None:
        """Count what a compiled step has run."""
        self._counts.update(counts)

    def prepare(self, weight: Weight) -> Prepared:
        """Make a weight ready. Raises GeometryError where its parts do not agree."""
        if isinstance(weight, DenseTensor):
            return prepare_dense(weight)
        weight.check("weight")
        if isinstance(weight, GgmlTensor):
            return prepare_ggml(weight)
        if isinstance(weight, ScaledTensor):
            return prepare_scaled(weight, table_of(weight))
        if weight.codebook.kind == "sum2":
            return prepare_trellis(weight, np.empty(0, np.float32))
        digest = weight.codebook.digest
        if digest not in self._tables:
            self._tables[digest] = np.ascontiguousarray(weight.codebook.values(weight.geometry)).reshape(-1)
        return prepare_trellis(weight, self._tables[digest])

    def embedding(self, ids: torch.Tensor, weight: Prepared) -> torch.Tensor:
        """Rows f32 [tokens, hidden] of an embedding for int64 ids [tokens]. Raises GeometryError for one whose rows are mixed."""
        rows = gather(weight, rows_of(weight), ids.numpy())
        self._counts[embedding_name(weight.kind)] += 1
        return torch.from_numpy(rows)

    def linear(self, x: torch.Tensor, weight: Prepared) -> torch.Tensor:
        """y f32 [tokens, out] = x f32 [tokens, in] · Wᵀ: a row's bits depend on that row alone."""
        self._counts[linear_name(weight.kind)] += 1
        return torch.from_numpy(multiply(x.numpy(), rows_of(weight), weight.rotation))

    def decode(self, weight: PackedTensor) -> NDArray[np.float32]:
        """The weights f32 [out, in] in the basis that is stored, for comparison with the oracle."""
        self._counts[DECODE] += 1
        dense = np.empty(weight.shape, np.float32)
        decode_into(rows_of(self.prepare(weight)), dense)
        return dense


def default_registry() -> Registry:
    """The CPU kernels, and what this machine lacks for others."""
    no_gpu = "no CUDA device" if not torch.cuda.is_available() else "this version has CPU kernels only"
    return Registry(
        (
            *(Implementation(linear_name(kind), "linear", "numba", "any number of tokens") for kind in KINDS),
            Implementation(DECODE, "decode", "numba", "every packed weight; bit-exact with the oracle"),
            *(Implementation(embedding_name(kind), "embedding", "numba", "rows that do not mix, any number") for kind in KINDS),
            Implementation(ATTENTION, "attention", "numba", "paged f32 and bf16, grouped queries, sliding windows"),
            Implementation(SPLIT_ATTENTION, "attention", "numba", "long contexts of single queries, shared out over cores"),
            Implementation(GATHERED_EXPERTS, "experts", "numba", "few tokens: a group a token and expert"),
            Implementation(GROUPED_EXPERTS, "experts", "numba", "many tokens: a group an expert"),
            Implementation("triton.linear", "linear", "triton", "trellis weights on a GPU", no_gpu),
        )
    )
