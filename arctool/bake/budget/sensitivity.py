"""What each group of linear layers costs a model when it alone is stored at a low rung: the divergence of the predictions, measured.

A candidate is the unquantised model with one group's weights replaced. Up to its own decoder layer it is the model itself, so it starts
there, from the model's hidden states. Candidates of some consecutive layers travel together, so that a layer's weights are read once
for all; the head is asked once a candidate. Knows groups, weights and text; what is done with an effect is the allocation's affair.

Memory: the hidden states of one wave (`WAVE` layers' candidates), one layer in f32 twice, the head and the embedding, and for each
thread the activations of one candidate and `CHUNK` rows of logits. A `Check` holds the heads of two models and the states of its windows.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import Executor
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import torch
from numpy.typing import NDArray

from arctool.bake.budget.allocation import Group
from arctool.bake.budget.held_out import Windows
from arctool.bake.budget.passage import Batch, Passage, Say, final_states, swapped
from arctool.errors import SourceError
from arctool.run.divergence import score_rows
from arctool.run.evaluate import head_logits
from arctool.run.layers.linear import Projection
from arctool.run.models.decoder import Block
from arctool.run.weights import WeightSource

WAVE = 4
"""Decoder layers whose candidates travel together. More need more memory and repeat more work after an interruption; fewer read the
weights of the later layers more often."""

CHUNK = 256
"""Rows of logits that exist at a time for the model, and for each candidate that is scored."""

BROKEN = 100.0
"""Nats a token that stand for predictions that are no numbers: worse than any that are."""

Keep = Callable[[NDArray[np.float64]], None]
"""Called with all effects after each wave."""


@dataclass(frozen=True)
class Trial:
    """What is measured. `base`: the model; `stored`: the same one with every layer as it would be stored; `windows`: of token ids."""

    base: WeightSource
    stored: WeightSource
    windows: Windows
    pool: Executor


def measure(trial: Trial, groups: Sequence[Group], known: NDArray[np.float64], keep: Keep, say: Say) -> NDArray[np.float64]:
    """Mean KL(model ‖ model with the group as stored), f64 [groups], in nats a token over all tokens of the windows.

    `known`: f64 [groups], NaN where it is still to be measured; `say`: told how far it is. Raises SourceError where the model's own
    predictions are not finite.
    """
    effects = known.copy()
    passage = Passage(trial.base)
    batch = passage.laid_out(trial.windows)
    start = passage.embedded(batch)
    for first in range(0, passage.layers, WAVE):
        wave = [at for at, group in enumerate(groups) if first <= group.layer < first + WAVE and np.isnan(effects[at])]
        if not np.isnan(effects).any():
            break
        say(f"measuring layer groups, {int((~np.isnan(effects)).sum())} of {len(groups)}")
        start, base, states = _travel(trial, passage, batch, first, start, [groups[at] for at in wave])
        if wave:
            effects[wave] = _divergences(trial, passage, base, states)
            keep(effects)
    return effects


def _travel(
    trial: Trial, passage: Passage, batch: Batch, first: int, start: torch.Tensor, groups: Sequence[Group]
) -> tuple[torch.Tensor, torch.Tensor, list[torch.Tensor]]:
    """One wave from layer `first`, before which the states are `start`.

    Returns (the states before the next wave, what the head reads of the model, and of each candidate; without candidates the
    second is not computed).
    """
    base, onward = start, start
    states: dict[int, torch.Tensor] = {}
    for layer in range(first, passage.layers if groups else min(first + WAVE, passage.layers)):
        block = passage.block(layer)
        blocks: list[tuple[Block, torch.Tensor]] = [(block, base)]
        blocks += [(block, state) for state in states.values()]
        fresh = [at for at, group in enumerate(groups) if group.layer == layer]
        blocks += [(_replaced(trial, passage, block, groups[at]), base) for at in fresh]
        found = list(trial.pool.map(lambda pair: passage.through(pair[0], pair[1], batch), blocks))
        base, states = found[0], dict(zip((*states, *fresh), found[1:], strict=True))
        if layer == first + WAVE - 1:
            onward = base
    return onward, passage.normed(base), [passage.normed(states[at]) for at in range(len(groups))]


def _replaced(trial: Trial, passage: Passage, block: Block, group: Group) -> Block:
    return swapped(block, {key: passage.linear(key, trial.stored.weight(key)) for key in group.keys})


def _divergences(trial: Trial, passage: Passage, base: torch.Tensor, states: Sequence[torch.Tensor]) -> list[float]:
    """Mean KL of each candidate's states [tokens, hidden] against the model's, at most `BROKEN`."""
    head = passage.head()
    totals = np.zeros(len(states))
    for first in range(0, len(base), CHUNK):
        truth = _truth(head, base[first : first + CHUNK])
        totals += list(trial.pool.map(lambda state, f=first, truth=truth: _summed(truth, head, state[f : f + CHUNK]), states))
    return [min(float(total) / len(base), BROKEN) for total in totals]


class Check:
    """How far stored models are from the unquantised one on text on which nothing was decided."""

    def __init__(self, base: WeightSource, windows: Windows, pool: Executor, say: Say) -> None:
        """`windows`: of token ids; `say`: told how far it is. Nothing is computed until it is asked for."""
        self._base, self._windows, self._pool, self._say = base, windows, pool, say

    def divergence(self, stored: WeightSource, name: str) -> float:
        """Mean KL in nats a token, infinite where the stored model predicts no numbers. Raises SourceError as `measure`."""
        truth_states, truth_head = self._reference
        states, head = final_states(stored, self._windows, self._pool, self._saying(name))

        def window(at: int) -> float:
            starts = range(0, len(states[at]), CHUNK)
            parts = ((truth_states[at][f : f + CHUNK], states[at][f : f + CHUNK]) for f in starts)
            return sum(_summed(_truth(truth_head, base), head, own) for base, own in parts)

        return sum(self._pool.map(window, range(len(states)))) / sum(map(len, self._windows))

    @cached_property
    def _reference(self) -> tuple[list[torch.Tensor], Projection]:
        return final_states(self._base, self._windows, self._pool, self._saying("the unquantised model"))

    def _saying(self, name: str) -> Say:
        return lambda what: self._say(f"checking {name}: {what}")


def _truth(head: Projection, states: torch.Tensor) -> NDArray[np.float32]:
    """The unquantised model's logits."""
    logits = head_logits(head, states)
    if not np.isfinite(logits).all():
        raise SourceError("the unquantised model's own logits are not finite on held-out text; the checkpoint is damaged")
    return logits


def _summed(truth: NDArray[np.float32], head: Projection, states: torch.Tensor) -> float:
    """Summed KL of the rows `states` against the logits `truth`; infinite where a prediction is no number."""
    logits = head_logits(head, states)
    if not np.isfinite(logits).all():
        return np.inf
    return float(score_rows(truth, logits, np.zeros(len(truth), np.int64)).kl.sum())
