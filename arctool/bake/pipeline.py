"""Source to artifact: plan what each tensor gets, round layer after layer with a journal, assemble the container at the end.

The same generator of baked tensors feeds the file writer and the in-memory model, so both hold the same weights. Knows checkpoints,
recipes and the writer's interface; the rounding itself is in `rounding`, what is asked of the output's place in `place`.

On the disk a bake needs the journal (every quantised layer) and the artifact, and while a shard is sealed that shard a second time: for
an artifact of one shard (up to 10 GiB) three times its size. One that is replaced stays until the new one is whole.
"""

from __future__ import annotations

import math
import os
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import Executor, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from arctool.bake.checkpoint import Checkpoint
from arctool.bake.journal import Journal
from arctool.bake.place import check_free, check_room, finished_before
from arctool.bake.provenance import bake_info
from arctool.bake.recipe import KEEP, Choice, Recipe
from arctool.bake.rounding import RoundedLayer, RungTools, round_layer
from arctool.errors import InterruptedByUser, SourceError, UsageError
from arctool.quant.bf16 import from_bf16, to_bf16
from arctool.quant.codebooks import rung
from arctool.quant.tensor import DenseTensor, Weight
from arctool.run.config import ModelConfig
from arctool.run.models.spec import Role, TensorSpec
from arctool.uqff.container import ArtifactWriter, BakeInfo, LayerDetails, Report, recover

SEEDS = 1 << 64


@dataclass(frozen=True)
class LayerDone:
    """Progress: tensor `index` (from 1) of `total`; `relative_error` is None for one that is not quantised."""

    index: int
    total: int
    key: str
    rung: str
    weights: int
    relative_error: float | None
    seconds: float
    resumed: bool


Progress = Callable[[LayerDone], None]


@dataclass(frozen=True)
class Task:
    """One tensor of the plan and what it gets."""

    index: int
    spec: TensorSpec
    choice: Choice


@dataclass(frozen=True)
class BakedTensor:
    """A finished tensor: a layer with its bias, or a residual (norm)."""

    task: Task
    weight: Weight
    bias: NDArray[np.float32] | None
    relative_error: float | None


@dataclass(frozen=True)
class BakeResult:
    """Where the artifact is, what it says of itself, how many layers came from a journal, and what the source had besides."""

    path: Path
    report: Report
    resumed: int
    seconds: float
    ignored: tuple[str, ...]


def plan(checkpoint: Checkpoint, recipe: Recipe) -> tuple[Task, ...]:
    """Every tensor but the biases (they travel with their layer), in file order. Raises UsageError for a recipe that misfits."""
    recipe.check(checkpoint.specs)
    specs = [spec for spec in checkpoint.specs if spec.role is not Role.BIAS]
    layers = checkpoint.config.num_layers
    return tuple(Task(index, spec, recipe.choose(spec, layers)) for index, spec in enumerate(specs))


def bake(
    checkpoint: Checkpoint,
    output: Path,
    recipe: Recipe,
    *,
    seed: int = 0,
    jobs: int | None = None,
    overwrite: bool = False,
    progress: Progress | None = None,
) -> BakeResult:
    """Write the artifact `output` (a directory that appears whole). Deterministic: source, recipe and seed give the bytes.

    Raises SourceError, UsageError, StorageError; InterruptedByUser after Ctrl-C, with the finished layers kept for a next run.
    """
    began = time.monotonic()
    output = Path(os.path.abspath(output))
    tasks = plan(checkpoint, recipe)
    check_seed(seed)
    info = bake_info(checkpoint, recipe, seed)
    recover(output)
    journal = Journal(output, identity(tasks, info))
    finished = None if overwrite else finished_before(output, info)
    if finished is not None:
        journal.discard()
        return BakeResult(output, finished, len(tasks), time.monotonic() - began, checkpoint.ignored)
    check_free(output, overwrite)
    writer = ArtifactWriter(output, "model", config=checkpoint.config_json, assets=checkpoint.assets, overwrite=overwrite)
    resumed = 0
    with journal:
        with interruptible(journal, tasks), writer:
            check_room(output, layer_sizes(tasks), journal.stored_bytes())
            for baked, done in baked_tensors(checkpoint, tasks, seed, jobs, journal):
                add(writer, baked, recipe)
                resumed += done.resumed
                if progress is not None:
                    progress(done)
            report = writer.finish(info)
        journal.remove()
    return BakeResult(output, report, resumed, time.monotonic() - began, checkpoint.ignored)


def baked_tensors(
    checkpoint: Checkpoint, tasks: tuple[Task, ...], seed: int, jobs: int | None, journal: Journal | None
) -> Iterator[tuple[BakedTensor, LayerDone]]:
    """Bake the plan in order, one layer in memory at a time."""
    tools: dict[str, RungTools] = {}
    pool = ThreadPoolExecutor(jobs or os.cpu_count() or 1)
    try:
        for task in tasks:
            began = time.monotonic()
            spec, name = task.spec, task.choice.rung
            resumed = False
            weight: Weight
            error: float | None = None
            if name == KEEP:
                weight = keep(checkpoint, spec)
            else:
                if name not in tools:
                    tools[name] = RungTools.of(rung(name))
                kit = tools[name]
                layer = journal.load(task.index, spec.key, spec.shape, kit, seed) if journal is not None else None
                resumed = layer is not None
                if layer is None:
                    layer = quantise(checkpoint, spec, kit, seed, pool)
                    if journal is not None:
                        journal.store(task.index, layer)
                weight, error = layer.tensor, layer.relative_error
            bias = None if spec.role is Role.NORM else checkpoint.bias(spec.key)
            done = LayerDone(task.index + 1, len(tasks), spec.key, name, int(np.prod(spec.shape)), error, time.monotonic() - began, resumed)
            yield BakedTensor(task, weight, bias, error), done
    finally:
        pool.shutdown(wait=True, cancel_futures=True)


def quantise(checkpoint: Checkpoint, spec: TensorSpec, tools: RungTools, seed: int, pool: Executor) -> RoundedLayer:
    """A linear layer, rounded. Raises SourceError naming file and tensor."""
    weight = checkpoint.tensor(spec.name)
    try:
        return round_layer(weight, spec.key, tools, seed, pool)
    except SourceError as error:
        raise SourceError(f"{checkpoint.file(spec.name)}: {error}") from error


def keep(checkpoint: Checkpoint, spec: TensorSpec) -> DenseTensor:
    """An unquantised tensor: bf16, except for norms that the source holds wider, which stay f32.

    Raises SourceError where a value is too large for bf16.
    """
    values = checkpoint.tensor(spec.name)
    if spec.role is Role.NORM and checkpoint.stored_dtype(spec.name) != "BF16":
        return DenseTensor(values)
    narrow = to_bf16(values)
    finite = np.isfinite(from_bf16(narrow))
    if not finite.all():
        index = tuple(int(i) for i in np.argwhere(~finite)[0])
        raise SourceError(
            f"{checkpoint.file(spec.name)}: {spec.name}: the value {values[index]} at {list(index)} is larger than bf16 can hold; "
            "the checkpoint is damaged"
        )
    return DenseTensor(narrow)


def layer_sizes(tasks: Iterable[Task]) -> list[tuple[int, bool]]:
    """(bytes of the weights in the shards, whether the journal keeps them too) of every layer: bf16, or streams and scales."""
    sizes = []
    for task in tasks:
        shape, name = task.spec.shape, task.choice.rung
        if task.spec.role is not Role.NORM:
            size = 2 * math.prod(shape) if name == KEEP else shape[0] * (rung(name).geometry.stride(shape[1]) + 4)
            sizes.append((size, name != KEEP))
    return sizes


def add(writer: ArtifactWriter, baked: BakedTensor, recipe: Recipe) -> None:
    """Hand one tensor to the writer, as a layer or as a residual."""
    spec, choice = baked.task.spec, baked.task.choice
    if spec.role is Role.NORM:
        assert isinstance(baked.weight, DenseTensor)
        writer.add_residual(spec.name, baked.weight)
        return
    details = LayerDetails(
        default_target=recipe.default,
        resolved_target=choice.rung,
        fallback_reason=choice.reason if choice.fallback else None,
        relative_error=baked.relative_error,
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
    }


@contextmanager
def interruptible(journal: Journal, tasks: tuple[Task, ...]) -> Iterator[None]:
    """Turn Ctrl-C into an error that says what was kept."""
    try:
        yield
    except KeyboardInterrupt:
        quantised = sum(task.choice.rung != KEEP for task in tasks)
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


def bake_in_memory(checkpoint: Checkpoint, recipe: Recipe, *, seed: int = 0, jobs: int | None = None) -> MemoryModel:
    """Bake without files, for evaluation and for proving that the file changes nothing."""
    weights: dict[str, Weight] = {}
    biases: dict[str, NDArray[np.float32]] = {}
    check_seed(seed)
    for baked, _ in baked_tensors(checkpoint, plan(checkpoint, recipe), seed, jobs, None):
        weights[baked.task.spec.key] = baked.weight
        if baked.bias is not None:
            biases[baked.task.spec.key] = baked.bias
    return MemoryModel(checkpoint.config, checkpoint.assets, weights, biases)
