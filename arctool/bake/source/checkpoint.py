"""A checkpoint that has been proven to be a model we know: every expected tensor is there, nothing is dropped silently.

The door to all kinds of sources: `open_checkpoint` takes a Hugging Face directory, a hub id or a GGUF file. Knows architectures
(through their tensor lists), not how anything is quantised.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import re
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from types import TracebackType
from typing import Any

import numpy as np
from numpy.typing import NDArray

from arctool.bake.source.expert_store import unstacked
from arctool.bake.source.gguf_source import open_gguf
from arctool.bake.source.hf_directory import PICKLE_SUFFIXES, open_hf_directory
from arctool.bake.source.hub import fetch_snapshot
from arctool.bake.source.stored import ALL_ROWS, Source, TensorStore, part_of
from arctool.errors import SourceError, UsageError
from arctool.quant.tensor import DenseTensor
from arctool.run.config import ModelConfig
from arctool.run.models import architecture
from arctool.run.models.experts import expert_slices, stack_shape
from arctool.run.models.spec import TensorSpec

HUB_ID = re.compile(r"([A-Za-z0-9][\w.-]*/[\w.-]+?)(?:@([\w./-]+))?")
"""`org/name` or `org/name@revision`."""

TOLERATED = re.compile(r".*\.rotary_emb\.inv_freq")
"""Buffers that old checkpoints carry and that follow from the config."""

LAYER = re.compile(r"model\.layers\.(\w+)\.")

HASH_THREADS = 4
"""Files that are hashed at a time: a disk is kept busy, a machine is not."""

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class SourceRows:
    """A tensor of a source, or some rows of it, that is read when it is asked for its values: what is compared need not be held."""

    store: TensorStore
    name: str
    shape: tuple[int, ...]
    which: slice

    def rows(self, which: slice) -> SourceRows:
        """Some rows of the whole tensor."""
        return replace(self, shape=part_of(self.shape, which)[0], which=which)

    def dense(self) -> NDArray[np.float32]:
        """The values f32. Raises SourceError."""
        return self.store.read(self.name, self.which)


@dataclass(frozen=True)
class SourceStack:
    """All experts' matrices of one kind as a stack [experts, out, in], or some rows of it, counted through all of them."""

    parts: tuple[SourceRows, ...]
    shape: tuple[int, ...]

    def rows(self, which: slice) -> SourceStack:
        """Some rows of the whole stack, as one matrix [n, in]."""
        height, width = self.parts[0].shape
        start, stop, _ = which.indices(height * len(self.parts))
        found = [
            part.rows(slice(max(start - at * height, 0), min(stop - at * height, height)))
            for at, part in enumerate(self.parts)
            if start < (at + 1) * height and at * height < stop
        ]
        return SourceStack(tuple(found), (max(0, stop - start), width))

    def dense(self) -> NDArray[np.float32]:
        """The values f32. Raises SourceError."""
        return np.concatenate([part.dense() for part in self.parts]).reshape(self.shape)


class Checkpoint:
    """An opened, checked source. Tensors are read from the disk on every call; nothing is kept.

    Also a WeightSource (`config`, `weight`, `bias`, `assets`), so that an engine can run the unquantised model.
    """

    def __init__(self, source: Source, origin: str) -> None:
        self.origin = origin
        self.config_json: dict[str, Any] = source.config_json
        refuse_quantised(source)
        self.config = ModelConfig.from_hf(source.config_json, f"{source.where}: config.json")
        self.assets: Mapping[str, bytes] = source.assets
        self.terms = source.terms
        model = architecture(self.config.architecture, f"{source.where}: config.json")
        self.specs: tuple[TensorSpec, ...] = model.tensors(self.config)
        self._experts = model.experts
        self._source = unstacked(source, self.config, model.experts)
        self.ignored = check_tensors(self._source, self.specs, tied=self.config.tie_word_embeddings)

    @cached_property
    def fingerprint(self) -> str:
        """SHA-256 (hex) of the whole source, computed at the first use: seconds for gigabytes that the machine has in memory."""
        return fingerprint(self._source)

    def names(self) -> tuple[str, ...]:
        """Names of the model's tensors, in the architecture's order."""
        return tuple(spec.name for spec in self.specs)

    def tensor(self, name: str) -> NDArray[np.float32]:
        """The values f32 of tensor `name`. Raises SourceError for an unknown name, an unreadable file, NaN or infinity."""
        self._known(name)
        values = self._source.store.read(name)
        finite = np.isfinite(values)
        if not finite.all():
            index = [int(i) for i in np.argwhere(~finite)[0]]
            raise SourceError(
                f"{self.file(name)}: {name}: {int((~finite).sum())} values are NaN or infinite, the first at {index}; "
                "the checkpoint is damaged"
            )
        return values

    def blocks(self, name: str) -> NDArray[np.uint8] | None:
        """The GGML blocks u8 [out, row_bytes] that the source keeps of tensor `name`, None where it keeps plain numbers."""
        self._known(name)
        return self._source.store.blocks(name)

    def stored_dtype(self, name: str) -> str:
        """Storage type of tensor `name` in the source: `F32`, `BF16`, `Q4_1` ..."""
        self._known(name)
        return self._source.store.entries[name].dtype

    def file(self, name: str) -> Path:
        """The file that holds tensor `name`, for messages."""
        self._known(name)
        return self._source.store.entries[name].file

    def lazily(self, key: str) -> SourceRows | SourceStack:
        """The weight of module `key`, or of a stack of experts as an artifact may have it, of which nothing has been read."""
        name = f"{key}.weight"
        if name not in self._source.store.entries and self._experts is not None:
            slices = expert_slices(self.config, self._experts)
            stack = [expert for expert, places in slices if any(place.stack == key and place.alone for place in places)]
            if stack:
                return SourceStack(tuple(self._lazily(expert) for expert in stack), stack_shape(self.config, key))
        return self._lazily(key)

    def _lazily(self, key: str) -> SourceRows:
        name = f"{key}.weight"
        self._known(name)
        return SourceRows(self._source.store, name, self._source.store.entries[name].shape, ALL_ROWS)

    def weight(self, key: str) -> DenseTensor:
        """The weight of module `key` (its tensor's name without `.weight`), f32."""
        return DenseTensor(self.tensor(f"{key}.weight"))

    def bias(self, key: str) -> NDArray[np.float32] | None:
        """The bias f32 [out] of module `key`, None if the architecture gives it none."""
        name = f"{key}.bias"
        return self.tensor(name) if any(spec.name == name for spec in self.specs) else None

    def close(self) -> None:
        """Nothing stays open between reads; here so that callers need not know."""

    def __enter__(self) -> Checkpoint:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()

    def _known(self, name: str) -> None:
        if name not in self._source.store.entries:
            raise SourceError(f"{self._source.where}: no tensor {name}")


def open_checkpoint(source: str, *, revision: str | None = None) -> Checkpoint:
    """Open a Hugging Face directory, a `.gguf` file or a hub id `org/name[@revision]`, and check it against its architecture.

    A path that exists wins over a hub id of the same spelling. Raises SourceError naming file and tensor, UsageError for a
    revision that has nothing to apply to.
    """
    if not source:
        raise SourceError(
            "an empty name: no such file or directory; expected a Hugging Face directory, a .gguf file or a hub id like org/name"
        )
    path = Path(os.path.expanduser(source))
    if source and path.exists():
        if revision is not None:
            raise UsageError(f"{source}: a revision ({revision}) applies to hub ids only, this is a local path")
        return Checkpoint(_open_local(path), str(path.resolve()))
    match = HUB_ID.fullmatch(source)
    if match is None or source.startswith((".", "/", "~")) or source.endswith((".gguf", ".safetensors", ".uqff", *PICKLE_SUFFIXES)):
        raise SourceError(f"{source}: no such file or directory; expected a Hugging Face directory, a .gguf file or a hub id like org/name")
    repo, inline = match.group(1), match.group(2)
    if inline is not None and revision is not None and inline != revision:
        raise UsageError(f"{source}: names revision {inline}, but revision {revision} was asked for; give one of the two")
    directory = fetch_snapshot(repo, inline or revision)
    return Checkpoint(open_hf_directory(directory, label=source), source)


def _open_local(path: Path) -> Source:
    """The source at an existing path."""
    try:
        if path.is_dir():
            if any(path.glob("*.uqff")):
                raise SourceError(f"{path}: holds .uqff files, so it is an artifact; bake needs the original checkpoint")
            return open_hf_directory(path)
        if path.suffix == ".safetensors":
            raise SourceError(f"{path}: a single safetensors file has no config; name the directory that holds it")
        if path.suffix in PICKLE_SUFFIXES:
            raise SourceError(f"{path}: a pickle can run code when it is read and is refused; convert the checkpoint to safetensors")
        if not path.is_file():
            raise SourceError(f"{path}: neither a directory nor a regular file; expected a Hugging Face directory or a .gguf file")
        return open_gguf(path)
    except OSError as error:
        raise SourceError(f"{path}: cannot be read: {error.strerror or error}") from error


def refuse_quantised(source: Source) -> None:
    """Raise SourceError for a checkpoint whose config says that its tensors are not plain numbers."""
    for field in ("quantization_config", "compression_config"):
        quantised = source.config_json.get(field)
        if quantised:
            method = quantised.get("quant_method", "unknown") if isinstance(quantised, dict) else quantised
            raise SourceError(
                f"{source.where}: config.json: {field}: the weights are already quantised ({method}), which this version does "
                "not read; bake from the original checkpoint"
            )


def check_tensors(source: Source, specs: tuple[TensorSpec, ...], *, tied: bool) -> tuple[str, ...]:
    """Compare what is stored with what the architecture expects; return the names that are stored for nothing.

    Raises SourceError for a missing tensor, a wrong shape, a storage type we do not read, and for a stored tensor whose loss
    would change the model: any bias, the head of an untied model, and anything in a layer, one beyond the config's count too.
    """
    entries = source.store.entries
    for spec in specs:
        entry = entries.get(spec.name)
        if entry is None:
            raise SourceError(f"{source.where}: tensor {spec.name} {list(spec.shape)} is missing; the checkpoint is incomplete")
        if entry.shape != spec.shape:
            raise SourceError(f"{entry.file}: {spec.name}: expected shape {list(spec.shape)} by config.json, found {list(entry.shape)}")
        source.store.check_readable(spec.name)
    expected = {spec.name for spec in specs}
    layers = {str(spec.layer) for spec in specs if spec.layer is not None}
    ignored = []
    for name in sorted(entries.keys() - expected):
        if TOLERATED.fullmatch(name) or (tied and name == "lm_head.weight"):
            continue
        layer = LAYER.match(name)
        if layer is not None and layer.group(1) not in layers:
            raise SourceError(
                f"{entries[name].file}: {name}: the model has {len(layers)} layers by config.json, counted from 0, and leaving one out "
                "would change it; check num_hidden_layers"
            )
        if name.endswith(".bias") or layer is not None or name == "lm_head.weight":
            raise SourceError(
                f"{entries[name].file}: {name}: the architecture has no such tensor and leaving it out would change the model; "
                "check architectures and the *_bias fields of config.json"
            )
        ignored.append(name)
    return tuple(ignored)


def fingerprint(source: Source) -> str:
    """A SHA-256 (hex) of config, assets, and the names and every byte of the files: equal for a copy, else different.

    Raises SourceError for a file that cannot be read.
    """
    logger.info("hashing %d files of %s", len(source.files), source.where)
    digest = hashlib.sha256(b"arctool source v2\0")
    for name in sorted(source.assets):
        digest.update(f"{name}\0{len(source.assets[name])}\0".encode() + source.assets[name])
    digest.update(json.dumps(source.config_json, sort_keys=True).encode())
    pool = ThreadPoolExecutor(HASH_THREADS)
    try:
        for path, whole in zip(source.files, pool.map(_hash_file, source.files), strict=True):
            digest.update(os.fsencode(path.name) + b"\0" + whole)
    finally:
        pool.shutdown(cancel_futures=True)
    return digest.hexdigest()


def _hash_file(path: Path) -> bytes:
    """The SHA-256 of a file."""
    try:
        with path.open("rb") as stream:
            return hashlib.file_digest(stream, "sha256").digest()
    except OSError as error:
        raise SourceError(f"{path}: cannot be read: {error.strerror or error}") from error
