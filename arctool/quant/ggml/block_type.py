"""What every GGML block type has in common: a row is a run of blocks, each a few f16 factors and the codes of `block` weights.

One descriptor a type holds all that others need to know: sizes, where the f16 factors lie, and the two halves of the oracle, plain numpy.
Weights may be stacked (experts [E, out, in]): the last axis is cut into blocks, any axes may lead. Knows arrays of f32 and u8, not files
or speed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from arctool.errors import GeometryError
from arctool.quant.rows import bounded_rows

Encode = Callable[[NDArray[np.float32]], NDArray[np.uint8]]
"""f32 [blocks, block] → u8 [blocks, block_bytes]; what f16 cannot hold becomes ±inf, which `GgmlType.encode` refuses."""

Decode = Callable[[NDArray[np.uint8]], NDArray[np.float32]]
"""u8 [blocks, block_bytes] → f32 [blocks, block]."""

Each = Callable[[Callable[[slice], None], Iterable[slice]], Iterable[None]]
"""Of the form of `map`: a thread pool's `map` quantises chunks of rows side by side, to the same bytes."""


@dataclass(frozen=True)
class GgmlType:
    """One block type. `id`: ggml's number on the wire; `scales`: byte offsets of a block's f16 factors, which must be finite.

    `worst_error`: a bound on the ‖w−ŵ‖²/‖w‖² that rounding alone can cost blocks whose f16 factors are ordinary numbers, so that a tensor
    beyond it was too small for f16 factors, or is not the one that was encoded.
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
        """Raise GeometryError, naming `where`, unless `data` is u8 [..., rows, row_bytes] with finite f16 factors."""
        self.check_form(data, in_features, where)
        self.check_values(data, in_features, where)

    def check_form(self, data: NDArray[np.uint8], in_features: int, where: str) -> None:
        """Raise GeometryError, naming `where`, unless `data` is u8 [..., rows, row_bytes]. Reads no byte of it."""
        width = self.row_bytes(in_features)
        if data.dtype != np.uint8 or data.ndim < 2 or data.shape[-1] != width:
            raise GeometryError(
                f"{where}: {self.name} rows of {in_features} weights need u8 [rows, {width}], found {data.dtype} {list(data.shape)}"
            )

    def check_values(self, data: NDArray[np.uint8], in_features: int, where: str) -> None:
        """Raise GeometryError, naming `where`, row and block, unless every f16 factor is finite; `data` has passed `check_form`."""
        rows = data.reshape(-1, data.shape[-1])
        for part in bounded_rows(len(rows), in_features):
            blocks = rows[part].reshape(-1, self.block_bytes)
            for offset in self.scales:
                wrong = ~np.isfinite(f16_column(blocks, offset))
                if wrong.any():
                    row, block = divmod(int(np.argmax(wrong)), in_features // self.block)
                    raise GeometryError(f"{where}: {self._factor(data.shape, part.start + row, block)} is not finite")

    def encode(self, weights: NDArray[np.float32], where: str, each: Each = map) -> NDArray[np.uint8]:
        """Quantise f32 [..., rows, in] to u8 [..., rows, row_bytes], chunks of rows by `each`.

        Raises GeometryError, naming `where`, for what blocks cannot hold: values that are not finite or too large for f16 factors.
        """
        in_features = weights.shape[-1]
        width = self.row_bytes(in_features)
        rows = weights.reshape(-1, in_features)
        data = np.empty((len(rows), width), np.uint8)

        def quantise(part: slice) -> None:
            chunk = np.ascontiguousarray(rows[part], np.float32)
            wrong = ~np.isfinite(chunk)
            if wrong.any():
                row, column = (int(index) for index in np.argwhere(wrong)[0])
                place = [*_indices(weights.shape, part.start + row), column]
                raise GeometryError(f"{where}: the value at {place} is {chunk[row, column]}, which is not finite")
            data[part] = self.encode_blocks(chunk.reshape(-1, self.block)).reshape(-1, width)

        for _ in each(quantise, bounded_rows(len(rows), in_features)):
            pass
        stacked = data.reshape(*weights.shape[:-1], width)
        try:
            self.check(stacked, in_features, where)
        except GeometryError as error:
            raise GeometryError(f"{error}: values up to {np.abs(weights).max():.4g} are too large for it; choose bf16") from error
        return stacked

    def decode(self, data: NDArray[np.uint8], in_features: int) -> NDArray[np.float32]:
        """The oracle: weights f32 [..., rows, in_features] of `data` u8 [..., rows, row_bytes]. Every kernel must give these bits."""
        self.check(data, in_features, self.name)
        rows = data.reshape(-1, data.shape[-1])
        weights = np.empty((len(rows), in_features), np.float32)
        for part in bounded_rows(*weights.shape):
            weights[part] = self.decode_blocks(rows[part].reshape(-1, self.block_bytes)).reshape(-1, in_features)
        return weights.reshape(*data.shape[:-1], in_features)

    def _factor(self, shape: tuple[int, ...], row: int, block: int) -> str:
        """What an f16 of flat row `row` is called: the weight itself where a block is one weight."""
        place = _indices(shape, row)
        if self.block == 1:
            return f"the {self.name} value at {[*place, block]}"
        return f"the {self.name} scale of row {place[0] if len(place) == 1 else place}, block {block}"


def f16_column(blocks: NDArray[np.uint8], offset: int) -> NDArray[np.float16]:
    """The f16 [blocks] at byte `offset` of every block of u8 [blocks, block_bytes], at any alignment."""
    return np.ascontiguousarray(blocks[:, offset : offset + 2]).view("<f2")[:, 0]


def low(codes: NDArray[np.uint8], bits: int) -> NDArray[np.uint8]:
    """The low `bits` bits of every byte."""
    return np.bitwise_and(codes, np.uint8((1 << bits) - 1))


def shl(codes: NDArray[np.uint8], bits: int) -> NDArray[np.uint8]:
    """codes << bits, without what leaves the byte."""
    return np.left_shift(codes, np.uint8(bits))


def shr(codes: NDArray[np.uint8], bits: int) -> NDArray[np.uint8]:
    """codes >> bits."""
    return np.right_shift(codes, np.uint8(bits))


def _indices(shape: tuple[int, ...], row: int) -> list[int]:
    """Indices of flat row `row` along all axes of `shape` but the last."""
    return [int(index) for index in np.unravel_index(row, shape[:-1])]
