"""The progress of a bake as a person sees it: layer, rung, error, what is going on in between, and the time that is left."""

from __future__ import annotations

import io
import re

import pytest
from rich.console import Console

from arctool.bake.pipeline import LayerDone
from arctool.terminal import progress
from arctool.terminal.progress import bake_progress

ESCAPES = re.compile(r"\x1b\[[0-9;?]*[a-zA-Z]")


def done(index: int, proxy: float | None = None, resumed: bool = False) -> LayerDone:
    return LayerDone(index, 4, f"model.layers.{index}.mlp.up_proj", "qtip4", 100, 0.0047, proxy, 1.0, resumed)


def shown(terminal: bool, count: int = 3, proxy: float | None = None, resumed: bool = False, busy: str = "") -> str:
    """What a console receives while `count` of four tensors are baked, and `busy` after them."""
    stream = io.StringIO()
    with bake_progress(Console(file=stream, force_terminal=terminal, width=140), quiet=False) as (show, say):
        assert show is not None
        assert say is not None
        for index in range(1, count + 1):
            show(done(index, proxy, resumed))
        if busy:
            say(busy)
    return ESCAPES.sub("", stream.getvalue())


def test_a_terminal_sees_layer_error_count_elapsed_time_and_time_left() -> None:
    text = shown(terminal=True)
    assert "model.layers.3.mlp.up_proj qtip4 error 0.0047" in text
    assert re.search(r"3/4\s+\d:\d\d:\d\d\s+(\d:\d\d:\d\d|-:--:--)", text), text


def test_a_calibrated_layer_is_shown_with_the_error_of_its_output() -> None:
    assert "model.layers.3.mlp.up_proj qtip4 output error 0.0012" in shown(terminal=True, proxy=0.00123)


def test_a_terminal_sees_what_goes_on_between_two_tensors() -> None:
    text = shown(terminal=True, busy="model.layers.1.mlp.up_proj: measuring\x1b[2J its input")
    assert re.search(r"model\.layers\.1\.mlp\.up_proj: measuring.*its input\W+3/4", text), text
    assert "[2J" in text, "an escape of ours would have been cut off with all others"


def test_a_log_gets_the_last_line_at_least() -> None:
    assert shown(terminal=False, count=4).splitlines() == ["4/4 model.layers.4.mlp.up_proj qtip4 error 0.0047"]
    kept = shown(terminal=False, count=4, proxy=0.00123, resumed=True, busy="something")
    assert kept.splitlines() == ["4/4 model.layers.4.mlp.up_proj qtip4 output error 0.0012 (kept)"]


def test_a_log_says_now_and_then_what_goes_on(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(progress, "LOG_SECONDS", 0)
    lines = shown(terminal=False, count=1, busy="sampling calibration text").splitlines()
    assert lines == ["1/4 model.layers.1.mlp.up_proj qtip4 error 0.0047", "sampling calibration text"]


def test_quiet_means_nothing() -> None:
    stream = io.StringIO()
    with bake_progress(Console(file=stream), quiet=True) as callbacks:
        assert callbacks == (None, None)
    assert not stream.getvalue()
