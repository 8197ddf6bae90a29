"""A model as one program of CPU kernels: a whole step is one call, in which no Python runs and nothing is allocated.

The program is made once, over buffers of the largest step; what changes from step to step lies in arrays that the kernels read. It
computes what `models.decoder.CausalLM` defines, in kernels whose every row depends on itself (and, in attention, on its sequence) alone.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from arctool.kernels.cpu import attention, linear, stages
from arctool.kernels.cpu.attention_ir import KvKind
from arctool.kernels.cpu.attention_work import MOST_PARTS, units_of
from arctool.kernels.cpu.operands import Rows, padded_width, rows_of
from arctool.kernels.cpu.products import looked_up, placed
from arctool.kernels.cpu.program import Program
from arctool.kernels.registry import ATTENTION, embedding_name, linear_name
from arctool.run.kv.blocks import blocks_for
from arctool.run.kv.cache import KVCache
from arctool.run.layers.attention import Attention
from arctool.run.layers.linear import Linear, Projection
from arctool.run.layers.mlp import SwiGLU
from arctool.run.layers.rmsnorm import RMSNorm
from arctool.run.models.decoder import CausalLM
from arctool.run.step import StepInputs

Array = NDArray[np.float32]

TOKENS, UNITS, SPLITS, LOGITS, NUMBERS = range(5)
"""The numbers of a step: how many tokens, units of attention, splits, and rows that need logits."""


@dataclass(frozen=True)
class StepLimits:
    """The largest step: tokens, rows with logits, sequences, and the longest of them."""

    tokens: int
    logits: int
    seqs: int
    model_len: int


class CompiledModel:
    """The program of one model over one cache. One step at a time."""

    def __init__(self, model: CausalLM, cache: KVCache, limits: StepLimits) -> None:
        model.rope.reserve(limits.model_len)
        self.limits = limits
        self.cache = cache
        self._numbers = np.zeros(NUMBERS, np.int64)
        self._windows = sorted({block.attention.window or 0 for block in model.blocks})
        self._inputs = _Inputs.of(limits, cache.block_size)
        builder = _Builder(model, cache, limits, self._inputs, self._numbers)
        self.program, self._states, self._logits = builder.build()

    def run(self, step: StepInputs) -> Array:
        """Logits f32 [rows that want them, vocab], good until the next step; keys and values are in the cache afterwards."""
        self._fill(step)
        self.program.run()
        return self._logits[: len(step.logit_rows)]

    def states(self, step: StepInputs) -> Array:
        """The same up to the head: what it reads, f32 [rows that want logits, hidden], good until the next step."""
        self._fill(step)
        self.program.run(last=len(self.program) - 1)
        return self._states[: len(step.logit_rows)]

    def _fill(self, step: StepInputs) -> None:
        inputs, tokens, wanted = self._inputs, len(step.ids), len(step.logit_rows)
        limits = self.limits
        if tokens > limits.tokens or wanted > limits.logits or len(step.spans) > limits.seqs:
            raise RuntimeError(f"a step of {tokens} tokens, {wanted} logits and {len(step.spans)} spans exceeds {limits}")
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
        self._numbers[:] = (tokens, len(units), len(splits), wanted)


@dataclass(frozen=True)
class _Inputs:
    """What a step writes and kernels read, all i64."""

    ids: NDArray[np.int64]
    positions: NDArray[np.int64]
    slots: NDArray[np.int64]
    logit_rows: NDArray[np.int64]
    units: NDArray[np.int64]
    splits: NDArray[np.int64]
    tables: NDArray[np.int64]

    @classmethod
    def of(cls, limits: StepLimits, block_size: int) -> _Inputs:
        def numbers(*shape: int) -> NDArray[np.int64]:
            return np.empty(shape, np.int64)

        tokens = limits.tokens
        table = limits.seqs * blocks_for(limits.model_len, block_size)
        units = numbers(tokens + MOST_PARTS, attention.UNIT)
        splits = numbers(limits.seqs, attention.JOIN)
        return cls(numbers(tokens), numbers(tokens), numbers(tokens), numbers(limits.logits), units, splits, numbers(table))


@dataclass(frozen=True)
class _Reader:
    """A product to come, and the buffer that it will read."""

    layer: Linear
    rows: Rows
    x: Array


class _Builder:
    """Puts the kernels of a model in order over shared buffers."""

    def __init__(self, model: CausalLM, cache: KVCache, limits: StepLimits, inputs: _Inputs, numbers: NDArray[np.int64]) -> None:
        self.model, self.cache, self.limits, self.inputs = model, cache, limits, inputs
        self.program = Program(numbers)
        self._buffers: dict[tuple[str, int, int], Array] = {}
        self._kind: KvKind = "bf16" if cache.dtype is torch.bfloat16 else "f32"
        cos, sin = model.rope.tables()
        self._cos, self._sin = np.ascontiguousarray(cos.numpy()), np.ascontiguousarray(sin.numpy())
        self.program.keep(inputs, cache, self._cos, self._sin)

    def build(self) -> tuple[Program, Array, Array]:
        """(the program, whose last kernel is the head; what the head reads; the logits)."""
        model, config = self.model, self.model.config
        x = self.buffer("x", config.hidden_size)
        self.embed(x)
        add: Array | None = None
        for block in model.blocks:
            add = self.attention(block.attention, block.attention_norm, x, add)
            add = self.mlp(block.mlp, block.mlp_norm, x, add)
        states = self.buffer("states", config.hidden_size, self.limits.logits)
        head = self.reader(model.head, "head", self.limits.logits)
        logits = self.buffer("logits", config.vocab_size, self.limits.logits)
        plain = self.target(states, None)
        self.norm(model.norm, x, add, [head], also=plain, rows=self.inputs.logit_rows, count=LOGITS)
        self.product(head, logits, LOGITS)
        self.program.seal()
        self.program.keep(*self._buffers.values())
        return self.program, states[:, : config.hidden_size], logits[:, : config.vocab_size]

    def buffer(self, name: str, width: int, rows: int | None = None) -> Array:
        """The f32 zeros [rows, width padded to 16] of that name and size; buffers of layers of one shape are the same one."""
        key = (name, width, self.limits.tokens if rows is None else rows)
        if key not in self._buffers:
            self._buffers[key] = np.zeros((key[2], padded_width(width)), np.float32)
        return self._buffers[key]

    def embed(self, x: Array) -> None:
        weight = self.model.embedding.weight
        rows = rows_of(weight)
        operands = looked_up(weight, rows, self.inputs.ids, x)
        operands[linear.COUNT] = TOKENS
        self.program.keep(rows, weight)
        self.program.add(linear.gathering(rows.expand_row), operands, scratch=rows.scratch)
        self.program.counts[embedding_name(weight.kind)] += 1

    def attention(self, layer: Attention, norm: RMSNorm, x: Array, add: Array | None) -> Array:
        """The attention of a layer; returns what it adds to x."""
        c = self.model.config
        queries, keys = c.num_heads * c.head_dim, c.num_kv_heads * c.head_dim
        readers = [self.reader(part, name) for part, name in ((layer.q, "q"), (layer.k, "k"), (layer.v, "v"))]
        self.norm(norm, x, add, readers)
        q, k, v = self.buffer("q out", queries), self.buffer("k out", keys), self.buffer("v out", keys)
        for reader, out in zip(readers, (q, k, v), strict=True):
            self.product(reader, out, TOKENS, meet=out is v)
        self.turn(layer, q, k, v)
        mixed = self.buffer("mixed", queries)
        self.attend(layer, q, mixed)
        return self.project(layer.o, mixed, "o", queries)

    def mlp(self, layer: SwiGLU, norm: RMSNorm, x: Array, add: Array) -> Array:
        """The feed-forward block of a layer; returns what it adds to x."""
        inner = self.model.config.intermediate_size
        readers = [self.reader(layer.gate, "gate"), self.reader(layer.up, "up")]
        self.norm(norm, x, add, readers)
        gate, up = self.buffer("gate out", inner), self.buffer("up out", inner)
        for reader, out in zip(readers, (gate, up), strict=True):
            self.product(reader, out, TOKENS, meet=out is up)
        down = self.reader(layer.down, "down")
        operands = np.zeros(stages.S_SPREAD, np.int64)
        operands[:] = (gate.ctypes.data, gate.shape[1], up.ctypes.data, up.shape[1], inner, TOKENS, 1)
        self.stage(stages.gated, operands, [self.turned(down)], scratch=4 * padded_width(inner))
        added = self.buffer("added", self.model.config.hidden_size)
        self.product(down, added, TOKENS)
        return added

    def norm(
        self,
        norm: RMSNorm | None,
        x: Array,
        add: Array | None,
        readers: Sequence[_Reader],
        *,
        also: NDArray[np.int64] | None = None,
        rows: NDArray[np.int64] | None = None,
        count: int = TOKENS,
        width: int | None = None,
    ) -> None:
        """x += add, and the norm of x (or x itself) to the buffers of its readers."""
        gain = None if norm is None else np.ascontiguousarray(norm.gain.numpy())
        operands = np.zeros(stages.N_SPREAD, np.int64)
        operands[stages.N_X], operands[stages.N_X_PITCH] = x.ctypes.data, x.shape[1]
        if add is not None:
            operands[stages.N_ADD], operands[stages.N_ADD_PITCH] = add.ctypes.data, add.shape[1]
        operands[stages.N_WIDTH] = self.model.config.hidden_size if width is None else width
        if norm is not None and gain is not None:
            operands[stages.N_GAIN] = gain.ctypes.data
            operands[stages.N_EPS : stages.N_EPS + 1].view(np.float32)[0] = norm.eps
            self.program.keep(gain)
        operands[stages.N_ROWS] = 0 if rows is None else rows.ctypes.data
        operands[stages.N_COUNT] = count
        # Readers of an unrotated activation share one buffer; it is written once.
        targets = list({t.tobytes(): t for t in (*map(self.turned, readers), *(() if also is None else (also,)))}.values())
        operands[stages.N_TARGETS] = len(targets)
        self.stage(stages.add_and_norm, operands, targets, scratch=4 * padded_width(int(operands[stages.N_WIDTH])))

    def stage(self, kernel: Any, operands: NDArray[np.int64], targets: Sequence[NDArray[np.int64]], scratch: int) -> None:
        self.program.add(kernel, np.concatenate([operands, *targets]), scratch=scratch)

    def target(self, out: Array, layer: Linear | None) -> NDArray[np.int64]:
        """A target of a spread: as it is, or rotated for a layer."""
        rotation = None if layer is None else layer.weight.rotation
        signs, block = (0, 0) if rotation is None else (rotation.signs_in.ctypes.data, rotation.block_in)
        return np.array([out.ctypes.data, out.shape[1], signs, block], np.int64)

    def turned(self, reader: _Reader) -> NDArray[np.int64]:
        return self.target(reader.x, reader.layer)

    def reader(self, part: Projection, name: str, rows: int | None = None) -> _Reader:
        """A product to come; rotated inputs have a buffer for each `name`, others share one."""
        if not isinstance(part, Linear):
            raise TypeError(f"{type(part).__name__} is no layer with stored weights")
        stored = rows_of(part.weight)
        self.program.keep(part, stored)
        rotated = part.weight.rotation is not None
        return _Reader(part, stored, self.buffer(f"{name} in" if rotated else "plain in", part.weight.in_features, rows))

    def product(self, reader: _Reader, out: Array, count: int, *, meet: bool = True) -> None:
        operands = placed(reader.rows, reader.x, out)
        operands[linear.COUNT] = count
        if reader.layer.bias is not None:
            bias = np.ascontiguousarray(reader.layer.bias.numpy())
            operands[linear.BIAS] = bias.ctypes.data
            self.program.keep(bias)
        self.program.add(linear.product(reader.rows.expand_row), operands, scratch=reader.rows.scratch, meet=meet)
        self.program.counts[linear_name(reader.layer.weight.kind)] += 1

    def project(self, part: Projection, source: Array, name: str, width: int) -> Array:
        """A product that reads a buffer as it is, or rotated by a stage of its own; returns what it adds to x."""
        reader = self.reader(part, name)
        if reader.layer.weight.rotation is None:
            reader = _Reader(reader.layer, reader.rows, source)
        else:
            self.norm(None, source, None, [reader], width=width)
        added = self.buffer("added", self.model.config.hidden_size)
        self.product(reader, added, TOKENS)
        return added

    def turn(self, layer: Attention, q: Array, k: Array, v: Array) -> None:
        c = self.model.config
        operands = np.zeros(stages.R_OPERANDS, np.int64)
        for field, buffer in ((stages.R_Q, q), (stages.R_K, k), (stages.R_V, v)):
            operands[field], operands[field + 1] = buffer.ctypes.data, buffer.shape[1]
        operands[stages.R_HEADS], operands[stages.R_KV_HEADS], operands[stages.R_DIM] = c.num_heads, c.num_kv_heads, c.head_dim
        if layer.q_norm is not None and layer.k_norm is not None:
            gains = [np.ascontiguousarray(norm.gain.numpy()) for norm in (layer.q_norm, layer.k_norm)]
            operands[stages.R_Q_GAIN], operands[stages.R_K_GAIN] = (gain.ctypes.data for gain in gains)
            operands[stages.R_EPS : stages.R_EPS + 1].view(np.float32)[0] = layer.q_norm.eps
            self.program.keep(*gains)
        operands[stages.R_COS], operands[stages.R_SIN] = self._cos.ctypes.data, self._sin.ctypes.data
        operands[stages.R_POSITIONS], operands[stages.R_SLOTS] = self.inputs.positions.ctypes.data, self.inputs.slots.ctypes.data
        operands[stages.R_KEYS] = self.cache.keys[layer.layer].data_ptr()
        operands[stages.R_VALUES] = self.cache.values[layer.layer].data_ptr()
        operands[stages.R_VALUE_PITCH] = attention.value_pitch(c.head_dim)
        operands[stages.R_BLOCK_SIZE], operands[stages.R_COUNT] = self.cache.block_size, TOKENS
        self.program.add(stages.turn_and_store(self._kind), operands)

    def attend(self, layer: Attention, q: Array, out: Array) -> None:
        c = self.model.config
        share = c.num_heads // c.num_kv_heads
        parts = self.parts(share)
        operands = np.zeros(attention.OPERANDS, np.int64)
        operands[attention.Q], operands[attention.Q_PITCH] = q.ctypes.data, q.shape[1]
        operands[attention.OUT], operands[attention.OUT_PITCH] = out.ctypes.data, out.shape[1]
        operands[attention.KEYS] = self.cache.keys[layer.layer].data_ptr()
        operands[attention.VALUES] = self.cache.values[layer.layer].data_ptr()
        operands[attention.VALUE_PITCH], operands[attention.BLOCK_SIZE] = attention.value_pitch(c.head_dim), self.cache.block_size
        operands[attention.HEADS], operands[attention.KV_HEADS], operands[attention.DIM] = c.num_heads, c.num_kv_heads, c.head_dim
        operands[attention.WINDOW] = layer.window or 0
        operands[attention.SCALE : attention.SCALE + 1].view(np.float32)[0] = np.float32(c.head_dim**-0.5)
        operands[attention.UNITS], operands[attention.TABLES] = self.inputs.units.ctypes.data, self.inputs.tables.ctypes.data
        operands[attention.PARTS], operands[attention.COUNT] = parts.ctypes.data, UNITS
        joins = operands.copy()
        joins[attention.UNITS], joins[attention.COUNT] = self.inputs.splits.ctypes.data, SPLITS
        scratch = 4 * attention.scratch_floats(c.head_dim, share)
        self.program.add(attention.attention(self._kind), operands, scratch=scratch)
        self.program.add(attention.join_parts, joins, scratch=scratch)
        self.program.counts[ATTENTION] += 1

    def parts(self, share: int) -> Array:
        c = self.model.config
        size = MOST_PARTS * c.num_kv_heads * attention.part_floats(c.head_dim, share)
        key = ("parts", size, 1)
        if key not in self._buffers:
            self._buffers[key] = np.empty((1, size), np.float32)
        return self._buffers[key]
