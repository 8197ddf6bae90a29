"""What a verification says: four answers, each with counts and the first differences. Plain data; the checks are elsewhere."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import Any, Final

SHOWN: Final = 20
"""Failures and notes that an answer spells out; all are counted."""


@dataclass(frozen=True)
class Answer:
    """One question. `passed` is meaningless where it was not `asked`; `failures[0]` is the first difference."""

    question: str
    asked: bool
    passed: bool
    counts: dict[str, int] = field(default_factory=dict)
    failures: tuple[str, ...] = ()
    failure_count: int = 0
    notes: tuple[str, ...] = ()


@dataclass(frozen=True)
class Coverage:
    """What one implementation was compared on: `weights` counts those compared, `differing` those it did not give as the oracle does."""

    implementation: str
    tensors: int
    weights: int
    differing: int


@dataclass(frozen=True)
class LayerError:
    """‖W−Ŵ‖²/‖W‖² of one stored tensor; `limit` is 2^(−2·bits) of its rate, None for a dense one; `plausible`: the most it may be."""

    key: str
    label: str
    relative_error: float
    limit: float | None
    plausible: float


@dataclass(frozen=True)
class VerifyReport:
    """The four answers, in the order of the questions, and the tables behind two of them. `fast`: only headers were asked."""

    path: str
    container: Answer
    implementations: Answer
    tables: Answer
    source: Answer
    coverage: tuple[Coverage, ...] = ()
    errors: tuple[LayerError, ...] = ()
    fast: bool = False

    @property
    def answers(self) -> tuple[Answer, ...]:
        return (self.container, self.implementations, self.tables, self.source)

    @property
    def passed(self) -> bool:
        """Whether every question that was asked holds; the container always is."""
        return all(answer.passed for answer in self.answers if answer.asked)

    def to_json(self) -> dict[str, Any]:
        return {"passed": self.passed, **asdict(self)}


class Tally:
    """An answer in the making."""

    def __init__(self, question: str) -> None:
        self.question: Final = question
        self.failure_count = 0
        self._counts: dict[str, int] = {}
        self._failures: list[str] = []
        self._notes: list[str] = []

    def count(self, what: str, number: int = 1) -> None:
        self._counts[what] = self._counts.get(what, 0) + number

    def fail(self, message: str) -> None:
        self.failure_count += 1
        if len(self._failures) < SHOWN:
            self._failures.append(message)

    def note(self, message: str) -> None:
        if len(self._notes) < SHOWN:
            self._notes.append(message)

    def answer(self, *, asked: bool = True) -> Answer:
        return Answer(
            question=self.question,
            asked=asked,
            passed=asked and self.failure_count == 0,
            counts=dict(self._counts),
            failures=tuple(self._failures),
            failure_count=self.failure_count,
            notes=tuple(self._notes),
        )
