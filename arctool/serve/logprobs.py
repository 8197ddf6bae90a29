"""Log-probabilities in OpenAI's two shapes: with chat answers, and with completions."""

from __future__ import annotations

import codecs
from collections.abc import Iterable
from typing import Any

from arctool.run.sampling.sampler import TokenLogprobs
from arctool.run.tokenizer import Tokenizer

IMPOSSIBLE = -9999.0
"""What OpenAI writes for probability 0, whose logarithm JSON has no number for."""

Chosen = Iterable[tuple[int, TokenLogprobs]]


def chat_logprobs(tokenizer: Tokenizer | None, tokens: Chosen) -> dict[str, Any]:
    """{"content": [...]}: each token with its bytes (a token may be part of a character) and the best alternatives."""
    content = []
    for token, found in tokens:
        if tokenizer is None or tokenizer.is_hidden(token):
            continue
        top = [_entry(tokenizer, other, logprob) for other, logprob in found.top]
        content.append({**_entry(tokenizer, token, found.token), "top_logprobs": top})
    return {"content": content, "refusal": None}


class Offsets:
    """Where each token of a growing text begins, in characters. One that begins inside a character begins where that does."""

    def __init__(self) -> None:
        self._at = 0
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def push(self, raw: bytes) -> int:
        """The place of the token that stands for `raw`, which is next."""
        begun, _ = self._decoder.getstate()
        place = self._at + (bool(begun) and not _goes_on(begun, raw))  # what was begun is a character of its own then, U+FFFD
        self._at += len(self._decoder.decode(raw))
        return place


def _goes_on(begun: bytes, raw: bytes) -> bool:
    try:
        codecs.getincrementaldecoder("utf-8")("strict").decode(begun + raw[:1])
    except UnicodeDecodeError:
        return False
    return True


def completion_logprobs(tokenizer: Tokenizer | None, tokens: Chosen, offsets: Offsets) -> dict[str, Any]:
    """Parallel lists, as completions have them; the chosen token is always among the alternatives. `offsets`: those of the text so far."""
    texts: list[str] = []
    places: list[int] = []
    values: list[float] = []
    tops: list[dict[str, float]] = []
    for token, found in tokens:
        if tokenizer is None or tokenizer.is_hidden(token):
            continue
        texts.append(token_text(tokenizer, token))
        places.append(offsets.push(tokenizer.token_bytes(token)))
        values.append(finite(found.token))
        top: dict[str, float] = {}
        for other, logprob in found.top:
            top.setdefault(token_text(tokenizer, other), finite(logprob))
        tops.append({**top, texts[-1]: values[-1]})
    return {"tokens": texts, "token_logprobs": values, "top_logprobs": tops, "text_offset": places}


def token_text(tokenizer: Tokenizer, token: int) -> str:
    """The text of one token; what is no whole character as OpenAI writes it, bytes:\\xf0\\x9f, so that no two tokens look the same."""
    raw = tokenizer.token_bytes(token)
    try:
        return raw.decode("utf-8")
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in raw)


def finite(logprob: float) -> float:
    return max(float(logprob), IMPOSSIBLE)


def _entry(tokenizer: Tokenizer, token: int, logprob: float) -> dict[str, Any]:
    raw = tokenizer.token_bytes(token)
    return {"token": raw.decode("utf-8", "replace"), "logprob": finite(logprob), "bytes": list(raw)}
