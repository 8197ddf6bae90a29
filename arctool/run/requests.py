"""A request as its owner sees it: samples, text, what became known, how it ended. Knows nothing of blocks or steps."""

from __future__ import annotations

from collections.abc import Callable, Set
from dataclasses import dataclass, field

from arctool.errors import RequestError
from arctool.run.detokenizer import Piece, StopStrings, StreamDecoder
from arctool.run.sampling.params import SamplingParams
from arctool.run.sampling.sampler import Sampled, TokenLogprobs
from arctool.run.sampling.state import RowState
from arctool.run.sequence import FinishReason, Sequence
from arctool.run.tokenizer import Tokenizer


@dataclass(frozen=True)
class Timing:
    """Seconds from the arrival of the request: until its first token (None: there was none), and in all.

    `scheduled`: until it first ran (None: it never did); `last_token`: until its last token. `arrived`: when, on the engine's monotonic
    clock, the engine first saw it; what it waited for before it could be queued, such as its grammar, counts as waiting.
    """

    first_token: float | None
    total: float
    scheduled: float | None = None
    last_token: float | None = None
    arrived: float = 0.0


@dataclass(frozen=True)
class Completion:
    """A finished sample of a request. `token_ids` holds every generated token, an end token included; `text` has no stop string in it.

    `index`: which of the request's `n` samples it is. `cached_tokens`: how many tokens of the prompt the prefix cache had.
    `stopped_by`: the stop string that ended it, None where something else did.
    """

    request_id: int
    prompt_ids: tuple[int, ...]
    token_ids: tuple[int, ...]
    text: str
    finish_reason: FinishReason
    logprobs: tuple[TokenLogprobs, ...] | None
    timing: Timing
    error: str | None = None
    index: int = 0
    cached_tokens: int = 0
    stopped_by: str | None = None


@dataclass(frozen=True)
class Update:
    """What one step brought for sample `index` of a request: new tokens, the text that became certain, the completion if it has ended.

    `logprobs`: one for each of `token_ids` if the request asked for them, else none.
    `time`: when the tokens were chosen, on the engine's monotonic clock (None: there are none), however late somebody reads of it.
    """

    request_id: int
    token_ids: tuple[int, ...]
    text: str
    completion: Completion | None = None
    index: int = 0
    time: float | None = None
    logprobs: tuple[TokenLogprobs, ...] = ()


@dataclass(frozen=True)
class Checked:
    """A request that can be served: nothing in it is left open. `states`: what the sampler will remember, of each sample.

    `arrived`: when the engine began to check it.
    """

    prompt_ids: tuple[int, ...]
    params: SamplingParams
    max_tokens: int
    seed: int
    states: tuple[RowState, ...]
    arrived: float


@dataclass
class Sample:
    """One sample of a request: its sequence, and what is kept about its text and its clock."""

    request_id: int
    sequence: Sequence
    decoder: StreamDecoder | None
    stops: StopStrings
    arrived: float
    scheduled: float | None = None
    first_token: float | None = None
    last_token: float | None = None
    pieces: list[str] = field(default_factory=list)

    def accept(self, result: Sampled, ends: Set[int], clock: Callable[[], float]) -> tuple[str, FinishReason | None]:
        """Append a token; returns the text that it makes certain, and why the sample ends with it, if it does.

        `ends`: the model's own end tokens. Raises RequestError for tokens that the tokenizer cannot decode.
        """
        sequence = self.sequence
        if result.token is None:
            raise ValueError("a row without a token cannot be accepted")
        self.last_token = clock()
        if self.first_token is None:
            self.first_token = self.last_token
        sequence.output_ids.append(result.token)
        sequence.state.push(result.token)
        if result.logprobs is not None:
            sequence.logprobs.append(result.logprobs)
        text, reason = self._text_and_reason(result.token, ends)
        if text:
            self.pieces.append(text)
        return text, reason

    def cut(self) -> str:
        """The sample ends here, for a reason that is not in its text: what was held back of that, and is text after all."""
        if self.decoder is None:
            return ""
        too_short = len(self.sequence.output_ids) < self.sequence.params.min_tokens
        try:
            last = self.stops.push(self.decoder.flush(), too_short=too_short)
        except RequestError:  # tokens that the tokenizer cannot decode: they have no text
            last = Piece("", False)
        text = last.text if last.stopped else last.text + self.stops.flush()
        if text:
            self.pieces.append(text)
        return text

    def completion(self, now: float) -> Completion:
        """What became of it, once its sequence has ended."""
        sequence = self.sequence
        if sequence.finish_reason is None:
            raise ValueError(f"sequence {sequence.id} has not ended")
        return Completion(
            request_id=self.request_id,
            prompt_ids=sequence.prompt_ids,
            token_ids=tuple(sequence.output_ids),
            text="".join(self.pieces),
            finish_reason=sequence.finish_reason,
            logprobs=None if sequence.params.logprobs is None else tuple(sequence.logprobs),
            timing=Timing(
                self._since_arrival(self.first_token),
                now - self.arrived,
                self._since_arrival(self.scheduled),
                self._since_arrival(self.last_token),
                self.arrived,
            ),
            error=sequence.error,
            index=sequence.index,
            cached_tokens=sequence.hit,
            stopped_by=self.stops.found if sequence.finish_reason is FinishReason.STOP else None,
        )

    def _since_arrival(self, moment: float | None) -> float | None:
        return None if moment is None else moment - self.arrived

    def _text_and_reason(self, token: int, ends: Set[int]) -> tuple[str, FinishReason | None]:
        sequence, params = self.sequence, self.sequence.params
        too_short = len(sequence.output_ids) < params.min_tokens
        ends_it = (token in ends and not params.ignore_eos) or token in params.stop_token_ids
        text = ""
        if self.decoder is not None:
            # A token that ends the text is not part of it, even where it would decode to something.
            piece = self.stops.push("" if ends_it else self.decoder.push(token), too_short=too_short)
            if piece.stopped:
                return piece.text, FinishReason.STOP
            text = piece.text
        complete = ends_it or sequence.state.finished
        if not complete and len(sequence.output_ids) < sequence.max_tokens:
            return text, None
        if self.decoder is not None:
            last = self.stops.push(self.decoder.flush(), too_short=too_short)
            text += last.text
            if last.stopped:
                return text, FinishReason.STOP
            text += self.stops.flush()
        return text, FinishReason.STOP if complete else FinishReason.LENGTH


def new_sample(request_id: int, sequence: Sequence, tokenizer: Tokenizer | None, arrived: float) -> Sample:
    """A sample that has no tokens yet. Without a tokenizer its text stays empty."""
    decoder = None if tokenizer is None else StreamDecoder(tokenizer, frozenset(sequence.params.shown_token_ids))
    stops = StopStrings(sequence.params.stop, include=sequence.params.include_stop_str_in_output)
    return Sample(request_id, sequence, decoder, stops, arrived)
