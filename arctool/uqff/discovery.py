"""Which files make up an artifact: from a directory, a shard or a report to the shards, refusing gaps, strays and guesses."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from arctool.errors import FormatError, StorageError, UsageError
from arctool.uqff.files import inside, storage_errors
from arctool.uqff.header import parse_json
from arctool.uqff.report import REPORT_NAME, Output, Report
from arctool.uqff.report_parse import parse_report

RESIDUAL_NAME: Final = "residual.safetensors"
CONFIG_NAME: Final = "config.json"
CARD_NAME: Final = "README.md"
"""The model card, which a hub shows and no loader reads."""
MAX_TEXT: Final = 1 << 28
"""Bytes of the largest JSON file or asset that is read into memory."""

SHADOWS: Final = re.compile(r".*model.*\.safetensors(\.index\.json)?|consolidated.*\.safetensors|.*\.(bin|pt|pth|ckpt|gguf)", re.IGNORECASE)
"""Files that mistral.rs or transformers would load instead of ours, silently."""

_INDEXED: Final = re.compile(r"(?P<stem>.+)-(?P<index>0|[1-9]\d*)\.uqff")


@dataclass(frozen=True)
class Found:
    """The files of one output: `shards` in order; `report` and `output` (its part of the report) are None without a report."""

    directory: Path
    shards: tuple[str, ...]
    report: Report | None
    output: Output | None


def is_artifact(path: Path) -> bool:
    """Whether `path` looks like one: a `.uqff` file, or a directory that holds one. Says nothing of its soundness."""
    return path.suffix == ".uqff" or (path.is_dir() and any(path.glob("*.uqff")))


def discover(path: Path) -> Found:
    """The artifact that `path` (directory, shard or report) means. Raises StorageError, UsageError, FormatError."""
    with storage_errors(path, "read"):
        if not path.exists():
            raise StorageError(f"{path}: no such file or directory; expected an artifact's directory or one of its .uqff files")
        directory = path if path.is_dir() else path.parent
        names = sorted(item.name for item in directory.iterdir())
    present = [name for name in names if name.endswith(".uqff")]
    if not path.is_dir() and path.name != REPORT_NAME and not path.name.endswith(".uqff"):
        raise UsageError(f"{path}: not an artifact; expected a directory, a .uqff file or {REPORT_NAME}")
    named = path.name if not path.is_dir() and path.name != REPORT_NAME else None
    if not present:
        raise FormatError(f"{directory}: no .uqff file in it; not an artifact (a checkpoint is baked by `arctool bake`)")
    if REPORT_NAME in names:
        report = parse_report(read_text(directory, REPORT_NAME), str(directory / REPORT_NAME))
        output = _output_of(report, named, present, directory)
        return Found(directory, output.shards, report, output)
    return Found(directory, _shards_without_report(named, present, directory), None, None)


def read_text(directory: Path, name: str) -> bytes:
    """A small file of the artifact, whole. Raises FormatError where it is missing, no plain file, or too large."""
    path = inside(directory, name)
    with storage_errors(path, "read"):
        size = path.stat().st_size
        if size > MAX_TEXT:
            raise FormatError(f"{path}: {size} bytes; a text of an artifact has at most {MAX_TEXT}")
        return path.read_bytes()


def read_config(directory: Path) -> dict[str, Any]:
    """The model's config.json, sanitised. Raises FormatError."""
    config: dict[str, Any] = sanitised(parse_json(read_text(directory, CONFIG_NAME), str(directory / CONFIG_NAME)))
    return config


def sanitised(config: Any) -> Any:
    """`config` without any `quantization_config`, at any depth: it describes the source's weights, not ours."""
    if isinstance(config, Mapping):
        return {key: sanitised(value) for key, value in config.items() if key != "quantization_config"}
    if isinstance(config, list | tuple):
        return [sanitised(value) for value in config]
    return config


def asset_names(directory: Path, report: Report | None) -> tuple[str, ...]:
    """Names of tokenizer and template files: what the report lists, else every text file that is nothing else."""
    if report is not None and report.hashes is not None:
        return tuple(sorted(set(report.hashes.files) - {RESIDUAL_NAME, CONFIG_NAME}))
    taken = {CONFIG_NAME, REPORT_NAME}
    with storage_errors(directory, "read"):
        names = sorted(item.name for item in directory.iterdir() if item.suffix in (".json", ".jinja", ".txt", ".model"))
    return tuple(name for name in names if name not in taken and not name.startswith(".") and not SHADOWS.fullmatch(name))


def _output_of(report: Report, named: str | None, present: list[str], directory: Path) -> Output:
    known = {name for output in report.outputs for name in output.shards}
    stray = sorted(set(present) - known)
    if stray:
        raise FormatError(f"{directory}: {stray[0]} is not in {REPORT_NAME}; remove it, or the report if that is the stranger")
    if named is None and len(report.outputs) > 1:
        first = ", ".join(output.shards[0] for output in report.outputs)
        raise UsageError(f"{directory}: holds {len(report.outputs)} outputs; name one by its file: {first}")
    output = next(output for output in report.outputs if named is None or named in output.shards)
    for name in output.shards:
        if not name.endswith(".uqff"):
            raise FormatError(f"{directory / REPORT_NAME}: shard {name!r} is not a .uqff file")
        inside(directory, name)
    return output


def _shards_without_report(named: str | None, present: list[str], directory: Path) -> tuple[str, ...]:
    """Shards `<stem>-0.uqff` … without a gap, or the one un-indexed file."""
    groups: dict[str, dict[int, str]] = {}
    for name in present:
        match = _INDEXED.fullmatch(name)
        stem, index = (match["stem"], int(match["index"][:9])) if match else (name, 0)
        groups.setdefault(stem, {})[index] = name
    if named is None and len(groups) > 1:
        raise UsageError(f"{directory}: holds {len(groups)} outputs; name one by its file: {', '.join(present)}")
    group = next(group for group in groups.values() if named is None or named in group.values())
    for index in range(len(group)):
        if index not in group:
            sibling = next(iter(group.values()))
            raise FormatError(f"{directory}: shard {index} beside {sibling} is missing; the artifact is incomplete")
    for name in group.values():
        inside(directory, name)
    return tuple(group[index] for index in range(len(group)))
