"""What a request may ask of the sampler, checked once at the door. Every refusal is a RequestError that names the field."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any, cast

import numpy as np
from numpy.typing import NDArray

from arctool.errors import RequestError
from arctool.run.sampling import checks
from arctool.run.sampling.constraint import Constraint

MAX_TEMPERATURE = 2.0
MAX_STOP_STRINGS = 16
MAX_LOGPROBS = 20
MAX_N = 128
"""Samples of one prompt: what OpenAI's API allows."""
MAX_PENALTY = 2.0
MAX_BIAS = 100.0
MAX_CACHE_SALT = 256


@dataclass(frozen=True)
class SamplingParams:
    """How the tokens of one request are chosen and when it ends. `docs/engine.md` has the order in which the fields act.

    `temperature` 0 is greedy; `top_k` 0 or −1, `top_p` 1, `min_p` 0 and `typical_p` 1 are off; `seed` None lets the engine draw one.
    `repetition_penalty` (1 is off) divides or multiplies the logits of tokens of the prompt and the output (CTRL, arXiv 1909.05858);
    `presence_penalty` and `frequency_penalty` (0 is off) are subtracted from those of the output, once and per occurrence (OpenAI).
    `logit_bias`: token id → what is added to its logit. `logprobs`: how many alternatives to report besides the chosen token.
    `max_tokens` None means up to the end of the context. Before `min_tokens` no end token, stop token or stop string counts.
    `stop`: strings that end the text (not part of it, unless `include_stop_str_in_output`); `stop_token_ids`: further tokens that
    end it; `ignore_eos` switches the model's own end tokens off, not these. `constraint`: what the text must be.
    `shown_token_ids`: special tokens that appear in the text all the same, where a reader of it needs them.
    `n`: samples of one prompt, each with its own `child_seed`. `priority`: lower is served first. `cache_salt`: prompts share cached
    blocks only with prompts of the same salt.
    """

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    typical_p: float = 1.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: Mapping[int, float] | tuple[tuple[int, float], ...] = ()
    seed: int | None = None
    n: int = 1
    max_tokens: int | None = None
    min_tokens: int = 0
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    include_stop_str_in_output: bool = False
    ignore_eos: bool = False
    logprobs: int | None = None
    constraint: Constraint | None = None
    shown_token_ids: tuple[int, ...] = ()
    priority: int = 0
    cache_salt: str = ""

    def __post_init__(self) -> None:
        checks.number("temperature", self.temperature, 0.0, MAX_TEMPERATURE)
        checks.integer("top_k", self.top_k, -1, (1 << 63) - 1)
        checks.number("top_p", self.top_p, 0.0, 1.0, above=True)
        checks.number("min_p", self.min_p, 0.0, 1.0)
        checks.number("typical_p", self.typical_p, 0.0, 1.0, above=True)
        checks.number("repetition_penalty", self.repetition_penalty, 0.0, MAX_PENALTY, above=True)
        checks.number("presence_penalty", self.presence_penalty, -MAX_PENALTY, MAX_PENALTY)
        checks.number("frequency_penalty", self.frequency_penalty, -MAX_PENALTY, MAX_PENALTY)
        if self.seed is not None:
            checks.integer("seed", self.seed, -(1 << 63), (1 << 64) - 1)
        checks.integer("n", self.n, 1, MAX_N)
        if self.max_tokens is not None:
            checks.integer("max_tokens", self.max_tokens, 1, (1 << 31) - 1)
        # Without max_tokens the engine's door knows the bound.
        checks.integer("min_tokens", self.min_tokens, 0, (1 << 31) - 1 if self.max_tokens is None else self.max_tokens)
        if self.logprobs is not None:
            checks.integer("logprobs", self.logprobs, 0, MAX_LOGPROBS)
        checks.truth("include_stop_str_in_output", self.include_stop_str_in_output)
        checks.truth("ignore_eos", self.ignore_eos)
        checks.integer("priority", self.priority, -(1 << 31), (1 << 31) - 1)
        checks.text("cache_salt", self.cache_salt, MAX_CACHE_SALT)
        if self.constraint is not None and not isinstance(self.constraint, Constraint):
            raise RequestError(f"constraint: expected a Constraint, found {checks.short(self.constraint)}")
        object.__setattr__(self, "logit_bias", _bias(self.logit_bias))
        _check_stops(self.stop)
        object.__setattr__(self, "stop", tuple(self.stop))
        for field in ("stop_token_ids", "shown_token_ids"):
            object.__setattr__(self, field, _token_ids(field, getattr(self, field)))

    @property
    def greedy(self) -> bool:
        return self.temperature == 0

    @property
    def penalised(self) -> bool:
        """Whether the tokens that came before change the logits."""
        return self.repetition_penalty != 1 or self.presence_penalty != 0 or self.frequency_penalty != 0

    @cached_property
    def settings(self) -> NDArray[np.float64]:
        """The numbers that the kernel reads, f64 [8], in the order of its columns (`kernels.cpu.sampling.SETTINGS`)."""
        filters = (self.temperature, min(self.top_k, 1 << 52), self.top_p, self.min_p, self.typical_p)
        return np.array([*filters, self.repetition_penalty, self.presence_penalty, self.frequency_penalty], np.float64)

    @cached_property
    def bias(self) -> tuple[NDArray[np.int64], NDArray[np.float64]]:
        """`logit_bias` as arrays: token ids i64, additions f64."""
        pairs = cast(tuple[tuple[int, float], ...], self.logit_bias)
        return np.array([t for t, _ in pairs], np.int64), np.array([b for _, b in pairs], np.float64)


def _bias(given: Any) -> tuple[tuple[int, float], ...]:
    """Pairs (token id, addition), by token id. A token may be named once."""
    pairs = given.items() if isinstance(given, Mapping) else given
    if not isinstance(pairs, Iterable) or isinstance(pairs, str | bytes):
        raise RequestError(f"logit_bias: expected token ids with numbers, found {checks.short(given)}")
    found: dict[int, float] = {}
    for pair in pairs:
        if not isinstance(pair, tuple | list) or len(pair) != 2:
            raise RequestError(f"logit_bias: expected token ids with numbers, found {checks.short(pair)}")
        token = checks.token_id("logit_bias", pair[0])
        checks.number("logit_bias", pair[1], -MAX_BIAS, MAX_BIAS)
        if token in found:
            raise RequestError(f"logit_bias: expected each token once, found {token} again")
        found[token] = float(pair[1])
    return tuple(sorted(found.items()))


def _check_stops(stop: Any) -> None:
    if not isinstance(stop, tuple | list) or len(stop) > MAX_STOP_STRINGS:
        raise RequestError(f"stop: expected at most {MAX_STOP_STRINGS} strings, found {checks.short(stop)}")
    for text in stop:
        if not isinstance(text, str) or not text:
            raise RequestError(f"stop: expected strings that are not empty, found {checks.short(text)}")


def _token_ids(field: str, given: Any) -> tuple[int, ...]:
    if not isinstance(given, tuple | list):
        raise RequestError(f"{field}: expected a list of token ids, found {checks.short(given)}")
    return tuple(checks.token_id(field, token) for token in given)
