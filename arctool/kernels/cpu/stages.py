"""What stands between the products of a decoder layer, a token at a time: norms, rotations, SwiGLU, rotary embedding, cache writes.

Each kernel ends by spreading its row to the activations that the next products read, each rotated for its own weight, so that no product
waits for a rotation and no rotation is a pass of its own.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache

import numpy as np

from arctool.kernels.cpu.attention_ir import KvKind
from arctool.kernels.cpu.exp_ir import swiglu
from arctool.kernels.cpu.ir import LANES
from arctool.kernels.cpu.jit import entry, jit
from arctool.kernels.cpu.memory import f32_at, i64_at, take, u16_at
from arctool.kernels.cpu.norm_ir import square_sum
from arctool.kernels.cpu.rotation import rotate_into

OUT, PITCH, SIGNS, BLOCK = range(4)
TARGET = 4
"""A target of a spread, i64 [TARGET]: an activation buffer f32 [tokens, PITCH], signs f32 (0: copied as it is), block of the rotation."""


@jit()
def spread(targets, count, row, source, n):  # type: ignore[no-untyped-def]  # numba infers the types
    """Write the `n` f32 at `source` to row `row` of each of `count` targets; addresses."""
    for k in range(count):
        target = i64_at(targets + 8 * TARGET * k, TARGET)
        out = target[OUT] + 4 * row * target[PITCH]
        if target[SIGNS]:
            rotate_into(source, target[SIGNS], target[BLOCK], out, n)
        else:
            f32_at(out, n)[:] = f32_at(source, n)


@jit()
def normalise(x, gain, eps, out):  # type: ignore[no-untyped-def]  # numba infers the types
    """out = x / sqrt(mean(x²) + eps) · gain, f32 [n]; the squares are summed in the order of `ir.dot_oracle`."""
    n = x.shape[0]
    root = np.sqrt(square_sum(x) / np.float32(n) + eps)
    for i in range(n):
        out[i] = x[i] / root * gain[i]


N_X, N_X_PITCH, N_ADD, N_ADD_PITCH, N_WIDTH, N_GAIN, N_EPS, N_ROWS, N_COUNT, N_TARGETS, N_SPREAD = range(11)


@entry
def add_and_norm(operands, step, counter, scratch):  # type: ignore[no-untyped-def]  # numba infers the types
    """x += add (N_ADD 0: nothing is added), then the norm of x to the targets (N_GAIN 0: x itself). A task is a token.

    N_ROWS: i64 rows of x and add to take (0: token t is row t); N_EPS: an f32 in the operand's first bytes.
    """
    o = i64_at(operands, N_SPREAD)
    count, width = i64_at(step, o[N_COUNT] + 1)[o[N_COUNT]], o[N_WIDTH]
    eps = f32_at(operands + 8 * N_EPS, 1)[0]
    while True:
        token = take(counter)
        if token >= count:
            break
        row = i64_at(o[N_ROWS] + 8 * token, 1)[0] if o[N_ROWS] else token
        x = f32_at(o[N_X] + 4 * row * o[N_X_PITCH], width)
        if o[N_ADD]:
            add = f32_at(o[N_ADD] + 4 * row * o[N_ADD_PITCH], width)
            for i in range(width):
                x[i] += add[i]
        if o[N_GAIN]:
            normed = f32_at(scratch, width)
            normalise(x, f32_at(o[N_GAIN], width), eps, normed)
            spread(operands + 8 * N_SPREAD, o[N_TARGETS], token, scratch, width)
        else:
            spread(operands + 8 * N_SPREAD, o[N_TARGETS], token, o[N_X] + 4 * row * o[N_X_PITCH], width)


S_GATE, S_GATE_PITCH, S_UP, S_UP_PITCH, S_WIDTH, S_COUNT, S_TARGETS, S_SPREAD = range(8)


@entry
def gated(operands, step, counter, scratch):  # type: ignore[no-untyped-def]  # numba infers the types
    """silu(gate) · up to the targets; the pitches are whole groups of sixteen. A task is a token."""
    o = i64_at(operands, S_SPREAD)
    count, width = i64_at(step, o[S_COUNT] + 1)[o[S_COUNT]], o[S_WIDTH]
    while True:
        token = take(counter)
        if token >= count:
            break
        gate, up = o[S_GATE] + 4 * token * o[S_GATE_PITCH], o[S_UP] + 4 * token * o[S_UP_PITCH]
        swiglu(gate, up, scratch, (width + LANES - 1) // LANES * LANES)
        spread(operands + 8 * S_SPREAD, o[S_TARGETS], token, scratch, width)


R_Q, R_Q_PITCH, R_K, R_K_PITCH, R_V, R_V_PITCH, R_HEADS, R_KV_HEADS, R_DIM, R_Q_GAIN, R_K_GAIN, R_EPS, R_COS, R_SIN = range(14)
R_POSITIONS, R_SLOTS, R_KEYS, R_VALUES, R_VALUE_PITCH, R_BLOCK_SIZE, R_COUNT = range(14, 21)
R_OPERANDS = 21


@jit()
def _turn(x, cos, sin):  # type: ignore[no-untyped-def]  # numba infers the types
    """Rotary embedding in place, f32 [dim]: dimension i is paired with i + dim / 2; cos and sin f32 [dim / 2]."""
    half = cos.shape[0]
    for i in range(half):
        first, second = x[i], x[half + i]
        x[i] = first * cos[i] - second * sin[i]
        x[half + i] = second * cos[i] + first * sin[i]


@jit()
def bf16_of(value):  # type: ignore[no-untyped-def]  # numba infers the types
    """An f32's bits, given as u32, rounded to bf16, to nearest even; NaN stays NaN."""
    if value & np.uint32(0x7FFFFFFF) > np.uint32(0x7F800000):
        return np.uint16((value >> np.uint32(16)) | np.uint32(0x40))
    return np.uint16((value + np.uint32(0x7FFF) + ((value >> np.uint32(16)) & np.uint32(1))) >> np.uint32(16))


@cache
def turn_and_store(kind: KvKind) -> Callable[[], int]:
    """The kernel that norms (gain 0: not) and rotates the heads of q and k, and writes k and v to the cache. A task is a token.

    Keys lie [block, head, token / 16, dim, 16], values [block, head, token, VALUE_PITCH].
    """
    bf16 = kind == "bf16"

    @entry
    def turn_and_store_tokens(operands, step, counter, scratch):  # type: ignore[no-untyped-def]  # numba infers the types
        o = i64_at(operands, R_OPERANDS)
        count, dim, pitch, size = i64_at(step, o[R_COUNT] + 1)[o[R_COUNT]], o[R_DIM], o[R_VALUE_PITCH], o[R_BLOCK_SIZE]
        eps = f32_at(operands + 8 * R_EPS, 1)[0]
        while True:
            token = take(counter)
            if token >= count:
                break
            position, slot = i64_at(o[R_POSITIONS] + 8 * token, 1)[0], i64_at(o[R_SLOTS] + 8 * token, 1)[0]
            cos, sin = f32_at(o[R_COS] + 2 * dim * position, dim // 2), f32_at(o[R_SIN] + 2 * dim * position, dim // 2)
            for head in range(o[R_HEADS]):
                query = f32_at(o[R_Q] + 4 * (token * o[R_Q_PITCH] + head * dim), dim)
                if o[R_Q_GAIN]:
                    normalise(query, f32_at(o[R_Q_GAIN], dim), eps, query)
                _turn(query, cos, sin)
            for head in range(o[R_KV_HEADS]):
                key = f32_at(o[R_K] + 4 * (token * o[R_K_PITCH] + head * dim), dim)
                value = f32_at(o[R_V] + 4 * (token * o[R_V_PITCH] + head * dim), dim)
                if o[R_K_GAIN]:
                    normalise(key, f32_at(o[R_K_GAIN], dim), eps, key)
                _turn(key, cos, sin)
                inside = slot % size
                at = (slot // size * o[R_KV_HEADS] + head) * size
                first, lane = (at + inside // LANES * LANES) * dim, inside % LANES
                if bf16:
                    keys = u16_at(o[R_KEYS] + 2 * first, dim * LANES)
                    values = u16_at(o[R_VALUES] + 2 * (at + inside) * pitch, dim)
                    key_bits, value_bits = key.view(np.uint32), value.view(np.uint32)
                    for d in range(dim):
                        keys[d * LANES + lane], values[d] = bf16_of(key_bits[d]), bf16_of(value_bits[d])
                else:
                    wide_keys = f32_at(o[R_KEYS] + 4 * first, dim * LANES)
                    wide_values = f32_at(o[R_VALUES] + 4 * (at + inside) * pitch, dim)
                    for d in range(dim):
                        wide_keys[d * LANES + lane], wide_values[d] = key[d], value[d]

    return turn_and_store_tokens
