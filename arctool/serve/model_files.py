"""Whether the files that a running model was read from are still what they were. The model is in memory, so that no change reaches those
who are served; but the operator wants to know that the next start will serve something else."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

WEIGHT_ENDINGS = (".uqff", ".safetensors", ".gguf")


@dataclass(frozen=True)
class Stamp:
    """What tells one state of a file from another without reading it."""

    device: int
    inode: int
    nbytes: int
    modified_ns: int


def stamp(path: Path) -> Stamp | None:
    """None for a file that is not there, or cannot be asked."""
    try:
        found = path.stat()
    except OSError:
        return None
    return Stamp(found.st_dev, found.st_ino, found.st_size, found.st_mtime_ns)


class ModelFiles:
    """The weight files of a model, as they were when it was loaded."""

    def __init__(self, source: Path) -> None:
        paths: list[Path] = []  # of a hub id none: its files lie in the hub's cache, under names of their content
        if source.exists():
            folder = source if source.is_dir() else source.parent
            paths = [source] if source.suffix == ".gguf" else [p for p in sorted(folder.glob("*")) if p.suffix in WEIGHT_ENDINGS]
        self._stamps = {path: found for path in paths if (found := stamp(path)) is not None}

    def changed(self) -> str | None:
        """The name of a file that was written to, replaced or deleted since; None if there is none."""
        return next((path.name for path, before in self._stamps.items() if stamp(path) != before), None)
