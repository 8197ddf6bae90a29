"""The model behind the door: what every endpoint may ask of it, and the state in which it is."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncGenerator, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import Any

from starlette.requests import Request

from arctool.errors import RequestError
from arctool.run.async_engine import AsyncEngine
from arctool.run.llm import LLM
from arctool.run.sampling.params import SamplingParams
from arctool.serve.answering import Answer, Deadline, answer
from arctool.serve.callers import Caller
from arctool.serve.errand import Errand
from arctool.serve.metrics import Metrics
from arctool.serve.output.forced import explained
from arctool.serve.problems import Problem, of_request, unavailable
from arctool.serve.protocol.common import check_timeout
from arctool.serve.replies import DONE, EventStream, told
from arctool.serve.settings import ServeOptions
from arctool.serve.status import Status
from arctool.serve.talk import Conversation, Dialogue, Talk
from arctool.serve.tracing import Tracing


@dataclass(frozen=True)
class ModelFacts:
    """What /v1/models tells. `bits_per_weight` of the packed layers, None where nothing is packed; `formats`: label → layers."""

    name: str
    max_model_len: int
    bits_per_weight: float | None
    formats: Mapping[str, int]
    kv_dtype: str
    kv_tokens: int


class Service:
    """One loaded model and its engine. Made in the server's event loop once the model is loaded."""

    def __init__(
        self,
        llm: LLM,
        options: ServeOptions,
        facts: ModelFacts,
        metrics: Metrics,
        status: Status,
        engine: AsyncEngine,
        tracing: Tracing | None = None,
    ) -> None:
        self.llm = llm
        self.options = options
        self.facts = facts
        self.metrics = metrics
        self.status = status
        self._tracing = tracing
        self.engine = engine
        self.created = int(time.time())
        self.talk = Talk(llm, options.tool_parser, options.reasoning_parser)
        # One thread, because a template's meter counts one rendering at a time.
        self._renderer = ThreadPoolExecutor(1, "arctool-render")
        self._at_door = 0

    def check_model(self, name: str | None) -> None:
        """Raise Problem 404 for another model than ours; no name means ours."""
        if name is not None and name != self.facts.name:
            shown = name if name.isprintable() and len(name) <= 100 else "that name"
            raise Problem(404, f"model: {shown} is not served here; this is {self.facts.name}", param="model", code="model_not_found")

    def errand(self, request: Request, stream: bool | None, operation: str = "chat") -> Errand:
        """What log and traces will tell of a request, begun."""
        return Errand(request, operation, self.facts.name, bool(stream), self._tracing)

    async def render(self, messages: Sequence[Mapping[str, Any]], /, **variables: Any) -> str:
        """A conversation as the text of a prompt. Raises RequestError, EngineBusy, EngineStopped."""
        loop = asyncio.get_running_loop()
        with self._waiting_at_door():
            return await loop.run_in_executor(self._renderer, lambda: self.llm.render_chat(messages, **variables))

    async def encode(self, text: str, *, special: bool) -> list[int]:
        """Token ids of a text; `special`: with what the tokenizer puts around it. Raises RequestError, EngineBusy, EngineStopped."""
        with self._waiting_at_door():
            return await self.engine.beside(lambda: self.llm.encode_text(text, add_special_tokens=special))

    @contextlib.contextmanager
    def _waiting_at_door(self) -> Iterator[None]:
        """Count a request that is not the engine's yet: it waits like those in the queue, and has a body in memory, too."""
        self.engine.check_admission(self._at_door)
        self._at_door += 1
        try:
            yield
        finally:
            self._at_door -= 1

    def decode(self, ids: Sequence[int]) -> str:
        """The text of token ids, special ones left out. Raises RequestError."""
        tokenizer = self.llm.tokenizer
        if tokenizer is None:
            raise RequestError("tokens: this model came without a tokenizer")
        for token in ids:
            if not 0 <= token < tokenizer.size:
                raise RequestError(f"tokens: expected token ids from 0 to {tokenizer.size - 1}, found {token}")
        return tokenizer.decode(list(ids))

    def deadline(self, timeout: float | None, errand: Errand) -> Deadline:
        """When a request that asks for `timeout` must have ended. Raises Problem for what is no time."""
        check_timeout(timeout)
        limits = [limit for limit in (timeout, self.options.request_timeout) if limit is not None]
        # The errand's clock and the event loop's are one.
        return Deadline(errand.arrived + min(limits) if limits else None)

    async def answer(self, prompts: Sequence[Sequence[int]], params: SamplingParams, deadline: Deadline, errand: Errand) -> Answer:
        """Queue a request. Raises what `answering.answer` raises."""
        return await answer(self.engine, self.metrics, prompts, params, deadline, errand)

    async def converse(self, conversation: Conversation, params: SamplingParams, timeout: float | None, errand: Errand) -> Dialogue:
        """Queue a conversation. Raises what `answer` raises, by the fields of a chat."""
        forced, deadline = None, self.deadline(timeout, errand)
        try:
            prepared = self.talk.prepare(conversation)
            if prepared.tools and params.constraint is not None:
                raise Problem(400, "response_format: cannot be combined with tools, unless tool_choice is none", param="response_format")
            async with deadline.kept():
                text = await self.render(prepared.messages, **prepared.variables)
                ids = await self.encode(text, special=False)
            plain = params.constraint is not None
            forced = self.talk.forced(prepared, text)
            params = replace(params, constraint=forced or params.constraint, shown_token_ids=prepared.shown_token_ids)
            answer = await self.answer([ids], params, deadline, errand)
        except RequestError as error:
            error = error if forced is None else explained(error, forced)
            raise of_request(error).renamed({"prompt": "messages", "variables": "chat_template_kwargs"}) from error
        return Dialogue(answer, [self.talk.parser(prepared, text, plain=plain) for _ in range(params.n)])

    def stream(self, events: AsyncGenerator[bytes, None], answer: Answer | None, request: Request, last: bytes = DONE) -> EventStream:
        """Events made of `answer`, for a client, in the protocol of the path that it asked."""
        close = _nothing if answer is None else answer.close
        return EventStream(told(events, request.scope, last), self.options.keep_alive, close)

    def close(self) -> None:
        """Let go of what is the service's own. The engine ends by itself."""
        self._renderer.shutdown(wait=False, cancel_futures=True)

    def salt(self, caller: Caller, own: str | None) -> str:
        """The salt of the caller's cached prefixes."""
        return caller.salt(own or "", shared=self.options.share_prefix_cache)


def _nothing() -> None:
    pass


class Door:
    """What the application knows before, while and after there is a service. `fault`: why there will be none any more."""

    def __init__(self, options: ServeOptions) -> None:
        self.options = options
        self.service: Service | None = None
        self.fault: str | None = None
        self.draining = False

    def refused(self, reason: str) -> None:
        """Count a request that was not taken."""
        if self.service is not None:
            self.service.metrics.rejected(reason)

    def ready_or_draining(self) -> Service:
        """The service, also while it finishes what it has taken. Raises Problem 503 while there is none."""
        if self.service is None:
            raise unavailable(self.fault or "the model is being loaded; /ready says when it is")
        return self.service

    def ready(self) -> Service:
        """The service. Raises Problem 503 while there is none, or it is leaving."""
        if self.fault is not None:
            raise unavailable(self.fault)
        if self.draining:
            raise unavailable("the server is shutting down and takes no more requests")
        return self.ready_or_draining()
