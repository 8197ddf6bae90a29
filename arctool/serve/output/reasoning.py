"""What a model thinks before it answers, in tags of its own. Knows nothing of calls: a call in here is only thought of."""

from __future__ import annotations

from dataclasses import dataclass

NEWLINE = "\n"
MAX_SPACE = 64
"""White space before the opening tag, and line feeds before the closing one, that may wait for it."""


@dataclass(frozen=True)
class ReasoningTags:
    open: str
    close: str


THINK = ReasoningTags("<think>", "</think>")


def detect_reasoning(template_source: str) -> ReasoningTags | None:
    """The tags of a model whose chat template knows them; None: it does not think aloud."""
    return THINK if THINK.open in template_source or THINK.close in template_source else None


def starts_inside(prompt: str, tags: ReasoningTags) -> bool:
    """Whether a rendered prompt ends with the opening tag, so that the model's text begins as reasoning."""
    return prompt.rstrip().endswith(tags.open)


class ReasoningSplitter:
    """Parts one sample's text in two. Reasoning is what stands between the first tags, if nothing but white space comes before them.

    That white space is dropped, and so are line feeds within the tags at both ends, and behind the closing one.
    """

    def __init__(self, tags: ReasoningTags, *, inside: bool) -> None:
        self._tags = tags
        self._held = ""
        self._stage = self._opened if inside else self._before

    def push(self, text: str) -> tuple[str, str]:
        """More of the text: what of it is certain to be reasoning, and behind that the answer."""
        text, self._held = self._held + text, ""
        return self._stage(text)

    def finish(self) -> tuple[str, str]:
        """The text ends here: what is still held."""
        text, self._held = self._held, ""
        return (text, "") if self._stage == self._within else ("", text)

    def _before(self, text: str) -> tuple[str, str]:
        begun = text.lstrip()
        if len(text) - len(begun) <= MAX_SPACE:
            if begun.startswith(self._tags.open):
                self._stage = self._opened
                return self._opened(begun[len(self._tags.open) :])
            if self._tags.open.startswith(begun):
                self._held = text
                return "", ""
        self._stage = self._behind
        return "", text

    def _opened(self, text: str) -> tuple[str, str]:
        begun = text.lstrip(NEWLINE)
        if begun:
            self._stage = self._within
            return self._within(begun)
        return "", ""

    def _within(self, text: str) -> tuple[str, str]:
        close = self._tags.close
        at = text.find(close)
        if at >= 0:
            self._stage = self._closed
            return text[: at - _newlines(text, at)], self._closed(text[at + len(close) :])[1]
        tail = next(n for n in range(min(len(close) - 1, len(text)), -1, -1) if close.startswith(text[len(text) - n :]))
        end = len(text) - tail
        end -= _newlines(text, end)
        self._held = text[end:]
        return text[:end], ""

    def _closed(self, text: str) -> tuple[str, str]:
        answer = text.lstrip(NEWLINE)
        if answer:
            self._stage = self._behind
        return "", answer

    def _behind(self, text: str) -> tuple[str, str]:
        return "", text


def _newlines(text: str, end: int) -> int:
    """How many line feeds end `text[:end]`, at most MAX_SPACE."""
    start = max(end - MAX_SPACE, 0)
    return end - start - len(text[start:end].rstrip(NEWLINE))
