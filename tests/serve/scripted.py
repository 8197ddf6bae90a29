"""A model that says what the test tells it to: a real tokenizer, engine and cache, and a runner that makes up the logits."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Mapping
from collections.abc import Sequence as Ordered
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

sys.path.append(str(Path(__file__).resolve().parents[1] / "run"))

from tiny_models import DirectorySource

from arctool.run.llm import LLM, EngineOptions
from arctool.run.scheduler import Work
from arctool.run.sequence import Sequence

LLAMA = Path(__file__).resolve().parents[2] / "fixtures" / "checkpoints" / "llama"
CONTEXT = 4096

Reply = Callable[[str], str]
"""From the text of a prompt (without special tokens) to the text that the model generates."""


def scripted(reply: Reply | Mapping[str, str], *, template: str | None = None, before_step: Callable[[], None] | None = None) -> LLM:
    """The tiny Llama's tokenizer with a context of 4096, and a model that answers each prompt with `reply(prompt)` and its end token.

    A mapping gives the reply of the first key that the prompt contains. `template`: another chat template. `before_step` is called in the
    engine's thread before each step: sleep in it to slow the model down, raise in it to break a step.
    """
    source = DirectorySource(LLAMA)
    source.config = replace(source.config, max_position_embeddings=CONTEXT)
    if template is not None:
        config: dict[str, Any] = json.loads(source.assets["tokenizer_config.json"])
        source.assets["tokenizer_config.json"] = json.dumps({**config, "chat_template": template}).encode()
    llm = LLM(source, EngineOptions(max_seqs=64))
    choose = reply if callable(reply) else lambda prompt: next(text for key, text in reply.items() if key in prompt)
    llm.runner.run = _Script(llm, choose, before_step).run  # type: ignore[method-assign]
    return llm


class _Script:
    def __init__(self, llm: LLM, reply: Reply, before_step: Callable[[], None] | None) -> None:
        self._llm = llm
        self._reply = reply
        self._before_step = before_step
        self._known: dict[tuple[int, ...], list[int]] = {}

    def run(self, work: Ordered[tuple[Sequence, Work]], copies: Ordered[tuple[int, int]] = ()) -> NDArray[np.float32]:
        """As `ModelRunner.run`; a token that a constraint forbids is followed by the next best, like in any model."""
        if self._before_step is not None:
            self._before_step()
        rows = [self._logits(sequence) for sequence, item in work if item.emits]
        return np.array(rows, np.float32).reshape(-1, self._llm.config.vocab_size)

    def _logits(self, sequence: Sequence) -> NDArray[np.float32]:
        script = self._tokens(sequence.prompt_ids)
        at = len(sequence.output_ids)
        logits = np.linspace(0.0, -1.0, self._llm.config.vocab_size, dtype=np.float32)
        logits[script[at] if at < len(script) else self._llm.eos_token_ids[0]] = 100.0
        return logits

    def _tokens(self, prompt: tuple[int, ...]) -> list[int]:
        assert self._llm.tokenizer is not None
        if prompt not in self._known:
            text = self._reply(self._llm.tokenizer.decode(list(prompt)))
            self._known[prompt] = self._llm.tokenizer.encode(text, add_special_tokens=False)
        return self._known[prompt]
