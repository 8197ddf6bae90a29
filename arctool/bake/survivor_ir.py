"""The inner loops of the error-feedback search as vector IR: one add-compare-select step, and the hand-over of survivors' feedback.

It knows some loops over the layouts that `survivors.py` documents and nothing of rows, scales, Hessians or files. How many lanes a
register has changes no bit: every lane does the same operations in the same order.
"""

from __future__ import annotations

from typing import Any

import llvmlite.binding as llvm
from llvmlite import ir
from numba.core import cgutils, types
from numba.extending import intrinsic

FLOAT, I16, I32, I64 = ir.FloatType(), ir.IntType(16), ir.IntType(32), ir.IntType(64)

WIDTH = 16
"""Nodes handled together, fewer where there are fewer that share no predecessor."""

BLOCK = 16
"""Columns that are decided together. A survivor carries, for every column of its block, what the errors before feed to it."""

TRAIL = 2 * BLOCK
"""f32 of a survivor that move at every step: the feedback to its block's columns, then its errors in the block so far."""

LANES = 16 if llvm.get_host_cpu_features().get("avx512f", False) else 8
"""f32 lanes of one register."""


def block_width(k: int, l: int) -> int:
    """Neighbouring nodes whose costs are computed together: all of them leave one node, or each leaves its own neighbour."""
    nodes, symbols = 1 << (l - k), 1 << k
    return min(WIDTH, nodes if nodes <= symbols else nodes // symbols)


class _Vectors:
    """What all loops share: constants, splats, vector loads."""

    def __init__(self, builder: ir.IRBuilder, lanes: int) -> None:
        self.b, self.lanes = builder, lanes
        self.vec, self.ints = ir.VectorType(FLOAT, lanes), ir.VectorType(I32, lanes)
        self.fma = cgutils.get_or_insert_function(builder.module, ir.FunctionType(self.vec, [self.vec] * 3), f"llvm.fma.v{lanes}f32")

    def const(self, value: int) -> ir.Constant:
        return ir.Constant(I64, value)

    def splat(self, scalar: ir.Value, kind: ir.VectorType) -> ir.Value:
        undefined = ir.Constant(kind, ir.Undefined)
        single = self.b.insert_element(undefined, scalar, ir.Constant(I32, 0))
        return self.b.shuffle_vector(single, undefined, ir.Constant(ir.VectorType(I32, self.lanes), [0] * self.lanes))

    def at(self, pointer: ir.Value, index: ir.Value, kind: ir.VectorType) -> ir.Value:
        return self.b.bitcast(self.b.gep(pointer, [index]), kind.as_pointer())

    def load(self, pointer: ir.Value, index: ir.Value) -> ir.Value:
        return self.b.load(self.at(pointer, index, self.vec), align=4)

    def scalar(self, pointer: ir.Value, index: ir.Value) -> ir.Value:
        return self.b.load(self.b.gep(pointer, [index]))


class _Select(_Vectors):
    """Add-compare-select for one geometry and `rows` rows; a method for each loop level."""

    def __init__(self, builder: ir.IRBuilder, k: int, v: int, l: int, rows: int) -> None:
        self.width = block_width(k, l)
        super().__init__(builder, min(self.width, LANES))
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


class _HandOver(_Vectors):
    """The loop over living nodes: each takes its survivor's trail and adds the step's own error, and what that feeds into the block."""

    def __init__(self, builder: ir.IRBuilder, k: int, v: int, l: int, reach: int) -> None:
        super().__init__(builder, LANES)
        self.k, self.v, self.l, self.reach = k, v, l, reach

    def emit(self, count: ir.Value, arrays: dict[str, ir.Value], column: ir.Value, place: ir.Value) -> None:
        b = self.b
        weights = [self.scalar(arrays["weights"], b.add(column, self.const(i))) for i in range(self.v)]
        near_at = b.mul(column, self.const(self.reach))
        errors_at = b.add(place, self.const(BLOCK))
        with cgutils.for_range(b, count) as loop:
            node = b.zext(self.scalar(arrays["living"], loop.index), I64)
            symbol = b.zext(self.scalar(arrays["chosen"], node), I64)
            state = b.add(b.shl(node, self.const(self.k)), symbol)
            left = b.and_(state, self.const((1 << (self.l - self.k)) - 1))
            width = block_width(self.k, self.l)
            record = b.zext(self.scalar(arrays["records"], node), I64)
            value_at = b.add(record, b.mul(symbol, self.const(self.v * width)))
            errors = [b.fsub(weights[i], self.scalar(arrays["table"], b.add(value_at, self.const(i * width)))) for i in range(self.v)]
            slot = b.zext(self.scalar(arrays["slots"], left), I64)
            b.store(b.trunc(loop.index, I16), b.gep(arrays["next_slots"], [node]))
            b.store(self.scalar(arrays["origin"], slot), b.gep(arrays["next_origin"], [loop.index]))
            b.store(b.trunc(symbol, I16), b.gep(arrays["symbols"], [node]))
            source, target = b.mul(slot, self.const(TRAIL)), b.mul(loop.index, self.const(TRAIL))
            for h in range(0, BLOCK, self.lanes):
                total = self.load(arrays["trail"], b.add(source, self.const(h)))
                for i in range(self.v):
                    row = self.load(arrays["near"], b.add(near_at, self.const(i * self.reach + h)))
                    total = b.call(self.fma, [self.splat(errors[i], self.vec), row, total])
                b.store(total, self.at(arrays["next_trail"], b.add(target, self.const(h)), self.vec), align=4)
            for h in range(BLOCK, TRAIL, self.lanes):
                before = self.load(arrays["trail"], b.add(source, self.const(h)))
                b.store(before, self.at(arrays["next_trail"], b.add(target, self.const(h)), self.vec), align=4)
            for i, error in enumerate(errors):
                b.store(error, b.gep(arrays["next_trail"], [b.add(b.add(target, errors_at), self.const(i))]))


class _Extend(_Vectors):
    """The loop over living nodes at the end of a block: what its errors feed to the columns beyond it."""

    def __init__(self, builder: ir.IRBuilder, delay: int) -> None:
        super().__init__(builder, LANES)
        self.delay, self.reach = delay, BLOCK + delay

    def emit(self, count: ir.Value, arrays: dict[str, ir.Value], column: ir.Value) -> None:
        b = self.b
        zero = ir.Constant(self.vec, [0.0] * self.lanes)
        near_at = b.add(b.mul(column, self.const(self.reach)), self.const(BLOCK))
        with cgutils.for_range(b, count) as loop:
            node = b.zext(self.scalar(arrays["living"], loop.index), I64)
            slot = b.zext(self.scalar(arrays["slots"], node), I64)
            origin = b.zext(self.scalar(arrays["origin"], slot), I64)
            trail, source = b.mul(slot, self.const(TRAIL)), b.mul(origin, self.const(self.delay))
            known = range(BLOCK, self.delay, self.lanes)
            sums = [self.load(arrays["beyond"], b.add(source, self.const(h))) for h in known]
            sums += [zero] * (self.delay // self.lanes - len(sums))
            for j in range(BLOCK):
                error = self.splat(self.scalar(arrays["trail"], b.add(trail, self.const(BLOCK + j))), self.vec)
                rows = [self.load(arrays["near"], b.add(near_at, self.const(j * self.reach + at * self.lanes))) for at in range(len(sums))]
                sums = [b.call(self.fma, [error, row, total]) for row, total in zip(rows, sums, strict=True)]
            target = b.mul(slot, self.const(self.delay))
            for at, total in enumerate(sums):
                b.store(total, self.at(arrays["next_beyond"], b.add(target, self.const(at * self.lanes)), self.vec), align=4)
            for at in range(BLOCK // self.lanes):
                first = sums[at] if self.delay else zero
                b.store(first, self.at(arrays["trail"], b.add(trail, self.const(at * self.lanes)), self.vec), align=4)


class _Aim(_Vectors):
    """The loop over living nodes that puts each survivor's cost and pulls into the front of the next step."""

    def __init__(self, builder: ir.IRBuilder, v: int, plane: int, exact: bool) -> None:
        super().__init__(builder, LANES)
        self.v, self.plane, self.exact = v, plane, exact

    def emit(
        self,
        count: ir.Value,
        arrays: dict[str, ir.Value],
        target_at: ir.Value,
        place: ir.Value,
        metric_at: ir.Value,
        least: ir.Value,
    ) -> None:
        b = self.b
        targets = [self.scalar(arrays["targets"], b.add(target_at, self.const(i))) for i in range(self.v)]
        entries = self.v * self.v if self.exact else 1
        metric = [self.scalar(arrays["metric"], b.add(metric_at, self.const(i))) for i in range(entries)]
        with cgutils.for_range(b, count) as loop:
            node = b.zext(self.scalar(arrays["living"], loop.index), I64)
            slot = b.zext(self.scalar(arrays["slots"], node), I64)
            start = b.add(b.mul(slot, self.const(TRAIL)), place)
            x = [b.fadd(targets[i], self.scalar(arrays["trail"], b.add(start, self.const(i)))) for i in range(self.v)]
            pulls = [self.pull(metric, x, i) for i in range(self.v)]
            power = b.fmul(pulls[0], x[0])
            for i in range(1, self.v):
                power = b.fadd(power, b.fmul(pulls[i], x[i]))
            cost = b.fadd(b.fsub(self.scalar(arrays["cost"], node), least), b.fmul(power, ir.Constant(FLOAT, 0.5)))
            place = b.zext(self.scalar(arrays["places"], node), I64)
            b.store(cost, b.gep(arrays["front"], [place]))
            for i, pull in enumerate(pulls):
                b.store(b.fneg(pull), b.gep(arrays["front"], [b.add(place, self.const((1 + i) * self.plane))]))

    def pull(self, metric: list[ir.Value], x: list[ir.Value], i: int) -> ir.Value:
        if not self.exact:
            return self.b.fmul(metric[0], x[i])
        total = self.b.fmul(metric[i * self.v], x[0])
        for j in range(1, self.v):
            total = self.b.fadd(total, self.b.fmul(metric[i * self.v + j], x[j]))
        return total


class _Least(_Vectors):
    """The least of `count` values, a multiple of the lanes or less than them."""

    def __init__(self, builder: ir.IRBuilder, count: int) -> None:
        super().__init__(builder, min(count, LANES))
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


def _pointers(context: Any, builder: Any, kinds: Any, arrays: Any) -> list[ir.Value]:
    return [context.make_array(kind)(context, builder, value).data for kind, value in zip(kinds, arrays, strict=True)]


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
        half, table, front, best, chosen = _pointers(context, builder, [*sig.args[:2], *sig.args[3:6]], arrays)
        _Select(builder, *constants).emit(half, table, arguments[2], front, best, chosen)
        return context.get_dummy_value()

    return signature, generate


HANDED = ("living", "chosen", "records", "table", "weights", "near", "slots", "next_slots", "trail", "next_trail", "origin", "next_origin",
          "symbols")  # fmt: skip


@intrinsic(prefer_literal=True)
def hand_over(
    typing_context: Any,
    count: Any,
    living: Any,
    chosen: Any,
    records: Any,
    table: Any,
    weights: Any,
    near: Any,
    slots: Any,
    next_slots: Any,
    trail: Any,
    next_trail: Any,
    origin: Any,
    next_origin: Any,
    symbols: Any,
    column: Any,
    place: Any,
    k: Any,
    v: Any,
    l: Any,
    reach: Any,
) -> Any:
    """For each of the first `count` nodes n of `living`, the q-th, reached from p by `chosen`[n] with values c and errors e = w − c:

    next_slots[n] = q, and with o = slots[p]: next_trail[q][h] = trail[o][h] + Σ_i e_i · near[column + i][h] for h < BLOCK;
    next_trail[q][BLOCK:] = trail[o][BLOCK:] but for the errors themselves from BLOCK + place on; next_origin[q] = origin[o]; symbols[n] =
    chosen[n]. `living`, `records`, `chosen`: u32/i32; `trail`s: f32 [slots · TRAIL]; `near`: f32 [columns · reach]; `slots`, `origin`s,
    `symbols`: u16; `weights`: f32, read from `column`; `place`: its place in the block. `k`, `v`, `l`, `reach` are compile-time constants.
    """
    constants = [argument.literal_value for argument in (k, v, l, reach)]
    arrays = (living, chosen, records, table, weights, near, slots, next_slots, trail, next_trail, origin, next_origin, symbols)
    signature = types.void(count, *arrays, column, place, k, v, l, reach)

    def generate(context: Any, builder: Any, sig: Any, arguments: Any) -> Any:
        pointers = _pointers(context, builder, sig.args[1:14], arguments[1:14])
        _HandOver(builder, *constants).emit(arguments[0], dict(zip(HANDED, pointers, strict=True)), arguments[14], arguments[15])
        return context.get_dummy_value()

    return signature, generate


EXTENDED = ("living", "near", "slots", "trail", "beyond", "next_beyond", "origin")


@intrinsic(prefer_literal=True)
def extend_survivors(
    typing_context: Any,
    count: Any,
    living: Any,
    near: Any,
    slots: Any,
    trail: Any,
    beyond: Any,
    next_beyond: Any,
    origin: Any,
    column: Any,
    delay: Any,
) -> Any:
    """At the end of the block that begins at `column`, for each of the first `count` nodes n of `living`, q = slots[n], block errors e:

    next_beyond[q][h] = beyond[origin[q]][h + BLOCK] + Σ_j e_j · near[column + j][BLOCK + h] for h < delay, beyond being 0 past its end;
    trail[q][:BLOCK] = next_beyond[q][:BLOCK], the feedback of the block that begins (0 without a delay). `beyond`s: f32 [slots · delay];
    the others as in `hand_over`. `delay` is a compile-time constant.
    """
    length = delay.literal_value
    signature = types.void(count, living, near, slots, trail, beyond, next_beyond, origin, column, delay)

    def generate(context: Any, builder: Any, sig: Any, arguments: Any) -> Any:
        pointers = dict(zip(EXTENDED, _pointers(context, builder, sig.args[1:8], arguments[1:8]), strict=True))
        _Extend(builder, length).emit(arguments[0], pointers, arguments[8])
        return context.get_dummy_value()

    return signature, generate


AIMED = ("living", "slots", "trail", "targets", "metric", "cost", "places", "front")


@intrinsic(prefer_literal=True)
def aim_survivors(
    typing_context: Any,
    count: Any,
    living: Any,
    slots: Any,
    trail: Any,
    targets: Any,
    metric: Any,
    cost: Any,
    places: Any,
    front: Any,
    target_at: Any,
    place: Any,
    metric_at: Any,
    least: Any,
    v: Any,
    plane: Any,
    exact: Any,
) -> Any:
    """For each of the first `count` nodes n of `living`, with x = targets[target_at:][:v] + trail[slots[n]][place:][:v]:

    front[places[n]] = cost[n] − least + ½ xᵀDx and front[places[n] + (1 + i)·plane] = −(Dx)_i. D: f32 [v, v] from `metric_at` of
    `metric`, or where `exact` is 0 its first entry times the identity. `v`, `plane`, `exact` are compile-time constants.
    """
    depth, distance, whole = (argument.literal_value for argument in (v, plane, exact))
    arrays = (living, slots, trail, targets, metric, cost, places, front)
    signature = types.void(count, *arrays, target_at, place, metric_at, least, v, plane, exact)

    def generate(context: Any, builder: Any, sig: Any, arguments: Any) -> Any:
        pointers = dict(zip(AIMED, _pointers(context, builder, sig.args[1:9], arguments[1:9]), strict=True))
        _Aim(builder, depth, distance, bool(whole)).emit(arguments[0], pointers, *arguments[9:13])
        return context.get_dummy_value()

    return signature, generate


@intrinsic(prefer_literal=True)
def least_of(typing_context: Any, values: Any, count: Any) -> Any:
    """The least of the first `count` of `values`: f32, none NaN. `count`, a power of two, is a compile-time constant."""
    size = count.literal_value
    signature = types.float32(values, count)

    def generate(context: Any, builder: Any, sig: Any, arguments: Any) -> Any:
        (pointer,) = _pointers(context, builder, sig.args[:1], arguments[:1])
        return _Least(builder, size).emit(pointer)

    return signature, generate
