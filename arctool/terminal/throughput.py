"""The speed of a model as a table for people."""

from __future__ import annotations

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from arctool.bench.throughput import Row, Throughput
from arctool.terminal.tables import plain


def throughput(found: Throughput) -> RenderableType:
    """The table of the run, what ran in it, and what it ran on."""
    table = Table("at once", title=plain(f"{found.model}: tokens a second, all sequences together"), box=None)
    for head in ("prefill", "decode", "each", "ms a step"):
        table.add_column(head, justify="right")
    for row in found.rows:
        table.add_row(*_cells(row))
    at, plan = found.conditions, found.plan
    return Group(
        table,
        plain("engaged: " + ", ".join(f"{name} {calls}" for name, calls in found.engaged.items())),
        Text(
            f"prompts of {plan.prompt_tokens} random tokens, {plan.new_tokens} new ones each, medians of {plan.rounds} interleaved rounds; "
            f"{at.processor}, {at.threads} threads on {at.cores} cores, load {at.load[0]:.1f} before and {at.load[1]:.1f} after"
        ),
    )


def _cells(row: Row) -> list[RenderableType]:
    if row.prefill is None or row.decode is None or row.step_ms is None:
        return [str(row.batch), plain(f"FAILED: {row.failure}", "red")]
    return [str(row.batch), f"{row.prefill:.0f}", f"{row.decode:.1f}", f"{row.decode / row.batch:.1f}", f"{row.step_ms:.2f}"]
