"""What all pictures share: a canvas, colours, axes, names as text, and a file that appears whole. Knows nothing of what is drawn.

matplotlib is imported when a picture is made, and without a display: a figure of our own, never pyplot's. Equal pictures are equal files.
"""

from __future__ import annotations

import logging
import math
import os
import tempfile
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from arctool.errors import UsageError
from arctool.uqff.files import storage_errors

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

ENDINGS = (".png", ".svg", ".pdf")
INCHES = (11.0, 6.2)
DPI = 150

INK, FAINT, GRID = "#222222", "#6b6b6b", "#dddddd"
COLOURS = ("#1f5fa8", "#c4512d", "#3b8650", "#7d4fa0", "#a8801f", "#2b8c96")
MARKERS = ("o", "s", "D", "^", "v", "P")
"""One colour and marker for each family of points."""

_UNDATED = {".svg": {"Date": None}, ".pdf": {"CreationDate": None}}
"""Metadata that would make every file of one picture another."""


def picture_target(picture: str | Path | None) -> Path | None:
    """Where a picture goes, known to be writable before any work; None where none is wanted. Raises as `check_target`."""
    if picture is None:
        return None
    check_target(Path(picture))
    return Path(picture)


def check_target(path: Path) -> None:
    """Raise UsageError or StorageError unless a picture can be written at `path`: asked before an hour of measuring."""
    if path.suffix.lower() not in ENDINGS:
        raise UsageError(f"--plot: {path}: expected a name that ends in {', '.join(ENDINGS)}")
    with storage_errors(path, "write"):
        if path.is_dir():
            raise UsageError(f"--plot: {path}: is a directory; expected the name of a picture")
        with tempfile.NamedTemporaryFile(dir=path.parent, prefix=f".{path.name}."):
            pass


def canvas(width: float, height: float) -> FigureCanvasAgg:
    """The canvas of an empty white figure (its `figure`) of so many inches."""
    with quietly():
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure

    return FigureCanvasAgg(Figure(figsize=(width, height), dpi=DPI, layout="constrained", facecolor="white"))


def save(drawing: Figure, path: Path) -> None:
    """Write the figure; it appears whole, by rename. Raises StorageError."""
    from matplotlib import rc_context

    ending = path.suffix.lower()
    part = path.parent / f".{path.name}.{os.getpid()}"
    with storage_errors(path, "write"), quietly(), rc_context({"svg.hashsalt": "arctool"}):
        try:
            with part.open("xb") as file:
                drawing.savefig(file, format=ending[1:], metadata=_UNDATED.get(ending))
            part.replace(path)
        finally:
            part.unlink(missing_ok=True)


@contextmanager
def quietly() -> Iterator[None]:
    """No words of matplotlib: a letter that its font lacks becomes a box, a home that cannot be written costs a font search."""
    logger = logging.getLogger("matplotlib")
    before = logger.level
    logger.setLevel(logging.ERROR)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logger.setLevel(before)


def bare(axes: Axes) -> None:
    """A grid behind the marks, and no frame."""
    axes.grid(True, color=GRID, linewidth=0.8)
    axes.set_axisbelow(True)
    axes.tick_params(colors=INK, which="both", length=0)
    for spine in axes.spines.values():
        spine.set_visible(False)


def log_ticks(axes: Axes) -> None:
    """Four to twelve numbers that a person would choose, on a logarithmic y axis."""
    from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter

    low, high = axes.get_ylim()
    decades = math.log10(high / low)
    subs = (1.0, 2.0, 5.0) if decades < 2.5 else (1.0, 3.0) if decades < 4 else (1.0,)
    axes.yaxis.set_major_locator(LogLocator(subs=subs))
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    axes.yaxis.set_minor_formatter(NullFormatter())


def clean(text: str, longest: int) -> str:
    """One line of characters that can be shown, at most `longest` of them."""
    plain = "".join(c if c.isprintable() else "?" for c in text)
    return plain if len(plain) <= longest else f"{plain[: longest - 1]}…"
