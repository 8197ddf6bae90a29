"""Random prompts of a wanted number of tokens, for servers whose tokenizer we do not have.

Three sources: token ids (a vocabulary's size or a tokenizer is given, and the server takes ids), text fitted with a tokenizer, and words
whose tokens the server itself has counted. Two requests tell of words: one of a capital letter alone and one of a letter and all words;
where the second has as many more tokens as it has words, each of them is one token wherever it stands. What a server adds to every prompt
(a BOS, a chat template) is its `overhead`, found in the same way.
"""

from __future__ import annotations

import string
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from arctool.bench.serving.client import Client
from arctool.bench.serving.dialect import HOPELESS, Dialect, Prompt, probe, refusal
from arctool.errors import RequestError, SourceError, UsageError

WORDS: tuple[str, ...] = tuple(
    """
    the and for that with this from have not are was but they you all can had her one our out day get has him his how man new now
    old see two way who did its let say she too use good work year time home life hand part place case week long great little own
    right big high small large next early young same able last first water
    """.split()  # noqa: SIM905  # a list of so many literals is no easier to read
)
"""Short and common enough to be single tokens, with a space before them, of any large vocabulary."""

SAMPLE = 16
"""Tokens of the prompt that shows what a server adds."""

TRIES = 20
"""Texts that are made before the nearest one must do."""

SLACK = {"exact": 0.0, "proven": 0.02, "estimated": 0.25}
"""How far the server's count of a prompt may be from what was asked for, by how well its tokens are known."""


class Source(Protocol):
    """Makes prompts. `how`: in words for the result; `known`: a key of `SLACK`; `overhead`: tokens that the server adds to each."""

    @property
    def how(self) -> str: ...

    @property
    def known(self) -> str: ...

    @property
    def overhead(self) -> int: ...

    def make(self, random: np.random.Generator, tokens: int) -> Any:
        """A piece of a prompt with so many tokens of its own."""

    def join(self, pieces: Sequence[Any]) -> Any:
        """The prompt of some pieces."""


@dataclass(frozen=True)
class Ids:
    """Token ids: any of `among`."""

    among: NDArray[np.int64]
    overhead: int = 0
    how: str = "random token ids"
    known: str = "exact"

    def make(self, random: np.random.Generator, tokens: int) -> list[int]:
        return [int(one) for one in self.among[random.integers(0, self.among.size, tokens)]]

    def join(self, pieces: Sequence[list[int]]) -> list[int]:
        return [one for piece in pieces for one in piece]


@dataclass(frozen=True)
class Words:
    """A capital letter and words; `rate`: tokens of a word."""

    rate: float = 1.0
    overhead: int = 0
    known: str = "estimated"

    @property
    def how(self) -> str:
        return "random words of one token each" if self.known == "proven" else f"random words of about {self.rate:.2f} tokens each"

    def make(self, random: np.random.Generator, tokens: int) -> str:
        count = max(0, round((tokens - 1) / self.rate))
        return " ".join([_letter(random), *(WORDS[at] for at in random.integers(0, len(WORDS), count))])

    def join(self, pieces: Sequence[str]) -> str:
        return " ".join(pieces)


@dataclass(frozen=True)
class Fitted:
    """Words cut to the wanted length with the model's own tokenizer."""

    tokenizer: Any
    overhead: int = 0
    how: str = "random words, fitted with the tokenizer"
    known: str = "proven"

    def make(self, random: np.random.Generator, tokens: int) -> str:
        best, distance = "", tokens + 1
        for _ in range(TRIES):
            words = [_letter(random), *(WORDS[at] for at in random.integers(0, len(WORDS), tokens))]
            ids = self._encode(" ".join(words))[:tokens]
            text = str(self.tokenizer.decode(ids, skip_special_tokens=False))
            off = abs(len(self._encode(text)) - tokens)
            if off < distance:
                best, distance = text, off
            if off == 0:
                break
        return best

    def join(self, pieces: Sequence[str]) -> str:
        return " ".join(pieces)

    def _encode(self, text: str) -> list[int]:
        return list(self.tokenizer.encode(text, add_special_tokens=False).ids)


def _letter(random: np.random.Generator) -> str:
    return string.ascii_uppercase[int(random.integers(0, 26))]


def load_tokenizer(path: Path) -> Any:
    """The tokenizer of a tokenizer.json, or of the directory that has one. Raises SourceError."""
    import tokenizers

    file = path / "tokenizer.json" if path.is_dir() else path
    if not file.is_file():
        raise SourceError(f"{file}: no such tokenizer")
    try:
        found = tokenizers.Tokenizer.from_file(str(file))
    except Exception as error:  # the library raises bare Exception for what it cannot read
        raise SourceError(f"{file}: not a tokenizer that can be used: {error}") from error
    found.no_padding()
    found.no_truncation()
    return found


async def find_source(
    client: Client, dialect: Dialect, random: np.random.Generator, *, vocab_size: int | None, tokenizer: Any, ids: bool
) -> Source:
    """The best source that this server allows; `ids`: whether prompts may be token ids. Raises RequestError, UsageError."""
    if ids and (tokenizer is not None or vocab_size is not None):
        found = Ids(np.arange(vocab_size) if vocab_size is not None else _plain_ids(tokenizer))
        outcome = await probe(client, dialect, found.make(random, SAMPLE), 1)
        if outcome.failure is None:
            return Ids(found.among, _overhead(outcome.prompt_tokens, SAMPLE))
        if outcome.status in HOPELESS:
            raise refusal(client, dialect.endpoint, outcome)
        if tokenizer is None:
            raise UsageError(f"--vocab-size: the server takes no such token ids: {outcome.failure}")
    if tokenizer is not None:
        fitted = Fitted(tokenizer)
        counted = await _counted(client, dialect, fitted.make(random, SAMPLE))
        return Fitted(tokenizer, _overhead(counted, SAMPLE))
    return await _words(client, dialect, random)


async def _words(client: Client, dialect: Dialect, random: np.random.Generator) -> Words:
    alone = await _counted(client, dialect, _letter(random))
    order = random.permutation(len(WORDS))
    together = await _counted(client, dialect, " ".join([_letter(random), *(WORDS[at] for at in order)]))
    if alone is None or together is None:
        return Words()
    if together <= alone:
        raise RequestError(f"{client.url}: counts {alone} prompt tokens for a letter and {together} for {len(WORDS)} words more")
    rate = (together - alone) / len(WORDS)
    return Words(rate, _overhead(alone, 1), "proven" if rate == 1 else "estimated")


async def _counted(client: Client, dialect: Dialect, prompt: Prompt) -> int | None:
    """Tokens of a prompt as the server counts them. Raises RequestError."""
    outcome = await probe(client, dialect, prompt, 1)
    if outcome.failure is not None:
        raise refusal(client, dialect.endpoint, outcome)
    return outcome.prompt_tokens


def _overhead(counted: int | None, sent: int) -> int:
    return 0 if counted is None else max(0, counted - sent)


def _plain_ids(tokenizer: Any) -> NDArray[np.int64]:
    """Ids of the vocabulary that are no special tokens."""
    special = {number for number, token in tokenizer.get_added_tokens_decoder().items() if token.special}
    return np.array(sorted(set(tokenizer.get_vocab(with_added_tokens=True).values()) - special))
