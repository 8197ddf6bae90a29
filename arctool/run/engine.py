"""The engine: requests in, tokens and text out. A step is three lines: schedule, run, postprocess."""

from __future__ import annotations

import logging
import secrets
import time
from collections import deque
from collections.abc import Callable, Iterator
from collections.abc import Sequence as Ordered
from dataclasses import dataclass

from arctool.errors import RequestError
from arctool.run.kv.paging import Paging
from arctool.run.requests import Checked, Completion, Sample, Timing, Update, new_sample
from arctool.run.runner import ModelRunner
from arctool.run.sampling.checks import as_token_id
from arctool.run.sampling.grammar import Grammars
from arctool.run.sampling.noise import child_seed
from arctool.run.sampling.params import SamplingParams
from arctool.run.sampling.sampler import Sampled, SampleRow, sample
from arctool.run.sampling.state import check_for_model, open_state
from arctool.run.scheduler import MAX_STEP_TOKENS, PREFILL_FLOOR, Limits, Scheduler, Step
from arctool.run.sequence import FinishReason, Sequence, Status
from arctool.run.telemetry import Telemetry
from arctool.run.tokenizer import Tokenizer

_log = logging.getLogger(__name__)

INTERRUPTIONS = (KeyboardInterrupt, SystemExit, GeneratorExit)
"""What somebody outside wants, as opposed to what goes wrong inside."""


@dataclass(frozen=True)
class Row:
    """One row of logits that was sampled: for whom, and the result."""

    sample: Sample
    result: Sampled


class Engine:
    """Serves any number of requests over one runner. Not thread-safe: one thread adds, steps and cancels (`AsyncEngine` is for more).

    Any number of streams may be open: whoever steps, the updates of a stream's requests wait for it in its own inbox.

    Without a tokenizer it works on token ids only, and text is empty. `eos_token_ids`: the tokens that end a text by themselves.
    """

    def __init__(
        self,
        runner: ModelRunner,
        tokenizer: Tokenizer | None,
        eos_token_ids: Ordered[int],
        *,
        max_seqs: int = 256,
        max_step_tokens: int = MAX_STEP_TOKENS,
        prefill_floor: int = PREFILL_FLOOR,
        enable_prefix_caching: bool = True,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        plan = runner.plan
        self.runner = runner
        self.tokenizer = tokenizer
        limits = Limits(
            max_seqs=max_seqs,
            block_size=plan.block_size,
            num_blocks=plan.num_blocks,
            max_model_len=plan.max_model_len,
            max_step_tokens=max_step_tokens,
            prefill_floor=prefill_floor,
        )
        identity = f"{runner.model.config} {plan}"
        self.scheduler = Scheduler(limits, Paging(plan.num_blocks, plan.block_size, identity, enable_prefix_caching))
        self.max_model_len = limits.longest
        self.max_seqs = max_seqs
        self._eos = frozenset(eos_token_ids)
        self._vocab_size = runner.model.config.vocab_size
        # A model may have more rows than its tokenizer has tokens; those mean nothing and are never chosen.
        self._choices = self._vocab_size if tokenizer is None else tokenizer.size
        self._grammars = Grammars(tokenizer, eos_token_ids)
        self._clock = clock
        self._requests: dict[int, list[Sample]] = {}
        self._samples: dict[int, Sample] = {}
        self._inboxes: dict[int, deque[Update]] = {}
        self._next_request = 0
        self._next_sequence = 0

    def add_request(self, prompt_ids: Ordered[int], params: SamplingParams) -> int:
        """Queue a request; returns its id. Raises RequestError, by field, for one that cannot be served."""
        return self.add(self.check(prompt_ids, params))

    def check(self, prompt_ids: Ordered[int], params: SamplingParams) -> Checked:
        """All that can be said of a request before it is queued. Any thread may ask: compiling a constraint takes a while.

        Raises RequestError, by field, for one that cannot be served.
        """
        arrived = self._clock()
        prompt = self._checked_prompt(prompt_ids)
        room = self.max_model_len - len(prompt)
        max_tokens = room if params.max_tokens is None else params.max_tokens
        self.scheduler.check_fits(len(prompt), max_tokens)
        check_for_model(params, choices=self._choices, room=room, has_text=self.tokenizer is not None)
        states = tuple(open_state(params, prompt, self._grammars) for _ in range(params.n))
        return Checked(prompt, params, max_tokens, secrets.randbits(64) if params.seed is None else params.seed, states, arrived)

    def is_quick(self, params: SamplingParams) -> bool:
        """Whether `check` has no constraint to compile. Any thread may ask."""
        return params.constraint is None or self._grammars.has(params.constraint)

    def add(self, request: Checked) -> int:
        """Queue a request that `check` has accepted; returns its id. Add it once: its samples' states move with it."""
        samples = []
        for index, state in enumerate(request.states):
            sequence = Sequence(
                id=self._next_sequence + index,
                prompt_ids=request.prompt_ids,
                params=request.params,
                max_tokens=request.max_tokens,
                seed=child_seed(request.seed, index),
                table=self.scheduler.paging.table(request.params.cache_salt),
                index=index,
                state=state,
            )
            samples.append(new_sample(self._next_request, sequence, self.tokenizer, request.arrived))
        self.scheduler.add(samples[0].sequence)  # the others start where its prompt ends
        self._requests[self._next_request] = samples
        self._samples.update((s.sequence.id, s) for s in samples)
        self._next_sequence += len(samples)
        self._next_request += 1
        return self._next_request - 1

    def has_work(self) -> bool:
        """Whether any request is unfinished."""
        return bool(self._requests)

    def telemetry(self) -> Telemetry:
        """What runs, waits and was done. Any thread may ask."""
        return self.scheduler.telemetry()

    def step(self) -> list[Update]:
        """Advance every sequence that the plan names; returns what became known. No work: an empty list.

        Updates of requests that a stream waits for are returned and put into its inbox too. If the model raises an error, the
        requests of the step end with it and the engine goes on; if it is interrupted, they are computed anew by a later step.
        """
        step = self.scheduler.schedule()
        if not step.work:
            return []
        self._note_start(step.admitted)
        try:
            rows = self._run(step)
        except INTERRUPTIONS:
            for sequence, _ in step.work:
                self.scheduler.preempt(sequence)
            raise
        except BaseException as error:  # panics of libraries included
            _log.exception("a step of the engine failed, and %d sequences with it", len(step.work))
            return self._post(self._fail(step, f"the engine failed in a step of this request: {type(error).__name__}: {error}"))
        return self._post(self._postprocess(step, rows))

    def cancel(self, request_id: int) -> tuple[Update, ...]:
        """End a request and free its blocks; the last updates of its unfinished samples, none if it is not (or no longer) known."""
        samples = [s for s in self._requests.get(request_id, ()) if s.sequence.status is not Status.FINISHED]
        return tuple(Update(request_id, (), s.cut(), self._finish(s, FinishReason.ABORT), s.sequence.index) for s in samples)

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
        """Serve the prompts together; returns their completions in the same order, the `n` samples of each in theirs."""
        done = [u.completion for u in self.stream(prompts, params) if u.completion is not None]
        return sorted(done, key=lambda completion: (completion.request_id, completion.index))

    def _checked_prompt(self, prompt_ids: Ordered[int]) -> tuple[int, ...]:
        self.scheduler.check_fits(len(prompt_ids), 1)  # before anybody looks at a million ids
        prompt: list[int] = []
        for token in prompt_ids:
            known = as_token_id(token)
            if known is None or not 0 <= known < self._vocab_size:
                raise RequestError(f"prompt: expected token ids from 0 to {self._vocab_size - 1}, found {token!r:.40}")
            prompt.append(known)
        if not prompt:
            raise RequestError("prompt: expected at least one token, found none")
        return tuple(prompt)

    def _note_start(self, admitted: Ordered[Sequence]) -> None:
        """A request's samples start together, because they share its prompt; one that was preempted has started before."""
        for sequence in admitted:
            for one in self._requests[self._samples[sequence.id].request_id]:
                if one.scheduled is None:
                    one.scheduled = self._clock()

    def _run(self, step: Step) -> list[Row]:
        """Compute the step and sample it: a row for every sequence that emits, and for every sibling that starts at its prompt's end."""
        logits = self.runner.run(step.work, step.copies)
        emitting = [self._samples[sequence.id] for sequence, item in step.work if item.emits]
        groups = [[one, *self._pending(one)] for one in emitting]
        if len(groups) < sum(map(len, groups)):
            logits = logits[[row for row, group in enumerate(groups) for _ in group]]
        samples = [one for group in groups for one in group]
        results = sample(logits, [self._sample_row(one.sequence) for one in samples], self._choices)
        return [Row(one, result) for one, result in zip(samples, results, strict=True)]

    def _sample_row(self, s: Sequence) -> SampleRow:
        """What the sampler needs to know about the next token of a sequence."""
        return SampleRow(s.params, s.seed, s.length, len(s.output_ids), self._eos, s.state.history, s.state.grammar)

    def _pending(self, one: Sample) -> list[Sample]:
        """The siblings that wait for this sample to compute the prompt."""
        if one.sequence.index:
            return []
        return [s for s in self._requests[one.request_id] if s.sequence.status is Status.PENDING]

    def _postprocess(self, step: Step, rows: list[Row]) -> list[Update]:
        """What was computed is in the cache for good, unless its logits were of no use; every row gets its token or its error."""
        failed = {row.sample.sequence.id for row in rows if row.result.token is None}
        self.scheduler.count_sampled(len(rows) - len(failed), sum(row.result.corrupted for row in rows))
        for sequence, item in step.work:
            if sequence.id not in failed:
                self.scheduler.commit(sequence, item.last)
            if item.emits and (siblings := self._pending(self._samples[sequence.id])):
                sequence.computed = item.last
                self.scheduler.fork(sequence, [s.sequence for s in siblings])
        return [self._accept(row) for row in rows]

    def _accept(self, row: Row) -> Update:
        one, token = row.sample, row.result.token
        index = one.sequence.index
        if token is None:
            return Update(one.request_id, (), "", self._finish(one, FinishReason.ERROR, row.result.error), index)
        try:
            text, reason = one.accept(row.result, self._eos, self._clock)
        except RequestError as error:  # a tokenizer that cannot decode its own tokens fails this sample, not its neighbours
            return Update(one.request_id, (token,), "", self._finish(one, FinishReason.ERROR, str(error)), index, one.last_token)
        except INTERRUPTIONS:
            raise
        except BaseException as error:  # so does whatever else goes wrong with one token: the others are in the cache already
            _log.exception("a token of request %d could not be accepted", one.request_id)
            message = f"the engine failed to accept a token of this request: {type(error).__name__}: {error}"
            return Update(one.request_id, (token,), "", self._finish(one, FinishReason.ERROR, message), index, one.last_token)
        logprobs = () if row.result.logprobs is None else (row.result.logprobs,)
        completion = None if reason is None else self._finish(one, reason)
        return Update(one.request_id, (token,), text, completion, index, one.last_token, logprobs)

    def _fail(self, step: Step, error: str) -> list[Update]:
        """End every request that has a sequence in the step."""
        affected = dict.fromkeys(self._samples[sequence.id].request_id for sequence, _ in step.work)
        samples = [s for i in affected for s in self._requests[i] if s.sequence.status is not Status.FINISHED]
        return [Update(s.request_id, (), "", self._finish(s, FinishReason.ERROR, error), s.sequence.index) for s in samples]

    def _finish(self, one: Sample, reason: FinishReason, error: str | None = None) -> Completion:
        self.scheduler.finish(one.sequence, reason, error)
        del self._samples[one.sequence.id]
        if all(s.sequence.status is Status.FINISHED for s in self._requests[one.request_id]):
            del self._requests[one.request_id]
        return one.completion(self._clock())

    def _post(self, updates: list[Update]) -> list[Update]:
        for update in updates:
            if update.request_id in self._inboxes:
                self._inboxes[update.request_id].append(update)
        return updates


__all__ = ["Completion", "Engine", "FinishReason", "SamplingParams", "Status", "Timing", "Update"]
