"""The speed of a bake's searches as tables for people."""

from __future__ import annotations

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from arctool.bench.search import Measured, is_default

UNIT = "core-seconds per million weights, one thread"


def speeds(found: Measured) -> RenderableType:
    """The table of the run, and what it ran on."""
    at = found.conditions
    lines: list[RenderableType] = []
    if found.speeds:
        lines.append(_rungs(found))
    if found.windows:
        lines.append(_windows(found))
    lines.append(
        Text(
            f"{at.rows} Gaussian rows of {at.width}, medians of {at.rounds} rounds; {at.processor}, {at.lanes} lanes, {at.cores} cores, "
            f"load {at.load[0]:.1f} before and {at.load[1]:.1f} after: quote ratios of one run"
        )
    )
    return Group(*lines)


def _rungs(found: Measured) -> Table:
    table = Table("rung", "geometry", "whole row", "with feedback", "error", "error if decided late", "ratio", title=UNIT, box=None)
    for one in found.speeds:
        times = (f"{cost.seconds:.2f}" for cost in (one.whole, one.feedback))
        table.add_row(one.rung, one.geometry, *times, f"{one.whole.error:.4f}", f"{one.feedback.error:.4f}", f"{one.ratio:.3f}")
    return table


def _windows(found: Measured) -> Table:
    heads = ("rung", "geometry", "commit", "delay", "time", "error", "over the whole row", "loss, random H")
    table = Table(*heads, title=UNIT, box=None)
    for one in found.windows:
        delay = f"{one.delay} *" if is_default(one) else str(one.delay)
        figures = (f"{one.cost.seconds:.2f}", f"{one.cost.error:.4f}", f"{one.ratio:.3f}", f"{one.loss:.3f}")
        table.add_row(one.rung, one.geometry, str(one.commit), delay, *figures)
    return table
