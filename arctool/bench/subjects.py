"""What can be measured: an artifact or a checkpoint, opened, with its size on the disk and the bits of every tensor.

Knows where sizes come from in each kind of file; runs no model.
"""

from __future__ import annotations

import math
import os
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from gguf import GGML_QUANT_SIZES, GGMLQuantizationType

from arctool.bake.source.checkpoint import Checkpoint, open_checkpoint
from arctool.quant.tensor import DenseTensor, TrellisTensor, Weight
from arctool.run.llm import ArtifactSource
from arctool.run.models import Role, TensorSpec, architecture
from arctool.run.weights import WeightSource
from arctool.uqff.container import Artifact, open_artifact
from arctool.uqff.discovery import CONFIG_NAME, RESIDUAL_NAME, is_artifact
from arctool.uqff.files import storage_errors
from arctool.uqff.report import REPORT_NAME

PLAIN_TYPES = ("F64", "F32", "F16", "BF16")
"""Storage types of a checkpoint that quantise nothing."""


@dataclass(frozen=True)
class StoredTensor:
    """One tensor as it lies in its file. `bits`: all of its own, with scales and signs, without tables that others share;
    `rate`: bits a weight of the code alone, None where nothing is quantised."""

    spec: TensorSpec
    label: str
    bits: int
    rate: float | None


@dataclass(frozen=True)
class Facts:
    """A model on the disk. `kind`: artifact, GGUF or checkpoint; `nbytes`: of every file that it is made of; bits a weight: of the
    linear layers, and of all tensors."""

    path: str
    name: str
    kind: str
    nbytes: int
    parameters: int
    linear_bits_per_weight: float
    bits_per_weight: float


@dataclass(frozen=True)
class Subject:
    """An opened model."""

    facts: Facts
    source: WeightSource
    tensors: tuple[StoredTensor, ...]

    @property
    def quantised(self) -> tuple[StoredTensor, ...]:
        return tuple(tensor for tensor in self.tensors if tensor.rate is not None)


@contextmanager
def open_subject(path: str) -> Iterator[Subject]:
    """Open an artifact, a checkpoint directory, a GGUF file or a hub id, and take its measures. Raises the errors of each."""
    place = Path(os.path.expanduser(path))
    if is_artifact(place):
        with open_artifact(place) as artifact:
            yield _artifact(path, place, artifact)
    else:
        with open_checkpoint(path) as checkpoint:
            yield _checkpoint(path, place, checkpoint)


def _artifact(path: str, place: Path, artifact: Artifact) -> Subject:
    source = ArtifactSource(artifact)
    tensors = []
    for spec in architecture(source.config.architecture, CONFIG_NAME).tensors(source.config):
        if spec.role is Role.BIAS:
            tensors.append(StoredTensor(spec, "f32", 32 * math.prod(spec.shape), None))
        else:
            weight = source.weight(spec.key)
            tensors.append(StoredTensor(spec, weight.label, weight.stored_bits, _rate(weight)))
    names = {CONFIG_NAME, RESIDUAL_NAME, REPORT_NAME, *artifact.assets, *(shard.path.name for shard in artifact.shards)}
    name = place.resolve().name if place.is_dir() else f"{place.resolve().parent.name}/{place.name}"
    facts = _facts(path, name, "artifact", _size(artifact.directory / name for name in names), tensors)
    return Subject(facts, source, tuple(tensors))


def _checkpoint(path: str, place: Path, checkpoint: Checkpoint) -> Subject:
    tensors = []
    for spec in checkpoint.specs:
        dtype = checkpoint.stored_dtype(spec.name)
        block, block_bytes = GGML_QUANT_SIZES[GGMLQuantizationType[dtype]]
        count = math.prod(spec.shape)
        rate = None if dtype in PLAIN_TYPES else 8 * block_bytes / block
        tensors.append(StoredTensor(spec, dtype.lower(), 8 * block_bytes * count // block, rate))
    files = {checkpoint.file(spec.name) for spec in checkpoint.specs}
    if not place.is_file():
        files |= {file.parent / name for file in tuple(files) for name in (CONFIG_NAME, *checkpoint.assets)}
    name = place.resolve().name.removesuffix(".gguf") if place.exists() else path.split("/")[-1]
    facts = _facts(path, name, "GGUF" if place.is_file() else "checkpoint", _size(files), tensors)
    return Subject(facts, checkpoint, tuple(tensors))


def _rate(weight: Weight) -> float | None:
    if isinstance(weight, DenseTensor):
        return None
    return weight.geometry.bits_per_weight if isinstance(weight, TrellisTensor) else weight.stored_bits / math.prod(weight.shape)


def _size(files: Iterable[Path]) -> int:
    total = 0
    for file in files:
        with storage_errors(file, "read"):
            total += file.stat().st_size if file.is_file() else 0
    return total


def _facts(path: str, name: str, kind: str, nbytes: int, tensors: list[StoredTensor]) -> Facts:
    linear = [tensor for tensor in tensors if tensor.spec.role is Role.LINEAR]
    return Facts(path, name, kind, nbytes, _weights(tensors), _bits(linear), _bits(tensors))


def _weights(tensors: list[StoredTensor]) -> int:
    return sum(math.prod(tensor.spec.shape) for tensor in tensors)


def _bits(tensors: list[StoredTensor]) -> float:
    return sum(tensor.bits for tensor in tensors) / _weights(tensors)
