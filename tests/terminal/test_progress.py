"""The progress of a bake as a person sees it: layer, rung, error, and the time that is left."""

from __future__ import annotations

import io
import re

from rich.console import Console

from arctool.bake.pipeline import LayerDone
from arctool.terminal.progress import bake_progress

ESCAPES = re.compile(r"\x1b\[[0-9;?]*[a-zA-Z]")


def shown(terminal: bool, count: int = 3) -> str:
    """What a console receives while `count` of four tensors are baked."""
    stream = io.StringIO()
    with bake_progress(Console(file=stream, force_terminal=terminal, width=140), quiet=False) as show:
        assert show is not None
        for index in range(1, count + 1):
            show(LayerDone(index, 4, f"model.layers.{index}.mlp.up_proj", "qtip4", 100, 0.0047, 1.0, resumed=False))
    return ESCAPES.sub("", stream.getvalue())


def test_a_terminal_sees_layer_error_count_elapsed_time_and_time_left() -> None:
    text = shown(terminal=True)
    assert "model.layers.3.mlp.up_proj qtip4 error 0.0047" in text
    assert re.search(r"3/4\s+\d:\d\d:\d\d\s+(\d:\d\d:\d\d|-:--:--)", text), text


def test_a_log_gets_the_last_line_at_least() -> None:
    assert shown(terminal=False, count=4).splitlines()[-1] == "4/4 model.layers.4.mlp.up_proj qtip4 error 0.0047"


def test_quiet_means_nothing() -> None:
    stream = io.StringIO()
    with bake_progress(Console(file=stream), quiet=True) as show:
        assert show is None
    assert not stream.getvalue()
