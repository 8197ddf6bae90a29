"""What is served, and its tokenizer: /v1/models, /tokenize, /detokenize."""

from __future__ import annotations

from typing import Any

from fastapi import APIRouter, Request
from starlette.responses import Response

from arctool.serve.problems import Problem, spelled
from arctool.serve.protocol.completions import DetokenizeBody, TokenizeBody
from arctool.serve.replies import json_reply, until_gone
from arctool.serve.service import Door, Service
from arctool.serve.strict_json import StrictRoute
from arctool.serve.talk import Conversation


def model_routes(door: Door) -> APIRouter:
    router = APIRouter(tags=["OpenAI"])

    @router.get("/v1/models", summary="What is served")
    async def models() -> Response:
        return json_reply({"object": "list", "data": [_model(door.ready())]})

    @router.get("/v1/models/{name:path}", summary="One model")
    async def model(name: str) -> Response:
        service = door.ready()
        service.check_model(name)
        return json_reply(_model(service))

    return router


def token_routes(door: Door) -> APIRouter:
    router = APIRouter(tags=["tokens"], route_class=StrictRoute)

    @router.post("/tokenize", summary="Token ids of a text or a conversation")
    async def tokenize(body: TokenizeBody, request: Request) -> Response:
        service = door.ready()
        service.check_model(body.model)
        ids = await until_gone(request, _ids(service, body))
        return json_reply({"count": len(ids), "max_model_len": service.facts.max_model_len, "tokens": ids})

    @router.post("/detokenize", summary="The text of token ids")
    async def detokenize(body: DetokenizeBody, request: Request) -> Response:
        service = door.ready()
        service.check_model(body.model)
        text = await until_gone(request, service.engine.beside(lambda: service.decode(body.tokens)))
        return json_reply({"prompt": text})

    return router


async def _ids(service: Service, body: TokenizeBody) -> list[int]:
    if (body.prompt is None) == (body.messages is None):
        raise Problem(400, "prompt: expected either prompt or messages", param="prompt")
    if body.prompt is not None:
        for field in ("tools", "chat_template_kwargs", "add_generation_prompt"):
            if getattr(body, field) is not None:
                raise Problem(400, f"{field}: only with messages", param=field)
        return await service.encode(body.prompt, special=body.add_special_tokens is not False)
    if body.add_special_tokens is not None:
        raise Problem(400, "add_special_tokens: only with prompt; a rendered conversation brings its own", param="add_special_tokens")
    conversation = Conversation(
        messages=[message.plain() for message in body.messages or ()],
        tools=[tool.model_dump(exclude_none=True) for tool in body.tools or ()],
        variables=body.chat_template_kwargs or {},
    )
    with spelled(lambda name: {"prompt": "messages", "variables": "chat_template_kwargs"}.get(name, name)):
        prepared = service.talk.prepare(conversation)
        ending = {"add_generation_prompt": body.add_generation_prompt is not False}
        text = await service.render(prepared.messages, **{**prepared.variables, **ending})
        return await service.encode(text, special=False)


def _model(service: Service) -> dict[str, Any]:
    facts = service.facts
    return {
        "id": facts.name,
        "object": "model",
        "created": service.created,
        "owned_by": "arctool",
        "max_model_len": facts.max_model_len,
        "bits_per_weight": facts.bits_per_weight,
        "formats": dict(facts.formats),
        "kv_dtype": facts.kv_dtype,
        "kv_tokens": facts.kv_tokens,
    }
