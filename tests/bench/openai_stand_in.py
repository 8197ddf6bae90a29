"""A server that stands in for any of OpenAI's protocol, on a real loopback socket and in a thread of its own; it does what a test wants.

A word of a prompt is a token, so is a word of an answer. Requests for more than two tokens are what a bench measures (the others are how it
finds out whom it speaks to): they are numbered from 0, and `faults` says which of them go wrong and how.
"""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from aiohttp import web

PROBE_TOKENS = 2
FRUIT = '{"name": "pear", "ripe": true, "grams": 150}'
PATIENCE = 20.0
"""Seconds that a broken test may hang."""


class ScriptedClock:
    """A clock that stands still until the server moves it, each time after the client has read it once more."""

    def __init__(self) -> None:
        self._time = 1000.0
        self._readings = 0
        self._moved = 0
        self._change = threading.Condition()
        self.slept: list[float] = []

    def now(self) -> float:
        with self._change:
            self._readings += 1
            self._change.notify_all()
            return self._time

    async def sleep(self, seconds: float) -> None:
        self.slept.append(seconds)
        await asyncio.sleep(0)  # whoever was started before begins at the time before
        with self._change:
            self._time += seconds

    def move(self, seconds: float) -> None:
        """Wait until what was sent last has been read, then let `seconds` pass."""
        with self._change:
            assert self._change.wait_for(lambda: self._readings > self._moved, PATIENCE), "nobody reads the clock"
            self._moved = self._readings
            self._time += seconds


@dataclass
class StandIn:
    """What the server is like, and what it was asked.

    `refuses`: fields that it answers with 400, `ignores`: that it takes without heeding them. `overhead`: tokens that it adds to each
    prompt; `tokens_a_word`: of a prompt. `natural`: length of an answer that nothing forces. `usage`: in an event of its own ("apart"),
    with the end ("together"), or never (""). `burst`: tokens that a chunk brings. `frame`: data of an event → bytes on the wire.
    `together`: requests answered only once so many are there. `pauses`: before each chunk, `clock` moves on by so much.
    `silent`: set once a fault of silence begins.
    """

    models: tuple[str, ...] = ("stand-in",)
    refuses: frozenset[str] = frozenset()
    ignores: frozenset[str] = frozenset()
    takes_ids: bool = True
    key: str | None = None
    overhead: int = 0
    tokens_a_word: int = 1
    natural: int = 3
    usage: str = "apart"
    cached: int | None = None
    burst: int = 1
    json_answer: str = FRUIT
    frame: Callable[[bytes], bytes] = field(default=lambda data: b"data: " + data + b"\n\n")
    byte_by_byte: bool = False
    together: int = 1
    clock: ScriptedClock | None = None
    pauses: tuple[float, ...] = ()
    faults: Mapping[int, str] = field(default_factory=dict)
    silent: threading.Event | None = None
    asked: list[dict[str, Any]] = field(default_factory=list)
    probes: list[dict[str, Any]] = field(default_factory=list)
    keys: set[str | None] = field(default_factory=set)
    callers: set[tuple[str, int]] = field(default_factory=set)
    vanished: int = 0
    most_at_once: int = 0

    @contextmanager
    def running(self) -> Iterator[str]:
        """The address of the server while it runs."""
        ready, address = threading.Event(), []
        loop = asyncio.new_event_loop()

        async def serve() -> None:
            self._change = asyncio.Condition()
            self._now, self._leaving = 0, asyncio.Event()
            app = web.Application()
            app.router.add_get("/v1/models", self._models)
            app.router.add_post("/v1/completions", self._complete)
            app.router.add_post("/v1/chat/completions", self._complete)
            runner = web.AppRunner(app, access_log=None, handler_cancellation=True, shutdown_timeout=0)
            await runner.setup()
            site = web.TCPSite(runner, "127.0.0.1", 0)
            await site.start()
            address.append(f"http://127.0.0.1:{runner.addresses[0][1]}")
            ready.set()
            await self._leaving.wait()
            await runner.cleanup()

        thread = threading.Thread(target=lambda: loop.run_until_complete(serve()), daemon=True)
        thread.start()
        assert ready.wait(PATIENCE)
        try:
            yield address[0]
        finally:
            loop.call_soon_threadsafe(self._leaving.set)
            thread.join(PATIENCE)
            loop.close()

    def prompt_tokens(self, body: dict[str, Any]) -> int:
        prompt = body.get("prompt") or " ".join(message["content"] for message in body.get("messages", []))
        return self.overhead + (self.tokens_a_word * len(prompt.split()) if isinstance(prompt, str) else len(prompt))

    async def _models(self, request: web.Request) -> web.Response:
        if (denied := self._denied(request)) is not None:
            return denied
        return web.json_response({"object": "list", "data": [{"id": name} for name in self.models]})

    def _denied(self, request: web.Request) -> web.Response | None:
        self.keys.add(request.headers.get("Authorization"))
        if self.key is not None and request.headers.get("Authorization") != f"Bearer {self.key}":
            return _refused(401, "no such key")
        return None

    async def _complete(self, request: web.Request) -> web.StreamResponse:
        body = await request.json()
        assert request.transport is not None
        self.callers.add(request.transport.get_extra_info("peername"))
        measured = body["max_tokens"] > PROBE_TOKENS
        (self.asked if measured else self.probes).append(body)
        fault = self.faults.get(len(self.asked) - 1, "") if measured else ""
        if (denied := self._denied(request)) is not None:
            return denied
        if body["model"] not in self.models:
            return _refused(404, f"no model {body['model']}")
        for name in self.refuses & set(body):
            return _refused(400, f"{name}: extra fields are not permitted")
        if not self.takes_ids and isinstance(body.get("prompt"), list):
            return _refused(422, "prompt: expected text")
        if fault == "busy":
            return _refused(503, "too many requests are waiting")
        if fault == "no stream":
            return web.json_response({"choices": [{"text": "all at once", "finish_reason": "stop"}]})
        if measured:
            await self._gather()
        try:
            return await self._stream(request, body, fault)
        except (asyncio.CancelledError, ConnectionError):
            self.vanished += 1
            raise
        finally:
            self._now -= measured

    async def _gather(self) -> None:
        self._now += 1
        self.most_at_once = max(self.most_at_once, self._now)
        async with self._change:
            self._change.notify_all()
            await self._change.wait_for(lambda: self.most_at_once >= self.together)

    async def _stream(self, request: web.Request, body: dict[str, Any], fault: str) -> web.StreamResponse:
        chat = request.path.endswith("chat/completions")
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(request)
        if self.clock is None:  # which moves when a chunk has been read, and this is one
            await self._send(response, b"", b": keep-alive\n\n")
        if fault == "silence":
            if self.silent is not None:
                self.silent.set()
            await self._leaving.wait()
        if chat:
            await self._event(response, {"choices": [{"index": 0, "delta": {"role": "assistant", "content": ""}, "finish_reason": None}]})
        texts, reason = self._texts(body, fault)
        tokens = len(texts)
        if fault == "unseen":
            texts = []
        chunks = ["".join(texts[at : at + self.burst]) for at in range(0, len(texts), self.burst)]
        for at, text in enumerate(chunks):
            if self.clock is not None and at < len(self.pauses) and body["max_tokens"] > PROBE_TOKENS:
                await asyncio.to_thread(self.clock.move, self.pauses[at])
            if at == 2 and fault == "error event":
                await self._event(response, {"error": {"message": "the engine has died", "type": "server_error"}})
                return response
            if at == 2 and fault == "cut":
                assert request.transport is not None
                request.transport.abort()
                return response
            if at == 2 and fault == "early end":
                return response
            if at == 2 and fault == "no json":
                await self._send(response, b"{] what?")
                continue
            part = {"delta": {"content": text}} if chat else {"text": text}
            await self._event(response, {"choices": [{"index": 0, **part, "logprobs": None, "finish_reason": None}]})
        await self._end(response, body, chat, tokens, reason, fault)
        return response

    def _texts(self, body: dict[str, Any], fault: str) -> tuple[list[str], str]:
        """The text of each token of the answer, and why it ends."""
        most = body["max_tokens"]
        if "response_format" in body:
            whole = [self.json_answer[at : at + 4] for at in range(0, len(self.json_answer), 4)]
            return whole[:most], "stop" if len(whole) <= most else "length"
        fields = set(body) - self.ignores
        forced = ("ignore_eos" in fields and body["ignore_eos"]) or body.get("min_tokens", 0) * ("min_tokens" in fields) >= most
        length = most if forced else min(most, self.natural)
        length = {"zero": 0, "short": length - 1}.get(fault, length)
        texts = ["" if fault == "hidden" else f" w{at}" for at in range(length)]
        return texts, "abort" if fault == "abort" else "length" if length == most else "stop"

    async def _end(self, response: web.StreamResponse, body: dict[str, Any], chat: bool, tokens: int, reason: str, fault: str) -> None:
        end: dict[str, Any] = {"choices": [{"index": 0, **({"delta": {}} if chat else {"text": ""}), "finish_reason": reason}]}
        prompt = self.prompt_tokens(body) - (5 if fault == "cut prompt" else 0)
        usage: dict[str, Any] = {"prompt_tokens": prompt, "completion_tokens": tokens, "total_tokens": prompt + tokens}
        if self.cached is not None:
            usage["prompt_tokens_details"] = {"cached_tokens": self.cached}
        told = bool(self.usage) and body.get("stream_options", {}).get("include_usage") and fault != "no usage"
        await self._event(response, {**end, "usage": usage} if told and self.usage == "together" else end)
        if told and self.usage == "apart":
            await self._event(response, {"choices": [], "usage": usage})
        await self._send(response, b"[DONE]")

    async def _event(self, response: web.StreamResponse, value: dict[str, Any]) -> None:
        await self._send(response, json.dumps({"id": "cmpl-1", **value}).encode())

    async def _send(self, response: web.StreamResponse, data: bytes, raw: bytes | None = None) -> None:
        wire = self.frame(data) if raw is None else raw
        for piece in [wire[at : at + 1] for at in range(len(wire))] if self.byte_by_byte else [wire]:
            await response.write(piece)


def _refused(status: int, message: str) -> web.Response:
    return web.json_response({"error": {"message": message, "type": "invalid_request_error"}}, status=status)
