"""POST /v1/messages and /v1/messages/count_tokens: Anthropic's protocol over `talk`.

An answer is a list of content blocks, and a stream tells how it grows; both are made by `Blocks`, so that they cannot differ. An answer
that the server ended (its time was up, or the server leaves) is an error: `pause_turn`, the nearest word, makes clients go on with a turn
that nobody can go on with here.
"""

from __future__ import annotations

import json
import re
import uuid
from collections.abc import AsyncGenerator
from dataclasses import dataclass
from typing import Any

from fastapi import APIRouter, Request
from pydantic_core import from_json
from starlette.responses import Response

from arctool.run.sampling.constraint import Constraint
from arctool.serve.output.parts import CallArguments, CallStart, Content, Part, Reasoning
from arctool.serve.problems import Problem, spelled
from arctool.serve.protocol.anthropic import CountBody, MessagesBody, PromptFields, conversation_of
from arctool.serve.protocol.common import sampling_params
from arctool.serve.replies import event, json_reply, until_gone
from arctool.serve.service import Door, Service
from arctool.serve.strict_json import StrictRoute
from arctool.serve.talk import Conversation, Dialogue
from arctool.serve.thinking import strengthened, switched

NAMES = {"stop": "stop_sequences", "json_schema": "output_config.format.schema", "response_format": "output_config.format"}
"""The body's names of what the rest of the server calls otherwise."""
TOOL_FIELD = re.compile(r"(tools\[\d+\]|tool_choice)\.function(\.parameters)?")

TIER = {"service_tier": "standard"}
STOP_REASONS = {"stop": "end_turn", "length": "max_tokens", "tool_calls": "tool_use"}


def anthropic_routes(door: Door) -> APIRouter:
    router = APIRouter(tags=["Anthropic"], route_class=StrictRoute)

    @router.post("/v1/messages", summary="Answer a conversation")
    async def messages(body: MessagesBody, request: Request) -> Response:
        service = door.ready()
        service.check_model(body.model)
        dialogue = await until_gone(request, begin(service, body, request))
        if body.stream:
            return service.stream(_events(service, dialogue), dialogue.answer, request, last=b"")
        return json_reply(await until_gone(request, _whole(service, dialogue)))

    @router.post("/v1/messages/count_tokens", summary="Tokens of a conversation")
    async def count_tokens(body: CountBody, request: Request) -> Response:
        service = door.ready()
        service.check_model(body.model)
        return json_reply({"input_tokens": await until_gone(request, _count(service, body))})

    return router


async def begin(service: Service, body: MessagesBody, request: Request) -> Dialogue:
    """Check and queue what the body asks for. Raises Problem, RequestError, EngineBusy, EngineStopped."""
    with spelled(_field):
        params = sampling_params(
            body.sampling(),
            service.llm.generation,
            {},
            max_tokens=body.max_tokens,
            constraint=_constraint(body),
            cache_salt=service.salt(request.state.caller, None),
        )
        return await service.converse(_conversation(service, body, body.max_tokens), params, None, service.errand(request, body.stream))


async def _count(service: Service, body: CountBody) -> int:
    with spelled(_field):
        prepared = service.talk.prepare(_conversation(service, body, None))
        text = await service.render(prepared.messages, **prepared.variables)
        return len(await service.encode(text, special=False))


def _field(name: str) -> str:
    name = TOOL_FIELD.sub(lambda found: found[1] + (".input_schema" if found[2] else ""), name)
    return NAMES.get(name, name)


def _constraint(body: PromptFields) -> Constraint | None:
    wanted = body.output_config.format if body.output_config is not None else None
    return None if wanted is None else Constraint("json_schema", json.dumps(wanted.schema_))


def _conversation(service: Service, body: PromptFields, max_tokens: int | None) -> Conversation:
    variables: dict[str, Any] = {}
    if body.thinking is not None:
        variables |= switched(service.talk, body.thinking.type != "disabled", "thinking")
        if body.thinking.type == "enabled" and max_tokens is not None:
            _check_budget(body.thinking.budget_tokens, max_tokens)
    if body.output_config is not None and body.output_config.effort is not None:
        variables |= strengthened(service.talk, body.output_config.effort, "output_config.effort")
    return conversation_of(body, variables)


def _check_budget(budget: int | None, max_tokens: int) -> None:
    """Raise Problem for a budget that would have to cut thinking short: what max_tokens does not end, the model does."""
    if budget is not None and budget < max_tokens - 1:
        field = "thinking.budget_tokens"
        raise Problem(400, f"{field}: thinking is not cut short here; expected at least max_tokens - 1, or type adaptive", param=field)


@dataclass
class Block:
    """A content block while it grows. `start`: what it is when it begins; `text`: its text, thought, or JSON of its input."""

    start: dict[str, Any]
    text: str = ""

    def whole(self) -> dict[str, Any]:
        """The block as far as it has grown."""
        kind = self.start["type"]
        if kind == "tool_use":
            return {**self.start, "input": partial_object(self.text)}
        return {**self.start, kind: self.text}


DELTAS = {"text": ("text_delta", "text"), "thinking": ("thinking_delta", "thinking"), "tool_use": ("input_json_delta", "partial_json")}
"""Kind of a block → the kind of its deltas, and where their text is."""


class Blocks:
    """The blocks of one answer: takes its parts and gives the events that tell of them."""

    def __init__(self) -> None:
        self.blocks: list[Block] = []
        self._open = False

    def take(self, part: Part) -> list[dict[str, Any]]:
        """The events of one more part."""
        match part:
            case Content(text):
                return [*self._become("text", {"text": ""}), *self._delta(text)]
            case Reasoning(text):
                return [*self._become("thinking", {"thinking": "", "signature": ""}), *self._delta(text)]
            case CallStart(_, call_id, name):
                return [*self.close(), *self._become("tool_use", {"id": call_id, "name": name, "input": {}})]
            case CallArguments(_, fragment):
                return self._delta(fragment)

    def close(self) -> list[dict[str, Any]]:
        """The events of the end of the block that grows, if one does."""
        if not self._open:
            return []
        self._open = False
        return [{"type": "content_block_stop", "index": len(self.blocks) - 1}]

    def content(self) -> list[dict[str, Any]]:
        """The answer's content so far."""
        return [block.whole() for block in self.blocks]

    def _become(self, kind: str, start: dict[str, Any]) -> list[dict[str, Any]]:
        """Let the block that grows be of this kind."""
        if self._open and self.blocks[-1].start["type"] == kind:
            return []
        ending = self.close()
        self._open = True
        self.blocks.append(Block({"type": kind, **start}))
        return [*ending, {"type": "content_block_start", "index": len(self.blocks) - 1, "content_block": self.blocks[-1].start}]

    def _delta(self, text: str) -> list[dict[str, Any]]:
        block = self.blocks[-1]
        block.text += text
        kind, field = DELTAS[block.start["type"]]
        return [{"type": "content_block_delta", "index": len(self.blocks) - 1, "delta": {"type": kind, field: text}}]


def partial_object(text: str) -> dict[str, Any]:
    """A JSON object that may break off, without what is not whole in it: what Anthropic's client makes of the stream of a call."""
    try:
        value = from_json(text, allow_partial=True)
    except ValueError:
        return {}
    return value if isinstance(value, dict) else {}


async def _whole(service: Service, dialogue: Dialogue) -> dict[str, Any]:
    blocks, finish = Blocks(), ""
    async for saying in dialogue:
        for part in saying.parts:
            blocks.take(part)
        finish = saying.finish or finish
    if finish == "abort":
        raise dialogue.answer.cut_off()
    return {**_head(service), "content": blocks.content(), **_stop(dialogue, finish), "usage": {**_usage(dialogue), **TIER}}


async def _events(service: Service, dialogue: Dialogue) -> AsyncGenerator[bytes, None]:
    def told(value: dict[str, Any]) -> bytes:
        return event(value, value["type"])

    message = {**_head(service), "content": [], "stop_reason": None, "stop_sequence": None, "usage": {**_usage(dialogue), **TIER}}
    yield told({"type": "message_start", "message": message})
    blocks, finish = Blocks(), ""
    async for saying in dialogue:
        for part in saying.parts:
            for happened in blocks.take(part):
                yield told(happened)
        finish = saying.finish or finish
    if finish == "abort":
        raise dialogue.answer.cut_off()
    for happened in blocks.close():
        yield told(happened)
    yield told({"type": "message_delta", "delta": _stop(dialogue, finish), "usage": _usage(dialogue)})
    yield told({"type": "message_stop"})


def _stop(dialogue: Dialogue, finish: str) -> dict[str, Any]:
    stopped_by = dialogue.answer.completions[0].stopped_by if finish == "stop" else None
    return {"stop_reason": STOP_REASONS[finish] if stopped_by is None else "stop_sequence", "stop_sequence": stopped_by}


def _usage(dialogue: Dialogue) -> dict[str, Any]:
    """Tokens so far; what was found in the cache is known at the end. Anthropic counts it apart from `input_tokens`."""
    done = dialogue.answer.completions.get(0)
    cached = 0 if done is None else done.cached_tokens
    return {
        "input_tokens": dialogue.answer.prompt_tokens - cached,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": cached,
        "output_tokens": 0 if done is None else len(done.token_ids),
        "output_tokens_details": {"thinking_tokens": dialogue.reasoning_tokens},
    }


def _head(service: Service) -> dict[str, Any]:
    return {"id": f"msg_{uuid.uuid4().hex}", "type": "message", "role": "assistant", "model": service.facts.name}
