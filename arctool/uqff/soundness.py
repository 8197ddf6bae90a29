"""Is the container sound? Everything about an artifact that can be checked without decoding a weight.

Names, lengths and versions are checked by opening it and taking each layer apart; here the artifact is then held to the model's
shapes and to its directory, and to what it says of itself (`honesty`).
"""

from __future__ import annotations

import math
import stat
from collections.abc import Callable, Mapping
from concurrent.futures import Executor
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Final

from arctool.errors import ArctoolError, FormatError
from arctool.quant.rows import bounded_rows
from arctool.quant.tensor import DenseTensor, TrellisTensor, Weight
from arctool.uqff.answers import Tally
from arctool.uqff.discovery import CONFIG_NAME, RESIDUAL_NAME, SHADOWS
from arctool.uqff.honesty import check_hashes, check_name, check_report
from arctool.uqff.reader import Artifact
from arctool.uqff.report import REPORT_NAME, LayerRecord
from arctool.uqff.strangers import strange_layers, strangers
from arctool.uqff.wire.tables import table_name

Step = Callable[[], None]

CHECKED: Final = 1 << 24
"""Weights whose scales are looked at before their pages are given back."""

_HARMLESS: Final = ("readme", "license", "licence", "notice", ".gitattributes")
"""What people and hubs put beside a model, and no loader reads."""


@dataclass(frozen=True)
class Readable:
    """The layers that can be read, by key in file order as they were found, and those that are no part of the model in that shape."""

    weights: Mapping[str, type[Weight]]
    misfits: frozenset[str]

    @property
    def keys(self) -> tuple[str, ...]:
        return tuple(self.weights)


@dataclass(frozen=True)
class _Seen:
    """What taking one layer apart gave: what it is, or why it cannot be read; and the first value that is not finite, if one is."""

    record: LayerRecord | None = None
    kind: type[Weight] = DenseTensor
    table: str | None = None
    faults: tuple[str, ...] = ()


def check_container(
    artifact: Artifact,
    expected: Mapping[str, tuple[int, ...]] | None,
    tally: Tally,
    step: Step,
    pool: Executor,
    *,
    values: bool = True,
) -> Readable:
    """Run every check of this room into `tally`; `step` is called once a layer.

    `values`: also look at the data: scales, streams' padding, dense values, hashes of entries. Without it only headers, the small
    entries that say what others are, and the text files are read.
    """
    seen: dict[str, _Seen] = {}
    looks = pool.map(partial(_look_at, artifact, values), artifact.keys())
    for key, found in zip(artifact.keys(), looks, strict=True):
        seen[key] = found
        tally.count("layers")
        for fault in found.faults:
            tally.fail(fault)
        step()
    readable = {key: found.record for key, found in seen.items() if found.record is not None}
    if len(readable) == len(seen):
        for name in sorted(set(artifact.table_names()) - {found.table for found in seen.values()}):
            tally.fail(f"{artifact.directory}: table {name} is used by no layer")
    _check_residual(artifact, values, tally)
    check_report(artifact, readable, tally)
    check_name(artifact, readable, tally)
    check_hashes(artifact, pool, tally, entries=values)
    _check_directory(artifact, tally)
    misfits = _check_shapes(artifact, expected, readable, tally) if expected is not None else set()
    return Readable({key: seen[key].kind for key in readable}, frozenset(misfits))


def _look_at(artifact: Artifact, values: bool, key: str) -> _Seen:
    """Take one layer apart: entries, lengths, geometry and, with `values`, finite scales and weights."""
    faults: tuple[str, ...] = ()
    try:
        weight = artifact.form(key)
        _ = artifact.bias(key) if values else artifact.bias_shape(key)
        if values and not isinstance(weight, DenseTensor):
            _check_values(weight, f"{artifact.where(key)}: {key}.weight", partial(artifact.release, key))
    except ArctoolError as error:
        return _Seen(faults=(str(error),))
    if values and isinstance(weight, DenseTensor):
        try:
            _check_values(weight, f"{artifact.directory}: {key}.weight", partial(artifact.release, key))
        except FormatError as error:
            faults = (str(error),)  # the layer stays readable: its other faults are still looked for
    nbytes = sum(entry.nbytes for entry in artifact.entries(key).values())
    record = LayerRecord(key, weight.shape, weight.label, nbytes, weight.stored_bits / math.prod(weight.shape))
    table = table_name(weight.codebook.digest) if isinstance(weight, TrellisTensor) and weight.codebook.kind == "table" else None
    kind = type(weight)
    del weight
    artifact.release(key)
    return _Seen(record, kind, table, faults)


def _check_values(weight: Weight, where: str, release: Step) -> None:
    """As `Artifact.weight` checks it, and dense values too, some rows at a time: no more of a large tensor is in memory than that."""
    for part in bounded_rows(weight.shape[0], *weight.shape[1:], most=CHECKED):
        try:
            weight.rows(part).check_values(where)
        except FormatError:
            weight.check_values(where)  # again, to name the row among all
            raise
        release()


def _check_residual(artifact: Artifact, values: bool, tally: Tally) -> None:
    """Types that are read, and with `values` an infinity or NaN, which in one weight is one in every answer."""
    for name in artifact.residual_names():
        tally.count("residual tensors")
        try:
            tensor = artifact.residual_form(name)
            where = f"{artifact.directory}: {name}"
            if values and tensor.shape:
                _check_values(tensor, where, partial(artifact.release, name))
            elif values:
                tensor.check_values(where)
        except ArctoolError as error:
            tally.fail(str(error))


def _check_directory(artifact: Artifact, tally: Tally) -> None:
    """No file that a loader would take instead of ours, and none that belongs to nothing."""
    ours = {shard.path.name for shard in artifact.shards} | {RESIDUAL_NAME, CONFIG_NAME, REPORT_NAME, *artifact.assets}
    if artifact.report is not None:
        ours |= {name for output in artifact.report.outputs for name in output.shards}
    for item in sorted(artifact.directory.iterdir()):
        tally.count("files")
        kind = item.lstat().st_mode
        if SHADOWS.fullmatch(item.name):
            tally.fail(f"{item}: other programs load this file instead of the artifact's; remove it")
        elif not (stat.S_ISREG(kind) or stat.S_ISDIR(kind)):
            tally.fail(f"{item}: neither a file nor a directory (a link, a pipe or a device), which has no place here; remove it")
        elif item.name in ours:
            continue
        elif stat.S_ISDIR(kind) or item.name.lower().startswith(_HARMLESS):
            tally.note(f"{item}: not part of the artifact")
        else:
            tally.fail(f"{item}: a stray file that nothing in the artifact refers to; remove it")


def _check_shapes(
    artifact: Artifact, expected: Mapping[str, tuple[int, ...]], readable: Mapping[str, LayerRecord], tally: Tally
) -> set[str]:
    """Every tensor of the model is there in its shape, and no layer or bias is there that the model lacks.

    Returns the keys of the layers that fail.
    """
    misfits = set()
    unreadable = set(artifact.keys()) - set(readable)
    for name, shape in expected.items():
        tally.count("shapes")
        key = name.removesuffix(".weight").removesuffix(".bias")
        if key in unreadable:
            continue  # refused already
        try:
            found = _shape(artifact, key, readable, bias=name.endswith(".bias"))
        except ArctoolError as error:
            tally.fail(str(error))
            continue
        if found != tuple(shape):
            shown = "nothing" if found is None else list(found)
            tally.fail(f"{Path(artifact.directory).name}: {name}: the model needs {list(shape)}, found {shown}")
            if not name.endswith(".bias"):
                misfits.add(key)
    for complaint in strangers(artifact, expected):
        tally.fail(complaint)
    misfits |= set(strange_layers(artifact, expected))
    return misfits


def _shape(artifact: Artifact, key: str, readable: Mapping[str, LayerRecord], *, bias: bool) -> tuple[int, ...] | None:
    if not bias:
        return readable[key].shape if key in readable else artifact.form(key).shape
    return artifact.bias_shape(key)
