"""How the server is doing, for people: the numbers of GET /status, and a SCHED line every few seconds while there is work.

Speeds are differences of what the engine has counted, over a window that slides with a monotonic clock: a jump of the wall clock changes
nothing. Knows telemetry, neither HTTP nor the engine. Belongs to one event loop.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

from arctool.errors import UsageError
from arctool.run.telemetry import Telemetry, Totals

WINDOW = 10.0
"""Seconds that the speeds of /status look back."""
POINTS = 50
"""In how many steps the window slides, at most; so that who asks often does not make it remember more."""


@dataclass(frozen=True)
class Point:
    """What had been counted at `time`."""

    time: float
    total: Totals


@dataclass(frozen=True)
class Speeds:
    """Between two points. Tokens per second: computed of prompts (cached ones are none, recomputed ones are), and generated.

    `hits`: the share of the prompts that started that the prefix cache had; None if none started. `preempted`: how many were.
    """

    prompt: float
    generated: float
    hits: float | None
    preempted: int


def speeds(before: Point, now: Point) -> Speeds:
    """What happened from `before` to `now`. Points of one time have no speed: 0."""
    then, total, seconds = before.total, now.total, now.time - before.time
    queries = total.prefix_queries - then.prefix_queries
    return Speeds(
        prompt=(total.prefill_tokens - then.prefill_tokens) / seconds if seconds > 0 else 0.0,
        generated=(total.generated_tokens - then.generated_tokens) / seconds if seconds > 0 else 0.0,
        hits=(total.prefix_hits - then.prefix_hits) / queries if queries else None,
        preempted=total.preempted - then.preempted,
    )


def kv_cache_usage(now: Telemetry) -> float:
    """The share of the cache's blocks that requests own, from 0 to 1."""
    return now.cache.owned / max(now.cache.owned + now.cache.cached + now.cache.free, 1)


class Status:
    """The numbers of one server. Where nobody has asked for longer than its window, that reaches back to who asked last."""

    def __init__(
        self,
        telemetry: Callable[[], Telemetry],
        *,
        model: str,
        version: str,
        max_model_len: int,
        ready: Callable[[], bool],
        window: float = WINDOW,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.telemetry = telemetry
        self._names: dict[str, object] = {"model": model, "version": version, "max_model_len": max_model_len}
        self._ready = ready
        self._window = window
        self._clock = clock
        self._began = clock()
        self._points = deque([Point(self._began, telemetry().total)])

    def point(self) -> Point:
        """What has been counted until now."""
        return self._ask()[1]

    def numbers(self) -> dict[str, object]:
        """What GET /status answers. Counts are of samples: a request of n samples is n."""
        now = self.telemetry()
        first, point = self._ask()
        fast = speeds(first, point)
        return {
            **self._names,
            "ready": self._ready(),
            "running": now.running,
            "waiting": now.waiting,
            "kv_cache_usage": round(kv_cache_usage(now), 4),
            "prompt_tokens_per_second": round(fast.prompt, 2),
            "generated_tokens_per_second": round(fast.generated, 2),
            "requests_finished": sum(point.total.finished.values()),
            "uptime_seconds": round(point.time - self._began, 3),
        }

    def _ask(self) -> tuple[Point, Point]:
        """The points at which the window begins and ends."""
        points, now = self._points, Point(self._clock(), self.telemetry().total)
        while len(points) > 1 and points[0].time < now.time - self._window:
            points.popleft()
        first = points[0]
        if now.time - points[-1].time >= self._window / POINTS:
            points.append(now)
        return first, now


async def report_schedule(status: Status, every: float, write: Callable[[str], None]) -> None:
    """Write a SCHED line every `every` seconds while there is work, and one more when there is none left. Ends when it is cancelled.

    Raises UsageError for an interval that is none.
    """
    if not every > 0:
        raise UsageError(f"the interval of the SCHED line: expected seconds above 0, found {every}")
    last, busy = status.point(), False
    while True:
        await asyncio.sleep(every)
        point, now = status.point(), status.telemetry()
        was_busy, busy = busy, now.running + now.waiting > 0
        if busy or was_busy or point.total.steps > last.total.steps:
            write(schedule_line(now, speeds(last, point)))
        last = point


def schedule_line(now: Telemetry, fast: Speeds) -> str:
    """How things stand `now`, and how they went since the last line."""
    hits = "-" if fast.hits is None else f"{fast.hits:.1%}"
    return (
        f"SCHED running={now.running} waiting={now.waiting} prefill={fast.prompt:.0f} tok/s decode={fast.generated:.0f} tok/s"
        f" kv={kv_cache_usage(now):.1%} hits={hits} preempted={fast.preempted}"
    )
