"""A mixture of experts as kernels: router, routing, and products over the pairs of tokens and experts."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
from numpy.typing import NDArray

from arctool.kernels.cpu import experts, linear
from arctool.kernels.cpu.operands import padded_width
from arctool.kernels.cpu.stages import TARGET
from arctool.kernels.registry import GATHERED_EXPERTS, GROUPED_EXPERTS, linear_name
from arctool.run.compiled.builder import Builder, Reader
from arctool.run.compiled.inputs import GATHER, GROUPED, GROUPS, TOKENS
from arctool.run.layers.linear import Projection
from arctool.run.layers.moe import SparseMoe
from arctool.run.layers.rmsnorm import RMSNorm

Array = NDArray[np.float32]


def mixture(b: Builder, layer: SparseMoe, norm: RMSNorm, x: Array, add: Array | None) -> Array:
    """The feed-forward block of a layer; returns what it adds to x."""
    count, top_k, hidden = len(layer.experts), layer.top_k, b.model.config.hidden_size
    pairs = b.limits.tokens * top_k
    normed, logits = b.buffer("normed", hidden), b.buffer("routes", count)
    router = b.reader(layer.router, "router")
    b.norm(norm, x, add, [router], also=b.target(normed, None))
    b.product(router, logits, TOKENS)
    chosen, order, places = (b.integers(name, pairs) for name in ("chosen", "pairs", "places"))
    groups = b.integers("groups", experts.GROUP * max(pairs, count))
    weights = b.buffer("weights", pairs, 1)
    _route(b, layer, logits, chosen, weights, order, places, groups)
    gates, ups, downs = (_readers(b, parts, name, pairs) for parts, name in zip(_parts(layer), ("gate", "up", "down"), strict=True))
    inner = gates[0].layer.weight.out_features
    gate, up = b.buffer("gate out", inner, pairs), b.buffer("up out", inner, pairs)
    table = _table(b, [gates, ups])
    _pairs(b, experts.spread_pairs, normed, None, hidden, layer, order, chosen, table, scratch=64)
    _product(b, gates, gate, groups, meet=False)
    _product(b, ups, up, groups)
    _pairs(b, experts.gate_pairs, gate, up, inner, layer, order, chosen, _table(b, [downs]), scratch=4 * padded_width(inner))
    b.program.count(GATHERED_EXPERTS, GATHER)
    b.program.count(GROUPED_EXPERTS, GROUPED)
    out, added = b.buffer("down out", hidden, pairs), b.buffer("added", hidden)
    _product(b, downs, out, groups)
    operands = np.zeros(experts.COMBINE_OPERANDS, np.int64)
    operands[:] = (
        out.ctypes.data, out.shape[1], added.ctypes.data, added.shape[1], hidden, top_k, places.ctypes.data, weights.ctypes.data, TOKENS,
    )  # fmt: skip
    b.program.add(experts.combine, operands)
    return added


def _parts(layer: SparseMoe) -> tuple[list[Projection], list[Projection], list[Projection]]:
    return [e.gate for e in layer.experts], [e.up for e in layer.experts], [e.down for e in layer.experts]


def _route(
    b: Builder,
    layer: SparseMoe,
    logits: Array,
    chosen: NDArray[np.int64],
    weights: Array,
    order: NDArray[np.int64],
    places: NDArray[np.int64],
    groups: NDArray[np.int64],
) -> None:
    operands = np.zeros(experts.ROUTE_OPERANDS, np.int64)
    operands[:] = (
        logits.ctypes.data, logits.shape[1], len(layer.experts), layer.top_k, int(layer.normalised), chosen.ctypes.data,
        weights.ctypes.data, places.ctypes.data, order.ctypes.data, groups.ctypes.data, TOKENS, GROUPS, GATHER,
    )  # fmt: skip
    b.program.add(experts.route, operands, scratch=4 * len(layer.experts))
    b.program.add(experts.group, operands, scratch=16 * len(layer.experts))


def _readers(b: Builder, parts: Sequence[Projection], name: str, pairs: int) -> list[Reader]:
    """The products of one matrix of every expert. Experts turn one activation each in their own way, and each pair has its own row."""
    return [b.reader(part, f"{name} of pairs", pairs) for part in parts]


def _table(b: Builder, kinds: Sequence[Sequence[Reader]]) -> NDArray[np.int64]:
    """i64 [experts, kinds · TARGET]: where each expert's activations go."""
    table = np.stack([np.concatenate([b.turned(readers[e]) for readers in kinds]) for e in range(len(kinds[0]))])
    b.program.keep(table)
    return table


def _pairs(
    b: Builder,
    kernel: Callable[[], int],
    source: Array,
    beside: Array | None,
    width: int,
    layer: SparseMoe,
    order: NDArray[np.int64],
    chosen: NDArray[np.int64],
    table: NDArray[np.int64],
    scratch: int,
) -> None:
    other = source if beside is None else beside
    operands = np.zeros(experts.PAIR_OPERANDS, np.int64)
    operands[:] = (
        source.ctypes.data, source.shape[1], other.ctypes.data, other.shape[1], width, layer.top_k, order.ctypes.data, chosen.ctypes.data,
        table.ctypes.data, table.shape[1] // TARGET, TOKENS,
    )  # fmt: skip
    b.program.add(kernel, operands, scratch=scratch)


def _product(b: Builder, readers: Sequence[Reader], out: Array, groups: NDArray[np.int64], *, meet: bool = True) -> None:
    """The products of one matrix of every expert: one kernel for each way in which their rows are stored."""
    by_kind: dict[object, list[int]] = {}
    for e, reader in enumerate(readers):
        by_kind.setdefault(reader.rows.kind, []).append(e)
    for n, (kind, members) in enumerate(by_kind.items()):
        table = np.zeros(len(readers), np.int64)
        task = max(int(readers[e].rows.operands[linear.TASK]) for e in members)
        for e in members:
            operands = b.operands(readers[e], out)
            b.program.keep(operands)
            table[e] = operands.ctypes.data
        b.program.keep(table)
        call = np.zeros(experts.GROUPED_OPERANDS, np.int64)
        call[:] = (table.ctypes.data, groups.ctypes.data, GROUPS, readers[0].layer.weight.out_features, task)
        scratch = max(readers[e].rows.scratch for e in members)
        b.program.add(experts.grouped_product(kind), call, scratch=scratch, meet=meet and n + 1 == len(by_kind))
        b.program.count(linear_name(readers[members[0]].layer.weight.kind))
