"""The trellis layers of a model in file order, each searched under what it sees when calibration text runs through the layers before it.

Joins the stream of hidden states (`calibration.py`), the search (`ldlq.py`) and the journal; knows the plan, not the artifact. After
every decoder layer the journal keeps the hidden states, so that an interrupted bake goes on at the layer where it was.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Executor
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from arctool.bake.calibration.compensation import COMPENSATION_SHRINKAGE, compensated
from arctool.bake.calibration.hessian import LEAST_DAMPING, damping
from arctool.bake.calibration.stream import Calibration, LiveLinear, Measured, Stage
from arctool.bake.choices import searched
from arctool.bake.direct import store_directly
from arctool.bake.journal import Journal
from arctool.bake.plan import Task, bake_rotation
from arctool.bake.search.ldlq import METHOD, Method, feed_layer
from arctool.bake.search.rounding import RoundedLayer, RungTools, round_layer
from arctool.bake.source.checkpoint import Checkpoint
from arctool.errors import SourceError
from arctool.quant.tensor import DenseTensor, Weight
from arctool.run.config import ModelConfig
from arctool.run.models.spec import EMBEDDING_KEY, HEAD_KEY, Role

STREAMS = ("states", "truth")
"""The journal's names for the hidden states before the layer that is next, of the stored and of the unquantised model."""

Tools = Callable[[str], RungTools]


def disk_bytes(config: ModelConfig, tokens: int) -> int:
    """The most that the two streams of `tokens` have on the disk besides the layers: what the journal keeps of both, one of them twice
    while it is replaced, and their unnamed files."""
    kept = 4 * tokens * config.hidden_size
    return len(STREAMS) * (kept + Calibration.scratch_bytes(config, tokens)) + kept


@dataclass(frozen=True)
class Found:
    """A searched tensor, and whether it came from the journal."""

    layer: RoundedLayer
    resumed: bool


@dataclass(frozen=True)
class Bench:
    """What every search needs: source, seed, threads, tables by rung, and the journal of a bake that has one."""

    checkpoint: Checkpoint
    seed: int
    pool: Executor
    tools: Tools
    journal: Journal | None
    method: Method = METHOD

    def resume(self, task: Task) -> RoundedLayer | None:
        """The tensor from the journal, if it is there."""
        if self.journal is None:
            return None
        return self.journal.load(task.index, task.spec.shape, self.tools(task.choice.rung), bake_rotation(task.spec, self.seed))

    def search(self, task: Task, seen: Measured | None) -> RoundedLayer:
        """Search a tensor under what it saw, or round it if nothing is known of that; keep it. Raises SourceError naming its file."""
        spec, tools = task.spec, self.tools(task.choice.rung)
        weight, rotation = self.checkpoint.tensor(spec.name), bake_rotation(spec, self.seed)
        try:
            if seen is None or seen.doubt is not None:
                layer = round_layer(weight, spec.key, tools, rotation, self.pool, None if seen is None else seen.doubt)
            else:
                target = None if seen.change is None else compensated(weight, seen.change, self.pool, self.method.share)
                usable = target is not None and bool(np.isfinite(target).all())
                share = damping(weight.shape[1], seen.rows) if self.method.shrinkage else LEAST_DAMPING
                layer = feed_layer(
                    weight, seen.hessian, spec.key, tools, rotation, self.pool, self.method, target if usable else None, share
                )
        except SourceError as error:
            raise SourceError(f"{self.checkpoint.file(spec.name)}: {error}") from error
        if seen is not None:
            layer = replace(layer, dropped=seen.dropped)
        if self.journal is not None:
            self.journal.store(task.index, layer)
        return layer

    def find(self, task: Task, seen: Measured | None = None) -> Found:
        """From the journal, else by search."""
        layer = self.resume(task)
        return Found(layer, True) if layer is not None else Found(self.search(task, seen), False)


class CalibratedLayers:
    """Searched tensors by task, made as they are asked for, in file order."""

    def __init__(self, bench: Bench, tasks: Iterable[Task], ids: NDArray[np.int32], embedding: Weight, say: Callable[[str], None]) -> None:
        """`ids`: i32 [windows, tokens]; `embedding`: as it will be stored; `say`: told what is being worked on."""
        self._bench = bench
        self._tasks = {task.spec.key: task for task in tasks}
        norms = {
            t.spec.key: store_directly(bench.checkpoint, t.spec, t.choice.rung).weight.dense() for t in tasks_of(self._tasks, Role.NORM)
        }
        scratch = None if bench.journal is None else bench.journal.directory
        shrinkage = COMPENSATION_SHRINKAGE if bench.method.shrinkage else 0.0
        self._calibration = Calibration(bench.checkpoint.config, norms, embedding, ids, bench.pool, scratch, shrinkage)
        truth = bench.method.quantised_prefix and bench.method.share > 0
        source = bench.checkpoint.weight(EMBEDDING_KEY)
        self._truth = Calibration(bench.checkpoint.config, norms, source, ids, bench.pool, scratch) if truth else None
        self._say = say
        self._ready: dict[str, Found] = {}
        self._work = self._layers()

    def take(self, task: Task) -> Found:
        """The searched tensor of a linear layer or an untied head."""
        key = task.spec.key
        while key not in self._ready:
            next(self._work)
        return self._ready.pop(key)

    def _layers(self) -> Iterator[None]:
        """Work stage after stage; yields whenever tensors have become ready."""
        calibration, journal = self._calibration, self._bench.journal
        first = self._first()
        if not first:
            for stream in self._streams():
                stream.embed()
        for layer in range(calibration.layers):
            if layer < first:
                for task in self._searched_in(layer):
                    self._ready[task.spec.key] = self._bench.find(task)
                yield
                continue
            yield from self._stages(layer)
            for name, stream in zip(STREAMS, self._streams(), strict=False):
                stream.release(layer)
                if journal is not None:
                    journal.store_array(name, layer + 1, stream.states)
        if HEAD_KEY in self._tasks:
            yield from self._stages(calibration.layers)

    def _streams(self) -> list[Calibration]:
        return [self._calibration] if self._truth is None else [self._calibration, self._truth]

    def _stages(self, layer: int) -> Iterator[None]:
        true = [None] * len(self._calibration.stages(layer)) if self._truth is None else self._truth.stages(layer)
        for stage, beside in zip(self._calibration.stages(layer), true, strict=True):
            yield from self._stage(stage, beside)

    def _first(self) -> int:
        """The layer before which the journal's hidden states stand, 0 if it has none; only if it has every tensor before that layer too:
        what is missing can be searched as it was only with the states that it saw."""
        journal = self._bench.journal
        found = {None if journal is None else journal.load_array(n, s.states) for n, s in zip(STREAMS, self._streams(), strict=False)}
        first = found.pop() if len(found) == 1 else None
        done = (task for layer in range(first or 0) for task in self._searched_in(layer))
        return first if first is not None and all(self._bench.resume(task) is not None for task in done) else 0

    def _stage(self, stage: Stage, beside: Stage | None) -> Iterator[None]:
        """Measure what a stage sees, search its layers, install them, let their output go on."""
        self._say(f"{stage.linears[0].key}: measuring its input")
        kept = {task.spec.key: self._bench.resume(task) for task in self._searched(stage.linears)}
        truth = None if self._truth is None or beside is None else (self._truth, beside)
        seen, inputs, others = self._calibration.measure(stage, any(layer is None for layer in kept.values()), truth)
        for linear in stage.linears:
            task = self._tasks[linear.key]
            weight: Weight
            if not searched(task.choice.rung):
                weight = store_directly(self._bench.checkpoint, task.spec, task.choice.rung, self._bench.pool).weight
            else:
                known = kept[linear.key]
                found = Found(known, True) if known is not None else Found(self._bench.search(task, seen), False)
                self._ready[linear.key] = found
                weight = found.layer.tensor
            if stage.goes_on:
                source = self._bench.checkpoint
                through = weight if self._bench.method.quantised_prefix else DenseTensor(source.tensor(task.spec.name))
                self._calibration.install(linear.key, through, source.bias(linear.key))
                if self._truth is not None:
                    self._truth.install(linear.key, DenseTensor(source.tensor(task.spec.name)), source.bias(linear.key))
            yield
        self._calibration.advance(stage, inputs)
        if truth is not None:
            truth[0].advance(truth[1], others)

    def _searched_in(self, layer: int) -> list[Task]:
        return self._searched(linear for stage in self._calibration.stages(layer) for linear in stage.linears)

    def _searched(self, linears: Iterable[LiveLinear]) -> list[Task]:
        tasks = [self._tasks[linear.key] for linear in linears]
        return [task for task in tasks if searched(task.choice.rung)]


def tasks_of(tasks: dict[str, Task], role: Role) -> list[Task]:
    """The tasks of tensors with a role."""
    return [task for task in tasks.values() if task.spec.role is role]
