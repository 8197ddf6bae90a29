"""One linear layer to trellis streams: rotate, scale each row to the table, search, refit the scale. Rows are independent.

Knows matrices and rungs, not models or files. Everything here is deterministic: rows are handed out in fixed chunks, so the
number of threads moves no byte.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from concurrent.futures import Executor
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from arctool.bake.viterbi import Searcher
from arctool.errors import SourceError
from arctool.quant.codebooks import Codebook, Rung
from arctool.quant.hadamard import Rotation
from arctool.quant.tensor import TrellisTensor
from arctool.quant.trellis import pack_symbols

CHUNK_ROWS = 32
"""Rows of one task: short enough that Ctrl-C is heard and the last tasks end together, long enough to hide the hand-out."""

GAIN_FACTORS = (0.95, 1.0, 1.05)
"""Scales tried for each row, around the rung's own: worth 0.5 % of the error at 2 bits and 1.8 % at 4 (SmolLM2, rows of 576)."""


ORDINARY_EXPONENT = 100
"""Weights below 2^100 are rotated as they are: the butterflies of both sides reach 2^10.5 times as far, and f32 ends at 2^128."""


@dataclass(frozen=True)
class RungTools:
    """What the search needs of a rung, made once a bake: its values f32 [2^l, v] and the laid-out table."""

    rung: Rung
    codebook: Codebook
    values: NDArray[np.float32]
    searcher: Searcher

    @classmethod
    def of(cls, rung: Rung) -> RungTools:
        codebook = rung.codebook()
        values = codebook.values(rung.geometry)
        return cls(rung, codebook, values, Searcher(rung.geometry, values))


@dataclass(frozen=True)
class RoundedRows:
    """Some rows after the search: symbols [rows, steps], scales f32 [rows], and the summed squared error of each row, f64."""

    symbols: NDArray[np.int32]
    scales: NDArray[np.float32]
    errors: NDArray[np.float64]


@dataclass(frozen=True)
class RoundedChunk:
    """Some rows of a layer, done: packed u8 [rows, stride], scales f32 [rows], summed squared error and summed squares."""

    packed: NDArray[np.uint8]
    scales: NDArray[np.float32]
    error: float
    power: float


@dataclass(frozen=True)
class RoundedLayer:
    """A layer's tensor and ‖W−Ŵ‖²/‖W‖² against the weight that was given."""

    tensor: TrellisTensor
    relative_error: float


def round_layer(weight: NDArray[np.float32], key: str, tools: RungTools, seed: int, pool: Executor) -> RoundedLayer:
    """Quantise `weight` f32 [out, in], finite.

    Peak memory besides `weight`: five times it while it is rotated; then the rotated copy, the packed rows, and for each thread the
    searcher's workspace and some f64 copies of `CHUNK_ROWS` rows. Raises SourceError where f32 cannot hold the quantised layer.
    """
    rotation = Rotation.seeded(seed, key, *weight.shape)
    shift = excess_exponent(weight)
    rotated = rotation.rotate(np.ldexp(weight, -shift) if shift else weight)
    chunks = [rotated[start : start + CHUNK_ROWS] for start in range(0, rotated.shape[0], CHUNK_ROWS)]
    rounded = list(pool.map(lambda rows: round_chunk(rows, tools), chunks))
    with np.errstate(over="ignore"):  # what overflows is refused below
        scales = np.ldexp(np.concatenate([part.scales for part in rounded]), shift)
    tensor = TrellisTensor(
        geometry=tools.rung.geometry,
        codebook=tools.codebook,
        in_features=weight.shape[1],
        packed=np.concatenate([part.packed for part in rounded]),
        scales=scales,
        rotation=rotation,
    )
    if shift:
        check_holds(tensor, weight, key)
    power = sum(part.power for part in rounded)
    error = sum(part.error for part in rounded)
    return RoundedLayer(tensor, error / power if power else 0.0)


def excess_exponent(weight: NDArray[np.float32]) -> int:
    """By how many powers of two a layer is to be scaled down before it is rotated: 0 for every layer of an ordinary model."""
    largest = max(float(weight.max()), -float(weight.min()))
    return max(0, math.frexp(largest)[1] - ORDINARY_EXPONENT)


def check_holds(tensor: TrellisTensor, weight: NDArray[np.float32], key: str) -> None:
    """Raise SourceError where a scale or a decoded weight of the layer is beyond f32."""
    with np.errstate(over="ignore", invalid="ignore"):
        finite = bool(np.isfinite(tensor.scales).all()) and bool(np.isfinite(tensor.dense()).all())
    if not finite:
        raise SourceError(
            f"{key}.weight: holds values up to {np.abs(weight).max():.3g}, which f32 arithmetic cannot rotate and quantise; "
            "the checkpoint is damaged"
        )


def round_chunk(rows: NDArray[np.float32], tools: RungTools) -> RoundedChunk:
    """Round some rows f32 [n, in] of a layer and pack them, so that no symbols are kept."""
    found = search_scales(rows, tools)
    packed = pack_symbols(found.symbols, tools.rung.geometry)
    return RoundedChunk(packed, found.scales, float(found.errors.sum()), float((rows.astype(np.float64) ** 2).sum()))


def search_scales(rows: NDArray[np.float32], tools: RungTools) -> RoundedRows:
    """Round rows f32 [n, in] at every gain of `GAIN_FACTORS` and keep, row by row, the one with the least error."""
    tried = [round_rows(rows, tools, tools.rung.gain * factor) for factor in GAIN_FACTORS]
    best = np.argmin([one.errors for one in tried], axis=0)
    row = np.arange(len(rows))
    symbols, scales, errors = (np.stack(parts)[best, row] for parts in zip(*((t.symbols, t.scales, t.errors) for t in tried), strict=True))
    return RoundedRows(symbols, scales, errors)


def round_rows(rows: NDArray[np.float32], tools: RungTools, gain: float) -> RoundedRows:
    """Search rows f32 [n, in] at scale rms/gain, then refit: the scale that the chosen values want is ⟨w, c⟩/⟨c, c⟩."""
    wide = rows.astype(np.float64)
    rms = np.sqrt((wide**2).mean(axis=1))
    start = np.where(rms > 0, rms / gain, 1.0)
    states = tools.searcher.search((wide / start[:, None]).astype(np.float32))
    values = tools.values[states].reshape(rows.shape).astype(np.float64)
    power = (values**2).sum(axis=1)
    fitted = np.divide((wide * values).sum(axis=1), power, out=start.copy(), where=power > 0)
    scales = np.where(rms > 0, fitted, 0.0).astype(np.float32)
    decoded = values.astype(np.float32) * scales[:, None]
    errors = ((wide - decoded.astype(np.float64)) ** 2).sum(axis=1)
    geometry = tools.rung.geometry
    return RoundedRows(states >> (geometry.l - geometry.k), scales, errors)


def relative_error(parts: Iterable[RoundedRows], rows: NDArray[np.float32]) -> float:
    """Mean squared error over variance of searched rows, as the quality tables quote it."""
    return sum(float(part.errors.sum()) for part in parts) / float((rows.astype(np.float64) ** 2).sum())
