"""Reading an artifact: shards mapped, names indexed and checked, weights decoded one at a time when asked for.

Opening reads headers only. What a layer's entries mean is `families`' affair; which files belong together is `discovery`'s.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import TracebackType
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from arctool.errors import FormatError
from arctool.quant.codebooks import Codebook
from arctool.quant.tensor import DenseTensor, GgmlTensor, Weight
from arctool.uqff.discovery import RESIDUAL_NAME, asset_names, discover, read_config, read_text
from arctool.uqff.entries import Entry, check_key, expect, split_name
from arctool.uqff.families import aligned, bias_shape, decode, decode_bias
from arctool.uqff.files import inside
from arctool.uqff.report import UQFF_VERSION, Output, Report
from arctool.uqff.sections import TableRef
from arctool.uqff.shard import Shard
from arctool.uqff.wire.plain import plain_weight
from arctool.uqff.wire.tables import read_table, table_name

_VERSION_NAMES: Final = ("uqff.version.major", "uqff.version.minor", "uqff.version.patch")
_TABLE_ENTRY: Final = re.compile(r"arctool\.table\.[0-9a-f]{16}")


class AssetFiles(Mapping[str, bytes]):
    """File name → bytes, read from the directory when asked for."""

    def __init__(self, directory: Path, names: tuple[str, ...]) -> None:
        self._directory, self._names = directory, names

    def __getitem__(self, name: str) -> bytes:
        if name not in self._names:
            raise KeyError(name)
        return read_text(self._directory, name)

    def __iter__(self) -> Iterator[str]:
        return iter(self._names)

    def __len__(self) -> int:
        return len(self._names)


class Artifact:
    """An open artifact. Not for writing; arrays that it gives out are views of mapped files where alignment allows."""

    def __init__(self, path: Path, *, resident: bool = False) -> None:
        """Open the files that `path` means; check names, versions, headers. Raises StorageError, UsageError, FormatError.

        `resident`: weights are read into memory, so that what happens to the files later cannot reach them.
        """
        found = discover(path)
        self.directory: Final[Path] = found.directory
        self.report: Final[Report | None] = found.report
        self.output: Final[Output | None] = found.output
        self.shards: Final = tuple(Shard(inside(found.directory, name), resident=resident) for name in found.shards)
        self.residual_shard: Final = Shard(inside(found.directory, RESIDUAL_NAME), resident=resident)
        self.config_json: Final[dict[str, Any]] = read_config(found.directory)
        self.assets: Final[Mapping[str, bytes]] = AssetFiles(found.directory, asset_names(found.directory, found.report))
        self.version: Final = _read_version(self.shards)
        self._layers, self._tables = _index(self.shards)
        self._pool: dict[TableRef, Codebook] = {}
        self._check_residual()
        for name in self.assets:
            inside(found.directory, name)

    def keys(self) -> tuple[str, ...]:
        """The layers' keys (module paths), in the order of the file."""
        return tuple(self._layers)

    def residual_names(self) -> tuple[str, ...]:
        """Full names of the tensors that are no layers: norms and the like."""
        return tuple(self.residual_shard.header.tensors)

    def table_names(self) -> tuple[str, ...]:
        """Entry names of the tables that the artifact holds."""
        return tuple(self._tables)

    def entries(self, key: str) -> dict[str, Entry]:
        """The entries of layer `key` by full name. Raises FormatError for a key that is no layer's."""
        if key not in self._layers:
            raise FormatError(f"{self.directory}: no layer {key!r} among {len(self._layers)}; `arctool inspect` lists them")
        return {name: shard.entry(name) for name, shard in self._layers[key].items()}

    def weight(self, key: str) -> Weight:
        """The weight of layer `key`, else the residual tensor `<key>.weight`. Raises FormatError, GeometryError."""
        if key not in self._layers:
            return aligned(self.residual_form(f"{key}.weight"))
        return decode(key, self.entries(key), self.table, self.where(key))

    def form(self, key: str) -> Weight:
        """As `weight`, by what the layer's small entries say: no scale and no code has been looked at."""
        if key not in self._layers:
            return self.residual_form(f"{key}.weight")
        return decode(key, self.entries(key), self.table, self.where(key), values=False)

    def release(self, key: str) -> None:
        """Tell the system that the pages of layer `key`, or of that residual tensor, will not be needed soon."""
        for name, shard in self._layers.get(key, {}).items():
            shard.release(name)
        for name in {key, f"{key}.weight", f"{key}.bias"} & self.residual_shard.header.tensors.keys():
            self.residual_shard.release(name)

    def bias(self, key: str) -> NDArray[np.float32] | None:
        """The bias f32 [out] of layer `key`, else of the residual's `<key>.bias`; None where neither is."""
        name = f"{key}.bias"
        if key in self._layers:
            if name not in self._layers[key]:
                return None
            return decode_bias(key, self.entries(key), self.form(key).shape, self.where(key))
        return self.residual(name).dense() if name in self.residual_shard.header.tensors else None

    def bias_shape(self, key: str) -> tuple[int, ...] | None:
        """The shape of what `bias` gives, by what headers and the layer's small entries say."""
        if key in self._layers:
            return bias_shape(key, self.entries(key), self.form(key).shape, self.where(key))
        info = self.residual_shard.header.tensors.get(f"{key}.bias")
        return None if info is None else info.shape

    def residual(self, name: str) -> DenseTensor:
        """A residual tensor by its full name, f32 or bf16 as stored (f16 widens to f32). Raises FormatError."""
        weight = aligned(self.residual_form(name))
        return weight if isinstance(weight, DenseTensor) else DenseTensor(weight.dense())

    def residual_form(self, name: str) -> DenseTensor | GgmlTensor:
        """As `residual`, as it lies in the file: a view, and f16 matrices stay f16. No value has been looked at."""
        if name not in self.residual_shard.header.tensors:
            raise FormatError(f"{self.directory}: tensor {name!r} is neither a layer nor in {RESIDUAL_NAME}")
        return plain_weight(self.residual_shard.entry(name), f"{self.residual_shard.path}: {name}")

    def table(self, ref: TableRef) -> Codebook:
        """The table that a layer refers to, read and checked once. Raises FormatError where it is missing or altered."""
        if ref not in self._pool:
            name = table_name(ref.sha256)
            if name not in self._tables:
                raise FormatError(f"{self.directory}: table {name} is missing, and a layer needs it; bake again")
            shard = self._tables[name]
            self._pool[ref] = read_table(shard.entry(name), ref, str(shard.path))
        return self._pool[ref]

    def close(self) -> None:
        """Let go of the mappings; arrays already handed out stay valid."""
        for shard in (*self.shards, self.residual_shard):
            shard.close()

    def __enter__(self) -> Artifact:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()

    def where(self, key: str) -> str:
        """The shard that holds layer `key`, for messages."""
        return str(next(iter(self._layers[key].values())).path)

    def _check_residual(self) -> None:
        """A tensor in both places would be read from one and silently ignored in the other (upstream drops such biases)."""
        for name in self.residual_names():
            split = split_name(name)
            if split is not None and split[0] in self._layers:
                raise FormatError(f"{self.residual_shard.path}: {name} belongs to layer {split[0]} of the shards")


def open_artifact(path: Path, *, resident: bool = False) -> Artifact:
    """Open the artifact at `path`: its directory, one of its `.uqff` shards, or its report. See `Artifact`."""
    return Artifact(Path(path), resident=resident)


def _index(shards: tuple[Shard, ...]) -> tuple[dict[str, dict[str, Shard]], dict[str, Shard]]:
    """(layer key → entry name → shard, table entry name → shard). Every entry must be somebody's, once."""
    layers: dict[str, dict[str, Shard]] = {}
    tables: dict[str, Shard] = {}
    for shard in shards:
        for name in shard.header.tensors:
            if name in _VERSION_NAMES:
                continue
            split = split_name(name)
            if _TABLE_ENTRY.fullmatch(name):
                owner = tables
            elif split is not None:
                owner = layers.setdefault(split[0], {})
            else:
                raise FormatError(f"{shard.path}: entry {name!r} belongs to no layer and no table; it may need a newer arctool")
            if name in owner:
                raise FormatError(f"{shard.path}: entry {name} occurs in {owner[name].path.name} too; a tensor has one place")
            owner[name] = shard
    for key, names in layers.items():
        name, shard = next(iter(names.items()))
        try:
            check_key(key)
        except FormatError as error:
            raise FormatError(f"{shard.path}: {name}: {error}") from error
        if f"{key}.weight.format" not in names:
            raise FormatError(f"{shard.path}: {name} belongs to layer {key}, which has no {key}.weight.format")
    return layers, tables


def _read_version(shards: tuple[Shard, ...]) -> tuple[int, int, int]:
    """major, minor, patch: in any shard, equal where repeated. Raises FormatError with newer or older in it."""
    found: dict[str, tuple[int, Path]] = {}
    for shard in shards:
        for name in _VERSION_NAMES:
            if name in shard.header.tensors:
                value = int(expect(shard.entry(name), "U32", (), str(shard.path)))
                if found.setdefault(name, (value, shard.path))[0] != value:
                    first, path = found[name]
                    raise FormatError(f"{shard.path}: {name} is {value}, {path.name} says {first}; the shards do not match")
    for name in _VERSION_NAMES:
        if name not in found:
            raise FormatError(f"{shards[0].path}: {name} is missing: older than UQFF 1.0, or no UQFF; make it again")
    major, minor, patch = (found[name][0] for name in _VERSION_NAMES)
    ours = ".".join(map(str, UQFF_VERSION))
    if (major, minor) > UQFF_VERSION[:2] or major != UQFF_VERSION[0]:
        age = "newer" if (major, minor) > UQFF_VERSION[:2] else "older"
        raise FormatError(f"{shards[0].path}: UQFF {major}.{minor}.{patch} is {age} than this version reads (1.0 to {ours})")
    return major, minor, patch
