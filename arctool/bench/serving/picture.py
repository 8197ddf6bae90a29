"""The latency-throughput curve: what each client waits for, against what the server brings in all. Draws; measures nothing."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from arctool.bench.canvas import COLOURS, FAINT, INCHES, INK, MARKERS, bare, canvas, clean, log_ticks, save
from arctool.bench.serving.measurement import METRICS, Row, Spread
from arctool.bench.serving.session import Result
from arctool.errors import UsageError

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

PANELS = {"ttft": "time to first token", "tpot": "time per output token", "e2el": "end-to-end latency"}
"""Metrics that have a panel each."""

LONGEST = 36
"""Characters of a name in the legend."""


@dataclass(frozen=True)
class Curve:
    """One server's rows."""

    name: str
    rows: tuple[Row, ...]


def draw(result: Result, path: Path) -> None:
    """Write the picture of the rows that have figures. Raises UsageError where none has, StorageError."""
    plan = result.plan
    lengths = f"{plan.input_len} tokens in, {plan.output_len} out" + (" at most" if not result.equal_lengths else "")
    note = f"{result.url}, {plan.workload.value}, {lengths}, {plan.requests} requests a point, seed {result.seed}"
    failed = [row.load.label for row in result.rows if row.failure is not None]
    missing = f"; failed, not drawn: {', '.join(failed)}" if failed else ""
    save(figure([Curve(result.model, result.rows)], f"Latency by throughput: {result.model}", note + missing), path)


def figure(curves: Sequence[Curve], title: str, note: str) -> Figure:
    """A panel for each metric that any row has, side by side over output tokens a second: medians, and the largest percentile dashed.

    Raises UsageError where no row has figures.
    """
    seen = [curve for curve in curves if any(row.figures is not None for row in curve.rows)]
    names = [name for name in PANELS if any(_spread(row, name) for curve in seen for row in curve.rows)]
    if not names:
        raise UsageError("--plot: there is nothing to draw: no load has figures")
    drawing = canvas(INCHES[0] + 2.0, INCHES[1]).figure
    panels = list(drawing.subplots(1, len(names), squeeze=False)[0])
    for axes, name in zip(panels, names, strict=True):
        bare(axes)
        axes.set_xlabel("output tokens a second, all requests", color=INK)
        axes.set_ylabel(f"{PANELS[name]} ({METRICS[name]}), ms", color=INK)
        axes.set_yscale("log")
        for index, curve in enumerate(seen):
            _plot(axes, curve, name, index)
        axes.set_xlim(0, 1.1 * max(row.figures.output_throughput for curve in seen for row in curve.rows if row.figures is not None))
        _stretch(axes)
    panels[0].set_title(clean(title, 90), loc="left", fontsize=13, color=INK, pad=14, parse_math=False)
    panels[-1].set_title("lower right is better", loc="right", fontsize=8.5, color=FAINT, pad=14)
    legend = panels[0].legend(frameon=False, loc="best", labelcolor=INK, fontsize=8.5)
    for text in legend.get_texts():
        text.set_parse_math(False)
    drawing.supxlabel(clean(note, 180), x=0.99, ha="right", fontsize=8, color=FAINT, parse_math=False)
    return drawing


def _plot(axes: Axes, curve: Curve, name: str, index: int) -> None:
    colour, marker = COLOURS[index % len(COLOURS)], MARKERS[index % len(MARKERS)]
    points = [(row, row.figures.output_throughput, one) for row in curve.rows if row.figures is not None and (one := _spread(row, name))]
    if not points:
        return
    places = [place for _, place, _ in points]
    label = clean(curve.name, LONGEST)
    label = f" {label}" if label.startswith("_") else label  # matplotlib keeps labels that begin with an underscore to itself
    style = {"color": colour, "marker": marker, "markersize": 7, "markeredgecolor": "white"}
    axes.plot(places, [one.median for _, _, one in points], linewidth=1.6, label=f"{label}, median", **style)  # type: ignore[arg-type]
    rank, _ = max(points[0][2].percentiles)
    high = [dict(one.percentiles)[rank] for _, _, one in points]
    axes.plot(places, high, linestyle=(0, (4, 3)), linewidth=1.0, color=colour, label=f"{label}, P{rank:g}")
    for row, place, one in points:
        text = str(row.load.clients) if row.load.clients is not None else row.load.label
        axes.annotate(text, (place, one.median), (0, 8), textcoords="offset points", ha="center", fontsize=8.5, color=INK)


def _spread(row: Row, name: str) -> Spread | None:
    return None if row.figures is None else row.figures.spreads.get(name)


def _stretch(axes: Axes) -> None:
    """Room for half a decade at least, so that the axis has ticks."""
    low, high = axes.get_ylim()
    stretch = max(1.0, 3.2 / (high / low)) ** 0.5
    axes.set_ylim(low / stretch / 1.1, high * stretch * 1.1)
    log_ticks(axes)
