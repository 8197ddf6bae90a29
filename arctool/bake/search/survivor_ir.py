"""What survivors carry from step to step as vector IR: the hand-over of their trails, what a block feeds beyond itself, their next aims.

It knows three loops over the layouts that `survivors.py` documents and nothing of rows, scales, Hessians or files.
"""

from __future__ import annotations

from typing import Any

from llvmlite import ir
from numba.core import cgutils, types
from numba.extending import intrinsic

from arctool.bake.search import vector_ir
from arctool.bake.search.select_ir import block_width
from arctool.bake.search.vector_ir import FLOAT, I16, I64, Vectors, pointers_of

BLOCK = 16
"""Columns that are decided together. A survivor carries, for every column of its block, what the errors before feed to it."""

TRAIL = 2 * BLOCK
"""f32 of a survivor that move at every step: the feedback to its block's columns, then its errors in the block so far."""


class _HandOver(Vectors):
    """The loop over living nodes: each takes its survivor's trail and adds the step's own error, and what that feeds into the block."""

    def __init__(self, builder: ir.IRBuilder, k: int, v: int, l: int, reach: int) -> None:
        super().__init__(builder, vector_ir.LANES)
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


class _Extend(Vectors):
    """The loop over living nodes at the end of a block: what its errors feed to the columns beyond it."""

    def __init__(self, builder: ir.IRBuilder, delay: int) -> None:
        super().__init__(builder, vector_ir.LANES)
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


class _Aim(Vectors):
    """The loop over living nodes that puts each survivor's cost and pulls into the front of the next step."""

    def __init__(self, builder: ir.IRBuilder, v: int, plane: int, exact: bool) -> None:
        super().__init__(builder, vector_ir.LANES)
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
        pointers = pointers_of(context, builder, sig.args[1:14], arguments[1:14])
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
        pointers = dict(zip(EXTENDED, pointers_of(context, builder, sig.args[1:8], arguments[1:8]), strict=True))
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
        pointers = dict(zip(AIMED, pointers_of(context, builder, sig.args[1:9], arguments[1:9]), strict=True))
        _Aim(builder, depth, distance, bool(whole)).emit(arguments[0], pointers, *arguments[9:13])
        return context.get_dummy_value()

    return signature, generate
