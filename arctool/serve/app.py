"""The application: routes, and in front of them, outermost first, the log, cross-origin rules, the gate and limits."""

from __future__ import annotations

from collections.abc import Callable

from fastapi import FastAPI
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import ASGIApp, Receive, Scope, Send

import arctool
from arctool.errors import ArctoolError
from arctool.serve.access_log import CLIENT_GONE, AccessLog
from arctool.serve.anthropic import anthropic_routes
from arctool.serve.callers import Gate, KeyRing
from arctool.serve.complaints import of_validation
from arctool.serve.health import health_routes
from arctool.serve.limits import LOOPBACK_NAMES, Limits
from arctool.serve.models_and_tokens import model_routes, token_routes
from arctool.serve.openai_chat import chat_routes
from arctool.serve.openai_completions import completion_routes
from arctool.serve.openapi import describe
from arctool.serve.page import mount_page
from arctool.serve.problems import Problem, internal, of_error
from arctool.serve.replies import ClientGone, problem_reply
from arctool.serve.responses import responses_routes
from arctool.serve.service import Door
from arctool.serve.settings import ServeOptions
from arctool.serve.status_routes import status_routes


def create_app(door: Door, write_log: Callable[[str], None]) -> ASGIApp:
    """The whole door as an ASGI application. `write_log` takes the lines of the access log."""
    app = FastAPI(title="arctool", version=arctool.__version__, docs_url=None, redoc_url=None, redirect_slashes=False)
    for router in (
        chat_routes(door),
        completion_routes(door),
        responses_routes(door),
        anthropic_routes(door),
        model_routes(door),
        token_routes(door),
        health_routes(door),
        status_routes(door),
    ):
        app.include_router(router)
    mount_page(app)
    describe(app, keys=bool(door.options.api_keys))

    async def known(request: Request, error: Exception) -> Response:
        problem = of_error(error)
        if problem is None:
            raise error
        return problem_reply(request.scope, problem)

    for kind in (Problem, ArctoolError):
        app.add_exception_handler(kind, known)
    app.add_exception_handler(RequestValidationError, _invalid)
    app.add_exception_handler(HTTPException, _http)
    app.add_exception_handler(ClientGone, _gone)
    app.add_exception_handler(Exception, _fault)
    return guarded(app, door, write_log)


def guarded(app: ASGIApp, door: Door, write_log: Callable[[str], None]) -> ASGIApp:
    """`app` behind everything that looks at a request before it does."""
    options = door.options
    app = Limits(app, max_body=options.max_body, body_timeout=options.body_timeout, hosts=_hosts(options))
    app = Gate(app, KeyRing(options.api_keys), ("/metrics",) if options.public_metrics else ())
    if options.cors_origins:
        app = CORSMiddleware(
            app, allow_origins=options.cors_origins, allow_methods=("GET", "POST"), allow_headers=("*",), expose_headers=("X-Request-Id",)
        )

    async def counted(scope: Scope, receive: Receive, send: Send) -> None:
        scope.setdefault("state", {})["refused"] = door.refused
        await app(scope, receive, send)

    return AccessLog(counted, write_log)


def _hosts(options: ServeOptions) -> frozenset[str] | None:
    """Names that are answered to: all where others may come in from elsewhere, and the operator has not said which."""
    if options.allowed_hosts:
        return frozenset(name.lower() for name in options.allowed_hosts) | LOOPBACK_NAMES
    return LOOPBACK_NAMES if options.loopback else None


async def _invalid(request: Request, error: Exception) -> Response:
    assert isinstance(error, RequestValidationError)
    return problem_reply(request.scope, of_validation(error.errors(), error.body))


async def _http(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    if error.status_code == 404:
        path = "".join(c if c.isprintable() else "?" for c in request.scope["path"][:100])
        problem = Problem(404, f"{path}: no such endpoint; /openapi.json lists them", code="unknown_url")
    elif error.status_code == 405:
        problem = Problem(405, f"{request.method} is not possible here", code="method_not_allowed", headers=dict(error.headers or {}))
    else:
        problem = Problem(error.status_code, str(error.detail), headers=dict(error.headers or {}))
    return problem_reply(request.scope, problem)


async def _fault(request: Request, error: Exception) -> Response:
    """The framework raises the error again once this is sent: the log gets it."""
    return problem_reply(request.scope, internal(str(request.scope.get("state", {}).get("request_id", "unknown"))))


async def _gone(request: Request, error: Exception) -> Response:
    return Response(status_code=CLIENT_GONE)
