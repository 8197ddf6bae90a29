"""The engine: requests in, tokens and text out. A step is three lines: schedule, run, postprocess."""

from __future__ import annotations

import secrets
import time
from collections import deque
from collections.abc import Callable, Collection, Iterator
from collections.abc import Sequence as Ordered
from dataclasses import dataclass, field

from arctool.errors import RequestError
from arctool.run.detokenizer import StopStrings, StreamDecoder
from arctool.run.kv.blocks import BlockTable
from arctool.run.runner import ModelRunner
from arctool.run.sampling.checks import as_token_id
from arctool.run.sampling.grammar import Grammars
from arctool.run.sampling.params import SamplingParams
from arctool.run.sampling.sampler import Sampled, SampleRow, TokenLogprobs, sample
from arctool.run.sampling.state import check_for_model, open_state
from arctool.run.scheduler import Limits, Scheduler, Work
from arctool.run.sequence import FinishReason, Sequence, Status
from arctool.run.tokenizer import Tokenizer


@dataclass(frozen=True)
class Timing:
    """Seconds on a monotonic clock, from the arrival of the request: until its first token (None: there was none), and in all."""

    first_token: float | None
    total: float


@dataclass(frozen=True)
class Completion:
    """A finished request. `token_ids` holds every generated token, an end token included; `text` has no stop string in it."""

    request_id: int
    prompt_ids: tuple[int, ...]
    token_ids: tuple[int, ...]
    text: str
    finish_reason: FinishReason
    logprobs: tuple[TokenLogprobs, ...] | None
    timing: Timing
    error: str | None = None


@dataclass(frozen=True)
class Update:
    """What one step brought for one request: new tokens, the text that became certain, and the completion if it has ended."""

    request_id: int
    token_ids: tuple[int, ...]
    text: str
    completion: Completion | None = None


@dataclass
class _Request:
    """A sequence and what the engine keeps about its text and its clock."""

    sequence: Sequence
    decoder: StreamDecoder | None
    stops: StopStrings
    arrived: float
    first_token: float | None = None
    pieces: list[str] = field(default_factory=list)


class Engine:
    """Serves any number of requests over one runner. Not thread-safe: one thread adds, steps and cancels.

    Any number of streams may be open: whoever steps, the updates of a stream's requests wait for it in its own inbox.

    Without a tokenizer it works on token ids only, and text is empty. `eos_token_ids`: the tokens that end a text by themselves.
    """

    def __init__(
        self,
        runner: ModelRunner,
        tokenizer: Tokenizer | None,
        eos_token_ids: Ordered[int],
        *,
        max_seqs: int = 1,
        prefill_chunk: int = 256,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        plan = runner.plan
        self.runner = runner
        self.tokenizer = tokenizer
        self.max_model_len = plan.max_model_len
        self.scheduler = Scheduler(
            Limits(
                max_seqs=max_seqs,
                max_tokens=prefill_chunk + max_seqs,
                prefill_chunk=prefill_chunk,
                block_size=plan.block_size,
                num_blocks=plan.num_blocks,
                max_model_len=plan.max_model_len,
            )
        )
        self._eos = frozenset(eos_token_ids)
        self._vocab_size = runner.model.config.vocab_size
        # A model may have more rows than its tokenizer has tokens; those mean nothing and are never chosen.
        self._choices = self._vocab_size if tokenizer is None else tokenizer.size
        self._grammars = Grammars(tokenizer, eos_token_ids)
        self._clock = clock
        self._requests: dict[int, _Request] = {}
        self._inboxes: dict[int, deque[Update]] = {}
        self._next_id = 0

    def add_request(self, prompt_ids: Ordered[int], params: SamplingParams) -> int:
        """Queue a request; returns its id. Raises RequestError, by field, for one that cannot be served."""
        prompt = self._checked_prompt(prompt_ids)
        room = self.max_model_len - len(prompt)
        if params.n != 1:
            raise RequestError(f"n: this engine gives one sample for each request, found {params.n}")
        check_for_model(params, choices=self._choices, room=room, has_text=self.tokenizer is not None)
        sequence = Sequence(
            id=self._next_id,
            prompt_ids=prompt,
            params=params,
            max_tokens=room if params.max_tokens is None else params.max_tokens,
            seed=secrets.randbits(64) if params.seed is None else params.seed,
            table=BlockTable(self.scheduler.limits.block_size),
            state=open_state(params, prompt, self._grammars),
        )
        self.scheduler.add(sequence)
        decoder = None if self.tokenizer is None else StreamDecoder(self.tokenizer)
        stops = StopStrings(params.stop, include=params.include_stop_str_in_output)
        self._requests[sequence.id] = _Request(sequence, decoder, stops, self._clock())
        self._next_id += 1
        return sequence.id

    def has_work(self) -> bool:
        """Whether any request is unfinished."""
        return bool(self._requests)

    def step(self) -> list[Update]:
        """Advance every sequence that the plan names; returns what became known. No work: an empty list.

        Updates of requests that a stream waits for are returned and put into its inbox too.
        """
        work = self.scheduler.schedule()
        if not work:
            return []
        logits = self.runner.run(work)
        updates = self._postprocess(work, sample(logits, _rows(work, self._eos), self._choices))
        for update in updates:
            if update.request_id in self._inboxes:
                self._inboxes[update.request_id].append(update)
        return updates

    def cancel(self, request_id: int) -> Completion | None:
        """End a request and free its blocks; None if it is not (or no longer) known."""
        if request_id not in self._requests:
            return None
        return self._finish(self._requests[request_id], FinishReason.ABORT)

    def stream(self, prompts: Ordered[Ordered[int]], params: Ordered[SamplingParams]) -> Iterator[Update]:
        """Serve the prompts together; yields updates as they come. All are checked first; closing the iterator cancels all.

        Request ids count up in the order of `prompts` from the first one's.
        """
        ids: list[int] = []
        inbox: deque[Update] = deque()
        try:
            for prompt, one in zip(prompts, params, strict=True):
                ids.append(self.add_request(prompt, one))
                self._inboxes[ids[-1]] = inbox
            while inbox or any(i in self._requests for i in ids):
                if inbox:
                    yield inbox.popleft()
                else:
                    self.step()
        finally:
            for i in ids:
                self.cancel(i)
                self._inboxes.pop(i, None)

    def generate(self, prompts: Ordered[Ordered[int]], params: Ordered[SamplingParams]) -> list[Completion]:
        """Serve the prompts together; returns their completions in the same order."""
        done = [u.completion for u in self.stream(prompts, params) if u.completion is not None]
        return sorted(done, key=lambda completion: completion.request_id)

    def _checked_prompt(self, prompt_ids: Ordered[int]) -> tuple[int, ...]:
        prompt: list[int] = []
        for token in prompt_ids:
            known = as_token_id(token)
            if known is None or not 0 <= known < self._vocab_size:
                raise RequestError(f"prompt: expected token ids from 0 to {self._vocab_size - 1}, found {token!r:.40}")
            prompt.append(known)
        if not prompt:
            raise RequestError("prompt: expected at least one token, found none")
        if len(prompt) >= self.max_model_len:
            raise RequestError(f"prompt: {len(prompt)} tokens leave no room in the context of {self.max_model_len} tokens; shorten it")
        return tuple(prompt)

    def _postprocess(self, work: list[tuple[Sequence, Work]], results: list[Sampled]) -> list[Update]:
        """Commit the step: what was computed is computed, every emitting sequence gets its token or its error."""
        for sequence, item in work:
            sequence.computed = item.last
        emitting = [sequence for sequence, item in work if item.emits]
        return [self._commit(self._requests[s.id], result) for s, result in zip(emitting, results, strict=True)]

    def _commit(self, request: _Request, result: Sampled) -> Update:
        sequence = request.sequence
        if result.token is None:
            return Update(sequence.id, (), "", self._finish(request, FinishReason.ERROR, result.error))
        sequence.output_ids.append(result.token)
        sequence.state.push(result.token)
        if result.logprobs is not None:
            sequence.logprobs.append(result.logprobs)
        if request.first_token is None:
            request.first_token = self._clock()
        try:
            text, reason = self._text_and_reason(request, result.token)
        except RequestError as error:  # a tokenizer that cannot decode its own tokens fails this request, not its neighbours
            return Update(sequence.id, (result.token,), "", self._finish(request, FinishReason.ERROR, str(error)))
        if text:
            request.pieces.append(text)
        return Update(sequence.id, (result.token,), text, None if reason is None else self._finish(request, reason))

    def _text_and_reason(self, request: _Request, token: int) -> tuple[str, FinishReason | None]:
        """The text that `token` makes certain, and why the request ends with it, if it does."""
        sequence, params = request.sequence, request.sequence.params
        too_short = len(sequence.output_ids) < params.min_tokens
        is_eos = token in self._eos and not params.ignore_eos
        ends = is_eos or token in params.stop_token_ids
        text = ""
        if request.decoder is not None:
            # A token that ends the text is not part of it, even where it would decode to something.
            piece = request.stops.push("" if ends else request.decoder.push(token), too_short=too_short)
            if piece.stopped:
                return piece.text, FinishReason.STOP
            text = piece.text
        complete = ends or sequence.state.finished
        if not complete and len(sequence.output_ids) < sequence.max_tokens:
            return text, None
        if request.decoder is not None:
            last = request.stops.push(request.decoder.flush(), too_short=too_short)
            text += last.text
            if last.stopped:
                return text, FinishReason.STOP
            text += request.stops.flush()
        return text, FinishReason.STOP if complete else FinishReason.LENGTH

    def _finish(self, request: _Request, reason: FinishReason, error: str | None = None) -> Completion:
        sequence = request.sequence
        self.scheduler.finish(sequence, reason, error)
        del self._requests[sequence.id]
        first = None if request.first_token is None else request.first_token - request.arrived
        return Completion(
            request_id=sequence.id,
            prompt_ids=sequence.prompt_ids,
            token_ids=tuple(sequence.output_ids),
            text="".join(request.pieces),
            finish_reason=reason,
            logprobs=None if sequence.params.logprobs is None else tuple(sequence.logprobs),
            timing=Timing(first, self._clock() - request.arrived),
            error=error,
        )


def _rows(work: list[tuple[Sequence, Work]], ends: Collection[int]) -> list[SampleRow]:
    """What the sampler needs for every row of logits."""
    emitting = [s for s, item in work if item.emits]
    return [SampleRow(s.params, s.seed, s.length, len(s.output_ids), ends, s.state.history, s.state.grammar) for s in emitting]


__all__ = ["Completion", "Engine", "FinishReason", "SamplingParams", "Status", "Timing", "Update"]
