"""Pictures of an artifact: every layer has its mark at its place, bars are the histogram's, and hostile names are only text."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from matplotlib.axes import Axes
from matplotlib.patches import StepPatch

from arctool.bench.canvas import save
from arctool.bench.pictures import NO_ERRORS, draw_layers, draw_tensor, layers_figure, marks, tensor_figure
from arctool.quant.tensor import DenseTensor
from arctool.uqff.detail import TensorDetail, inspect_tensor
from arctool.uqff.inspect import Inspection, LayerRow, Totals, inspect
from arctool.uqff.statistics import measure


def row(key: str, bits: float, error: float | None) -> LayerRow:
    return LayerRow(key, (8, 8), "label", bits, 9, False, error, None)


ROWS = (
    row("lm_head", 8.5, 2e-6),
    row("model.embed_tokens", 8.5, 0.06),
    *(
        row(f"model.layers.{index}.self_attn.{name}", 2.0 + index, 0.05 + index / 100)
        for index in range(3)
        for name in ("q_proj", "k_proj")
    ),
    row("model.layers.2.mlp.experts.7.up_proj", 16.0, 0.0),
)


def inspection(*rows: LayerRow, path: str = "/x/name-of-it", rung: str | None = "qtip2") -> Inspection:
    return Inspection(path, "1.2.0", None, None, rung, None, None, None, rows, (), (), Totals(12_300_000, 6, 4, 2.125, 3.0, 0))


def seen(axes: Axes) -> set[tuple[float, float]]:
    """Every mark, moved to the layer that it stands at."""
    points = {tuple(point) for line in axes.lines for point in line.get_xydata().tolist()}
    assert all(abs(x - round(x)) < 0.5 for x, _ in points)
    return {(round(x), y) for x, y in points}


def test_every_layer_has_a_mark_at_its_index_in_both_panels() -> None:
    figure = layers_figure(inspection(*ROWS))
    above, below = figure.axes
    inner = {(index, 2.0 + index) for index in range(3)} | {(2, 16.0)}
    assert seen(above) == inner | {(-1, 8.5), (3, 8.5)}
    low, high = below.get_ylim()
    assert below.get_yscale() == "log"
    # the head is far below all layers and the expert has no error at all: both stand on the edge, the head with its number
    assert seen(below) == {(index, 0.05 + index / 100) for index in range(3)} | {(-1, 0.06), (3, low), (2, low)}
    assert 0.05 / 3 < low < 0.05 < 0.07 < high
    assert "2e-06" in {text.get_text() for text in below.texts}
    assert sum(len(line.get_xdata()) for line in above.lines) == len(ROWS)
    (legend,) = figure.legends
    assert {text.get_text() for text in legend.get_texts()} == {"lm_head", "embed_tokens", "q_proj", "k_proj", "expert up_proj"}
    assert [label.get_text() for label in below.get_xticklabels()] == ["\nembedding", "0", "1", "2", "\nhead"]
    assert above.get_title(loc="left") == "name-of-it · qtip2 · 12.3 MB"
    assert (
        figure.get_supxlabel()
        == "2.125 bits a weight in quantised layers, 3.000 bits a weight over all; 1 without error, on the lower edge"
    )


def test_kinds_in_one_layer_stand_side_by_side_and_look_different() -> None:
    names = [f"part{number}" for number in range(48)]
    above = layers_figure(inspection(*(row(f"model.layers.{index}.{name}", 2.0, 0.1) for index in (0, 1) for name in names))).axes[0]
    places = [place for line in above.lines for place in line.get_xdata()]
    assert len(set(places)) == 96
    assert len({(line.get_color(), line.get_marker()) for line in above.lines}) == 48


def test_without_errors_the_panel_says_so() -> None:
    below = layers_figure(inspection(*(replace(item, relative_error=None) for item in ROWS))).axes[1]
    assert [text.get_text() for text in below.texts] == [NO_ERRORS]
    assert seen(below) == set()
    some = layers_figure(inspection(replace(ROWS[2], relative_error=None), *ROWS[3:]))
    assert "no error is given for 1 of 7 layers" in some.get_supxlabel()
    assert "no layers" in {text.get_text() for text in layers_figure(inspection()).axes[1].texts}


def test_a_deep_model_has_readable_ticks_and_layers_keep_their_own_index() -> None:
    rows = [row(f"model.layers.{index}.q_proj", 2.0, 0.1) for index in range(3, 126)]
    found, ends = marks(inspection(*rows))
    assert [mark.place for mark in found] == list(range(3, 126))
    assert ends == {}
    labels = [label.get_text() for label in layers_figure(inspection(*rows)).axes[1].get_xticklabels()]
    assert labels == [str(index) for index in range(5, 126, 5)]


def test_bars_are_the_histogram_and_the_scales_have_their_own_panel(artifacts: dict[str, Path]) -> None:
    detail = inspect_tensor(artifacts["qtip4"], "model.layers.1.mlp.up_proj")
    left, right = tensor_figure(detail).axes
    (bars,) = [patch for patch in left.patches if isinstance(patch, StepPatch)]
    assert detail.statistics.histogram is not None
    assert tuple(bars.get_data().values) == detail.statistics.histogram.counts
    assert sum(bars.get_data().values) == 96 * 64
    assert left.get_yscale() == "log"
    (gaussian,) = left.lines
    peak = 96 * 64 * np.diff(bars.get_data().edges)[0] / (np.sqrt(2 * np.pi) * detail.statistics.std)
    assert max(gaussian.get_ydata()) == pytest.approx(peak, rel=0.01)
    (scales,) = [patch for patch in right.patches if isinstance(patch, StepPatch)]
    assert sum(scales.get_data().values) == 96
    assert len(tensor_figure(inspect_tensor(artifacts["qtip4"], "model.norm")).axes) == 1


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("values", [[], [0.0], [np.nan, np.inf], [3.0] * 5, [3e38, -3e38, 1e-45], [1.0, np.nan, 2.0]], ids=str)
def test_whatever_a_tensor_holds_can_be_drawn(values: list[float], artifacts: dict[str, Path], tmp_path: Path) -> None:
    detail = inspect_tensor(artifacts["qtip4"], "model.norm")
    statistics = measure(DenseTensor(np.array(values, np.float32)))
    draw_tensor(replace(detail, shape=(len(values),), statistics=statistics), tmp_path / "out.png")
    assert (tmp_path / "out.png").stat().st_size > 5000


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("name", ["$x_{$", "a\nb\x1b[31m", "名前 🙂", "x" * 300, "\\frac", "_hidden"])
def test_a_name_is_text_whatever_it_looks_like(name: str, artifacts: dict[str, Path], tmp_path: Path) -> None:
    rows = [row(f"model.layers.0.{name}", 2.0, 0.1), row(name, 2.0, 1e300), row("model.layers.999999.q", 2.0, 1e-300)]
    figure = layers_figure(inspection(*rows, path=f"/x/{name.replace('/', '')}", rung=name))
    save(figure, tmp_path / "out.png")
    assert len(figure.legends[0].get_texts()) == len({name, "q"} | {name.rpartition(".")[2]})
    detail: TensorDetail = replace(inspect_tensor(artifacts["qtip4"], "model.norm"), key=name, label=name, artifact=name)
    draw_tensor(detail, tmp_path / "out.png")


@pytest.mark.parametrize("ending", [".png", ".svg", ".pdf"])
def test_equal_pictures_are_equal_files(ending: str, artifacts: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found = inspect(artifacts["qtip2-v4"])
    for name, now in (("a", "1000000000"), ("b", "1500000000")):
        monkeypatch.setenv("SOURCE_DATE_EPOCH", now)
        draw_layers(found, tmp_path / f"{name}{ending}")
    assert (tmp_path / f"a{ending}").read_bytes() == (tmp_path / f"b{ending}").read_bytes()
    assert sorted(os.listdir(tmp_path)) == [f"a{ending}", f"b{ending}"]


def test_nothing_covers_the_legend_or_leaves_the_picture(artifacts: dict[str, Path]) -> None:
    for figure in (
        layers_figure(inspect(artifacts["qtip4"])),
        layers_figure(inspection(*(replace(item, relative_error=None) for item in ROWS))),
        tensor_figure(inspect_tensor(artifacts["qtip4"], "lm_head")),
    ):
        figure.canvas.draw()
        assert figure.axes[0].get_position().x0 < 0.09
        box = figure.get_tightbbox()
        assert (box.x0 >= 0, box.y0 >= 0) == (True, True)
        assert (box.x1 <= figure.get_figwidth(), box.y1 <= figure.get_figheight()) == (True, True)
        for legend in figure.legends:
            outside = legend.get_window_extent()
            assert not any(outside.overlaps(axes.get_window_extent()) for axes in figure.axes)
