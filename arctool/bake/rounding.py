"""One linear layer to trellis streams: rotate, scale each row to the table, search, refit the scale. Rows are independent.

Knows matrices and rungs, not models or files. Everything here is deterministic: rows are handed out in fixed chunks, so the
number of threads moves no byte.
"""

from __future__ import annotations

from collections.abc import Iterable
from concurrent.futures import Executor
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from arctool.bake.viterbi import Searcher
from arctool.quant.codebooks import Codebook, Rung
from arctool.quant.hadamard import Rotation
from arctool.quant.tensor import TrellisTensor
from arctool.quant.trellis import pack_symbols

CHUNK_ROWS = 32
"""Rows of one task: short enough that Ctrl-C is heard and the last tasks end together, long enough to hide the hand-out."""

GAIN_FACTORS = (0.95, 1.0, 1.05)
"""Scales tried for each row, around the rung's own: worth 0.5 % of the error at 2 bits and 1.8 % at 4 (SmolLM2, rows of 576)."""


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
class RoundedLayer:
    """A layer's tensor and ‖W−Ŵ‖²/‖W‖² against the weight that was given."""

    tensor: TrellisTensor
    relative_error: float


def round_layer(weight: NDArray[np.float32], key: str, tools: RungTools, seed: int, pool: Executor) -> RoundedLayer:
    """Quantise `weight` f32 [out, in], finite. Peak memory: four times the weight, plus the searcher's workspace a thread."""
    rotation = Rotation.seeded(seed, key, *weight.shape)
    rotated = rotation.rotate(weight)
    chunks = [rotated[start : start + CHUNK_ROWS] for start in range(0, rotated.shape[0], CHUNK_ROWS)]
    rounded = list(pool.map(lambda rows: search_scales(rows, tools), chunks))
    geometry = tools.rung.geometry
    tensor = TrellisTensor(
        geometry=geometry,
        codebook=tools.codebook,
        in_features=weight.shape[1],
        packed=np.concatenate([pack_symbols(part.symbols, geometry) for part in rounded]),
        scales=np.concatenate([part.scales for part in rounded]),
        rotation=rotation,
    )
    power = float((rotated.astype(np.float64) ** 2).sum())
    error = sum(float(part.errors.sum()) for part in rounded)
    return RoundedLayer(tensor, error / power if power else 0.0)


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
