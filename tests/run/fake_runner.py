"""A runner without a model: what it stores for a token says which tokens came before it, so that one wrong block is seen at once.

A cell of its cache holds a hash of the tenant and of all tokens of the sequence up to that position, as keys and values do. Before it
computes a token it reads the cells of all positions before, through the block table, and compares them with the sequence's own tokens.
"""

from __future__ import annotations

from collections.abc import Iterable
from collections.abc import Sequence as Ordered
from types import SimpleNamespace

import numpy as np
import torch
from numpy.typing import NDArray

from arctool.run.kv.cache import CachePlan
from arctool.run.sampling.noise import child_seed
from arctool.run.sampling.params import SamplingParams
from arctool.run.sampling.sampler import SampleRow, sample
from arctool.run.scheduler import Work
from arctool.run.sequence import Sequence

VOCAB = 16
EOS = 1
LOGITS = np.random.default_rng(1).normal(scale=2.0, size=(997, VOCAB)).astype(np.float32)
MASK = (1 << 61) - 1


def states(salt: str, tokens: Iterable[int], before: int | None = None) -> list[int]:
    """What the cells of a sequence hold, position by position."""
    state, found = sum(salt.encode()) + 7 if before is None else before, []
    for token in tokens:
        state = hash((state, token)) & MASK
        found.append(state)
    return found


def alone(prompt: Ordered[int], params: SamplingParams, index: int, longest: int) -> tuple[int, ...]:
    """The tokens of sample `index` of a request, without an engine. The request names its seed."""
    assert params.seed is not None
    state, generated = states(params.cache_salt, prompt)[-1], []
    most = longest - len(prompt) if params.max_tokens is None else params.max_tokens
    while len(generated) < most:
        row = SampleRow(params, child_seed(params.seed, index), len(prompt) + len(generated))
        [result] = sample(LOGITS[state % 997][None], [row])
        assert result.token is not None
        generated.append(result.token)
        if result.token == EOS and not params.ignore_eos:
            break
        [state] = states(params.cache_salt, generated[-1:], state)
    return tuple(generated)


class Violation(BaseException):
    """The engine asked for what it must not. Not an Exception, because the engine answers those by failing the step's requests."""


class FakeRunner:
    """`fail`: how many of the coming steps raise. `budget`: the most tokens that it may be asked for in one step."""

    def __init__(self, num_blocks: int, block_size: int, max_model_len: int, budget: int) -> None:
        self.plan = CachePlan(num_blocks, block_size, max_model_len, torch.float32)
        self.model = SimpleNamespace(config=SimpleNamespace(vocab_size=VOCAB))
        self.cells = np.full((num_blocks, block_size), -1, np.int64)
        self.budget = budget
        self.fail = 0
        self.steps: list[list[tuple[Sequence, Work]]] = []
        self.computed = 0
        self.copied = 0

    def run(self, work: Ordered[tuple[Sequence, Work]], copies: Ordered[tuple[int, int]] = ()) -> NDArray[np.float32]:
        """As `ModelRunner.run`."""
        if self.fail:
            self.fail -= 1
            raise MemoryError("out of pretended memory")
        try:
            return self._run(work, copies)
        except (AssertionError, LookupError) as error:
            raise Violation(str(error)) from error

    def _run(self, work: Ordered[tuple[Sequence, Work]], copies: Ordered[tuple[int, int]]) -> NDArray[np.float32]:
        assert not {target for _, target in copies} & {source for source, _ in copies}
        for source, target in copies:
            self.cells[target] = self.cells[source]
        self.copied += len(copies)
        assert sum(item.tokens for _, item in work) <= self.budget
        assert len({s.id for s, _ in work}) == len(work)
        # All write before any reads: a block that two sequences write shows.
        wanted = [self._write(s, item) for s, item in work]
        for (s, item), own in zip(work, wanted, strict=True):
            found = self.cells[s.table.blocks].ravel()[: item.last]
            np.testing.assert_array_equal(found, own, f"sequence {s.id} reads what is not its own")
        self.steps.append(list(work))
        self.computed += sum(item.tokens for _, item in work)
        rows = [LOGITS[own[-1] % 997] for (_, item), own in zip(work, wanted, strict=True) if item.emits]
        return np.array(rows, np.float32).reshape(-1, VOCAB)

    def _write(self, s: Sequence, item: Work) -> NDArray[np.int64]:
        assert item.first == s.computed
        assert item.tokens > 0
        assert item.emits == (item.last == s.length)
        size = self.plan.block_size
        own = np.array(states(s.params.cache_salt, s.tokens(0, item.last)), np.int64)
        for position in range(item.first, item.last):
            self.cells[s.table.blocks[position // size], position % size] = own[position]
        return own
