"""Pictures of an artifact: bits and error layer by layer, and the weights of one tensor. Draws what `inspect` found; measures nothing."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from arctool.bench.canvas import COLOURS, FAINT, INCHES, INK, MARKERS, bare, canvas, clean, log_ticks, save
from arctool.uqff.detail import Scales, TensorDetail
from arctool.uqff.inspect import Inspection
from arctool.uqff.statistics import Statistics

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

LOWEST: Final = 1e-12
"""An error below stands on the lower edge of its panel: a logarithm has no zero."""

HIGHEST: Final = 1e6
"""An error past this is no layer's: a report that claims it gets no place on the axis."""

NO_ERRORS: Final = "no report gives the layers' errors; `arctool verify --source MODEL` measures them"

KINDS: Final = (*COLOURS, "#c2548f", "#6b7a1e")
"""Colours of the kinds of modules; what stands at an end is grey."""

FAR: Final = 10.0
"""A head or an embedding whose error is smaller by more than this than any layer's stands on the lower edge, with its number beside it."""

SPREAD: Final = 0.8
"""Of the distance between two layers, taken by the marks of one: kinds with equal bits stand side by side."""

LONGEST: Final = 36
"""Characters of a name in a legend."""


@dataclass(frozen=True)
class Mark:
    """One layer of the model. `place`: its index on the x axis, `kind`: the module that it is, `error`: None where nobody says."""

    kind: str
    place: int
    bits: float
    error: float | None


def draw_layers(inspection: Inspection, path: Path) -> None:
    """Write the picture of bits and error by layer. Raises StorageError."""
    save(layers_figure(inspection), path)


def draw_tensor(detail: TensorDetail, path: Path) -> None:
    """Write the picture of one tensor's weights. Raises StorageError."""
    save(tensor_figure(detail), path)


def marks(inspection: Inspection) -> tuple[list[Mark], dict[int, str]]:
    """(a mark for each stored layer, names of the places at both ends). Decoder layers keep their own index.

    What has no index stands before the first if the model reads it first (an embedding), behind the last otherwise (a head).
    """
    found: list[Mark] = []
    last = max((index for row in inspection.layers if (index := _index(row.key)) is not None), default=-1)
    ends: dict[int, str] = {}
    for row in inspection.layers:
        index = _index(row.key)
        name = row.key.rpartition(".")[2]
        if index is None:
            index = -1 if "embed" in row.key else last + 1
            ends.setdefault(index, "embedding" if index < 0 else "head")
        kind = f"expert {name}" if ".experts." in row.key else name
        found.append(Mark(kind, index, row.bits_per_weight, row.relative_error))
    return found, ends


def _index(key: str) -> int | None:
    """The index of the decoder layer that a module belongs to: the first number of its path."""
    match = re.search(r"\.(\d{1,6})(?=\.)", key)
    return None if match is None else int(match[1])


def layers_figure(inspection: Inspection) -> Figure:
    """Two panels over the index of the layer: bits a weight above, relative error on a logarithmic axis below."""
    drawing = canvas(INCHES[0], 7.0).figure
    found, ends = marks(inspection)
    above, below = drawing.subplots(2, 1, sharex=True)
    for axes, label in ((above, "bits per weight"), (below, "relative error ‖W−Ŵ‖²/‖W‖²")):
        bare(axes)
        axes.set_ylabel(label, color=INK)
    bottom = _error_axis(below, found, ends)
    inner = list(dict.fromkeys(mark.kind for mark in found if mark.place not in ends))
    for kind in dict.fromkeys(mark.kind for mark in found):
        number = inner.index(kind) if kind in inner else -1
        shift = SPREAD * ((number + 0.5) / len(inner) - 0.5) if kind in inner else 0.0
        style = _style(number, kind)
        own = [mark for mark in found if mark.kind == kind]
        above.plot([mark.place + shift for mark in own], [mark.bits for mark in own], **style)
        seen = [(mark.place + shift, mark.error) for mark in own if mark.error is not None]
        if seen:  # an empty line that is not clipped would count as a mark in the corner of the picture
            heights = [max(error, bottom) for _, error in seen]
            below.plot([place for place, _ in seen], heights, clip_on=False, **{**style, "label": None})
        for place, error in seen:
            if LOWEST < error < bottom:
                near = {"textcoords": "offset points", "fontsize": 8, "color": FAINT}
                below.annotate(f"{error:.1g}", (place, bottom), (0, 7), ha="center", **near)
    above.set_ylim(0, max((mark.bits for mark in found), default=1.0) * 1.08)
    _layer_ticks(below, found, ends)
    if all(mark.error is None for mark in found):
        _say(below, NO_ERRORS if found else "no layers")
    if found:
        legend = drawing.legend(*above.get_legend_handles_labels(), frameon=False, loc="outside right center", labelcolor=INK, fontsize=9)
        for text in legend.get_texts():
            text.set_parse_math(False)
    _titles(drawing, above, *_words(inspection))
    return drawing


def _style(number: int, kind: str) -> dict[str, Any]:
    """Colour and marker of the kind with that number (all pairs differ for the first 48), of what stands at an end for −1."""
    name = clean(kind, LONGEST)
    return {
        "color": KINDS[number % len(KINDS)] if number >= 0 else FAINT,
        "marker": MARKERS[(number % len(KINDS) + number // len(KINDS)) % len(MARKERS)] if number >= 0 else "o",
        "label": f" {name}" if name.startswith("_") else name,  # matplotlib keeps labels that begin with an underscore to itself
        "linestyle": "none",
        "markersize": 4.5,
        "markeredgewidth": 0,
        "zorder": 3,
    }


def _error_axis(axes: Axes, found: Sequence[Mark], ends: dict[int, str]) -> float:
    """A logarithmic axis for the errors; its lower edge, where those stand that are too small for it."""
    errors = [mark.error for mark in found if mark.error is not None and LOWEST < mark.error < HIGHEST and mark.place not in ends]
    outer = [mark.error for mark in found if mark.error is not None and LOWEST < mark.error < HIGHEST and mark.place in ends]
    errors += [error for error in outer if not errors or error * FAR >= min(errors)]
    low, high = (min(errors) / 1.6, max(errors) * 1.6) if errors else (1e-3, 1.0)
    stretch = max(1.0, 3.2 / (high / low)) ** 0.5
    axes.set_yscale("log")
    axes.set_ylim(low / stretch, high * stretch)
    log_ticks(axes)
    return low / stretch


def _layer_ticks(axes: Axes, found: Sequence[Mark], ends: dict[int, str]) -> None:
    """A number at every layer or every few, and the names of the ends."""
    inner = sorted({mark.place for mark in found} - set(ends))
    step = next((step for step in (1, 2, 5, 10, 20, 50) if len(inner) / step <= 32), 1000)
    ticks = {place: str(place) for place in inner if place % step == 0}
    ticks |= {place: f"\n{name}" for place, name in ends.items()}
    axes.set_xticks(sorted(ticks), [ticks[place] for place in sorted(ticks)])
    axes.set_xlabel("layer", color=INK)
    if found:
        axes.set_xlim(min(mark.place for mark in found) - 0.8, max(mark.place for mark in found) + 0.8)


def _words(inspection: Inspection) -> tuple[str, str]:
    """Title and note."""
    totals = inspection.totals
    name = Path(inspection.path).resolve()
    title = name.name if name.suffix != ".uqff" else name.parent.name
    parts = [title, inspection.rung or "", f"{totals.nbytes / 1e6:.1f} MB"]
    rate = totals.quantised_bits_per_weight
    note = f"{totals.bits_per_weight:.3f} bits a weight over all"
    if rate is not None:
        note = f"{rate:.3f} bits a weight in quantised layers, {note}"
    errors = [row.relative_error for row in inspection.layers]
    exact = sum(error is not None and error <= LOWEST for error in errors)
    silent = errors.count(None)
    note += f"; {exact} without error, on the lower edge" if exact else ""
    note += f"; no error is given for {silent} of {len(errors)} layers" if 0 < silent < len(errors) else ""
    return " · ".join(filter(None, parts)), note


def tensor_figure(detail: TensorDetail) -> Figure:
    """How often each value occurs (logarithmic), against a Gaussian of the same width; for a trellis the rows' scales beside it."""
    scales = None if detail.trellis is None else detail.trellis.scales
    drawing = canvas(INCHES[0], 5.2).figure
    panels = drawing.subplots(1, 2, width_ratios=(2.4, 1)) if scales is not None else [drawing.subplots()]
    _values(panels[0], detail.statistics)
    if scales is not None:
        _scales(panels[1], scales)
    shape = "×".join(map(str, detail.shape)) or "scalar"
    error = "" if detail.report is None or detail.report.relative_error is None else f", relative error {detail.report.relative_error:.3g}"
    note = f"{detail.artifact}: {detail.label}, {shape}, {detail.bits_per_weight:.3f} bits a weight{error}"
    _titles(drawing, panels[0], detail.key, note, _numbers(detail.statistics))
    return drawing


def _values(axes: Axes, found: Statistics) -> None:
    bare(axes)
    axes.set_xlabel("weight", color=INK)
    if found.histogram is None:
        _say(axes, "no weights" if found.count == 0 else "no finite weights")
        return
    counts = np.array(found.histogram.counts)
    edges = np.linspace(found.histogram.low, found.histogram.high, counts.size + 1)
    axes.set_yscale("log")
    axes.stairs(counts, edges, fill=True, baseline=0.5, color=COLOURS[0], alpha=0.75, label="weights")
    top = float(counts.max()) * 2
    if found.std is not None and found.mean is not None and found.std > 0:
        centres = (edges[:-1] + edges[1:]) / 2
        width = float(edges[1] - edges[0])
        expected = (
            np.exp(-0.5 * np.square((centres - found.mean) / found.std)) * counts.sum() * width / (found.std * math.sqrt(2 * math.pi))
        )
        axes.plot(centres, np.maximum(expected, 0.1), color=COLOURS[1], linewidth=1.1, label="Gaussian of the same width")
        top = max(top, float(expected.max()) * 2)
    axes.set_ylim(0.5, top * 2)
    log_ticks(axes)
    axes.set_ylabel(f"weights in each of {counts.size} bins", color=INK)
    axes.legend(frameon=False, loc="upper right", labelcolor=INK, fontsize=8.5, ncols=2)


def _numbers(found: Statistics) -> str:
    """The figures of a tensor in one line."""
    parts = [] if found.mean is None else [f"mean {found.mean:.3g}", f"std {found.std:.4g}", f"largest {found.abs_max:.4g}"]
    parts += [] if found.kurtosis is None else [f"excess kurtosis {found.kurtosis:.3g}"]
    parts += [f"zeros {found.zeros:.2%}"] if found.zeros else []
    parts += [f"not finite {found.nan + found.infinite:,}"] if found.nan + found.infinite else []
    return ", ".join(parts)


def _scales(axes: Axes, scales: Scales) -> None:
    bare(axes)
    counts = np.array(scales.histogram.counts)
    axes.stairs(counts, np.linspace(scales.histogram.low, scales.histogram.high, counts.size + 1), fill=True, color=COLOURS[2], alpha=0.75)
    axes.axvline(scales.median, color=INK, linewidth=0.9, linestyle=(0, (4, 3)))
    axes.set_xlabel("scale of a row", color=INK)
    axes.set_ylabel("rows", color=INK)
    axes.set_title(f"median {scales.median:.4g}", loc="right", fontsize=8.5, color=FAINT)


def _titles(drawing: Figure, axes: Axes, title: str, note: str, under: str = "") -> None:
    axes.set_title(clean(title, 90), loc="left", fontsize=13, color=INK, pad=26 if under else 12, parse_math=False)
    axes.text(0, 1.02, under, transform=axes.transAxes, va="bottom", fontsize=8.5, color=FAINT, in_layout=False)
    drawing.supxlabel(clean(note, 160), x=0.99, ha="right", fontsize=8, color=FAINT, parse_math=False)


def _say(axes: Axes, what: str) -> None:
    """Words in the middle of a panel that has nothing to show."""
    axes.set_yticks([])
    axes.text(0.5, 0.5, what, transform=axes.transAxes, ha="center", va="center", color=FAINT, in_layout=False)
