"""/health: does the engine move? /ready: would a request be taken? Both for machines that ask often: they touch nothing but two clocks."""

from __future__ import annotations

from fastapi import APIRouter
from starlette.responses import Response

from arctool.serve.problems import Problem
from arctool.serve.replies import json_reply
from arctool.serve.service import Door


def health_of(door: Door) -> tuple[int, dict[str, object]]:
    """Status and body of /health. While the model is loaded nothing is wrong yet; an engine that stands still is."""
    if door.fault is not None:
        return 503, {"status": "failed", "reason": door.fault}
    if door.service is None:
        return 200, {"status": "loading"}
    engine = door.service.engine
    if not engine.healthy and not door.draining:
        return 503, {"status": "failed", "reason": "the engine's thread has ended"}
    late = engine.clock() - engine.last_tick
    if late > door.options.stall:
        return 503, {"status": "stalled", "reason": f"the engine has not finished a step for {late:.0f} s"}
    return 200, {"status": "draining" if door.draining else "ok"}


def ready_of(door: Door) -> tuple[int, dict[str, object]]:
    """Status and body of /ready."""
    status, body = health_of(door)
    if status != 200:
        return status, body
    try:
        door.ready()
    except Problem as problem:
        return problem.status, {"status": body["status"], "reason": problem.message}
    return 200, {"status": "ready"}


def health_routes(door: Door) -> APIRouter:
    router = APIRouter(tags=["health"])

    @router.head("/health", include_in_schema=False)
    @router.get("/health", summary="Whether the engine moves")
    async def health() -> Response:
        status, body = health_of(door)
        return json_reply(body, status)

    @router.head("/ready", include_in_schema=False)
    @router.get("/ready", summary="Whether requests are taken")
    async def ready() -> Response:
        status, body = ready_of(door)
        return json_reply(body, status)

    return router
