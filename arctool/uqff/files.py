"""Files and directories as an artifact needs them: plain names, regular files, durable writes, every OSError a readable sentence."""

from __future__ import annotations

import errno
import hashlib
import os
import shutil
import stat
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
    """The regular file `name` of `directory`. Refuses separators, `..`, hidden names, and whatever is no regular file.

    A symbolic link is refused wherever it leads, even within the directory: what lies there is then what is read, hashed and shipped, and
    no artifact from elsewhere can have a file of this machine read in its place. Hub caches link to blobs outside: download into a
    directory instead. The directory itself may be reached through links.
    """
    plain = name == os.path.basename(name) and not name.startswith(".") and "\\" not in name and name.isprintable()
    if not name or not plain or len(name.encode()) > 255:
        raise FormatError(f"{directory}: {name[:80]!r} is not a plain file name; an artifact lies in one directory")
    path = directory / name
    with storage_errors(path, "read"):
        try:
            mode = os.lstat(path).st_mode
        except FileNotFoundError as error:
            raise FormatError(f"{path}: the file is missing; the artifact is incomplete") from error
    if stat.S_ISLNK(mode):
        raise FormatError(
            f"{path}: not a regular file but a symbolic link, which an artifact never holds; copy the file itself here "
            "(from a hub: `hf download REPO --local-dir DIR`, formerly `huggingface-cli download`)"
        )
    if not stat.S_ISREG(mode):
        kind = "a directory" if stat.S_ISDIR(mode) else "a pipe" if stat.S_ISFIFO(mode) else "a device or socket"
        raise FormatError(f"{path}: not a regular file but {kind}; copy the file itself here")
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
