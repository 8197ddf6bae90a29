"""A mixture of experts between its norm and what it adds to the hidden states: routing, grouping, products over the tokens of each expert.

A pair is a token and one of its experts; a token's pairs stand in the order of the experts' numbers, and its outputs are added in that
order. Pairs are laid out by groups. Grouped: one group an expert, whose rows are then expanded once for all its tokens; gathered: one group
a pair. Neither changes a bit.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache

import numpy as np

from arctool.kernels.cpu import linear
from arctool.kernels.cpu.exp_ir import exp_scalar, swiglu
from arctool.kernels.cpu.ir import LANES
from arctool.kernels.cpu.jit import entry
from arctool.kernels.cpu.memory import f32_at, i64_at, take
from arctool.kernels.cpu.stages import TARGET, spread

EXPERT, FIRST, COUNT = range(3)
GROUP = 3
"""A group, i64 [GROUP]: an expert, its first place among the pairs as they are laid out, and how many there are."""

# Operands of `route` and `group`: what both need of a layer.
LOGITS, LOGITS_PITCH, EXPERTS, TOP_K, NORMALISED, CHOSEN, WEIGHTS, PLACES, PAIRS_AT, GROUPS_AT, TOKENS, GROUPS, GATHER = range(13)
ROUTE_OPERANDS = 13


@entry
def route(operands, step, counter, scratch):  # type: ignore[no-untyped-def]  # numba infers the types
    """The experts of each token, CHOSEN i64 and WEIGHTS f32 [tokens, top_k], in the order of their numbers. A task is a token.

    Softmax over all experts; the most probable come first, and of equal ones the lower number; `NORMALISED`: divided by their sum.
    """
    o = i64_at(operands, ROUTE_OPERANDS)
    count, experts, top_k = i64_at(step, o[TOKENS] + 1)[o[TOKENS]], o[EXPERTS], o[TOP_K]
    powers = f32_at(scratch, experts)
    while True:
        token = take(counter)
        if token >= count:
            break
        logits = f32_at(o[LOGITS] + 4 * token * o[LOGITS_PITCH], experts)
        chosen, weights = i64_at(o[CHOSEN] + 8 * token * top_k, top_k), f32_at(o[WEIGHTS] + 4 * token * top_k, top_k)
        top = logits[0]
        for e in range(1, experts):
            top = max(top, logits[e])
        total = np.float32(0.0)
        for e in range(experts):
            powers[e] = exp_scalar(logits[e] - top)
            total += powers[e]
        for e in range(experts):
            powers[e] /= total
        kept = np.float32(0.0)
        for rank in range(top_k):
            best = -1
            for e in range(experts):
                if powers[e] >= 0 and (best < 0 or powers[e] > powers[best]):
                    best = e
            best = max(best, 0)  # NaN everywhere: any expert hands it on
            kept += powers[best]
            place = rank
            while place > 0 and chosen[place - 1] > best:
                chosen[place], weights[place] = chosen[place - 1], weights[place - 1]
                place -= 1
            chosen[place], weights[place] = best, powers[best] if powers[best] >= 0 else np.float32(np.nan)
            powers[best] = -1.0
        if o[NORMALISED]:
            for rank in range(top_k):
                weights[rank] /= kept


@entry
def group(operands, step, counter, scratch):  # type: ignore[no-untyped-def]  # numba infers the types
    """Lay the pairs out: PAIRS_AT i64, the pair at each place; PLACES i64, the place of each pair; GROUPS_AT. One task."""
    if take(counter) > 0:
        return
    o = i64_at(operands, ROUTE_OPERANDS)
    numbers = i64_at(step, max(o[TOKENS], o[GROUPS], o[GATHER]) + 1)
    pairs, experts = numbers[o[TOKENS]] * o[TOP_K], o[EXPERTS]
    chosen, order, places = i64_at(o[CHOSEN], pairs), i64_at(o[PAIRS_AT], pairs), i64_at(o[PLACES], pairs)
    groups = i64_at(o[GROUPS_AT], GROUP * max(pairs, experts))
    if numbers[o[GATHER]]:
        for pair in range(pairs):
            order[pair], places[pair] = pair, pair
            groups[GROUP * pair + EXPERT], groups[GROUP * pair + FIRST], groups[GROUP * pair + COUNT] = chosen[pair], pair, 1
        numbers[o[GROUPS]] = pairs
        return
    sizes, starts = i64_at(scratch, experts), i64_at(scratch + 8 * experts, experts)
    sizes[:] = 0
    for pair in range(pairs):
        sizes[chosen[pair]] += 1
    place = found = 0
    for e in range(experts):
        starts[e] = place
        if sizes[e]:
            groups[GROUP * found + EXPERT], groups[GROUP * found + FIRST], groups[GROUP * found + COUNT] = e, place, sizes[e]
            found += 1
        place += sizes[e]
    for pair in range(pairs):
        e = chosen[pair]
        order[starts[e]], places[pair] = pair, starts[e]
        starts[e] += 1
    numbers[o[GROUPS]] = found


# Operands of the kernels over pairs. TABLE: i64 [experts, TARGETS · TARGET], where each expert's next activations go.
P_X, P_X_PITCH, P_UP, P_UP_PITCH, P_WIDTH, P_TOP_K, P_PAIRS, P_CHOSEN, P_TABLE, P_TARGETS, P_TOKENS = range(11)
PAIR_OPERANDS = 11


@entry
def spread_pairs(operands, step, counter, scratch):  # type: ignore[no-untyped-def]  # numba infers the types
    """Each pair's token, turned for its expert's gate and up, to the pair's place. A task is a place."""
    o = i64_at(operands, PAIR_OPERANDS)
    pairs = i64_at(step, o[P_TOKENS] + 1)[o[P_TOKENS]] * o[P_TOP_K]
    while True:
        place = take(counter)
        if place >= pairs:
            break
        pair = i64_at(o[P_PAIRS] + 8 * place, 1)[0]
        expert = i64_at(o[P_CHOSEN] + 8 * pair, 1)[0]
        targets = o[P_TABLE] + 8 * expert * o[P_TARGETS] * TARGET
        spread(targets, o[P_TARGETS], place, o[P_X] + 4 * (pair // o[P_TOP_K]) * o[P_X_PITCH], o[P_WIDTH])


@entry
def gate_pairs(operands, step, counter, scratch):  # type: ignore[no-untyped-def]  # numba infers the types
    """silu(gate) · up of each pair, turned for its expert's down. P_X: the gates. A task is a place."""
    o = i64_at(operands, PAIR_OPERANDS)
    pairs = i64_at(step, o[P_TOKENS] + 1)[o[P_TOKENS]] * o[P_TOP_K]
    while True:
        place = take(counter)
        if place >= pairs:
            break
        pair = i64_at(o[P_PAIRS] + 8 * place, 1)[0]
        expert = i64_at(o[P_CHOSEN] + 8 * pair, 1)[0]
        gate, up = o[P_X] + 4 * place * o[P_X_PITCH], o[P_UP] + 4 * place * o[P_UP_PITCH]
        swiglu(gate, up, scratch, (o[P_WIDTH] + LANES - 1) // LANES * LANES)
        spread(o[P_TABLE] + 8 * expert * o[P_TARGETS] * TARGET, o[P_TARGETS], place, scratch, o[P_WIDTH])


G_TABLE, G_GROUPS_AT, G_GROUPS, G_ROWS, G_TASK = range(5)
GROUPED_OPERANDS = 5


@cache
def grouped_product(kind: linear.RowKind) -> Callable[[], int]:
    """The kernel of y = x Wᵀ over the groups of a layer's experts; a task is G_TASK rows of one expert and all tokens of its group.

    G_TABLE: i64 [experts], the address of each expert's operands (`linear`), 0 for one whose rows another kernel expands.
    """
    multiply_task = linear.row_task(kind)

    @entry
    def multiply_groups(operands, step, counter, scratch):  # type: ignore[no-untyped-def]  # numba infers the types
        g = i64_at(operands, GROUPED_OPERANDS)
        groups = i64_at(step, g[G_GROUPS] + 1)[g[G_GROUPS]]
        tasks = (g[G_ROWS] + g[G_TASK] - 1) // g[G_TASK]
        while True:
            task = take(counter)
            if task >= groups * tasks:
                break
            here, first = i64_at(g[G_GROUPS_AT] + 8 * GROUP * (task // tasks), GROUP), task % tasks * g[G_TASK]
            address = i64_at(g[G_TABLE] + 8 * here[EXPERT], 1)[0]
            if address:
                o = i64_at(address, linear.OPERANDS)
                x, y = o[linear.X] + 4 * here[FIRST] * o[linear.X_PITCH], o[linear.Y] + 4 * here[FIRST] * o[linear.Y_PITCH]
                multiply_task(o, x, y, first, min(first + g[G_TASK], g[G_ROWS]), here[COUNT], scratch)

    return multiply_groups


C_Y, C_Y_PITCH, C_OUT, C_OUT_PITCH, C_WIDTH, C_TOP_K, C_PLACES, C_WEIGHTS, C_TOKENS = range(9)
COMBINE_OPERANDS = 9


@entry
def combine(operands, step, counter, scratch):  # type: ignore[no-untyped-def]  # numba infers the types
    """out = Σ weight · y over a token's pairs, in the order of its experts' numbers. A task is a token."""
    o = i64_at(operands, COMBINE_OPERANDS)
    count, width = i64_at(step, o[C_TOKENS] + 1)[o[C_TOKENS]], o[C_WIDTH]
    while True:
        token = take(counter)
        if token >= count:
            break
        out = f32_at(o[C_OUT] + 4 * token * o[C_OUT_PITCH], width)
        out[:] = 0.0
        for rank in range(o[C_TOP_K]):
            pair = token * o[C_TOP_K] + rank
            place, weight = i64_at(o[C_PLACES] + 8 * pair, 1)[0], f32_at(o[C_WEIGHTS] + 4 * pair, 1)[0]
            y = f32_at(o[C_Y] + 4 * place * o[C_Y_PITCH], width)
            for i in range(width):
                out[i] += y[i] * weight
