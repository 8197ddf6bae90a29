"""What exists, what it accepts, and what really ran: the one door through which the engine calls kernels.

A `Registry` is made once and passed along. It asks the policy which kernel serves a call, runs it, and counts it under the name that
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

from arctool.kernels.cpu.linear import pad_columns, padded_width
from arctool.kernels.cpu.products import decode_into, fused, gather, row_parts, tiles, tiles_independent
from arctool.kernels.cpu.rotation import restore_output, rotate_input
from arctool.kernels.cpu.scaled import table_of
from arctool.kernels.policy import KINDS, PREFILL_TILE, Kernel, TokenClass, WeightKind, choose_linear
from arctool.kernels.prepared import Prepared, prepare_dense, prepare_ggml, prepare_scaled, prepare_trellis
from arctool.quant.tensor import DenseTensor, GgmlTensor, PackedTensor, ScaledTensor, Weight

__all__ = ["Implementation", "Prepared", "Registry", "TokenClass", "default_registry", "embedding_name", "linear_name"]

DECODE = "cpu.decode"


@dataclass(frozen=True)
class Implementation:
    """One kernel: its name is its counter. `accepts` is for people; `unavailable` says why it cannot run here, empty if it can."""

    name: str
    operation: Literal["linear", "decode", "embedding"]
    backend: str
    accepts: str
    unavailable: str = ""


def linear_name(kernel: Kernel, kind: WeightKind) -> str:
    """Name of a CPU linear kernel, for the table and for the counter."""
    return f"cpu.{kernel}.{kind}"


def embedding_name(kind: WeightKind) -> str:
    """Name of a CPU embedding kernel, for the table and for the counter."""
    return f"cpu.embedding.{kind}"


class Registry:
    """Kernels of one device. Not shared between threads that run at the same time: it owns a scratch matrix."""

    def __init__(self, implementations: tuple[Implementation, ...]) -> None:
        self.implementations = implementations
        self._counts: Counter[str] = Counter()
        self._tables: dict[str, NDArray[np.float32]] = {}
        self._independent: dict[tuple[int, int, int], bool] = {}
        self._scratch = np.empty(0, np.float32)

    def engagement(self) -> Mapping[str, int]:
        """How many calls each implementation has served, by name."""
        return dict(self._counts)

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
        rows = gather(weight, ids.numpy())
        self._counts[embedding_name(weight.kind)] += 1
        return torch.from_numpy(rows)

    def linear(self, x: torch.Tensor, weight: Prepared, token_class: TokenClass) -> torch.Tensor:
        """y f32 [tokens, out] = x f32 [tokens, in] · Wᵀ, by the kernel that the policy names for tokens of this class."""
        inputs, rotation = x.numpy(), weight.rotation
        if rotation is None:
            rotated = pad_columns(inputs)
        else:
            rotated = np.zeros((inputs.shape[0], padded_width(inputs.shape[1])), np.float32)
            rotate_input(np.ascontiguousarray(inputs), rotation.signs_in, rotation.block_in, rotated)
        outputs = self._product(rotated, weight, token_class)
        if rotation is not None:
            restore_output(outputs, rotation.signs_out, rotation.block_out)
        return torch.from_numpy(outputs)

    def decode(self, weight: PackedTensor) -> NDArray[np.float32]:
        """The weights f32 [out, in] in the basis that is stored, for comparison with the oracle."""
        self._counts[DECODE] += 1
        dense = np.empty(weight.shape, np.float32)
        decode_into(self.prepare(weight), dense)
        return dense

    def _product(self, x: NDArray[np.float32], weight: Prepared, token_class: TokenClass) -> NDArray[np.float32]:
        """The product in the weight's own basis; `x` has zero columns up to a multiple of 16."""
        prompt = token_class is TokenClass.PREFILL and x.shape[0] > 0
        choice = choose_linear(token_class, prompt and self._tiles_independent(weight))
        self._counts[linear_name(choice.kernel, weight.kind)] += 1
        if choice.kernel == "fused":
            return fused(x, weight)
        columns = x[:, : weight.in_features]
        return np.concatenate([tiles(columns, self._dense_rows(weight, part)) for part in row_parts(weight)], axis=1)

    def _tiles_independent(self, weight: Prepared) -> bool:
        """The self-check of the library's products, made once for each shape and number of threads."""
        key = (weight.out_features, weight.in_features, torch.get_num_threads())
        if key not in self._independent:
            by_height = {part.stop - part.start: part for part in row_parts(weight)}
            self._independent[key] = all(tiles_independent(self._dense_rows(weight, part)) for part in by_height.values())
        return self._independent[key]

    def _dense_rows(self, prepared: Prepared, part: slice) -> NDArray[np.float32]:
        """Some rows of the f32 matrix; decoded ones share one scratch buffer, which the next call overwrites.

        Mapped ones are copied there too: torch warns whoever hands it memory that cannot be written.
        """
        rows = prepared.rows(part)
        if isinstance(rows.weight, DenseTensor) and rows.kind == "dense-f32" and rows.weight.data.flags.writeable:
            return rows.weight.dense()
        size = rows.out_features * rows.in_features
        if self._scratch.size < size:
            self._scratch = np.empty(size, np.float32)
        dense = self._scratch[:size].reshape(rows.out_features, rows.in_features)
        decode_into(rows, dense)
        return dense


def default_registry() -> Registry:
    """The CPU kernels, and what this machine lacks for others."""
    no_gpu = "no CUDA device" if not torch.cuda.is_available() else "this version has CPU kernels only"
    return Registry(
        (
            *(Implementation(linear_name("fused", kind), "linear", "numba", "generated tokens, any number") for kind in KINDS),
            *(
                Implementation(linear_name("tiles", kind), "linear", "numba, torch", f"prompt tokens, {PREFILL_TILE} rows a product")
                for kind in KINDS
            ),
            Implementation(DECODE, "decode", "numba", "every packed weight; bit-exact with the oracle"),
            *(Implementation(embedding_name(kind), "embedding", "numba, numpy", "rows that do not mix, any number") for kind in KINDS),
            Implementation("triton.linear", "linear", "triton", "trellis weights on a GPU", no_gpu),
        )
    )
