"""Many asyncio tasks over one engine thread: each gets the tokens it gets alone, may vanish, and is told when the engine dies."""

from __future__ import annotations

import asyncio
import random
import re
import threading
import time
from collections.abc import Awaitable, Callable, Iterator

import pytest
from tiny_models import DirectorySource, random_ids

from arctool.errors import RequestError
from arctool.run.async_engine import AsyncEngine, EngineBusy, EngineStopped
from arctool.run.llm import LLM, EngineOptions
from arctool.run.requests import Checked, Update
from arctool.run.sampling.constraint import Constraint
from arctool.run.sampling.grammar import GrammarState
from arctool.run.sampling.params import SamplingParams
from arctool.run.sequence import FinishReason

GREEDY = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True)
LONG = SamplingParams(temperature=0, max_tokens=200, ignore_eos=True)


@pytest.fixture
def llm(llama: DirectorySource) -> Iterator[LLM]:
    """A small cache, so that requests wait and are preempted; whatever a test does, at its end nothing may be left."""
    made = LLM(llama, EngineOptions(max_seqs=8, kv_memory=512 * 16 * 20, max_step_tokens=64))
    yield made
    made.engine.scheduler.check()
    assert made.engine.telemetry().cache.owned == 0
    assert not made.engine.has_work()


def run(llm: LLM, body: Callable[[AsyncEngine], Awaitable[None]], *, max_queued: int | None = None) -> None:
    """`body` over an engine that is stopped afterwards."""

    async def main() -> None:
        engine = AsyncEngine(llm, max_queued=max_queued)
        try:
            await asyncio.wait_for(body(engine), 60)
        finally:
            await engine.stop()
        assert not engine.healthy
        assert engine.unfinished == 0

    asyncio.run(main())


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(20):
        while not condition():
            await asyncio.sleep(0.002)


def slow_down(llm: LLM, seconds: float = 0.01) -> None:
    """Let every step take at least so long."""
    step = llm.engine.step

    def slow() -> list[Update]:
        time.sleep(seconds)
        return step()

    llm.engine.step = slow  # type: ignore[method-assign]


def test_fifty_tasks_of_which_some_vanish_get_the_tokens_they_get_alone(llm: LLM) -> None:
    rng = random.Random(3)
    head = random_ids(0, 30)
    prompts = [[*head[: rng.choice([0, 20, 30])], *random_ids(i, rng.randint(1, 30))] for i in range(50)]
    params = [
        SamplingParams(temperature=0.7, seed=i, max_tokens=rng.randint(1, 20), n=rng.choice([1, 1, 2]), ignore_eos=True) for i in range(50)
    ]
    alone = [[c.token_ids for c in llm.generate([p], s)] for p, s in zip(prompts, params, strict=True)]
    assert len({tokens for samples in alone for tokens in samples}) > 40
    slow_down(llm, 0.004)
    leaves_after = {i: rng.randint(0, 6) for i in range(50) if rng.random() < 0.4}

    async def body(engine: AsyncEngine) -> None:
        async def ask(i: int) -> list[Update]:
            await asyncio.sleep(rng.random() * 0.05)
            updates: list[Update] = []
            if i in leaves_after and i % 2:  # this kind closes the iterator, the other kind is cancelled while it waits
                stream = engine.generate(prompts[i], params[i])
                async for update in stream:
                    updates.append(update)
                    if len(updates) > leaves_after[i]:
                        break
                await stream.aclose()  # type: ignore[attr-defined]
                return updates
            async for update in engine.generate(prompts[i], params[i]):
                updates.append(update)
            return updates

        tasks = [asyncio.create_task(ask(i)) for i in range(50)]
        for i in leaves_after:
            if not i % 2:
                asyncio.get_running_loop().call_later(0.02 + leaves_after[i] * 0.02, tasks[i].cancel)
        found = await asyncio.gather(*tasks, return_exceptions=True)
        await until(lambda: engine.unfinished == 0)
        cancelled = 0
        for i, updates in enumerate(found):
            if isinstance(updates, asyncio.CancelledError):
                assert i in leaves_after
                cancelled += 1
                continue
            assert not isinstance(updates, BaseException), updates
            for index, expected in enumerate(alone[i]):
                tokens = tuple(t for u in updates if u.index == index for t in u.token_ids)
                assert tokens == expected if i not in leaves_after else tokens == expected[: len(tokens)]
        assert cancelled > 2
        assert engine.healthy

    run(llm, body)
    assert llm.engine.telemetry().total.prefix_hits > 0


def test_samples_that_end_in_one_step_all_reach_their_task(llm: LLM) -> None:
    async def body(engine: AsyncEngine) -> None:
        done = await engine.complete([5, 6], SamplingParams(temperature=0, n=3, max_tokens=2, ignore_eos=True))
        assert [(c.index, len(c.token_ids)) for c in done] == [(0, 2), (1, 2), (2, 2)]

    run(llm, body)


def test_a_vanished_reader_frees_its_request_within_a_step(llm: LLM) -> None:
    async def body(engine: AsyncEngine) -> None:
        stream = await engine.submit(random_ids(1, 9), LONG)
        updates = aiter(stream)
        await anext(updates)
        steps = llm.engine.telemetry().total.steps
        stream.close()
        stream.close()
        await until(lambda: engine.unfinished == 0)
        assert llm.engine.telemetry().total.steps < steps + 150, "it would have run on to its end"
        assert llm.engine.telemetry().cache.owned == 0

    run(llm, body)


def test_commands_are_carried_out_before_the_next_step(llm: LLM) -> None:
    """The thread is held inside a step; whatever was asked meanwhile happens before it computes again."""
    step, entered, go, seen = llm.engine.step, threading.Event(), threading.Event(), []

    def held() -> list[Update]:
        seen.append([len(s) for s in llm.engine._requests.values()])
        if len(seen) == 2:
            entered.set()
            go.wait(20)
        return step()

    llm.engine.step = held  # type: ignore[method-assign]

    async def body(engine: AsyncEngine) -> None:
        stream = await engine.submit([5, 6], LONG)
        await asyncio.to_thread(entered.wait, 20)
        other = asyncio.create_task(engine.complete([7], GREEDY))
        await until(lambda: len(engine._commands) == 1)
        stream.close()
        go.set()
        assert len((await other)[0].token_ids) == 24
        assert seen[2:] == [[1]] * (len(seen) - 2), "the cancelled one took part in a later step"

    run(llm, body)


def test_a_refusal_reaches_its_task_before_anything_runs(llm: LLM) -> None:
    async def body(engine: AsyncEngine) -> None:
        for prompt, params, complaint in [
            ([], GREEDY, "^prompt: expected at least one token"),
            ([600], GREEDY, "^prompt: expected token ids"),
            ([5] * 300, GREEDY, "^prompt: 300 tokens leave no room"),
            ([5] * 200, LONG, "^max_tokens: "),
            ("x" * 3_000_000, GREEDY, "^prompt: 3000000 characters"),
        ]:
            with pytest.raises(RequestError, match=complaint):
                await engine.submit(prompt, params)
        with pytest.raises(AttributeError):
            await engine.submit([5], SamplingParams(stop=("x",)).__dict__)  # type: ignore[arg-type]
        assert engine.unfinished == 0
        assert engine.healthy
        assert len((await engine.complete("Once upon", GREEDY))[0].token_ids) == 24

    run(llm, body)


def test_a_constraint_is_compiled_beside_the_engine_s_thread(llm: LLM) -> None:
    open_, threads = llm.engine._grammars.open, []

    def watched(constraint: Constraint) -> GrammarState:
        threads.append(threading.current_thread().name)
        return open_(constraint)

    llm.engine._grammars.open = watched  # type: ignore[method-assign]
    asked = SamplingParams(temperature=1, seed=1, n=2, max_tokens=30, constraint=Constraint("regex", "[a-z]{3,6}!"))

    async def body(engine: AsyncEngine) -> None:
        both = await asyncio.gather(*(engine.complete([5], asked) for _ in range(3)))
        assert all(re.fullmatch("[a-z]{3,6}!", c.text) for done in both for c in done)
        with pytest.raises(RequestError, match=r"^regex: "):
            await engine.submit([5], SamplingParams(constraint=Constraint("regex", "[a")))

    run(llm, body)
    assert len(threads) == 7
    assert "arctool-engine" not in threads


def test_a_request_that_breaks_at_the_door_breaks_alone(llm: LLM) -> None:
    add = llm.engine.add

    def broken(request: Checked) -> int:
        if request.prompt_ids == (13,):
            raise ZeroDivisionError("a fault of ours")
        return add(request)

    llm.engine.add = broken  # type: ignore[method-assign]

    async def body(engine: AsyncEngine) -> None:
        with pytest.raises(ZeroDivisionError):
            await engine.submit([13], GREEDY)
        assert len(await engine.complete([5], GREEDY)) == 1

    run(llm, body)


def test_a_name_serves_one_request_at_a_time_and_aborts_it(llm: LLM) -> None:
    async def body(engine: AsyncEngine) -> None:
        task = asyncio.create_task(engine.complete([5, 6], SamplingParams(temperature=0, n=2, max_tokens=200, ignore_eos=True), "mine"))
        await until(lambda: llm.engine.telemetry().running == 2)
        with pytest.raises(RequestError, match=r"^request_id: 'mine' is in use"):
            await engine.submit([5], GREEDY, "mine")
        assert engine.abort("mine")
        assert [c.finish_reason for c in await task] == [FinishReason.ABORT] * 2
        await until(lambda: engine.unfinished == 0)
        assert not engine.abort("mine")
        assert len(await engine.complete([5], GREEDY, "mine")) == 1

    run(llm, body)


def test_the_last_update_of_an_aborted_request_has_the_text_that_was_held_back(llm: LLM) -> None:
    slow_down(llm)

    async def body(engine: AsyncEngine) -> None:
        assert llm.tokenizer is not None
        [token] = llm.tokenizer.encode("a", add_special_tokens=False)
        params = SamplingParams(temperature=0, max_tokens=200, logit_bias={token: 100.0}, stop=("a\u0000",))
        stream = await engine.submit([5], params, "mine")
        updates = []
        async for update in stream:
            updates.append(update)
            if len(updates) == 3:
                engine.abort("mine")
        done = updates[-1].completion
        assert done is not None
        assert done.finish_reason is FinishReason.ABORT
        assert updates[-1].text == "a"
        assert "".join(u.text for u in updates) == done.text == "a" * len(done.token_ids)

    run(llm, body)


def test_a_full_queue_refuses_and_takes_again(llm: LLM) -> None:
    slow_down(llm)

    async def body(engine: AsyncEngine) -> None:
        running = await engine.submit([5], SamplingParams(temperature=0, n=8, max_tokens=35, ignore_eos=True))
        await until(lambda: llm.engine.telemetry().running == 8)
        queued = [await engine.submit([6], GREEDY) for _ in range(2)]
        with pytest.raises(EngineBusy, match="2 requests are waiting, and no more than 2 may"):
            await engine.submit([7], GREEDY)
        running.close()
        for stream in queued:
            assert sum(len(u.token_ids) for u in [u async for u in stream]) == 24
        assert len(await engine.complete([7], GREEDY)) == 1

    run(llm, body, max_queued=2)


class Panic(BaseException):
    """As a library's panic: no Exception."""


@pytest.mark.parametrize("kind", [RuntimeError, Panic])
def test_a_fault_of_the_engine_reaches_every_waiter_by_name(llm: LLM, kind: type[BaseException]) -> None:
    step, broken = llm.engine.step, threading.Event()

    def faulty() -> list[Update]:
        if broken.is_set():
            raise kind("cache block 3 is freed twice")
        return step()

    llm.engine.step = faulty  # type: ignore[method-assign]

    async def body(engine: AsyncEngine) -> None:
        async def ask(i: int) -> int:
            count = 0
            async for update in engine.generate(random_ids(i, 5), LONG):
                count += len(update.token_ids)
            return count

        tasks = [asyncio.create_task(ask(i)) for i in range(12)]
        await until(lambda: llm.engine.telemetry().total.decode_tokens > 20)
        assert engine.healthy
        broken.set()
        for error in await asyncio.gather(*tasks, return_exceptions=True):
            assert isinstance(error, EngineStopped)
            assert f"{kind.__name__}: cache block 3 is freed twice" in str(error)
        await until(lambda: not engine.healthy)
        with pytest.raises(EngineStopped, match=f"has failed: {kind.__name__}"):
            await engine.submit([5], GREEDY)

    run(llm, body)
    for request in list(llm.engine._requests):
        llm.engine.cancel(request)


def test_a_step_that_fails_is_its_requests_error_and_not_the_engine_s(llm: LLM) -> None:
    original, failing = llm.runner.run, [True]

    def faulty(work: list, copies: list) -> object:
        if failing:
            failing.clear()
            raise MemoryError("no room")
        return original(work, copies)

    llm.runner.run = faulty  # type: ignore[method-assign, assignment]

    async def body(engine: AsyncEngine) -> None:
        [failed] = await engine.complete([5], GREEDY)
        assert failed.finish_reason is FinishReason.ERROR
        assert failed.error is not None
        assert "MemoryError: no room" in failed.error
        assert engine.healthy
        assert len((await engine.complete([5], GREEDY))[0].token_ids) == 24

    run(llm, body)


def test_stopping_lets_the_short_ones_end_and_tells_the_rest(llm: LLM) -> None:
    slow_down(llm)

    async def body(engine: AsyncEngine) -> None:
        short = asyncio.create_task(engine.complete([5], SamplingParams(temperature=0, max_tokens=3, ignore_eos=True)))
        long = asyncio.create_task(engine.complete([6], LONG))
        await until(lambda: engine.unfinished == 2)
        stopping = asyncio.create_task(engine.stop(drain=0.3))
        await asyncio.sleep(0)
        with pytest.raises(EngineStopped, match="shutting down"):
            await engine.submit([7], GREEDY)
        await stopping
        assert (await short)[0].finish_reason is FinishReason.LENGTH
        [cut] = await long
        assert cut.finish_reason is FinishReason.ABORT
        assert 0 < len(cut.token_ids) < 200

    run(llm, body)


def test_stopping_waits_no_longer_than_there_is_work(llm: LLM) -> None:
    async def body(engine: AsyncEngine) -> None:
        task = asyncio.create_task(engine.complete([5], GREEDY))
        await until(lambda: engine.unfinished == 1)
        await asyncio.wait_for(engine.stop(drain=1000), 20)
        assert (await task)[0].finish_reason is FinishReason.LENGTH

    run(llm, body)


def test_an_idle_engine_sleeps_and_is_not_late(llm: LLM) -> None:
    async def body(engine: AsyncEngine) -> None:
        await engine.complete([5], GREEDY)
        await until(lambda: engine.unfinished == 0)
        before, steps = time.thread_time(), llm.engine.telemetry().total.steps
        taken = []
        original = engine._take_commands
        engine._take_commands = lambda: taken.append(0) or original()  # type: ignore[method-assign, func-returns-value]
        await asyncio.sleep(0.1)
        assert len(taken) <= 1
        assert llm.engine.telemetry().total.steps == steps
        assert time.thread_time() - before < 0.08
        assert time.monotonic() - engine.last_tick < 0.05

    run(llm, body)


def test_an_engine_that_was_idle_for_long_is_not_late_in_its_first_step(llm: LLM) -> None:
    now, entered, leave = [0.0], threading.Event(), threading.Event()
    step = llm.engine.step

    def held() -> list[Update]:
        entered.set()
        leave.wait(20)
        return step()

    llm.engine.step = held  # type: ignore[method-assign]

    async def main() -> None:
        engine = AsyncEngine(llm, clock=lambda: now[0])
        try:
            await until(lambda: not llm.engine.has_work())
            now[0] = 400.0
            task = asyncio.create_task(engine.complete([5], GREEDY))
            await until(entered.is_set)
            assert engine.last_tick == 400.0
            now[0] = 470.0
            assert engine.last_tick == 400.0
            leave.set()
            await task
            assert engine.last_tick == 470.0
        finally:
            leave.set()
            await engine.stop()

    asyncio.run(main())


def test_a_closed_event_loop_loses_its_requests_and_harms_nobody(llm: LLM) -> None:
    engines = []

    async def start() -> None:
        engines.append(AsyncEngine(llm))
        await engines[0].submit([5], LONG)

    asyncio.run(start())

    async def other() -> None:
        engine = engines[0]
        assert len(await engine.complete([6], GREEDY)) == 1
        await until(lambda: engine.unfinished == 0)
        assert engine.healthy
        await engine.stop()

    asyncio.run(other())


def test_a_stopped_engine_refuses_by_name_whatever_it_is_asked(llm: LLM) -> None:
    async def body(engine: AsyncEngine) -> None:
        assert await engine.beside(lambda: 7) == 7
        await engine.stop()
        with pytest.raises(EngineStopped):
            await engine.beside(lambda: 7)
        with pytest.raises(EngineStopped):
            await engine.submit([5], GREEDY)
        assert not engine.abort("request-1")
        assert await engine.stop()

    run(llm, body)


def test_a_step_that_does_not_end_is_left_behind_and_its_readers_are_told(llm: LLM) -> None:
    """It may end later after all; then the thread ends, too, and nobody hears of it."""
    inside, go, step = threading.Event(), threading.Event(), llm.engine.step

    def endless() -> list[Update]:
        inside.set()
        assert go.wait(20)
        return step()

    llm.engine.step = endless  # type: ignore[method-assign]

    async def main() -> None:
        engine = AsyncEngine(llm)
        reader = asyncio.create_task(engine.complete([5], GREEDY))
        await until(inside.is_set)
        unseen = asyncio.create_task(engine.complete([6], GREEDY))
        await until(lambda: engine.unfinished == 2)
        assert not await engine.stop(patience=0.05)
        for told in (reader, unseen):
            with pytest.raises(EngineStopped, match="a step that does not end"):
                await told
        go.set()
        assert await engine.stop()
        assert engine.fault is None

    asyncio.run(main())
    for request in list(llm.engine._requests):
        llm.engine.cancel(request)


def test_time_to_drain_is_cut_short_by_another_call(llm: LLM) -> None:
    slow_down(llm, 0.02)

    async def body(engine: AsyncEngine) -> None:
        task = asyncio.create_task(engine.complete([5], LONG))
        await until(lambda: llm.engine.telemetry().running == 1)
        first = asyncio.create_task(engine.stop(drain=1000))
        await asyncio.sleep(0)
        assert await engine.stop()
        assert await asyncio.wait_for(first, 5)
        assert (await task)[0].finish_reason is FinishReason.ABORT

    run(llm, body)
