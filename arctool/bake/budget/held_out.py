"""The text that a budgeted bake measures with, and the other text that it checks its result on. Knows a tokenizer, no model.

Both come from `run/texts/validation.txt`, whose works are in no other text of ours: its first passages, one of each kind, for measuring;
the rest for the check.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from dataclasses import dataclass
from importlib import resources

import numpy as np

from arctool.bake.calibration.text import PASSAGE_BREAK
from arctool.errors import StorageError
from arctool.run.evaluate import cut_windows
from arctool.run.reading import opening_of
from arctool.run.tokenizer import Tokenizer

MEASURED_PASSAGES = 4
"""Dialogue, technical prose, code, literature."""

MEASURED_TOKENS = 256
"""Of each are read at the most: some thousand in all, read once for every group of layers."""

CHECKED_WINDOW = 1024
CHECKED_TOKENS = 8192

Windows = tuple[tuple[int, ...], ...]


@dataclass(frozen=True)
class HeldOut:
    """Windows of token ids, each read with an empty context."""

    measured: Windows
    checked: Windows

    @property
    def digest(self) -> str:
        """SHA-256 (hex) of all ids, window by window."""
        digest = hashlib.sha256()
        for windows in (self.measured, self.checked):
            digest.update(f"{len(windows)}:".encode())
            for window in windows:
                digest.update(f"{len(window)}:".encode() + np.asarray(window, "<i4").tobytes())
        return digest.hexdigest()


def held_out(tokenizer: Tokenizer, context: int) -> HeldOut:
    """The windows for a model whose context is `context` tokens, each begun by BOS where the tokenizer sets one. Raises StorageError."""
    passages = _text().split(PASSAGE_BREAK)
    opening = opening_of(tokenizer)

    def ids(texts: Iterable[str]) -> list[int]:
        return tokenizer.encode(PASSAGE_BREAK.join(texts), add_special_tokens=False)

    size = min(MEASURED_TOKENS, context) - len(opening)
    measured = tuple((*opening, *ids([passage])[:size]) for passage in passages[:MEASURED_PASSAGES])
    checked = ids(passages[MEASURED_PASSAGES:])[:CHECKED_TOKENS]
    return HeldOut(measured, cut_windows(checked, min(CHECKED_WINDOW, context), opening))


def _text() -> str:
    place = resources.files("arctool.run").joinpath("texts", "validation.txt")
    try:
        return place.read_text(encoding="utf-8")
    except OSError as error:
        raise StorageError(f"{place}: cannot be read: {error.strerror or error}; install arctool again") from error
