"""What a model thinks of given tokens: final states, logits, log-probabilities, perplexity. No sampling and no scheduling.

Memory beside the model: the keys and values of one window, and the logits of one chunk of it.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

import numpy as np
import torch
from numpy.typing import NDArray

from arctool.errors import RequestError, VerificationError
from arctool.run.compiled.model import CompiledModel, StepLimits
from arctool.run.kv.blocks import blocks_for
from arctool.run.kv.cache import KVCache
from arctool.run.layers.linear import Projection
from arctool.run.models.decoder import CausalLM
from arctool.run.step import Span, build_step

CHUNK = 256
"""Tokens of a step, and rows of logits that exist at a time: 50 MB for 49k entries, 156 MB for 152k."""

BLOCK_SIZE = 16

LOGIT_BLOCK = 8
"""Rows that are widened to f64 at a time."""

MAX_SURPRISE = 700.0
"""Nats a token; e to this power still is an f64."""


def final_states(model: CausalLM, ids: Sequence[int], chunk: int = CHUNK) -> Iterator[torch.Tensor]:
    """What the head reads after every token of `ids`: f32 [≤ chunk, hidden], one chunk after another, from an empty context.

    Raises RequestError for no tokens, for more than the model's context, and for one that is not in its vocabulary.
    """
    if not ids:
        raise RequestError("ids: expected at least one token, found none")
    if len(ids) > model.config.max_position_embeddings:
        limit = model.config.max_position_embeddings
        raise RequestError(f"ids: {len(ids)} tokens exceed the model's context of {limit}; use a shorter window")
    if min(ids) < 0 or max(ids) >= model.config.vocab_size:
        wrong = next(token for token in ids if not 0 <= token < model.config.vocab_size)
        raise RequestError(f"ids: expected tokens from 0 to {model.config.vocab_size - 1}, found {wrong}")
    count = blocks_for(len(ids), BLOCK_SIZE)
    largest = min(chunk, len(ids))
    compiled = CompiledModel(model, KVCache(model.config, count, BLOCK_SIZE), StepLimits(largest, largest, 1, len(ids)))
    for first in range(0, len(ids), chunk):
        part = ids[first : first + chunk]
        yield torch.from_numpy(compiled.states(build_step([Span(part, first, range(count), len(part))], BLOCK_SIZE)).copy())


def head_logits(head: Projection, states: torch.Tensor) -> NDArray[np.float32]:
    """Logits f32 [rows, vocab] of final states f32 [rows, hidden]; a row's bits do not depend on the rows beside it."""
    logits: NDArray[np.float32] = head(states).numpy()
    return logits


def logit_chunks(model: CausalLM, ids: Sequence[int], chunk: int = CHUNK) -> Iterator[NDArray[np.float32]]:
    """Logits f32 [≤ chunk, vocab] after every token of `ids`, one chunk after another. Raises as `final_states`."""
    return (head_logits(model.head, states) for states in final_states(model, ids, chunk))


def logits(model: CausalLM, ids: Sequence[int], chunk: int = CHUNK) -> NDArray[np.float32]:
    """Logits f32 [tokens, vocab] after every token of `ids`, computed as a prompt in chunks of `chunk` with a cache of its own."""
    return np.concatenate(list(logit_chunks(model, ids, chunk)))


def token_logprobs(model: CausalLM, ids: Sequence[int]) -> NDArray[np.float64]:
    """ln p(ids[i] | ids[:i]) for i = 1 ... , f64 [tokens − 1]; the first token has no context and no entry.

    Raises VerificationError where a logit is not finite, naming the token.
    """
    found: list[NDArray[np.float64]] = []
    start = 0
    for rows in logit_chunks(model, ids):
        targets = np.asarray(ids[start + 1 : start + 1 + len(rows)], np.int64)
        check_finite(rows[: targets.size], "ids", start)
        found.append(_logprobs_of(rows[: targets.size], targets))
        start += len(rows)
    return np.concatenate(found)


def cut_windows(ids: Sequence[int], window: int, opening: Sequence[int] = ()) -> tuple[tuple[int, ...], ...]:
    """`ids` in consecutive windows of at most `window` tokens that do not overlap, each begun by the tokens `opening`.

    A last, shorter window counts if it has at least two tokens: the first one of a window predicts and is not predicted.
    Raises RequestError if there is nothing to predict.
    """
    step = window - len(opening)
    if window < 2 or step < 1 or len(opening) + len(ids) < 2 or not ids:
        wanted = max(2, len(opening) + 1)
        raise RequestError(f"expected at least 2 tokens and windows of at least {wanted}, found {len(opening) + len(ids)} and {window}")
    pieces = ((*opening, *ids[at : at + step]) for at in range(0, len(ids), step))
    return tuple(piece for piece in pieces if len(piece) > 1)


def perplexity(model: CausalLM, ids: Sequence[int], window: int = 1024) -> float:
    """exp of the mean negative log-probability per predicted token of `cut_windows(ids, window)`; every one weighs the same.

    Raises RequestError if there is nothing to predict, VerificationError where a logit is not finite.
    """
    try:
        windows = cut_windows(ids, window)
    except RequestError as error:
        raise RequestError(f"perplexity: {error}") from error
    return perplexity_of(np.concatenate([token_logprobs(model, piece) for piece in windows]))


def perplexity_of(logprobs: NDArray[np.float64]) -> float:
    """exp of the mean surprise. Raises VerificationError where that is beyond f64: such a model is broken, not bad."""
    surprise = -float(logprobs.mean())
    if not surprise < MAX_SURPRISE:
        raise VerificationError(f"a mean surprise of {surprise:.4g} nats a token is no perplexity; expected less than {MAX_SURPRISE:.0f}")
    return math.exp(surprise)


def check_finite(rows: NDArray[np.float32], where: str, first: int) -> None:
    """Raise VerificationError for logits [n, vocab] after tokens `first` ... where one is NaN or infinite; `where` begins the message."""
    # A minimum and a maximum are NaN where any value is, and need no copy of half a million values.
    if not rows.size or (np.isfinite(rows.min()) and np.isfinite(rows.max())):
        return
    row, entry = (int(index) for index in np.argwhere(~np.isfinite(rows))[0])
    raise VerificationError(
        f"{where}: after token {first + row} the logit of entry {entry} is {rows[row, entry]}, expected a finite number; "
        "the model's weights are broken"
    )


def shifted(rows: NDArray[np.float32]) -> tuple[NDArray[np.float64], NDArray[np.float64], NDArray[np.float64]]:
    """(x, e, s) of logits [n, vocab]: x f64 less its row's maximum, e = exp(x), s = Σ e [n]; ln softmax is x − ln s."""
    x = rows.astype(np.float64)
    x -= x.max(axis=1, keepdims=True)
    e = np.exp(x)
    return x, e, e.sum(axis=1)


def _logprobs_of(rows: NDArray[np.float32], targets: NDArray[np.int64]) -> NDArray[np.float64]:
    """ln softmax in f64 of rows f32 [n, vocab] at `targets` i64 [n]."""
    found = np.empty(targets.size, np.float64)
    for at in range(0, targets.size, LOGIT_BLOCK):
        x, _, total = shifted(rows[at : at + LOGIT_BLOCK][: targets.size - at])
        found[at : at + len(x)] = x[np.arange(len(x)), targets[at : at + len(x)]] - np.log(total)
    return found
