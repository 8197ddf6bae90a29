"""Hidden states on their way through a model whose weights are in memory one decoder layer at a time.

A source of weights is read layer by layer; whatever reads the same layer does so before the next one comes. Knows the engine's blocks; what
is asked of a state, and which weights stand in for which, is the caller's affair. Each call computes in one thread and in shapes that
depend on the text alone, so that the number of threads moves no bit.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Executor
from dataclasses import dataclass, replace

import torch

from arctool.bake.calibration.stream import LiveLinear
from arctool.kernels.registry import default_registry
from arctool.quant.tensor import Weight
from arctool.run.kv.blocks import blocks_for
from arctool.run.layers.linear import Embedding, Projection
from arctool.run.layers.mlp import SwiGLU
from arctool.run.layers.moe import SparseMoe
from arctool.run.layers.rmsnorm import RMSNorm
from arctool.run.models import architecture
from arctool.run.models.decoder import Block, CausalLM
from arctool.run.models.spec import EMBEDDING_KEY, HEAD_KEY
from arctool.run.step import Span, StepInputs, build_step
from arctool.run.weights import WeightSource

BLOCK_SIZE = 16

Say = Callable[[str], None]


@dataclass(frozen=True)
class Batch:
    """Windows as one flat batch of tokens, each with a context of its own. `rotation`: of its positions."""

    step: StepInputs
    blocks: int
    rotation: tuple[torch.Tensor, torch.Tensor]


@dataclass(frozen=True)
class _Parts:
    """Implements `models.decoder.Parts`: norms and embedding as stored, linear layers still without weights."""

    source: WeightSource

    def linear(self, key: str) -> LiveLinear:
        return LiveLinear(key)

    def norm(self, key: str) -> RMSNorm:
        return RMSNorm(torch.tensor(self.source.weight(key).dense()), self.source.config.rms_norm_eps)

    def embedding(self) -> Embedding:
        registry = default_registry()
        return Embedding(registry, registry.prepare(self.source.weight(EMBEDDING_KEY)))

    def head(self) -> LiveLinear:
        return LiveLinear(EMBEDDING_KEY if self.source.config.tie_word_embeddings else HEAD_KEY)


class Passage:
    """One model. In memory: its embedding, its norms, and what the caller keeps of what it is given."""

    def __init__(self, source: WeightSource) -> None:
        self._source = source
        self._model: CausalLM = architecture(source.config.architecture, "config.json").build(source.config, _Parts(source))

    @property
    def layers(self) -> int:
        return self._source.config.num_layers

    def laid_out(self, windows: Sequence[Sequence[int]]) -> Batch:
        """Lay out windows of token ids that the model has, each no longer than its context."""
        self._model.rope.reserve(max(map(len, windows)))
        spans: list[Span] = []
        blocks = 0
        for window in windows:
            count = blocks_for(len(window), BLOCK_SIZE)
            spans.append(Span(window, 0, range(blocks, blocks + count), 0))
            blocks += count
        step = build_step(spans, BLOCK_SIZE)
        return Batch(step, blocks, self._model.rope.at(torch.from_numpy(step.positions)))

    def embedded(self, batch: Batch) -> torch.Tensor:
        """The hidden states before the first layer, f32 [tokens, hidden]."""
        return self._model.embedding(torch.from_numpy(batch.step.ids))

    def block(self, layer: int) -> Block:
        """A decoder layer with its weights in f32."""
        block = self._model.blocks[layer]
        return swapped(block, {key: self.linear(key, self._source.weight(key)) for key in linear_keys(block)})

    def linear(self, key: str, weight: Weight) -> LiveLinear:
        """Layer `key` with `weight`, and with the bias that it has here."""
        bias = self._source.bias(key)
        # torch's own memory, always: a product's bits may depend on how its operands are aligned.
        return LiveLinear(key, torch.tensor(weight.dense()), None if bias is None else torch.tensor(bias, dtype=torch.float32))

    @torch.inference_mode()
    def through(self, block: Block, states: torch.Tensor, batch: Batch) -> torch.Tensor:
        """Hidden states f32 [tokens, hidden] after `block`."""
        return block(states, batch.step, batch.rotation)

    @torch.inference_mode()
    def normed(self, states: torch.Tensor) -> torch.Tensor:
        """What the head reads, of the states after the last layer."""
        return self._model.norm(states)

    def head(self) -> LiveLinear:
        """The head with its weights in f32."""
        key = _key(self._model.head)
        return self.linear(key, self._source.weight(key))


def linear_keys(block: Block) -> tuple[str, ...]:
    """The linear layers of a block without weights, or with any."""
    attention, mlp = block.attention, block.mlp
    mlps, router = ((mlp,), ()) if isinstance(mlp, SwiGLU) else (mlp.experts, (mlp.router,))
    parts = (attention.q, attention.k, attention.v, attention.o, *router, *(part for one in mlps for part in (one.gate, one.up, one.down)))
    return tuple(_key(part) for part in parts)


def swapped(block: Block, instead: Mapping[str, LiveLinear]) -> Block:
    """The block with other layers in place of those that have their keys."""

    def choose(part: Projection) -> Projection:
        return instead.get(_key(part), part)

    def chosen(mlp: SwiGLU) -> SwiGLU:
        return replace(mlp, gate=choose(mlp.gate), up=choose(mlp.up), down=choose(mlp.down))

    attention, mlp = block.attention, block.mlp
    if isinstance(mlp, SwiGLU):
        changed: SwiGLU | SparseMoe = chosen(mlp)
    else:
        changed = replace(mlp, router=choose(mlp.router), experts=tuple(map(chosen, mlp.experts)))
    attention = replace(attention, q=choose(attention.q), k=choose(attention.k), v=choose(attention.v), o=choose(attention.o))
    return replace(block, attention=attention, mlp=changed)


def final_states(source: WeightSource, windows: Sequence[Sequence[int]], pool: Executor, say: Say) -> tuple[list[torch.Tensor], LiveLinear]:
    """(what the head reads after every token of each window, f32 [tokens, hidden] each; the head). `say`: told layer by layer.

    Memory: the embedding and the head in f32, one layer, the states of all windows, and some windows' activations.
    """
    passage = Passage(source)
    batches = [passage.laid_out([window]) for window in windows]
    states = [passage.embedded(batch) for batch in batches]
    for layer in range(passage.layers):
        say(f"layer {layer + 1} of {passage.layers}")
        block = passage.block(layer)
        states = list(pool.map(lambda at, block=block, states=states: passage.through(block, states[at], batches[at]), range(len(states))))
    return [passage.normed(one) for one in states], passage.head()


def _key(part: Projection) -> str:
    assert isinstance(part, LiveLinear)
    return part.key
