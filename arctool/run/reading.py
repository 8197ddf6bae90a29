"""The text that ships for measuring models, as windows of tokens. No model runs here, and no calibration ever reads it.

What `arctool eval` reads first of it is what a bake reads for its model card, so that both tell the same numbers.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from importlib import resources

import numpy as np

from arctool.errors import StorageError
from arctool.run.evaluate import cut_windows
from arctool.run.tokenizer import Tokenizer

BUILT_IN = "evaluation.txt"

WINDOW = 1024
"""Tokens that are read at a time where a model's context takes so many."""


@dataclass(frozen=True)
class Reading:
    """What every model of a measurement reads. `opening`: tokens that begin each window, the tokenizer's BOS where it sets one;
    `digest`: SHA-256 of all tokens of the windows as little-endian i32: equal digests and windows, equal tests."""

    name: str
    window: int
    opening: tuple[int, ...]
    windows: tuple[tuple[int, ...], ...]

    @property
    def tokens(self) -> int:
        return sum(map(len, self.windows))

    @property
    def predicted(self) -> int:
        """Tokens that count: all but the first one of each window."""
        return self.tokens - len(self.windows)

    @property
    def digest(self) -> str:
        return hashlib.sha256(np.concatenate(self.windows).astype("<i4").tobytes()).hexdigest()


def built_in_reading(tokenizer: Tokenizer, context: int, windows: int) -> Reading:
    """The first `windows` windows of the text that ships, of `WINDOW` tokens or of the model's `context` if that is shorter.

    Raises RequestError where the tokenizer leaves nothing to predict, StorageError.
    """
    length, opening = min(WINDOW, context), opening_of(tokenizer)
    ids = tokenizer.encode(built_in_text(), add_special_tokens=False)[: wanted_tokens(windows * length, length, opening)]
    return Reading(BUILT_IN, length, opening, cut_windows(ids, length, opening))


def wanted_tokens(tokens: int, window: int, opening: tuple[int, ...]) -> int:
    """How many tokens of a text make `tokens` tokens in windows of `window` that each begin with `opening`."""
    return max(1, tokens - len(opening) * -(-tokens // window))


def opening_of(tokenizer: Tokenizer) -> tuple[int, ...]:
    """The BOS token where the tokenizer puts one before every text: such a model was never trained on windows without it."""
    named = tokenizer.special.get("bos_token")
    bos = None if named is None else tokenizer.token_id(named)
    first = tokenizer.encode("", add_special_tokens=True)[:1]
    return tuple(first) if first == [bos] else ()


def built_in_text() -> str:
    """The text. Raises StorageError where the installation lacks it."""
    place = resources.files("arctool.run").joinpath("texts", BUILT_IN)
    try:
        return place.read_text(encoding="utf-8")
    except OSError as error:
        raise StorageError(f"{place}: cannot be read: {error.strerror or error}; install arctool again, or give --text FILE") from error
