"""The K-quants as types: layouts of `k_quants`, the integers over which `k_search` searches, and bounds of what rounding can cost.

The bounds follow from `k_search.plain`, the rounding that the search never falls behind. Let a sub-block of n weights have the largest
magnitude A_j, the super-block A; scales reach S, minima M, codes Q above the lowest. Rounding to a grid of step t that covers a weight
costs t/2; a scale that is rounded up to a multiple of d makes t at most d longer; f16 (2^−11) may leave that part of the range uncovered.
Sums over weights: √n·‖A_j‖ ≤ √n·‖w‖ for what goes with a sub-block, √256·A ≤ 16·‖w‖ for what goes with the super-block.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial

from arctool.quant.ggml import k_quants
from arctool.quant.ggml.block_type import GgmlType
from arctool.quant.ggml.k_quants import F32, SUPER, U8, Codes
from arctool.quant.ggml.k_search import Form, search

Bound = Callable[[Form], float]
Pack = Callable[[Codes], U8]

HALF = 2.0**-11
"""Relative rounding of an f16 factor."""


def symmetric_bound(form: Form) -> float:
    """t = A_j/(high + ½) + d, d = A/(high + ½)/S: no weight is further than half a step from a code, at either end."""
    codes = 2 * form.high + 1
    return (math.sqrt(form.sub) * (1 / codes + HALF) + 16 * (1 + HALF) / (codes * form.scale_high)) ** 2


def affine_bound(form: Form) -> float:
    """The range of a sub-block is at most √2 of its norm; its minimum, rounded up, adds dmin = A/M to the range, and a scale d. f16 counts
    twice, for d and for dmin."""
    q, dmin = form.high, (1 + HALF) / form.minimum_high
    d = (1 + HALF) * (math.sqrt(2) + dmin) / (q * form.scale_high)
    return (math.sqrt(2 * form.sub) * (1 / (2 * q) + 2 * HALF) + 16 * (dmin / q + d) / 2) ** 2


def one_sided_bound(form: Form) -> float:
    """Weights of the sign of less power are lost, at most half of all; the others, of step A_j/Q + d, cost the share ρ of theirs."""
    share = math.sqrt(form.sub) * (1 / (2 * form.high) + HALF) + 16 * (1 + HALF) / (2 * form.high * form.scale_high)
    return (1 + share**2) / 2


def encode(form: Form, pack: Pack, weights: F32) -> U8:
    """u8 [blocks, block_bytes] of f32 [blocks, 256]."""
    return pack(search(weights, form))


TRIMS = (0.0, 0.25, 0.5)
STRETCHES = (-0.6, -0.3, 0.0, 0.3, 0.6)
SHRINKS = (1.0, 0.94, 1.06)
"""`Form.trims` of types with minima and without, and `Form.shrinks`. What more would gain on Gaussian rows, in shares of the error: four
times as many starts 1/250 (q4k) to 1/60 (q6k), five shrinks instead of three 1/200 or less, twice the rounds 1/400 or less."""

Q2K_FORM = Form(16, 0, 3, 0, 15, 0, 15, TRIMS, SHRINKS, rounds=3)
Q3K_FORM = Form(16, -4, 3, -32, 31, -32, 0, STRETCHES, SHRINKS, rounds=2)
Q4K_FORM = Form(32, 0, 15, 0, 63, 0, 63, TRIMS, SHRINKS, rounds=2)
Q5K_FORM = Form(32, 0, 31, 0, 63, 0, 63, TRIMS, SHRINKS, rounds=2)
Q6K_FORM = Form(16, -32, 31, -128, 127, 0, 0, STRETCHES, SHRINKS, rounds=2)


def k_quant(
    name: str, id: int, block_bytes: int, scales: tuple[int, ...], form: Form, bound: Bound, pack: Pack, decode: Callable[[U8], F32]
) -> GgmlType:
    """The type whose super-blocks `pack` lays out and `decode` reads."""
    return GgmlType(name, id, SUPER, block_bytes, scales, bound(form), partial(encode, form, pack), decode)


Q2K = k_quant("q2k", 10, 84, (80, 82), Q2K_FORM, one_sided_bound, k_quants.pack_q2k, k_quants.decode_q2k)
Q3K = k_quant("q3k", 11, 110, (108,), Q3K_FORM, symmetric_bound, k_quants.pack_q3k, k_quants.decode_q3k)
Q4K = k_quant("q4k", 12, 144, (0, 2), Q4K_FORM, affine_bound, k_quants.pack_q4k, k_quants.decode_q4k)
Q5K = k_quant("q5k", 13, 176, (0, 2), Q5K_FORM, affine_bound, k_quants.pack_q5k, k_quants.decode_q5k)
Q6K = k_quant("q6k", 14, 210, (208,), Q6K_FORM, symmetric_bound, k_quants.pack_q6k, k_quants.decode_q6k)
