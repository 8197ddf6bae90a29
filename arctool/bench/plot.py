"""The picture of an evaluation: what a model costs on the disk against how far it is from its source. Draws; measures nothing.

What it has in common with other pictures is in `canvas`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from arctool.bench.canvas import COLOURS, DPI, FAINT, INCHES, INK, MARKERS, bare, canvas, clean, log_ticks, quietly
from arctool.bench.canvas import check_target as check_target
from arctool.bench.canvas import save as save
from arctool.bench.evaluation import Evaluation
from arctool.errors import UsageError

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

FLOOR = 1e-6
"""Nats a token below which a mark stands on the lower edge, and its label says so: a logarithm has no zero."""

LONGEST = 36
"""Characters of a label."""

OFFSETS = ((9, -3), (-9, -3), (0, 9), (0, -9), (9, 9), (-9, 9), (9, -15), (-9, -15), (0, 20), (0, -28), (12, 24), (-12, 24))
"""Where a label may stand, in points from its mark; the first place that is free is taken."""
BESIDE = 4
"""So many of them are so near that no line is needed from label to mark."""


@dataclass(frozen=True)
class Point:
    """One mark. `nbytes`, `bits`: its places on the two x axes; `kl`: nats a token, on both y axes; `family`: what shares a colour."""

    label: str
    family: str
    nbytes: int
    bits: float
    kl: float


def draw(evaluation: Evaluation, path: Path) -> None:
    """Write the picture of the rows that have a divergence. Raises UsageError where none has, StorageError."""
    marks = [
        Point(row.model.name, row.model.kind, row.model.nbytes, row.model.linear_bits_per_weight, row.comparison.kl)
        for row in evaluation.rows
        if row.comparison is not None
    ]
    if not marks or evaluation.source is None:
        raise UsageError("--plot: there is no divergence to draw; name the source with --against")
    reading = evaluation.reading
    failed = [row.model.name for row in evaluation.rows if row.failure is not None]
    note = f"{reading.predicted:,} predicted tokens of {Path(reading.name).name}, windows of {reading.window}"
    missing = f"; failed, not drawn: {', '.join(failed)}" if failed else ""
    save(figure(marks, f"Divergence from {evaluation.source.name} by size", note + missing), path)


def figure(marks: Sequence[Point], title: str, note: str) -> Figure:
    """Two panels with one logarithmic y axis, mean KL: the large one over the size on the disk, the small one over bits a weight."""
    surface = canvas(*INCHES)
    drawing = surface.figure
    left, right = drawing.subplots(1, 2, sharey=True, width_ratios=(2.6, 1))
    _style(left, "size on disk, MB")
    _style(right, "bits per weight of the linear layers")
    left.set_ylabel("mean KL(source ‖ model), nats per token", color=INK)
    left.set_title(clean(title, 90), loc="left", fontsize=13, color=INK, pad=14, parse_math=False)
    drawing.supxlabel(clean(note, 160), x=0.99, ha="right", fontsize=8, color=FAINT, parse_math=False)
    left.set_title("lower left is better", loc="right", fontsize=8.5, color=FAINT, pad=14)
    bottom = limits(marks)[0]
    families = list(dict.fromkeys(mark.family for mark in marks))
    for index, family in enumerate(families):
        _plot_family(left, right, [mark for mark in marks if mark.family == family], index, bottom)
    _widen(left, [mark.nbytes / 1e6 for mark in marks], 0.14)
    _widen(right, [mark.bits for mark in marks], 0.12)
    left.set_ylim(*limits(marks))
    log_ticks(left)
    if len(families) > 1:
        left.legend(frameon=False, loc="upper right", labelcolor=INK)
    with quietly():
        surface.draw()
        drawing.set_layout_engine("none")  # labels are placed in pixels, which a new layout would move
        _place_labels(left, marks, bottom, surface.get_renderer())
    return drawing


def limits(marks: Sequence[Point]) -> tuple[float, float]:
    """(lowest, highest) of the y axis: half a decade at least, so that it has ticks; marks below `FLOOR` do not stretch it."""
    seen = [mark.kl for mark in marks if mark.kl >= FLOOR] or [FLOOR]
    low, high = min(seen) / 1.6, max(seen) * 1.6
    stretch = max(1.0, 3.2 / (high / low)) ** 0.5
    return low / stretch, high * stretch


def frontier(marks: Sequence[Point]) -> list[Point]:
    """The marks that no smaller or equally large one beats, by size."""
    kept: list[Point] = []
    for mark in sorted(marks, key=lambda mark: (mark.nbytes, mark.kl)):
        if not kept or mark.kl < kept[-1].kl:
            kept.append(mark)
    return kept


def _plot_family(left: Axes, right: Axes, marks: list[Point], index: int, bottom: float) -> None:
    colour, marker = COLOURS[index % len(COLOURS)], MARKERS[index % len(MARKERS)]
    style: dict[str, Any] = {"color": colour, "markersize": 8, "markeredgecolor": "white", "linestyle": "none"}
    front = [mark for mark in frontier(marks) if mark.kl >= FLOOR]
    left.plot([mark.nbytes / 1e6 for mark in front], [mark.kl for mark in front], color=colour, alpha=0.3, linewidth=1.5, zorder=1)
    for mark in marks:
        low = mark.kl < FLOOR
        for axes, place in ((left, mark.nbytes / 1e6), (right, mark.bits)):
            axes.plot([place], [bottom if low else mark.kl], marker=marker, zorder=3, clip_on=not low, **style)
    left.plot([], [], marker=marker, label=marks[0].family, **style)


def _style(axes: Axes, label: str) -> None:
    axes.set_yscale("log")
    axes.set_xlabel(label, color=INK)
    bare(axes)


def _widen(axes: Axes, places: list[float], share: float) -> None:
    """Room for labels at both sides; a single place stands in the middle."""
    low, high = min(places), max(places)
    margin = max((high - low) * share, 0.05 * high)
    axes.set_xlim(low - margin, high + margin)


def _place_labels(axes: Axes, marks: Sequence[Point], bottom: float, renderer: Any) -> None:
    """A label beside every mark, at the first of `OFFSETS` where it covers no mark and no other label and stays in the frame."""
    from matplotlib.patheffects import withStroke
    from matplotlib.transforms import Bbox

    places = [(mark.nbytes / 1e6, mark.kl if mark.kl >= FLOOR else bottom) for mark in marks]
    radius = 5 * DPI / 72
    taken = [Bbox.from_extents(x - radius, y - radius, x + radius, y + radius) for x, y in map(axes.transData.transform, places)]
    legend = axes.get_legend()
    if legend is not None:
        taken.append(legend.get_window_extent(renderer))
    frame = axes.get_window_extent(renderer)
    for mark, place in sorted(zip(marks, places, strict=True), key=lambda pair: (-pair[1][1], pair[1][0])):
        line = {"arrowstyle": "-", "color": FAINT, "linewidth": 0.6, "shrinkA": 0, "shrinkB": 4}
        note = axes.annotate(_text(mark), place, OFFSETS[0], textcoords="offset points", fontsize=8.5, color=INK, arrowprops=line)
        note.set_parse_math(False)
        note.set_path_effects([withStroke(linewidth=2.5, foreground="white")])
        costs = []
        for offset in OFFSETS:
            box = _moved(note, offset, renderer)
            costs.append(sum(_shared(box, other) for other in taken) + _outside(box, frame))
        chosen = costs.index(min(costs))
        taken.append(_moved(note, OFFSETS[chosen], renderer))
        if note.arrow_patch is not None:
            note.arrow_patch.set_visible(chosen >= BESIDE)


def _moved(note: Any, offset: tuple[int, int], renderer: Any) -> Any:
    """The box of the label's text once it stands at `offset` points from its mark."""
    from matplotlib.text import Text

    note.set_position(offset)
    note.set_horizontalalignment("left" if offset[0] > 0 else "right" if offset[0] < 0 else "center")
    note.set_verticalalignment("center" if abs(offset[1]) < 5 else "bottom" if offset[1] > 0 else "top")
    note.update_positions(renderer)
    return Text.get_window_extent(note, renderer)


def _shared(one: Any, other: Any) -> float:
    """Square pixels that two boxes share."""
    width = min(one.x1, other.x1) - max(one.x0, other.x0)
    tall = min(one.y1, other.y1) - max(one.y0, other.y0)
    return float(width * tall) if width > 0 and tall > 0 else 0.0


def _outside(box: Any, frame: Any) -> float:
    """Square pixels of a box that are not in the frame."""
    return float(box.width * box.height) - _shared(box, frame)


def _text(mark: Point) -> str:
    small = f", KL {mark.kl:.1g}: off the scale" if mark.kl < FLOOR else ""
    return f"{clean(mark.label, LONGEST)}\n{mark.bits:.2f} bits/weight{small}"
