"""A stand-in for the server, as far as the chat page sees it: what it says is chosen by the text of the last user message.

`SCRIPTS` is the one place that says which message has which answer. A script that `holds` sends its first piece and then waits until
the test lets it go on; the client may leave meanwhile, which `left` tells.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import threading
from collections.abc import AsyncIterator, Iterator
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any

import uvicorn
from fastapi import FastAPI
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse

from arctool.serve.page import mount_page


@dataclass(frozen=True)
class Script:
    """What a message brings: reasoning and text in pieces; or a refusal; or an error when the text is out."""

    text: str = ""
    reasoning: str = ""
    holds: bool = False
    refusal: tuple[int, str] | None = None
    breaks: str | None = None
    finish: str = "stop"


MARKDOWN = """\
# Two plus two

It is **four**, as `2 + 2` shows:

```python
def add(a, b):
    return a + b
```

1. count *two*
2. count two more

| a | b | a + b |
|---|---|------:|
| 2 | 2 | 4 |

See [the proof](https://example.com/proof).
"""

HOSTILE = """\
Before <script>window.pwned = "script"</script> it, <img src="https://evil.example/i.png" onerror="window.pwned = 'img'"> and
[a link](javascript:window.pwned='link'), [data](data:text/html,<script>window.pwned=1</script>), ![picture](https://evil.example/p.png).

<div style="position:fixed;inset:0" onclick="window.pwned='div'"><iframe src="https://evil.example/"></iframe></div>

<svg onload="window.pwned='svg'"><a xlink:href="javascript:window.pwned='svg-link'">x</a></svg>

```<script>window.pwned='info'</script>
</code></pre><script>window.pwned='code'</script>
```

The end of it, and [an honest link](https://example.com/).
"""

SCRIPTS = {
    "What is two plus two?": Script(MARKDOWN),
    "Speak slowly": Script("The first words, and then the last ones.", holds=True),
    "Think first": Script("It is **seven**.", reasoning="The user wants a number.\n\n- six is too few\n- eight too many\n"),
    "Refuse this": Script(refusal=(400, "messages[0]: this server does not talk about that")),
    "You are full": Script(refusal=(503, "The queue is full.")),
    "Break off": Script("Half of an", breaks="The engine has lost this request."),
    "Hang up": Script("Half of an answer", finish=""),
    "Be hostile": Script(HOSTILE),
    "Be brief": Script("Too lo", finish="length"),
    "Go on for long": Script("\n\n".join(f"Paragraph {number} of a long answer, with words in it." for number in range(60)), holds=True),
}

KEY = "open sesame"


@dataclass
class StandIn:
    """A running stand-in. `bodies`: the chat requests that came; `left`: set when a client went before its answer was complete."""

    url: str = ""
    bodies: list[dict[str, Any]] = field(default_factory=list)
    scripts: dict[str, Script] = field(default_factory=lambda: dict(SCRIPTS))
    models: list[str] = field(default_factory=lambda: ["tiny-qtip4"])
    status: dict[str, Any] = field(default_factory=dict)
    key: str | None = None
    leave: Future[None] = field(default_factory=Future)
    left: threading.Event = field(default_factory=threading.Event)

    def go_on(self) -> None:
        """Lets every script that holds go on."""
        if not self.leave.done():
            self.leave.set_result(None)

    def reset(self) -> None:
        """As it was when it started."""
        fresh = StandIn()
        self.bodies, self.scripts, self.models, self.key = fresh.bodies, fresh.scripts, fresh.models, fresh.key
        self.leave = Future()
        self.left.clear()
        self.status = {
            "model": "tiny-qtip4",
            "version": "0.1.0",
            "ready": True,
            "running": 0,
            "waiting": 0,
            "kv_cache_usage": 0.0,
            "prompt_tokens_per_second": 0.0,
            "generated_tokens_per_second": 0.0,
            "requests_finished": 0,
            "uptime_seconds": 61.0,
            "max_model_len": 4096,
        }

    def app(self) -> FastAPI:
        app = FastAPI()
        mount_page(app)
        app.add_api_route("/v1/models", self._models, methods=["GET"])
        app.add_api_route("/status", self._status, methods=["GET"])
        app.add_api_route("/v1/chat/completions", self._chat, methods=["POST"])
        return app

    def _refused(self, request: Request) -> Response | None:
        if self.key is None or request.headers.get("Authorization") == f"Bearer {self.key}":
            return None
        return _error(401, "A key is needed: Authorization: Bearer KEY.")

    async def _models(self, request: Request) -> Response:
        data = [{"id": name, "object": "model", "max_model_len": 4096} for name in self.models]
        return self._refused(request) or JSONResponse({"object": "list", "data": data})

    async def _status(self, request: Request) -> Response:
        return self._refused(request) or JSONResponse(self.status)

    async def _chat(self, request: Request) -> Response:
        if (refused := self._refused(request)) is not None:
            return refused
        body = await request.json()
        self.bodies.append(body)
        said = body["messages"][-1]["content"]
        script = self.scripts.get(said, Script(f"You said: {said}"))
        if script.refusal is not None:
            return _error(*script.refusal)
        return StreamingResponse(self._events(script, body["model"]), media_type="text/event-stream")

    async def _leave_to_go_on(self) -> None:
        """Returns when the test says so; starlette cancels it when the client is gone."""
        try:
            await asyncio.shield(asyncio.wrap_future(self.leave))
        except asyncio.CancelledError:
            self.left.set()
            raise

    async def _events(self, script: Script, model: str) -> AsyncIterator[str]:
        def event(*choices: dict[str, Any], **more: Any) -> str:
            chunk = {"id": "chatcmpl-1", "object": "chat.completion.chunk", "model": model, "choices": choices, **more}
            return f"data: {json.dumps(chunk)}\n\n"

        def delta(finish: str | None = None, **fields: str) -> str:
            return event({"index": 0, "delta": fields, "finish_reason": finish})

        yield delta(role="assistant", content="")
        pieces = [(name, piece) for name in ("reasoning", "text") for piece in _pieces(getattr(script, name))]
        for number, (name, piece) in enumerate(pieces):
            if script.holds and number == 1:
                await self._leave_to_go_on()
            yield ": a comment keeps the line open\n\n" + delta(**{"content" if name == "text" else "reasoning_content": piece})
        if script.breaks is not None:
            yield f"data: {json.dumps({'error': {'message': script.breaks, 'type': 'server_error', 'param': None, 'code': None}})}\n\n"
            return
        if not script.finish:
            return
        yield delta(finish=script.finish)
        counts = {"prompt_tokens": 21, "completion_tokens": len(pieces), "prompt_tokens_details": {"cached_tokens": 16}}
        yield event(usage=counts | {"total_tokens": 21 + len(pieces)})
        yield "data: [DONE]\n\n"


def _pieces(text: str) -> list[str]:
    """Words with the space before them, about as tokens are."""
    return [text[at : at + 5] for at in range(0, len(text), 5)]


def _error(status: int, message: str) -> Response:
    error = {"message": message, "type": "invalid_request_error", "param": None, "code": None}
    return JSONResponse({"error": error}, status, headers={"Retry-After": "3"} if status == 503 else None)


@contextlib.contextmanager
def running() -> Iterator[StandIn]:
    """A stand-in that listens on a port of its own, in a thread."""
    stand_in = StandIn()
    stand_in.reset()
    server = uvicorn.Server(uvicorn.Config(stand_in.app(), host="127.0.0.1", port=0, log_level="warning", ws="none", lifespan="off"))
    started = threading.Event()
    startup = server.startup

    async def startup_and_tell(*arguments: Any, **options: Any) -> None:
        await startup(*arguments, **options)
        started.set()

    server.startup = startup_and_tell  # type: ignore[method-assign]
    thread = threading.Thread(target=server.run)
    thread.start()
    try:
        assert started.wait(10)
        port = server.servers[0].sockets[0].getsockname()[1]
        stand_in.url = f"http://127.0.0.1:{port}/"
        yield stand_in
    finally:
        stand_in.go_on()
        server.should_exit = True
        server.force_exit = True
        thread.join(10)
