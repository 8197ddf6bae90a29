"""One linear layer to trellis streams: rotate, scale each row to the table, search, refit the scale. Rows are independent.

Knows matrices and rungs, not models or files. Everything here is deterministic: rows are handed out in fixed chunks, so the
number of threads moves no byte.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from concurrent.futures import Executor
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from arctool.bake.search.survivors import Layout, layout
from arctool.bake.search.viterbi import Searcher
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
    """What the searches need of a rung, made once a bake: its values f32 [2^l, v] and the laid-out tables."""

    rung: Rung
    codebook: Codebook
    values: NDArray[np.float32]
    searcher: Searcher
    layout: Layout

    @classmethod
    def of(cls, rung: Rung) -> RungTools:
        codebook = rung.codebook()
        values = codebook.values(rung.geometry)
        return cls(rung, codebook, values, Searcher(rung.geometry, values), layout(values, rung.geometry))

    def symbols(self, states: NDArray[np.int32]) -> NDArray[np.int32]:
        """The newest symbol of each state."""
        return states >> (self.rung.geometry.l - self.rung.geometry.k)


@dataclass(frozen=True)
class RoundedRows:
    """Some rows after the search: states [rows, steps], scales f32 [rows], and the summed squared error of each row, f64."""

    states: NDArray[np.int32]
    scales: NDArray[np.float32]
    errors: NDArray[np.float64]


@dataclass(frozen=True)
class Chunk:
    """Some rows of a layer, done: packed u8 [rows, stride], scales f32 [rows], summed squared error and summed squares."""

    packed: NDArray[np.uint8]
    scales: NDArray[np.float32]
    error: float
    power: float


@dataclass(frozen=True)
class RoundedLayer:
    """A layer's tensor and ‖W−Ŵ‖²/‖W‖² against the weight that was given.

    `proxy_error`: tr(E H Eᵀ)/tr(W H Wᵀ) where there was a Hessian; `note`: why it was rounded without feedback although there was one;
    `dropped`: calibration rows that the Hessian was made without, not finite or too large.
    """

    tensor: TrellisTensor
    relative_error: float
    proxy_error: float | None = None
    note: str | None = None
    dropped: int = 0


@dataclass(frozen=True)
class Turned:
    """A layer in the basis of its rows: f32 [out, in] times 2^`shift`, and the weight that it came from."""

    rows: NDArray[np.float32]
    shift: int
    weight: NDArray[np.float32]
    rotation: Rotation
    key: str


def turn(weight: NDArray[np.float32], key: str, rotation: Rotation) -> Turned:
    """Rotate `weight` f32 [out, in], finite; `key` names it in errors. Peak memory besides `weight`: five times it."""
    shift = excess_exponent(weight)
    return Turned(rotation.rotate(np.ldexp(weight, -shift) if shift else weight), shift, weight, rotation, key)


def round_layer(
    weight: NDArray[np.float32], key: str, tools: RungTools, rotation: Rotation, pool: Executor, note: str | None = None
) -> RoundedLayer:
    """Quantise `weight` f32 [out, in], finite, each row as near to itself as its stream can come.

    `note`: why there is no feedback, if there was to be some. Peak memory besides `weight`: that of `turn`; then the rotated copy, the
    packed rows, and for each thread the searcher's workspace and some f64 copies of `CHUNK_ROWS` rows. Raises SourceError where f32
    cannot hold the quantised layer.
    """
    turned = turn(weight, key, rotation)
    chunks = [turned.rows[start : start + CHUNK_ROWS] for start in range(0, len(turned.rows), CHUNK_ROWS)]
    layer = assemble(turned, list(pool.map(lambda rows: round_chunk(rows, tools), chunks)), tools)
    return replace(layer, note=None if note is None else f"rounded without feedback: {note}")


def assemble(turned: Turned, chunks: list[Chunk], tools: RungTools) -> RoundedLayer:
    """The layer from its chunks, in order. Raises SourceError where f32 cannot hold it."""
    with np.errstate(over="ignore"):  # what overflows is refused below
        scales = np.ldexp(np.concatenate([part.scales for part in chunks]), turned.shift)
    tensor = TrellisTensor(
        geometry=tools.rung.geometry,
        codebook=tools.codebook,
        in_features=turned.weight.shape[1],
        packed=np.concatenate([part.packed for part in chunks]),
        scales=scales,
        rotation=turned.rotation,
    )
    if turned.shift:
        check_holds(tensor, turned.weight, turned.key)
    power = sum(part.power for part in chunks)
    error = sum(part.error for part in chunks)
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


def round_chunk(rows: NDArray[np.float32], tools: RungTools) -> Chunk:
    """Round some rows f32 [n, in] of a layer and pack them, so that no states are kept."""
    return pack(rows, search_scales(rows, tools), tools)


def pack(rows: NDArray[np.float32], found: RoundedRows, tools: RungTools) -> Chunk:
    """The stored form of searched rows f32 [n, in]."""
    packed = pack_symbols(tools.symbols(found.states), tools.rung.geometry)
    return Chunk(packed, found.scales, float(found.errors.sum()), float((rows.astype(np.float64) ** 2).sum()))


def search_scales(rows: NDArray[np.float32], tools: RungTools) -> RoundedRows:
    """Round rows f32 [n, in] at every gain of `GAIN_FACTORS` and keep, row by row, the one with the least error."""
    tried = [round_rows(rows, tools, tools.rung.gain * factor) for factor in GAIN_FACTORS]
    best = np.argmin([one.errors for one in tried], axis=0)
    row = np.arange(len(rows))
    states, scales, errors = (np.stack(parts)[best, row] for parts in zip(*((t.states, t.scales, t.errors) for t in tried), strict=True))
    return RoundedRows(states, scales, errors)


def start_scales(rows: NDArray[np.float32], gain: float) -> NDArray[np.float64]:
    """The scales rms/gain f64 [n] at which rows f32 [n, in] are searched; 1 for a row of zeros."""
    rms = np.sqrt((rows.astype(np.float64) ** 2).mean(axis=1))
    return np.where(rms > 0, rms / gain, 1.0)


def round_rows(rows: NDArray[np.float32], tools: RungTools, gain: float) -> RoundedRows:
    """Search rows f32 [n, in] at scale rms/gain, then refit: the scale that the chosen values want is ⟨w, c⟩/⟨c, c⟩."""
    wide = rows.astype(np.float64)
    start = start_scales(rows, gain)
    states = tools.searcher.search((wide / start[:, None]).astype(np.float32))
    values = tools.values[states].reshape(rows.shape).astype(np.float64)
    power = (values**2).sum(axis=1)
    fitted = np.divide((wide * values).sum(axis=1), power, out=start.copy(), where=power > 0)
    scales = np.where((wide != 0).any(axis=1), fitted, 0.0).astype(np.float32)
    return RoundedRows(states, scales, squared_errors(wide, values, scales))


def squared_errors(rows: NDArray[np.float64], values: NDArray[np.float64], scales: NDArray[np.float32]) -> NDArray[np.float64]:
    """‖w − ŵ‖² f64 [n] of rows [n, in] against what the file will hold: f32 values times f32 scales, rounded once."""
    decoded = values.astype(np.float32) * scales[:, None]
    return np.asarray(((rows - decoded.astype(np.float64)) ** 2).sum(axis=1))


def relative_error(parts: Iterable[RoundedRows], rows: NDArray[np.float32]) -> float:
    """Mean squared error over variance of searched rows, as the quality tables quote it."""
    return sum(float(part.errors.sum()) for part in parts) / float((rows.astype(np.float64) ** 2).sum())
