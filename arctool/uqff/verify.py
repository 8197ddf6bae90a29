"""`verify`: can this artifact be trusted? Four questions, each answered with counts and the first differences.

Is the container sound; does every implementation decode to the oracle's bits; are the tables the ones that ship; how far is each
layer from its source. Nothing is printed; an artifact that fails is a report, not an exception. Memory holds a few blocks of rows,
whatever the artifact's size, and the pages that were read are given back. The room knows no kernels: implementations are handed in.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import Executor, ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Final, Protocol

import numpy as np
from numpy.typing import NDArray

from arctool.errors import ArctoolError, FormatError, UsageError
from arctool.quant.codebooks import SHIPPED_TABLES, SUM2_SHA256, Codebook, ShippedTable
from arctool.quant.tensor import DenseTensor, PackedTensor, TrellisTensor, Weight
from arctool.quant.trellis import Geometry
from arctool.uqff.answers import Answer, Coverage, LayerError, Tally, VerifyReport
from arctool.uqff.chunks import Rowwise
from arctool.uqff.comparison import Decoder, compare_layer, obstacle
from arctool.uqff.distance import bit_limit, relative_error, worst_rounding
from arctool.uqff.reader import Artifact, open_artifact
from arctool.uqff.soundness import Readable, check_container

LOSS_FACTOR: Final = 4.0
"""A trellis layer may have this much of its rate's limit 2^(−2·bits) as error: more is the loss of a whole bit, so a wrong layer."""

CALIBRATED_ERROR: Final = 0.9
"""A calibrated layer is searched under what it sees, and may leave its weights where nothing is seen: its relative error can pass the
rate's by far. A matrix of zeros has 1, one that has nothing to do with the layer 2."""

QUESTIONS: Final = ("container", "implementations", "tables", "source")

Progress = Callable[[str, int, int], None]
"""Called as (question, done, total)."""

Regenerate = Callable[[str], NDArray | None]
"""The table of a geometry's name, made anew from its recipe as f32 or bf16 bits [2^l, v]; None where that takes too long."""


class Source(Protocol):
    """What the artifact was made from, by module path: a checkpoint."""

    def lazily(self, key: str) -> Rowwise: ...

    def bias(self, key: str) -> NDArray[np.float32] | None: ...


def verify(
    path: Path,
    *,
    source: Source | None = None,
    implementations: Iterable[Decoder] = (),
    tables: Regenerate | None = None,
    expected: Mapping[str, tuple[int, ...]] | None = None,
    config_error: str | None = None,
    progress: Progress | None = None,
    shipped: Mapping[str, ShippedTable] = SHIPPED_TABLES,
    fast: bool = False,
    jobs: int | None = None,
) -> VerifyReport:
    """Ask the four questions of the artifact at `path` and report.

    `expected`: shapes of the model's tensors by full name or module path; `config_error`: why the artifact's config gives none, which
    fails the container. `tables`: remakes a shipped table where that is cheap. `fast`: the container alone, by its headers and text
    files: no data is read, so that no size takes long. `jobs`: threads, by default the cores; they change no verdict.
    Raises StorageError or UsageError only where `path` is no artifact to be asked.
    """
    container = Tally("container")
    try:
        artifact = open_artifact(path)
    except FormatError as error:
        container.fail(str(error))
        rest = [_not_asked(question, "the container could not be opened") for question in QUESTIONS[1:]]
        return VerifyReport(str(path), container.answer(), rest[0], rest[1], rest[2], fast=fast)
    with artifact, ThreadPoolExecutor(jobs or os.cpu_count() or 1) as pool:
        if config_error is not None:
            container.fail(config_error)
        step = _stepper(progress, "container", len(artifact.keys()))
        readable = check_container(artifact, expected, container, step, pool, values=not fast)
        if fast:
            rest = [_not_asked(question, "only headers were read") for question in QUESTIONS[1:]]
            return VerifyReport(str(path), container.answer(), rest[0], rest[1], rest[2], fast=True)
        compared, coverage = _check_implementations(artifact, readable, tuple(implementations), progress, pool)
        known = _check_tables(artifact, [key for key, kind in readable.weights.items() if kind is TrellisTensor], shipped, tables)
        against, errors = _check_source(artifact, list(readable.keys), source, progress, pool)
    return VerifyReport(str(path), container.answer(), compared, known, against, coverage, errors)


def _not_asked(question: str, why: str) -> Answer:
    tally = Tally(question)
    tally.note(f"not asked: {why}")
    return tally.answer(asked=False)


def _stepper(progress: Progress | None, question: str, total: int) -> Callable[[], None]:
    done = 0

    def step() -> None:
        nonlocal done
        done += 1
        if progress is not None:
            progress(question, done, total)

    return step


def _check_implementations(
    artifact: Artifact, readable: Readable, decoders: tuple[Decoder, ...], progress: Progress | None, pool: Executor
) -> tuple[Answer, tuple[Coverage, ...]]:
    """Every packed tensor but the misfits, by every implementation that accepts it, against the oracle, bit for bit."""
    tally = Tally("implementations")
    if len({decoder.name for decoder in decoders}) != len(decoders):
        raise UsageError(f"implementations need different names, found {', '.join(decoder.name for decoder in decoders)}")
    keys = [key for key, kind in readable.weights.items() if kind is not DenseTensor]
    step = _stepper(progress, "implementations", len(keys))
    totals = {decoder.name: Coverage(decoder.name, 0, 0, 0) for decoder in decoders}
    for key in keys:
        weight = _packed(artifact, key)
        tally.count("trellis tensors" if isinstance(weight, TrellisTensor) else "block tensors")
        takers = [decoder for decoder in decoders if decoder.accepts(weight)]
        reason = obstacle(weight, key in readable.misfits, bool(takers))
        if reason:
            takers = []
            tally.fail(f"{key}: {reason}, so nothing was compared")
        for decoder, (compared, differing) in compare_layer(key, weight, takers, tally, pool, partial(artifact.release, key)).items():
            seen = totals[decoder]
            totals[decoder] = Coverage(decoder, seen.tensors + 1, seen.weights + compared, seen.differing + differing)
        tally.count("tensors compared", int(bool(takers)))
        del weight
        artifact.release(key)
        step()
    for coverage in totals.values():
        tally.count(f"weights by {coverage.implementation}", coverage.weights)
    if not keys:
        tally.note("not asked: no layer is packed")
    return tally.answer(asked=bool(keys)), tuple(totals.values())


def _packed(artifact: Artifact, key: str) -> PackedTensor:
    """A layer that is known to be packed; the container was checked before."""
    weight = artifact.form(key)
    if isinstance(weight, DenseTensor):
        raise FormatError(f"{key}: changed to {weight.label} while it was verified")
    return weight


def _trellis(artifact: Artifact, key: str) -> TrellisTensor:
    """A layer that is known to be a trellis."""
    weight = artifact.form(key)
    if not isinstance(weight, TrellisTensor):
        raise FormatError(f"{key}: changed from a trellis to {weight.label} while it was verified")
    return weight


def _check_tables(artifact: Artifact, keys: list[str], shipped: Mapping[str, ShippedTable], regenerate: Regenerate | None) -> Answer:
    """Every table of the artifact is the one that ships for its geometry, and sum2 computes what it always did."""
    tally = Tally("tables")
    seen: dict[tuple[str, str], str] = {}
    for key in keys:
        weight = _trellis(artifact, key)
        tally.count("layers with sum2" if weight.codebook.kind == "sum2" else "layers with a table")
        ident = (weight.geometry.name, weight.codebook.kind if weight.codebook.kind == "sum2" else weight.codebook.digest)
        if ident not in seen:
            seen[ident] = key
            tally.count("tables")
            _check_table(key, weight.geometry, weight.codebook, shipped, regenerate, tally)
    if not keys:
        tally.note("not asked: no layer is a trellis")
    return tally.answer(asked=bool(keys))


def _check_table(
    key: str,
    geometry: Geometry,
    codebook: Codebook,
    shipped: Mapping[str, ShippedTable],
    regenerate: Regenerate | None,
    tally: Tally,
) -> None:
    if codebook.kind == "sum2":
        found, pinned = _digest(codebook.values(geometry)), SUM2_SHA256.get(geometry.name, "nothing")
        if found != pinned:
            tally.fail(f"{key}: sum2 computes SHA-256 {found} for {geometry.name}, expected {pinned}")
        return
    name = geometry.name
    if name not in shipped:
        tally.fail(f"{key}: no table ships for {name}; the artifact brings its own, SHA-256 {codebook.digest}")
    elif codebook.digest != shipped[name].sha256:
        tally.fail(f"{key}: table SHA-256 {codebook.digest} is not the {shipped[name].sha256} that ships for {name}")
    remade = regenerate(name) if regenerate is not None else None
    if remade is None:
        tally.note(f"{name}: table not regenerated, compared by digest only")
        return
    tally.count("tables regenerated")
    if _digest(remade) != codebook.digest:
        tally.fail(f"{key}: the recipe of {name} gives SHA-256 {_digest(remade)}, the table has {codebook.digest}")


def _digest(table: NDArray) -> str:
    return hashlib.sha256(np.ascontiguousarray(table).astype(table.dtype.newbyteorder("<")).tobytes()).hexdigest()


def _check_source(
    artifact: Artifact, keys: list[str], source: Source | None, progress: Progress | None, pool: Executor
) -> tuple[Answer, tuple[LayerError, ...]]:
    """How far every layer, bias and residual weight is from the source."""
    tally = Tally("source")
    if source is None:
        return tally.answer(asked=False), ()
    names = keys + [name.removesuffix(".weight") for name in artifact.residual_names() if name.endswith(".weight")]
    step = _stepper(progress, "source", len(names))
    report = artifact.report
    calibrated = report is not None and report.bake is not None and report.bake.calibration is not None
    errors: list[LayerError] = []
    for key, found in zip(names, pool.map(partial(_compare_with, artifact, source, calibrated), names), strict=True):
        for fault in found.faults:
            tally.fail(f"{key}: {fault}")
        if found.error is not None:
            errors.append(found.error)
            _judge(found.error, tally)
        tally.count("tensors compared")
        tally.count("biases compared", int(found.bias))
        step()
    return tally.answer(), tuple(errors)


@dataclass(frozen=True)
class _Compared:
    """One tensor against the source: its error unless it could not be compared, what is wrong, whether both have a bias."""

    error: LayerError | None
    faults: tuple[str, ...] = ()
    bias: bool = False


def _compare_with(artifact: Artifact, source: Source, calibrated: bool, key: str) -> _Compared:
    error = None
    try:
        error = _layer_error(key, artifact.form(key), source.lazily(key), calibrated)
        stored, original = artifact.bias(key), source.bias(key)
    except ArctoolError as fault:
        return _Compared(error, (str(fault),))
    finally:
        artifact.release(key)
    if stored is None or original is None:
        missing = (f"the {'artifact' if original is None else 'source'} has a bias, the other has not",)
        return _Compared(error, () if stored is original else missing)
    return _Compared(error, () if np.array_equal(stored, original) else ("the bias is not the source's",), True)


def _layer_error(key: str, stored: Weight, original: Rowwise, calibrated: bool) -> LayerError:
    if stored.shape != original.shape:
        raise FormatError(f"stored as {list(stored.shape)}, the source has {list(original.shape)}")
    return LayerError(key, stored.label, relative_error(stored, original), bit_limit(stored), plausible_error(stored, calibrated))


def plausible_error(stored: Weight, calibrated: bool) -> float:
    """The most relative error that a layer of the source can have, stored so."""
    limit = bit_limit(stored)
    if isinstance(stored, TrellisTensor) and limit is not None:
        return max(LOSS_FACTOR * limit, CALIBRATED_ERROR if calibrated else 0.0)
    return worst_rounding(stored)


def _judge(error: LayerError, tally: Tally) -> None:
    if not error.relative_error <= error.plausible:
        tally.fail(f"{error.key}: relative error {error.relative_error:.4g} of {error.label}, at most {error.plausible:.4g} is plausible")
