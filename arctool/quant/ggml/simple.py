"""GGML types of one block, one or two f16 factors and plain rounding: q4_0, q4_1, q5_0, q5_1, q8_0, and f16 as a block of one weight.

Encoders follow ggml's reference (`quantize_row_*_ref` of ggml-quants.c) operation by operation, so that the bytes are those of llama.cpp
and gguf-py. Blocks so small that 1/d is beyond f32, where C leaves the result undefined, get the codes of zero; their d is zero as f16.
"""

from __future__ import annotations

from functools import partial

import numpy as np
from numpy.typing import NDArray

from arctool.quant.ggml.block_type import GgmlType, f16_column, low, shl, shr

BLOCK = 32
F32 = NDArray[np.float32]
U8 = NDArray[np.uint8]


def half_bytes(values: F32) -> U8:
    """f32 [blocks, 1] rounded to f16, as little-endian bytes u8 [blocks, 2]; what is too large becomes ±inf."""
    with np.errstate(over="ignore"):
        return values.astype("<f2").view(np.uint8)


def inverse(scale: F32) -> F32:
    """1/scale, zero where that is not finite."""
    with np.errstate(divide="ignore", over="ignore", invalid="ignore"):
        found = np.float32(1) / scale
    found[~np.isfinite(found)] = 0
    return found


def split_nibbles(packed: U8) -> U8:
    """u8 [blocks, 16] → codes [blocks, 32]: weight j in the low nibble of byte j, weight j + 16 in the high one."""
    return np.concatenate([low(packed, 4), shr(packed, 4)], axis=1)


def join_nibbles(codes: U8) -> U8:
    """Codes u8 [blocks, 32], of which the low four bits count, → u8 [blocks, 16]."""
    return low(codes[:, :16], 4) | shl(codes[:, 16:], 4)


def join_codes(codes: U8, bits: int) -> list[U8]:
    """The parts of a block that hold 32 codes of four or five bits: fifth bits first, weight j in bit j of 32, then nibbles."""
    high = [np.packbits(shr(codes, 4), axis=1, bitorder="little")] if bits == 5 else []
    return [*high, join_nibbles(codes)]


def split_codes(parts: U8, bits: int) -> U8:
    """The inverse of `join_codes`: u8 [blocks, 16 or 20] → codes [blocks, 32]."""
    if bits == 4:
        return split_nibbles(parts)
    return split_nibbles(parts[:, 4:]) | shl(np.unpackbits(parts[:, :4], axis=1, bitorder="little"), 4)


def round_up_halves(values: F32, bits: int) -> U8:
    """Codes 0 … 2^bits − 1 of `values`, to which the half that makes truncation a rounding has been added."""
    with np.errstate(invalid="ignore"):  # nan of a block that is refused for its infinite scale
        return np.minimum(values.astype(np.uint8), np.uint8((1 << bits) - 1))


def encode_symmetric(weights: F32, bits: int) -> U8:
    """q4_0, q5_0: d = (the weight of largest magnitude, the first of equals) / −2^(bits−1), code = trunc(w/d + 2^(bits−1) + ½)."""
    levels = np.float32(1 << bits - 1)
    extreme = np.take_along_axis(weights, np.abs(weights).argmax(axis=1, keepdims=True), axis=1)
    scale = extreme / -levels
    codes = round_up_halves(weights * inverse(scale) + (levels + np.float32(0.5)), bits)
    return np.concatenate([half_bytes(scale), *join_codes(codes, bits)], axis=1)


def decode_symmetric(blocks: U8, bits: int) -> F32:
    """d · (code − 2^(bits−1)), exact."""
    codes = split_codes(blocks[:, 2:], bits).astype(np.float32) - np.float32(1 << bits - 1)
    return f16_column(blocks, 0).astype(np.float32)[:, None] * codes


def encode_affine(weights: F32, bits: int) -> U8:
    """q4_1, q5_1: m = min w, d = (max w − m) / (2^bits − 1), code = trunc((w − m)/d + ½)."""
    least = weights.min(axis=1, keepdims=True)
    with np.errstate(over="ignore", invalid="ignore"):  # a range beyond f32 makes d infinite, which is refused
        scale = (weights.max(axis=1, keepdims=True) - least) / np.float32((1 << bits) - 1)
        values = (weights - least) * inverse(scale) + np.float32(0.5)
    return np.concatenate([half_bytes(scale), half_bytes(least), *join_codes(round_up_halves(values, bits), bits)], axis=1)


def decode_affine(blocks: U8, bits: int) -> F32:
    """d · code + m: an exact product, then one rounding."""
    scale, least = (f16_column(blocks, offset).astype(np.float32)[:, None] for offset in (0, 2))
    return scale * split_codes(blocks[:, 4:], bits).astype(np.float32) + least


def encode_q8_0(weights: F32) -> U8:
    """f16 d = max|w|/127, then 32 × int8 w · (1/d) rounded half away from zero; codes come from the f32 d."""
    scale = np.abs(weights).max(axis=1, keepdims=True) / np.float32(127)
    scaled = weights * inverse(scale)
    size = np.abs(scaled)
    floor = np.floor(size)
    codes = np.copysign(floor + (size - floor >= 0.5), scaled)  # not floor(size + 0.5): that takes the f32 below 0.5 to 1
    return np.concatenate([half_bytes(scale), codes.astype(np.int8).view(np.uint8)], axis=1)


def decode_q8_0(blocks: U8) -> F32:
    """code · d, exact: eleven bits of scale times eight of code fit an f32."""
    scale = f16_column(blocks, 0).astype(np.float32)
    return np.ascontiguousarray(blocks[:, 2:]).view(np.int8).astype(np.float32) * scale[:, None]


def encode_f16(weights: F32) -> U8:
    """The nearest f16, ties to even; beyond 65504 ±inf, which is refused."""
    return half_bytes(weights)


def decode_f16(blocks: U8) -> F32:
    """The same value, exact."""
    return f16_column(blocks, 0).astype(np.float32)[:, None]


def _symmetric(name: str, id: int, bits: int) -> GgmlType:
    """Worst error, in steps d: one weight of L = 2^(bits−1) steps has the power L², and all 32 are off by h = ½ + L/2048 (half a step of
    rounding, L steps times the 2^−11 of f16) or, at the end that has no code L, by up to 1 + L/2048 of at least L − ½ steps. The latter
    is a smaller share of the power they bring along, so 32·h²/L² bounds both; h is rounded up for the f32 of w/d."""
    levels = 1 << bits - 1
    half = 0.5002 + levels / 2048
    return GgmlType(
        name=name,
        id=id,
        block=BLOCK,
        block_bytes=2 + 4 * bits,
        scales=(0,),
        worst_error=32 * half**2 / levels**2,
        encode_blocks=partial(encode_symmetric, bits=bits),
        decode_blocks=partial(decode_symmetric, bits=bits),
    )


def _affine(name: str, id: int, bits: int) -> GgmlType:
    """Worst error: with R = max w − min w = (2^bits − 1) steps, each weight is off by at most h steps and |min w|/2048, where h = ½ +
    2^bits/2048 covers rounding, f16's 2^−11 of the code's steps and of one more for an m below f16's normal numbers. R ≤ √2·‖w‖ and
    |min w| ≤ ‖w‖, so ‖w−ŵ‖ ≤ √32·(√2·h/(2^bits − 1) + 2^−11)·‖w‖."""
    half = 0.5002 + (1 << bits) / 2048
    return GgmlType(
        name=name,
        id=id,
        block=BLOCK,
        block_bytes=4 + 4 * bits,
        scales=(0, 2),
        worst_error=32 * (2**0.5 * half / ((1 << bits) - 1) + 2**-11) ** 2,
        encode_blocks=partial(encode_affine, bits=bits),
        decode_blocks=partial(decode_affine, bits=bits),
    )


Q4_0 = _symmetric("q4_0", 2, 4)
Q4_1 = _affine("q4_1", 3, 4)
Q5_0 = _symmetric("q5_0", 6, 5)
Q5_1 = _affine("q5_1", 7, 5)
Q8_0 = GgmlType(
    name="q8_0",
    id=8,
    block=BLOCK,
    block_bytes=34,
    scales=(0,),
    worst_error=32 * (9 / 16 / 127) ** 2,
    encode_blocks=encode_q8_0,
    decode_blocks=decode_q8_0,
)
"""8.5 bits a weight. Worst case: one weight of size a alone has the power, and all 32 are off by 9/16 of a step a/127: half a step
of rounding, and 127/2048 from the f16 of the scale."""

F16 = GgmlType(
    name="f16", id=1, block=1, block_bytes=2, scales=(0,), worst_error=2.0**-22, encode_blocks=encode_f16, decode_blocks=decode_f16
)
"""The weight itself is the factor: off by 2^−11 of itself at most, unless it is below f16's normal numbers (6·10⁻⁵)."""
