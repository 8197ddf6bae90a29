"""How a family's calls are written, as data: from it come the grammars that force calls, and calls as text."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

NAME, ARGUMENTS = "{name}", "{arguments}"
"""Pieces that stand for what differs from call to call."""


@dataclass(frozen=True)
class Form:
    """Pieces of text, in order: before the first call, of a call, between two, after the last."""

    call: tuple[str, ...]
    between: tuple[str, ...]
    before: tuple[str, ...] = ()
    after: tuple[str, ...] = ()

    def text(self, calls: Iterable[tuple[str, str]]) -> str:
        """What a model would write to make these calls: names, and arguments as JSON text."""
        written = ["".join({NAME: name, ARGUMENTS: arguments}.get(piece, piece) for piece in self.call) for name, arguments in calls]
        return "".join((*self.before, "".join(self.between).join(written), *self.after))
