"""Files and directories as an artifact needs them: plain names only, durable writes, every OSError a readable sentence."""

from __future__ import annotations

import errno
import hashlib
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO

from arctool.errors import FormatError, StorageError


@contextmanager
def storage_errors(path: Path, action: str) -> Iterator[None]:
    """Turn an OSError about `path` into a StorageError with the system's reason and, for a write, the free bytes."""
    try:
        yield
    except OSError as error:
        raise StorageError(f"{path}: cannot {action}: {error.strerror or error}{_free(path, action, error)}") from error


def _free(path: Path, action: str, error: OSError) -> str:
    if action.startswith("read") or error.errno in (errno.ENOENT, errno.ENOTDIR):
        return ""
    for place in (path, *path.parents):
        try:
            return f"; {shutil.disk_usage(place).free} bytes are free there"
        except OSError:
            continue
    return ""


def inside(directory: Path, name: str) -> Path:
    """The regular file `name` of `directory`. Refuses separators, `..`, hidden names and links that leave the directory."""
    if not name or name != os.path.basename(name) or name.startswith(".") or "\\" in name or not name.isprintable():
        raise FormatError(f"{directory}: {name!r} is not a plain file name; an artifact lies in one directory")
    path = directory / name
    with storage_errors(path, "read"):
        real = Path(os.path.realpath(path))
        if not path.exists():
            raise FormatError(f"{path}: the file is missing; the artifact is incomplete")
        if real.parent != Path(os.path.realpath(directory)) or not real.is_file():
            raise FormatError(f"{path}: not a regular file of this directory (it leads to {real}); copy the file itself here")
    return path


def sync(file: IO[bytes]) -> None:
    """Flush `file` through to the disk. Raises OSError."""
    file.flush()
    os.fsync(file.fileno())


def sync_directory(path: Path) -> None:
    """Make the directory's names durable. Raises OSError."""
    handle = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def write_file(path: Path, *parts: bytes | memoryview) -> str:
    """Write and fsync a whole file, part after part; returns its SHA-256 (hex). Raises StorageError."""
    digest = hashlib.sha256()
    with storage_errors(path, "write"), path.open("wb") as file:
        for part in parts:
            file.write(part)
            digest.update(part)
        sync(file)
    return digest.hexdigest()


def hash_file(path: Path) -> str:
    """SHA-256 (hex) of a file, in bounded memory. Raises StorageError."""
    with storage_errors(path, "read"), path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
