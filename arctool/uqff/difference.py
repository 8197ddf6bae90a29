"""`diff`: in what two artifacts differ: facts, config, tensors, tables, files. Two artifacts in, plain data out; shows nothing.

Bytes are compared, not the hashes that a report claims. Where two tensors of one shape differ, both are decoded, a million weights at a
time, and the distance is measured. What it compares is all of both directories but hidden files, so that nothing found means equal.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from arctool.quant.tensor import Weight
from arctool.uqff.contrast import DIFFERS, ONLY_A, ONLY_B, FileDifference, equal, facts, files, tables
from arctool.uqff.distance import gap_and_power
from arctool.uqff.entries import Entry
from arctool.uqff.inspect import Totals, take_stock
from arctool.uqff.json_changes import Change, changes
from arctool.uqff.reader import Artifact, open_artifact

Progress = Callable[[int, int], None]
"""Called as (tensors done, tensors in all)."""


@dataclass(frozen=True)
class Side:
    """One of the two artifacts."""

    path: str
    name: str
    totals: Totals


@dataclass(frozen=True)
class Stored:
    """How one side stores a tensor. `nbytes`: of all its entries, a bias among them."""

    shape: tuple[int, ...]
    label: str
    bits_per_weight: float
    nbytes: int


@dataclass(frozen=True)
class TensorDifference:
    """One layer (by its key) or residual tensor (by its name) in which the artifacts differ.

    `what`: `only in A`, `only in B`, `shape`, `storage`, `bytes` (stored alike) or `bias` (nothing else differs); `entries`: those that
    are not equal, of the weight; `bias`: `only in A`, `only in B`, `differs` or None; `relative_error`: ‖A−B‖²/‖A‖² of the weights, None
    where they were not decoded, A is zero, or a value is not finite.
    """

    name: str
    what: str
    a: Stored | None
    b: Stored | None
    entries: tuple[str, ...] = ()
    bias: str | None = None
    relative_error: float | None = None


@dataclass(frozen=True)
class Difference:
    """All that differs. `tensors_compared`: of both sides; `relative_error`: over all tensors that differ and were decoded."""

    a: Side
    b: Side
    facts: tuple[Change, ...]
    config: tuple[Change, ...]
    tensors: tuple[TensorDifference, ...]
    tables: tuple[FileDifference, ...]
    files: tuple[FileDifference, ...]
    notes: tuple[str, ...]
    tensors_compared: int
    relative_error: float | None

    @property
    def same(self) -> bool:
        """Whether nothing differs."""
        return not (self.facts or self.config or self.tensors or self.tables or self.files)

    def to_json(self) -> dict[str, Any]:
        return {"same": self.same, **asdict(self)}


@dataclass(frozen=True)
class _Tensor:
    """A tensor of one side. `entries` by what follows its name: `weight`, `weight.scales` and so on; the bias is apart."""

    weight: Weight
    bias: NDArray[np.float32] | None
    entries: Mapping[str, Entry]
    nbytes: int


@dataclass
class _Sum:
    """Σ(A−B)² and ΣA² of the tensors that were decoded, in f64."""

    gap: float = 0.0
    power: float = 0.0

    def error(self) -> float | None:
        """‖A−B‖²/‖A‖², 0 for equal zeros; None where it is no number."""
        if self.power == 0:
            return 0.0 if self.gap == 0 else None
        value = self.gap / self.power
        return value if math.isfinite(value) else None


def difference(path_a: Path, path_b: Path, *, decode: bool = True, progress: Progress | None = None) -> Difference:
    """In what the artifacts at `path_a` and `path_b` differ; without `decode` no distance is measured.

    Raises StorageError, UsageError, FormatError.
    """
    with open_artifact(path_a) as a, open_artifact(path_b) as b:
        stock_a, stock_b = take_stock(a, path_a), take_stock(b, path_b)
        found, compared, whole = _tensors(a, b, decode, progress)
        said, held = tuple(facts(a, b, stock_a, stock_b)), tuple(tables(a, b))
        config = tuple(changes(a.config_json, b.config_json))
        changed, notes = files(a, b, layout=not (said or held or found), config_differs=bool(config))
        return Difference(
            a=Side(str(path_a), a.directory.resolve().name, stock_a.totals),
            b=Side(str(path_b), b.directory.resolve().name, stock_b.totals),
            facts=said,
            config=config,
            tensors=found,
            tables=held,
            files=changed,
            notes=notes,
            tensors_compared=compared,
            relative_error=whole.error() if whole.gap or whole.power else None,
        )


def _tensors(a: Artifact, b: Artifact, decode: bool, progress: Progress | None) -> tuple[tuple[TensorDifference, ...], int, _Sum]:
    """Every tensor of either side, in the order of A and then of B. Both are read one tensor at a time."""
    names_a, names_b = _names(a, b), _names(b, a)
    every = list(dict.fromkeys((*names_a, *names_b)))
    whole, found = _Sum(), []
    for number, name in enumerate(every, 1):
        differs = _compare(name, _read(a, names_a, name), _read(b, names_b, name), whole if decode else None)
        if differs is not None:
            found.append(differs)
        a.release(name)
        b.release(name)
        if progress is not None:
            progress(number, len(every))
    return tuple(found), len(every), whole


def _names(artifact: Artifact, other: Artifact) -> dict[str, str]:
    """Name → kind: `layer` by its key, `residual` by its full name, `loose`: a residual that is a layer on the other side, by its key."""
    layers, residual = set(other.keys()), set(artifact.residual_names())
    names = dict.fromkeys(artifact.keys(), "layer")
    for name in artifact.residual_names():
        key, _, part = name.rpartition(".")
        if key in layers and part == "weight":
            names[key] = "loose"
        elif not (key in layers and part == "bias" and f"{key}.weight" in residual):
            names[name] = "residual"
    return names


def _read(artifact: Artifact, names: Mapping[str, str], name: str) -> _Tensor | None:
    """The tensor of that name, None where this side has none."""
    kind = names.get(name)
    if kind is None:
        return None
    if kind == "layer":
        entries = artifact.entries(name)
        named = {full.removeprefix(f"{name}."): entry for full, entry in entries.items() if full != f"{name}.bias"}
        return _Tensor(artifact.form(name), artifact.bias(name), named, sum(entry.nbytes for entry in entries.values()))
    full = name if kind == "residual" else f"{name}.weight"
    entry = artifact.residual_shard.entry(full)
    bias = artifact.bias(name) if kind == "loose" else None
    return _Tensor(artifact.residual_form(full), bias, {"weight": entry}, entry.nbytes + (0 if bias is None else bias.nbytes))


def _compare(name: str, a: _Tensor | None, b: _Tensor | None, whole: _Sum | None) -> TensorDifference | None:
    """In what two tensors differ, None if in nothing; the distance is added to `whole`, and measured only with one."""
    stored = _stored(a), _stored(b)
    if a is None or b is None:
        return TensorDifference(name, ONLY_B if a is None else ONLY_A, *stored)
    parts = sorted(a.entries.keys() | b.entries.keys())
    unequal = tuple(part for part in parts if not equal(a.entries.get(part), b.entries.get(part)))
    bias = _bias(a.bias, b.bias)
    if a.weight.shape != b.weight.shape:
        return TensorDifference(name, "shape", *stored, unequal, bias)
    if not unequal:
        return None if bias is None else TensorDifference(name, "bias", *stored, (), bias)
    alike = a.weight.label == b.weight.label and a.entries.keys() == b.entries.keys()
    error = None if whole is None else _distance(a.weight, b.weight, whole)
    return TensorDifference(name, "bytes" if alike else "storage", *stored, unequal, bias, error)


def _stored(tensor: _Tensor | None) -> Stored | None:
    if tensor is None:
        return None
    weight = tensor.weight
    return Stored(weight.shape, weight.label, weight.stored_bits / max(1, math.prod(weight.shape)), tensor.nbytes)


def _distance(a: Weight, b: Weight, whole: _Sum) -> float | None:
    with np.errstate(invalid="ignore"):  # what is not finite makes the sums so, and the answer None
        own = _Sum(*gap_and_power(b, a))
    if math.isfinite(own.power) and math.isfinite(own.gap):
        whole.power += own.power
        whole.gap += own.gap
    return own.error()


def _bias(a: NDArray[np.float32] | None, b: NDArray[np.float32] | None) -> str | None:
    if a is None or b is None:
        return None if a is b else ONLY_A if b is None else ONLY_B
    return None if a.shape == b.shape and a.tobytes() == b.tobytes() else DIFFERS
