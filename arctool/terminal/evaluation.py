"""What `arctool eval` found, for people: the errors of layers, then one row for each model. Shows names as `tables.plain` does."""

from __future__ import annotations

from rich.console import Group, RenderableType
from rich.table import Column, Table
from rich.text import Text

from arctool.bench.evaluation import Evaluation, LayerDistance, Row
from arctool.bench.subjects import Facts
from arctool.terminal.tables import plain, size

WORST = 8
"""Layers that are listed for each of several models; a single model's are all listed, and JSON has them all."""


def quality(found: Evaluation) -> RenderableType:
    """Layers first, so that the numbers which count stand last, where a terminal shows them."""
    parts: list[RenderableType] = []
    for row in found.rows:
        if row.layers:
            parts += [_layers(row, all_of_them=len(found.rows) == 1), Text()]
    reading = found.reading
    windows = f"{len(reading.windows)} window{'s' if len(reading.windows) > 1 else ''} of at most {reading.window}"
    text = f"{reading.predicted:,} predicted tokens of {reading.name}, {windows}"
    parts += [_models(found), plain(text, "dim")]
    for row in found.rows:
        if row.failure is not None:
            parts.append(plain(f"{row.model.name} FAILED: {row.failure.message}", "bold red"))
    return Group(*parts)


def _models(found: Evaluation) -> Table:
    """The source, if there is one, and a row for each model."""
    compared = ("mean KL", "KL p99", "KL max", "same top-1") if found.source is not None else ()
    numbers = [Column(name, justify="right") for name in ("size", "bits/weight", "linear", "perplexity", *compared)]
    table = Table(Column("model", overflow="fold"), *numbers, box=None)
    if found.source is not None:
        table.add_row(*_facts(found.source, " (source)"), _perplexity(found.base_perplexity), *("–" for _ in compared))
    for row in found.rows:
        table.add_row(*_facts(row.model), *_scores(row, len(compared)))
    return table


def _facts(model: Facts, remark: str = "") -> tuple[Text, ...]:
    bits = (f"{value:.3f}" for value in (model.bits_per_weight, model.linear_bits_per_weight))
    return (plain(model.name + remark), Text(size(model.nbytes)), *map(Text, bits))


def _scores(row: Row, compared: int) -> tuple[Text, ...]:
    if row.failure is not None:
        return (Text("FAILED", "bold red"), *(Text("") for _ in range(compared)))
    found = row.comparison
    numbers = () if found is None else (_nats(found.kl), _nats(found.kl_p99), _nats(found.kl_max), f"{found.same_top1:.1%}")
    return (_perplexity(row.perplexity), *map(Text, numbers))


def _perplexity(value: float | None) -> Text:
    return Text("–" if value is None else f"{value:.3f}" if value < 1e5 else f"{value:.3g}")


def _nats(value: float) -> str:
    return f"{value:.4f}" if value >= 1e-4 or value == 0 else f"{value:.1e}"


def _layers(row: Row, *, all_of_them: bool) -> Table:
    """Every layer in the order of the model, or the few with the largest error."""
    shown = row.layers if all_of_them else tuple(sorted(row.layers, key=lambda layer: -layer.relative_error)[:WORST])
    numbers = [Column(name, justify="right") for name in ("bits/weight", "relative error", "limit of its rate", "times the limit")]
    title = f"{plain(row.model.name)}: " + (
        "layers" if all_of_them else f"{len(shown)} of {len(row.layers)} layers, those with the largest error"
    )
    table = Table(Column("layer", overflow="fold"), "stored as", *numbers, box=None, title=Text(title), title_justify="left")
    for layer in shown:
        table.add_row(plain(layer.key), plain(layer.label), *map(Text, _distance(layer)))
    return table


def _distance(layer: LayerDistance) -> tuple[str, ...]:
    errors = (f"{value:.5f}" if value >= 1e-3 or value == 0 else f"{value:.2e}" for value in (layer.relative_error, layer.limit))
    return f"{layer.bits_per_weight:.3f}", *errors, f"{layer.ratio:.2f}"
