"""What a model's text consists of. Knows neither models nor protocols."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace


@dataclass(frozen=True)
class Content:
    """Text of the answer."""

    text: str


@dataclass(frozen=True)
class Reasoning:
    """Text that the model wrote for itself before its answer."""

    text: str


@dataclass(frozen=True)
class CallStart:
    """The model calls `name`; the arguments follow, and may break off (see `OutputParser`). `index` counts a sample's calls from 0."""

    index: int
    call_id: str
    name: str


@dataclass(frozen=True)
class CallArguments:
    """A piece of the arguments of call `index`; its pieces in order are the text of a JSON object."""

    index: int
    fragment: str


Part = Content | Reasoning | CallStart | CallArguments


def joined(parts: Iterable[Part]) -> list[Part]:
    """The same parts with neighbours of one kind put together, so that it does not matter how they were cut."""
    found: list[Part] = []
    for part in parts:
        last = found[-1] if found else None
        if isinstance(part, Content) and isinstance(last, Content):
            found[-1] = Content(last.text + part.text)
        elif isinstance(part, Reasoning) and isinstance(last, Reasoning):
            found[-1] = Reasoning(last.text + part.text)
        elif isinstance(part, CallArguments) and isinstance(last, CallArguments) and part.index == last.index:
            found[-1] = replace(last, fragment=last.fragment + part.fragment)
        else:
            found.append(part)
    return found
