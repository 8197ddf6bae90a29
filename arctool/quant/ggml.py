"""GGML block types: a row is a run of blocks, each a few scales and the codes of `block` weights (llama.cpp's ggml-common.h).

One descriptor a type holds all that others need to know: sizes, where the f16 scales lie, and the two halves of the oracle, plain numpy.
The bytes are ggml's own, so that llama.cpp, mistral.rs and gguf-py read them. Knows matrices of f32 and u8, not files or speed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from arctool.errors import GeometryError

CHUNK_WEIGHTS = 1 << 20
"""Weights that are quantised or decoded at a time: a table of a hundred million needs no second f32 copy of itself."""

Encode = Callable[[NDArray[np.float32]], NDArray[np.uint8]]
"""f32 [blocks, block] → u8 [blocks, block_bytes]; what f16 cannot hold becomes ±inf, which `GgmlType.encode` refuses."""

Decode = Callable[[NDArray[np.uint8]], NDArray[np.float32]]
"""u8 [blocks, block_bytes] → f32 [blocks, block]."""


@dataclass(frozen=True)
class GgmlType:
    """One block type. `id`: ggml's number on the wire; `scales`: byte offsets of a block's f16 factors, which must be finite.

    `worst_error`: the largest ‖w−ŵ‖²/‖w‖² that rounding alone can cost a block whose scales are ordinary f16 numbers.
    """

    name: str
    id: int
    block: int
    block_bytes: int
    scales: tuple[int, ...]
    worst_error: float
    encode_blocks: Encode
    decode_blocks: Decode

    @property
    def bits_per_weight(self) -> float:
        return self.block_bytes * 8 / self.block

    def row_bytes(self, in_features: int) -> int:
        """Bytes of one row. Raises GeometryError where it is no whole number of blocks."""
        if in_features <= 0 or in_features % self.block:
            raise GeometryError(f"{self.name}: in_features {in_features} is not a positive multiple of the block of {self.block}")
        return in_features // self.block * self.block_bytes

    def check(self, data: NDArray[np.uint8], in_features: int, where: str) -> None:
        """Raise GeometryError, naming `where`, unless `data` is u8 [rows, row_bytes] with finite scales."""
        width = self.row_bytes(in_features)
        if data.dtype != np.uint8 or data.ndim != 2 or data.shape[1] != width:
            raise GeometryError(
                f"{where}: {self.name} rows of {in_features} weights need u8 [rows, {width}], found {data.dtype} {list(data.shape)}"
            )
        for offset in self.scales:
            wrong = ~np.isfinite(f16_column(data.reshape(-1, self.block_bytes), offset))
            if wrong.any():
                row, block = divmod(int(np.argmax(wrong)), in_features // self.block)
                raise GeometryError(f"{where}: the {self.name} scale of row {row}, block {block} is not finite")

    def encode(self, weights: NDArray[np.float32], where: str) -> NDArray[np.uint8]:
        """Quantise f32 [rows, in] to u8 [rows, row_bytes]. Raises GeometryError for what blocks cannot hold, naming `where`."""
        rows, in_features = weights.shape
        data = np.empty((rows, self.row_bytes(in_features)), np.uint8)
        for part in row_chunks(rows, in_features):
            chunk = np.ascontiguousarray(weights[part], np.float32)
            wrong = ~np.isfinite(chunk)
            if wrong.any():
                row, column = (int(index) for index in np.argwhere(wrong)[0])
                raise GeometryError(f"{where}: the value at {[part.start + row, column]} is {chunk[row, column]}, which is not finite")
            data[part] = self.encode_blocks(chunk.reshape(-1, self.block)).reshape(len(chunk), -1)
        try:
            self.check(data, in_features, where)
        except GeometryError as error:
            raise GeometryError(f"{error}: values up to {np.abs(weights).max():.4g} are too large for it; choose bf16") from error
        return data

    def decode(self, data: NDArray[np.uint8], in_features: int) -> NDArray[np.float32]:
        """The oracle: weights f32 [rows, in_features] of `data` u8 [rows, row_bytes]. Every kernel must give these bits."""
        self.check(data, in_features, self.name)
        weights = np.empty((data.shape[0], in_features), np.float32)
        for part in row_chunks(*weights.shape):
            weights[part] = self.decode_blocks(data[part].reshape(-1, self.block_bytes)).reshape(-1, in_features)
        return weights


def row_chunks(rows: int, in_features: int) -> Iterator[slice]:
    """Slices of rows of about `CHUNK_WEIGHTS` weights, at least one row each."""
    step = max(1, CHUNK_WEIGHTS // in_features)
    return (slice(start, min(rows, start + step)) for start in range(0, rows, step))


def f16_column(blocks: NDArray[np.uint8], offset: int) -> NDArray[np.float16]:
    """The f16 [blocks] at byte `offset` of every block of u8 [blocks, block_bytes], at any alignment."""
    return np.ascontiguousarray(blocks[:, offset : offset + 2]).view("<f2")[:, 0]


def encode_q8_0(weights: NDArray[np.float32]) -> NDArray[np.uint8]:
    """f16 d = max|w|/127, then 32 × int8 w · (1/d) rounded half away from zero: ggml's `quantize_row_q8_0_ref`, operation by operation.

    The codes come from the f32 d, the stored scale is its f16. Blocks so small (max|w| below 4·10⁻³⁷) that 1/d is beyond f32 get zero
    codes, where C leaves the result undefined; their f16 scale is zero either way.
    """
    scale = np.abs(weights).max(axis=1, keepdims=True) / np.float32(127)
    with np.errstate(divide="ignore", over="ignore"):
        inverse = np.float32(1) / scale
        stored = scale.astype("<f2")
    inverse[~np.isfinite(inverse)] = 0
    scaled = weights * inverse
    size = np.abs(scaled)
    floor = np.floor(size)
    codes = np.copysign(floor + (size - floor >= 0.5), scaled)  # not floor(size + 0.5): that takes the f32 below 0.5 to 1
    return np.concatenate([stored.view(np.uint8), codes.astype(np.int8).view(np.uint8)], axis=1)


def decode_q8_0(blocks: NDArray[np.uint8]) -> NDArray[np.float32]:
    """code · d, exact: eleven bits of scale times eight of code fit an f32."""
    scale = f16_column(blocks, 0).astype(np.float32)
    return np.ascontiguousarray(blocks[:, 2:]).view(np.int8).astype(np.float32) * scale[:, None]


Q8_0 = GgmlType(
    name="q8_0",
    id=8,
    block=32,
    block_bytes=34,
    scales=(0,),
    worst_error=32 * (9 / 16 / 127) ** 2,
    encode_blocks=encode_q8_0,
    decode_blocks=decode_q8_0,
)
"""8.5 bits a weight. Worst case: one weight of size a alone has the power, and all 32 are off by 9/16 of a step a/127: half a step
of rounding, and 127/2048 from the f16 of the scale."""

GGML_TYPES: dict[str, GgmlType] = {kind.name: kind for kind in (Q8_0,)}
"""By the name that reports and `--isq` use."""

GGML_BY_ID: dict[int, GgmlType] = {kind.id: kind for kind in GGML_TYPES.values()}
