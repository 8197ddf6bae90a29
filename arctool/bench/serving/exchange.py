"""One request and what became of it, and whether that may count. Plain values; knows no sockets and no averages."""

from __future__ import annotations

import json
from dataclasses import dataclass
from enum import Enum
from typing import Any

ENDED_BY_FORCE = frozenset({"abort", "cancelled", "content_filter", "error", "timeout"})
"""Reasons of a server for an end that neither the model nor the length brought."""


class Endpoint(Enum):
    """Where a request goes."""

    COMPLETIONS = "completions"
    CHAT = "chat"

    @property
    def path(self) -> str:
        return "/v1/completions" if self is Endpoint.COMPLETIONS else "/v1/chat/completions"


@dataclass(frozen=True)
class Ask:
    """A request as it will be sent, and what its answer must be like.

    `kind`: the sort that statistics of a mixed workload tell apart. `prompt_tokens` ± `slack`: what the server must count, None for any;
    `prompt_floor`: at least so many. `output_tokens`: the length that the answer must have, None where the model ends it itself.
    `cancel_after`: leave after so many chunks with text. `required`: keys that the answer, a JSON object, must have.
    """

    kind: str
    endpoint: Endpoint
    body: bytes
    prompt_tokens: int | None = None
    slack: int = 0
    prompt_floor: int = 0
    output_tokens: int | None = None
    cancel_after: int | None = None
    required: tuple[str, ...] = ()
    keeps_text: bool = False


@dataclass(frozen=True)
class Outcome:
    """What became of a request. Times are the client's clock in seconds.

    `first`: when the first text came; `last`: when the last event of the answer came; `ended`: when the request was over. `gaps`: between
    chunks with text, `chunks` of them in all. Tokens are what the server's usage says, None where it said nothing. `status`: of HTTP, None
    where there was no answer.
    """

    sent: float
    ended: float
    first: float | None = None
    last: float | None = None
    gaps: tuple[float, ...] = ()
    chunks: int = 0
    prompt_tokens: int | None = None
    cached_tokens: int | None = None
    completion_tokens: int | None = None
    finish_reason: str | None = None
    text: str = ""
    status: int | None = None
    failure: str | None = None
    cancelled: bool = False


@dataclass(frozen=True)
class Exchange:
    """A request with its outcome."""

    ask: Ask
    outcome: Outcome


def generated(outcome: Outcome, count_chunks: bool) -> int | None:
    """Tokens of the answer: as the server counts them; each chunk with text for one where it does not and `count_chunks` allows that."""
    return outcome.chunks if outcome.completion_tokens is None and count_chunks else outcome.completion_tokens


def objection(exchange: Exchange, count_chunks: bool = False) -> str | None:
    """Why an exchange is no measurement, None if it is one. What was cancelled on purpose is none either, and nobody objects to it."""
    ask, outcome = exchange.ask, exchange.outcome
    if outcome.failure is not None or outcome.cancelled:
        return outcome.failure
    if outcome.finish_reason in ENDED_BY_FORCE:
        return f"the server ended the answer: finish_reason {outcome.finish_reason}"
    tokens = generated(outcome, count_chunks)
    if tokens is None:
        return "the server told no usage"
    if tokens == 0:
        return "no token came"
    if outcome.completion_tokens is not None and ask.output_tokens not in (None, tokens):
        return f"{tokens} tokens where {ask.output_tokens} were asked for (finish_reason {outcome.finish_reason})"
    if outcome.first is None or outcome.last is None:
        return f"{tokens} tokens without any text: nobody saw when the first one came"
    if ask.required and (why := _not_the_json(outcome, ask.required)) is not None:
        return why
    return _wrong_prompt(ask, outcome.prompt_tokens)


def _wrong_prompt(ask: Ask, counted: int | None) -> str | None:
    if counted is None:
        return None
    if ask.prompt_tokens is not None and abs(counted - ask.prompt_tokens) > ask.slack:
        return f"the server counted {counted} prompt tokens where {ask.prompt_tokens} were sent"
    if counted < ask.prompt_floor:
        return f"the server counted {counted} prompt tokens where {ask.prompt_floor} at least were sent: it cut the conversation"
    return None


def _not_the_json(outcome: Outcome, required: tuple[str, ...]) -> str | None:
    try:
        value: Any = json.loads(outcome.text)
    except ValueError:
        cut = outcome.finish_reason == "length"
        return f"the answer is no JSON{', cut at its longest: raise --output-len' if cut else ''}: {outcome.text[:60]!r}"
    if not isinstance(value, dict):
        return f"the answer is no JSON object: {outcome.text[:60]!r}"
    missing = [key for key in required if key not in value]
    return f"the answer lacks the required {', '.join(missing)}" if missing else None
