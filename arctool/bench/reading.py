"""The text of a measurement as windows of tokens: which file, whose tokenizer, how cut. No model runs here.

The tokens are those of one tokenizer, and every other model of the same measurement must cut the text into the very same ones:
a perplexity of other tokens is another unit, and a divergence of other tokens means nothing.
"""

from __future__ import annotations

import codecs
from collections.abc import Sequence
from pathlib import Path

from arctool.bench.subjects import Subject
from arctool.errors import SourceError, UsageError
from arctool.run.evaluate import cut_windows
from arctool.run.reading import BUILT_IN, WINDOW, Reading, built_in_text, opening_of, wanted_tokens
from arctool.run.tokenizer import TOKENIZER_FILE, Tokenizer

DEFAULT_TOKENS = 8192

BYTES_A_TOKEN = 32
"""Read of a file at first for each token that is wanted; ordinary text needs four. Too few, and twice as much is read."""

MAX_TEXT = 1 << 26
"""Bytes of a text that are read at the most."""


def plan_reading(subjects: Sequence[Subject], text: Path | None, window: int | None, tokens: int) -> Reading:
    """The windows that all `subjects` read: `tokens` tokens from the start of `text` (None: the text that ships with arctool).

    `window` None: 1024 tokens, or less where a model's context is shorter. The first subject's tokenizer rules. Raises UsageError for
    a text, window or number of tokens that gives nothing to predict, and for subjects of different vocabularies; SourceError.
    """
    if tokens < 2:
        raise UsageError(f"--tokens: expected at least 2, found {tokens}: the first one of a window predicts and is not predicted")
    lead = subjects[0]
    _check_vocabularies(subjects)
    length = _window_length(subjects, window)
    tokenizer = _tokenizer(lead)
    opening = opening_of(tokenizer)
    data, ids = _read(text, tokenizer, wanted_tokens(tokens, length, opening))
    for other in subjects[1:]:
        _check_tokens(lead, other, data, ids)
    name = BUILT_IN if text is None else str(text)
    if len(ids) + len(opening) < 2:
        raise UsageError(f"--text: {name}: {len(ids)} tokens in it; a perplexity needs at least 2")
    return Reading(name, length, opening, cut_windows(ids, length, opening))


def _check_vocabularies(subjects: Sequence[Subject]) -> None:
    first, size = subjects[0], subjects[0].source.config.vocab_size
    for other in subjects[1:]:
        if other.source.config.vocab_size != size:
            raise UsageError(
                f"{other.facts.path}: a vocabulary of {other.source.config.vocab_size} tokens, {first.facts.path} has {size}; "
                "only models with one vocabulary can be compared: name the checkpoint that it was made from"
            )


def _window_length(subjects: Sequence[Subject], window: int | None) -> int:
    shortest = min(subjects, key=lambda subject: subject.source.config.max_position_embeddings)
    limit = shortest.source.config.max_position_embeddings
    length = min(WINDOW, limit) if window is None else window
    if not 2 <= length <= limit:
        raise UsageError(f"--window: expected 2 to {limit} tokens, the context of {shortest.facts.path}, found {length}")
    return length


def _tokenizer(subject: Subject) -> Tokenizer:
    try:
        return Tokenizer(subject.source.assets, subject.source.config.vocab_size)
    except SourceError as error:
        raise SourceError(f"{subject.facts.path}: {error}") from error


def _check_tokens(lead: Subject, other: Subject, data: str, ids: list[int]) -> None:
    """A model without a tokenizer of its own reads the lead's tokens."""
    if TOKENIZER_FILE not in other.source.assets:
        return
    found = _tokenizer(other).encode(data, add_special_tokens=False)[: len(ids)]
    if found != ids:
        at = next((i for i, (a, b) in enumerate(zip(found, ids, strict=False)) if a != b), min(len(found), len(ids)))
        raise UsageError(
            f"{other.facts.path}: its {TOKENIZER_FILE} cuts the text into other tokens than that of {lead.facts.path}, the first at "
            f"token {at}; only models with one vocabulary can be compared: name the checkpoint that it was made from"
        )


def _read(path: Path | None, tokenizer: Tokenizer, tokens: int) -> tuple[str, list[int]]:
    """(the text that was read, its first `tokens` tokens). Of a long file only as much is read as that takes."""
    if path is None:
        data = built_in_text()
        return data, tokenizer.encode(data, add_special_tokens=False)[:tokens]
    limit = min(BYTES_A_TOKEN * tokens, MAX_TEXT)
    while True:
        data, whole = _prefix(path, limit)
        ids = tokenizer.encode(data, add_special_tokens=False)[:tokens]
        if len(ids) >= tokens or whole or limit >= MAX_TEXT:
            return data, ids
        limit = min(2 * limit, MAX_TEXT)


def _prefix(path: Path, limit: int) -> tuple[str, bool]:
    """(text of the first `limit` bytes less a character that they cut, whether that is the whole file)."""
    try:
        if path.exists() and not path.is_file():
            raise UsageError(f"--text: {path}: cannot be read: not a regular file")
        with path.open("rb") as file:
            data = file.read(limit)
            whole = not file.read(1)
        return codecs.getincrementaldecoder("utf-8-sig")().decode(data, final=whole), whole
    except (OSError, ValueError) as error:
        reason = f"not UTF-8 text: {error.reason} at byte {error.start}" if isinstance(error, UnicodeDecodeError) else str(error)
        if isinstance(error, OSError):
            reason = f"cannot be read: {error.strerror or error}"
        raise UsageError(f"--text: {path}: {reason}") from error
