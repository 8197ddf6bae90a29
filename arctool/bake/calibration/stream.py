"""What every layer of a model sees when calibration text runs through the layers before it, as they will be stored.

The hidden states of all windows stand before one decoder layer; the layer's linear layers come in stages that share an input: q, k, v;
then o; then gate, up; then down. A stage's second moments are measured, its layers are quantised (by whoever asked) and installed, and
their output goes on to the next. Each stage is computed once. Knows the engine's blocks, not how a matrix is quantised.

Memory: one layer's weights in f32, the moments of one stage, some windows' activations, and the hidden states and one stage's inputs
of all windows, which lie in unnamed files when they pass `IN_MEMORY` bytes. Deterministic: a window is computed by one thread.
"""

from __future__ import annotations

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
from arctool.bake.calibration.hessian import Moments, damping
from arctool.errors import SourceError
from arctool.kernels.registry import default_registry
from arctool.quant.tensor import DenseTensor, Weight
from arctool.run.config import ModelConfig
from arctool.run.kv.blocks import blocks_for
from arctool.run.layers.linear import Embedding
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

    `adds`: the layer whose output joins the hidden states when the stage is done, None for one that other stages read.
    """

    linears: tuple[LiveLinear, ...]
    read: Callable[[torch.Tensor, StepInputs], torch.Tensor]
    adds: LiveLinear | None


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
        if not wanted and stage.adds is None:
            return None, None, None
        for batch in self._batches():
            read = list(self._pool.map(lambda window: self._read(stage, window), batch))
            true = None if beside is None else list(self._pool.map(lambda window: beside[0]._read(beside[1], window), batch))
            if wanted:
                gaps = [] if beside is None or true is None else self._gaps(batch, read, true, beside[0], stage)
                moments = moments or Moments(read[0].shape[1], [gap.shape[1] for gap in gaps])
                moments.add(torch.cat(read), self._pool, gaps)
            if stage.adds is not None:
                inputs = self._keep(inputs, batch, read)
                others = None if true is None else self._keep(others, batch, true)
        return None if moments is None else self._measured(moments, beside is not None, stage.adds is not None), inputs, others

    def _gaps(
        self, batch: range, read: list[torch.Tensor], true: list[torch.Tensor], truth: Calibration, stage: Stage
    ) -> list[torch.Tensor]:
        """How far the inputs are from the unquantised model's, and the hidden states if the stage's output joins them."""
        inputs = torch.cat(true) - torch.cat(read)
        if stage.adds is None:
            return [inputs]
        states = np.concatenate([truth.states[window] - self.states[window] for window in batch])
        return [inputs, torch.from_numpy(states)]

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
        """Add the output of the stage's last layer to the hidden states."""
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
    def _read(self, stage: Stage, window: int) -> torch.Tensor:
        return stage.read(torch.from_numpy(self.states[window]), self._step)

    @torch.inference_mode()
    def _add(self, linear: LiveLinear, window: int, inputs: NDArray[np.float32]) -> None:
        self.states[window] += linear(torch.from_numpy(inputs)).numpy()

    def _mix(self, block: Block, x: torch.Tensor, step: StepInputs) -> torch.Tensor:
        return block.attention.mix(block.attention_norm(x), step, self._rotation)

    @classmethod
    def scratch_bytes(cls, config: ModelConfig, tokens: int) -> int:
        """The most that one stream has in unnamed files at once: its hidden states, and the inputs of o or of down."""
        arrays = [config.hidden_size, max(config.num_heads * config.head_dim, config.intermediate_size)]
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


def block_stages(block: Block, mix: Callable[[Block, torch.Tensor, StepInputs], torch.Tensor]) -> tuple[Stage, ...]:
    """The four stages of a dense decoder layer. `mix(block, x, step)`: its attention up to the output projection."""
    attention, mlp = block.attention, block.mlp
    q, k, v, o, gate, up, down = (live(p) for p in (attention.q, attention.k, attention.v, attention.o, mlp.gate, mlp.up, mlp.down))
    return (
        Stage((q, k, v), lambda x, step: block.attention_norm(x), None),
        Stage((o,), lambda x, step: mix(block, x, step), o),
        Stage((gate, up), lambda x, step: block.mlp_norm(x), None),
        Stage((down,), lambda x, step: mlp.inner(block.mlp_norm(x)), down),
    )


def live(projection: object) -> LiveLinear:
    """A projection of the model in calibration, which has no others."""
    assert isinstance(projection, LiveLinear)
    return projection
