"""A whole measurement of one server: learn how it speaks, then one load after another. What was finished survives a Ctrl-C."""

from __future__ import annotations

import asyncio
import os
import secrets
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from arctool.bench.serving.client import Client, Clock, Server
from arctool.bench.serving.dialect import OPTIONAL, Dialect, find_model, learn, probe, refusal
from arctool.bench.serving.exchange import Endpoint, Exchange, objection
from arctool.bench.serving.load import arrivals, closed_loop, open_loop
from arctool.bench.serving.measurement import Row, row_json, row_of
from arctool.bench.serving.plan import Load, Plan, Workload
from arctool.bench.serving.prompts import Words, find_source, load_tokenizer
from arctool.bench.serving.workloads import SCHEMA, Voice, scripts, warm_ups
from arctool.errors import RequestError, UsageError

Progress = Callable[[int, int], None]
"""Called as (requests that are over, all of all loads)."""

CACHED = 0.05
"""Share of cached prompt tokens above which a workload of prompts that were never seen is not what it claims."""

LATE = 0.05
"""Mean seconds behind its times from which an open loop was not as open as it claims."""


@dataclass(frozen=True)
class Voicing:
    """How prompts are made. `vocab_size`: token ids below it; `tokenizer`: its file or directory; neither: words."""

    model: str | None = None
    vocab_size: int | None = None
    tokenizer: Path | None = None

    def check(self, plan: Plan) -> None:
        """Raise UsageError where the plan has no use for it."""
        if self.vocab_size is None:
            return
        if self.tokenizer is not None:
            raise UsageError("--vocab-size: a --tokenizer says it already")
        if self.vocab_size < 1:
            raise UsageError(f"--vocab-size: expected at least 1, found {self.vocab_size}")
        if plan.endpoint is Endpoint.CHAT or plan.workload in (Workload.MULTI_TURN, Workload.JSON):
            raise UsageError("--vocab-size: chats, conversations and JSON requests are text; use --tokenizer for exact lengths")


@dataclass(frozen=True)
class Result:
    """A measurement. `prompts`: what they were made of; `overhead`: tokens that the server adds to each; `refused`: fields that it does not
    take; `equal_lengths`: whether answers were made to have one; `load`: of this machine, before and after; `interrupted`: loads are
    missing."""

    url: str
    model: str
    plan: Plan
    seed: int
    prompts: str
    overhead: int
    refused: tuple[str, ...]
    equal_lengths: bool
    rows: tuple[Row, ...]
    cores: int
    load: tuple[float, float]
    interrupted: bool = False

    @property
    def failed(self) -> bool:
        return any(row.failure is not None for row in self.rows)

    @property
    def notes(self) -> tuple[str, ...]:
        """What a reader of the figures must know."""
        plan, found = self.plan, []
        if self.refused:
            found.append(f"the server refuses {', '.join(self.refused)}")
        if not self.equal_lengths:
            found.append("answers have unequal lengths: compare no throughput with a run whose answers have other lengths")
        if plan.count_chunks:
            found.append("where the server told no usage, each chunk with text was counted as a token")
        for row in self.rows:
            found += [f"{row.load.label}: {note}" for note in notes_of(row, plan, self.overhead)]
        return tuple(found)

    def to_json(self) -> dict[str, Any]:
        """docs/bench-serve.md says what the fields mean."""
        plan = asdict(self.plan) | {
            "workload": self.plan.workload.value,
            "endpoint": self.plan.endpoint.value,
            "goodput": dict(self.plan.goodput),
        }
        del plan["loads"]
        return {
            "base_url": self.url,
            "model_id": self.model,
            **plan,
            "seed": self.seed,
            "prompts": self.prompts,
            "prompt_overhead": self.overhead,
            "refused_fields": list(self.refused),
            "equal_lengths": self.equal_lengths,
            "cores": self.cores,
            "load_average": list(self.load),
            "rows": [row_json(row) for row in self.rows],
            "notes": list(self.notes),
            "failed": self.failed,
            "interrupted": self.interrupted,
        }


def notes_of(row: Row, plan: Plan, overhead: int) -> list[str]:
    """What is odd about a row that has figures. `overhead`: tokens that all prompts begin with."""
    figures = row.figures
    if figures is None:
        return []
    found = []
    if figures.tokens_a_chunk > 1.1 and not plan.count_chunks:
        found.append(f"a chunk brings {figures.tokens_a_chunk:.1f} tokens: read TPOT, not ITL")
    fresh = plan.workload in (Workload.RANDOM, Workload.CANCEL)
    known, cached = figures.input_tokens or 0, figures.cached_tokens or 0
    if fresh and cached > CACHED * known + overhead * row.successful:
        found.append(f"{cached / known:.0%} of the prompt tokens came from the server's cache; take another --seed")
    if row.late > LATE:
        found.append(f"requests were sent {1e3 * row.late:.0f} ms late on average, which no latency has in it")
    return found


def measure(
    server: Server,
    plan: Plan,
    voicing: Voicing | None = None,
    seed: int | None = None,
    progress: Progress | None = None,
    clock: Clock | None = None,
) -> Result:
    """Measure a server. Raises RequestError for one that cannot be used, UsageError. Ctrl-C gives the rows that were finished, if any."""
    voicing = voicing or Voicing()
    voicing.check(plan)
    session = _Session(server, plan, voicing, secrets.randbits(32) if seed is None else seed, progress, clock)
    interrupted = False
    try:
        asyncio.run(session.run())
    except KeyboardInterrupt:
        if not session.rows:
            raise
        interrupted = True
    return session.result(interrupted)


class _Session:
    def __init__(self, server: Server, plan: Plan, voicing: Voicing, seed: int, progress: Progress | None, clock: Clock | None) -> None:
        if seed < 0:
            raise UsageError(f"--seed: expected at least 0, found {seed}")
        self._server, self._plan, self._voicing, self._seed, self._clock = server, plan, voicing, seed, clock
        self._progress = progress or (lambda done, total: None)
        self._tokenizer = None if voicing.tokenizer is None else load_tokenizer(voicing.tokenizer)
        self._load = os.getloadavg()[0]
        self._done = 0
        self._model = voicing.model or ""
        self._voice: Voice | None = None
        self.rows: list[Row] = []

    async def run(self) -> None:
        """Everything; rows are in `rows` as soon as they are whole."""
        # Each load has numbers of its own, so that a sweep asks nothing twice, and a load is the same whatever stands before it.
        probing, *loads = np.random.default_rng(self._seed).spawn(1 + len(self._plan.loads))
        async with Client(self._server, self._clock) as client:
            voice = self._voice = await self._learn(client, probing)
            for load, random in zip(self._plan.loads, loads, strict=True):
                self.rows.append(await self._measure(client, voice, load, random))

    async def _learn(self, client: Client, random: np.random.Generator) -> Voice:
        """How the server speaks. Raises RequestError, UsageError."""
        plan, voicing = self._plan, self._voicing
        self._model = voicing.model or await find_model(client)
        ids = plan.endpoint is Endpoint.COMPLETIONS and plan.workload not in (Workload.MULTI_TURN, Workload.JSON)
        chat = await self._learn_json(client) if plan.has_json else None
        if plan.workload is Workload.JSON and chat is not None:
            return Voice(chat, Words(), chat)
        dialect = await learn(client, plan.endpoint, self._model, plan.temperature)
        self._must_count(dialect)
        source = await find_source(client, dialect, random, vocab_size=voicing.vocab_size, tokenizer=self._tokenizer, ids=ids)
        return Voice(dialect, source, chat)

    async def _learn_json(self, client: Client) -> Dialect:
        chat = await learn(client, Endpoint.CHAT, self._model, self._plan.temperature, OPTIONAL[:1])
        self._must_count(chat)
        outcome = await probe(client, chat, "Hello", 1, SCHEMA)
        if outcome.failure is not None:
            raise refusal(client, Endpoint.CHAT, outcome)
        return chat

    def _must_count(self, dialect: Dialect) -> None:
        if "stream_options" not in dialect.fields and not self._plan.count_chunks:
            raise RequestError(
                f"{self._server.url}: refuses stream_options.include_usage, so that nobody knows how many tokens it generates; "
                "--count-chunks takes each chunk for one"
            )

    async def _measure(self, client: Client, voice: Voice, load: Load, random: np.random.Generator) -> Row:
        plan, before = self._plan, self._done
        warm: list[Exchange] = []
        found: list[Exchange] = []
        if plan.warmups:
            await closed_loop(
                client, warm_ups(plan, voice, random), min(plan.warmups, load.clients or load.cap or plan.warmups), warm.append
            )
        reason = next((why for one in warm if (why := objection(one, plan.count_chunks)) is not None), None)
        late: list[float] = []
        made = scripts(plan, voice, random)

        def record(exchange: Exchange) -> None:
            found.append(exchange)
            self._progress(before + len(found), plan.requests * len(plan.loads))

        cpu = time.process_time()
        if reason is None and load.clients is not None:
            await closed_loop(client, made, load.clients, record)
        elif reason is None and load.rate is not None:
            late = await open_loop(client, made, arrivals(len(made), load.rate, load.burstiness, random), load.cap, record)
        cpu = time.process_time() - cpu
        self._done = before + plan.requests
        self._progress(self._done, plan.requests * len(plan.loads))
        mean = sum(late) / len(late) if late else 0.0
        return row_of(plan, load, found, late=mean, cpu=cpu, failure=None if reason is None else f"warm-up: {reason}")

    def result(self, interrupted: bool) -> Result:
        """What there is."""
        voice = self._voice
        assert voice is not None
        wanted = OPTIONAL[:1] if self._plan.workload is Workload.JSON else OPTIONAL
        return Result(
            url=self._server.url,
            model=self._model,
            plan=self._plan,
            seed=self._seed,
            prompts=voice.source.how,
            overhead=voice.source.overhead,
            refused=tuple(name for name in wanted if name not in voice.dialect.fields),
            equal_lengths=voice.dialect.forces_length and not self._plan.natural and not self._plan.has_json,
            rows=tuple(self.rows),
            cores=os.cpu_count() or 1,
            load=(self._load, os.getloadavg()[0]),
            interrupted=interrupted,
        )
