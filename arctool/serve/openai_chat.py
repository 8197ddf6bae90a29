"""POST /v1/chat/completions: OpenAI's chat protocol over `talk`. A stream and a whole answer are two ways to write the same news."""

from __future__ import annotations

import time
import uuid
from collections.abc import AsyncGenerator, Mapping
from typing import Any

from fastapi import APIRouter, Request
from starlette.responses import Response

from arctool.serve.answering import Answer
from arctool.serve.logprobs import chat_logprobs
from arctool.serve.output.parts import CallArguments, CallStart, Content, Part, Reasoning
from arctool.serve.problems import Problem
from arctool.serve.protocol.chat import ChatBody, NamedTool
from arctool.serve.protocol.common import FORMAT_NAMES, constraint_of, sampling_params
from arctool.serve.replies import event, json_reply, until_gone
from arctool.serve.service import Door, Service
from arctool.serve.strict_json import StrictRoute
from arctool.serve.talk import Conversation, Dialogue, Saying, Spoken


def chat_routes(door: Door) -> APIRouter:
    router = APIRouter(tags=["OpenAI"], route_class=StrictRoute)

    @router.post("/v1/chat/completions", summary="Answer a conversation")
    async def chat_completions(body: ChatBody, request: Request) -> Response:
        service = door.ready()
        service.check_model(body.model)
        dialogue = await until_gone(request, begin(service, body, request))
        if body.stream:
            usage = bool(body.stream_options and body.stream_options.include_usage)
            return service.stream(_events(service, dialogue, body, usage), dialogue.answer, request)
        return json_reply(await until_gone(request, _whole(service, dialogue, body)))

    return router


async def begin(service: Service, body: ChatBody, request: Request) -> Dialogue:
    """Check and queue what the body asks for. Raises Problem, RequestError, EngineBusy, EngineStopped."""
    if body.stream_options is not None and not body.stream:
        raise Problem(400, "stream_options: only with stream", param="stream_options")
    if body.top_logprobs is not None and not body.logprobs:
        raise Problem(400, "top_logprobs: only with logprobs", param="top_logprobs")
    names = _names(body)
    params = sampling_params(
        body,
        service.llm.generation,
        names,
        max_tokens=_max_tokens(body),
        logprobs=(body.top_logprobs or 0) if body.logprobs else None,
        constraint=constraint_of(body.response_format),
        cache_salt=service.salt(request.state.caller, body.cache_salt),
    )
    try:
        return await service.converse(_conversation(body), params, body.timeout, service.errand(request, body.stream))
    except Problem as problem:
        raise problem.renamed(names) from problem


def _names(body: ChatBody) -> dict[str, str]:
    """What the body calls things that go by other names inside."""
    names = dict(FORMAT_NAMES) if body.response_format is not None else {}
    if body.logprobs:
        names["logprobs"] = "top_logprobs"
    if body.max_tokens is None:
        names["max_tokens"] = "max_completion_tokens"
    if "reasoning_effort" not in (body.chat_template_kwargs or {}):
        names["chat_template_kwargs.reasoning_effort"] = "reasoning_effort"
    return names


def _max_tokens(body: ChatBody) -> int | None:
    if body.max_tokens is not None and body.max_completion_tokens is not None and body.max_tokens != body.max_completion_tokens:
        raise Problem(400, "max_completion_tokens: max_tokens says otherwise; give one of them", param="max_completion_tokens")
    return body.max_tokens if body.max_completion_tokens is None else body.max_completion_tokens


def _conversation(body: ChatBody) -> Conversation:
    variables = dict(body.chat_template_kwargs or {})
    if body.reasoning_effort is not None:
        variables.setdefault("reasoning_effort", body.reasoning_effort)
    named = isinstance(body.tool_choice, NamedTool)
    return Conversation(
        messages=[message.plain() for message in body.messages],
        tools=[tool.model_dump(exclude_none=True) for tool in body.tools or ()],
        tool_choice=body.tool_choice.function.name if isinstance(body.tool_choice, NamedTool) else body.tool_choice or "auto",
        named=named,
        parallel=body.parallel_tool_calls is not False,
        variables=variables,
    )


async def _whole(service: Service, dialogue: Dialogue, body: ChatBody) -> dict[str, Any]:
    spoken = await dialogue.listen()
    choices = [
        {
            "index": choice,
            "message": _message(one),
            "logprobs": chat_logprobs(service.llm.tokenizer, one.logprobs) if body.logprobs else None,
            "finish_reason": one.finish,
        }
        for choice, one in enumerate(spoken)
    ]
    return {**_head(service, "chat.completion"), "choices": choices, "usage": _usage(dialogue)}


def _message(one: Spoken) -> dict[str, Any]:
    message: dict[str, Any] = {"role": "assistant", "content": one.content if one.content or not one.calls else None, "refusal": None}
    if one.reasoning:
        message["reasoning_content"] = one.reasoning
    if one.calls:
        message["tool_calls"] = [
            {"id": call.call_id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}} for call in one.calls
        ]
    return message


async def _events(service: Service, dialogue: Dialogue, body: ChatBody, usage: bool) -> AsyncGenerator[bytes, None]:
    head = _head(service, "chat.completion.chunk")

    def chunk(choice: int, delta: Mapping[str, Any], finish: str | None = None, logprobs: Any = None) -> bytes:
        choices = [{"index": choice, "delta": delta, "logprobs": logprobs, "finish_reason": finish}]
        return event({**head, "choices": choices, "usage": None} if usage else {**head, "choices": choices})

    held: dict[int, list[Any]] = {}
    for choice in range(dialogue.choices):
        yield chunk(choice, {"role": "assistant", "content": ""})
    async for saying in dialogue:
        if body.logprobs:
            held.setdefault(saying.choice, []).extend(saying.logprobs)
        for delta in _deltas(saying):
            yield chunk(saying.choice, delta, logprobs=_released(service, held, saying.choice))
        if saying.finish is not None:
            yield chunk(saying.choice, {}, saying.finish, _released(service, held, saying.choice))
    if usage:
        yield event({**head, "choices": [], "usage": _usage(dialogue)})


def _released(service: Service, held: dict[int, list[Any]], choice: int) -> Any:
    """The log-probabilities whose text has not left yet: they leave with the next text."""
    tokens = held.pop(choice, None)
    found = chat_logprobs(service.llm.tokenizer, tokens or ())
    return found if found["content"] else None


def _deltas(saying: Saying) -> list[dict[str, Any]]:
    return [_delta(part) for part in saying.parts]


def _delta(part: Part) -> dict[str, Any]:
    match part:
        case Content(text):
            return {"content": text}
        case Reasoning(text):
            return {"reasoning_content": text}
        case CallStart(index, call_id, name):
            return {"tool_calls": [{"index": index, "id": call_id, "type": "function", "function": {"name": name, "arguments": ""}}]}
        case CallArguments(index, fragment):
            return {"tool_calls": [{"index": index, "function": {"arguments": fragment}}]}


def _usage(dialogue: Dialogue) -> dict[str, Any]:
    return {**usage_of(dialogue.answer), "completion_tokens_details": {"reasoning_tokens": dialogue.reasoning_tokens}}


def usage_of(answer: Answer) -> dict[str, Any]:
    """Tokens of a request, all its choices together, once they have ended."""
    done = answer.completions.values()
    generated = sum(len(completion.token_ids) for completion in done)
    return {
        "prompt_tokens": answer.prompt_tokens,
        "completion_tokens": generated,
        "total_tokens": answer.prompt_tokens + generated,
        "prompt_tokens_details": {"cached_tokens": answer.cached_tokens},
    }


def _head(service: Service, kind: str) -> dict[str, Any]:
    return {"id": f"chatcmpl-{uuid.uuid4().hex}", "object": kind, "created": int(time.time()), "model": service.facts.name}
