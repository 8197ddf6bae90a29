"""Writing an artifact: one layer in memory at a time, equal calls give equal bytes, nothing appears before all is durable."""

from __future__ import annotations

import math
import os
import re
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

import arctool
from arctool.errors import FormatError, UsageError
from arctool.quant.tensor import DenseTensor, TrellisTensor, Weight
from arctool.uqff.discovery import CONFIG_NAME, RESIDUAL_NAME, SHADOWS, sanitised
from arctool.uqff.entries import Entry, entry_of, scalar_entry, split_name
from arctool.uqff.families import encode
from arctool.uqff.files import hash_file, write_file
from arctool.uqff.header import check_json
from arctool.uqff.report import (
    REPORT_NAME,
    UQFF_VERSION,
    BakeInfo,
    Hashes,
    LayerDetails,
    LayerRecord,
    Quality,
    Report,
    json_bytes,
    make_output,
)
from arctool.uqff.spool import Spool
from arctool.uqff.staging import Staging, check_target, recover
from arctool.uqff.wire.tables import table_entry, table_name

SHARD_BYTES: Final = 10 << 30
"""Bytes of data after which a new shard begins, as upstream does; a larger single layer makes an oversize shard."""

_PLAIN_NAME: Final = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._+-]{0,127}")


class ArtifactWriter:
    """Streams layers and residual tensors into an artifact: `with ArtifactWriter(...) as w: w.add_layer(...); w.finish(info)`.

    Leaving the block without `finish`, or by any exception, removes everything that was written.
    """

    def __init__(
        self,
        directory: Path,
        stem: str,
        *,
        config: Mapping[str, Any],
        assets: Mapping[str, bytes],
        shard_bytes: int = SHARD_BYTES,
        overwrite: bool = False,
        producer_version: str = arctool.__version__,
    ) -> None:
        """Check the names, undo what a killed run left, check that `directory` is free (StorageError).

        Nothing new is written before the block is entered.

        `config`: the model's config.json; `assets`: file name → bytes, copied as they are.
        """
        for name in (stem, *assets):
            _check_name(name)
        if shard_bytes <= 0:
            raise UsageError(f"a shard needs a positive size, found {shard_bytes}")
        self._directory: Final = Path(os.path.abspath(directory))
        recover(self._directory)
        check_target(self._directory, overwrite=overwrite)
        self._stem, self._shard_bytes, self._overwrite = stem, shard_bytes, overwrite
        check_json(config, CONFIG_NAME)
        self._config = json_bytes(sanitised(config), CONFIG_NAME)
        self._assets = {name: bytes(assets[name]) for name in sorted(assets)}
        self._metadata = {
            "uqff.producer": "arctool",
            "uqff.version": ".".join(map(str, UQFF_VERSION)),
            "arctool.version": producer_version,
        }
        self._layers: dict[str, LayerRecord] = {}
        self._tables: dict[str, str] = {}
        self._entries: dict[str, str] = {}
        self._headers: dict[str, str] = {}
        self._files: dict[str, str] = {}
        self._shard_index = 0
        self._holds_layers = False
        self._staging: Staging | None = None
        self._shard: Spool | None = None
        self._residual: Spool | None = None

    def add_layer(
        self,
        key: str,
        weight: Weight,
        bias: NDArray[np.float32] | None = None,
        details: LayerDetails | None = None,
    ) -> None:
        """Append layer `key` (module path without `.weight`), whole, to the current shard or a new one.

        Raises FormatError or GeometryError for a weight that the format cannot hold or a key that is taken, StorageError.
        """
        details = details or LayerDetails()
        if key in self._layers:
            raise FormatError(f"{key}: the layer is written twice")
        error = details.relative_error
        if error is not None and not (math.isfinite(error) and error >= 0):
            raise FormatError(f"{key}: relative error {error} is not a number from 0 up")
        entries = encode(key, weight, bias)
        _refuse_overlap(key, self._opened(self._residual).digests)
        record = LayerRecord(
            module=key,
            shape=weight.shape,
            stored=weight.label,
            nbytes=sum(entry.nbytes for entry in entries),
            bits_per_weight=weight.stored_bits / math.prod(weight.shape),
            details=details,
        )
        self._append(self._new_table(weight) + entries)
        self._layers[key] = record

    def add_residual(self, name: str, tensor: DenseTensor) -> None:
        """Append a tensor that is no layer, by its full name, in its own type. Raises FormatError, StorageError."""
        split = split_name(name)
        if split is not None and split[0] in self._layers:
            raise FormatError(f"{name}: belongs to layer {split[0]}; give its bias with the layer")
        if not name or not name.isprintable() or len(name) > 512 or name == "__metadata__":
            raise FormatError(f"{name[:80]!r} is not a tensor name: expected 1 to 512 printable characters")
        tensor.check_values(name)
        dtype = "BF16" if tensor.data.dtype == np.uint16 else "F32"
        self._opened(self._residual).add(entry_of(name, dtype, tensor.data))

    @property
    def records(self) -> tuple[LayerRecord, ...]:
        """What the report will say of the layers so far, in the order of the file."""
        return tuple(self._layers.values())

    def seal(self) -> Path:
        """End the layers and write all that is known but the report. Raises StorageError.

        The hidden directory that is returned opens as an artifact without a report; nothing has appeared yet.
        """
        staging = self._opened(self._staging)
        self._seal_shard()
        self._opened(self._residual).seal(self._metadata)
        self._residual = None
        self._files[RESIDUAL_NAME] = hash_file(staging.path / RESIDUAL_NAME)
        for name, data in {CONFIG_NAME: self._config, **self._assets}.items():
            self._files[name] = write_file(staging.path / name, data)
        place: Path = staging.path
        return place

    def add_asset(self, name: str, data: bytes) -> None:
        """Write one more asset after `seal`: one that tells of the layers. Raises UsageError for a name that is taken or cannot be one."""
        _check_name(name)
        if not self._files or name in self._files:
            raise UsageError(f"{name}: {'is in the artifact already' if self._files else 'the layers are not sealed'}")
        self._files[name] = write_file(self._opened(self._staging).path / name, data)

    def finish(self, info: BakeInfo, quality: Quality | None = None) -> Report:
        """Write what remains, the report last, and let the artifact appear. Raises StorageError; then nothing has appeared."""
        if not self._files:
            self.seal()
        staging = self._opened(self._staging)
        report = Report(
            tool="arctool",
            tool_version=self._metadata["arctool.version"],
            uqff_version=self._metadata["uqff.version"],
            outputs=(make_output(info.rung, tuple(self._headers), self.records),),
            base_model=info.base_model,
            bake=info,
            hashes=Hashes(self._entries, self._headers, self._files),
            quality=quality,
        )
        write_file(staging.path / REPORT_NAME, report.to_bytes())
        staging.publish()
        self._staging = None
        return report

    def __enter__(self) -> ArtifactWriter:
        self._staging = Staging(self._directory, overwrite=self._overwrite)
        try:
            self._residual = Spool(self._staging.path / RESIDUAL_NAME)
            self._open_shard()
        except BaseException:
            self._clean()
            raise
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._clean()

    def _clean(self) -> None:
        """Close and remove whatever has not been published."""
        for spool in (self._shard, self._residual):
            if spool is not None:
                spool.discard()
        if self._staging is not None:
            self._staging.abandon()
        self._staging = self._shard = self._residual = None

    def _append(self, entries: list[Entry]) -> None:
        shard, size = self._opened(self._shard), sum(entry.nbytes for entry in entries)
        if self._holds_layers and shard.size + size > self._shard_bytes:
            self._seal_shard()
            self._open_shard()
            shard = self._opened(self._shard)
        for entry in entries:
            shard.add(entry)
        self._holds_layers = True

    def _new_table(self, weight: Weight) -> list[Entry]:
        """The entry of the layer's table where no earlier layer brought it."""
        if not isinstance(weight, TrellisTensor) or weight.codebook.kind == "sum2":
            return []
        digest = weight.codebook.digest
        name = table_name(digest)
        if self._tables.setdefault(name, digest) != digest:
            raise FormatError(f"{name}: two tables share the first half of their SHA-256; they cannot be in one artifact")
        return [] if name in self._entries or name in self._opened(self._shard).digests else [table_entry(weight.codebook)]

    def _open_shard(self) -> None:
        staging = self._opened(self._staging)
        self._shard = Spool(staging.path / f"{self._stem}-{self._shard_index}.uqff")
        self._holds_layers = False
        if self._shard_index == 0:
            for part, value in zip(("major", "minor", "patch"), UQFF_VERSION, strict=True):
                self._shard.add(scalar_entry(f"uqff.version.{part}", "U32", value))
        self._shard_index += 1

    def _seal_shard(self) -> None:
        shard = self._opened(self._shard)
        self._headers[shard.path.name] = shard.seal(self._metadata)
        self._entries.update(shard.digests)
        self._shard = None

    @staticmethod
    def _opened(part: Any) -> Any:
        if part is None:
            raise UsageError("the artifact writer is not open: use it in a `with` block, and not after `finish`")
        return part


def _check_name(name: str) -> None:
    """Raise UsageError for a file name that an artifact cannot have."""
    reserved = {CONFIG_NAME, RESIDUAL_NAME, REPORT_NAME}
    if not _PLAIN_NAME.fullmatch(name) or name in reserved or name.endswith(".uqff") or SHADOWS.fullmatch(name):
        raise UsageError(f"{name!r} cannot name a file of an artifact: reserved, hiding weights, or no plain name")


def _refuse_overlap(key: str, residual: Mapping[str, str]) -> None:
    for name in (f"{key}.weight", f"{key}.bias"):
        if name in residual:
            raise FormatError(f"{key}: {name} is among the residual tensors already; a tensor has one place")
