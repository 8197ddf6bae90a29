"""One add-compare-select step of the error-feedback search as vector IR, and the least of its costs.

It knows two loops over the layouts that `survivors.py` documents and nothing of rows, scales, Hessians or files.
"""

from __future__ import annotations

from typing import Any

from llvmlite import ir
from numba.core import cgutils, types
from numba.extending import intrinsic

from arctool.bake.search import vector_ir
from arctool.bake.search.vector_ir import I32, I64, Vectors, pointers_of

WIDTH = 16
"""Nodes handled together, fewer where there are fewer that share no predecessor."""


def block_width(k: int, l: int) -> int:
    """Neighbouring nodes whose costs are computed together: all of them leave one node, or each leaves its own neighbour."""
    nodes, symbols = 1 << (l - k), 1 << k
    return min(WIDTH, nodes if nodes <= symbols else nodes // symbols)


class _Select(Vectors):
    """Add-compare-select for one geometry and `rows` rows; a method for each loop level."""

    def __init__(self, builder: ir.IRBuilder, k: int, v: int, l: int, rows: int) -> None:
        self.width = block_width(k, l)
        super().__init__(builder, min(self.width, vector_ir.LANES))
        self.v, self.rows = v, rows
        self.nodes, self.symbols = 1 << (l - k), 1 << k
        self.vectors = self.width // self.lanes
        self.groups = max(1, self.nodes // self.symbols // self.width)
        self.members = self.nodes // self.width // self.groups

    def emit(self, half: ir.Value, table: ir.Value, weight: ir.Value, front: ir.Value, best: ir.Value, chosen: ir.Value) -> None:
        b = self.b
        weights = self.splat(weight, self.vec)
        with cgutils.for_range(b, self.const(self.groups)) as group, cgutils.for_range(b, self.const(self.members)) as member:
            records = b.add(b.mul(group.index, self.const(self.members)), member.index)
            costs, symbols = self.minimise(half, table, weights, front, group.index, records)
            block = b.add(b.mul(member.index, self.const(self.groups)), group.index)
            for r in range(self.rows):
                for n in range(self.vectors):
                    index = b.add(b.mul(block, self.const(self.width)), self.const(r * self.nodes + n * self.lanes))
                    b.store(costs[r][n], self.at(best, index, self.vec), align=4)
                    b.store(symbols[r][n], self.at(chosen, index, self.ints), align=4)

    def minimise(
        self, half: ir.Value, table: ir.Value, weights: ir.Value, front: ir.Value, group: ir.Value, records: ir.Value
    ) -> tuple[list[list[ir.Value]], list[list[ir.Value]]]:
        """The loop over the 2^k symbols of a block of nodes, its running minima and their symbols in registers."""
        b, function, entry = self.b, self.b.function, self.b.block
        body, leave = function.append_basic_block("select"), function.append_basic_block("select.done")
        b.branch(body)
        b.position_at_end(body)
        symbol = b.phi(I64)
        symbol.add_incoming(self.const(0), entry)
        costs = [[b.phi(self.vec) for _ in range(self.vectors)] for _ in range(self.rows)]
        chosen = [[b.phi(self.ints) for _ in range(self.vectors)] for _ in range(self.rows)]
        record = b.add(b.mul(records, self.const(self.symbols)), symbol)
        less, those = self.evaluate(half, table, weights, front, group, symbol, record, costs, chosen)
        following = b.add(symbol, self.const(1))
        symbol.add_incoming(following, body)
        infinite = ir.Constant(self.vec, [float("inf")] * self.lanes)
        zero = ir.Constant(self.ints, [0] * self.lanes)
        for phis, values, first in ((costs, less, infinite), (chosen, those, zero)):
            for r in range(self.rows):
                for n in range(self.vectors):
                    phis[r][n].add_incoming(first, entry)
                    phis[r][n].add_incoming(values[r][n], body)
        b.cbranch(b.icmp_unsigned("<", following, self.const(self.symbols)), body, leave)
        b.position_at_end(leave)
        return less, those

    def evaluate(
        self,
        half: ir.Value,
        table: ir.Value,
        weights: ir.Value,
        front: ir.Value,
        group: ir.Value,
        symbol: ir.Value,
        record: ir.Value,
        costs: list[list[ir.Value]],
        chosen: list[list[ir.Value]],
    ) -> tuple[list[list[ir.Value]], list[list[ir.Value]]]:
        """Keep the lesser of each running minimum and the cost of arriving by `symbol`."""
        b = self.b
        label = self.splat(b.trunc(symbol, I32), self.ints)
        less: list[list[ir.Value]] = [[] for _ in range(self.rows)]
        those: list[list[ir.Value]] = [[] for _ in range(self.rows)]
        for n in range(self.vectors):
            norm = self.load(half, b.add(b.mul(record, self.const(self.width)), self.const(n * self.lanes)))
            values = [
                self.load(table, b.add(b.mul(record, self.const(self.v * self.width)), self.const(i * self.width + n * self.lanes)))
                for i in range(self.v)
            ]
            for r in range(self.rows):
                base, *pulls = self.predecessor(front, group, symbol, r, n)
                cost = b.call(self.fma, [weights, norm, base])
                for pull, value in zip(pulls, values, strict=True):
                    cost = b.call(self.fma, [pull, value, cost])
                better = b.fcmp_ordered("<", cost, costs[r][n])
                less[r].append(b.select(better, cost, costs[r][n]))
                those[r].append(b.select(better, label, chosen[r][n]))
        return less, those

    def predecessor(self, front: ir.Value, group: ir.Value, symbol: ir.Value, row: int, vector: int) -> list[ir.Value]:
        """The planes of the node that is left: one for all lanes if there are at most 2^k nodes, else a neighbour for each lane."""
        b = self.b
        planes = 1 + self.v
        start = self.const(row * planes * self.nodes)
        if self.nodes <= self.symbols:
            node = b.add(b.mul(b.and_(symbol, self.const(self.nodes - 1)), self.const(planes)), start)
            return [self.splat(self.scalar(front, b.add(node, self.const(i))), self.vec) for i in range(planes)]
        record = b.add(b.mul(group, self.const(self.symbols)), symbol)
        index = b.add(b.mul(record, self.const(planes * self.width)), start)
        return [self.load(front, b.add(index, self.const(i * self.width + vector * self.lanes))) for i in range(planes)]


class _Least(Vectors):
    """The least of `count` values, a multiple of the lanes or less than them."""

    def __init__(self, builder: ir.IRBuilder, count: int) -> None:
        super().__init__(builder, min(count, vector_ir.LANES))
        self.count = count

    def emit(self, values: ir.Value) -> ir.Value:
        b = self.b
        running = cgutils.alloca_once(b, self.vec)
        b.store(self.load(values, self.const(0)), running)
        with cgutils.for_range(b, self.const(self.count // self.lanes)) as loop:
            found, before = self.load(values, b.mul(loop.index, self.const(self.lanes))), b.load(running)
            b.store(b.select(b.fcmp_ordered("<", found, before), found, before), running)
        final = b.load(running)
        least = b.extract_element(final, ir.Constant(I32, 0))
        for lane in range(1, self.lanes):
            value = b.extract_element(final, ir.Constant(I32, lane))
            least = b.select(b.fcmp_ordered("<", value, least), value, least)
        return least


@intrinsic(prefer_literal=True)
def select_survivors(
    typing_context: Any, half: Any, table: Any, weight: Any, front: Any, best: Any, chosen: Any, k: Any, v: Any, l: Any, rows: Any
) -> Any:
    """best[r][n] = min over symbols j of (weight·half(s) + base(p) + Σ_i pull_i(p)·c_i(s)), s = n·2^k + j, p = s mod 2^(l−k).

    `half`, `table`, `front`: f32 in the orders of `survivors.Layout`; `weight`: f32; `best`: f32 [rows, 2^(l−k)]; `chosen`: i32, the
    least j that gives the minimum. `k`, `v`, `l`, `rows` are compile-time constants.
    """
    constants = [argument.literal_value for argument in (k, v, l, rows)]
    signature = types.void(half, table, weight, front, best, chosen, k, v, l, rows)

    def generate(context: Any, builder: Any, sig: Any, arguments: Any) -> Any:
        arrays = [*arguments[:2], *arguments[3:6]]
        half, table, front, best, chosen = pointers_of(context, builder, [*sig.args[:2], *sig.args[3:6]], arrays)
        _Select(builder, *constants).emit(half, table, arguments[2], front, best, chosen)
        return context.get_dummy_value()

    return signature, generate


@intrinsic(prefer_literal=True)
def least_of(typing_context: Any, values: Any, count: Any) -> Any:
    """The least of the first `count` of `values`: f32, none NaN. `count`, a power of two, is a compile-time constant."""
    size = count.literal_value
    signature = types.float32(values, count)

    def generate(context: Any, builder: Any, sig: Any, arguments: Any) -> Any:
        (pointer,) = pointers_of(context, builder, sig.args[:1], arguments[:1])
        return _Least(builder, size).emit(pointer)

    return signature, generate
