"""One tensor, and the difference of two artifacts, for people. Shows what a file says as `tables.plain` does."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from rich.console import Group, RenderableType
from rich.table import Column, Table
from rich.text import Text

from arctool.terminal.tables import plain, size
from arctool.uqff.detail import TensorDetail, TrellisFacts
from arctool.uqff.difference import Difference, Side, Stored, TensorDifference
from arctool.uqff.report import LayerDetails
from arctool.uqff.statistics import Statistics

LONGEST = 60
"""Characters of a value of config.json."""


def tensor(detail: TensorDetail) -> RenderableType:
    """How a tensor is stored, what the baker says of it, its entries, and what its weights look like."""
    stored = [
        ("tensor", detail.key),
        ("artifact", detail.path),
        ("kind", detail.kind),
        ("shape", "×".join(map(str, detail.shape)) or "scalar"),
        ("stored as", detail.label),
        ("bits per weight", f"{detail.bits_per_weight:.3f}"),
        ("bytes", f"{detail.nbytes:,}"),
        *(_trellis(detail.trellis) if detail.trellis is not None else ()),
        *(_report(detail.report) if detail.report is not None else ()),
    ]
    entries = Table(Column("entry", overflow="fold"), "dtype", "shape", Column("bytes", justify="right"), "file", box=None)
    for row in detail.entries:
        entries.add_row(*map(plain, (row.name, row.dtype, "×".join(map(str, row.shape)) or "scalar", f"{row.nbytes:,}", row.file)))
    return Group(_facts(stored), Text(), entries, Text(), _facts(_statistics(detail.statistics)))


def _facts(rows: Iterable[tuple[str, str]]) -> Table:
    table = Table(box=None, show_header=False)
    for name, value in rows:
        table.add_row(plain(name, "bold"), plain(value))
    return table


def _trellis(facts: TrellisFacts) -> Iterable[tuple[str, str]]:
    yield "geometry", f"{facts.geometry}, {facts.bits_per_weight:g} bits a weight"
    yield "codebook", facts.codebook if facts.table is None else f"{facts.codebook}, SHA-256 {facts.table}"
    yield "rotation", "none" if facts.block_in is None else f"blocks of {facts.block_in} inputs and {facts.block_out} outputs"
    if facts.scales is not None:
        yield "scales", f"{facts.scales.minimum:.5g} to {facts.scales.maximum:.5g}, median {facts.scales.median:.5g}"


def _report(details: LayerDetails) -> Iterable[tuple[str, str]]:
    for name, value in (
        ("asked for", details.resolved_target),
        ("by default", details.default_target if details.default_target != details.resolved_target else None),
        ("fallback", details.fallback_reason),
        ("relative error", details.relative_error),
        ("proxy error", details.proxy_error),
        ("dropped rows", details.dropped_rows or None),
        ("note", details.note),
    ):
        if value is not None:
            yield name, f"{value:.6g}" if isinstance(value, float) else str(value)


def _statistics(found: Statistics) -> Iterable[tuple[str, str]]:
    yield "weights", f"{found.count:,}"
    if found.nan or found.infinite:
        places = ", ".join(f"{place.value} at {list(place.index)}" for place in found.nonfinite)
        yield "NOT FINITE", f"{found.nan:,} NaN, {found.infinite:,} infinite, left out below; the first: {places}"
    if found.mean is None or found.std is None:
        return
    yield "range", f"{found.minimum:.6g} to {found.maximum:.6g}, largest size {found.abs_max:.6g}"
    yield "mean, std", f"{found.mean:.4g}, {found.std:.6g}"
    yield "excess kurtosis", "–" if found.kurtosis is None else f"{found.kurtosis:.4g}"
    yield "exact zeros", f"{found.zeros:.4%}"
    yield "percentiles", ", ".join(f"{name}%: {value:.4g}" for name, value in found.percentiles.items())
    rows = (f"{', '.join(map(str, row.index)) or '0'} ({row.norm:.4g})" for row in found.heaviest)
    yield "largest norms", f"rows {'; '.join(rows)}"


def difference(found: Difference, layers: bool) -> RenderableType:
    """Both sides in numbers, then what differs, the tensors one by one if `layers`, and a last line that says it all."""
    parts: list[RenderableType] = [_sides(found.a, found.b), Text()]
    for title, rows in (("facts", found.facts), ("config.json", found.config)):
        if rows:
            table = Table(Column(title, overflow="fold"), "A", "B", box=None)
            for row in rows:
                table.add_row(plain(row.name), plain(_value(row.a)), plain(_value(row.b)))
            parts += [table, Text()]
    if found.tensors and layers:
        parts += [_tensors(found.tensors), Text()]
    held = [(f"table {row.name}", row.what) for row in found.tables] + [(row.name, row.what) for row in found.files]
    if held:
        parts += [_facts(held), Text()]
    parts += [plain(f"note: {note}", "dim") for note in found.notes]
    parts.append(plain(summary(found), "bold green" if found.same else "bold"))
    return Group(*parts)


def summary(found: Difference) -> str:
    """One line: how much of what differs."""
    if found.same:
        return f"no difference in {found.tensors_compared} tensors, config and files"
    counts = (
        (len(found.tensors), f"of {found.tensors_compared} tensors"),
        (len(found.facts), "fact" if len(found.facts) == 1 else "facts"),
        (len(found.config), f"{'place' if len(found.config) == 1 else 'places'} of config.json"),
        (len(found.tables), "table" if len(found.tables) == 1 else "tables"),
        (len(found.files), "file" if len(found.files) == 1 else "files"),
    )
    error = "" if found.relative_error is None else f"; relative error of the differing tensors, A being right: {found.relative_error:.5g}"
    return f"different: {', '.join(f'{count} {what}' for count, what in counts if count)}{error}"


def _sides(a: Side, b: Side) -> Table:
    table = Table("", Column("A", overflow="fold"), Column("B", overflow="fold"), box=None)
    rates = [side.totals.quantised_bits_per_weight for side in (a, b)]
    for name, left, right in (
        ("path", a.path, b.path),
        ("size", size(a.totals.nbytes), size(b.totals.nbytes)),
        ("parameters", f"{a.totals.parameters:,}", f"{b.totals.parameters:,}"),
        ("bits per weight", f"{a.totals.bits_per_weight:.3f}", f"{b.totals.bits_per_weight:.3f}"),
        ("… of quantised layers", *("–" if rate is None else f"{rate:.3f}" for rate in rates)),
    ):
        table.add_row(Text(name, "bold"), plain(left), plain(right))
    return table


def _tensors(rows: tuple[TensorDifference, ...]) -> Table:
    numbers = [Column(name, justify="right") for name in ("bits A", "bits B", "relative error")]
    table = Table(Column("tensor", overflow="fold"), "differs in", "A", "B", *numbers, box=None)
    for row in rows:
        what = row.what if row.bias is None or row.what == "bias" else f"{row.what}, bias"
        same_shape = row.a is not None and row.b is not None and row.a.shape == row.b.shape
        sides = (_side(row.a, same_shape), _side(row.b, same_shape))
        bits = ("" if side is None else f"{side.bits_per_weight:.3f}" for side in (row.a, row.b))
        error = "" if row.relative_error is None else f"{row.relative_error:.5g}"
        table.add_row(*map(plain, (row.name, what, *sides, *bits, error)))
    return table


def _side(stored: Stored | None, same_shape: bool) -> str:
    if stored is None:
        return "–"
    return stored.label if same_shape else f"{stored.label} {'×'.join(map(str, stored.shape))}"


def _value(value: Any) -> str:
    text = "–" if value is None else str(value)
    return text if len(text) <= LONGEST else f"{text[: LONGEST - 1]}…"
