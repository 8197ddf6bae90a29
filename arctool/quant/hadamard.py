"""Block Hadamard rotation with seeded signs: what makes a weight matrix look like i.i.d. Gaussian noise to the trellis.

W̃ = H_out S_out W S_in H_in (QuIP#, arXiv 2402.04396; QTIP §2): S are diagonals of ±1, H are block-diagonal orthonormal Sylvester
matrices, symmetric, so the same transform undoes itself: y = S_out H_out (W̃ (H_in S_in x)).
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from arctool.errors import GeometryError

MAX_BLOCK = 128
"""Blocks above 128 mix no better in practice and cost a wider transform for each token (facts/qtip.md §4.3)."""


def block_size(dimension: int) -> int:
    """The largest power of two that divides `dimension`, at most 128: 576 → 64, 18944 → 128, an odd one → 1."""
    if dimension <= 0:
        raise GeometryError(f"a rotation needs a positive dimension, found {dimension}")
    return min(dimension & -dimension, MAX_BLOCK)


def seeded_signs(seed: int, key: str, side: str, dimension: int) -> NDArray[np.int8]:
    """±1 [dimension] for one side of one tensor, a pure function of its arguments (SHAKE-256, so no library's generator matters)."""
    from hashlib import shake_256

    digest = shake_256(f"arctool signs\0{seed}\0{key}\0{side}".encode()).digest(-(-dimension // 8))
    bits = np.unpackbits(np.frombuffer(digest, np.uint8), count=dimension, bitorder="little")
    return (1 - 2 * bits.astype(np.int8)).astype(np.int8)


def block_hadamard(x: NDArray[np.float32], block: int) -> NDArray[np.float32]:
    """Orthonormal Sylvester–Hadamard transform of each run of `block` values along the last axis, in f32.

    The order of operations is part of the definition, since rotated activations enter exact comparisons: log2(block)
    butterfly passes with half-width 1, 2, 4, …, then one multiplication by f32(1/√block).
    """
    if block & (block - 1) or block <= 0 or x.shape[-1] % block:
        raise GeometryError(f"a Hadamard block must be a power of two that divides {x.shape[-1]}, found {block}")
    y = np.array(x, np.float32, order="C")
    half = 1
    while half < block:
        pairs = y.reshape(*y.shape[:-1], -1, 2, half)
        low, high = pairs[..., 0, :].copy(), pairs[..., 1, :].copy()
        pairs[..., 0, :] = low + high
        pairs[..., 1, :] = low - high
        half *= 2
    return y * np.float32(1.0 / np.sqrt(block)) if block > 1 else y


@dataclass(frozen=True)
class Rotation:
    """Both sides of one linear layer. `signs_in`: ±1 int8 [in], `signs_out`: ±1 int8 [out]; blocks are powers of two."""

    block_in: int
    block_out: int
    signs_in: NDArray[np.int8]
    signs_out: NDArray[np.int8]

    def __post_init__(self) -> None:
        for side, block, signs in (("input", self.block_in, self.signs_in), ("output", self.block_out, self.signs_out)):
            if signs.dtype != np.int8 or signs.ndim != 1 or not np.isin(signs, (-1, 1)).all():
                raise GeometryError(f"rotation: {side} signs must be an int8 vector of ±1")
            if block <= 0 or block & (block - 1) or block > MAX_BLOCK or signs.size % block:
                raise GeometryError(f"rotation: {side} block {block} is not a power of two ≤ {MAX_BLOCK} that divides {signs.size}")

    @classmethod
    def seeded(cls, seed: int, key: str, out_features: int, in_features: int, *, mix_rows: bool = True) -> Rotation:
        """The rotation that a bake with `seed` gives the layer `key`.

        `mix_rows` False leaves the output side alone, so that each row can be restored without the others: what an embedding needs.
        """
        if not mix_rows:
            signs_in = seeded_signs(seed, key, "in", in_features)
            return cls(block_size(in_features), 1, signs_in, np.ones(out_features, np.int8))
        return cls(
            block_size(in_features),
            block_size(out_features),
            seeded_signs(seed, key, "in", in_features),
            seeded_signs(seed, key, "out", out_features),
        )

    @property
    def mixes_rows(self) -> bool:
        """Whether a row of the original weight needs other rows of the rotated one."""
        return self.block_out > 1

    def rotate(self, weight: NDArray[np.float32]) -> NDArray[np.float32]:
        """W̃ = H_out S_out W S_in H_in of `weight`: f32 [out, in]."""
        inner = block_hadamard(weight * self.signs_in.astype(np.float32), self.block_in)
        return np.ascontiguousarray(block_hadamard((inner * self.signs_out.astype(np.float32)[:, None]).T, self.block_out).T)

    def restore(self, weight: NDArray[np.float32]) -> NDArray[np.float32]:
        """W = S_out H_out W̃ H_in S_in, the inverse of `rotate` up to f32 rounding.

        The order is part of the definition: H_in along each row (`block_hadamard`), then S_in, then H_out, then S_out.
        """
        inner = block_hadamard(weight, self.block_in) * self.signs_in.astype(np.float32)
        return np.ascontiguousarray(block_hadamard(inner.T, self.block_out).T) * self.signs_out.astype(np.float32)[:, None]

    def rotate_input(self, x: NDArray[np.float32]) -> NDArray[np.float32]:
        """H_in S_in x for activations f32 [tokens, in]."""
        return block_hadamard(x * self.signs_in.astype(np.float32), self.block_in)

    def restore_output(self, y: NDArray[np.float32]) -> NDArray[np.float32]:
        """S_out H_out y for outputs f32 [tokens, out]."""
        return block_hadamard(y, self.block_out) * self.signs_out.astype(np.float32)
