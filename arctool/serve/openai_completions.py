"""POST /v1/completions: plain text or token ids continued, several prompts at once if asked."""

from __future__ import annotations

import time
import uuid
from collections.abc import AsyncGenerator
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from fastapi import APIRouter, Request
from starlette.responses import Response

from arctool.errors import RequestError
from arctool.run.sampling.checks import short
from arctool.run.sampling.params import SamplingParams
from arctool.run.sampling.sampler import TokenLogprobs
from arctool.serve.answering import Answer
from arctool.serve.logprobs import Offsets, completion_logprobs
from arctool.serve.openai_chat import usage_of
from arctool.serve.problems import Problem, of_request
from arctool.serve.protocol.common import FORMAT_NAMES, constraint_of, sampling_params
from arctool.serve.protocol.completions import CompletionBody
from arctool.serve.replies import event, json_reply, until_gone
from arctool.serve.service import Door, Service
from arctool.serve.strict_json import StrictRoute

DEFAULT_MAX_TOKENS = 16
"""OpenAI's."""
MAX_CHOICES = 1024


@dataclass
class Begun:
    """What a request has become: its prompts' ids and (with echo) texts, and its answer; None where only the prompt is to be echoed."""

    prompts: list[list[int]]
    echoed: list[str]
    n: int
    answer: Answer | None

    def head(self, choice: int) -> str:
        """What a choice's text begins with."""
        return self.echoed[choice // self.n] if self.echoed else ""


@dataclass
class Text:
    """One choice so far: its pieces, the tokens whose log-probabilities have not left yet, and where the next of those begins."""

    pieces: list[str] = field(default_factory=list)
    tokens: list[tuple[int, TokenLogprobs]] = field(default_factory=list)
    offsets: Offsets = field(default_factory=Offsets)


def completion_routes(door: Door) -> APIRouter:
    router = APIRouter(tags=["OpenAI"], route_class=StrictRoute)

    @router.post("/v1/completions", summary="Continue plain text")
    async def completions(body: CompletionBody, request: Request) -> Response:
        service = door.ready()
        service.check_model(body.model)
        begun = await until_gone(request, _begin(service, body, request))
        if body.stream:
            return service.stream(_events(service, begun, body), begun.answer, request)
        return json_reply(await until_gone(request, _whole(service, begun, body)))

    return router


async def _begin(service: Service, body: CompletionBody, request: Request) -> Begun:
    params = _params(service, body, request)
    errand = service.errand(request, body.stream, "text_completion")
    deadline = service.deadline(body.timeout, errand)
    try:
        async with deadline.kept():
            prompts = [await service.encode(p, special=True) if isinstance(p, str) else p for p in body.prompt]
            echoing = body.prompt if body.echo else ()
            echoed = [p if isinstance(p, str) else await service.engine.beside(partial(service.decode, p)) for p in echoing]
            for prompt in prompts if body.max_tokens == 0 else ():
                await service.engine.beside(partial(service.llm.engine.check, prompt, params))
        return Begun(prompts, echoed, params.n, None if body.max_tokens == 0 else await service.answer(prompts, params, deadline, errand))
    except RequestError as error:
        raise of_request(error).renamed({"tokens": "prompt", **FORMAT_NAMES}) from error


def _params(service: Service, body: CompletionBody, request: Request) -> SamplingParams:
    if body.stream_options is not None and not body.stream:
        raise Problem(400, "stream_options: only with stream", param="stream_options")
    n = 1 if body.n is None else body.n
    if body.best_of is not None and body.best_of != n:
        raise Problem(400, f"best_of: only the value of n, {short(n)}, is possible here", param="best_of")
    if n * len(body.prompt) > MAX_CHOICES:
        raise Problem(400, f"n: expected at most {MAX_CHOICES} choices over all prompts, found {short(n * len(body.prompt))}", param="n")
    if body.echo and body.logprobs is not None:
        raise Problem(400, "echo: log-probabilities of a prompt are not computed; leave out echo or logprobs", param="echo")
    if body.max_tokens == 0 and not body.echo:
        raise Problem(400, "max_tokens: expected at least 1; 0 only with echo", param="max_tokens")
    if body.max_tokens == 0 and body.response_format is not None:
        raise Problem(400, "response_format: nothing is generated with max_tokens 0", param="response_format")
    return sampling_params(
        body,
        service.llm.generation,
        {},
        max_tokens=DEFAULT_MAX_TOKENS if body.max_tokens is None else body.max_tokens or 1,  # 0: nothing is generated, all else is checked
        logprobs=body.logprobs,
        constraint=constraint_of(body.response_format),
        cache_salt=service.salt(request.state.caller, body.cache_salt),
    )


async def _whole(service: Service, begun: Begun, body: CompletionBody) -> dict[str, Any]:
    texts = [Text() for _ in range(len(begun.prompts) * begun.n)]
    if begun.answer is not None:
        async for news in begun.answer:
            text = texts[news.choice]
            text.pieces.append(news.update.text)
            text.tokens += zip(news.update.token_ids, news.update.logprobs, strict=False)
        begun.answer.check_begun()
    choices = [
        {
            "index": choice,
            "text": begun.head(choice) + "".join(text.pieces),
            "logprobs": completion_logprobs(service.llm.tokenizer, text.tokens, text.offsets) if body.logprobs is not None else None,
            "finish_reason": _finish(begun, choice),
        }
        for choice, text in enumerate(texts)
    ]
    return {**_head(service), "choices": choices, "usage": _usage(begun)}


async def _events(service: Service, begun: Begun, body: CompletionBody) -> AsyncGenerator[bytes, None]:
    head = _head(service)
    usage = bool(body.stream_options and body.stream_options.include_usage)

    def chunk(choice: int, text: str, logprobs: Any = None, finish: str | None = None) -> bytes:
        choices = [{"index": choice, "text": text, "logprobs": logprobs, "finish_reason": finish}]
        return event({**head, "choices": choices, "usage": None} if usage else {**head, "choices": choices})

    texts = [Text() for _ in range(len(begun.prompts) * begun.n)]
    for choice in range(len(texts)):
        if begun.head(choice) or begun.answer is None:
            yield chunk(choice, begun.head(choice), finish=None if begun.answer else "length")
    if begun.answer is not None:
        async for news in begun.answer:
            text, update = texts[news.choice], news.update
            text.tokens += zip(update.token_ids, update.logprobs, strict=False)
            ended = update.completion is not None
            if not update.text and not ended:
                continue
            logprobs = None
            if body.logprobs is not None and text.tokens:
                logprobs = completion_logprobs(service.llm.tokenizer, text.tokens, text.offsets)
                text.tokens = []
            yield chunk(news.choice, update.text, logprobs, _finish(begun, news.choice) if ended else None)
    if usage:
        yield event({**head, "choices": [], "usage": _usage(begun)})


def _finish(begun: Begun, choice: int) -> str:
    return "length" if begun.answer is None else begun.answer.completions[choice].finish_reason.value


def _usage(begun: Begun) -> dict[str, Any]:
    if begun.answer is not None:
        return usage_of(begun.answer)
    tokens = sum(map(len, begun.prompts))
    return {"prompt_tokens": tokens, "completion_tokens": 0, "total_tokens": tokens, "prompt_tokens_details": {"cached_tokens": 0}}


def _head(service: Service) -> dict[str, Any]:
    return {"id": f"cmpl-{uuid.uuid4().hex}", "object": "text_completion", "created": int(time.time()), "model": service.facts.name}
