"""The picture: marks where the numbers are, labels that can be read, no display, and places that cannot be written refused at once."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import IO

import pytest
from matplotlib.axes import Axes
from matplotlib.text import Annotation, Text

from arctool.bench.evaluation import Evaluation, Failure, Row
from arctool.bench.plot import FLOOR, Point, check_target, draw, figure, frontier, limits, save
from arctool.bench.subjects import Facts
from arctool.errors import StorageError, UsageError
from arctool.run.divergence import Comparison
from arctool.run.reading import Reading

MARKS = (
    Point("qtip2-v4", "artifact", 62_800_000, 2.05, 1.16),
    Point("qtip2.25-v4", "artifact", 66_400_000, 2.30, 0.61),
    Point("mixed-2.5", "artifact", 70_000_000, 2.50, 0.34),
    Point("mixed-2.6", "artifact", 70_900_000, 2.60, 0.33),
    Point("Q2_K", "GGUF", 88_000_000, 3.35, 0.378),
    Point("Q4_K_M", "GGUF", 105_000_000, 4.80, 0.056),
)


def places(axes: Axes) -> set[tuple[float, float]]:
    """Where single marks stand."""
    data = (line.get_xydata().tolist() for line in axes.lines if line.get_linestyle() == "None")
    return {tuple(points[0]) for points in data if len(points) == 1}


def labels(axes: Axes) -> Iterator[Annotation]:
    return (child for child in axes.get_children() if isinstance(child, Annotation))


def row(name: str, nbytes: int, bits: float, kl: float) -> Row:
    return Row(Facts(name, name, "artifact", nbytes, 1, bits, bits), 2.0, Comparison(9, 2.0, 2.0, kl, kl, kl, 0.5), (), 1.0)


def evaluation(*rows: Row) -> Evaluation:
    source = Facts("org/base", "base", "checkpoint", 9, 1, 16.0, 16.0)
    return Evaluation(Reading("a/text.txt", 10, (), ((1, 2, 3),)), source, 2.0, rows, {})


def test_marks_stand_at_size_and_divergence_and_on_the_right_at_bits() -> None:
    left, right = figure(MARKS, "title", "note").axes
    assert places(left) == {(mark.nbytes / 1e6, mark.kl) for mark in MARKS}
    assert places(right) == {(mark.bits, mark.kl) for mark in MARKS}
    assert left.get_yscale() == right.get_yscale() == "log"
    assert "MB" in left.get_xlabel()
    assert "bits per weight" in right.get_xlabel()
    assert "nats per token" in left.get_ylabel()
    assert [text.get_text() for text in left.get_legend().get_texts()] == ["artifact", "GGUF"]


def test_every_mark_has_a_label_and_no_label_covers_another_or_leaves_the_frame() -> None:
    drawing = figure(MARKS, "title", "note")
    left = drawing.axes[0]
    renderer = drawing.canvas.get_renderer()  # type: ignore[attr-defined]
    found = list(labels(left))
    assert {note.get_text() for note in found} == {f"{mark.label}\n{mark.bits:.2f} bits/weight" for mark in MARKS}
    boxes = [Text.get_window_extent(note, renderer) for note in found]
    frame = left.get_window_extent(renderer)
    for index, box in enumerate(boxes):
        assert not any(box.overlaps(other) for other in boxes[index + 1 :])
        assert frame.x0 <= box.x0
        assert box.x1 <= frame.x1


def test_the_panels_fill_the_picture_and_nothing_is_cut_off() -> None:
    drawing = figure(MARKS, "a title", "a note")
    left, right = drawing.axes
    assert left.get_position().x0 < 0.09
    assert right.get_position().x1 > 0.97
    box = drawing.get_tightbbox()
    assert box.x0 >= 0
    assert box.y0 >= 0
    assert box.x1 <= drawing.get_figwidth()
    assert box.y1 <= drawing.get_figheight()


def test_a_model_like_its_source_stands_on_the_edge_and_does_not_stretch_the_axis() -> None:
    with_zero = (*MARKS, Point("same", "checkpoint", 270_000_000, 16.0, 0.0))
    assert limits(with_zero) == limits(MARKS)
    left = figure(with_zero, "title", "note").axes[0]
    assert (270.0, limits(MARKS)[0]) in places(left)
    assert "same\n16.00 bits/weight, KL 0: off the scale" in {note.get_text() for note in labels(left)}
    assert limits((Point("same", "a", 1, 1.0, FLOOR / 2),))[0] > 0


def test_the_line_joins_what_no_smaller_model_beats() -> None:
    worse = Point("worse", "artifact", 68_000_000, 3.0, 0.9)
    twin = Point("twin", "artifact", 66_400_000, 3.0, 0.7)
    assert frontier([*MARKS[::-1], worse, twin]) == [MARKS[0], MARKS[1], MARKS[2], MARKS[3], MARKS[5]]


def test_a_picture_is_a_whole_file_and_failed_rows_are_named(tmp_path: Path) -> None:
    failed = Row(Facts("bad", "bad", "artifact", 5, 1, 2.0, 2.0), None, None, (), 0.0, Failure("why", 5))
    target = tmp_path / "out.png"
    target.write_text("old")
    draw(evaluation(row("one", 10**6, 2.0, 0.5), failed, row("two", 2 * 10**6, 3.0, 0.2)), target)
    data = target.read_bytes()
    assert data.startswith(b"\x89PNG\r\n\x1a\n")
    assert data.endswith(b"IEND\xaeB`\x82")
    assert (int.from_bytes(data[16:20]), int.from_bytes(data[20:24])) == (1650, 930)
    assert os.listdir(tmp_path) == ["out.png"]
    draw(evaluation(row("one", 10**6, 2.0, 0.5), failed), tmp_path / "out.svg")
    assert "failed, not drawn: bad" in (tmp_path / "out.svg").read_text()
    with pytest.raises(UsageError, match="no divergence to draw"):
        draw(evaluation(failed), target)


def test_a_picture_that_cannot_be_finished_leaves_the_old_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "out.png").write_text("old")
    drawing = figure(MARKS, "title", "note")

    def full(file: IO[bytes], **_: object) -> None:
        file.write(b"half")
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(drawing, "savefig", full)
    with pytest.raises(StorageError, match=r"out\.png: cannot write: No space left"):
        save(drawing, tmp_path / "out.png")
    assert os.listdir(tmp_path) == ["out.png"]
    assert (tmp_path / "out.png").read_text() == "old"


@pytest.mark.parametrize("name", ["$x_{$", "a\nb\x1b[31m", "名前 🙂", "x" * 300, "\\frac", ""])
def test_a_name_is_text_whatever_it_looks_like(tmp_path: Path, name: str) -> None:
    save(figure([Point(name, name, 10**6, 2.0, 0.5)], name, name), tmp_path / "out.png")
    assert (tmp_path / "out.png").stat().st_size > 10_000


def test_places_that_cannot_be_written_are_refused(tmp_path: Path) -> None:
    (tmp_path / "d.png").mkdir()
    (tmp_path / "file").touch()
    for name, error, words in (
        ("out", UsageError, r"expected a name that ends in \.png"),
        ("out.gif", UsageError, r"expected a name that ends in \.png"),
        ("d.png", UsageError, "is a directory"),
        ("gone/out.png", StorageError, "cannot write: No such file or directory"),
        ("file/out.png", StorageError, "cannot write: Not a directory"),
        ("x" * 300 + ".png", StorageError, "cannot write: File name too long"),
    ):
        with pytest.raises(error, match=words):
            check_target(tmp_path / name)
    check_target(tmp_path / "fine.PNG")
    assert sorted(os.listdir(tmp_path)) == ["d.png", "file"]


def test_no_display_is_asked_for_and_matplotlib_waits_until_it_is_needed() -> None:
    code = (
        "import sys, arctool.api, arctool.bench.plot as plot\n"
        "assert 'matplotlib' not in sys.modules\n"
        "plot.figure([plot.Point('a', 'b', 1, 2.0, 0.5)], 't', 'n')\n"
        "assert 'matplotlib.pyplot' not in sys.modules\n"
    )
    environment = {name: value for name, value in os.environ.items() if name != "DISPLAY"} | {"MPLBACKEND": "tkagg"}
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
