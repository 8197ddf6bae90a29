"""From logits to tokens. Every row is sampled by itself: its token depends on its logits, its parameters, its seed, its position and
its own earlier tokens, on nothing else. The sampler knows neither sequences nor text.

The work is one pass over all rows (`kernels/cpu/sampling.py`, which names the order of operations); `oracle.py` defines what it must give.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from arctool.kernels.cpu.sampling import NO_TOKEN, NOT_FINITE, sample_rows
from arctool.run.sampling.grammar import GrammarState
from arctool.run.sampling.history import History
from arctool.run.sampling.params import SamplingParams

FEW = 2
"""Plain rows that are looked through one by one: the pass over many costs more than that to begin."""


NOTHING_LEFT = "no token is left to choose"
"""How the error begins that a request's own demands lead to; all others are the model's."""


@dataclass(frozen=True)
class SampleRow:
    """What the sampler must know about one row of logits.

    `position`: index in its sequence of the token that is drawn; `generated`: tokens of the output so far; `ends`: the model's end tokens.
    `history` is needed where there are penalties, `grammar` where there is a constraint.
    """

    params: SamplingParams
    seed: int
    position: int
    generated: int = 0
    ends: Collection[int] = ()
    history: History | None = None
    grammar: GrammarState | None = None

    @property
    def too_short(self) -> bool:
        """Whether the text may not end yet."""
        return self.generated < self.params.min_tokens

    @property
    def plain(self) -> bool:
        """Whether nothing counts but which logit is the largest."""
        p = self.params
        simple = p.greedy and p.logprobs is None and p.constraint is None and not p.penalised and not p.logit_bias
        return simple and not (self.too_short and self.banned)

    @property
    def banned(self) -> tuple[int, ...]:
        """Tokens that would end a text that is too short. A constraint decides about end tokens by itself, as it may know no others."""
        if not self.too_short:
            return ()
        ends = () if self.params.ignore_eos or self.grammar is not None else self.ends
        return (*ends, *self.params.stop_token_ids)


@dataclass(frozen=True)
class TokenLogprobs:
    """Log-probabilities before everything else: of the chosen token, and of the best alternatives, best first."""

    token: float
    top: tuple[tuple[int, float], ...]


@dataclass(frozen=True)
class Sampled:
    """One row's result: a token, or why there is none. `corrupted`: because the model gave a logit that is not finite."""

    token: int | None
    logprobs: TokenLogprobs | None = None
    error: str | None = None
    corrupted: bool = False


def sample(logits: NDArray[np.float32], rows: Sequence[SampleRow], choices: int | None = None) -> list[Sampled]:
    """logits: f32 [rows, vocab] → one result per row. Only the first `choices` columns count (None: all).

    A row with a NaN or an infinity fails, alone, and so does one whose constraint and bans leave no token.
    """
    if not rows:
        return []
    width = logits.shape[1] if choices is None else choices
    if len(rows) <= FEW and all(row.plain for row in rows):
        return [_likeliest(logits[i, :width], row) for i, row in enumerate(rows)]
    masks, mask_of, errors = _masks(rows, width)
    tops = np.array([-1 if row.params.logprobs is None else row.params.logprobs for row in rows], np.int64)
    tokens, logs, best, best_logs = sample_rows(
        logits,
        width,
        np.stack([row.params.settings for row in rows]),
        np.array([row.seed % (1 << 64) for row in rows], np.uint64),
        np.array([row.position for row in rows], np.uint64),
        masks,
        mask_of,
        _lists([(_below(row.banned, width),) for row in rows], (np.int64,)),
        _lists([row.params.bias for row in rows], (np.int64, np.float64)),
        _lists([_seen(row) for row in rows], (np.int64, np.int64, np.bool_)),
        tops,
    )
    results = []
    for i, row in enumerate(rows):
        if tokens[i] < 0:
            error = _error(logits[i, :width], int(tokens[i]), row, errors.get(i))
            results.append(Sampled(None, error=error, corrupted=int(tokens[i]) == NOT_FINITE))
            continue
        report = None
        if tops[i] >= 0:
            count = min(int(tops[i]), width)
            report = TokenLogprobs(float(logs[i]), tuple(zip(best[i, :count].tolist(), best_logs[i, :count].tolist(), strict=True)))
        results.append(Sampled(int(tokens[i]), report))
    return results


def _likeliest(logits: NDArray[np.float32], row: SampleRow) -> Sampled:
    """The first of the largest logits; what the pass gives to a plain row."""
    best = int(logits.argmax())  # of a NaN, if there is one
    if np.isfinite(logits[best]) and np.isfinite(logits.min()):
        return Sampled(best)
    return Sampled(None, error=_error(logits, NOT_FINITE, row, None), corrupted=True)


def _masks(rows: Sequence[SampleRow], width: int) -> tuple[NDArray[np.uint32], NDArray[np.int64], dict[int, str]]:
    """Masks of the constrained rows, which row has which (−1: none), and the rows whose constraint failed. Such a row's mask is empty."""
    constrained = [i for i, row in enumerate(rows) if row.params.constraint is not None]
    masks = np.zeros((len(constrained), -(-width // 32)), np.uint32)
    mask_of = np.full(len(rows), -1, np.int64)
    errors = {}
    for k, i in enumerate(constrained):
        mask_of[i] = k
        grammar = rows[i].grammar
        may_end = not rows[i].too_short and not rows[i].params.ignore_eos
        error = "its constraint was not compiled" if grammar is None else grammar.fill(masks[k], may_end=may_end)
        if error is not None:
            errors[i] = error
    return masks, mask_of, errors


def _error(logits: NDArray[np.float32], code: int, row: SampleRow, constraint: str | None) -> str:
    if code == NO_TOKEN:
        reason = constraint or "constraint, min_tokens and stop_token_ids together forbid all of them"
        return f"{NOTHING_LEFT} at position {row.position}: {reason}"
    bad = int(np.flatnonzero(~np.isfinite(logits))[0])
    return f"the model gave a logit that is not finite (token {bad} at position {row.position})"


def _seen(row: SampleRow) -> tuple[NDArray[Any], ...]:
    if not row.params.penalised:
        return _NOTHING_SEEN
    assert row.history is not None, "a row with penalties needs its history"
    return row.history.arrays()


_NOTHING_SEEN = (np.empty(0, np.int64), np.empty(0, np.int64), np.empty(0, np.bool_))


def _below(ids: tuple[int, ...], width: int) -> NDArray[np.int64]:
    return np.array([i for i in ids if i < width], np.int64)


def _lists(rows: Sequence[tuple[NDArray[Any], ...]], kinds: tuple[Callable[..., Any], ...]) -> Any:
    """Lists of all rows behind one another: where each row's begins [rows + 1], then the columns."""
    starts = np.zeros(len(rows) + 1, np.int64)
    np.cumsum([len(row[0]) for row in rows], out=starts[1:])
    if starts[-1] == 0:
        return (starts, *(np.empty(0, kind) for kind in kinds))
    return (starts, *(np.concatenate([row[c] for row in rows]) for c in range(len(kinds))))
