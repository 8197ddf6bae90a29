"""Tables show what a file says and do nothing of it: no markup, no control codes, no text that a terminal cannot encode."""

from __future__ import annotations

import io
from dataclasses import replace
from pathlib import Path

import pytest
from rich.console import Console, RenderableType

from arctool.bake.pipeline import BakeResult
from arctool.kernels.registry import Implementation
from arctool.terminal.doctor import Check, Diagnosis, diagnosis
from arctool.terminal.tables import baked, contents, printable, verification
from arctool.uqff.answers import Answer, LayerError, VerifyReport
from arctool.uqff.inspect import Inspection, LayerRow, Totals
from arctool.uqff.report import Report

HOSTILE = {
    "a closing tag": ("a[/x]", "a[/x]"),
    "a style": ("[bold]a[/bold]", "[bold]a[/bold]"),
    "an emoji's name": (":smile:", ":smile:"),
    "half a character": ("a\ud800", "a\\ud800"),
    "an escape": ("a\x1b[2Jb", "a\\x1b[2Jb"),
    "a new line": ("a\nb\r", "a\\nb\\r"),
    "an ordinary name": ("model.layers.0 – Größe ×2", "model.layers.0 – Größe ×2"),
}


def shown(what: RenderableType) -> str:
    """The text that a terminal of UTF-8 would get."""
    stream = io.TextIOWrapper(io.BytesIO(), "utf-8")
    Console(file=stream, width=400, force_terminal=True, color_system=None).print(what)
    stream.flush()
    buffer = stream.buffer
    assert isinstance(buffer, io.BytesIO)
    return buffer.getvalue().decode()


def row(text: str) -> LayerRow:
    return LayerRow(text, (2, 3), text, 16.0, 12, False, 0.5, text)


def inspection(text: str) -> Inspection:
    totals = Totals(12, 6, 0, None, 16.0, 0)
    return Inspection(text, "1.2.0", text, text, text, 0, text, text, (row(text),), (row(text),), (), totals)


@pytest.mark.parametrize("name", HOSTILE)
def test_an_inspection_shows_hostile_text_as_it_is(name: str) -> None:
    text, seen = HOSTILE[name]
    console = Console(file=io.StringIO(), width=400)
    found = shown(contents(inspection(text), console))
    # path, producer and its version, source, rung, licence; key, label and reason of two rows
    assert found.count(seen) == 6 + 2 * 3
    assert "\x1b" not in found


@pytest.mark.parametrize("name", HOSTILE)
def test_a_verification_shows_hostile_text_as_it_is(name: str) -> None:
    text, seen = HOSTILE[name]
    answer = Answer("container", True, False, {text: 1}, (text,), 1, (text,))
    report = VerifyReport(text, answer, answer, answer, answer, (), (LayerError(text, text, 0.5, None, 0.5),))
    found = shown(verification(report))
    assert found.count(seen) == 4 * 3 + 2
    assert "\x1b" not in found


@pytest.mark.parametrize("name", HOSTILE)
def test_the_doctor_and_a_bake_show_hostile_text_as_it_is(name: str) -> None:
    text, seen = HOSTILE[name]
    implementation = Implementation(text, "linear", text, text, text)
    found = shown(diagnosis(Diagnosis((Check(text, True, text),), ("qtip2",), (implementation,))))
    assert found.count(seen) == 2 + 4
    report = Report("arctool", None, "1.2.0", ())
    line = baked(BakeResult(Path(text), report, 0, 1.0, ()), inspection(text))
    assert line.startswith(f"{seen}: 12 B")


def test_what_is_absent_stays_absent() -> None:
    found = shown(contents(replace(inspection("a"), source=None, licence=None), Console(file=io.StringIO())))
    assert "source" not in found
    assert "licence" not in found


def test_printable_text_is_unchanged_and_any_other_becomes_ascii() -> None:
    assert printable("Größe – ×") == "Größe – ×"
    assert printable("\x07\u202e\udfff\U000e0001") == "\\x07\\u202e\\udfff\\U000e0001"
