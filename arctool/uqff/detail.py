"""`inspect --tensor`: everything that an artifact knows of one of its tensors. Finds it, lists its entries, has its weights measured."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass
from difflib import get_close_matches
from pathlib import Path
from typing import Any, Final

from arctool.errors import FormatError, UsageError
from arctool.quant.tensor import DenseTensor, TrellisTensor, Weight
from arctool.uqff.reader import Artifact, open_artifact
from arctool.uqff.report import LayerDetails
from arctool.uqff.shard import Shard
from arctool.uqff.statistics import Histogram, Progress, Statistics, measure, spread

SUGGESTED: Final = 4
"""Names that a refusal offers."""


@dataclass(frozen=True)
class EntryRow:
    """One entry of the file: its name, dtype, shape, bytes, and the file that holds it."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    nbytes: int
    file: str


@dataclass(frozen=True)
class Scales:
    """The rows' scales of a trellis tensor."""

    minimum: float
    median: float
    maximum: float
    histogram: Histogram


@dataclass(frozen=True)
class TrellisFacts:
    """How a trellis tensor is coded. `table`: SHA-256 of its codebook, None for a computed one; blocks are None without a rotation."""

    geometry: str
    codebook: str
    table: str | None
    bits_per_weight: float
    block_in: int | None
    block_out: int | None
    scales: Scales | None


@dataclass(frozen=True)
class TensorDetail:
    """What `arctool inspect --tensor` shows. `report`: the baker's word on the layer, None where no report speaks of it.

    `kind`: `layer`, `bias` (of a layer) or `residual`; `rung`: of the whole artifact, None without a report.
    """

    path: str
    artifact: str
    key: str
    kind: str
    label: str
    shape: tuple[int, ...]
    parameters: int
    bits_per_weight: float
    nbytes: int
    entries: tuple[EntryRow, ...]
    trellis: TrellisFacts | None
    rung: str | None
    report: LayerDetails | None
    statistics: Statistics

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


def inspect_tensor(path: Path, key: str, progress: Progress | None = None) -> TensorDetail:
    """All about the tensor `key` (a layer, its `.weight` or `.bias`, a residual tensor) of the artifact at `path`.

    Raises UsageError, with names that come near, for a key that the artifact has not; StorageError, FormatError.
    """
    with open_artifact(path) as artifact:
        kind, name = find(artifact, key)
        weight, entries = _read(artifact, kind, name)
        records = {} if artifact.output is None else {layer.module: layer.details for layer in artifact.output.layers}
        bake = None if artifact.report is None else artifact.report.bake
        return TensorDetail(
            path=str(path),
            artifact=artifact.directory.resolve().name,
            key=name,
            kind=kind,
            label=weight.label,
            shape=weight.shape,
            parameters=math.prod(weight.shape),
            bits_per_weight=weight.stored_bits / max(1, math.prod(weight.shape)),
            nbytes=sum(row.nbytes for row in entries),
            entries=entries,
            trellis=_trellis(weight) if isinstance(weight, TrellisTensor) else None,
            rung=None if bake is None else bake.rung,
            report=records.get(name) if kind == "layer" else None,
            statistics=measure(weight, progress),
        )


def find(artifact: Artifact, key: str) -> tuple[str, str]:
    """(kind, name) of the tensor that `key` means: a layer by its key, a layer's bias or a residual tensor by its full name."""
    layers, residual = set(artifact.keys()), set(artifact.residual_names())
    layer = key.removesuffix(".weight")
    if layer in layers:
        return "layer", layer
    owner = key.removesuffix(".bias")
    if owner != key and owner in layers and key in artifact.entries(owner):
        return "bias", key
    for name in (key, f"{key}.weight"):
        if name in residual:
            return "residual", name
    raise UsageError(f"--tensor: {artifact.directory} has no tensor {key!r}; {_suggestion(key, [*artifact.keys(), *sorted(residual)])}")


def _suggestion(key: str, names: list[str]) -> str:
    """What may have been meant: names that hold `key`, or its parts in their order; then such as are spelt much like it."""
    holding = [name for name in names if key and (key.lower() in name.lower() or _in_order(key.split("."), name.split(".")))]
    near = get_close_matches(key, names, SUGGESTED, 0.5)
    found = list(dict.fromkeys((*holding[:SUGGESTED], *near)))[:SUGGESTED]
    if not found:
        return f"`arctool inspect` lists its {len(names)}"
    more = len(holding) - SUGGESTED
    return f"did you mean {' or '.join(found)}{f' or one of {more} more that hold it' if more > 0 else ''}?"


def _in_order(parts: list[str], of: list[str]) -> bool:
    rest = iter(of)
    return all(part in rest for part in parts)


def _read(artifact: Artifact, kind: str, name: str) -> tuple[Weight, tuple[EntryRow, ...]]:
    """The weight and the entries of the file that it is made of."""
    if kind == "residual":
        return artifact.residual_form(name), (_entry_row(artifact.residual_shard, name),)
    layer = name.removesuffix(".bias") if kind == "bias" else name
    rows = tuple(
        _entry_row(shard, entry) for shard in artifact.shards for entry in artifact.entries(layer) if entry in shard.header.tensors
    )
    if kind == "layer":
        return artifact.form(layer), rows
    bias = artifact.bias(layer)
    if bias is None:
        raise FormatError(f"{artifact.directory}: {name} vanished while it was read")
    return DenseTensor(bias), tuple(row for row in rows if row.name == name)


def _entry_row(shard: Shard, name: str) -> EntryRow:
    info = shard.header.tensors[name]
    return EntryRow(name, info.dtype, info.shape, info.end - info.begin, shard.path.name)


def _trellis(weight: TrellisTensor) -> TrellisFacts:
    rotation, scales = weight.rotation, spread(weight.scales)
    table = weight.codebook.kind == "table"
    return TrellisFacts(
        geometry=weight.geometry.name,
        codebook=f"table of {weight.codebook.dtype}" if table else weight.codebook.kind,
        table=weight.codebook.digest if table else None,
        bits_per_weight=weight.geometry.bits_per_weight,
        block_in=None if rotation is None else rotation.block_in,
        block_out=None if rotation is None else rotation.block_out,
        scales=None if scales is None else Scales(*scales),
    )
