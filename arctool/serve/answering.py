"""From a checked request to news of its samples: over one or several prompts, with a deadline, until the reader leaves."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass

from arctool.run.async_engine import AsyncEngine, Stream
from arctool.run.requests import Completion, Update
from arctool.run.sampling.params import SamplingParams
from arctool.run.sampling.sampler import NOTHING_LEFT
from arctool.run.sequence import FinishReason
from arctool.serve.errand import Errand
from arctool.serve.metrics import Metrics, RequestMeter
from arctool.serve.problems import Problem, outside, unavailable


@dataclass(frozen=True)
class News:
    """What became known of choice `choice`: sample `update.index` of its prompt, counted over all prompts."""

    choice: int
    update: Update


@dataclass(frozen=True)
class Deadline:
    """When a request must have ended, by the event loop's clock; None: never."""

    at: float | None = None

    @contextlib.asynccontextmanager
    async def kept(self) -> AsyncIterator[None]:
        """Raises Problem 504 once it is passed."""
        try:
            async with asyncio.timeout_at(self.at):
                yield
        except TimeoutError as error:
            raise Problem(504, "timeout: passed before the engine took the request", "timeout_error", code="timeout") from error

    def left(self) -> float:
        """Seconds until then; 0 if it has passed."""
        return 0.0 if self.at is None else max(0.0, self.at - asyncio.get_running_loop().time())


class Answer:
    """The samples of a request while they grow. Iterate over it once; `close` aborts what is left.

    `completions`: those that have ended, by choice.
    """

    def __init__(
        self, streams: Sequence[tuple[Stream, RequestMeter]], prompts: Sequence[Sequence[int]], params: SamplingParams, errand: Errand
    ) -> None:
        self.prompt_tokens = sum(map(len, prompts))
        self.choices = len(prompts) * params.n
        self.completions: dict[int, Completion] = {}
        self.timed_out = False
        self._streams = streams
        self._params = params
        self._errand = errand
        self._timer: asyncio.TimerHandle | None = None

    @property
    def cached_tokens(self) -> int:
        """Tokens of the prompts that the prefix cache had."""
        return sum(completion.cached_tokens for completion in self.completions.values() if completion.index == 0)

    def expire(self, seconds: float) -> None:
        """Stop after so long."""

        def end() -> None:
            self.timed_out = True
            self.stop()

        self._timer = asyncio.get_running_loop().call_later(seconds, end)

    def stop(self) -> None:
        """End all samples where they are; the reader goes on to their completions, which say so."""
        for stream, _ in self._streams:
            stream.engine.abort(stream.name)

    async def __aiter__(self) -> AsyncIterator[News]:
        """News as they come. Raises EngineStopped if the engine fails, Problem 500 for a sample that failed alone."""
        try:
            if len(self._streams) == 1:
                async for news in self._read(0):
                    yield news
            else:
                async for news in self._read_all():
                    yield news
        finally:
            self.close()

    def check_begun(self) -> None:
        """Raise Problem if all samples were ended before they had a token: an empty text would look like an answer."""
        if all(c.finish_reason is FinishReason.ABORT and not c.token_ids for c in self.completions.values()):
            raise self.cut_off()

    def cut_off(self) -> Problem:
        """Why the samples were ended before their end."""
        if self.timed_out:
            return Problem(504, "timeout: passed before the answer was complete", "timeout_error", code="timeout")
        return unavailable("the server is shutting down; the request was ended before its answer was complete")

    def close(self) -> None:
        """Safe to call twice."""
        if self._timer is not None:
            self._timer.cancel()
        for stream, meter in self._streams:
            stream.close()
            meter.end()
        first = [meter.first_token for _, meter in self._streams if meter.first_token is not None]
        self._errand.tell(self._params, self.prompt_tokens, self.cached_tokens, min(first, default=None), self.completions.values())

    async def _read(self, number: int) -> AsyncIterator[News]:
        stream, meter = self._streams[number]
        async for update in stream:
            meter.update(update)
            choice = number * self._params.n + update.index
            if update.completion is not None:
                if update.completion.finish_reason is FinishReason.ERROR:
                    raise _failed(update.completion.error or "the engine failed")
                self.completions[choice] = update.completion
            yield News(choice, update)

    async def _read_all(self) -> AsyncIterator[News]:
        merged: asyncio.Queue[News | Exception | None] = asyncio.Queue()

        async def pour(number: int) -> None:
            try:
                async for news in self._read(number):
                    merged.put_nowait(news)
                merged.put_nowait(None)
            except Exception as error:
                merged.put_nowait(error)

        tasks = [asyncio.ensure_future(pour(number)) for number in range(len(self._streams))]
        try:
            open_streams = len(tasks)
            while open_streams:
                item = await merged.get()
                if isinstance(item, Exception):
                    raise item
                if item is None:
                    open_streams -= 1
                else:
                    yield item
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)


def _failed(error: str) -> Problem:
    if error.startswith(NOTHING_LEFT):
        return Problem(400, error, code="nothing_left")
    return Problem(500, outside(error), "engine_error", code="engine_error")


async def answer(
    engine: AsyncEngine, metrics: Metrics, prompts: Sequence[Sequence[int]], params: SamplingParams, deadline: Deadline, errand: Errand
) -> Answer:
    """Queue the prompts of one request, of which `errand` will tell. Raises RequestError, EngineBusy, EngineStopped, Problem 504."""
    streams: list[tuple[Stream, RequestMeter]] = []
    try:
        async with deadline.kept():
            for prompt in prompts:
                stream = await engine.submit(prompt, params)
                streams.append((stream, metrics.request(len(prompt), params, errand.arrived)))
    except BaseException:
        for stream, meter in streams:
            stream.close()
            meter.end()
        raise
    found = Answer(streams, prompts, params, errand)
    if deadline.at is not None:
        found.expire(deadline.left())
    return found
