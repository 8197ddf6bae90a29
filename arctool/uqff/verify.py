"""`verify`: can this artifact be trusted? Four questions, each answered with counts and the first differences.

Is the container sound; does every implementation decode to the oracle's bits; are the tables the ones that ship; how far is each
layer from its source. Nothing is printed; an artifact that fails is a report, not an exception. Memory holds one block of rows
(question 2) or one layer (question 4) at a time. The room knows no kernels: implementations are handed in.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Final, Protocol

import numpy as np
from numpy.typing import NDArray

from arctool.errors import ArctoolError, FormatError, UsageError
from arctool.quant.codebooks import SHIPPED_TABLES, SUM2_SHA256, Codebook, ShippedTable
from arctool.quant.tensor import DenseTensor, GgmlTensor, PackedTensor, TrellisTensor, Weight
from arctool.quant.trellis import Geometry
from arctool.uqff.answers import Answer, Coverage, LayerError, Tally, VerifyReport
from arctool.uqff.comparison import Decoder, compare_layer, obstacle
from arctool.uqff.distance import rate_limit, relative_error
from arctool.uqff.reader import Artifact, open_artifact
from arctool.uqff.soundness import check_container

LOSS_FACTOR: Final = 4.0
"""A trellis layer may have this much of its rate's limit 2^(−2·bits) as error: more is the loss of a whole bit, so a wrong layer."""

CALIBRATED_ERROR: Final = 0.9
"""A calibrated layer is searched under what it sees, and may leave its weights where nothing is seen: its relative error can pass the
rate's by far. A matrix of zeros has 1, one that has nothing to do with the layer 2."""

DENSE_ERROR: Final = 2.0**-16
"""Relative error allowed to a tensor stored as bf16 or f32: rounding to 8 significant bits stays below 2^-18."""

QUESTIONS: Final = ("container", "implementations", "tables", "source")

Progress = Callable[[str, int, int], None]
"""Called as (question, done, total)."""

Regenerate = Callable[[str], NDArray | None]
"""The table of a geometry's name, made anew from its recipe as f32 or bf16 bits [2^l, v]; None where that takes too long."""


class Source(Protocol):
    """What the artifact was made from, by module path: a checkpoint."""

    def weight(self, key: str) -> Weight: ...

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
) -> VerifyReport:
    """Ask the four questions of the artifact at `path` and report.

    `expected`: shapes of the model's tensors by full name or module path; `config_error`: why the artifact's config gives none, which
    fails the container. `tables`: remakes a shipped table where that is cheap.
    Raises StorageError or UsageError only where `path` is no artifact to be asked.
    """
    container = Tally("container")
    try:
        artifact = open_artifact(path)
    except FormatError as error:
        container.fail(str(error))
        rest = [_not_reached(question) for question in QUESTIONS[1:]]
        return VerifyReport(str(path), container.answer(), rest[0], rest[1], rest[2])
    with artifact:
        if config_error is not None:
            container.fail(config_error)
        readable = check_container(artifact, expected, container, _stepper(progress, "container", len(artifact.keys())))
        keys = list(readable.keys)
        weights = {key: type(artifact.weight(key)) for key in keys}
        packed = [key for key in keys if weights[key] is not DenseTensor]
        compared, coverage = _check_implementations(artifact, packed, readable.misfits, tuple(implementations), progress)
        known = _check_tables(artifact, [key for key in keys if weights[key] is TrellisTensor], shipped, tables)
        against, errors = _check_source(artifact, keys, source, progress)
    return VerifyReport(str(path), container.answer(), compared, known, against, coverage, errors)


def _not_reached(question: str) -> Answer:
    tally = Tally(question)
    tally.note("not asked: the container could not be opened")
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
    artifact: Artifact, keys: list[str], misfits: frozenset[str], decoders: tuple[Decoder, ...], progress: Progress | None
) -> tuple[Answer, tuple[Coverage, ...]]:
    """Every packed tensor but the `misfits`, by every implementation that accepts it, against the oracle, bit for bit."""
    tally = Tally("implementations")
    if len({decoder.name for decoder in decoders}) != len(decoders):
        raise UsageError(f"implementations need different names, found {', '.join(decoder.name for decoder in decoders)}")
    step = _stepper(progress, "implementations", len(keys))
    totals = {decoder.name: Coverage(decoder.name, 0, 0, 0) for decoder in decoders}
    for key in keys:
        weight = _packed(artifact, key)
        tally.count("trellis tensors" if isinstance(weight, TrellisTensor) else "GGML tensors")
        takers = [decoder for decoder in decoders if decoder.accepts(weight)]
        reason = obstacle(weight, key in misfits, bool(takers))
        if reason:
            takers = []
            tally.fail(f"{key}: {reason}, so nothing was compared")
        for decoder, (compared, differing) in compare_layer(key, weight, takers, tally).items():
            seen = totals[decoder]
            totals[decoder] = Coverage(decoder, seen.tensors + 1, seen.weights + compared, seen.differing + differing)
        tally.count("tensors compared", int(bool(takers)))
        step()
    for coverage in totals.values():
        tally.count(f"weights by {coverage.implementation}", coverage.weights)
    return tally.answer(), tuple(totals.values())


def _packed(artifact: Artifact, key: str) -> PackedTensor:
    """A layer that is known to be packed; the container was checked before."""
    weight = artifact.weight(key)
    if isinstance(weight, DenseTensor):
        raise FormatError(f"{key}: changed to {weight.label} while it was verified")
    return weight


def _trellis(artifact: Artifact, key: str) -> TrellisTensor:
    """A layer that is known to be a trellis."""
    weight = artifact.weight(key)
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
    return tally.answer()


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
    artifact: Artifact, keys: list[str], source: Source | None, progress: Progress | None
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
    for key in names:
        try:
            errors.append(_layer_error(key, artifact.weight(key), source.weight(key), calibrated))
            _check_bias(key, artifact.bias(key), source.bias(key), tally)
        except ArctoolError as error:
            tally.fail(f"{key}: {error}")
        else:
            _judge(errors[-1], tally)
        tally.count("tensors compared")
        step()
    return tally.answer(), tuple(errors)


def _layer_error(key: str, stored: Weight, original: Weight, calibrated: bool) -> LayerError:
    if stored.shape != original.shape:
        raise FormatError(f"stored as {list(stored.shape)}, the source has {list(original.shape)}")
    return LayerError(key, stored.label, relative_error(stored.dense(), original.dense()), *_limits(stored, calibrated))


def _limits(stored: Weight, calibrated: bool) -> tuple[float | None, float]:
    """(2^(−2·bits) of the rate, None for a dense tensor; the most error that is plausible)."""
    if isinstance(stored, TrellisTensor):
        limit = rate_limit(stored.geometry.bits_per_weight)
        return limit, max(LOSS_FACTOR * limit, CALIBRATED_ERROR if calibrated else 0.0)
    if isinstance(stored, GgmlTensor):
        return rate_limit(stored.type.bits_per_weight), stored.type.worst_error
    return None, DENSE_ERROR


def _judge(error: LayerError, tally: Tally) -> None:
    if not error.relative_error <= error.plausible:
        tally.fail(f"{error.key}: relative error {error.relative_error:.4g} of {error.label}, at most {error.plausible:.4g} is plausible")


def _check_bias(key: str, stored: NDArray[np.float32] | None, original: NDArray[np.float32] | None, tally: Tally) -> None:
    if (stored is None) != (original is None):
        tally.fail(f"{key}: the {'artifact' if original is None else 'source'} has a bias, the other has not")
    elif stored is not None and original is not None:
        tally.count("biases compared")
        if not np.array_equal(stored, original):
            tally.fail(f"{key}: the bias is not the source's")
