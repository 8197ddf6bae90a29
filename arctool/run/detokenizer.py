"""Text that leaves token by token: only whole code points, and nothing that may turn out to be the head of a stop string."""

from __future__ import annotations

from collections.abc import Sequence, Set
from dataclasses import dataclass

from arctool.run.tokenizer import Tokenizer

# What a decoder writes for bytes that are not (yet) UTF-8.
REPLACEMENT = "\ufffd"


class StreamDecoder:
    """Decodes a growing list of tokens. The pieces, put together, are the decoded whole.

    A token's text may depend on the token before it (a leading space), so every piece is the difference of two decodings that
    start at the same earlier token. Text that ends in a replacement character is held back: the next token may complete it.
    `shown`: special tokens that are part of the text all the same.
    """

    def __init__(self, tokenizer: Tokenizer, shown: Set[int] = frozenset()) -> None:
        self._tokenizer = tokenizer
        self._shown = shown
        self._window: list[int] = []
        self._emitted = 0  # tokens of the window whose text has left

    def push(self, token: int) -> str:
        """The text that `token` makes certain; often "" for one that ends inside a character."""
        if self._tokenizer.is_hidden(token, self._shown):
            return ""
        self._window.append(token)
        known, text = self._decoded()
        if len(text) <= len(known) or text.endswith(REPLACEMENT):
            return ""
        self._window = self._window[self._emitted :]
        self._emitted = len(self._window)
        return text[len(known) :]

    def flush(self) -> str:
        """What is still held back, incomplete characters as U+FFFD. The decoder is empty afterwards."""
        known, text = self._decoded()
        self._window, self._emitted = [], 0
        return text[len(known) :]

    def _decoded(self) -> tuple[str, str]:
        known = self._tokenizer.decode(self._window[: self._emitted], self._shown)
        return known, self._tokenizer.decode(self._window, self._shown)


@dataclass(frozen=True)
class Piece:
    """Text that may be shown; `stopped`: a stop string was found and nothing may follow."""

    text: str
    stopped: bool


class StopStrings:
    """Cuts a stream of text before the stop string that ends earliest (of several that end together, the longest).

    `include`: cuts behind it instead. `found`: that stop string, once it has come.
    """

    def __init__(self, stops: Sequence[str], *, include: bool = False) -> None:
        self.found: str | None = None
        self._stops = tuple(stops)
        self._include = include
        self._held = ""

    def push(self, text: str, *, too_short: bool = False) -> Piece:
        """Take more text, give what cannot be part of a stop string any more. `too_short`: text in which none counts yet."""
        if too_short:
            return Piece(text, False)
        buffer = self._held + text
        found = [(at + len(stop), -len(stop)) for stop in self._stops if (at := buffer.find(stop)) >= 0]
        if found:
            end, negative_length = min(found)
            self.found = buffer[end + negative_length : end]
            self._held = ""
            return Piece(buffer[: end if self._include else end + negative_length], True)
        keep = self._longest_head(buffer)
        self._held = buffer[len(buffer) - keep :]
        return Piece(buffer[: len(buffer) - keep], False)

    def flush(self) -> str:
        """The stream has ended: what was held back is text after all."""
        held, self._held = self._held, ""
        return held

    def _longest_head(self, buffer: str) -> int:
        """Length of the longest end of `buffer` that is the beginning of a stop string, but not all of it."""
        longest = max((len(stop) - 1 for stop in self._stops), default=0)
        for length in range(min(longest, len(buffer)), 0, -1):
            if any(stop.startswith(buffer[-length:]) for stop in self._stops):
                return length
        return 0
