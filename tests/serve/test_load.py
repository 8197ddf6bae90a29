"""Many clients at once: each gets the answer it would get alone, however the others behave, and nothing is left of those who are gone."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import json
import os
import random
import re
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from asking import CHAT, COMPLETIONS, Heard, Said, bare, hear, post, read_all, request, said
from live import Live, live, until
from pace import Pace
from scripted import LLAMA, scripted
from starlette.requests import Request
from tiny_models import DirectorySource
from uvicorn.protocols.http.h11_impl import RequestResponseCycle

from arctool.run.async_engine import Stream
from arctool.run.llm import LLM, EngineOptions
from arctool.run.requests import Sample
from arctool.run.sampling.constraint import Constraint
from arctool.run.sampling.grammar import GrammarState
from arctool.run.sampling.params import SamplingParams
from arctool.run.sequence import FinishReason, Sequence
from arctool.serve.answering import Answer
from arctool.serve.connection import Connection
from arctool.serve.metrics import RequestMeter
from arctool.serve.talk import Dialogue

CLIENTS = 256
REQUESTS = 2000
ASKS = 200
KEYS = ("first-tenant", "second-tenant", "third-tenant")
BLOCK_BYTES = 8192
"""Of the tiny Llama: 2 layers, keys and values, 2 heads of 16, 16 tokens, f32."""


@dataclass(frozen=True)
class Ask:
    """A request, and what it gets alone: the text and the end of every choice."""

    path: str
    body: dict[str, Any]
    texts: list[str]
    finishes: list[str]


def make_asks(llm: LLM) -> list[Ask]:
    """Every fifth wants JSON, half are chats, half are sampled with a seed; some want two choices, some share their beginning."""
    rng = random.Random(5)
    made = []
    for number in range(ASKS):
        prompt = f"{'Once upon a time there was a ' * rng.choice([0, 0, 2])}fox {rng.getrandbits(40):x}"
        sampling: dict[str, Any] = {"temperature": 0.0} if number % 2 else {"temperature": 0.9, "seed": number}
        if rng.random() < 0.15:
            sampling |= {"n": 2}
        if number % 5 == 0:
            names = rng.sample(["a", "bc", "def", "g h"], 2)
            schema = {
                "type": "object",
                "properties": {name: rng.choice([{"type": "boolean"}, {"enum": ["x", "yy"]}]) for name in names},
                "required": names,
                "additionalProperties": False,
            }
            params = SamplingParams(**sampling, max_tokens=80, constraint=Constraint("json_schema", json.dumps(schema)))
            extra = {"max_tokens": 80, "response_format": {"type": "json_schema", "json_schema": {"name": "s", "schema": schema}}}
        else:
            most = rng.randint(3, 16)
            params = SamplingParams(**sampling, max_tokens=most, ignore_eos=True)
            extra = {"max_tokens": most, "ignore_eos": True}
        if rng.random() < 0.5:
            body = {"messages": [{"role": "user", "content": prompt}], **sampling, **extra}
            alone = llm.engine.generate([llm.encode_chat(body["messages"])], [params])
            made.append(Ask(CHAT, body, [c.text for c in alone], [c.finish_reason.value for c in alone]))
        else:
            alone = llm.generate([prompt], params)
            body = {"prompt": prompt, **sampling, **extra}
            made.append(Ask(COMPLETIONS, body, [c.text for c in alone], [c.finish_reason.value for c in alone]))
    return made


class Crowd:
    """Clients that ask what `asks` say, each when it has its last answer, and what came of it."""

    def __init__(self, url: str, asks: list[Ask]) -> None:
        self.url = url
        self.asks = asks
        self.rng = random.Random(11)
        self.counts: Counter[str] = Counter()

    async def ask(self, session: aiohttp.ClientSession, number: int) -> None:
        one = self.asks[number % len(self.asks)]
        rng = random.Random(number)
        leaves = rng.random() < 0.1
        headers = {"Authorization": f"Bearer {rng.choice(KEYS)}"}
        body = {**one.body, "cache_salt": rng.choice(["", "salt"])}
        if rng.random() < 0.6:
            async with session.post(self.url + one.path, json={**body, "stream": True}, headers=headers) as answer:
                assert answer.status == 200, await answer.text()
                heard = await hear(answer, rng.randint(0, 8) if leaves else None)
        else:
            work = self.whole(session, one.path, body, headers)
            if leaves:
                try:
                    heard = await asyncio.wait_for(work, rng.random() * 0.1)
                except TimeoutError:
                    heard = Heard()
            else:
                heard = await work
        self.check(one, heard, leaves)

    async def whole(self, session: aiohttp.ClientSession, path: str, body: dict[str, Any], headers: dict[str, str]) -> Heard:
        async with session.post(self.url + path, json=body, headers=headers) as answer:
            assert answer.status == 200, await answer.text()
            return said(await answer.json())

    def check(self, one: Ask, heard: Heard, leaves: bool) -> None:
        assert heard.error is None
        assert heard.whole or leaves
        self.counts["whole" if heard.whole else "left"] += 1
        for index, text in heard.texts.items():
            assert text == one.texts[index] if heard.whole else one.texts[index].startswith(text)
        if heard.whole:
            assert [heard.finishes[i] for i in range(len(one.texts))] == one.finishes
            self.counts["json"] += "response_format" in one.body

    async def work(self, numbers: range) -> None:
        waiting = iter(numbers)

        async def client(session: aiohttp.ClientSession) -> None:
            for number in waiting:
                await self.ask(session, number)

        async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=CLIENTS)) as session, asyncio.TaskGroup() as group:
            for _ in range(CLIENTS):
                group.create_task(client(session))


def resident() -> int:
    """Bytes of this process that are in memory."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGESIZE")


KINDS = (Stream, Answer, Dialogue, Sample, Sequence, GrammarState, RequestMeter, RequestResponseCycle, Connection, Request)
"""What belongs to one request, or one connection, and has to go with it."""


def left_behind(before: list[object] | None = None) -> list[object]:
    """Such objects as are there now, and were not `before`: other tests of this process may have left some."""
    gc.collect()
    known = {id(found) for found in before or ()}
    return [found for found in gc.get_objects() if type(found) in KINDS and id(found) not in known]


def test_two_thousand_requests_of_256_clients_get_what_they_get_alone_and_leave_nothing() -> None:
    before = left_behind()
    asks = make_asks(LLM(DirectorySource(LLAMA)))
    assert len({text for one in asks for text in one.texts}) > 100
    assert {finish for one in asks for finish in one.finishes} == {"stop", "length"}
    # A cache that the crowd does not fit into, so that requests wait.
    llm = LLM(DirectorySource(LLAMA), EngineOptions(kv_memory=BLOCK_BYTES * 500))
    with live(llm, api_keys=KEYS, max_queued=4 * CLIENTS) as server:
        crowd = Crowd(server.url, asks)
        sizes, files, objects = [], [], []
        for half in (range(REQUESTS // 2), range(REQUESTS // 2, REQUESTS)):
            asyncio.run(asyncio.wait_for(crowd.work(half), 240))
            until(lambda: not server.service.engine.unfinished)
            until(lambda: not left_behind(before))
            objects.append(len(gc.get_objects()))
            files.append(len(os.listdir("/proc/self/fd")))
            sizes.append(resident())
        assert crowd.counts["whole"] > 0.85 * REQUESTS
        assert crowd.counts["left"] > 0.05 * REQUESTS
        assert crowd.counts["json"] > 0.15 * REQUESTS
        total = llm.engine.telemetry().total
        assert total.finished[FinishReason.ABORT] > 0.02 * REQUESTS
        assert total.prefix_hits > 0
        # The first thousand meets everything that is kept: threads, tables, grammars, prefixes. The second has nothing to keep, and a
        # thousand times as little as one request's body, 1 KiB, would show as 1 MiB; what the allocator holds varies by less than four.
        assert sizes[1] - sizes[0] < 4 << 20
        assert objects[1] - objects[0] < 500
        assert files[1] == files[0]


MARKER = re.compile(r"marker-[0-9a-f]{12}")


def test_no_answer_has_another_s_marker() -> None:
    """Every prompt begins alike and names a marker of its own; the model says it three times."""
    rng = random.Random(7)
    markers = [f"marker-{rng.getrandbits(48):012x}" for _ in range(400)]
    llm = scripted(lambda prompt: " and ".join(MARKER.findall(prompt) * 3))

    async def ask(session: aiohttp.ClientSession, url: str, number: int, seen: Counter[str]) -> None:
        marker = markers[number]
        text = f"{'We begin as everybody does, ' * 3}with {marker}"
        stream = bool(number % 3)
        body = {"messages": [{"role": "user", "content": text}]} if number % 2 else {"prompt": text, "max_tokens": 200}
        body |= {"stream": stream, "n": 1 + number % 2, "cache_salt": str(number % 5), "temperature": 1.0}
        leaves = number % 10 == 0
        async with session.post(url + (CHAT if number % 2 else COMPLETIONS), json=body) as answer:
            assert answer.status == 200
            heard = await hear(answer, 5 if leaves else None) if stream else said(await answer.json())
        for said_text in heard.texts.values():
            expected = " and ".join([marker] * 3)
            assert said_text == expected if heard.whole else expected.startswith(said_text)
            seen.update(MARKER.findall(said_text))

    async def crowd(url: str) -> Counter[str]:
        seen: Counter[str] = Counter()
        async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=128)) as session, asyncio.TaskGroup() as group:
            for number in range(len(markers)):
                group.create_task(ask(session, url, number, seen))
        return seen

    with live(llm) as server:
        seen = asyncio.run(asyncio.wait_for(crowd(server.url), 120))
    assert set(seen) <= set(markers)
    assert len(seen) > 0.85 * len(markers)


@contextlib.contextmanager
def stuck(server: Live, count: int) -> Iterator[None]:
    """Clients that hold a connection each, and do nothing with it: of four kinds, `count` of each."""
    body = {"messages": [{"role": "user", "content": "long"}], "stream": True, "logprobs": True, "top_logprobs": 20}
    whole = request(CHAT, body)
    head, _, _ = whole.partition(b"\r\n\r\n")
    with contextlib.ExitStack() as held:
        for _ in range(count):
            held.enter_context(bare(server.port))  # says nothing
            held.enter_context(bare(server.port, head[:40]))  # stops in its head
            held.enter_context(bare(server.port, whole[:-10]))  # stops in its body
            held.enter_context(bare(server.port, whole, receive_buffer=1024))  # reads nothing
        links = server.server.server_state.connections
        until(lambda: len(links) == 4 * count and sum(link.flow.write_paused for link in links) == count)
        yield
        until(lambda: len(links) == 4 * count)  # the others' are closed
        assert sum(link.flow.write_paused for link in links) == count


def test_clients_that_neither_read_nor_finish_their_request_do_not_hold_up_others() -> None:
    """All others have their answers while those still hold their connections, and then the server is rid of those, too."""
    llm = scripted(lambda prompt: " ".join(f"word{i}" for i in range(400)) if "long" in prompt else f"short {prompt[-12:]}")

    async def others(url: str) -> list[str]:
        async with aiohttp.ClientSession() as session:

            async def ask(number: int) -> str:
                body = {"prompt": f"short {number:05}", "max_tokens": 50, "stream": bool(number % 2)}
                async with session.post(url + COMPLETIONS, json=body) as answer:
                    heard = await hear(answer) if number % 2 else said(await answer.json())
                    assert heard.whole
                    return heard.texts[0]

            return await asyncio.gather(*map(ask, range(100)))

    with live(llm) as server:
        with stuck(server, 8):
            answers = asyncio.run(asyncio.wait_for(others(server.url), 60))
            assert [text[-5:] for text in answers] == [f"{number:05}" for number in range(100)]
        until(lambda: not server.server.server_state.connections)


def test_clients_that_vanish_in_the_middle_of_a_request_leave_nothing() -> None:
    before = left_behind()
    llm = scripted(lambda prompt: "fine")
    body = {"messages": [{"role": "user", "content": "hello"}]}
    whole = request(CHAT, body)
    with live(llm) as server:
        finished = llm.engine.telemetry().total.finished
        for length in range(0, len(whole), 7):
            with bare(server.port, whole[:length]):
                pass
        with bare(server.port, request(CHAT, body, headers="Connection: close\r\n")) as link:  # it is taken when those have been
            assert b'"content":"fine"' in read_all(link)
        until(lambda: not left_behind(before))
        assert sum(llm.engine.telemetry().total.finished.values()) == sum(finished.values()) + 1


def unhurried(port: int, body: dict[str, Any]) -> Said:
    """What the server says, asked again where it had closed the connection before the question was written."""
    for _ in range(100):
        with contextlib.suppress(BrokenPipeError, ConnectionResetError):
            return post(port, COMPLETIONS, body)
    raise AssertionError("every connection was closed at once")


def test_more_connections_than_there_may_be_take_the_place_of_idle_ones_or_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("arctool.serve.server.most_connections", lambda: 8)
    pace = Pace()
    llm = scripted(lambda prompt: "fine", before_step=pace)
    body = {"prompt": "hello", "max_tokens": 5}
    with live(llm) as server, contextlib.ExitStack() as held:
        links = server.server.server_state.connections
        first = held.enter_context(bare(server.port))
        for _ in range(30):
            held.enter_context(bare(server.port, b"GET / HT"))
            assert unhurried(server.port, body).status == 200
        assert first.recv(1) == b""
        with pace.held():
            busy = [held.enter_context(bare(server.port, request(COMPLETIONS, {**body, "stream": bool(i % 2)}))) for i in range(8)]
            until(lambda: sum(not link.idle for link in links) == 8)
            refused = unhurried(server.port, body)
            assert (refused.status, refused.headers["Retry-After"]) == (503, "1")
        for link in busy:
            assert link.recv(12) == b"HTTP/1.1 200"
        until(lambda: unhurried(server.port, body).status == 200)
