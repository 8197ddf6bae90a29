"""Which tokens a bake calibrates with: a source's windows, and for `auto` some that the model samples from itself.

`auto`, `CALIB_TOKENS` tokens: the committed mix of public-domain text, and of every `SELF_SHARE` windows the last one sampled by the
model itself (`self_sampling.py`), unless it has more than `SELF_WEIGHTS` weights: sampling holds the whole unquantised model in memory,
which calibration does not. Knows tokenizers and text, nothing of layers.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from arctool.bake.calibration.self_sampling import engine_options, sample_texts
from arctool.bake.calibration.text import AUTO, Windows, document_start, read_calibration, windows
from arctool.bake.source.checkpoint import Checkpoint
from arctool.errors import UsageError
from arctool.run.chat import load_template
from arctool.run.llm import LLM
from arctool.run.models.spec import Role
from arctool.run.tokenizer import Tokenizer

CALIB_TOKENS = 32768
MOST_TOKENS = 1 << 24
WINDOW = 1024
SELF_SHARE = 8
SELF_WEIGHTS = 1 << 30

Sampling = Callable[[int, int], None]
"""Called with (tokens sampled, tokens wanted)."""


@dataclass(frozen=True)
class CalibrationSet:
    """`text`: the source's windows; `sampled`: how many windows more the model writes itself; `source`: as the user named it, or auto."""

    source: str
    text: Windows
    sampled: int

    @property
    def tokens(self) -> int:
        return self.text.tokens + self.sampled * self.text.ids.shape[1]

    def to_json(self) -> dict[str, Any]:
        """What the report says, and what must agree for a bake to be resumed: no path of this machine."""
        return {
            "text": self.text.identity,
            "tokens": self.tokens,
            "window": int(self.text.ids.shape[1]),
            "sampled": self.sampled * int(self.text.ids.shape[1]),
            "auto": self.source == AUTO,
        }


def choose_calibration(checkpoint: Checkpoint, source: str = AUTO, tokens: int = CALIB_TOKENS) -> CalibrationSet:
    """Read and encode the text. Raises UsageError or SourceError for text that cannot calibrate."""
    config = checkpoint.config
    window = min(WINDOW, config.max_position_embeddings)
    if tokens > MOST_TOKENS:
        raise UsageError(f"--calib-tokens: expected at most {MOST_TOKENS}, found {tokens}")
    if tokens < window // 4 and source == AUTO:
        raise UsageError(f"--calib-tokens: expected at least {window // 4}, found {tokens}")
    tokenizer = Tokenizer(checkpoint.assets, config.vocab_size)
    count = max(1, tokens // window)
    weights = sum(math.prod(spec.shape) for spec in checkpoint.specs if spec.role is not Role.BIAS)
    sampled = count // SELF_SHARE if source == AUTO and weights <= SELF_WEIGHTS else 0
    texts = read_calibration(source, conversation(checkpoint, tokenizer))
    bos = document_start(lambda text: tokenizer.encode(text, add_special_tokens=True))
    wanted = min(tokens, window) if count == 1 else (count - sampled) * window
    found = windows(texts, lambda text: tokenizer.encode(text, add_special_tokens=False), wanted, window, bos)
    # Where the mix runs out the model writes the same share of what there is.
    share = min(sampled, len(found.ids) // (SELF_SHARE - 1)) if found.ids.shape[1] == window else 0
    return CalibrationSet(source, found, share)


def conversation(checkpoint: Checkpoint, tokenizer: Tokenizer) -> Callable[[Any], str] | None:
    """How messages of a .jsonl file become text: by the model's chat template, None if it has none."""
    template = load_template(checkpoint.assets, tokenizer.special)
    return None if template is None else lambda messages: template.render(messages, add_generation_prompt=False)


def sample_windows(checkpoint: Checkpoint, chosen: CalibrationSet, seed: int, progress: Sampling | None) -> NDArray[np.int32]:
    """The windows that the model writes itself, i32 [sampled, window]."""
    window = chosen.text.ids.shape[1]
    if not chosen.sampled:
        return np.empty((0, window), np.int32)
    llm = LLM(checkpoint, engine_options(checkpoint.config))
    ids = [token for text in sample_texts(llm, chosen.sampled * window, seed, progress) for token in text]
    return np.array(ids, np.int32).reshape(chosen.sampled, window)
