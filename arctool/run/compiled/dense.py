"""Embedding, attention and SwiGLU as kernels."""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray

from arctool.kernels.cpu import attention as kernel
from arctool.kernels.cpu import linear, stages
from arctool.kernels.cpu.attention_ir import KvKind
from arctool.kernels.cpu.attention_work import MOST_PARTS
from arctool.kernels.cpu.operands import padded_width, rows_of
from arctool.kernels.cpu.products import looked_up
from arctool.kernels.registry import ATTENTION, SPLIT_ATTENTION, embedding_name
from arctool.run.compiled.builder import Builder, Reader
from arctool.run.compiled.inputs import SPLITS, TOKENS, UNITS
from arctool.run.kv.cache import KVCache
from arctool.run.layers.attention import Attention
from arctool.run.layers.linear import Projection
from arctool.run.layers.mlp import SwiGLU
from arctool.run.layers.rmsnorm import RMSNorm

Array = NDArray[np.float32]


def embed(b: Builder, x: Array) -> None:
    """The rows of the embedding, into x."""
    weight = b.model.embedding.weight
    rows = rows_of(weight)
    operands = looked_up(weight, rows, b.inputs.ids, x)
    operands[linear.COUNT] = TOKENS
    b.program.keep(rows, weight)
    b.program.add(linear.gathering(rows.kind), operands, scratch=rows.scratch)
    b.program.count(embedding_name(weight.kind))


def attention(b: Builder, layer: Attention, norm: RMSNorm, x: Array, add: Array | None) -> Array:
    """The attention of a layer; returns what it adds to x."""
    c = b.model.config
    queries, keys = c.num_heads * c.head_dim, c.num_kv_heads * c.head_dim
    readers = [b.reader(part, name) for part, name in ((layer.q, "q"), (layer.k, "k"), (layer.v, "v"))]
    b.norm(norm, x, add, readers)
    q, k, v = b.buffer("q out", queries), b.buffer("k out", keys), b.buffer("v out", keys)
    for reader, out in zip(readers, (q, k, v), strict=True):
        b.product(reader, out, TOKENS, meet=out is v)
    _turn(b, layer, q, k, v)
    mixed = b.buffer("mixed", queries)
    _attend(b, layer, q, mixed)
    return _project(b, layer.o, mixed, "o", queries)


def mlp(b: Builder, layer: SwiGLU, norm: RMSNorm, x: Array, add: Array) -> Array:
    """The feed-forward block of a layer; returns what it adds to x."""
    inner = b.model.config.intermediate_size
    readers = [b.reader(layer.gate, "gate"), b.reader(layer.up, "up")]
    b.norm(norm, x, add, readers)
    gate, up = b.buffer("gate out", inner), b.buffer("up out", inner)
    for reader, out in zip(readers, (gate, up), strict=True):
        b.product(reader, out, TOKENS, meet=out is up)
    down = b.reader(layer.down, "down")
    operands = np.zeros(stages.S_SPREAD, np.int64)
    operands[:] = (gate.ctypes.data, gate.shape[1], up.ctypes.data, up.shape[1], inner, TOKENS, 1)
    b.stage(stages.gated, operands, [b.turned(down)], scratch=4 * padded_width(inner))
    added = b.buffer("added", b.model.config.hidden_size)
    b.product(down, added, TOKENS)
    return added


def _turn(b: Builder, layer: Attention, q: Array, k: Array, v: Array) -> None:
    c = b.model.config
    operands = np.zeros(stages.R_OPERANDS, np.int64)
    for field, buffer in ((stages.R_Q, q), (stages.R_K, k), (stages.R_V, v)):
        operands[field], operands[field + 1] = buffer.ctypes.data, buffer.shape[1]
    operands[stages.R_HEADS], operands[stages.R_KV_HEADS], operands[stages.R_DIM] = c.num_heads, c.num_kv_heads, c.head_dim
    if layer.q_norm is not None and layer.k_norm is not None:
        gains = [np.ascontiguousarray(norm.gain.numpy()) for norm in (layer.q_norm, layer.k_norm)]
        operands[stages.R_Q_GAIN], operands[stages.R_K_GAIN] = (gain.ctypes.data for gain in gains)
        operands[stages.R_EPS : stages.R_EPS + 1].view(np.float32)[0] = layer.q_norm.eps
        b.program.keep(*gains)
    cos, sin = (np.ascontiguousarray(table.numpy()) for table in b.model.rope.tables())
    b.program.keep(cos, sin)
    operands[stages.R_COS], operands[stages.R_SIN] = cos.ctypes.data, sin.ctypes.data
    operands[stages.R_POSITIONS], operands[stages.R_SLOTS] = b.inputs.positions.ctypes.data, b.inputs.slots.ctypes.data
    operands[stages.R_KEYS] = b.cache.keys[layer.layer].data_ptr()
    operands[stages.R_VALUES] = b.cache.values[layer.layer].data_ptr()
    operands[stages.R_VALUE_PITCH] = kernel.value_pitch(c.head_dim)
    operands[stages.R_BLOCK_SIZE], operands[stages.R_COUNT] = b.cache.block_size, TOKENS
    b.program.add(stages.turn_and_store(_kind(b.cache)), operands)


def _attend(b: Builder, layer: Attention, q: Array, out: Array) -> None:
    c = b.model.config
    share = c.num_heads // c.num_kv_heads
    parts = b.buffer("parts", kernel.part_floats(c.head_dim, share), MOST_PARTS * c.num_kv_heads)
    operands = np.zeros(kernel.OPERANDS, np.int64)
    operands[kernel.Q], operands[kernel.Q_PITCH] = q.ctypes.data, q.shape[1]
    operands[kernel.OUT], operands[kernel.OUT_PITCH] = out.ctypes.data, out.shape[1]
    operands[kernel.KEYS] = b.cache.keys[layer.layer].data_ptr()
    operands[kernel.VALUES] = b.cache.values[layer.layer].data_ptr()
    operands[kernel.VALUE_PITCH], operands[kernel.BLOCK_SIZE] = kernel.value_pitch(c.head_dim), b.cache.block_size
    operands[kernel.HEADS], operands[kernel.KV_HEADS], operands[kernel.DIM] = c.num_heads, c.num_kv_heads, c.head_dim
    operands[kernel.WINDOW] = layer.window or 0
    operands[kernel.SCALE : kernel.SCALE + 1].view(np.float32)[0] = np.float32(c.head_dim**-0.5)
    operands[kernel.UNITS], operands[kernel.TABLES] = b.inputs.units.ctypes.data, b.inputs.tables.ctypes.data
    operands[kernel.PARTS], operands[kernel.COUNT] = parts.ctypes.data, UNITS
    joins = operands.copy()
    joins[kernel.UNITS], joins[kernel.COUNT] = b.inputs.splits.ctypes.data, SPLITS
    scratch = 4 * kernel.scratch_floats(c.head_dim, share)
    b.program.add(kernel.attention(_kind(b.cache)), operands, scratch=scratch)
    b.program.add(kernel.join_parts, joins, scratch=scratch, unless=SPLITS)
    b.program.count(ATTENTION)
    b.program.count(SPLIT_ATTENTION, SPLITS)


def _project(b: Builder, part: Projection, source: Array, name: str, width: int) -> Array:
    """A product that reads a buffer as it is, or rotated by a stage of its own; returns what it adds to x."""
    reader = b.reader(part, name)
    if reader.layer.weight.rotation is None:
        reader = Reader(reader.layer, reader.rows, source)
    else:
        b.norm(None, source, None, [reader], width=width)
    added = b.buffer("added", b.model.config.hidden_size)
    b.product(reader, added, TOKENS)
    return added


def _kind(cache: KVCache) -> KvKind:
    return "bf16" if cache.dtype is torch.bfloat16 else "f32"
