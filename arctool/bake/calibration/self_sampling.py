"""Text that a model samples from itself, for calibration: what it writes is what it will see when it is used.

The recipe: sequences of at most 256 tokens, temperature 1, nothing filtered. Even ones run freely from the token that begins a text
(BOS), or, for a model without one, from a token drawn at random among those that are text. Odd ones are answers to the prompts
below, in turn, rendered by the model's chat template; a model without a template runs freely in all of them. Sequence i has a seed
of its own, made from the caller's, and the engine's promise is that a sequence's tokens never depend on who shares its batch: the
same model, count and seed give the same tokens, whatever the batch and the number of threads. Knows the engine, not what its text
is for.
"""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Callable
from datetime import datetime

from arctool.bake.calibration.text import document_start
from arctool.errors import RequestError, SourceError, UsageError
from arctool.run.config import ModelConfig
from arctool.run.engine import Completion, FinishReason
from arctool.run.llm import LLM, EngineOptions
from arctool.run.sampling.noise import uniform
from arctool.run.sampling.params import SamplingParams

SEQUENCE_TOKENS = 256
"""Prompt included."""
LEAST_ANSWER = 32
"""Tokens that a prompt must leave, or it is no prompt for us."""
AT_ONCE = 32
"""Sequences that decode together. SmolLM2-135M, one thread: 8 → 48 tokens/s, 32 → 130, 64 → 178 and twice the cache (0.75 GB)."""
MAX_FAILURES = 32
"""Sequences that may fail before it counts that most of them do."""
START_STREAM = 1
"""Of random numbers: free starts; streams 0 and 2 are the sampler's (`run/sampling/noise.py`)."""
TODAY = datetime(2025, 1, 15)  # for templates that print the date; a clock's would make every day another text

PROMPTS = (
    "Explain how a refrigerator keeps food cold.",
    "Write a Python function that returns the longest word in a sentence.",
    "What are the main causes of inflation?",
    "Give me a recipe for vegetable soup for four people.",
    "Write a short poem about the sea in winter.",
    "A shop sells pens at 3 for 2 euros. How much do 12 pens cost? Show your work.",
    "Summarise the plot of Romeo and Juliet in five sentences.",
    "What is the difference between a virus and a bacterium?",
    "Translate into German: The train to Berlin leaves at half past eight.",
    "Write an SQL query that finds the ten customers with the highest total orders.",
    "Write a polite email to a landlord about a broken heater.",
    "List ten animals that live in the desert.",
    "Tell me a story about a clockmaker who loses track of time.",
    "How do I undo the last commit in git?",
    "Why did the Roman Empire fall?",
    "Explain the Pythagorean theorem to a twelve-year-old.",
    "Give me a JSON object that describes a book with title, author, year and three tags.",
    "What should I pack for a three-day hike in the mountains?",
    "Schreibe drei Sätze über den Herbst.",
    "Compare renting and buying a home: a table with advantages and disadvantages.",
    "Fix the grammar: He don't know where is the keys at.",
    "Write a bash script that deletes log files older than 30 days.",
    "Who was Marie Curie, and what is she known for?",
    "Continue the dialogue.\nAnna: Did you hear that noise?\nTom: It came from the attic.",
)

Progress = Callable[[int, int], None]
"""Called with (tokens so far, tokens wanted)."""

_log = logging.getLogger(__name__)


def engine_options(config: ModelConfig) -> EngineOptions:
    """What to load a model with for this purpose: room for AT_ONCE sequences, and no more of its context than they need."""
    return EngineOptions(max_model_len=min(SEQUENCE_TOKENS, config.max_position_embeddings), max_seqs=AT_ONCE)


def sample_texts(llm: LLM, tokens: int, seed: int, progress: Progress | None = None) -> list[list[int]]:
    """Sequences of token ids, prompts included, `tokens` in all (the last one cut to that). Load `llm` with `engine_options` for speed.

    Raises UsageError for a count below 1 or a seed that is no 64-bit number, SourceError if the model cannot continue any text.
    """
    if tokens < 1 or not 0 <= seed < 1 << 64:
        raise UsageError(f"self-sampling: expected at least 1 token and a seed from 0 to 2^64 - 1, found {tokens} and {seed}")
    sampled = _sampled(llm, _Recipe(llm, seed), tokens, progress)
    kept = [ids for ids in sampled if ids is not None]
    if len(kept) < len(sampled):
        _log.warning("self-sampling: %d of %d sequences met a logit that is not finite", len(sampled) - len(kept), len(sampled))
    surplus = sum(map(len, kept)) - tokens
    return [*kept[:-1], kept[-1][: len(kept[-1]) - surplus]]


class _Recipe:
    """How sequence i begins and with which seed."""

    def __init__(self, llm: LLM, seed: int) -> None:
        self.length = min(SEQUENCE_TOKENS, llm.engine.max_model_len)
        self._llm = llm
        self._seed = seed
        self._prompts = [ids for ids in _rendered(llm) if len(ids) + LEAST_ANSWER <= self.length]
        tokenizer = llm.tokenizer
        self._bos = None if tokenizer is None else document_start(lambda text: tokenizer.encode(text, add_special_tokens=True))

    def seed(self, index: int) -> int:
        """A seed for sequence `index`: the first 64 bits of a hash, so that neighbouring seeds share nothing."""
        digest = hashlib.sha256(f"arctool self-sampling {self._seed} {index}".encode()).digest()
        return int.from_bytes(digest[:8], "little")

    def params(self, index: int) -> SamplingParams:
        """How sequence `index` goes on."""
        return SamplingParams(temperature=1.0, seed=self.seed(index), max_tokens=self.length - len(self.start(index)))

    def start(self, index: int) -> list[int]:
        """The tokens that sequence `index` begins with."""
        if index % 2 and self._prompts:
            return self._prompts[index // 2 % len(self._prompts)]
        return [self._text_token(self.seed(index)) if self._bos is None else self._bos]

    def _text_token(self, seed: int) -> int:
        """A token drawn evenly among those that are text: not special, and with something to show."""
        tokenizer = self._llm.tokenizer
        size = self._llm.config.vocab_size if tokenizer is None else tokenizer.size
        draws = (int(uniform(seed, attempt, START_STREAM) * size) for attempt in range(64 * size))
        found = next((t for t in draws if tokenizer is None or tokenizer.decode([t])), None)  # a special one decodes to nothing
        if found is None:
            raise SourceError("self-sampling: the tokenizer has no token that is text; calibrate with --calib FILE")
        return found


def _rendered(llm: LLM) -> list[list[int]]:
    """The prompts as the model's chat sees them; none if it has no template, or one that refuses a plain question."""
    if llm.tokenizer is None or llm.template is None:
        return []
    try:
        return [llm.encode_chat([{"role": "user", "content": prompt}], strftime_now=TODAY.strftime) for prompt in PROMPTS]
    except RequestError as error:
        _log.warning("self-sampling: without chat answers: %s", error)
        return []


def _sampled(llm: LLM, recipe: _Recipe, tokens: int, progress: Progress | None) -> list[list[int] | None]:
    """Sequences 0, 1, ... up to the one with which there are `tokens` of them; None for one that the model could not continue.

    As many run at once as the engine takes; a new one starts as soon as another has ended and those under way may not be enough.
    """
    engine = llm.engine
    running: dict[int, int] = {}
    ended: dict[int, list[int] | None] = {}
    started = in_order = failures = total = seen = 0
    try:
        while total < tokens:
            promised = sum(len(ids) for ids in ended.values() if ids is not None)
            while len(running) < engine.scheduler.limits.max_seqs and promised + len(running) * recipe.length < tokens:
                running[engine.add_request(recipe.start(started), recipe.params(started))] = started
                started += 1
            for update in engine.step():
                seen += len(update.token_ids)
                if update.completion is not None:
                    ended[running.pop(update.request_id)] = _whole(update.completion)
            if progress is not None:
                progress(min(seen, tokens), tokens)
            while in_order in ended and total < tokens:
                total += len(ended[in_order] or ())
                failures += ended[in_order] is None
                in_order += 1
                if failures >= MAX_FAILURES and 2 * failures > in_order:
                    what = f"{failures} of {in_order} sequences met a logit that is not finite"
                    raise SourceError(f"self-sampling: {what}; calibrate with --calib FILE")
    finally:
        for request in running:
            engine.cancel(request)
    return [ended[i] for i in range(in_order)]


def _whole(completion: Completion) -> list[int] | None:
    """A sequence with its beginning, an end token included; None where the model failed in it."""
    failed = completion.finish_reason is FinishReason.ERROR
    return None if failed else [*completion.prompt_ids, *completion.token_ids]
