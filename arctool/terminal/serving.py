"""The measurement of a server as a table for people: vLLM's names down the side, a column for each load."""

from __future__ import annotations

from collections.abc import Callable

from rich.console import Group, RenderableType
from rich.table import Column, Table
from rich.text import Text

from arctool.bench.serving.measurement import METRICS, Figures, Row
from arctool.bench.serving.session import Result
from arctool.terminal.tables import plain

NOTHING = "–"


def serving(found: Result) -> RenderableType:
    """The table, why loads failed, what to know, and what it ran on."""
    lines: list[RenderableType] = [_table(found)] if found.rows else []
    lines += [plain(f"{row.load.label} FAILED: {row.failure}", "bold red") for row in found.rows if row.failure is not None]
    lines += [plain(f"note: {note}") for note in found.notes]
    if found.interrupted:
        lines.append(
            Text(f"interrupted: {len(found.plan.loads) - len(found.rows)} of {len(found.plan.loads)} loads were not finished", "bold")
        )
    plan = found.plan
    length = f"{plan.output_len} out" if found.equal_lengths else f"at most {plan.output_len} out"
    lines.append(
        plain(
            f"{plan.workload.value}: {plan.requests} requests a load, {plan.input_len} tokens in ({found.prompts}), {length}, "
            f"seed {found.seed}; this machine: {found.cores} cores, load {found.load[0]:.1f} before and {found.load[1]:.1f} after",
            "dim",
        )
    )
    return Group(*lines)


def _table(found: Result) -> Table:
    heads = [Column(row.load.label, justify="right") for row in found.rows]
    table = Table(Column("", no_wrap=True), *heads, box=None, title=plain(f"{found.model} at {found.url}"))
    rows = found.rows

    def line(name: str, cell: Callable[[Row], str]) -> None:
        table.add_row(name, *(plain(cell(row)) for row in rows))

    def figure(name: str, value: Callable[[Figures], float | None], form: str = ".2f") -> None:
        table.add_row(name, *(_cell(row, value, form) for row in rows))

    line("Successful requests", lambda row: str(row.successful))
    line("Failed requests", lambda row: str(row.failed))
    if found.plan.cancels:
        line("Cancelled requests (on purpose)", lambda row: str(row.cancelled))
    if any(row.load.rate is not None for row in rows):
        line("Request rate configured (RPS)", lambda row: NOTHING if row.load.rate is None else f"{row.load.rate:g}")
    line("Maximum request concurrency", lambda row: str(row.load.clients or row.load.cap or NOTHING))
    line("Achieved concurrency (mean)", lambda row: f"{row.concurrency:.2f}")
    line("Peak concurrent requests", lambda row: str(row.peak))
    line("Benchmark duration (s)", lambda row: f"{row.duration:.2f}")
    figure("Total input tokens", lambda of: of.input_tokens, "d")
    if any(row.figures is not None and row.figures.cached_tokens is not None for row in rows):
        figure("  of them from the server's cache", lambda of: of.cached_tokens, "d")
    figure("Total generated tokens", lambda of: of.output_tokens, "d")
    figure("Request throughput (req/s)", lambda of: of.request_throughput)
    if found.plan.goodput:
        figure("Request goodput (req/s)", lambda of: of.goodput)
    figure("Output token throughput (tok/s)", lambda of: of.output_throughput)
    figure("Total token throughput (tok/s)", lambda of: of.total_throughput)
    for key, name in METRICS.items():
        if any(row.figures is not None and key in row.figures.spreads for row in rows):
            table.add_row()
            _latency(figure, key, name, found.plan.percentiles)
    return table


def _latency(figure: Callable[[str, Callable[[Figures], float | None]], None], key: str, name: str, percentiles: tuple[float, ...]) -> None:
    """The lines of one metric."""
    figure(f"Mean {name} (ms)", lambda of: of.spreads[key].mean if key in of.spreads else None)
    figure(f"Median {name} (ms)", lambda of: of.spreads[key].median if key in of.spreads else None)
    figure(f"Std {name} (ms)", lambda of: of.spreads[key].std if key in of.spreads else None)
    for rank in percentiles:
        figure(f"P{rank:g} {name} (ms)", lambda of, rank=rank: dict(of.spreads[key].percentiles)[rank] if key in of.spreads else None)  # type: ignore[misc]


def _cell(row: Row, value: Callable[[Figures], float | None], form: str) -> Text:
    if row.figures is None:
        return Text("FAILED", "red")
    found = value(row.figures)
    return Text(NOTHING if found is None else format(found, form))
