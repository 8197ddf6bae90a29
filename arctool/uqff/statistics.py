"""What the weights of one tensor look like: moments, exact percentiles, a histogram, the rows that stand out. Weights in, numbers out.

Two passes over the tensor, a million weights at a time: the first finds range, mean and norms and counts values by the upper half of
their bits; the second counts bins, central moments and, for the few halves that hold a percentile, the lower half. So every number is
that of the whole tensor, whatever its size. What is infinite or no number is counted, and left out of everything else.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from arctool.quant.tensor import Weight
from arctool.uqff.chunks import chunks, matrix_shape, run_length

PERCENTILES: Final = (0.1, 1.0, 5.0, 25.0, 50.0, 75.0, 95.0, 99.0, 99.9)
BINS: Final = 200
SCALE_BINS: Final = 60

HEAVIEST: Final = 5
"""Rows with the largest norm that are named."""

NAMED: Final = 5
"""Values that are not finite and are named by their place; all are counted."""

_HALF: Final = 1 << 16

Progress = Callable[[int, int], None]
"""Called as (weights done, weights in all); every weight is read twice."""


@dataclass(frozen=True)
class Histogram:
    """Counts of equally wide bins from `low` to `high`, the last of which includes `high`."""

    low: float
    high: float
    counts: tuple[int, ...]


@dataclass(frozen=True)
class Place:
    """A value that is not finite: its index in the tensor, and what it is (`nan`, `inf`, `-inf`)."""

    index: tuple[int, ...]
    value: str


@dataclass(frozen=True)
class RowNorm:
    """A row by its index in all axes but the last (of a vector: a value), and its Euclidean norm."""

    index: tuple[int, ...]
    norm: float


@dataclass(frozen=True)
class Statistics:
    """One tensor. All but `count`, `nan`, `infinite` and `nonfinite` speak of the finite values, and are None where there are none.

    `std`: over the whole tensor, not a sample of it; `kurtosis`: excess over a Gaussian's, None where all values are equal;
    `zeros`: share of exact zeros; `percentiles`: of linear interpolation between order statistics, by name.
    """

    count: int
    nan: int
    infinite: int
    nonfinite: tuple[Place, ...]
    minimum: float | None
    maximum: float | None
    mean: float | None
    std: float | None
    abs_max: float | None
    kurtosis: float | None
    zeros: float | None
    percentiles: dict[str, float]
    heaviest: tuple[RowNorm, ...]
    histogram: Histogram | None

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


def measure(weight: Weight, progress: Progress | None = None) -> Statistics:
    """The statistics of `weight` in the basis of the model. Raises GeometryError for a weight that does not decode."""
    first, second = _First(weight.shape), _Second()
    rows = run_length(weight)
    total = 2 * math.prod(weight.shape)
    done = 0
    for turn in (first, second):
        if turn is second:
            if first.finite == 0:
                break
            second.begin(first)
        for start, values in chunks(weight, rows):
            turn.take(start, values)
            done += values.size
            if progress is not None:
                progress(done, total)
    return _statistics(first, second)


def spread(values: NDArray[np.float32]) -> tuple[float, float, float, Histogram] | None:
    """(least, median, greatest, histogram) of the finite ones of a short vector such as a tensor's scales; None where there are none."""
    wide = values[np.isfinite(values)].astype(np.float64)
    if not wide.size:
        return None
    low, high = float(wide.min()), float(wide.max())
    ends = _ends(low, high)
    return low, float(np.median(wide)), high, Histogram(*ends, tuple(map(int, np.histogram(wide, SCALE_BINS, ends)[0])))


def _ends(low: float, high: float) -> tuple[float, float]:
    """Ends of a histogram of values from `low` to `high`: where all are equal, with room on both sides."""
    room = max(abs(low) / 2, 0.5) if low == high else 0.0
    return low - room, high + room


class _First:
    """Range, mean, norms, what is not finite, and values by the upper half of their ordered bits."""

    def __init__(self, shape: tuple[int, ...]) -> None:
        self.shape = shape
        self.width = matrix_shape(shape)[1]
        self.count = self.finite = self.nan = self.infinite = self.zeros = 0
        self.low, self.high, self.total = math.inf, -math.inf, 0.0
        self.places: list[Place] = []
        self.heaviest: list[tuple[float, int]] = []
        self.halves = np.zeros(_HALF, np.int64)

    def take(self, start: int, values: NDArray[np.float32]) -> None:
        finite = np.isfinite(values)
        self.count += values.size
        if not finite.all():
            self._note(start, values, finite)
        kept = values[finite]
        self._norms(start, values, finite)
        if not kept.size:
            return
        self.finite += kept.size
        self.zeros += kept.size - int(np.count_nonzero(kept))
        self.low, self.high = min(self.low, float(kept.min())), max(self.high, float(kept.max()))
        self.total += float(kept.sum(dtype=np.float64))
        self.halves += np.bincount(_ordered(kept) >> 16, minlength=_HALF)

    def _note(self, start: int, values: NDArray[np.float32], finite: NDArray[np.bool_]) -> None:
        self.nan += int(np.count_nonzero(np.isnan(values)))
        self.infinite += int(np.count_nonzero(np.isinf(values)))
        for flat in np.flatnonzero(~finite)[: NAMED - len(self.places)]:
            index = np.unravel_index(start * self.width + int(flat), self.shape or (1,))
            self.places.append(Place(tuple(map(int, index))[: len(self.shape)], str(float(values.reshape(-1)[flat]))))

    def _norms(self, start: int, values: NDArray[np.float32], finite: NDArray[np.bool_]) -> None:
        norms = np.sqrt(np.square(np.where(finite, values, np.float32(0)), dtype=np.float64).sum(axis=1))
        best = np.argsort(-norms, kind="stable")[:HEAVIEST]
        found = [*self.heaviest, *((float(norms[row]), start + int(row)) for row in best)]
        self.heaviest = sorted(found, key=lambda item: (-item[0], item[1]))[:HEAVIEST]

    @property
    def row_shape(self) -> tuple[int, ...]:
        return self.shape[:-1] if len(self.shape) > 1 else self.shape


class _Second:
    """Bins, central moments, and the lower half of the bits where a percentile lies."""

    def __init__(self) -> None:
        self.square = self.fourth = 0.0
        self.bins = np.zeros(BINS, np.int64)

    def begin(self, first: _First) -> None:
        """Choose, from what the first pass found, what to look for."""
        self.mean = first.total / first.finite
        self.range = _ends(first.low, first.high)
        ends = np.cumsum(first.halves)
        self.wanted = sorted({rank for q in PERCENTILES for rank in _neighbours(q, first.finite)})
        self.half_of = {rank: int(np.searchsorted(ends, rank, side="right")) for rank in self.wanted}
        self.before = {half: int(ends[half] - first.halves[half]) for half in self.half_of.values()}
        self.slots = np.full(_HALF, -1, np.int64)
        self.slots[sorted(self.before)] = np.arange(len(self.before))
        self.lower = np.zeros((len(self.before), _HALF), np.int64)

    def take(self, start: int, values: NDArray[np.float32]) -> None:
        kept = values[np.isfinite(values)]
        wide = kept.astype(np.float64)
        self.bins += np.histogram(wide, BINS, self.range)[0]
        square = np.square(wide - self.mean)
        self.square += float(square.sum())
        self.fourth += float(np.square(square).sum())
        keys = _ordered(kept)
        slots = self.slots[keys >> 16]
        here = slots >= 0
        flat = slots[here] * _HALF + (keys[here] & np.uint32(_HALF - 1))
        self.lower += np.bincount(flat, minlength=self.lower.size).reshape(self.lower.shape)

    def percentile(self, q: float, count: int) -> float:
        low, high = (self._value(rank) for rank in _neighbours(q, count))
        at = (count - 1) * q / 100
        return low + (high - low) * (at - math.floor(at))

    def _value(self, rank: int) -> float:
        """The order statistic of that rank, counted from 0: exactly a value of the tensor."""
        half = self.half_of[rank]
        ends = np.cumsum(self.lower[self.slots[half]])
        low = int(np.searchsorted(ends, rank - self.before[half], side="right"))
        return _unordered(half << 16 | low)


def _neighbours(q: float, count: int) -> tuple[int, int]:
    """The ranks between which a percentile lies."""
    at = math.floor((count - 1) * q / 100)
    return at, min(at + 1, count - 1)


def _ordered(values: NDArray[np.float32]) -> NDArray[np.uint32]:
    """Bits of f32 that compare as unsigned numbers as the values do: the sign bit flipped, and all others too below zero."""
    bits = np.ascontiguousarray(values).view(np.uint32)
    return np.where(bits >> 31, ~bits, bits | np.uint32(1 << 31))


def _unordered(key: int) -> float:
    bits = key & 0x7FFFFFFF if key >> 31 else ~key & 0xFFFFFFFF
    return float(np.array(bits, np.uint32).view(np.float32))


def _statistics(first: _First, second: _Second) -> Statistics:
    known = {"count": first.count, "nan": first.nan, "infinite": first.infinite, "nonfinite": tuple(first.places)}
    if first.finite == 0:
        nothing = dict.fromkeys(("minimum", "maximum", "mean", "std", "abs_max", "kurtosis", "zeros", "histogram"))
        return Statistics(**known, **nothing, percentiles={}, heaviest=())  # type: ignore[arg-type]
    variance = second.square / first.finite
    rows = first.row_shape
    return Statistics(
        **known,  # type: ignore[arg-type]
        minimum=first.low,
        maximum=first.high,
        mean=second.mean,
        std=math.sqrt(variance),
        abs_max=max(abs(first.low), abs(first.high)),
        kurtosis=second.fourth / first.finite / variance**2 - 3 if variance**2 > 0 and first.low < first.high else None,
        zeros=first.zeros / first.finite,
        percentiles={f"{q:g}": second.percentile(q, first.finite) for q in PERCENTILES},
        heaviest=tuple(RowNorm(_index(row, rows), norm) for norm, row in first.heaviest),
        histogram=Histogram(*second.range, tuple(map(int, second.bins))),
    )


def _index(row: int, rows: tuple[int, ...]) -> tuple[int, ...]:
    return tuple(int(part) for part in np.unravel_index(row, rows)) if rows else ()
