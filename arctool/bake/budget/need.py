"""What a budget of bits has to decide for one model, and an answer as a recipe. Pure functions of shapes, recipes and measured effects."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from arctool.bake.budget.allocation import (
    Group,
    allocate,
    floored,
    grouped,
    lowest_from,
    predicted,
    uniform_bits,
    uniform_rung,
    weights_of,
)
from arctool.bake.choices import AS_IS, LADDER, stored_bits
from arctool.bake.recipe import Recipe, RecipeFile, Rule
from arctool.errors import UsageError
from arctool.run.models.spec import Role, TensorSpec

OPTION = "--bpw"


@dataclass(frozen=True)
class Need:
    """What is to be decided: `bits` for the `groups`, whose highest uniform rung within them is `rung`; `pinned` bits are spent already.

    `weights`: of all linear layers, over which the rate is taken. `split`: kinds of experts (`kind`) some of which the pins settle.
    """

    pins: RecipeFile
    groups: tuple[Group, ...]
    weights: int
    pinned: int
    bits: int
    rung: str
    split: frozenset[str] = frozenset()

    @classmethod
    def of(cls, specs: Sequence[TensorSpec], layers: int, pins: RecipeFile, bpw: float) -> Need:
        """For `bpw` bits a weight. Raises UsageError, naming the range, where no allocation is so small or large, or nothing is left."""
        base = pins.over(next(iter(LADDER)))
        base.check(specs)
        for rule in base.rules:
            if rule.rung == AS_IS and any(rule.applies(spec) for spec in specs if spec.role is Role.LINEAR):
                raise UsageError(f"{rule.where}: {AS_IS} says nothing of bits, which {OPTION} has to count; name a type")
        linear = [spec for spec in specs if spec.role is Role.LINEAR]
        weights = sum(map(weights_of, linear))
        held = {spec.key for spec in linear if any(rule.applies(spec) for rule in base.rules)}
        pinned = sum(stored_bits(base.choose(spec, layers).rung, spec.shape) for spec in linear if spec.key in held)
        groups = grouped((spec for spec in linear if spec.key not in held), layers, weights)
        if not groups:
            raise UsageError(f"{OPTION}: the recipe says what every linear layer gets, nothing is left to allocate; give no {OPTION}")
        bits = math.floor(bpw * weights) - pinned
        name = uniform_rung(groups, bits)
        first, *_, last = LADDER
        if name is None or bits > uniform_bits(last, groups):
            low, high = ((pinned + uniform_bits(end, groups)) / weights for end in (first, last))
            beside = " beside what the recipe says" if held else ""
            raise UsageError(
                f"{OPTION}: expected {math.ceil(low * 1000) / 1000:.3f} ({first} in all linear layers{beside}) to "
                f"{math.floor(high * 1000) / 1000:.3f} ({last}) bits a weight of this model, scales and signs included; found {bpw:g}"
            )
        return cls(pins, groups, weights, pinned, bits, name, frozenset(map(kind, held)))

    @property
    def uniform(self) -> tuple[str, ...]:
        """What each group gets in the uniform bake."""
        return tuple(lowest_from(self.rung, group) for group in self.groups)

    def allocated(self, effects: Sequence[float]) -> tuple[str, ...]:
        """What each group gets, given what each was measured to cost in the uniform bake; that bake where no other promises more."""
        known = zip(self.groups, floored(effects, self.groups), self.uniform, strict=True)
        costs = [predicted(*one) for one in known]
        choices = allocate(costs, [[group.bits(name) for name in group.ladder] for group in self.groups], self.bits)
        names = tuple(group.ladder[choice] for group, choice in zip(self.groups, choices, strict=True))
        mixed, uniform = (
            sum(row[group.ladder.index(name)] for row, group, name in zip(costs, self.groups, given, strict=True))
            for given in (names, self.uniform)
        )
        return names if mixed < uniform else self.uniform

    def recipe(self, names: Sequence[str]) -> Recipe:
        """The recipe that gives each group its name: the name that most weights get is its default, the rest are rules by exact keys.

        All experts of a kind are one rule: a large mixture has tens of thousands, and every rule is asked for every one of them.
        """
        given = tuple(zip(self.groups, names, strict=True))
        default = max(LADDER, key=lambda name: sum(group.weights for group, its in given if its == name))
        rules = (Rule(OPTION, name, match) for group, name in given if name != default for match in self._matches(group))
        base = self.pins.over(self.rung)
        return replace(base, default=default, rules=(*base.rules, *rules))

    def _matches(self, group: Group) -> Iterable[str]:
        """Patterns of the group's keys that are for nothing else: a group has every expert of a kind that the pins leave."""
        return dict.fromkeys(key if kind(key) in self.split else kind(key) for key in group.keys)

    def rate(self, names: Sequence[str]) -> float:
        """Stored bits a weight where each group gets its name."""
        return (self.pinned + sum(group.bits(name) for group, name in zip(self.groups, names, strict=True))) / self.weights


def kind(key: str) -> str:
    """The key with a `*` in place of an expert's number."""
    return re.sub(r"(?<=\.experts\.)\d+(?=\.)", "*", key)


def check_bpw(bpw: float) -> None:
    """Raise UsageError for what is no rate."""
    if not (math.isfinite(bpw) and bpw > 0):
        raise UsageError(f"{OPTION}: expected a positive number of bits a weight, found {bpw:g}")
