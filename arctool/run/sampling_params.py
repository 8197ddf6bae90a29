"""What a request may ask of the sampler, checked once at the door. Every refusal is a RequestError that names the field."""

from __future__ import annotations

import operator
from dataclasses import dataclass
from typing import Any

from arctool.errors import RequestError

MAX_TEMPERATURE = 2.0
MAX_STOP_STRINGS = 16
MAX_LOGPROBS = 20
MAX_N = 128


@dataclass(frozen=True)
class SamplingParams:
    """How the tokens of one request are chosen and when it ends.

    `temperature` 0 is greedy; `top_k` 0 or −1, `top_p` 1 and `min_p` 0 are off; `seed` None lets the engine draw one.
    `max_tokens` None means up to the end of the context. `stop`: strings that end the text (not part of it); `stop_token_ids`:
    further tokens that end it; `ignore_eos` switches the model's own end tokens off, not these. `logprobs`: how many
    alternatives to report besides the chosen token, None for no report. `n` samples are drawn.
    Requests with a lower `priority` are served first. Only those of one `cache_salt` reuse what the prefix cache holds of each other.
    """

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    seed: int | None = None
    max_tokens: int | None = None
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    logprobs: int | None = None
    n: int = 1
    priority: int = 0
    cache_salt: str = ""

    def __post_init__(self) -> None:
        _number("temperature", self.temperature, 0.0, MAX_TEMPERATURE)
        _number("top_p", self.top_p, 0.0, 1.0)
        if self.top_p == 0:
            raise RequestError("top_p: expected more than 0 and at most 1, found 0")
        _number("min_p", self.min_p, 0.0, 1.0)
        _integer("top_k", self.top_k, -1, (1 << 63) - 1)
        if self.seed is not None:
            _integer("seed", self.seed, -(1 << 63), (1 << 64) - 1)
        if self.max_tokens is not None:
            _integer("max_tokens", self.max_tokens, 1, (1 << 31) - 1)
        if self.logprobs is not None:
            _integer("logprobs", self.logprobs, 0, MAX_LOGPROBS)
        if not isinstance(self.ignore_eos, bool):
            raise RequestError(f"ignore_eos: expected true or false, found {_short(self.ignore_eos)}")
        _integer("n", self.n, 1, MAX_N)
        _integer("priority", self.priority, -(1 << 31), (1 << 31) - 1)
        if not isinstance(self.cache_salt, str):
            raise RequestError(f"cache_salt: expected a string, found {_short(self.cache_salt)}")
        _check_stops(self.stop, self.stop_token_ids)
        object.__setattr__(self, "stop", tuple(self.stop))
        object.__setattr__(self, "stop_token_ids", tuple(operator.index(token) for token in self.stop_token_ids))

    @property
    def greedy(self) -> bool:
        return self.temperature == 0


def as_token_id(value: Any) -> int | None:
    """`value` as an int if it is an integer of any kind (numpy's and torch's included), but no truth value; else None."""
    if isinstance(value, bool) or str(getattr(value, "dtype", "")).endswith("bool"):
        return None
    try:
        return operator.index(value)
    except TypeError:
        return None


def _check_stops(stop: Any, stop_token_ids: Any) -> None:
    if not isinstance(stop, tuple | list) or len(stop) > MAX_STOP_STRINGS:
        raise RequestError(f"stop: expected at most {MAX_STOP_STRINGS} strings, found {_short(stop)}")
    for text in stop:
        if not isinstance(text, str) or not text:
            raise RequestError(f"stop: expected strings that are not empty, found {_short(text)}")
    if not isinstance(stop_token_ids, tuple | list):
        raise RequestError(f"stop_token_ids: expected a list of token ids, found {_short(stop_token_ids)}")
    for token in stop_token_ids:
        known = as_token_id(token)
        _integer("stop_token_ids", token if known is None else known, 0, (1 << 31) - 1)


def _number(field: str, value: Any, low: float, high: float) -> None:
    # The comparison is written so that NaN fails it.
    good = isinstance(value, int | float) and not isinstance(value, bool)
    if not good or not low <= value <= high:
        raise RequestError(f"{field}: expected a number from {low:g} to {high:g}, found {_short(value)}")


def _integer(field: str, value: Any, low: int, high: int) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or not low <= value <= high:
        raise RequestError(f"{field}: expected an integer from {low} to {high}, found {_short(value)}")


def _short(value: Any) -> str:
    try:
        text = repr(value)
    except ValueError:
        return f"a {type(value).__name__} too large to print"
    return text if len(text) <= 40 else text[:37] + "..."
