"""Layouts and decoders of the K-quants, GGML's super-blocks of 256 weights: q2k, q3k, q4k, q5k, q6k (block_q*_K of ggml-common.h).

A super-block is cut into sub-blocks of 16 or 32 weights, each with an integer scale against the super-block's f16 `d`: w = d·sc·q for q3k
and q6k; and with an integer minimum against a second f16 `dmin`: w = d·sc·q − dmin·m for q2k, q4k and q5k. Here: where the bits lie, in
both directions (`Codes`), and what they decode to. How codes are found is `k_search`'s.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from arctool.quant.ggml.block_type import f16_column, low, shl, shr

SUPER = 256
"""Weights of a super-block."""

F32 = NDArray[np.float32]
U8 = NDArray[np.uint8]


@dataclass(frozen=True)
class Codes:
    """What super-blocks hold, as unsigned integers of the width they have on the wire.

    `factors`: f16 [blocks, 1 or 2], d and dmin; `codes`: u8 [blocks, 256]; `scales` and `minima`: u8 [blocks, sub-blocks], `minima` empty
    for types without. Offsets (q3k: codes − 4, scales − 32; q6k: codes − 32, scales two's complement) are the decoder's.
    """

    factors: NDArray[np.float16]
    codes: U8
    scales: U8
    minima: U8


def join_bits(codes: U8, bits: int, span: int) -> U8:
    """Pack the low `bits` bits of codes u8 [blocks, n]: of 8/bits runs of `span` weights, run i lies at bit bits·i of `span` bytes."""
    runs = 8 // bits
    parts = low(codes, bits).reshape(len(codes), -1, runs, span)
    packed = parts[:, :, 0]
    for run in range(1, runs):
        packed = packed | shl(parts[:, :, run], bits * run)
    return packed.reshape(len(codes), -1)


def split_bits(packed: U8, bits: int, span: int) -> U8:
    """The inverse of `join_bits`: u8 [blocks, n·bits/8] → u8 [blocks, n]."""
    parts = packed.reshape(len(packed), -1, span)
    runs = np.stack([low(shr(parts, shift), bits) for shift in range(0, 8, bits)], axis=2)
    return runs.reshape(len(packed), -1)


def _halves(blocks: U8, *offsets: int) -> NDArray[np.float16]:
    return np.stack([f16_column(blocks, offset) for offset in offsets], axis=1)


def _factors(codes: Codes) -> U8:
    return np.ascontiguousarray(codes.factors, "<f2").view(np.uint8)


def pack_q2k(codes: Codes) -> U8:
    """84 bytes: 16 × (4-bit scale, 4-bit minimum above it), 64 of 2-bit codes, d, dmin."""
    return np.concatenate([codes.scales | shl(codes.minima, 4), join_bits(codes.codes, 2, 32), _factors(codes)], axis=1)


def unpack_q2k(blocks: U8) -> Codes:
    return Codes(_halves(blocks, 80, 82), split_bits(blocks[:, 16:80], 2, 32), low(blocks[:, :16], 4), shr(blocks[:, :16], 4))


def pack_q3k(codes: Codes) -> U8:
    """110 bytes: 32 of third bits, 64 of 2-bit low parts, 8 of 4-bit and 4 of 2-bit parts of 16 scales, d."""
    weights = join_bits(shr(codes.codes, 2), 1, 32), join_bits(codes.codes, 2, 32)
    scales = join_bits(codes.scales, 4, 8), join_bits(shr(codes.scales, 4), 2, 4)
    return np.concatenate([*weights, *scales, _factors(codes)], axis=1)


def unpack_q3k(blocks: U8) -> Codes:
    codes = split_bits(blocks[:, 32:96], 2, 32) | shl(split_bits(blocks[:, :32], 1, 32), 2)
    scales = split_bits(blocks[:, 96:104], 4, 8) | shl(split_bits(blocks[:, 104:108], 2, 4), 4)
    return Codes(_halves(blocks, 108), codes, scales, np.empty((len(blocks), 0), np.uint8))


def pack_six(scales: U8, minima: U8) -> U8:
    """Eight 6-bit scales and minima in 12 bytes: the first four of each whole, the high bits of the last four above those."""
    last = low(scales[:, 4:], 4) | shl(minima[:, 4:], 4)
    first, second = (part[:, :4] | shl(shr(part[:, 4:], 4), 6) for part in (scales, minima))
    return np.concatenate([first, second, last], axis=1)


def unpack_six(packed: U8) -> tuple[U8, U8]:
    """The inverse of `pack_six`: u8 [blocks, 12] → scales and minima u8 [blocks, 8]."""
    first, second, last = packed[:, :4], packed[:, 4:8], packed[:, 8:]
    scales = np.concatenate([low(first, 6), low(last, 4) | shl(shr(first, 6), 4)], axis=1)
    return scales, np.concatenate([low(second, 6), shr(last, 4) | shl(shr(second, 6), 4)], axis=1)


def pack_q4k(codes: Codes) -> U8:
    """144 bytes: d, dmin, 12 of scales and minima, 128 of nibbles in pairs of sub-blocks."""
    return np.concatenate([_factors(codes), pack_six(codes.scales, codes.minima), join_bits(codes.codes, 4, 32)], axis=1)


def unpack_q4k(blocks: U8) -> Codes:
    return Codes(_halves(blocks, 0, 2), split_bits(blocks[:, 16:], 4, 32), *unpack_six(blocks[:, 4:16]))


def pack_q5k(codes: Codes) -> U8:
    """176 bytes: as q4k, with 32 of fifth bits before the nibbles."""
    high = join_bits(shr(codes.codes, 4), 1, 32)
    return np.concatenate([_factors(codes), pack_six(codes.scales, codes.minima), high, join_bits(codes.codes, 4, 32)], axis=1)


def unpack_q5k(blocks: U8) -> Codes:
    codes = split_bits(blocks[:, 48:], 4, 32) | shl(split_bits(blocks[:, 16:48], 1, 32), 4)
    return Codes(_halves(blocks, 0, 2), codes, *unpack_six(blocks[:, 4:16]))


def pack_q6k(codes: Codes) -> U8:
    """210 bytes: 128 of nibbles in runs of 64, 64 of high pairs of bits, 16 int8 scales, d."""
    return np.concatenate([join_bits(codes.codes, 4, 64), join_bits(shr(codes.codes, 4), 2, 32), codes.scales, _factors(codes)], axis=1)


def unpack_q6k(blocks: U8) -> Codes:
    codes = split_bits(blocks[:, :128], 4, 64) | shl(split_bits(blocks[:, 128:192], 2, 32), 4)
    return Codes(_halves(blocks, 208), codes, blocks[:, 192:208], np.empty((len(blocks), 0), np.uint8))


def affine_values(codes: Codes) -> F32:
    """f32 [blocks, 256]: (d·sc)·q − (dmin·m); the products are exact, the difference is rounded once."""
    d, dmin = (column.astype(np.float32)[:, None] for column in codes.factors.T)
    steps, offsets = d * codes.scales.astype(np.float32), dmin * codes.minima.astype(np.float32)
    q = codes.codes.reshape(*codes.scales.shape, -1).astype(np.float32)
    return (steps[:, :, None] * q - offsets[:, :, None]).reshape(-1, SUPER)


def symmetric_values(codes: Codes, scales: NDArray[np.integer], centre: int) -> F32:
    """f32 [blocks, 256]: (d·sc)·(q − centre) with the signed `scales`; exact."""
    steps = codes.factors.astype(np.float32) * scales.astype(np.float32)
    q = codes.codes.reshape(*scales.shape, -1).astype(np.float32) - np.float32(centre)
    return (steps[:, :, None] * q).reshape(-1, SUPER)


def decode_q2k(blocks: U8) -> F32:
    return affine_values(unpack_q2k(blocks))


def decode_q3k(blocks: U8) -> F32:
    codes = unpack_q3k(blocks)
    return symmetric_values(codes, codes.scales.astype(np.int8) - np.int8(32), 4)


def decode_q4k(blocks: U8) -> F32:
    return affine_values(unpack_q4k(blocks))


def decode_q5k(blocks: U8) -> F32:
    return affine_values(unpack_q5k(blocks))


def decode_q6k(blocks: U8) -> F32:
    codes = unpack_q6k(blocks)
    return symmetric_values(codes, np.ascontiguousarray(codes.scales).view(np.int8), 32)
