"""Who sent a request, and what is told of it once it is over: to the access log, and to a trace where somebody asked for traces."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection

from starlette.requests import Request

from arctool.run.requests import Completion
from arctool.run.sampling.params import SamplingParams
from arctool.serve.access_log import Note, note_of, request_id_of
from arctool.serve.tracing import Traced, Tracing


class Errand:
    """One request's. `operation`: "chat" or "text_completion", as traces call them; `arrived`: when its body was there, by `clock`."""

    def __init__(
        self,
        request: Request,
        operation: str,
        model: str,
        stream: bool,
        tracing: Tracing | None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.note: Note = note_of(request.scope)
        self.note.model, self.note.stream = model, stream
        self._scope = request.scope
        self._operation = operation
        self._tracing = tracing
        self._clock = clock
        self.arrived = clock()
        self._told = False

    def tell(
        self, params: SamplingParams, prompt_tokens: int, cached_tokens: int, first_token: float | None, done: Collection[Completion]
    ) -> None:
        """The request is over: what came of it, `first_token` in seconds. Only the first time counts."""
        if self._told:
            return
        self._told = True
        self.note.prompt_tokens, self.note.cached_tokens = prompt_tokens, cached_tokens
        self.note.completion_tokens = sum(len(completion.token_ids) for completion in done)
        self.note.finish_reasons = [completion.finish_reason.value for completion in done]
        self.note.ttft_ms = None if first_token is None else round(1000 * first_token, 3)
        if self._tracing is not None:
            self._tracing.record(
                Traced(
                    request_id=request_id_of(self._scope),
                    operation=self._operation,
                    params=params,
                    prompt_tokens=prompt_tokens,
                    seconds=self._clock() - self.arrived,
                    first_token=first_token,
                    completions=tuple(done),
                    headers=tuple(self._scope["headers"]),
                    error=None if done else "unfinished",
                )
            )
