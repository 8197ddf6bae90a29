"""What two artifacts say and hold besides the tensors: facts, config, tables, files. And how bytes are compared."""

from __future__ import annotations

import stat
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np

from arctool.uqff.discovery import CARD_NAME, CONFIG_NAME, RESIDUAL_NAME, read_text
from arctool.uqff.entries import Entry
from arctool.uqff.files import storage_errors
from arctool.uqff.header import parse_json
from arctool.uqff.inspect import Inspection
from arctool.uqff.json_changes import Change, changes
from arctool.uqff.reader import Artifact
from arctool.uqff.report import REPORT_NAME

BLOCK: Final = 1 << 22
"""Bytes that are compared at a time."""

NAMED: Final = 4
"""Places of a report that a note names."""

ONLY_A, ONLY_B, DIFFERS = "only in A", "only in B", "differs"

_FOLLOWS: Final = ("outputs", "arctool.layers.", "arctool.sha256.", "arctool.bits_per_weight.", "arctool.tables.")
"""Parts of a report that differ wherever tensors do."""

_SHOWN: Final = frozenset(("uqff.producer", "arctool.version", "uqff.producer.mistralrs.version"))
"""Metadata of a shard that are facts under another name."""


@dataclass(frozen=True)
class FileDifference:
    """A file, or a table, that only one side has, or whose bytes differ: `what` is `only in A`, `only in B` or `differs`."""

    name: str
    what: str


def equal(a: Entry | None, b: Entry | None) -> bool:
    """Whether two entries are both there and alike in dtype, shape and every byte."""
    if a is None or b is None or (a.dtype, a.shape, a.nbytes) != (b.dtype, b.shape, b.nbytes):
        return False
    left, right = a.raw.reshape(-1), b.raw.reshape(-1)
    return all(np.array_equal(left[at : at + BLOCK], right[at : at + BLOCK]) for at in range(0, left.size, BLOCK))


def facts(a: Artifact, b: Artifact, stock_a: Inspection, stock_b: Inspection) -> Iterator[Change]:
    """What the files say of themselves: versions, producer, how they were baked, how they are laid out."""
    left, right = _facts(a, stock_a), _facts(b, stock_b)
    for name in dict.fromkeys((*left, *right)):
        if left.get(name) != right.get(name):
            yield Change(name, left.get(name), right.get(name))


def _facts(artifact: Artifact, stock: Inspection) -> dict[str, Any]:
    metadata = {**artifact.residual_shard.header.metadata, **artifact.shards[0].header.metadata}
    return {
        "format version": stock.uqff_version,
        "producer": stock.producer,
        "producer version": stock.producer_version,
        "rung": stock.rung,
        "seed": stock.seed,
        "source": stock.source,
        "licence": stock.licence,
        "shards": ", ".join(shard.path.name for shard in artifact.shards),
    } | {f"metadata {name}": value for name, value in metadata.items() if name not in _SHOWN}


def tables(a: Artifact, b: Artifact) -> Iterator[FileDifference]:
    """Tables that one side lacks; under one name their bytes are compared."""
    left, right = _table_entries(a), _table_entries(b)
    for name in dict.fromkeys((*left, *right)):
        if name not in left or name not in right:
            yield FileDifference(name, ONLY_A if name in left else ONLY_B)
        elif not equal(left[name], right[name]):
            yield FileDifference(name, DIFFERS)


def _table_entries(artifact: Artifact) -> dict[str, Entry]:
    names = artifact.table_names()
    return {name: shard.entry(name) for shard in artifact.shards for name in names if name in shard.header.tensors}


def files(a: Artifact, b: Artifact, *, layout: bool, config_differs: bool) -> tuple[tuple[FileDifference, ...], tuple[str, ...]]:
    """(files that differ, notes on them). `layout`: all tensors are equal, so that shards can differ only in how they are laid out."""
    left, right = _plain_files(a), _plain_files(b)
    found: list[FileDifference] = []
    notes: list[str] = []
    for name in sorted(left | right):
        if name not in left or name not in right:
            found.append(FileDifference(name, ONLY_A if name in left else ONLY_B))
        elif not (name == CONFIG_NAME and config_differs) and not _equal_files(a.directory / name, b.directory / name):
            found.append(FileDifference(name, DIFFERS))
            notes += _note(a, b, name)
    for one, other in zip((a.residual_shard, *a.shards), (b.residual_shard, *b.shards), strict=True) if layout else ():
        if not _equal_files(one.path, other.path):
            found.append(FileDifference(one.path.name, DIFFERS))
            notes.append(f"{one.path.name}: the same tensors, laid out differently")
    return tuple(found), tuple(notes)


def _note(a: Artifact, b: Artifact, name: str) -> Iterator[str]:
    """What a person would ask about a file that differs."""
    if name == CARD_NAME:
        yield "the model card differs"
    elif name == CONFIG_NAME:
        yield f"{CONFIG_NAME}: the same values, written differently"
    elif name == REPORT_NAME:
        left, right = (parse_json(read_text(side.directory, name), str(side.directory / name)) for side in (a, b))
        places = [item.name for item in changes(left, right)]
        own = [place for place in places if not place.startswith(_FOLLOWS)]
        more = f" and {len(own) - NAMED} more places" if len(own) > NAMED else ""
        if own:
            yield f"the report differs at {', '.join(own[:NAMED])}{more}"
        else:
            yield "the report differs in what it says of the tensors" if places else "the report is written differently"


def _plain_files(artifact: Artifact) -> set[str]:
    """Names of the directory's files that hold no tensors; hidden ones are nobody's."""
    with storage_errors(artifact.directory, "read"):
        plain = [item for item in artifact.directory.iterdir() if stat.S_ISREG(item.lstat().st_mode)]
        names = {item.name for item in plain if not item.name.startswith(".")}
    return {name for name in names if not name.endswith(".uqff")} - {RESIDUAL_NAME}


def _equal_files(a: Path, b: Path) -> bool:
    with storage_errors(a, "read"), a.open("rb") as left, storage_errors(b, "read"), b.open("rb") as right:
        while True:
            one, other = left.read(BLOCK), right.read(BLOCK)
            if one != other:
                return False
            if not one:
                return True
