"""What every layer of a model sees when calibration text runs through the layers before it, as they will be stored.

The hidden states of all windows stand before one decoder layer; the layer's linear layers come in stages that share an input: q, k, v;
then o; then gate, up; then down (of a mixture: the router, then those of one expert after the other). A stage's second moments are
measured, its layers are quantised (by whoever asked) and installed, and their output goes on to the next. Knows the engine's blocks, not
how a matrix is quantised.

An expert sees the tokens that the router, as it will be stored, sends to it, and `guests`: as many tokens as half its input is wide,
evenly spaced among all that enter the layer. So an expert that calibration text hardly reaches has the moments of what could reach it,
and one that is often used is hardly touched by them.

Memory: one layer's weights in f32 (of a mixture: one expert's), the moments of one stage, some windows' activations, and the hidden states
and one stage's inputs (or a mixture's output) of all windows, which lie in unnamed files when they pass `IN_MEMORY` bytes. Deterministic: a
window is computed by one thread.
"""

from __future__ import annotations

import math
import os
import tempfile
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Executor
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray

from arctool.bake.calibration.compensation import COMPENSATION_SHRINKAGE, Change, change
from arctool.bake.calibration.hessian import SHRINKAGE, Moments, damping
from arctool.errors import SourceError
from arctool.kernels.registry import default_registry
from arctool.quant.tensor import DenseTensor, Weight
from arctool.run.config import ModelConfig
from arctool.run.kv.blocks import blocks_for
from arctool.run.layers.linear import Embedding
from arctool.run.layers.mlp import SwiGLU
from arctool.run.layers.moe import Routing, SparseMoe
from arctool.run.layers.rmsnorm import RMSNorm
from arctool.run.models import architecture
from arctool.run.models.decoder import Block, CausalLM
from arctool.run.models.spec import EMBEDDING_KEY, HEAD_KEY
from arctool.run.step import Span, StepInputs, build_step
from arctool.uqff.files import storage_errors

BATCH = 4
"""Windows whose activations are in memory together; fixed, because sums go by batches."""

BLOCK_SIZE = 16
IN_MEMORY = 1 << 28

Inputs = NDArray[np.float32]
"""f32 [windows, tokens, in]: what a stage reads, of all windows."""

MAX_DROPPED = 0.1
"""Share of rows that may be unusable before a stage's moments are distrusted."""


@contextmanager
def one_thread_per_call() -> Iterator[None]:
    """Let torch use one thread for each call, so that a result does not depend on how many there are; the pool brings the cores."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


@dataclass
class LiveLinear:
    """A linear layer of the model in calibration. `weight`: f32 [out, in] while its decoder layer is in work, else None."""

    key: str
    weight: torch.Tensor | None = None
    bias: torch.Tensor | None = None

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """x: f32 [rows, in] → f32 [rows, out]."""
        assert self.weight is not None, f"{self.key} is used before it is installed"
        y = x @ self.weight.T
        return y if self.bias is None else y.add_(self.bias)


@dataclass(frozen=True)
class Stage:
    """Linear layers that read one input. `read(x, step)`: hidden states of a window → that input, f32 [tokens, in].

    `adds`: the layer whose output joins the hidden states when the stage is done, None for one that other stages read. `routes`: where
    the layer is a router, which experts the hidden states of a window go to. `expert`: the one of a mixture whose layers these are; they
    read its tokens only, and what it adds joins the hidden states after the `last` one.
    """

    linears: tuple[LiveLinear, ...]
    read: Callable[[torch.Tensor, StepInputs], torch.Tensor]
    adds: LiveLinear | None
    routes: Callable[[torch.Tensor, StepInputs], Routing] | None = None
    expert: int | None = None
    last: bool = False

    @property
    def goes_on(self) -> bool:
        """Whether something reads the output of its layers: not of the head."""
        return self.adds is not None or self.routes is not None or len(self.linears) > 1


@dataclass(frozen=True)
class Measured:
    """What a stage saw: E[x xᵀ] f32 [in, in], how many rows, and how many of them were dropped. `change`: how its
    layers' weights should differ from the source's, if that is known."""

    hessian: NDArray[np.float32]
    rows: int
    dropped: int
    change: Change | None = None

    @property
    def doubt(self) -> str | None:
        """Why the moments should not be used, None if they may."""
        if self.rows == 0:
            return "no calibration row reaches it with finite values"
        if self.dropped > MAX_DROPPED * (self.rows + self.dropped):
            return f"{self.dropped} of {self.rows + self.dropped} calibration rows are not finite when they reach it"
        return None


@dataclass(frozen=True)
class _Mixture:
    """A mixture of experts in work: where the tokens of every window go, and what the experts so far have added, of all windows."""

    routing: list[Routing]
    added: NDArray[np.float32]


@dataclass
class _Parts:
    """Implements `models.decoder.Parts` with layers that wait for their weights."""

    config: ModelConfig
    norms: Mapping[str, NDArray[np.float32]]
    table: Weight
    linears: dict[str, LiveLinear] = field(default_factory=dict)

    def linear(self, key: str) -> LiveLinear:
        return self.linears.setdefault(key, LiveLinear(key))

    def norm(self, key: str) -> RMSNorm:
        return RMSNorm(torch.from_numpy(self.norms[key]), self.config.rms_norm_eps)

    def embedding(self) -> Embedding:
        registry = default_registry()
        return Embedding(registry, registry.prepare(self.table))

    def head(self) -> LiveLinear:
        return self.linear(EMBEDDING_KEY if self.config.tie_word_embeddings else HEAD_KEY)


class Calibration:
    """The stream of hidden states through one model. Use its stages in order, each once; `with one_thread_per_call()` around all."""

    def __init__(
        self,
        config: ModelConfig,
        norms: Mapping[str, NDArray[np.float32]],
        embedding: Weight,
        ids: NDArray[np.int32],
        pool: Executor,
        scratch: Path | None = None,
        shrinkage: float = COMPENSATION_SHRINKAGE,
    ) -> None:
        """`norms`: gains by key; `embedding`: as it will be stored; `ids`: i32 [windows, tokens]; `scratch`: a directory for large states;
        `shrinkage`: that of the compensation's damping.

        Raises SourceError for a token that the model does not have.
        """
        wrong = ids[(ids < 0) | (ids >= config.vocab_size)]
        if wrong.size:
            raise SourceError(
                f"calibration: token {wrong[0]} is not among the model's {config.vocab_size}; the tokenizer is another model's"
            )
        parts = _Parts(config, norms, embedding)
        self._shrinkage = shrinkage
        self.config, self.ids, self._pool, self._scratch = config, ids, pool, scratch
        self._model: CausalLM = architecture(config.architecture, "config.json").build(config, parts)
        self._linears = parts.linears
        self._model.rope.reserve(ids.shape[1])
        self.states = self._array(config.hidden_size)
        self._step = build_step([Span([0] * ids.shape[1], 0, range(blocks_for(ids.shape[1], BLOCK_SIZE)), 0)], BLOCK_SIZE)
        self._rotation = self._model.rope.at(torch.from_numpy(self._step.positions))
        self._mixture: _Mixture | None = None

    @property
    def layers(self) -> int:
        return self.config.num_layers

    def embed(self) -> None:
        """Put the hidden states before the first layer."""
        for window, ids in enumerate(self.ids):
            self.states[window] = self._model.embedding(torch.from_numpy(ids.astype(np.int64))).numpy()

    def stages(self, layer: int) -> tuple[Stage, ...]:
        """The stages of a decoder layer, in order; of the untied head for `layer` = `layers`."""
        if layer == self.layers:
            head = self._model.head
            assert isinstance(head, LiveLinear)
            return (Stage((head,), lambda x, step: self._model.norm(x), None),)
        return block_stages(self._model.blocks[layer], self._mix)

    def install(self, key: str, weight: Weight, bias: NDArray[np.float32] | None) -> None:
        """Give a layer the weights that will be stored."""
        linear = self._linears[key]
        dense = weight.dense() if not isinstance(weight, DenseTensor) else np.array(weight.dense())
        linear.weight = torch.from_numpy(np.ascontiguousarray(dense))
        linear.bias = None if bias is None else torch.from_numpy(np.array(bias, np.float32))

    def measure(
        self, stage: Stage, wanted: bool, beside: tuple[Calibration, Stage] | None = None
    ) -> tuple[Measured | None, Inputs | None, Inputs | None]:
        """(the moments of a stage's input if `wanted`, its inputs if the stage adds to the hidden states, and those of `beside`).

        `beside`: the same stage of the unquantised model's stream; with it the moments say how far this stream has drifted from that.
        """
        moments: Moments | None = None
        inputs: Inputs | None = None
        others: Inputs | None = None
        keeps = stage.adds is not None and stage.expert is None  # an expert's are computed again: they may be few or all
        if not wanted and not keeps:
            return None, None, None
        for batch in self._batches():
            tokens = [self._tokens(stage, window) for window in batch]
            read = list(self._pool.map(lambda window, which: self._read(stage, window, which), batch, tokens))
            true = None
            if beside is not None:
                true = list(self._pool.map(lambda window, which: beside[0]._read(beside[1], window, which), batch, tokens))
            if wanted:
                gaps = [] if beside is None or true is None else self._gaps(batch, tokens, read, true, beside[0], stage)
                moments = moments or Moments(read[0].shape[1], [gap.shape[1] for gap in gaps])
                moments.add(torch.cat(read), self._pool, gaps)
            if keeps:
                inputs = self._keep(inputs, batch, read)
                others = None if true is None else self._keep(others, batch, true)
        return None if moments is None else self._measured(moments, beside is not None, stage.adds is not None), inputs, others

    def _gaps(
        self,
        batch: range,
        tokens: list[NDArray[np.int64] | None],
        read: list[torch.Tensor],
        true: list[torch.Tensor],
        truth: Calibration,
        stage: Stage,
    ) -> list[torch.Tensor]:
        """How far the inputs are from the unquantised model's, and the hidden states if the stage's output joins them.

        Of an expert's tokens too, wherever the unquantised model sends them; as their weights add up to one, so does what is asked of
        their experts.
        """
        inputs = torch.cat(true) - torch.cat(read)
        if stage.adds is None:
            return [inputs]
        pairs = [(stream.states[window], which) for window, which in zip(batch, tokens, strict=True) for stream in (truth, self)]
        rows = [states if which is None else states[which] for states, which in pairs]
        return [inputs, torch.from_numpy(np.concatenate([rows[at] - rows[at + 1] for at in range(0, len(rows), 2)]))]

    def _tokens(self, stage: Stage, window: int) -> NDArray[np.int64] | None:
        """Which tokens of a window a stage's layers are measured on: its expert's and the guests, None for all."""
        if stage.expert is None:
            return None
        own, _ = self._sent(stage.expert, window)
        count, width = self.ids.size, self._width(stage)
        guests = guests_of(count, width)
        first = window * self.ids.shape[1]
        here = guests[(guests >= first) & (guests < first + self.ids.shape[1])] - first
        return np.concatenate([own, here])

    def _width(self, stage: Stage) -> int:
        """How wide the input of an expert's stage is."""
        moe = self.config.moe
        assert moe is not None
        return self.config.hidden_size if stage.adds is None else moe.intermediate_size

    def _sent(self, expert: int, window: int) -> tuple[NDArray[np.int64], torch.Tensor]:
        """(the tokens of a window that the router sends to an expert, ascending; its weight f32 [n, 1] for each)."""
        assert self._mixture is not None, "an expert is in work before its router"
        routing = self._mixture.routing[window]
        tokens, places = torch.nonzero(routing.experts == expert, as_tuple=True)
        return tokens.numpy(), routing.weights[tokens, places].unsqueeze(-1)

    def _measured(self, moments: Moments, beside: bool, joins: bool) -> Measured:
        hessian = moments.mean()
        wanted = None
        if beside and moments.rows:
            share, lag = damping(len(hessian), moments.rows, self._shrinkage), moments.crossed(1) if joins else None
            wanted = change(hessian, share, moments.crossed(0), lag, self._pool)
        return Measured(hessian, moments.rows, moments.dropped, wanted)

    def _keep(self, inputs: Inputs | None, batch: range, read: list[torch.Tensor]) -> Inputs:
        kept = self._array(read[0].shape[1]) if inputs is None else inputs
        for window, values in zip(batch, read, strict=True):
            kept[window] = values.numpy()
        return kept

    def advance(self, stage: Stage, inputs: Inputs | None) -> None:
        """Add the output of the stage's last layer to the hidden states, or send them to their experts."""
        if stage.routes is not None:
            routes = list(self._pool.map(lambda window: self._route(stage, window), range(len(self.ids))))
            self._mixture = _Mixture(routes, self._array(self.config.hidden_size))
        if stage.expert is not None and stage.adds is not None:
            list(self._pool.map(lambda window: self._add_expert(stage, window), range(len(self.ids))))
            self._release_expert(stage)
        if stage.adds is None or inputs is None:
            return
        added = stage.adds
        list(self._pool.map(lambda window: self._add(added, window, inputs[window]), range(len(self.ids))))

    def release(self, layer: int) -> None:
        """Drop the weights of a finished decoder layer."""
        for stage in self.stages(layer):
            for linear in stage.linears:
                linear.weight = linear.bias = None

    def _batches(self) -> Iterator[range]:
        for first in range(0, len(self.ids), BATCH):
            yield range(first, min(first + BATCH, len(self.ids)))

    @torch.inference_mode()
    def _read(self, stage: Stage, window: int, tokens: NDArray[np.int64] | None) -> torch.Tensor:
        states = self.states[window] if tokens is None else self.states[window][tokens]
        return stage.read(torch.from_numpy(states), self._step)

    @torch.inference_mode()
    def _route(self, stage: Stage, window: int) -> Routing:
        assert stage.routes is not None
        return stage.routes(torch.from_numpy(self.states[window]), self._step)

    @torch.inference_mode()
    def _add_expert(self, stage: Stage, window: int) -> None:
        """Add an expert's share to what the mixture gives a window, and that to the hidden states after the last one."""
        assert stage.adds is not None
        assert stage.expert is not None
        assert self._mixture is not None
        tokens, weights = self._sent(stage.expert, window)
        if len(tokens):
            given = stage.adds(self._read(stage, window, tokens))
            self._mixture.added[window][tokens] += (given * weights).numpy()
        if stage.last:
            self.states[window] += self._mixture.added[window]

    def _release_expert(self, stage: Stage) -> None:
        """Drop a finished expert's weights, and the mixture after the last one."""
        assert stage.adds is not None
        prefix = stage.adds.key.rpartition(".")[0] + "."
        for key, linear in self._linears.items():
            if key.startswith(prefix):
                linear.weight = linear.bias = None
        if stage.last:
            self._mixture = None

    @torch.inference_mode()
    def _add(self, linear: LiveLinear, window: int, inputs: NDArray[np.float32]) -> None:
        self.states[window] += linear(torch.from_numpy(inputs)).numpy()

    def _mix(self, block: Block, x: torch.Tensor, step: StepInputs) -> torch.Tensor:
        return block.attention.mix(block.attention_norm(x), step, self._rotation)

    @classmethod
    def scratch_bytes(cls, config: ModelConfig, tokens: int) -> int:
        """The most that one stream has in unnamed files at once: its hidden states, and the inputs of o or of down."""
        moe = config.moe
        # A stage's inputs (of o, or of a dense layer's down) or what a mixture adds.
        widths = [config.hidden_size if moe is not None and moe.sparse[i] else config.intermediate_size for i in range(config.num_layers)]
        arrays = [config.hidden_size, max(config.num_heads * config.head_dim, *widths)]
        return sum(size for width in arrays if (size := 4 * tokens * width) > IN_MEMORY)

    def _array(self, width: int) -> NDArray[np.float32]:
        """Zeros f32 [windows, tokens, width], in an unnamed file if they are many and there is a place for it."""
        shape = (*self.ids.shape, width)
        if 4 * int(np.prod(shape)) <= IN_MEMORY or self._scratch is None:
            return np.zeros(shape, np.float32)
        size = 4 * int(np.prod(shape))
        with storage_errors(self._scratch, "write"), tempfile.TemporaryFile(dir=self._scratch) as file:
            os.posix_fallocate(file.fileno(), 0, size)  # a disk that is full is an error here, and a dead process once it is mapped
            return np.memmap(file, np.float32, "r+", shape=shape)


def guests_of(count: int, width: int) -> NDArray[np.int64]:
    """Which of `count` tokens every expert sees besides its own, where its input is `width` wide: some, evenly spaced."""
    number = min(count, math.ceil(SHRINKAGE * width))
    return np.arange(number) * count // number


def block_stages(block: Block, mix: Callable[[Block, torch.Tensor, StepInputs], torch.Tensor]) -> tuple[Stage, ...]:
    """The stages of a decoder layer. `mix(block, x, step)`: its attention up to the output projection."""
    attention, mlp = block.attention, block.mlp
    q, k, v, o = (live(p) for p in (attention.q, attention.k, attention.v, attention.o))
    before = (
        Stage((q, k, v), lambda x, step: block.attention_norm(x), None),
        Stage((o,), lambda x, step: mix(block, x, step), o),
    )
    if isinstance(mlp, SwiGLU):
        return (*before, *_mlp_stages(block, mlp))
    router = Stage((live(mlp.router),), lambda x, step: block.mlp_norm(x), None, _routes(block, mlp))
    count = len(mlp.experts)
    experts = (stage for e in range(count) for stage in _mlp_stages(block, mlp.experts[e], e, e == count - 1))
    return (*before, router, *experts)


def _mlp_stages(block: Block, mlp: SwiGLU, expert: int | None = None, last: bool = False) -> tuple[Stage, Stage]:
    """gate and up, then down, of a dense layer or of one expert."""
    gate, up, down = (live(p) for p in (mlp.gate, mlp.up, mlp.down))
    return (
        Stage((gate, up), lambda x, step: block.mlp_norm(x), None, None, expert),
        Stage((down,), lambda x, step: mlp.inner(block.mlp_norm(x)), down, None, expert, last),
    )


def _routes(block: Block, mlp: SparseMoe) -> Callable[[torch.Tensor, StepInputs], Routing]:
    return lambda x, step: mlp.route(block.mlp_norm(x))


def live(projection: object) -> LiveLinear:
    """A projection of the model in calibration, which has no others."""
    assert isinstance(projection, LiveLinear)
    return projection
