"""One step of the trellis search as vector IR: the inner loop of every bake, emitted through llvmlite so that it stays in registers.

For a block of `w` neighbouring minima and `r` rows at once it evaluates all 2^k symbols without storing a single state cost.
It knows one recursion over one table layout (`viterbi.py` documents both) and nothing of rows, scales or files.
"""

from __future__ import annotations

from typing import Any

from llvmlite import ir
from numba.core import cgutils, types
from numba.extending import intrinsic

from arctool.bake.search.vector_ir import I64, Vectors

MAX_LANES = 8
"""f32 lanes of one AVX2 register; LLVM splits the vectors on machines with narrower ones."""


def block_width(k: int, l: int) -> int:
    """Minima handled together: at most two registers, and all fed by one predecessor minimum (2^k neighbours share one)."""
    return min(1 << k, 1 << (l - k), 2 * MAX_LANES)


class _Step(Vectors):
    """Emits the step for one geometry. Split into small methods because each is one loop level of the recursion."""

    def __init__(self, builder: ir.IRBuilder, k: int, v: int, l: int, rows: int) -> None:
        self.width = block_width(k, l)
        super().__init__(builder, min(self.width, MAX_LANES))
        self.k, self.v, self.rows = k, v, rows
        self.minima = 1 << (l - k)
        self.vectors = self.width // self.lanes

    def emit(self, table: ir.Value, targets: ir.Value, later: ir.Value, now: ir.Value) -> None:
        b = self.b
        negated = [
            [self.splat(b.fneg(self.scalar(targets, self.const(r * self.v + i))), self.vec) for i in range(self.v)]
            for r in range(self.rows)
        ]
        half_norms = [self.half_norm(row) for row in negated]
        with cgutils.for_range(b, self.const(self.minima // self.width)) as loop:
            best = self.minimise_symbols(table, later, negated, loop.index)
            for r in range(self.rows):
                for n in range(self.vectors):
                    index = b.add(b.mul(loop.index, self.const(self.width)), self.const(r * self.minima + n * self.lanes))
                    b.store(b.fadd(best[r][n], half_norms[r]), self.at(now, index, self.vec), align=4)

    def half_norm(self, negated: list[ir.Value]) -> ir.Value:
        total = self.b.fmul(negated[0], negated[0])
        for value in negated[1:]:
            total = self.b.call(self.fma, [value, value, total])
        return self.b.fmul(total, ir.Constant(self.vec, [0.5] * self.lanes))

    def minimise_symbols(self, table: ir.Value, later: ir.Value, negated: list[list[ir.Value]], block: ir.Value) -> list[list[ir.Value]]:
        """The loop over the 2^k symbols with its running minima in registers (phi nodes), for one block of minima."""
        b, function, entry = self.b, self.b.function, self.b.block
        body, leave = function.append_basic_block("symbols"), function.append_basic_block("symbols.done")
        b.branch(body)
        b.position_at_end(body)
        symbol = b.phi(I64)
        symbol.add_incoming(self.const(0), entry)
        infinity = ir.Constant(self.vec, [float("inf")] * self.lanes)
        running = [[b.phi(self.vec) for _ in range(self.vectors)] for _ in range(self.rows)]
        best = self.evaluate(table, later, negated, block, symbol, running)
        following = b.add(symbol, self.const(1))
        symbol.add_incoming(following, body)
        for phis, values in zip(running, best, strict=True):
            for phi, value in zip(phis, values, strict=True):
                phi.add_incoming(infinity, entry)
                phi.add_incoming(value, body)
        b.cbranch(b.icmp_unsigned("<", following, self.const(1 << self.k)), body, leave)
        b.position_at_end(leave)
        return best

    def evaluate(
        self,
        table: ir.Value,
        later: ir.Value,
        negated: list[list[ir.Value]],
        block: ir.Value,
        symbol: ir.Value,
        running: list[list[ir.Value]],
    ) -> list[list[ir.Value]]:
        """min(running, |c|²/2 − x·c + later minimum) for one symbol: an add, v fused multiply-adds and a minimum a vector."""
        b = self.b
        record = b.mul(b.add(b.mul(block, self.const(1 << self.k)), symbol), self.const((self.v + 1) * self.width))
        state = b.add(b.mul(symbol, self.const(self.minima)), b.mul(block, self.const(self.width)))
        predecessor = b.lshr(state, self.const(self.k))
        ahead = [self.splat(self.scalar(later, b.add(predecessor, self.const(r * self.minima))), self.vec) for r in range(self.rows)]
        best: list[list[ir.Value]] = [[] for _ in range(self.rows)]
        for n in range(self.vectors):
            planes = [self.load(table, b.add(record, self.const(p * self.width + n * self.lanes))) for p in range(self.v + 1)]
            for r in range(self.rows):
                cost = b.fadd(planes[0], ahead[r])
                for i in range(self.v):
                    cost = b.call(self.fma, [negated[r][i], planes[1 + i], cost])
                best[r].append(b.select(b.fcmp_ordered("<", cost, running[r][n]), cost, running[r][n]))
        return best


@intrinsic(prefer_literal=True)
def search_step(typing_context: Any, table: Any, targets: Any, later: Any, now: Any, k: Any, v: Any, l: Any, rows: Any) -> Any:
    """now[r][q] = |x|²/2 + min over symbols m of (|c|²/2 − x·c + later[r][s >> k]), s = q + m·2^(l−k), for every q < 2^(l−k).

    `table`: f32 blocks as `viterbi.layout` makes them; `targets`: f32 [rows·v]; `later`, `now`: f32 [rows·2^(l−k)].
    `k`, `v`, `l`, `rows` must be compile-time constants.
    """
    constants = [argument.literal_value for argument in (k, v, l, rows)]
    signature = types.void(table, targets, later, now, k, v, l, rows)

    def generate(context: Any, builder: Any, sig: Any, arguments: Any) -> Any:
        pointers = [context.make_array(kind)(context, builder, value).data for kind, value in zip(sig.args[:4], arguments[:4], strict=True)]
        _Step(builder, *constants).emit(*pointers)
        return context.get_dummy_value()

    return signature, generate
