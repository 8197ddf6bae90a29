"""POST /v1/responses: OpenAI's newer protocol over `talk`, for clients that send the whole conversation each time; nothing is kept here.

An answer is a list of items, and a stream tells how it grows; both are made by `Items`, so that they cannot differ. An answer that the
server ended (its time was up, or the server leaves) has failed, with what there is of it in `output`.
"""

from __future__ import annotations

import json
import re
import time
import uuid
from collections.abc import AsyncGenerator, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

from fastapi import APIRouter, Request
from starlette.responses import Response

from arctool.run.sampling.params import SamplingParams
from arctool.run.sampling.sampler import TokenLogprobs
from arctool.run.tokenizer import Tokenizer
from arctool.serve.logprobs import chat_logprobs
from arctool.serve.output.parts import CallArguments, CallStart, Content, Part, Reasoning
from arctool.serve.problems import Problem, spelled
from arctool.serve.protocol.common import constraint_of, sampling_params
from arctool.serve.protocol.responses import LOGPROBS, ResponsesBody, conversation_of
from arctool.serve.replies import event, json_reply, problem_in_stream, until_gone
from arctool.serve.service import Door, Service
from arctool.serve.strict_json import StrictRoute
from arctool.serve.talk import Dialogue, Saying
from arctool.serve.thinking import strengthened

NAMES = {
    "max_tokens": "max_output_tokens",
    "logprobs": "top_logprobs",
    "messages": "input",
    "response_format": "text.format",
    **dict.fromkeys(("json_schema", "response_format.json_schema"), "text.format.schema"),
    **dict.fromkeys(("json_object",), "text.format"),
    **dict.fromkeys(("regex", "response_format.regex"), "text.format.regex"),
    **dict.fromkeys(("grammar", "response_format.grammar"), "text.format.grammar"),
}
"""The body's names of what the rest of the server calls otherwise."""
TOOL_FIELD = re.compile(r"(tools\[\d+\]|tool_choice)\.function")


def responses_routes(door: Door) -> APIRouter:
    router = APIRouter(tags=["OpenAI"], route_class=StrictRoute)

    @router.post("/v1/responses", summary="Answer a conversation, item by item")
    async def responses(body: ResponsesBody, request: Request) -> Response:
        service = door.ready()
        service.check_model(body.model)
        begun = await until_gone(request, begin(service, body, request))
        if body.stream:
            return service.stream(_events(begun, request.url.path), begun.dialogue.answer, request, last=b"")
        return json_reply(await until_gone(request, _whole(begun)))

    return router


@dataclass(frozen=True)
class Begun:
    """What a request has become. `head`: what the response object repeats of it, and what does not change until the end."""

    dialogue: Dialogue
    head: dict[str, Any]
    tokenizer: Tokenizer | None
    logprobs: bool


async def begin(service: Service, body: ResponsesBody, request: Request) -> Begun:
    """Check and queue what the body asks for. Raises Problem, RequestError, EngineBusy, EngineStopped."""
    if body.stream_options is not None and not body.stream:
        raise Problem(400, "stream_options: only with stream", param="stream_options")
    logprobs = LOGPROBS in (body.include or ())
    if body.top_logprobs and not logprobs:
        raise Problem(400, f"top_logprobs: only with include {LOGPROBS}", param="top_logprobs")
    with spelled(_field):
        params = sampling_params(
            body,
            service.llm.generation,
            {},
            max_tokens=body.max_output_tokens,
            logprobs=(body.top_logprobs or 0) if logprobs else None,
            constraint=constraint_of(body.text.response_format() if body.text else None),
            cache_salt=service.salt(request.state.caller, body.cache_salt),
        )
        effort = body.reasoning.effort if body.reasoning else None
        variables = {} if effort is None else strengthened(service.talk, effort, "reasoning.effort")
        dialogue = await service.converse(conversation_of(body, variables), params, body.timeout, service.errand(request, body.stream))
    return Begun(dialogue, _head(service, body, params), service.llm.tokenizer, logprobs)


def _field(name: str) -> str:
    return NAMES.get(name, TOOL_FIELD.sub(r"\1", name))


TEXTS: dict[str, tuple[str, dict[str, Any]]] = {
    "message": ("response.output_text", {"type": "output_text", "annotations": []}),
    "reasoning": ("response.reasoning_text", {"type": "reasoning_text"}),
}
"""Kind of an item → the events of its text, and the part of it that the text is. (A call has arguments instead.)"""
CALL = "response.function_call_arguments"


@dataclass
class Item:
    """An item while it grows. `fields`: those that it begins with; `text`: its text, or its arguments."""

    kind: str
    fields: dict[str, Any]
    text: str = ""
    logprobs: list[dict[str, Any]] = field(default_factory=list)

    def part(self) -> dict[str, Any]:
        """Its only part, as far as it has grown."""
        extra = {"logprobs": list(self.logprobs)} if self.kind == "message" else {}
        return {**TEXTS[self.kind][1], "text": self.text, **extra}

    def whole(self, status: str) -> dict[str, Any]:
        """The item as far as it has grown."""
        grown = {"arguments": self.text} if self.kind == "function_call" else {"content": [self.part()]}
        return {"type": self.kind, **self.fields, **grown, "status": status}


class Items:
    """The items of one answer: takes its news and gives the events that tell of them. `output`: those that have ended."""

    def __init__(self, tokenizer: Tokenizer | None) -> None:
        self.output: list[dict[str, Any]] = []
        self._tokenizer = tokenizer
        self._open: Item | None = None
        self._held: list[tuple[int, TokenLogprobs]] = []  # tokens since the last part: they are the next one's

    def take(self, saying: Saying) -> Iterator[dict[str, Any]]:
        """The events of more news."""
        self._held += saying.logprobs
        for part in saying.parts:
            yield from self._take(part)

    def close(self, whole: bool) -> Iterator[dict[str, Any]]:
        """The events of the end of the item that grows, if one does. `whole`: nothing has cut it off."""
        item = self._open
        if item is None:
            return
        self._open = None
        status = "completed" if (is_object(item.text) if item.kind == "function_call" else whole) else "incomplete"
        self.output.append(item.whole(status))
        at = {"item_id": item.fields["id"], "output_index": len(self.output) - 1}
        if item.kind == "function_call":
            yield {"type": f"{CALL}.done", **at, "name": item.fields["name"], "arguments": item.text}
        else:
            extra = {"logprobs": item.part()["logprobs"]} if item.kind == "message" else {}
            yield {"type": f"{TEXTS[item.kind][0]}.done", **at, "content_index": 0, "text": item.text, **extra}
            yield {"type": "response.content_part.done", **at, "content_index": 0, "part": item.part()}
        yield {"type": "response.output_item.done", "output_index": at["output_index"], "item": self.output[-1]}

    def _take(self, part: Part) -> Iterator[dict[str, Any]]:
        match part:
            case Content(text):
                yield from self._become("message", "msg", {"role": "assistant"})
                yield self._delta(text, self._released())
            case Reasoning(text):
                yield from self._become("reasoning", "rs", {"summary": []})
                yield self._delta(text, None)
            case CallStart(_, call_id, name):
                yield from self.close(whole=True)
                yield from self._become("function_call", "fc", {"call_id": call_id, "name": name})
            case CallArguments(_, fragment):
                yield self._delta(fragment, None)
        self._held.clear()

    def _become(self, kind: str, prefix: str, fields: dict[str, Any]) -> Iterator[dict[str, Any]]:
        """Let the item that grows be of this kind."""
        if self._open is not None and self._open.kind == kind:
            return
        yield from self.close(whole=True)
        item = self._open = Item(kind, {"id": _id(prefix), **fields})
        begun = item.whole("in_progress")
        if kind != "function_call":
            begun["content"] = []
        yield {"type": "response.output_item.added", "output_index": len(self.output), "item": begun}
        if kind != "function_call":
            at = {"item_id": item.fields["id"], "output_index": len(self.output), "content_index": 0}
            yield {"type": "response.content_part.added", **at, "part": item.part()}

    def _delta(self, text: str, logprobs: list[dict[str, Any]] | None) -> dict[str, Any]:
        item = self._open
        assert item is not None
        item.text += text
        at = {"item_id": item.fields["id"], "output_index": len(self.output)}
        if item.kind == "function_call":
            return {"type": f"{CALL}.delta", **at, "delta": text}
        item.logprobs += logprobs or ()
        extra = {} if logprobs is None else {"logprobs": logprobs}
        return {"type": f"{TEXTS[item.kind][0]}.delta", **at, "content_index": 0, "delta": text, **extra}

    def _released(self) -> list[dict[str, Any]]:
        found: list[dict[str, Any]] = chat_logprobs(self._tokenizer, self._held)["content"]
        self._held.clear()
        return found


def is_object(text: str) -> bool:
    """Whether arguments are whole."""
    try:
        return isinstance(json.loads(text), dict)
    except (ValueError, RecursionError):
        return False


async def _whole(begun: Begun) -> dict[str, Any]:
    items, finish = Items(begun.tokenizer), ""
    async for saying in begun.dialogue:
        _drop(items.take(saying))
        finish = saying.finish or finish
    begun.dialogue.answer.check_begun()
    _drop(items.close(_ended_itself(finish)))
    return {**begun.head, "output": items.output, **_end(begun.dialogue, finish)}


def _drop(events: Iterable[Any]) -> None:
    for _ in events:
        pass


async def _events(begun: Begun, path: str) -> AsyncGenerator[bytes, None]:
    count = -1

    def told(value: dict[str, Any]) -> bytes:
        nonlocal count
        count += 1
        return event({**value, "sequence_number": count}, value["type"])

    unfinished = {**begun.head, "status": "in_progress", "output": []}
    items, finish = Items(begun.tokenizer), ""
    yield told({"type": "response.created", "response": unfinished})
    yield told({"type": "response.in_progress", "response": unfinished})
    try:
        async for saying in begun.dialogue:
            for happened in items.take(saying):
                yield told(happened)
            finish = saying.finish or finish
        begun.dialogue.answer.check_begun()
        end = _end(begun.dialogue, finish)
    except Exception as error:
        problem = problem_in_stream(path, error)
        end = _failed(problem.message)
    for happened in items.close(_ended_itself(finish)):
        yield told(happened)
    yield told({"type": f"response.{end['status']}", "response": {**begun.head, "output": items.output, **end}})


def _ended_itself(finish: str) -> bool:
    return finish in ("stop", "tool_calls")


def _end(dialogue: Dialogue, finish: str) -> dict[str, Any]:
    """What the response object says at its end."""
    if finish == "abort":
        ended = _failed("the request's time was up" if dialogue.answer.timed_out else "the server has ended the request")
    elif finish == "length":
        ended = {"status": "incomplete", "incomplete_details": {"reason": "max_output_tokens"}}
    else:
        ended = {"status": "completed", "completed_at": int(time.time())}
    return {**ended, "usage": _usage(dialogue)}


def _failed(message: str) -> dict[str, Any]:
    return {"status": "failed", "error": {"code": "server_error", "message": message}}


def _usage(dialogue: Dialogue) -> dict[str, Any]:
    done = dialogue.answer.completions[0]
    prompt, generated = dialogue.answer.prompt_tokens, len(done.token_ids)
    return {
        "input_tokens": prompt,
        "input_tokens_details": {"cached_tokens": done.cached_tokens, "cache_write_tokens": 0},
        "output_tokens": generated,
        "output_tokens_details": {"reasoning_tokens": dialogue.reasoning_tokens},
        "total_tokens": prompt + generated,
    }


def _head(service: Service, body: ResponsesBody, params: SamplingParams) -> dict[str, Any]:
    chosen = body.tool_choice
    wanted = body.text.format if body.text else None
    return {
        "id": _id("resp"),
        "object": "response",
        "created_at": int(time.time()),
        "completed_at": None,
        "error": None,
        "incomplete_details": None,
        "instructions": body.instructions,
        "max_output_tokens": body.max_output_tokens,
        "metadata": body.metadata or {},
        "model": service.facts.name,
        "parallel_tool_calls": body.parallel_tool_calls is not False,
        "previous_response_id": None,
        "background": False,
        "store": False,
        "truncation": "disabled",
        "service_tier": "default",
        "temperature": params.temperature,
        "top_p": params.top_p,
        "top_logprobs": body.top_logprobs or 0,
        "text": {"format": wanted.model_dump(by_alias=True, exclude_none=True) if wanted else {"type": "text"}},
        "reasoning": {"effort": body.reasoning.effort if body.reasoning else None, "summary": None},
        "tools": [tool.model_dump() for tool in body.tools or ()],
        "tool_choice": chosen.model_dump() if chosen is not None and not isinstance(chosen, str) else chosen or "auto",
        "user": body.user,
        "safety_identifier": body.safety_identifier,
        "prompt_cache_key": body.prompt_cache_key,
        "usage": None,
    }


def _id(prefix: str) -> str:
    return f"{prefix}_{uuid.uuid4().hex}"
