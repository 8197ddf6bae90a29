"""Results as tables for people: what was baked, what a verification found, what an artifact holds.

What comes out of a file is hostile until shown: never markup, never a terminal's control codes.
"""

from __future__ import annotations

from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from rich.console import Console, Group, RenderableType
from rich.table import Column, Table
from rich.text import Text

from arctool.uqff.inspect import Inspection, LayerRow
from arctool.uqff.verify import VerifyReport

if TYPE_CHECKING:  # only their names are needed, and torch would come with them
    from arctool.bake.pipeline import BakeResult

ENOUGH = 0.9
"""Of the calibration text that was asked for: windows are whole, so a little is always missing."""

SOURCE_ROWS = 8
"""Layers with the largest error that a verification lists."""


def size(nbytes: int) -> str:
    """Bytes in the unit that people read: 83.4 MB."""
    value = float(nbytes)
    for unit in ("B", "kB", "MB", "GB"):
        if value < 1000 or unit == "GB":
            return f"{value:.0f} {unit}" if unit == "B" else f"{value:.1f} {unit}"
        value /= 1000
    raise AssertionError("the last unit takes any size")


def printable(text: str) -> str:
    """`text` with everything that could steer a terminal, or that it cannot encode, spelt as an escape: one line stays one line."""
    return "".join(c if c.isprintable() else ascii(c)[1:-1] for c in text)


def plain(text: str, style: str = "") -> Text:
    """A cell or a line that says exactly `text`, `printable`: rich would read a plain string as markup."""
    return Text(printable(text), style)


def shortage(result: BakeResult, asked: int) -> str | None:
    """That there was less calibration text than was asked for, None where there was about as much."""
    info = result.report.bake
    found = None if info is None or info.calibration is None else info.calibration.get("tokens")
    if not isinstance(found, int) or found >= asked * ENOUGH:
        return None
    return f"calibrated with {found} tokens where {asked} were asked for: there is no more text; with more the model would be better"


def baked(result: BakeResult, inspection: Inspection) -> str:
    """One line for a finished bake."""
    bits = inspection.totals.quantised_bits_per_weight
    rate = "no layer quantised" if bits is None else f"{bits:.3f} bits a quantised weight"
    kept = f", {result.resumed} layers kept from before" if result.resumed else ""
    found = result.report.quality
    good = "" if found is None else f", perplexity {found.perplexity:.4g} (source {found.base_perplexity:.4g}), mean KL {found.kl:.4g}"
    return f"{printable(str(result.path))}: {size(inspection.totals.nbytes)}, {rate}{good}, {result.seconds:.1f} s{kept}"


def baked_json(result: BakeResult, inspection: Inspection) -> dict[str, Any]:
    """The same for a script. `quality`: null where nothing was measured; `unmeasured` says why if it was this bake that did not;
    `budget`: null without --bpw."""
    found = result.report.quality
    return {
        "path": str(result.path),
        "seconds": result.seconds,
        "resumed": result.resumed,
        **inspection.to_json()["totals"],
        "quality": None if found is None else asdict(found),
        "unmeasured": result.unmeasured,
        "budget": None if result.report.bake is None else result.report.bake.budget,
    }


def verification(report: VerifyReport) -> RenderableType:
    """The answers, one line each, then what failed and, with a source, the worst layers."""
    lines: list[RenderableType] = []
    for answer in report.answers:
        mark, style = ("–", "dim") if not answer.asked else ("✓", "green") if answer.passed else ("✗", "bold red")
        counts = ", ".join(f"{number:,} {what}" for what, number in answer.counts.items())
        lines.append(Text.assemble((f"{mark} {answer.question:16}", style), printable(counts) or "not asked"))
        lines += [plain(f"    {failure}", "red") for failure in answer.failures]
        hidden = answer.failure_count - len(answer.failures)
        lines += [Text(f"    … and {hidden} more", "red")] if hidden > 0 else []
        lines += [plain(f"    {note}", "dim") for note in answer.notes]
    if report.errors:
        lines.append(_worst(report))
    good = "headers are sound; no data was read" if report.fast else "verified"
    lines.append(Text(good if report.passed else "NOT VERIFIED", "bold green" if report.passed else "bold red"))
    return Group(*lines)


def _worst(report: VerifyReport) -> Table:
    table = Table(Column("layer", overflow="fold"), "stored as", "relative error", "limit of its rate", box=None, title="largest errors")
    for row in sorted(report.errors, key=lambda row: -row.relative_error)[:SOURCE_ROWS]:
        limit = "" if row.limit is None else f"{row.limit:.5f}"
        table.add_row(*map(plain, (row.key, row.label, f"{row.relative_error:.5f}", limit)))
    return table


def contents(inspection: Inspection, console: Console) -> RenderableType:
    """Facts about the artifact, then a row for every layer."""
    totals = inspection.totals
    facts = Table(box=None, show_header=False)
    for name, value in (
        ("path", inspection.path),
        ("format", f"UQFF {inspection.uqff_version}"),
        ("producer", " ".join(filter(None, (inspection.producer, inspection.producer_version))) or "unknown"),
        ("source", inspection.source),
        ("rung", inspection.rung),
        ("licence", inspection.licence),
        ("size", f"{size(totals.nbytes)} in {len(inspection.files)} files"),
        ("parameters", f"{totals.parameters:,} ({totals.quantised_parameters:,} quantised)"),
        ("bits per weight", _rates(inspection)),
        ("tables", size(totals.table_bytes)),
    ):
        if value is not None:
            facts.add_row(Text(name, "bold"), plain(value))
    rows = (*inspection.layers, *inspection.residual)
    seen = any(row.proxy_error is not None for row in rows)
    columns = ("shape", "asked for", "stored as", "bits/weight", "bytes", "error", *(("proxy error",) if seen else ()))
    layers = Table(Column("layer", overflow="fold"), *columns, box=None)
    for row in rows:
        layers.add_row(*map(plain, _layer(row)[: len(columns) + 1]))
    return Group(facts, Text(), layers)


def _rates(inspection: Inspection) -> str:
    quantised, mean = inspection.totals.quantised_bits_per_weight, inspection.totals.bits_per_weight
    return f"{mean:.3f} over all" if quantised is None else f"{quantised:.3f} in quantised layers, {mean:.3f} over all"


def _layer(row: LayerRow) -> tuple[str, ...]:
    errors = ("" if error is None else f"{error:.5f}" if error >= 1e-3 or error == 0 else f"{error:.2e}" for error in _errors(row))
    label = row.label if row.fallback_reason is None else f"{row.label} ({row.fallback_reason})"
    shape = "×".join(map(str, row.shape))
    return row.key, shape, row.target or "", label, f"{row.bits_per_weight:.3f}", f"{row.nbytes:,}", *errors


def _errors(row: LayerRow) -> tuple[float | None, float | None]:
    return row.relative_error, row.proxy_error
