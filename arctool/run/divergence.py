"""How far a model's predictions are from those of another one: KL divergence, top-1 agreement, perplexity, token by token.

Everything is f64 from the logits on. At most one chunk of logits of each model exists at a time. A `Reference` keeps what the base
thinks for any number of candidates, as the states that its head reads rather than as log-probabilities: a thousandth of their size and
not rounded, so that a comparison with a stored base has the very bits of one with the base itself. Knows no files and no formats.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from arctool.errors import RequestError, VerificationError
from arctool.run.evaluate import LOGIT_BLOCK, check_finite, final_states, head_logits, logit_chunks, perplexity_of, shifted
from arctool.run.layers.linear import Projection
from arctool.run.models.decoder import CausalLM

TAIL = 0.99
"""The quantile that stands for the worst tokens: KL of language models has a long tail that its mean hides."""

Progress = Callable[[int, int], None]
"""Called as (predicted tokens done, all)."""

Predictor = Callable[[Sequence[int]], Iterable[NDArray[np.float32]]]
"""A model that another program runs: logits f32 after every given token, in consecutive blocks of rows [n, vocab].

It is given the tokens of a window that predict another one, all but the last.
"""


@dataclass(frozen=True)
class TokenScores:
    """One entry for every predicted token, in the order of the windows.

    `base_logprob`, `logprob`: f64, ln p of the token that came; `kl`: f64, KL(base ‖ model) of the whole distribution in nats;
    `same_top1`: bool, whether both have the same likeliest token (of equal ones the first).
    """

    base_logprob: NDArray[np.float64]
    logprob: NDArray[np.float64]
    kl: NDArray[np.float64]
    same_top1: NDArray[np.bool_]


@dataclass(frozen=True)
class Comparison:
    """A model against its base over `tokens` predicted tokens. `kl` is the mean, `kl_p99` and `kl_max` its tail, in nats a token;
    `same_top1` a share from 0 to 1."""

    tokens: int
    perplexity: float
    base_perplexity: float
    kl: float
    kl_p99: float
    kl_max: float
    same_top1: float

    @staticmethod
    def of(scores: TokenScores) -> Comparison:
        """Raises VerificationError where a perplexity is beyond f64."""
        return Comparison(
            tokens=scores.kl.size,
            perplexity=perplexity_of(scores.logprob),
            base_perplexity=perplexity_of(scores.base_logprob),
            kl=float(scores.kl.mean()),
            kl_p99=float(np.quantile(scores.kl, TAIL)),
            kl_max=float(scores.kl.max()),
            same_top1=float(scores.same_top1.mean()),
        )


@dataclass(frozen=True)
class Reference:
    """What a base model thinks of fixed windows. Needs none of its layers: of the base only the head stays in memory.

    `states[w]`: f32 [len(windows[w]) − 1, hidden], what the head reads after each token that predicts another. Size: 4 · hidden bytes
    a token (19 MB for 8192 tokens of width 576), and the head. Reading it costs one product with the head a candidate.
    """

    windows: tuple[tuple[int, ...], ...]
    states: tuple[torch.Tensor, ...]
    head: Projection
    vocab_size: int

    def logits(self, window: int, first: int, last: int) -> NDArray[np.float32]:
        """The base's logits f32 [last − first, vocab] after tokens `[first, last)` of a window: the bits that it gave."""
        return head_logits(self.head, self.states[window][first:last])


def reference(base: CausalLM, windows: Sequence[Sequence[int]], progress: Progress | None = None) -> Reference:
    """Let `base` read the windows, once. Raises RequestError naming a window that it cannot read, VerificationError by window and token."""
    fixed = tuple(tuple(window) for window in windows)
    _check_windows(fixed, base)
    states = []
    total = sum(len(window) - 1 for window in fixed)
    done = 0
    for number, window in enumerate(fixed):
        parts = []
        for part in final_states(base, window[:-1]):
            parts.append(part)
            done += len(part)
            if progress is not None:
                progress(done, total)
        found = torch.cat(parts)
        wrong = ~torch.isfinite(found).all(dim=1)
        if bool(wrong.any()):
            token = int(wrong.int().argmax())
            raise VerificationError(f"base: window {number}: the state after token {token} is not finite; the model's weights are broken")
        states.append(found)
    return Reference(fixed, tuple(states), base.head, base.config.vocab_size)


def compare(
    base: CausalLM | Reference, model: CausalLM | Predictor, windows: Sequence[Sequence[int]], progress: Progress | None = None
) -> Comparison:
    """`model` against `base` over the windows, each read with an empty context; the first token of a window is not predicted.

    Raises RequestError for windows that cannot be read or are not the reference's and for another vocabulary, VerificationError
    naming window and token (both from 0) where a logit is not finite.
    """
    return Comparison.of(token_scores(base, model, windows, progress))


def token_scores(
    base: CausalLM | Reference, model: CausalLM | Predictor, windows: Sequence[Sequence[int]], progress: Progress | None = None
) -> TokenScores:
    """`compare` before anything is averaged, for statistics of one's own. Raises as `compare`."""
    fixed = tuple(tuple(window) for window in windows)
    if isinstance(base, Reference) and base.windows != fixed:
        raise RequestError(f"windows: expected the {len(base.windows)} that the reference was made of, found others; make a new reference")
    if isinstance(model, CausalLM):
        _check_vocabulary(base.vocab_size if isinstance(base, Reference) else base.config.vocab_size, model.config.vocab_size)
    _check_windows(fixed, *(part for part in (base, model) if isinstance(part, CausalLM)))
    total = sum(len(window) - 1 for window in fixed)
    done = 0
    parts: list[TokenScores] = []
    for number, window in enumerate(fixed):
        # A base that was not asked before is asked a window at a time, so that memory does not grow with their number.
        one, at = (base, number) if isinstance(base, Reference) else (reference(base, (window,)), 0)
        for part in _window_scores(one, at, model, window, number):
            parts.append(part)
            done += part.kl.size
            if progress is not None:
                progress(done, total)
    columns = ("base_logprob", "logprob", "kl", "same_top1")
    return TokenScores(*(np.concatenate([getattr(part, name) for part in parts]) for name in columns))


def _window_scores(base: Reference, at: int, model: CausalLM | Predictor, window: tuple[int, ...], number: int) -> Iterator[TokenScores]:
    """The scores of one window, chunk by chunk. `at`: its number in the reference, `number`: in messages."""
    wanted = len(window) - 1
    done = last = 0
    for rows in logit_chunks(model, window[:-1]) if isinstance(model, CausalLM) else model(window[:-1]):
        _check_vocabulary(base.vocab_size, rows.shape[1])
        last = done + len(rows)
        if last > wanted:
            break
        truth = base.logits(at, done, last)
        check_finite(truth, f"base: window {number}", done)
        check_finite(rows, f"window {number}", done)
        yield score_rows(truth, rows, np.asarray(window[done + 1 : last + 1], np.int64))
        done = last
    if last != wanted:
        raise RequestError(f"window {number}: expected logits after {wanted} tokens, found {last}")


def score_rows(base: NDArray[np.float32], model: NDArray[np.float32], targets: NDArray[np.int64]) -> TokenScores:
    """Scores of finite logits f32 [n, vocab] of both models and the tokens that came i64 [n]; f64, a few rows at a time.

    KL = Σ p (ln p − ln q) with ln p = x − ln s: (Σ e_p (x_p − x_q)) / s_p − (ln s_p − ln s_q). Rounding may leave −1e-16, which is 0.
    """
    count = len(targets)
    base_logprob, logprob, kl = (np.empty(count, np.float64) for _ in range(3))
    for at in range(0, count, LOGIT_BLOCK):
        part = slice(at, min(at + LOGIT_BLOCK, count))
        x_p, e_p, s_p = shifted(base[part])
        x_q, _, s_q = shifted(model[part])
        rows, tokens, ln_p, ln_q = np.arange(len(s_p)), targets[part], np.log(s_p), np.log(s_q)
        base_logprob[part] = x_p[rows, tokens] - ln_p
        logprob[part] = x_q[rows, tokens] - ln_q
        x_p -= x_q
        kl[part] = np.einsum("ij,ij->i", e_p, x_p) / s_p - (ln_p - ln_q)
    return TokenScores(base_logprob, logprob, np.maximum(kl, 0.0), base.argmax(axis=1) == model.argmax(axis=1))


def _check_vocabulary(base: int, model: int) -> None:
    if base != model:
        raise RequestError(f"vocabulary: the base has {base} entries, the model {model}; only models with one vocabulary can be compared")


def _check_windows(windows: tuple[tuple[int, ...], ...], *models: CausalLM) -> None:
    """Raise RequestError for the first window that predicts nothing or that one of the models cannot read."""
    if not windows:
        raise RequestError("windows: expected at least one, found none")
    for number, window in enumerate(windows):
        if len(window) < 2:
            raise RequestError(f"window {number}: expected at least 2 tokens, found {len(window)}: nothing is predicted")
        for model in models:
            limit, vocab = model.config.max_position_embeddings, model.config.vocab_size
            if len(window) > limit:
                raise RequestError(f"window {number}: {len(window)} tokens exceed the model's context of {limit}; use shorter windows")
            if min(window) < 0 or max(window) >= vocab:
                wrong = next(token for token in window if not 0 <= token < vocab)
                raise RequestError(f"window {number}: expected tokens from 0 to {vocab - 1}, found {wrong}")
