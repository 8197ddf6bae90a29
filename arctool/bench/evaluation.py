"""`arctool eval`: how good is a model, and how far from its source? One row a model: size, perplexity, divergence, error of every layer.

Opens, checks and plans before the first weight is loaded; the base is read once for all rows. At any moment one model is in memory,
and of the base, after its turn, only its head and the states that the head reads (`run.divergence.Reference`).
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from arctool.bench.reading import DEFAULT_TOKENS, plan_reading
from arctool.bench.subjects import Facts, StoredTensor, Subject, open_subject
from arctool.errors import ArctoolError, UsageError, VerificationError
from arctool.kernels.registry import Registry, default_registry
from arctool.quant.tensor import DenseTensor, TrellisTensor, Weight
from arctool.run.divergence import Comparison, Reference, compare, reference
from arctool.run.evaluate import perplexity_of, token_logprobs
from arctool.run.models.decoder import CausalLM
from arctool.run.reading import Reading
from arctool.run.weights import load_model
from arctool.uqff.distance import rate_limit, relative_error

Progress = Callable[[str, int, int], None]
"""Called as (what is being done, units done, all units); a unit is a predicted token of one model, or a layer that is compared."""


@dataclass(frozen=True)
class LayerDistance:
    """One quantised layer: ‖W−Ŵ‖²/‖W‖² against the source, and the 2^(−2·bits) of its rate."""

    key: str
    label: str
    bits_per_weight: float
    relative_error: float
    limit: float

    @property
    def ratio(self) -> float:
        """How many times the limit the error is."""
        return self.relative_error / self.limit


@dataclass(frozen=True)
class Failure:
    """Why a model has no numbers, and the exit code of that error."""

    message: str
    exit_code: int


@dataclass(frozen=True)
class Row:
    """One model. `comparison` is None without a source, `layers` empty without one or where none is quantised; a row that failed has
    a `failure` and no numbers."""

    model: Facts
    perplexity: float | None
    comparison: Comparison | None
    layers: tuple[LayerDistance, ...]
    seconds: float
    failure: Failure | None = None

    def to_json(self) -> dict[str, Any]:
        found = self.comparison
        return {
            **asdict(self.model),
            "perplexity": self.perplexity,
            "kl": None if found is None else {"mean": found.kl, "p99": found.kl_p99, "max": found.kl_max},
            "same_top1": None if found is None else found.same_top1,
            "layers": [{**asdict(layer), "ratio": layer.ratio} for layer in self.layers],
            "seconds": self.seconds,
            "failure": None if self.failure is None else self.failure.message,
        }


@dataclass(frozen=True)
class Evaluation:
    """The table. `base_perplexity` is None without a source. `kernels`: calls that each implementation served."""

    reading: Reading
    source: Facts | None
    base_perplexity: float | None
    rows: tuple[Row, ...]
    kernels: Mapping[str, int]

    @property
    def failure(self) -> Failure | None:
        """The first one."""
        return next((row.failure for row in self.rows if row.failure is not None), None)

    def to_json(self) -> dict[str, Any]:
        """docs/quality.md says what each field means; numbers that are not finite are null."""
        text = self.reading
        source = None if self.source is None else {**asdict(self.source), "perplexity": self.base_perplexity}
        value = {
            "text": {
                "name": text.name,
                "tokens": text.tokens,
                "predicted": text.predicted,
                "window": text.window,
                "windows": len(text.windows),
                "opening": list(text.opening),
                "sha256": text.digest,
            },
            "source": source,
            "models": [row.to_json() for row in self.rows],
            "kernels": dict(self.kernels),
        }
        plain: dict[str, Any] = _finite(value)
        return plain


def evaluate(
    paths: Sequence[str],
    *,
    against: str | None = None,
    text: Path | None = None,
    window: int | None = None,
    tokens: int = DEFAULT_TOKENS,
    layers: bool = True,
    registry: Registry | None = None,
    progress: Progress | None = None,
) -> Evaluation:
    """Measure every model of `paths` (artifact, checkpoint directory, GGUF file, hub id), with `against` also its distance from that one.

    What is wrong with options, files and vocabularies is raised before any model is loaded, in the errors of `open_subject` and
    `reading.plan_reading`. A single model that fails later raises; of several, it is a row with a `failure`, and the others go on.
    """
    if not paths:
        raise UsageError("expected at least one model to evaluate, found none")
    kernels = default_registry() if registry is None else registry
    with ExitStack() as opened:
        source = None if against is None else opened.enter_context(open_subject(against))
        subjects = [opened.enter_context(open_subject(path)) for path in paths]
        reading = plan_reading([*([] if source is None else [source]), *subjects], text, window, tokens)
        shared = [() if source is None or not layers else _shared_layers(subject, source) for subject in subjects]
        meter = _Meter(progress, reading.predicted * (len(subjects) + (source is not None)) + sum(map(len, shared)))
        base = None if source is None else _read_base(source, reading, kernels, meter)
        rows = []
        for subject, tensors in zip(subjects, shared, strict=True):
            begun = meter.done
            try:
                rows.append(_row(subject, base, reading, tensors, kernels, meter))
            except ArctoolError as error:
                if len(subjects) == 1:
                    raise
                rows.append(Row(subject.facts, None, None, (), 0.0, Failure(str(error), error.exit_code)))
            meter.reach(subject.facts.name, begun + reading.predicted + len(tensors))
    found = next((row.comparison for row in rows if row.comparison is not None), None)
    facts = None if source is None else source.facts
    return Evaluation(reading, facts, None if found is None else found.base_perplexity, tuple(rows), kernels.engagement())


@dataclass(frozen=True)
class _Base:
    """The model that others are held against, and what it thinks of the text."""

    subject: Subject
    reference: Reference


class _Meter:
    """Counts units over all models and tells `progress`."""

    def __init__(self, progress: Progress | None, total: int) -> None:
        self.done = 0
        self._progress, self._total = progress, total

    def reach(self, label: str, done: int) -> None:
        self.done = done
        if self._progress is not None:
            self._progress(label, done, self._total)

    def stepper(self, label: str) -> Callable[[int, int], None]:
        """A progress of (done, all) that adds to what was done before."""
        before = self.done
        return lambda done, _: self.reach(label, before + done)


def _read_base(source: Subject, reading: Reading, kernels: Registry, meter: _Meter) -> _Base:
    label = f"{source.facts.name} (source)"
    meter.reach(label, 0)
    try:
        return _Base(source, reference(load_model(source.source, kernels), reading.windows, meter.stepper(label)))
    except VerificationError as error:
        raise VerificationError(f"{source.facts.path}: {error}") from error


def _row(subject: Subject, base: _Base | None, reading: Reading, tensors: Sequence[StoredTensor], kernels: Registry, meter: _Meter) -> Row:
    """Measure one model. Raises the errors of loading it, and VerificationError with its path where it gives no numbers."""
    began = time.monotonic()
    facts = subject.facts
    meter.reach(facts.name, meter.done)
    try:
        comparison, perplexity = _predictions(load_model(subject.source, kernels), base, reading, meter.stepper(facts.name))
    except VerificationError as error:
        raise VerificationError(f"{facts.path}: {error}") from error
    layers = () if base is None else _distances(tensors, subject, base.subject, kernels, meter.stepper(f"{facts.name}: layers"))
    return Row(facts, perplexity, comparison, layers, time.monotonic() - began)


def _predictions(
    model: CausalLM, base: _Base | None, reading: Reading, step: Callable[[int, int], None]
) -> tuple[Comparison | None, float]:
    """(the comparison where there is a base, the perplexity)."""
    if base is not None:
        comparison = compare(base.reference, model, reading.windows, step)
        return comparison, comparison.perplexity
    return None, _perplexity(model, reading, step)


def _perplexity(model: CausalLM, reading: Reading, step: Callable[[int, int], None]) -> float:
    scores: list[NDArray[np.float64]] = []
    for number, window in enumerate(reading.windows):
        try:
            scores.append(token_logprobs(model, window))
        except VerificationError as error:
            raise VerificationError(f"window {number}: {error}") from error
        step(sum(score.size for score in scores), reading.predicted)
    return perplexity_of(np.concatenate(scores))


def _shared_layers(subject: Subject, source: Subject) -> tuple[StoredTensor, ...]:
    """The quantised tensors that the source has too, in the same shape."""
    shapes = {tensor.spec.name: tensor.spec.shape for tensor in source.tensors}
    return tuple(tensor for tensor in subject.quantised if shapes.get(tensor.spec.name) == tensor.spec.shape)


def _distances(
    tensors: Sequence[StoredTensor], subject: Subject, source: Subject, kernels: Registry, step: Callable[[int, int], None]
) -> tuple[LayerDistance, ...]:
    """One layer of each model in memory at a time."""
    found = []
    for number, tensor in enumerate(tensors, 1):
        stored, original = (dense_values(part.source.weight(tensor.spec.key), kernels) for part in (subject, source))
        bits = tensor.bits / math.prod(tensor.spec.shape)
        limit = rate_limit(bits if tensor.rate is None else tensor.rate)
        error = relative_error(DenseTensor(stored), DenseTensor(original))
        found.append(LayerDistance(tensor.spec.key, tensor.label, bits, error, limit))
        step(number, len(tensors))
    return tuple(found)


def dense_values(weight: Weight, kernels: Registry) -> NDArray[np.float32]:
    """The weights f32 [out, in] in the original basis; trellis ones by the kernel, which `arctool verify` holds to the oracle's bits."""
    if not isinstance(weight, TrellisTensor):
        return weight.dense()
    rotated = kernels.decode(weight)
    return rotated if weight.rotation is None else weight.rotation.restore(rotated)


def _finite(value: Any) -> Any:
    """`value` for JSON, which has no infinity."""
    if isinstance(value, Mapping):
        return {key: _finite(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_finite(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
