"""Who sends when: a closed loop of clients, or an open loop that keeps its times whatever the server does. Knows nothing of requests."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Sequence

import numpy as np

from arctool.bench.serving.client import Client
from arctool.bench.serving.exchange import Exchange
from arctool.bench.serving.workloads import Script

Record = Callable[[Exchange], None]


async def play(client: Client, script: Script, record: Record) -> None:
    """One script to its end; every exchange is recorded when it is over."""
    try:
        ask = next(script)
        while True:
            outcome = await client.ask(ask)
            record(Exchange(ask, outcome))
            ask = script.send(outcome)
    except StopIteration:
        return


async def closed_loop(client: Client, scripts: Iterable[Script], clients: int, record: Record) -> None:
    """So many clients, each of which takes the next script when its last one has ended."""
    waiting = iter(scripts)

    async def one() -> None:
        for script in waiting:
            await play(client, script, record)

    async with asyncio.TaskGroup() as group:
        for _ in range(clients):
            group.create_task(one())


async def open_loop(client: Client, scripts: Sequence[Script], times: Sequence[float], cap: int | None, record: Record) -> list[float]:
    """Start each script at its time (seconds from now); at most `cap` at once. Returns how late each was sent, in seconds."""
    clock = client.clock
    gate = asyncio.Semaphore(cap or len(scripts) or 1)
    late: list[float] = []

    async def one(script: Script, due: float) -> None:
        async with gate:
            late.append(max(0.0, clock.now() - due))
            await play(client, script, record)

    began = clock.now()
    async with asyncio.TaskGroup() as group:
        for script, time in zip(scripts, times, strict=True):
            wait = began + time - clock.now()
            if wait > 0:
                await clock.sleep(wait)
            group.create_task(one(script, began + time))
    return late


def arrivals(count: int, rate: float, burstiness: float, random: np.random.Generator) -> list[float]:
    """Seconds at which requests arrive, the first at 0: gaps are gamma distributed with shape `burstiness` (1: Poisson).

    As in vLLM, they are stretched so that the last one arrives when the rate says: a few draws of a wide distribution may miss it by far.
    """
    if count < 2 or np.isinf(rate):
        return [0.0] * count
    times = np.concatenate([[0.0], np.cumsum(random.gamma(burstiness, 1.0, count - 1))])
    if times[-1] <= 0:  # every gap of so small a shape was too small for a float
        return [0.0] * count
    return [float(time) for time in times * ((count - 1) / rate / times[-1])]
