"""How each row of a quality study is made: a context that gives a model to read, with its size and its bits. Measures no divergence.

Our rows are artifacts on the disk, made as `arctool bake` makes them and opened again; only the steps between rounding and the whole
method are made in memory. llama.cpp's rows are files of its quantiser, read by its engine. What is made is thrown away with its row.
"""

from __future__ import annotations

import math
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, replace
from functools import cache, partial
from pathlib import Path
from typing import Any, TypeVar

from arctool.bake.budget.bake import bake_to_budget
from arctool.bake.calibration.token_set import CalibrationSet
from arctool.bake.pipeline import bake, bake_in_memory
from arctool.bake.recipe import Recipe
from arctool.bake.search.ldlq import METHOD, Method
from arctool.bake.source.checkpoint import Checkpoint
from arctool.bench import llama_cpp
from arctool.bench.importance import importance
from arctool.bench.llama_cpp import Importance, Peer
from arctool.bench.study import BAKED, CHECK, PEER, ROUNDED, SOURCE, WEIGHTED, Row
from arctool.bench.subjects import Subject, open_subject
from arctool.kernels.registry import default_registry
from arctool.run.divergence import Predictor
from arctool.run.models.decoder import CausalLM
from arctool.run.models.spec import Role
from arctool.run.reading import Reading
from arctool.run.weights import load_model

Result = TypeVar("Result")

SEED = 0
LADDER_RUNG = "qtip2-v4"
PLAIN = Method(share=0.0, gains=(1.0,), refit=False, quantised_prefix=False, shrinkage=False)
LADDER: Mapping[str, Method] = {
    "feedback between blocks": replace(PLAIN, blocks=True),
    "feedback in every survivor": PLAIN,
    "scales under the true loss": replace(PLAIN, gains=METHOD.gains, refit=True),
    "quantised prefix": Method(share=0.0, shrinkage=False),
    "drift made good": Method(shrinkage=False),
}
"""From rounding to the whole method, each step with one part more; what the last one lacks is damping by the number of rows."""

RATES = ("qtip2.25-v4", "qtip3", "qtip4")
SLOW_RATES = ("qtip2",)

PEER_TYPES = ("Q2_K", "Q3_K_M", "Q4_K_M")
CHECK_TYPE = "F16"
CHECK_KL = 1e-3
"""Nats a token that a file of `CHECK_TYPE` may be away from what it was made from. SmolLM2-135M: 5e-5, F16's own rounding; Q8_0 would be
no check, because llama.cpp then rounds activations to 8 bits too (4e-3, where the same file in f32 arithmetic is at 1e-3)."""


@dataclass(frozen=True)
class Made:
    """A model that can be read. `nbytes`: on the disk, None where nothing was written; `stored`: how many linear layers are stored how;
    `ran`: the counters of what reads it; `seconds`: that making it took, all that it alone or others with it needed."""

    nbytes: int | None
    linear_bits: float
    stored: Mapping[str, int]
    model: CausalLM | Predictor
    ran: Callable[[], Mapping[str, int]]
    seconds: float


@dataclass(frozen=True)
class Work:
    """A row to measure. `most`: a divergence beyond it means that the measurement is wrong; `after`: a row that must have succeeded."""

    model: str
    how: str
    make: Callable[[], AbstractContextManager[Made]]
    most: float | None = None
    after: str | None = None

    @property
    def name(self) -> str:
        return Row(self.model, self.how).name


@dataclass(frozen=True)
class Inputs:
    """What all rows share. `calibration`: with its windows fixed, none left to sample; `folder`: for what is made and thrown away."""

    name: str
    subject: Subject
    checkpoint: Checkpoint
    calibration: CalibrationSet
    reading: Reading
    jobs: int
    folder: Path


@contextmanager
def unquantised(inputs: Inputs) -> Iterator[Made]:
    """The checkpoint itself."""
    registry = default_registry()
    yield of_subject(inputs.subject, load_model(inputs.checkpoint, registry), registry.engagement, 0.0)


@contextmanager
def opened(path: Path, seconds: float) -> Iterator[Made]:
    """An artifact, read by our engine."""
    registry = default_registry()
    with open_subject(str(path)) as subject:
        yield of_subject(subject, load_model(subject.source, registry), registry.engagement, seconds)


@contextmanager
def baked(inputs: Inputs, name: str, calibration: CalibrationSet | None) -> Iterator[Made]:
    """An artifact with every linear layer at rung `name`; without `calibration` every row is rounded by itself."""
    with tempfile.TemporaryDirectory(dir=inputs.folder) as folder:
        target, recipe = Path(folder, "baked"), Recipe.uniform(name)
        done = bake(inputs.checkpoint, target, recipe, seed=SEED, jobs=inputs.jobs, calibration=calibration, measured=False)
        with opened(done.path, done.seconds) as made:
            yield made


@contextmanager
def in_memory(inputs: Inputs, name: str, method: Method) -> Iterator[Made]:
    """The same by another method, which no artifact is made by."""
    recipe, checkpoint, registry = Recipe.uniform(name), inputs.checkpoint, default_registry()
    options: dict[str, Any] = {"seed": SEED, "jobs": inputs.jobs, "calibration": inputs.calibration, "method": method}
    model, seconds = timed(lambda: bake_in_memory(checkpoint, recipe, **options))
    weights = [model.weights[spec.key] for spec in checkpoint.specs if spec.role is Role.LINEAR]
    bits = sum(weight.stored_bits for weight in weights) / sum(math.prod(weight.shape) for weight in weights)
    stored = Counter(weight.label for weight in weights)
    yield Made(None, bits, stored, load_model(model, registry), registry.engagement, seconds)


@contextmanager
def budgeted(inputs: Inputs, bits: float) -> Iterator[Made]:
    """An artifact with a budget of `bits` a weight, allocated on texts that are neither calibration nor what is read here."""
    with tempfile.TemporaryDirectory(dir=inputs.folder) as folder:
        target = Path(folder, "baked")
        done = bake_to_budget(inputs.checkpoint, target, bits, seed=SEED, jobs=inputs.jobs, calibration=inputs.calibration, measured=False)
        with opened(done.path, done.seconds) as made:
            yield made


@contextmanager
def requantised(
    inputs: Inputs, peer: Peer, gguf: Path, file_type: str, weights: Callable[[], tuple[Importance, float]] | None
) -> Iterator[Made]:
    """A file of llama.cpp's quantiser in its own engine; our reader counts its bits. `weights`: importance, and how long it took."""
    with tempfile.TemporaryDirectory(dir=inputs.folder) as folder:
        target = Path(folder, f"{file_type}.gguf")
        given, gathering = (None, 0.0) if weights is None else weights()
        _, seconds = timed(lambda: llama_cpp.requantise(peer, gguf, target, file_type, given))
        with open_subject(str(target)) as subject, llama_cpp.opened(peer, target, inputs.reading.window) as model:
            yield of_subject(subject, model, lambda: dict(model.ran), gathering + seconds)


def of_subject(subject: Subject, model: CausalLM | Predictor, ran: Callable[[], Mapping[str, int]], seconds: float) -> Made:
    """What is on the disk, read by `model`."""
    stored = Counter(tensor.label for tensor in subject.tensors if tensor.spec.role is Role.LINEAR)
    return Made(subject.facts.nbytes, subject.facts.linear_bits_per_weight, stored, model, ran, seconds)


def timed(call: Callable[[], Result]) -> tuple[Result, float]:
    """(what `call` gives, the seconds that it took)."""
    began = time.monotonic()
    found = call()
    return found, time.monotonic() - began


def our_works(inputs: Inputs, slow: bool, budgets: Sequence[float]) -> list[Work]:
    """The ladder, the rates, the mixed budgets."""

    def both(name: str) -> list[Work]:
        return [
            Work(name, ROUNDED, partial(baked, inputs, name, None)),
            Work(name, BAKED, partial(baked, inputs, name, inputs.calibration)),
        ]

    rounded, whole = both(LADDER_RUNG)
    steps = [Work(LADDER_RUNG, how, partial(in_memory, inputs, LADDER_RUNG, method)) for how, method in LADDER.items()]
    rates = [work for name in ((*SLOW_RATES, *RATES) if slow else RATES) for work in both(name)]
    mixed = [Work(f"mixed {bits:g}", BAKED, partial(budgeted, inputs, bits)) for bits in budgets]
    return [Work(inputs.name, SOURCE, partial(unquantised, inputs)), rounded, *steps, whole, *rates, *mixed]


def peer_works(inputs: Inputs, peer: Peer, gguf: Path) -> list[Work]:
    """The check, then each type without and with an importance matrix of our calibration windows, measured once when first needed."""

    @cache
    def weights() -> tuple[Importance, float]:
        return timed(lambda: importance(inputs.checkpoint, inputs.calibration.text.ids, inputs.jobs))

    check = Work(CHECK_TYPE, CHECK, partial(requantised, inputs, peer, gguf, CHECK_TYPE, None), most=CHECK_KL)
    found = [check]
    for name in PEER_TYPES:
        for how, given in ((PEER, None), (WEIGHTED, weights)):
            found.append(Work(name, how, partial(requantised, inputs, peer, gguf, name, given), after=check.name))
    return found
