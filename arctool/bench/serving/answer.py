"""From the events of a streamed completion to its outcome. Keeps the work per chunk small, for the client shares the server's machine:
a search in the bytes tells what an event is, and only those without text are parsed.

A chunk counts for the times if it brings text, or if it is a completion's chunk without any (a token that cannot be shown); the chunk that
names a role, or only the end, brings nothing. JSON escapes quotes, so no text can look like a key.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable
from typing import Any

from arctool.bench.serving.exchange import Ask, Endpoint, Outcome

CHOICE = re.compile(rb'"choices"\s*:\s*\[\s*\{')
FINISH = re.compile(rb'"finish_reason"\s*:\s*"')
ROLE = re.compile(rb'"role"\s*:\s*"')
USAGE = re.compile(rb'"usage"\s*:\s*\{')
ERROR = re.compile(rb'"error"\s*:\s*["{]')
TEXT = {
    Endpoint.COMPLETIONS: re.compile(rb'"text"\s*:\s*"[^"]'),
    Endpoint.CHAT: re.compile(rb'"(?:content|reasoning_content|reasoning)"\s*:\s*"[^"]'),
}
DONE = b"[DONE]"

SHOWN = 300
"""Characters of a server's own words in a message of ours."""


class Answer:
    """One answer while it comes. `chunks`: with text so far; `over`: the server said that nothing follows."""

    __slots__ = (
        "_events",
        "_finish",
        "_first",
        "_gaps",
        "_keeps",
        "_last",
        "_latest",
        "_sent",
        "_text",
        "_usage",
        "chunks",
        "failure",
        "over",
    )

    def __init__(self, ask: Ask, sent: float) -> None:
        self._text = TEXT[ask.endpoint]
        self._keeps = ask.keeps_text
        self._sent = sent
        self._first: float | None = None
        self._latest = sent
        self._last: float | None = None
        self._gaps: list[float] = []
        self._events: list[bytes] = []
        self._finish: bytes | None = None
        self._usage: bytes | None = None
        self.chunks = 0
        self.failure: str | None = None
        self.over = False

    def take(self, events: Iterable[bytes], at: float) -> None:
        """Events that one read of the socket brought; what follows the end is none of the answer."""
        for event in () if self.over else events:
            if CHOICE.search(event):
                self._last = at
                finished = FINISH.search(event)
                if finished:
                    self._finish = event
                if self._text.search(event) or not (finished or ROLE.search(event)):
                    self._brought(event, at)
            elif event == DONE:
                self.over = True
                return
            elif not _is_object(event):
                self.failure = f"an event that is no JSON object: {said(event)}"
            if ERROR.search(event):
                self.failure = f"error in the stream: {said(event)}"
            if self.failure is not None:
                self.over = True
                return
            if USAGE.search(event):
                self._usage = event

    def _brought(self, event: bytes, at: float) -> None:
        if self._first is None:
            self._first = at
        else:
            self._gaps.append(at - self._latest)
        self._latest = at
        self.chunks += 1
        if self._keeps:
            self._events.append(event)

    def outcome(self, ended: float, *, status: int | None = None, failure: str | None = None, cancelled: bool = False) -> Outcome:
        """What became of the request; `failure`: what went wrong outside of the stream."""
        try:
            usage, reason, text = self._numbers(), self._reason(), self._said()
        except (ValueError, TypeError, LookupError, AttributeError):
            usage, reason, text = {}, None, ""
            failure = failure or self.failure or "an event that is no completion"
        failure = failure or self.failure
        if failure is None and not cancelled and not self.over and reason is None:
            failure = "the stream ended before the answer did"
        return Outcome(
            sent=self._sent,
            ended=ended,
            first=self._first,
            last=self._last,
            gaps=tuple(self._gaps),
            chunks=self.chunks,
            prompt_tokens=_count(usage, "prompt_tokens"),
            cached_tokens=_count(usage.get("prompt_tokens_details") or {}, "cached_tokens"),
            completion_tokens=_count(usage, "completion_tokens"),
            finish_reason=reason,
            text=text,
            status=status,
            failure=failure,
            cancelled=cancelled,
        )

    def _numbers(self) -> dict[str, Any]:
        return {} if self._usage is None else dict(json.loads(self._usage)["usage"])

    def _reason(self) -> str | None:
        return None if self._finish is None else str(json.loads(self._finish)["choices"][0]["finish_reason"])

    def _said(self) -> str:
        parts = []
        for event in self._events:
            choice = json.loads(event)["choices"][0]
            parts.append(choice.get("text") or choice.get("delta", {}).get("content") or "")
        return "".join(parts)


def _is_object(event: bytes) -> bool:
    try:
        return isinstance(json.loads(event), dict)
    except ValueError:
        return False


def _count(usage: dict[str, Any], name: str) -> int | None:
    value = usage.get(name)
    return value if isinstance(value, int) and not isinstance(value, bool) and value >= 0 else None


def said(body: bytes) -> str:
    """What a server's error says, in the forms that OpenAI, vLLM, FastAPI and plain servers use; at most `SHOWN` characters."""
    text = body.decode("utf-8", "replace").strip()
    try:
        value: Any = json.loads(text)
    except ValueError:
        return text[:SHOWN] or "nothing"
    for _ in range(3):
        if not isinstance(value, dict):
            break
        value = next((value[key] for key in ("error", "message", "detail") if value.get(key)), None)
    return (value if isinstance(value, str) else text)[:SHOWN]
