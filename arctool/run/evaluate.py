"""What a model thinks of given tokens: logits, log-probabilities, perplexity. No sampling and no scheduling."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
import torch
from numpy.typing import NDArray

from arctool.errors import RequestError
from arctool.kernels.registry import TokenClass
from arctool.run.kv.blocks import blocks_for
from arctool.run.kv.cache import CachePlan
from arctool.run.models.decoder import CausalLM
from arctool.run.runner import ModelRunner
from arctool.run.step import Span

CHUNK = 256
BLOCK_SIZE = 16


def logits(model: CausalLM, ids: Sequence[int], chunk: int = CHUNK) -> NDArray[np.float32]:
    """Logits f32 [tokens, vocab] after every token of `ids`, computed as a prompt in chunks of `chunk` with a cache of its own."""
    return np.concatenate(list(_chunks(model, ids, chunk)))


def token_logprobs(model: CausalLM, ids: Sequence[int]) -> NDArray[np.float64]:
    """ln p(ids[i] | ids[:i]) for i = 1 ... , f64 [tokens − 1]; the first token has no context and no entry."""
    found: list[NDArray[np.float64]] = []
    start = 0
    for part in _chunks(model, ids, CHUNK):
        targets = np.asarray(ids[start + 1 : start + 1 + part.shape[0]], np.int64)
        found.append(_logprobs_of(part[: targets.size], targets))
        start += part.shape[0]
    return np.concatenate(found)


def perplexity(model: CausalLM, ids: Sequence[int], window: int = 1024) -> float:
    """exp of the mean negative log-probability per predicted token.

    `ids` is cut into consecutive windows of `window` tokens that do not overlap; each is read with an empty context, and its
    first token predicts but is not predicted. A last, shorter window counts if it has at least two tokens. Weights every
    predicted token alike. Raises RequestError if there is nothing to predict.
    """
    if window < 2 or len(ids) < 2:
        raise RequestError(f"perplexity: expected at least 2 tokens and a window of at least 2, found {len(ids)} and {window}")
    pieces = [ids[at : at + window] for at in range(0, len(ids), window)]
    scores = np.concatenate([token_logprobs(model, piece) for piece in pieces if len(piece) > 1])
    return float(np.exp(-scores.mean()))


def _chunks(model: CausalLM, ids: Sequence[int], chunk: int) -> Iterator[NDArray[np.float32]]:
    """Logits f32 [≤ chunk, vocab] of one chunk of `ids` after another."""
    if not ids:
        raise RequestError("ids: expected at least one token, found none")
    if len(ids) > model.config.max_position_embeddings:
        limit = model.config.max_position_embeddings
        raise RequestError(f"ids: {len(ids)} tokens exceed the model's context of {limit}; use a shorter window")
    count = blocks_for(len(ids), BLOCK_SIZE)
    runner = ModelRunner(model, CachePlan(count, BLOCK_SIZE, len(ids), torch.float32))
    for first in range(0, len(ids), chunk):
        part = ids[first : first + chunk]
        yield runner.run_spans([Span(part, first, range(count), TokenClass.PREFILL, len(part))])


def _logprobs_of(rows: NDArray[np.float32], targets: NDArray[np.int64]) -> NDArray[np.float64]:
    """Log-softmax in f64 of rows f32 [n, vocab] at `targets` i64 [n]; a row at a time, to stay small."""
    found = np.empty(targets.size, np.float64)
    for i, target in enumerate(targets):
        shifted = rows[i].astype(np.float64) - float(rows[i].max())
        found[i] = shifted[target] - np.log(np.exp(shifted).sum())
    return found
