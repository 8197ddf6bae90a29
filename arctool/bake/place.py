"""The place where an artifact goes: has this bake been there before, may what is there be replaced, is there room?

Every question is answered before the first layer is rounded. Knows reports, directories and file systems, not weights.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
from pathlib import Path

from arctool.errors import ArctoolError, FormatError, StorageError
from arctool.uqff.answers import Tally
from arctool.uqff.container import SHARD_BYTES, BakeInfo, Report, open_artifact
from arctool.uqff.discovery import CONFIG_NAME, RESIDUAL_NAME, read_text
from arctool.uqff.files import storage_errors
from arctool.uqff.report import REPORT_NAME
from arctool.uqff.report_parse import parse_report
from arctool.uqff.soundness import check_container


def finished_before(output: Path, info: BakeInfo) -> Report | None:
    """The report of a sound artifact at `output` that this very bake has made, so that repeating a finished bake is no error.

    Reads the whole artifact once. Raises StorageError where it is this bake's and damaged.
    """
    return made_before(output, lambda made: _plain(made) == _plain(info))


def made_before(output: Path, ours: Callable[[BakeInfo], bool]) -> Report | None:
    """As `finished_before`, of a bake that is known as `ours` by what its report says of it."""
    with storage_errors(output, "write"):
        if not output.is_dir() or not os.path.lexists(output / REPORT_NAME):
            return None
    try:
        report = _report(output)
    except FormatError as error:
        raise StorageError(f"{output}: exists but is damaged: {error}; choose another -o, or remove it") from error
    if report.bake is None or not ours(report.bake):
        return None
    fault = _fault(output)
    if fault is not None:
        raise StorageError(f"{output}: exists but is damaged: {fault}; run `arctool verify` to see all, or --force to bake it anew")
    return report


def check_free(output: Path, overwrite: bool) -> None:
    """Raise StorageError where `output` exists, or where replacing it would remove a file that its report does not account for."""
    if os.path.lexists(output) and not overwrite:
        raise StorageError(f"{output}: already exists and is not this bake's; choose another -o, or --force to replace an artifact")
    with storage_errors(output, "write"):
        items = sorted(output.iterdir()) if output.is_dir() else []
    if not items:
        return
    try:
        ours = _files(_report(output))
    except FormatError as error:
        raise StorageError(
            f"{output}: holds {items[0].name} and is no artifact that says which files are its own ({error}), so it is not replaced; "
            "remove it yourself or choose another output"
        ) from error
    for item in items:
        if item.name not in ours or not item.is_file():
            raise StorageError(f"{item}: belongs to no artifact and would be lost with the old one; move it away or choose another output")


def check_room(output: Path, layers: Iterable[tuple[int, bool]], kept: int, beside: int = 0) -> None:
    """Raise StorageError where the file system of `output`, whose parent exists, has clearly too little room for a bake.

    `layers`: (bytes, whether the journal keeps it) in the order of the file; `kept`: what the journal holds already; `beside`: what
    calibration needs besides.
    """
    with storage_errors(output, "write"):
        system = os.statvfs(output.parent)
    free, need = system.f_bfree * system.f_frsize, peak_bytes(layers) + beside - kept
    if system.f_blocks and free < need:
        raise StorageError(
            f"{output}: cannot write: No space left on device for this bake: it needs {need} bytes at its peak (journal, artifact, the "
            f"open shard twice, {beside} for calibration), {free} are free; make room or choose another -o"
        )


def peak_bytes(layers: Iterable[tuple[int, bool]]) -> int:
    """The most that a bake has on the disk at once, without headers: the journal, the sealed shards, and the open one twice.

    (The bytes of a shard wait in a spool until its header is known, and are then copied behind it.)
    """
    peak = journal = sealed = shard = 0
    for size, journaled in layers:
        if shard and shard + size > SHARD_BYTES:
            peak = max(peak, journal + sealed + 2 * shard)
            sealed, shard = sealed + shard, 0
        shard += size
        journal += size if journaled else 0
    return max(peak, journal + sealed + 2 * shard)


def _report(output: Path) -> Report:
    """The report in the directory. Raises FormatError where there is none that can be read."""
    return parse_report(read_text(output, REPORT_NAME), str(output / REPORT_NAME))


def _files(report: Report) -> set[str]:
    """Names of the files that a report accounts for."""
    shards = {name for output in report.outputs for name in output.shards}
    texts = set() if report.hashes is None else set(report.hashes.files)
    return shards | texts | {REPORT_NAME, RESIDUAL_NAME, CONFIG_NAME}


def _fault(output: Path) -> str | None:
    """The first thing by which the artifact is not what its report says, hashes included."""
    tally = Tally("container")
    try:
        with open_artifact(output) as artifact, ThreadPoolExecutor() as pool:
            check_container(artifact, None, tally, lambda: None, pool)
    except ArctoolError as error:
        return str(error)
    return next(iter(tally.answer().failures), None)


def _plain(info: BakeInfo) -> str:
    """The info as JSON text, in which a tuple and the list that it is read back as are equal."""
    return json.dumps(asdict(info), sort_keys=True)
