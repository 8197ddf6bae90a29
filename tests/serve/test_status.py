"""Speeds over a sliding window of a monotonic clock, and a SCHED line as long as there is work and once more."""

from __future__ import annotations

import asyncio
import inspect
import json
import time
from collections.abc import Callable
from dataclasses import replace

import pytest
from scripted import scripted

from arctool.errors import UsageError
from arctool.run.async_engine import AsyncEngine
from arctool.run.kv.paging import CacheUse
from arctool.run.sampling.params import SamplingParams
from arctool.run.sequence import FinishReason
from arctool.run.telemetry import StepStats, Telemetry, Totals
from arctool.serve.access_log import AccessLog
from arctool.serve.metrics import Metrics
from arctool.serve.status import POINTS, Point, Speeds, Status, report_schedule, schedule_line, speeds

CACHE = CacheUse(2, 3, 11)


class Server:
    """A server that does what the test says, by a clock that the test moves."""

    def __init__(self) -> None:
        self.now = 1000.0
        self.telemetry = Telemetry(0, 0, CACHE, StepStats(), Totals())
        self.ready = False
        self.status = self.make()

    def make(self, window: float = 10.0) -> Status:
        return Status(
            lambda: self.telemetry,
            model="m",
            version="1.2",
            max_model_len=64,
            ready=lambda: self.ready,
            window=window,
            clock=lambda: self.now,
        )

    def work(self, seconds: float, prompt: int = 0, generated: int = 0, **more: int) -> None:
        """So many tokens in so many seconds."""
        self.now += seconds
        total = self.telemetry.total
        self.telemetry = replace(
            self.telemetry,
            total=replace(
                total,
                steps=total.steps + 1,
                prefill_tokens=total.prefill_tokens + prompt,
                generated_tokens=total.generated_tokens + generated,
                **{name: getattr(total, name) + count for name, count in more.items()},
            ),
        )

    def speeds(self) -> tuple[object, object]:
        found = self.status.numbers()
        return found["prompt_tokens_per_second"], found["generated_tokens_per_second"]


def test_the_numbers_are_those_of_the_contract() -> None:
    server = Server()
    server.ready = True
    server.work(4.0, prompt=100, generated=10)
    total = replace(server.telemetry.total, finished={FinishReason.STOP: 3, FinishReason.ABORT: 2})
    server.telemetry = replace(server.telemetry, running=2, waiting=1, total=total)
    found = server.status.numbers()
    assert found == {
        **{"model": "m", "version": "1.2", "max_model_len": 64, "ready": True, "running": 2, "waiting": 1, "kv_cache_usage": 0.125},
        **{"prompt_tokens_per_second": 25.0, "generated_tokens_per_second": 2.5, "requests_finished": 5, "uptime_seconds": 4.0},
    }
    assert json.loads(json.dumps(found)) == found


def test_a_cache_without_blocks_is_not_used() -> None:
    server = Server()
    server.telemetry = replace(server.telemetry, cache=CacheUse(0, 0, 0))
    assert server.status.numbers()["kv_cache_usage"] == 0


def test_the_window_slides() -> None:
    server = Server()
    for _ in range(20):
        server.work(1.0, generated=100)
        server.speeds()
    assert server.speeds() == (0.0, 100.0)
    for seconds in range(1, 11):
        server.now += 1.0
        assert server.speeds() == (0.0, 100.0 - 10.0 * seconds)


def test_after_a_long_silence_the_window_is_soon_right_again() -> None:
    server = Server()
    server.work(1000.0, prompt=500)
    assert server.speeds() == (0.5, 0.0), "since nobody knows when"
    server.work(1.0, prompt=77)
    assert server.speeds() == (77.0, 0.0)
    server.work(1.0, prompt=23)
    assert server.speeds() == (50.0, 0.0)


def test_the_first_numbers_are_of_all_the_time_that_there_was() -> None:
    server = Server()
    assert server.speeds() == (0.0, 0.0), "no time has passed"
    server.work(2.0, generated=10)
    assert server.speeds() == (0.0, 5.0)


def test_who_asks_very_often_makes_nothing_grow_and_nothing_wrong() -> None:
    server = Server()
    for _ in range(5000):
        server.work(0.01, generated=1)
        server.speeds()
    assert len(server.status._points) <= POINTS + 2
    assert server.speeds()[1] == pytest.approx(100, rel=0.01)


def test_what_was_counted_before_does_not_count() -> None:
    server = Server()
    server.work(0.0, prompt=10**6, generated=10**6)
    server.status = server.make()
    server.now += 1
    assert server.speeds() == (0.0, 0.0)


def test_speeds_of_one_moment_are_none() -> None:
    a = Point(5.0, Totals())
    b = Point(5.0, Totals(prefill_tokens=7, generated_tokens=7, prefix_queries=8, prefix_hits=2, preempted=3))
    assert speeds(a, b) == Speeds(0.0, 0.0, 0.25, 3)
    assert speeds(b, b) == Speeds(0.0, 0.0, None, 0)


def test_a_jump_of_the_wall_clock_changes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    server = Server()
    server.work(2.0, generated=10)
    monkeypatch.setattr(time, "time", lambda: -1e9)
    found = server.status.numbers()
    assert (found["generated_tokens_per_second"], found["uptime_seconds"]) == (5.0, 2.0)


@pytest.mark.parametrize("measures", [Status, Metrics, AccessLog], ids=lambda measures: measures.__name__)
def test_what_measures_does_so_by_a_monotonic_clock(measures: type) -> None:
    assert inspect.signature(measures).parameters["clock"].default is time.monotonic


# The line.


def test_the_line() -> None:
    now = Telemetry(3, 1, CACHE, StepStats(), Totals())
    assert schedule_line(now, Speeds(412.3, 86.6, 0.5, 2)) == (
        "SCHED running=3 waiting=1 prefill=412 tok/s decode=87 tok/s kv=12.5% hits=50.0% preempted=2"
    )
    assert " hits=- " in schedule_line(now, Speeds(0, 0, None, 0))


class Rounds:
    """Runs `report_schedule` round by round: `asyncio.sleep` is the test's, which says what happens meanwhile."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, server: Server, *happenings: Callable[[], None]) -> None:
        self.lines: list[list[str]] = []
        self.slept: list[float] = []
        waiting = list(happenings)

        async def sleep(seconds: float) -> None:
            self.slept.append(seconds)
            if not waiting:
                raise asyncio.CancelledError
            self.lines.append([])
            waiting.pop(0)()

        monkeypatch.setattr(asyncio, "sleep", sleep)
        with pytest.raises(asyncio.CancelledError):
            asyncio.run(report_schedule(server.status, 5.0, lambda line: self.lines[-1].append(line)))


def test_a_line_comes_while_there_is_work_and_once_more(monkeypatch: pytest.MonkeyPatch) -> None:
    server = Server()

    def load(running: int, waiting: int, seconds: float = 5.0, prompt: int = 0, generated: int = 0) -> Callable[[], None]:
        def happen() -> None:
            server.telemetry = replace(server.telemetry, running=running, waiting=waiting)
            if prompt or generated:
                server.work(seconds, prompt, generated)
            else:
                server.now += seconds

        return happen

    rounds = Rounds(
        monkeypatch,
        server,
        load(0, 0),
        load(2, 1, prompt=500, generated=10),
        load(0, 2),  # nothing moves, but somebody waits
        load(0, 0, generated=20),
        load(0, 0),
        load(0, 0),
        load(0, 0, prompt=50),  # came and went between two lines
        load(0, 0),
        load(1, 0),
        load(0, 0),  # was cancelled before it did anything
        load(0, 0),
    )
    assert [len(lines) for lines in rounds.lines] == [0, 1, 1, 1, 0, 0, 1, 0, 1, 1, 0]
    assert rounds.lines[1][0].startswith("SCHED running=2 waiting=1 prefill=100 tok/s decode=2 tok/s kv=12.5%")
    assert rounds.lines[2][0].startswith("SCHED running=0 waiting=2 prefill=0 tok/s decode=0 tok/s")
    assert rounds.lines[3][0].startswith("SCHED running=0 waiting=0 prefill=0 tok/s decode=4 tok/s")
    assert rounds.lines[6][0].startswith("SCHED running=0 waiting=0 prefill=10 tok/s")
    assert set(rounds.slept) == {5.0}


@pytest.mark.parametrize("every", [0.0, -1.0, float("nan")])
def test_an_interval_that_is_none_is_refused(every: float) -> None:
    with pytest.raises(UsageError, match="expected seconds above 0"):
        asyncio.run(report_schedule(Server().status, every, print))


def test_over_a_real_engine_the_lines_end_when_the_work_does() -> None:
    llm = scripted(lambda prompt: "many words " * 40, before_step=lambda: time.sleep(0.002))
    lines: list[str] = []

    async def main() -> dict[str, object]:
        engine = AsyncEngine(llm)
        status = Status(engine.telemetry, model="m", version="v", max_model_len=llm.engine.max_model_len, ready=lambda: engine.healthy)
        reporter = asyncio.create_task(report_schedule(status, 0.01, lines.append))
        params = SamplingParams(temperature=0, max_tokens=40)
        await asyncio.gather(*(engine.complete(f"prompt {i}", params) for i in range(3)))
        async with asyncio.timeout(20):
            while not lines or "running=0 waiting=0" not in lines[-1]:
                await asyncio.sleep(0.001)
        count = len(lines)
        await asyncio.sleep(0.05)
        assert len(lines) == count
        reporter.cancel()
        found = status.numbers()
        await engine.stop()
        return found

    found = asyncio.run(main())
    assert "running=3" in " ".join(lines)
    assert (found["ready"], found["requests_finished"], found["running"]) == (True, 3, 0)
    assert 0 < float(str(found["generated_tokens_per_second"])) <= 120 / 0.08
