"""Every error that a user can meet: what is wrong, where, and what to do. Exit codes are fixed here.

The command line prints `str(error)` as one line and leaves with `error.exit_code`; library callers catch the class.
A message names the culprit first (`file: tensor: field`), then what was expected, what was found and, where it is not
obvious, the remedy.
"""

from __future__ import annotations


class ArctoolError(Exception):
    """Base of all errors that are the user's to read. Anything else that escapes is a fault of ours."""

    exit_code = 1


class UsageError(ArctoolError):
    """An option, rung, recipe or argument that we do not accept."""

    exit_code = 2


class SourceError(ArctoolError):
    """A checkpoint that cannot be used: not a model, unknown architecture, missing tensor, wrong shape, unreadable file."""

    exit_code = 3


class FormatError(ArctoolError):
    """An artifact that is not what its format says: container, header, wire tags, lengths, versions, hashes."""

    exit_code = 4


class GeometryError(FormatError):
    """A trellis, table or tensor whose geometry, dtype or byte count do not agree."""


class VerificationError(ArctoolError):
    """`arctool verify` found a difference, which the report names; or a model that was to be measured gave no finite numbers."""

    exit_code = 5


class StorageError(ArctoolError):
    """A place that cannot be written or read: full disk, permissions, an output that already exists."""

    exit_code = 6


class RequestError(ArctoolError):
    """A generation request that cannot be served: prompt past the context, bad sampling value, unusable template."""

    exit_code = 7


class InterruptedByUser(ArctoolError):
    """Ctrl-C, after everything finished so far was kept. 130 is the shell's convention for SIGINT."""

    exit_code = 130
