"""How many bits each group of linear layers gets: what every choice would cost in bits and in quality, and the best sum under a budget.

The cost in quality of a group is what was measured at one rung; at another one it is scaled by the rungs' errors, because the divergence
of a slightly changed model grows with the square of the change. Effects of groups are taken to add up. Pure functions of numbers and
shapes; knows no weights, no text and no files.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from statistics import median

import numpy as np
from numpy.typing import NDArray

from arctool.bake.choices import LADDER, misfit, stored_bits
from arctool.run.models.spec import TensorSpec

TOGETHER = (frozenset({"q_proj", "k_proj"}), frozenset({"gate_proj", "up_proj"}), frozenset({"w1", "w3"}))
"""Layers of one input whose outputs meet in a product, so that an error of either spoils the same numbers: measured as one, unless ..."""

EDGE = 2
"""... they are in so many of the first or last decoder layers, where models are most often fragile, or ..."""

SEPARATE_SHARE = 0.01
"""... one of them is more than this share of all weights."""

FLOOR_SHARE = 0.01
"""A group's effect counts as at least this share of the median, weight for weight: less is noise, and free is nothing."""

GRID = 1 << 16
"""Cells into which the least size of a model is cut: bits are counted in cells, which costs a budget less than one cell a group."""


@dataclass(frozen=True)
class Group:
    """Linear layers of one decoder layer that are measured together and get the same rung; of a mixture, those of all experts."""

    specs: tuple[TensorSpec, ...]

    @property
    def layer(self) -> int:
        assert self.specs[0].layer is not None
        return self.specs[0].layer

    @property
    def keys(self) -> tuple[str, ...]:
        return tuple(spec.key for spec in self.specs)

    @property
    def weights(self) -> int:
        return sum(weights_of(spec) for spec in self.specs)

    @property
    def ladder(self) -> tuple[str, ...]:
        """The choices that every layer of the group can take, from few bits to many."""
        return tuple(name for name in LADDER if not any(misfit(name, spec.shape[1]) for spec in self.specs))

    def bits(self, name: str) -> int:
        """Stored bits of the group as `name`."""
        return sum(stored_bits(name, spec.shape) for spec in self.specs)


def weights_of(spec: TensorSpec) -> int:
    """Weights of a matrix."""
    return spec.shape[0] * spec.shape[1]


def grouped(specs: Iterable[TensorSpec], layers: int, weights: int) -> tuple[Group, ...]:
    """Linear layers `specs` of a model with `layers` decoder layers and `weights` linear weights in all, as groups, in order."""
    found: dict[tuple[int | None, frozenset[str]], list[TensorSpec]] = {}
    for spec in specs:
        assert spec.layer is not None
        name = spec.key.rpartition(".")[2]
        edge = not EDGE <= spec.layer < layers - EDGE
        alone = edge or weights_of(spec) > SEPARATE_SHARE * weights
        together = next((names for names in TOGETHER if name in names and not alone), frozenset({name}))
        found.setdefault((spec.layer, together), []).append(spec)
    return tuple(Group(tuple(parts)) for parts in found.values())


def lowest_from(name: str, group: Group) -> str:
    """What the group gets in a bake that is uniform at `name`: that rung, or the next one up that its width takes."""
    rungs = tuple(LADDER)
    return next(one for one in group.ladder if rungs.index(one) >= rungs.index(name))


def uniform_bits(name: str, groups: Iterable[Group]) -> int:
    """Stored bits of all groups in a bake that is uniform at `name`."""
    return sum(group.bits(lowest_from(name, group)) for group in groups)


def uniform_rung(groups: Sequence[Group], budget: int) -> str | None:
    """The highest rung of the ladder at which all groups fit into `budget` bits; None where the lowest does not."""
    return next((name for name in reversed(LADDER) if uniform_bits(name, groups) <= budget), None)


def floored(effects: Sequence[float], groups: Sequence[Group]) -> list[float]:
    """Measured effects with what is negative or lost in noise raised to the floor. Raises nothing: effects are finite."""
    each = [effect / group.weights for effect, group in zip(effects, groups, strict=True)]
    floor = max(FLOOR_SHARE * median(each), np.finfo(np.float64).tiny)
    return [max(one, floor) * group.weights for one, group in zip(each, groups, strict=True)]


def predicted(group: Group, effect: float, measured_at: str) -> list[float]:
    """What each choice of the group's ladder is expected to cost, where it cost `effect` at `measured_at`."""
    return [effect * LADDER[name] / LADDER[measured_at] for name in group.ladder]


def allocate(effects: Sequence[Sequence[float]], sizes: Sequence[Sequence[int]], budget: int) -> tuple[int, ...]:
    """For every group the number of its choice, so that the sizes sum to at most `budget` and the effects to as little as can be.

    `effects[i][j]`, finite, and `sizes[i][j]`, in bits: of group i at its choice j. A knapsack with one choice a group, solved exactly in
    cells (`GRID`) of bits above the least size; below 2^17 bits of least size a cell is one bit. Memory: a byte a group and cell.
    Raises ValueError where nothing fits.
    """
    least = [min(row) for row in sizes]
    if sum(least) > budget:
        raise ValueError(f"the least size is {sum(least)} bits, the budget {budget}")
    unit = max(1, sum(least) // GRID)
    cells = [[-(-(size - low) // unit) for size in row] for row, low in zip(sizes, least, strict=True)]
    room = min((budget - sum(least)) // unit, sum(map(max, cells)))
    best = np.zeros(room + 1)
    chosen: list[NDArray[np.uint8]] = []
    for costs, row in zip(cells, effects, strict=True):
        best, picked = _with_group(best, costs, row)
        chosen.append(picked)
    found: list[int] = []
    for costs, picked in zip(reversed(cells), reversed(chosen), strict=True):
        found.append(int(picked[room]))
        room -= costs[found[-1]]
    return tuple(reversed(found))


def _with_group(best: NDArray[np.float64], costs: Sequence[int], effects: Sequence[float]) -> tuple[NDArray[np.float64], NDArray[np.uint8]]:
    """(the least sum of effects within each number of cells with one more group, its choice that gives it); equal ones: the smaller."""
    least = np.full_like(best, np.inf)
    picked = np.zeros(len(best), np.uint8)
    for choice in sorted(range(len(costs)), key=lambda j: costs[j]):
        cost = costs[choice]
        if cost < len(best):
            tried = best[: len(best) - cost] + effects[choice]
            better = tried < least[cost:]
            least[cost:][better] = tried[better]
            picked[cost:][better] = choice
    return least, picked
