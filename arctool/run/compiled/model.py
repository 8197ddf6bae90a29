"""A model as one program of CPU kernels: a whole step is one call, in which no Python runs and nothing is allocated.

The program is made once, over buffers of the largest step; what changes from step to step lies in arrays that the kernels read. It
computes what `models.decoder.CausalLM` defines, in kernels whose every row depends on itself (and, in attention, on its sequence) alone.
"""

from __future__ import annotations

from collections import Counter

import numpy as np
from numpy.typing import NDArray

from arctool.kernels.cpu.attention_work import units_of
from arctool.kernels.policy import choose_experts
from arctool.kernels.registry import linear_name
from arctool.run.compiled import dense
from arctool.run.compiled.builder import Builder
from arctool.run.compiled.experts import mixture
from arctool.run.compiled.inputs import GATHER, GROUPED, LOGITS, NUMBERS, SPLITS, TOKENS, UNITS, Inputs, StepLimits
from arctool.run.kv.blocks import blocks_for
from arctool.run.kv.cache import KVCache
from arctool.run.layers.mlp import SwiGLU
from arctool.run.models.decoder import CausalLM
from arctool.run.step import StepInputs

__all__ = ["CompiledModel", "StepLimits"]

Array = NDArray[np.float32]

PAUSING = 32
"""Tokens of a step from which it pauses between layers: 40 microseconds each are nothing then, and a large model's layer takes seconds."""


class CompiledModel:
    """The program of one model over one cache. One step at a time."""

    def __init__(self, model: CausalLM, cache: KVCache, limits: StepLimits) -> None:
        model.rope.reserve(limits.model_len)
        self.limits = limits
        self.cache = cache
        self._numbers = np.zeros(NUMBERS, np.int64)
        self._moe = model.config.moe
        self._windows = sorted({block.attention.window or 0 for block in model.blocks})
        self._inputs = Inputs.of(limits, cache.block_size)
        builder = Builder(model, cache, limits, self._inputs, self._numbers)
        self.program = builder.program
        self._states, self._logits, self._head = lower(builder)
        self._registry = model.embedding.registry

    def run(self, step: StepInputs) -> Array:
        """Logits f32 [rows that want them, vocab], good until the next step; keys and values are in the cache afterwards."""
        self._fill(step)
        self.program.run(pausing=len(step.ids) >= PAUSING)
        self._registry.engaged(self.program.engaged())
        return self._logits[: len(step.logit_rows)]

    def states(self, step: StepInputs) -> Array:
        """The same up to the head: what it reads, f32 [rows that want logits, hidden], good until the next step."""
        self._fill(step)
        self.program.run(last=len(self.program) - 1, pausing=len(step.ids) >= PAUSING)
        self._registry.engaged(self.program.engaged() - self._head)
        return self._states[: len(step.logit_rows)]

    def _fill(self, step: StepInputs) -> None:
        inputs, tokens, wanted = self._inputs, len(step.ids), len(step.logit_rows)
        limits = self.limits
        if tokens > limits.tokens or wanted > limits.logits or len(step.spans) > limits.seqs:
            raise RuntimeError(f"a step of {tokens} tokens, {wanted} logits and {len(step.spans)} spans exceeds {limits}")
        longest = max((span.context for span in step.spans), default=0)
        if longest > limits.model_len:
            raise RuntimeError(f"a step reaches {longest} tokens into a sequence and exceeds {limits}")
        tables: list[int] = []
        begins = []
        for span in step.spans:
            begins.append(len(tables))
            tables.extend(span.blocks[: blocks_for(span.context, self.cache.block_size)])
        inputs.tables[: len(tables)] = tables
        positions, counts = [span.position for span in step.spans], [len(span.ids) for span in step.spans]
        units, splits = units_of(step.starts, positions, counts, begins, self._windows)
        for buffer, values in (
            (inputs.ids, step.ids),
            (inputs.positions, step.positions),
            (inputs.slots, step.slots),
            (inputs.logit_rows, step.logit_rows),
            (inputs.units, units),
            (inputs.splits, splits),
        ):
            buffer[: len(values)] = values
        self._numbers[[TOKENS, UNITS, SPLITS, LOGITS]] = (tokens, len(units), len(splits), wanted)
        if self._moe is not None:
            gathered = choose_experts(tokens, self._moe.num_experts, self._moe.top_k) == "gather"
            self._numbers[[GATHER, GROUPED]] = (gathered, not gathered)


def lower(b: Builder) -> tuple[Array, Array, Counter[str]]:
    """Put the whole model in order; its last kernel is the head.

    Returns what the head reads, f32 [logits, hidden]; the logits; and what the head engages.
    """
    model, config = b.model, b.model.config
    x = b.buffer("x", config.hidden_size)
    dense.embed(b, x)
    add: Array | None = None
    for block in model.blocks:
        b.program.pause()
        add = dense.attention(b, block.attention, block.attention_norm, x, add)
        if isinstance(block.mlp, SwiGLU):
            add = dense.mlp(b, block.mlp, block.mlp_norm, x, add)
        else:
            add = mixture(b, block.mlp, block.mlp_norm, x, add)
    states = b.buffer("states", config.hidden_size, b.limits.logits)
    logits = b.buffer("logits", config.vocab_size, b.limits.logits)
    head = b.reader(model.head, "head", b.limits.logits)
    b.norm(model.norm, x, add, [head], also=b.target(states, None), rows=b.inputs.logit_rows, count=LOGITS)
    b.product(head, logits, LOGITS)
    b.program.seal()
    return states[:, : config.hidden_size], logits[:, : config.vocab_size], Counter([linear_name(head.layer.weight.kind)])
