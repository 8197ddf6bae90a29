"""`inspect`: what an artifact holds, in numbers. Reads headers and layers' shapes; how it is shown is the command line's affair."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from arctool.uqff.reader import Artifact, open_artifact
from arctool.uqff.report import DENSE_LABELS, LayerDetails


@dataclass(frozen=True)
class LayerRow:
    """One layer or residual tensor. `bits_per_weight`: streams or blocks, scales, signs over weights; `nbytes`: of all its entries.

    What only a report knows, None without one: `target`: the rung that the recipe gives it; errors as in `report.LayerDetails`.
    """

    key: str
    shape: tuple[int, ...]
    label: str
    bits_per_weight: float
    nbytes: int
    has_bias: bool
    relative_error: float | None
    fallback_reason: str | None
    target: str | None = None
    proxy_error: float | None = None


@dataclass(frozen=True)
class FileRow:
    name: str
    nbytes: int


@dataclass(frozen=True)
class Totals:
    """`quantised_bits_per_weight`: mean over packed layers (trellis, GGML blocks), None without any; `bits_per_weight` counts all."""

    nbytes: int
    parameters: int
    quantised_parameters: int
    quantised_bits_per_weight: float | None
    bits_per_weight: float
    table_bytes: int


@dataclass(frozen=True)
class Inspection:
    """What `arctool inspect` shows. Fields that only a report can know are None without one."""

    path: str
    uqff_version: str
    producer: str | None
    producer_version: str | None
    rung: str | None
    seed: int | None
    source: str | None
    licence: str | None
    layers: tuple[LayerRow, ...]
    residual: tuple[LayerRow, ...]
    files: tuple[FileRow, ...]
    totals: Totals

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


def inspect(path: Path) -> Inspection:
    """Take stock of the artifact at `path`. Raises StorageError, UsageError, FormatError."""
    with open_artifact(path) as artifact:
        return take_stock(artifact, path)


def take_stock(artifact: Artifact, path: Path) -> Inspection:
    """The same of an artifact that is open, under the name `path`."""
    details = {} if artifact.output is None else {layer.module: layer.details for layer in artifact.output.layers}
    keys = artifact.keys()
    layers = tuple(_layer_row(artifact, key, details.get(key, LayerDetails())) for key in keys)
    residual = tuple(_residual_row(artifact, name) for name in artifact.residual_names())
    files = _files(artifact)
    report, metadata = artifact.report, artifact.shards[0].header.metadata
    bake = None if report is None else report.bake
    return Inspection(
        path=str(path),
        uqff_version=".".join(map(str, artifact.version)),
        producer=metadata.get("uqff.producer"),
        producer_version=metadata.get("arctool.version") or metadata.get("uqff.producer.mistralrs.version"),
        rung=None if bake is None else bake.rung,
        seed=None if bake is None else bake.seed,
        source=None if report is None else report.base_model,
        licence=None if bake is None else bake.licence,
        layers=layers,
        residual=residual,
        files=files,
        totals=_totals(artifact, layers, residual, files),
    )


def _layer_row(artifact: Artifact, key: str, details: LayerDetails) -> LayerRow:
    weight, entries = artifact.form(key), artifact.entries(key)
    return LayerRow(
        key=key,
        shape=weight.shape,
        label=weight.label,
        bits_per_weight=weight.stored_bits / math.prod(weight.shape),
        nbytes=sum(entry.nbytes for entry in entries.values()),
        has_bias=f"{key}.bias" in entries,
        relative_error=details.relative_error,
        fallback_reason=details.fallback_reason,
        target=details.resolved_target,
        proxy_error=details.proxy_error,
    )


def _residual_row(artifact: Artifact, name: str) -> LayerRow:
    """By its header: a tensor of a type that no weight has is shown too."""
    info = artifact.residual_shard.header.tensors[name]
    nbytes = info.end - info.begin
    return LayerRow(name, info.shape, info.dtype.lower(), 8 * nbytes / max(1, math.prod(info.shape)), nbytes, False, None, None)


def _files(artifact: Artifact) -> tuple[FileRow, ...]:
    names = sorted(item.name for item in artifact.directory.iterdir() if item.is_file())
    return tuple(FileRow(name, (artifact.directory / name).stat().st_size) for name in names)


def _totals(artifact: Artifact, layers: tuple[LayerRow, ...], residual: tuple[LayerRow, ...], files: tuple[FileRow, ...]) -> Totals:
    quantised = [row for row in layers if row.label not in DENSE_LABELS]
    parameters = sum(math.prod(row.shape) for row in (*layers, *residual))
    small = sum(math.prod(row.shape) for row in quantised)
    bits = sum(row.bits_per_weight * math.prod(row.shape) for row in quantised)
    every = sum(row.bits_per_weight * math.prod(row.shape) for row in (*layers, *residual))
    tables = set(artifact.table_names())
    table_bytes = sum(info.end - info.begin for shard in artifact.shards for name, info in shard.header.tensors.items() if name in tables)
    return Totals(
        nbytes=sum(row.nbytes for row in files),
        parameters=parameters,
        quantised_parameters=small,
        quantised_bits_per_weight=bits / small if small else None,
        bits_per_weight=every / parameters if parameters else 0.0,
        table_bytes=table_bytes,
    )
