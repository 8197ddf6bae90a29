"""What people see of a measurement: vLLM's names, a column for each load, FAILED and why; and the curve, with names that are only text."""

from __future__ import annotations

import io
from dataclasses import replace
from pathlib import Path

import pytest
from rich.console import Console

from arctool.bench.serving.exchange import Ask, Endpoint, Exchange, Outcome
from arctool.bench.serving.measurement import Row, row_of
from arctool.bench.serving.picture import Curve, draw, figure
from arctool.bench.serving.plan import Load, Plan, Workload
from arctool.bench.serving.session import Result
from arctool.errors import UsageError
from arctool.terminal.serving import serving

ASK = Ask("random", Endpoint.COMPLETIONS, b"")
LOADS = tuple(Load(clients=clients) for clients in (1, 4, 16))
PLAN = Plan(LOADS, requests=16, goodput=(("ttft", 500.0),))


def row(load: Load, slow: float = 1.0, plan: Plan = PLAN, tokens: int = 64) -> Row:
    """A load whose requests each take 0.2 · slow seconds to their first token and 0.63 · slow for the others, one after another."""
    gaps = tuple(0.01 * slow for _ in range(tokens - 1))
    outcomes = [
        Outcome(
            at * slow, at * slow + 0.83 * slow, at * slow + 0.2 * slow, at * slow + 0.83 * slow, gaps, tokens, 128, 16, tokens, "length"
        )
        for at in range(plan.requests)
    ]
    return row_of(plan, load, [Exchange(ASK, outcome) for outcome in outcomes])


FAILED = Row(LOADS[1], 16, 15, 1, 0, 12.5, 3.9, 4, 0.0, 0.1, failure="1 of 16 requests failed; 1 of them: HTTP 503: \x1b[2Jbusy [bold]")
RESULT = Result(
    "http://h:1",
    "a [red]model\x1b[2J",
    PLAN,
    7,
    "random token ids",
    0,
    (),
    True,
    (row(LOADS[0]), FAILED, row(LOADS[2], 2.0)),
    2,
    (0.5, 1.5),
)


def text(result: Result, width: int = 200) -> str:
    console = Console(file=io.StringIO(), width=width)
    console.print(serving(result))
    return console.file.getvalue()  # type: ignore[attr-defined,no-any-return]


def cells(result: Result, name: str) -> list[str]:
    """The cells of the line that begins with `name`."""
    (line,) = (line for line in text(result).splitlines() if line.strip().startswith(name))
    return line.strip().removeprefix(name).split()


def test_the_lines_have_vllms_names_and_the_columns_are_loads() -> None:
    first = text(RESULT).splitlines()[1].split()
    assert first == ["1", "client", "4", "clients", "16", "clients"]
    assert cells(RESULT, "Successful requests") == ["16", "15", "16"]
    assert cells(RESULT, "Failed requests") == ["0", "1", "0"]
    assert cells(RESULT, "Maximum request concurrency") == ["1", "4", "16"]
    assert cells(RESULT, "Benchmark duration (s)") == ["15.83", "12.50", "31.66"]
    assert cells(RESULT, "Achieved concurrency (mean)") == ["0.84", "3.90", "0.84"]
    assert cells(RESULT, "Total input tokens") == ["2048", "FAILED", "2048"]
    assert cells(RESULT, "of them from the server's cache") == ["256", "FAILED", "256"]
    assert cells(RESULT, "Total generated tokens") == ["1024", "FAILED", "1024"]
    assert cells(RESULT, "Request throughput (req/s)") == ["1.01", "FAILED", "0.51"]
    assert cells(RESULT, "Request goodput (req/s)") == ["1.01", "FAILED", "0.51"]
    assert cells(RESULT, "Output token throughput (tok/s)") == ["64.69", "FAILED", "32.34"]
    assert cells(RESULT, "Total token throughput (tok/s)") == ["194.06", "FAILED", "97.03"]
    for name, one, other in (
        ("TTFT", "200.00", "400.00"),
        ("TPOT", "10.00", "20.00"),
        ("ITL", "10.00", "20.00"),
        ("E2EL", "830.00", "1660.00"),
    ):
        for how in ("Mean", "Median", "P50", "P90", "P99"):
            assert cells(RESULT, f"{how} {name} (ms)") == [one, "FAILED", other]
        assert cells(RESULT, f"Std {name} (ms)") == ["0.00", "FAILED", "0.00"]


def test_a_failure_is_told_in_whole_and_a_servers_words_are_only_text() -> None:
    shown = text(RESULT)
    assert "4 clients FAILED: 1 of 16 requests failed; 1 of them: HTTP 503: \\x1b[2Jbusy [bold]" in shown
    assert "a [red]model\\x1b[2J at http://h:1" in shown
    assert "\x1b" not in shown
    assert "random: 16 requests a load, 128 tokens in (random token ids), 64 out, seed 7; this machine: 2 cores, load 0.5 before" in shown


def test_what_was_not_measured_or_not_asked_for_has_no_line() -> None:
    plan = replace(PLAN, goodput=(), workload=Workload.CANCEL, output_len=64)
    single = replace(RESULT, plan=plan, rows=(row(LOADS[0], plan=plan, tokens=1),), equal_lengths=False, interrupted=True)
    shown = text(single)
    for name in ("goodput", "TPOT", "ITL", "Request rate"):
        assert name not in shown
    assert cells(single, "Cancelled requests (on purpose)") == ["0"]
    assert "at most 64 out" in shown
    assert "interrupted: 2 of 3 loads were not finished" in shown
    assert "note: answers have unequal lengths" in shown
    opened = replace(RESULT, rows=(row(Load(rate=2.0)),))
    assert cells(opened, "Request rate configured (RPS)") == ["2"]
    assert cells(opened, "Maximum request concurrency") == ["–"]


def test_the_curve_has_a_panel_for_each_latency_and_a_mark_for_each_load() -> None:
    drawing = figure([Curve("ours", RESULT.rows), Curve("theirs", (row(LOADS[0], 3.0),))], "title", "note")
    assert [axes.get_ylabel() for axes in drawing.axes] == [
        "time to first token (TTFT), ms",
        "time per output token (TPOT), ms",
        "end-to-end latency (E2EL), ms",
    ]
    throughputs = [found.figures.output_throughput for found in RESULT.rows if found.figures is not None]
    median, high, *_ = drawing.axes[0].lines
    assert median.get_xdata() == pytest.approx(throughputs)
    assert median.get_ydata() == pytest.approx([200, 400])
    assert high.get_ydata() == pytest.approx([200, 400])
    assert [note.get_text() for note in drawing.axes[0].texts] == ["1", "16", "1"]
    words = [entry.get_text() for entry in drawing.axes[0].get_legend().get_texts()]
    assert words == ["ours, median", "ours, P99", "theirs, median", "theirs, P99"]
    assert all(axes.get_xlim()[1] > max(throughputs) for axes in drawing.axes)


def test_a_picture_names_what_failed_and_is_not_drawn_of_nothing(tmp_path: Path) -> None:
    draw(RESULT, tmp_path / "curve.svg")
    drawn = (tmp_path / "curve.svg").read_text()
    assert "failed, not drawn: 4 clients" in drawn
    assert "seed 7" in drawn
    draw(replace(RESULT, model="$x_{$", rows=(row(LOADS[0], tokens=1),)), tmp_path / "one.png")
    assert (tmp_path / "one.png").stat().st_size > 10_000
    with pytest.raises(UsageError, match=r"^--plot: there is nothing to draw"):
        draw(replace(RESULT, rows=(FAILED,)), tmp_path / "none.png")
