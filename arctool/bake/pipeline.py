"""Source to artifact: plan what each tensor gets, round layer after layer with a journal, assemble the container at the end.

The same generator of baked tensors feeds the file writer and the in-memory model, so both hold the same weights. Knows checkpoints,
recipes and the writer's interface; what a layer is searched under is in `calibrated`, what is asked of the output's place in `place`.

On the disk a bake needs the journal (every quantised layer) and the artifact, and while a shard is sealed that shard a second time: for
an artifact of one shard (up to 10 GiB) three times its size. One that is replaced stays until the new one is whole.
"""

from __future__ import annotations

import math
import os
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from arctool.bake.calibrated import Bench, CalibratedLayers, Found, disk_bytes
from arctool.bake.calibration.stream import one_thread_per_call
from arctool.bake.calibration.token_set import CalibrationSet, sample_windows
from arctool.bake.card.measurement import plan_measurement
from arctool.bake.card.publication import publish
from arctool.bake.choices import KEEP, searched
from arctool.bake.direct import store_directly
from arctool.bake.journal import Journal, beside
from arctool.bake.place import check_free, check_room, finished_before
from arctool.bake.plan import Task, layer_sizes, plan
from arctool.bake.provenance import bake_info
from arctool.bake.recipe import Recipe
from arctool.bake.search.ldlq import METHOD, Method
from arctool.bake.search.rounding import RoundedLayer, RungTools
from arctool.bake.source.checkpoint import Checkpoint
from arctool.errors import InterruptedByUser, UsageError
from arctool.quant.codebooks import rung
from arctool.quant.tensor import DenseTensor, Weight
from arctool.run.config import ModelConfig
from arctool.run.models.spec import Role
from arctool.uqff.container import ArtifactWriter, BakeInfo, LayerDetails, Report, recover

SEEDS = 1 << 64


@dataclass(frozen=True)
class LayerDone:
    """Progress: tensor `index` (from 1) of `total`; `relative_error` is None for one that is not quantised,
    `proxy_error` for one without calibration."""

    index: int
    total: int
    key: str
    rung: str
    weights: int
    relative_error: float | None
    proxy_error: float | None
    seconds: float
    resumed: bool


Progress = Callable[[LayerDone], None]
Status = Callable[[str], None]
"""Called with what a bake is busy with while no tensor is finished."""

SAMPLED = "sampled"
"""The journal's name for the windows that the model wrote itself."""


@dataclass(frozen=True)
class BakedTensor:
    """A finished tensor: a layer with its bias, or a residual (a norm, or a router that is not quantised). `searched`: how the search
    fared, if there was one."""

    task: Task
    weight: Weight
    bias: NDArray[np.float32] | None
    relative_error: float | None
    searched: RoundedLayer | None


@dataclass(frozen=True)
class BakeResult:
    """Where the artifact is, what it says of itself, how many layers came from a journal, and what the source had besides.

    `unmeasured`: why this bake measured nothing; what it measured is the report's `quality`.
    """

    path: Path
    report: Report
    resumed: int
    seconds: float
    ignored: tuple[str, ...]
    unmeasured: str | None = None


def bake(
    checkpoint: Checkpoint,
    output: Path,
    recipe: Recipe,
    *,
    seed: int = 0,
    jobs: int | None = None,
    overwrite: bool = False,
    calibration: CalibrationSet | None = None,
    measured: bool | None = None,
    budget: Mapping[str, Any] | None = None,
    progress: Progress | None = None,
    status: Status | None = None,
) -> BakeResult:
    """Write the artifact `output` (a directory that appears whole). Deterministic: source, recipe, seed and calibration give the bytes.
    Without `calibration` every row is rounded by itself. `measured`: whether the card and the report tell how far the result is from its
    source; None leaves that to `measurement.plan_measurement`, and it changes no other byte. `budget`: what the report is to say of how
    the recipe was found (`budget.py`).

    Raises SourceError, UsageError, StorageError; InterruptedByUser after Ctrl-C, with the finished layers kept for a next run.
    """
    began = time.monotonic()
    output = Path(os.path.abspath(output))
    tasks = plan(checkpoint, recipe)
    check_seed(seed)
    calibrating = calibration if any(searched(task.choice.rung) for task in tasks) else None
    info = replace(bake_info(checkpoint, recipe, seed, None if calibrating is None else calibrating.to_json()), budget=budget)
    recover(output)
    journal = Journal(output, identity(tasks, info))
    finished = None if overwrite else finished_before(output, info)
    if finished is not None:
        journal.discard()
        return BakeResult(output, finished, len(tasks), time.monotonic() - began, checkpoint.ignored)
    check_free(output, overwrite)
    reading = plan_measurement(checkpoint, measured, calibrating is not None)
    writer = ArtifactWriter(output, recipe.default, config=checkpoint.config_json, assets=checkpoint.assets, overwrite=overwrite)
    resumed = 0
    with journal:
        with interruptible(journal, tasks), writer:
            check_room(output, layer_sizes(tasks), journal.stored_bytes(), calibration_bytes(checkpoint, calibrating))
            for baked, done in baked_tensors(checkpoint, tasks, seed, jobs, journal, calibrating, status):
                add(writer, baked, recipe)
                resumed += done.resumed
                if progress is not None:
                    progress(done)
            report, unmeasured = publish(writer, checkpoint, tasks, info, reading, status or (lambda _: None))
        journal.remove()
    Journal(beside(output), {}).discard()
    return BakeResult(output, report, resumed, time.monotonic() - began, checkpoint.ignored, unmeasured)


def calibration_bytes(checkpoint: Checkpoint, calibration: CalibrationSet | None) -> int:
    """What calibration needs on the disk."""
    return 0 if calibration is None else disk_bytes(checkpoint.config, calibration.tokens)


def baked_tensors(
    checkpoint: Checkpoint,
    tasks: tuple[Task, ...],
    seed: int,
    jobs: int | None,
    journal: Journal | None,
    calibration: CalibrationSet | None,
    status: Status | None = None,
    method: Method = METHOD,
) -> Iterator[tuple[BakedTensor, LayerDone]]:
    """Bake the plan in order, one layer in memory at a time."""
    pool = ThreadPoolExecutor(jobs or os.cpu_count() or 1)
    bench = Bench(checkpoint, seed, pool, cache(lambda name: RungTools.of(rung(name))), journal, method)
    say = status or (lambda _: None)
    layers: CalibratedLayers | None = None
    try:
        ids = None if calibration is None else calibration_ids(checkpoint, calibration, seed, journal, say)
        with one_thread_per_call():
            for task in tasks:
                began = time.monotonic()
                spec, name = task.spec, task.choice.rung
                found: Found | None = None
                weight: Weight
                if not searched(name):
                    stored = store_directly(checkpoint, spec, name, pool)
                    weight, error = stored.weight, stored.relative_error
                else:
                    follows = layers is not None and spec.role in (Role.LINEAR, Role.ROUTER, Role.HEAD)
                    found = layers.take(task) if layers is not None and follows else bench.find(task)
                    weight, error = found.layer.tensor, found.layer.relative_error
                if spec.role is Role.EMBEDDING and ids is not None:
                    layers = CalibratedLayers(bench, tasks, ids, weight, say)
                bias = None if spec.role is Role.NORM else checkpoint.bias(spec.key)
                baked = BakedTensor(task, weight, bias, error, None if found is None else found.layer)
                yield baked, layer_done(task, len(tasks), baked, time.monotonic() - began, found is not None and found.resumed)
    finally:
        pool.shutdown(wait=True, cancel_futures=True)


def layer_done(task: Task, total: int, baked: BakedTensor, seconds: float, resumed: bool) -> LayerDone:
    """What progress shows of a finished tensor."""
    proxy = None if baked.searched is None else baked.searched.proxy_error
    spec = task.spec
    return LayerDone(
        task.index + 1, total, spec.key, task.choice.rung, math.prod(spec.shape), baked.relative_error, proxy, seconds, resumed
    )


def calibration_ids(checkpoint: Checkpoint, chosen: CalibrationSet, seed: int, journal: Journal | None, say: Status) -> NDArray[np.int32]:
    """All windows i32 [windows, tokens], those that the model writes itself from the journal if they are there."""
    sampled = np.empty((chosen.sampled, chosen.text.ids.shape[1]), np.int32)
    if chosen.sampled and (journal is None or journal.load_array(SAMPLED, sampled) is None):
        sampled = sample_windows(checkpoint, chosen, seed, lambda done, total: say(f"sampling calibration text, {done} of {total} tokens"))
        if journal is not None:
            journal.store_array(SAMPLED, 0, sampled)
    return np.ascontiguousarray(np.concatenate([chosen.text.ids, sampled]))


def add(writer: ArtifactWriter, baked: BakedTensor, recipe: Recipe) -> None:
    """Hand one tensor to the writer, as a layer or as a residual."""
    spec, choice = baked.task.spec, baked.task.choice
    if spec.role in (Role.NORM, Role.ROUTER) and isinstance(baked.weight, DenseTensor):
        writer.add_residual(spec.name, baked.weight)
        return
    details = LayerDetails(
        default_target={Role.LINEAR: recipe.default, Role.ROUTER: KEEP}.get(spec.role, recipe.vocabulary),
        resolved_target=choice.instead_of or choice.rung,
        fallback_reason=choice.reason if choice.fallback else None,
        relative_error=baked.relative_error,
        proxy_error=None if baked.searched is None else baked.searched.proxy_error,
        dropped_rows=0 if baked.searched is None else baked.searched.dropped,
        note=None if baked.searched is None else baked.searched.note,
    )
    writer.add_layer(spec.key, baked.weight, baked.bias, details)


def check_seed(seed: int) -> None:
    """Raise UsageError for a seed that not every reader of the report could hold."""
    if not 0 <= seed < SEEDS:
        raise UsageError(f"--seed: expected 0 to {SEEDS - 1}, found {seed}")


def identity(tasks: tuple[Task, ...], info: BakeInfo) -> dict[str, Any]:
    """What must agree for finished layers to be used again."""
    return {
        "algorithm": info.algorithm,
        "fingerprint": info.fingerprint,
        "seed": info.seed,
        "layers": [[task.spec.key, list(task.spec.shape), task.choice.rung] for task in tasks],
        "tables": info.tables,
        "calibration": info.calibration,
    }


@contextmanager
def interruptible(journal: Journal, tasks: tuple[Task, ...]) -> Iterator[None]:
    """Turn Ctrl-C into an error that says what was kept."""
    try:
        yield
    except KeyboardInterrupt:
        quantised = sum(searched(task.choice.rung) for task in tasks)
        if journal.empty():
            raise InterruptedByUser("interrupted; there was nothing to keep yet") from None
        raise InterruptedByUser(
            f"interrupted; {journal.finished()} of {quantised} layers are kept in {journal.directory}: run the same command to go on"
        ) from None


@dataclass(frozen=True)
class MemoryModel:
    """A baked model that was never written: a WeightSource with the very weights that the artifact would hold."""

    config: ModelConfig
    assets: Mapping[str, bytes]
    weights: Mapping[str, Weight]
    biases: Mapping[str, NDArray[np.float32]]

    def weight(self, key: str) -> Weight:
        return self.weights[key]

    def bias(self, key: str) -> NDArray[np.float32] | None:
        return self.biases.get(key)


def bake_in_memory(
    checkpoint: Checkpoint,
    recipe: Recipe,
    *,
    seed: int = 0,
    jobs: int | None = None,
    calibration: CalibrationSet | None = None,
    method: Method = METHOD,
) -> MemoryModel:
    """Bake without files, for evaluation and for proving that the file changes nothing. `method`: to measure what its parts are worth."""
    weights: dict[str, Weight] = {}
    biases: dict[str, NDArray[np.float32]] = {}
    check_seed(seed)
    for baked, _ in baked_tensors(checkpoint, plan(checkpoint, recipe), seed, jobs, None, calibration, method=method):
        weights[baked.task.spec.key] = baked.weight
        if baked.bias is not None:
            biases[baked.task.spec.key] = baked.bias
    return MemoryModel(checkpoint.config, checkpoint.assets, weights, biases)
