"""What the trellis searches cost on this machine, and what deciding before the end of a row costs in error: `arctool bench bake`.

One thread, core-seconds (a neighbour that takes the core does not count, one that takes the caches does), medians of interleaved rounds
after one that compiles. Errors are mean squares over the variance of independent Gaussian weights, in the table's own scale. Quote
ratios of one run.
"""

from __future__ import annotations

import os
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import llvmlite.binding as llvm
import numpy as np
from numpy.typing import NDArray

from arctool.bake.search.ldlq import feedback
from arctool.bake.search.rounding import RungTools
from arctool.bake.search.survivor_ir import BLOCK
from arctool.bake.search.survivors import Feedback, delay_of, rows_per_chunk, search_rows
from arctool.bake.search.vector_ir import LANES
from arctool.errors import UsageError
from arctool.quant.codebooks import RUNGS, rung
from arctool.quant.trellis import Geometry

ROWS = 32
WIDTH = 1024
ROUNDS = 5
CURVE_RUNGS = ("qtip2-v4", "qtip3", "qtip2")
"""K8V4L12 has 16 nodes and forgets after a few columns, K3V1L12 has 512, K4V2L16 4096."""

DELAYS = (0, 16, 32, 48, 64, 96)

MOST_ROWS = 1 << 14

States = NDArray[np.int32]
Progress = Callable[[int, int], None]
"""Called as (searches done, all)."""


@dataclass(frozen=True)
class Conditions:
    """Where and with what a measurement ran. `load`: of the machine, before and after; it has `cores`."""

    processor: str
    lanes: int
    cores: int
    load: tuple[float, float]
    rows: int
    width: int
    rounds: int


@dataclass(frozen=True)
class Cost:
    """Core-seconds per million weights of one search, and its error where all columns weigh the same."""

    seconds: float
    error: float


@dataclass(frozen=True)
class SearchSpeed:
    """A rung: the search of whole rows, and the one with error feedback that a calibrated bake does."""

    rung: str
    geometry: str
    whole: Cost
    feedback: Cost

    @property
    def ratio(self) -> float:
        """What deciding with a delay costs: the error over that of the whole row."""
        return self.feedback.error / self.whole.error


@dataclass(frozen=True)
class Window:
    """A rung and a delay. `ratio`: as in `SearchSpeed`; `loss`: tr(E H Eᵀ) for a random H over that with the longest delay."""

    rung: str
    geometry: str
    commit: int
    delay: int
    cost: Cost
    ratio: float
    loss: float


@dataclass(frozen=True)
class Measured:
    """A run: `speeds` or `windows`, the other is empty."""

    conditions: Conditions
    speeds: tuple[SearchSpeed, ...] = ()
    windows: tuple[Window, ...] = ()

    def to_json(self) -> dict[str, Any]:
        """docs/quality.md says what the fields mean."""
        found: dict[str, Any] = {"conditions": asdict(self.conditions)}
        if self.speeds:
            found["rungs"] = [{**asdict(one), "ratio": one.ratio} for one in self.speeds]
        if self.windows:
            found["windows"] = [asdict(one) for one in self.windows]
        return found


@dataclass(frozen=True)
class _Fixture:
    """Rows f32 [rows, width] in table units, and what is needed to search them."""

    tools: RungTools
    rows: NDArray[np.float32]

    def whole(self) -> States:
        return self.tools.searcher.search(self.rows)

    def fed(self, given: Feedback) -> States:
        geometry = self.tools.rung.geometry
        size = rows_per_chunk(geometry)
        chunks = (self.rows[at : at + size] for at in range(0, len(self.rows), size))
        return np.concatenate([search_rows(chunk, self.tools.layout, given, geometry) for chunk in chunks])

    def errors(self, states: States) -> NDArray[np.float64]:
        """w − c, f64 [rows, width]."""
        return self.rows.astype(np.float64) - self.tools.values[states].reshape(self.rows.shape)

    def error(self, states: States) -> float:
        return float((self.errors(states) ** 2).sum() / (self.rows.astype(np.float64) ** 2).sum())


def measure_speeds(names: Sequence[str] = (), rows: int = ROWS, width: int = WIDTH, progress: Progress | None = None) -> Measured:
    """Both searches of every rung of `names` (all if there are none) on `rows` Gaussian rows of `width` weights.

    Raises UsageError for an unknown rung or a number of rows that is none.
    """
    fixtures = [_fixture(name, rows, width) for name in names or RUNGS]
    random = _random_hessian(width)
    plain = [feedback(np.eye(width), fixture.tools.rung.geometry) for fixture in fixtures]
    given = [feedback(random, fixture.tools.rung.geometry) for fixture in fixtures]
    calls: list[Callable[[], object]] = []
    for fixture, factors in zip(fixtures, given, strict=True):
        calls += [fixture.whole, _call(fixture, factors)]
    before = os.getloadavg()[0]
    took = core_seconds(calls, ROUNDS, progress)
    found = []
    for index, (fixture, flat) in enumerate(zip(fixtures, plain, strict=True)):
        per_million = 1e6 / fixture.rows.size
        whole = Cost(took[2 * index] * per_million, fixture.error(fixture.whole()))
        fed = Cost(took[2 * index + 1] * per_million, fixture.error(fixture.fed(flat)))
        found.append(SearchSpeed(fixture.tools.rung.name, fixture.tools.rung.geometry.name, whole, fed))
    return Measured(_conditions(before, rows, width), speeds=tuple(found))


def measure_windows(
    names: Sequence[str] = CURVE_RUNGS,
    rows: int = ROWS,
    width: int = WIDTH,
    delays: Sequence[int] = DELAYS,
    progress: Progress | None = None,
) -> Measured:
    """The search with error feedback at every delay of `delays`, for every rung of `names`. Raises as `measure_speeds`."""
    fixtures = [_fixture(name, rows, width) for name in names]
    random, flat = _random_hessian(width), np.eye(width)
    pairs = [(fixture, delay) for fixture in fixtures for delay in delays]
    given = [feedback(random, fixture.tools.rung.geometry, delay=delay) for fixture, delay in pairs]
    before = os.getloadavg()[0]
    took = core_seconds([_call(fixture, factors) for (fixture, _), factors in zip(pairs, given, strict=True)], ROUNDS, progress)
    whole = {fixture.tools.rung.name: fixture.error(fixture.whole()) for fixture in fixtures}
    losses = [_loss(fixture, fixture.fed(factors), random) for (fixture, _), factors in zip(pairs, given, strict=True)]
    longest = {fixture.tools.rung.name: loss for (fixture, delay), loss in zip(pairs, losses, strict=True) if delay == max(delays)}
    windows = []
    for (fixture, delay), seconds, loss in zip(pairs, took, losses, strict=True):
        name, geometry = fixture.tools.rung.name, fixture.tools.rung.geometry
        error = fixture.error(fixture.fed(feedback(flat, geometry, delay=delay)))
        cost = Cost(seconds / fixture.rows.size * 1e6, error)
        windows.append(Window(name, geometry.name, BLOCK, delay, cost, error / whole[name], loss / longest[name]))
    return Measured(_conditions(before, rows, width), windows=tuple(windows))


def core_seconds(calls: Sequence[Callable[[], object]], rounds: int, progress: Progress | None = None) -> list[float]:
    """Median time that each call takes of its thread's core, over interleaved rounds, after one round that compiles and warms up."""
    taken: list[list[float]] = [[] for _ in calls]
    done = 0
    for turn in range(rounds + 1):
        for call, times in zip(calls, taken, strict=True):
            began = time.thread_time()
            call()
            if turn:
                times.append(time.thread_time() - began)
            done += 1
            if progress is not None:
                progress(done, (rounds + 1) * len(calls))
    return [statistics.median(times) for times in taken]


def is_default(window: Window) -> bool:
    """Whether it is the window that a bake uses."""
    return window.delay == delay_of(Geometry.parse(window.geometry))


def parse_rungs(text: str) -> tuple[str, ...]:
    """Rungs from a list with commas. Raises UsageError for an unknown one."""
    names = tuple(dict.fromkeys(part.strip() for part in text.split(",") if part.strip()))
    if not names:
        raise UsageError(f"--rungs: expected names with commas between them, found {text[:80]!r}; known: {', '.join(RUNGS)}")
    for name in names:
        rung(name)
    return names


def _fixture(name: str, rows: int, width: int) -> _Fixture:
    if not 1 <= rows <= MOST_ROWS:
        raise UsageError(f"--rows: expected 1 to {MOST_ROWS}, found {rows}")
    tools = RungTools.of(rung(name))
    weights = np.random.default_rng(0).standard_normal((rows, width)) * tools.rung.gain
    return _Fixture(tools, weights.astype(np.float32))


def _call(fixture: _Fixture, given: Feedback) -> Callable[[], object]:
    return lambda: fixture.fed(given)


def _random_hessian(width: int) -> NDArray[np.float64]:
    """The second moments of twice as many random inputs as there are columns, f64 [width, width]: no column is free, none decides all."""
    inputs = np.random.default_rng(1).standard_normal((2 * width, width))
    return np.asarray(inputs.T @ inputs / len(inputs))


def _loss(fixture: _Fixture, states: States, hessian: NDArray[np.float64]) -> float:
    errors = fixture.errors(states)
    return float(((errors @ hessian) * errors).sum())


def _conditions(before: float, rows: int, width: int) -> Conditions:
    load = (round(before, 2), round(os.getloadavg()[0], 2))
    return Conditions(str(llvm.get_host_cpu_name()), LANES, os.cpu_count() or 1, load, rows, width, ROUNDS)
