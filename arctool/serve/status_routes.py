"""/metrics for Prometheus, /status for the page: what the server does, in numbers."""

from __future__ import annotations

import asyncio

from fastapi import APIRouter
from starlette.responses import Response

from arctool.serve.replies import json_reply
from arctool.serve.service import Door


def status_routes(door: Door) -> APIRouter:
    router = APIRouter(tags=["observability"])

    @router.get("/metrics", summary="Prometheus metrics")
    async def metrics() -> Response:
        body, kind = await asyncio.to_thread(door.ready_or_draining().metrics.render)
        return Response(body, media_type=kind)

    @router.get("/status", summary="What the server does now")
    async def status() -> Response:
        return json_reply(door.ready_or_draining().status.numbers())

    return router
