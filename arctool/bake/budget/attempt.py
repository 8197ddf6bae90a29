"""A bake whose layers stay in its journal: what is searched for, and the model that lies there. Makes no artifact."""

from __future__ import annotations

from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from arctool.bake.calibrated import Bench
from arctool.bake.calibration.token_set import CalibrationSet
from arctool.bake.choices import searched
from arctool.bake.direct import store_directly
from arctool.bake.journal import Journal
from arctool.bake.pipeline import SAMPLED, Progress, Status, baked_tensors, calibration_bytes, identity
from arctool.bake.place import check_room
from arctool.bake.plan import Task, layer_sizes, plan
from arctool.bake.provenance import bake_info
from arctool.bake.recipe import Recipe
from arctool.bake.search.rounding import RungTools
from arctool.bake.source.checkpoint import Checkpoint
from arctool.errors import StorageError
from arctool.quant.codebooks import rung
from arctool.quant.tensor import Weight
from arctool.run.config import ModelConfig
from arctool.uqff.container import BakeInfo


@dataclass(frozen=True)
class Attempt:
    """One bake of `checkpoint`: its recipe, its plan, and what its journal and report call it."""

    checkpoint: Checkpoint
    recipe: Recipe
    tasks: tuple[Task, ...]
    info: BakeInfo
    seed: int
    calibration: CalibrationSet | None

    @classmethod
    def of(cls, checkpoint: Checkpoint, recipe: Recipe, seed: int, calibration: CalibrationSet | None) -> Attempt:
        tasks = plan(checkpoint, recipe)
        calibrating = calibration if any(searched(task.choice.rung) for task in tasks) else None
        info = bake_info(checkpoint, recipe, seed, None if calibrating is None else calibrating.to_json())
        return cls(checkpoint, recipe, tasks, info, seed, calibrating)

    def journal(self, output: Path) -> Journal:
        """The journal of this bake, were its artifact to be `output`."""
        return Journal(output, identity(self.tasks, self.info))

    def share_sampled(self, kept: Journal, journal: Journal) -> None:
        """Give `journal` the windows that the model wrote itself for another bake with the same calibration: they depend on no recipe."""
        if self.calibration is None or not self.calibration.sampled:
            return
        sampled = np.empty((self.calibration.sampled, self.calibration.text.ids.shape[1]), np.int32)
        if journal.load_array(SAMPLED, sampled) is None and kept.load_array(SAMPLED, sampled) is not None:
            journal.store_array(SAMPLED, 0, sampled)

    def fill(self, journal: Journal, output: Path, jobs: int | None, progress: Progress | None, say: Status) -> int:
        """Search every layer into `journal`; gives how many were there already."""
        check_room(output, layer_sizes(self.tasks), journal.stored_bytes(), calibration_bytes(self.checkpoint, self.calibration))
        resumed = 0
        for _, done in baked_tensors(self.checkpoint, self.tasks, self.seed, jobs, journal, self.calibration, say):
            resumed += done.resumed
            if progress is not None:
                progress(done)
        return resumed


@dataclass(frozen=True)
class KeptModel:
    """The model of a bake whose layers are in its journal: a WeightSource that holds no weights, each is read when it is asked for."""

    bench: Bench
    tasks: Mapping[str, Task]
    config: ModelConfig
    assets: Mapping[str, bytes]

    @classmethod
    def of(cls, attempt: Attempt, journal: Journal, pool: ThreadPoolExecutor) -> KeptModel:
        bench = Bench(attempt.checkpoint, attempt.seed, pool, cache(lambda name: RungTools.of(rung(name))), journal)
        tasks = {task.spec.key: task for task in attempt.tasks}
        return cls(bench, tasks, attempt.checkpoint.config, attempt.checkpoint.assets)

    def weight(self, key: str) -> Weight:
        """Raises StorageError where the journal has lost the layer since."""
        task = self.tasks[key]
        if not searched(task.choice.rung):
            return store_directly(self.bench.checkpoint, task.spec, task.choice.rung, self.bench.pool).weight
        layer = self.bench.resume(task)
        if layer is None:
            place = None if self.bench.journal is None else self.bench.journal.directory
            raise StorageError(f"{place}: the layer {key} that was kept here is gone or damaged; run the same command again")
        return layer.tensor

    def bias(self, key: str) -> NDArray[np.float32] | None:
        return self.bench.checkpoint.bias(key)
