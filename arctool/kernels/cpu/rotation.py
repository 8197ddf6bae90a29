"""The block Hadamard rotation of activations on a CPU, bit for bit the one of `quant.hadamard`: the same additions, one scaling."""

from __future__ import annotations

import numpy as np

from arctool.kernels.cpu.jit import jit


@jit()
def _butterflies(x, block):  # type: ignore[no-untyped-def]  # numba infers the types
    """In-place passes with half-width 1, 2, 4, … over each run of `block` values of a contiguous f32 vector."""
    half = 1
    while half < block:
        for start in range(0, x.shape[0], 2 * half):
            for i in range(start, start + half):
                low, high = x[i], x[i + half]
                x[i] = low + high
                x[i + half] = low - high
        half *= 2


@jit()
def rotate_input(x, signs, block, out):  # type: ignore[no-untyped-def]  # numba infers the types
    """out[:, :n] = H S x for f32 activations [tokens, n]; `signs`: f32 ±1 [n]. `out` may be wider: its other columns are left alone."""
    n = x.shape[1]
    scale = np.float32(1.0 / np.sqrt(block))
    for token in range(x.shape[0]):
        row = out[token, :n]
        for i in range(n):
            row[i] = x[token, i] * signs[i]
        _butterflies(row, block)
        if block > 1:
            for i in range(n):
                row[i] *= scale


@jit()
def restore_output(y, signs, block):  # type: ignore[no-untyped-def]  # numba infers the types
    """y = S H y in place for f32 outputs [tokens, n]; `signs`: f32 ±1 [n]."""
    scale = np.float32(1.0 / np.sqrt(block))
    for token in range(y.shape[0]):
        row = y[token]
        _butterflies(row, block)
        for i in range(row.shape[0]):
            if block > 1:
                row[i] *= scale
            row[i] *= signs[i]
