"""A directory that appears whole or not at all: written aside, made durable, then renamed into place.

Whatever moment a machine dies at, the target is absent or complete. What a killed run leaves has a name that says so, hurts
nobody, and is removed by the next run for the same target; a live run's directory is locked and is left alone.
"""

from __future__ import annotations

import os
import secrets
import shutil
from pathlib import Path
from typing import Final

from arctool.errors import StorageError
from arctool.uqff.files import storage_errors, sync_directory
from arctool.uqff.locks import try_lock


class Staging:
    """A sibling of `target` to write into. `publish` renames it there; `abandon` removes it. Not reusable."""

    def __init__(self, target: Path, *, overwrite: bool) -> None:
        """Undo what dead runs left, refuse an existing `target` (unless `overwrite`), create and lock the directory."""
        self.target: Final = Path(os.path.abspath(target))
        self._overwrite: Final = overwrite
        recover(self.target)
        check_target(self.target, overwrite=overwrite)
        parent = self.target.parent
        self.path: Final = parent / f".{self.target.name}.arctool-staging-{secrets.token_hex(4)}"
        with storage_errors(parent, "write"):
            parent.mkdir(parents=True, exist_ok=True)
            self.path.mkdir()
            self._lock: int | None = try_lock(self.path)

    def publish(self) -> None:
        """Make everything durable and rename it to the target. Raises StorageError; then the staging directory remains."""
        with storage_errors(self.target, "write"):
            sync_directory(self.path)
            aside = None
            if self._overwrite and self.target.exists():
                aside = self.target.parent / f".{self.target.name}.arctool-old-{secrets.token_hex(4)}"
                os.rename(self.target, aside)
            try:
                os.rename(self.path, self.target)
            except OSError:
                if aside is not None:
                    os.rename(aside, self.target)
                raise
            sync_directory(self.target.parent)
            self._unlock()
            if aside is not None:
                _remove(aside)

    def abandon(self) -> None:
        """Remove the staging directory; never raises, so that it may run while an error is on its way."""
        shutil.rmtree(self.path, ignore_errors=True)
        self._unlock()

    def _unlock(self) -> None:
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None


def recover(target: Path) -> None:
    """Undo what killed runs left beside `target`; to be called before anything is asked of it. Raises StorageError.

    A staging directory whose owner is dead is removed. An old artifact that was moved aside comes back where its replacement never
    came, so that `target` exists again and is refused or replaced now, not after hours of work. While another run for the same target
    is alive, old artifacts are left alone: it may be between its two renames.
    """
    target = Path(os.path.abspath(target))
    with storage_errors(target.parent, "write"):
        items = sorted(target.parent.iterdir()) if target.parent.is_dir() else []
        alive = False
        for item in items:
            if item.name.startswith(f".{target.name}.arctool-staging-") and item.is_dir():
                lock = try_lock(item)
                if lock is None:
                    alive = alive or item.exists()
                else:
                    _remove(item)
                    os.close(lock)
        for item in items:
            if item.name.startswith(f".{target.name}.arctool-old-") and not alive:
                if os.path.lexists(target):
                    _remove(item)
                else:
                    os.rename(item, target)


def check_target(target: Path, *, overwrite: bool) -> None:
    """Raise StorageError where `target` exists and may not be replaced."""
    if os.path.lexists(target) and not overwrite:
        raise StorageError(f"{target}: already exists; choose another place, remove it, or allow overwriting")
    if os.path.lexists(target) and (target.is_symlink() or not target.is_dir()):
        raise StorageError(f"{target}: exists and is not a directory; only an artifact's directory is ever replaced")


def _remove(directory: Path) -> None:
    shutil.rmtree(directory, ignore_errors=True)
