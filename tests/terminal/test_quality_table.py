"""What a person sees of an evaluation: one row a model, failures in words, hostile names as text, and the time that is left."""

from __future__ import annotations

import io
import re

import pytest
from rich.console import Console

from arctool.bench.evaluation import Evaluation, Failure, LayerDistance, Row
from arctool.bench.subjects import Facts
from arctool.run.divergence import Comparison
from arctool.run.reading import Reading
from arctool.terminal.evaluation import WORST, quality
from arctool.terminal.progress import eval_progress

ESCAPES = re.compile(r"\x1b\[[0-9;?]*[a-zA-Z]")
SOURCE = Facts("org/base", "base", "checkpoint", 270_000_000, 134, 16.0, 16.0)


def layer(number: int, error: float) -> LayerDistance:
    return LayerDistance(f"model.layers.{number}.mlp.up_proj", "trellis-k4v2l16-f32", 2.05, error, 0.0625)


def row(name: str, *layers: LayerDistance) -> Row:
    facts = Facts(name, name, "artifact", 62_800_000, 134, 2.052, 4.5)
    return Row(facts, 33.8, Comparison(8184, 33.8, 10.48, 1.16, 4.25, 9.0625, 0.4321), layers, 2.0)


def text(*rows: Row, source: Facts | None = SOURCE) -> str:
    stream = io.StringIO()
    windows = ((1, 2, 3), (4, 5))
    found = Evaluation(Reading("words.txt", 3, (), windows), source, None if source is None else 10.48, rows, {})
    Console(file=stream, width=200, force_terminal=True, color_system=None).print(quality(found))
    return stream.getvalue()


def cells(shown: str, name: str) -> list[str]:
    """The cells of the last line that begins with `name`."""
    return next(line.split() for line in reversed(shown.splitlines()) if line.strip().startswith(name))


def test_a_row_has_size_rates_perplexity_divergence_and_agreement() -> None:
    shown = text(row("small"))
    assert cells(shown, "small") == ["small", "62.8", "MB", "4.500", "2.052", "33.800", "1.1600", "4.2500", "9.0625", "43.2%"]
    assert cells(shown, "base")[:7] == ["base", "(source)", "270.0", "MB", "16.000", "16.000", "10.480"]
    assert "3 predicted tokens of words.txt, 2 windows of at most 3" in shown
    alone = text(Row(row("small").model, 33.8, None, (), 1.0), source=None)
    assert cells(alone, "small") == ["small", "62.8", "MB", "4.500", "2.052", "33.800"]
    assert "KL" not in alone


def test_all_layers_of_one_model_are_listed_and_the_worst_of_several() -> None:
    layers = [layer(number, 0.07 + 0.001 * (number % 11)) for number in range(20)]
    shown = text(row("small", *layers))
    assert [line.split()[0] for line in shown.splitlines() if "up_proj" in line] == [item.key for item in layers]
    assert cells(shown, "model.layers.3.")[2:] == ["2.050", "0.07300", "0.06250", "1.17"]
    several = text(row("small", *layers), row("other", *layers[:2]))
    listed = [line.split()[0] for line in several.splitlines() if "up_proj" in line]
    assert len(listed) == WORST + 2
    assert listed[0] == "model.layers.10.mlp.up_proj"
    assert f"small: {WORST} of 20 layers" in several


def test_a_failed_model_says_why_and_shows_no_numbers() -> None:
    failed = Row(row("bad").model, None, None, (), 0.0, Failure("bad: window 3: after token 7 the logit is nan", 5))
    shown = text(failed, row("good"))
    assert cells(shown, "bad FAILED: bad: window 3: after token 7 the logit is nan")
    assert "nan" not in next(line for line in shown.splitlines() if line.strip().startswith("bad ") and "MB" in line)
    assert cells(shown, "good")[-1] == "43.2%"


@pytest.mark.parametrize(("name", "seen"), [("a[/x]", "a[/x]"), ("a\x1b[2Jb", "a\\x1b[2Jb"), ("a\nb", "a\\nb"), (":smile:", ":smile:")])
def test_hostile_names_are_shown_as_they_are(name: str, seen: str) -> None:
    hostile = LayerDistance(name, name, 2.0, 0.1, 0.1)
    failed = Row(row(name).model, None, None, (), 0.0, Failure(name, 5))
    shown = text(row(name, hostile), failed)
    assert shown.count(seen) == 1 + 2 + 2 + 2
    assert "\x1b" not in shown


def shown_progress(terminal: bool) -> str:
    stream = io.StringIO()
    with eval_progress(Console(file=stream, force_terminal=terminal, width=140), quiet=False) as show:
        assert show is not None
        show("small[/x]", 512, 2048)
    return ESCAPES.sub("", stream.getvalue())


def test_a_terminal_sees_what_is_read_how_much_and_the_time_left() -> None:
    assert re.search(r"small\[/x\].*512/2048\s+\d:\d\d:\d\d\s+(\d:\d\d:\d\d|-:--:--)", shown_progress(terminal=True))
    assert shown_progress(terminal=False) == ""


def test_quiet_means_nothing() -> None:
    with eval_progress(Console(file=io.StringIO(), force_terminal=True), quiet=True) as show:
        assert show is None
