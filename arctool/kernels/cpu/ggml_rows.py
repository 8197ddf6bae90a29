"""Row decoders of GGML blocks as plain loops, one a type: the operations of the oracle (`quant.ggml`) in its order, so its bits.

Every product is exact (f16 times small integers), so only the one rounding of a difference is left, and no contraction can change it.
Codes are cut from bytes as i32 before they become f32: that is what LLVM turns into vectors. All trust their callers: the row is whole
blocks, its f16 factors are finite.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from arctool.kernels.cpu.ggml_ir import load_half
from arctool.kernels.cpu.jit import jit
from arctool.quant.ggml import F16, Q2K, Q3K, Q4_0, Q4_1, Q4K, Q5_0, Q5_1, Q5K, Q6K

# numba takes globals as constants.
F16_BYTES, Q2K_BYTES, Q3K_BYTES, Q4K_BYTES, Q5K_BYTES, Q6K_BYTES = (kind.block_bytes for kind in (F16, Q2K, Q3K, Q4K, Q5K, Q6K))
Q4_0_BYTES, Q4_1_BYTES, Q5_0_BYTES, Q5_1_BYTES = (kind.block_bytes for kind in (Q4_0, Q4_1, Q5_0, Q5_1))


@jit()
def expand_f16(row, blocks, out):  # type: ignore[no-untyped-def]  # numba infers the types
    """out[: blocks] = the f16 values of `row`: u8 [2 · blocks]."""
    for j in range(blocks):
        out[j] = load_half(row, F16_BYTES * j)


@jit()
def expand_q4_0(row, blocks, out):  # type: ignore[no-untyped-def]  # numba infers the types
    for block in range(blocks):
        data, weights = row[block * Q4_0_BYTES : (block + 1) * Q4_0_BYTES], out[32 * block : 32 * block + 32]
        d = load_half(data, 0)
        for j in range(16):
            weights[j] = d * np.float32(np.int32(data[2 + j] & 15) - np.int32(8))
            weights[16 + j] = d * np.float32(np.int32(data[2 + j] >> 4) - np.int32(8))


@jit()
def expand_q4_1(row, blocks, out):  # type: ignore[no-untyped-def]  # numba infers the types
    for block in range(blocks):
        data, weights = row[block * Q4_1_BYTES : (block + 1) * Q4_1_BYTES], out[32 * block : 32 * block + 32]
        d, m = load_half(data, 0), load_half(data, 2)
        for j in range(16):
            weights[j] = d * np.float32(np.int32(data[4 + j] & 15)) + m
            weights[16 + j] = d * np.float32(np.int32(data[4 + j] >> 4)) + m


@jit()
def fifth_bits(data):  # type: ignore[no-untyped-def]  # numba infers the types
    """The 32 bits of u8 [4], weight j's in bit j."""
    return (
        np.uint32(data[0]) | np.uint32(data[1]) << np.uint32(8) | np.uint32(data[2]) << np.uint32(16) | np.uint32(data[3]) << np.uint32(24)
    )


@jit()
def five_bits(nibble, high, j):  # type: ignore[no-untyped-def]  # numba infers the types
    """The code of weight j: its nibble, and bit j of `high` above it."""
    return np.int32(nibble) | np.int32(((high >> np.uint32(j)) & np.uint32(1)) << np.uint32(4))


@jit()
def expand_q5_0(row, blocks, out):  # type: ignore[no-untyped-def]  # numba infers the types
    for block in range(blocks):
        data, weights = row[block * Q5_0_BYTES : (block + 1) * Q5_0_BYTES], out[32 * block : 32 * block + 32]
        d, high = load_half(data, 0), fifth_bits(data[2:6])
        for j in range(16):
            weights[j] = d * np.float32(five_bits(data[6 + j] & 15, high, j) - np.int32(16))
            weights[16 + j] = d * np.float32(five_bits(data[6 + j] >> 4, high, j + 16) - np.int32(16))


@jit()
def expand_q5_1(row, blocks, out):  # type: ignore[no-untyped-def]  # numba infers the types
    for block in range(blocks):
        data, weights = row[block * Q5_1_BYTES : (block + 1) * Q5_1_BYTES], out[32 * block : 32 * block + 32]
        d, m, high = load_half(data, 0), load_half(data, 2), fifth_bits(data[4:8])
        for j in range(16):
            weights[j] = d * np.float32(five_bits(data[8 + j] & 15, high, j)) + m
            weights[16 + j] = d * np.float32(five_bits(data[8 + j] >> 4, high, j + 16)) + m


@jit()
def expand_q2k(row, blocks, out):  # type: ignore[no-untyped-def]  # numba infers the types
    for block in range(blocks):
        data, weights = row[block * Q2K_BYTES : (block + 1) * Q2K_BYTES], out[256 * block : 256 * block + 256]
        d, dmin = load_half(data, 80), load_half(data, 82)
        for sub in range(16):
            step, offset = d * np.float32(np.int32(data[sub] & 15)), dmin * np.float32(np.int32(data[sub] >> 4))
            first, shift = 16 + 32 * (sub // 8) + 16 * (sub % 2), np.uint8(2 * (sub // 2 % 4))
            codes, target = data[first : first + 16], weights[16 * sub : 16 * sub + 16]
            for j in range(16):
                target[j] = step * np.float32(np.int32((codes[j] >> shift) & 3)) - offset


@jit()
def expand_q3k(row, blocks, out):  # type: ignore[no-untyped-def]  # numba infers the types
    for block in range(blocks):
        data, weights = row[block * Q3K_BYTES : (block + 1) * Q3K_BYTES], out[256 * block : 256 * block + 256]
        d = load_half(data, 108)
        for sub in range(16):
            low = (data[96 + sub % 8] >> np.uint8(4 * (sub // 8))) & 15
            high = (data[104 + sub % 4] >> np.uint8(2 * (sub // 4))) & 3
            step = d * np.float32(np.int32(low | high << 4) - np.int32(32))
            first, shift = 32 + 32 * (sub // 8) + 16 * (sub % 2), np.uint8(2 * (sub // 2 % 4))
            codes, target, bit = data[first : first + 16], weights[16 * sub : 16 * sub + 16], np.uint8(sub // 2)
            thirds = data[16 * (sub % 2) : 16 * (sub % 2) + 16]
            for j in range(16):
                code = np.int32((codes[j] >> shift) & 3) | np.int32((thirds[j] >> bit) & 1) << np.int32(2)
                target[j] = step * np.float32(np.int32(code) - np.int32(4))


@jit()
def six_bits(data, sub):  # type: ignore[no-untyped-def]  # numba infers the types
    """Scale and minimum of sub-block `sub` of u8 [12], as f32."""
    if sub < 4:
        return np.float32(np.int32(data[sub] & 63)), np.float32(np.int32(data[4 + sub] & 63))
    scale, minimum = data[4 + sub] & 15 | data[sub - 4] >> 6 << 4, data[4 + sub] >> 4 | data[sub] >> 6 << 4
    return np.float32(np.int32(scale)), np.float32(np.int32(minimum))


@jit()
def expand_q4k(row, blocks, out):  # type: ignore[no-untyped-def]  # numba infers the types
    for block in range(blocks):
        data, weights = row[block * Q4K_BYTES : (block + 1) * Q4K_BYTES], out[256 * block : 256 * block + 256]
        d, dmin = load_half(data, 0), load_half(data, 2)
        for sub in range(8):
            scale, minimum = six_bits(data[4:16], sub)
            step, offset, shift, first = d * scale, dmin * minimum, np.uint8(4 * (sub % 2)), 16 + 32 * (sub // 2)
            codes, target = data[first : first + 32], weights[32 * sub : 32 * sub + 32]
            for j in range(32):
                target[j] = step * np.float32(np.int32((codes[j] >> shift) & 15)) - offset


@jit()
def expand_q5k(row, blocks, out):  # type: ignore[no-untyped-def]  # numba infers the types
    for block in range(blocks):
        data, weights = row[block * Q5K_BYTES : (block + 1) * Q5K_BYTES], out[256 * block : 256 * block + 256]
        d, dmin, fifths = load_half(data, 0), load_half(data, 2), data[16:48]
        for sub in range(8):
            scale, minimum = six_bits(data[4:16], sub)
            step, offset, shift, first = d * scale, dmin * minimum, np.uint8(4 * (sub % 2)), 48 + 32 * (sub // 2)
            codes, target, bit = data[first : first + 32], weights[32 * sub : 32 * sub + 32], np.uint8(sub)
            for j in range(32):
                code = np.int32((codes[j] >> shift) & 15) | np.int32((fifths[j] >> bit) & 1) << np.int32(4)
                target[j] = step * np.float32(np.int32(code)) - offset


@jit()
def expand_q6k(row, blocks, out):  # type: ignore[no-untyped-def]  # numba infers the types
    for block in range(blocks):
        data, weights = row[block * Q6K_BYTES : (block + 1) * Q6K_BYTES], out[256 * block : 256 * block + 256]
        d = load_half(data, 208)
        for sub in range(16):
            half, run, place = sub // 8, sub // 2 % 4, 16 * (sub % 2)
            step = d * np.float32(np.int32(np.int8(data[192 + sub])))
            first, last = 64 * half + 32 * (run % 2) + place, 128 + 32 * half + place
            low, high, target = data[first : first + 16], data[last : last + 16], weights[16 * sub : 16 * sub + 16]
            low_shift, high_shift = np.uint8(4 * (run // 2)), np.uint8(2 * run)
            for j in range(16):
                code = np.int32((low[j] >> low_shift) & 15) | np.int32((high[j] >> high_shift) & 3) << np.int32(4)
                target[j] = step * np.float32(np.int32(code) - np.int32(32))


ROW_DECODERS: dict[str, Any] = {
    "f16": expand_f16,
    "q2k": expand_q2k,
    "q3k": expand_q3k,
    "q4_0": expand_q4_0,
    "q4_1": expand_q4_1,
    "q4k": expand_q4k,
    "q5_0": expand_q5_0,
    "q5_1": expand_q5_1,
    "q5k": expand_q5k,
    "q6k": expand_q6k,
}
"""Type → expand(row u8 [row_bytes], blocks, out f32 [in]): the oracle's weights of one row."""
