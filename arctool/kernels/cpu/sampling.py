"""Rows of logits to tokens, in parallel over rows: one pass for parameters of any mix, without a sort of the vocabulary.

Order of operations: log-probabilities (of the raw logits), mask, banned tokens, bias, repetition penalty, presence and frequency
penalties, temperature, top-k, typical, top-p, min-p, draw. Arithmetic is f64, and every sum of a row is taken in an order that the row
alone decides. Among equals the lower token id comes first, in every step. `run/sampling/oracle.py` is the definition.

Filters keep the *best* tokens up to a count or to a mass. Best-first order is the order of costs ≥ 0 (the distance to the best logit,
or from the typical surprise), and the place where a sum of weights reaches its limit is found by descending through the costs' bits:
a histogram of the weights over 11 bits, then the one bucket that holds the place, and so on. That is linear in the number of tokens.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from numba import prange
from numpy.typing import NDArray

from arctool.kernels.cpu.jit import jit

SETTINGS = (
    "temperature",
    "top_k",
    "top_p",
    "min_p",
    "typical_p",
    "repetition_penalty",
    "presence_penalty",
    "frequency_penalty",
)
"""The columns of `settings`."""
TEMPERATURE, TOP_K, TOP_P, MIN_P, TYPICAL_P, REPETITION, PRESENCE, FREQUENCY = range(len(SETTINGS))

NOT_FINITE = -1
"""In place of a token: the row has a NaN or an infinity."""
NO_TOKEN = -2
"""In place of a token: mask and banned tokens leave none."""

FEW = 32
"""Below so many tokens they are put in order one by one."""
DIGIT = 11
EXPONENT = np.int32(0x7F800000)
REST = np.int32(0x7FFFFFFF)


def sample_rows(
    logits: NDArray[np.float32],
    width: int,
    settings: NDArray[np.float64],
    seeds: NDArray[np.uint64],
    positions: NDArray[np.uint64],
    masks: NDArray[np.uint32],
    mask_of: NDArray[np.int64],
    banned: tuple[NDArray[np.int64], NDArray[np.int64]],
    bias: tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.float64]],
    seen: tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.int64], NDArray[np.bool_]],
    tops: NDArray[np.int64],
) -> tuple[NDArray[np.int64], NDArray[np.float64], NDArray[np.int64], NDArray[np.float64]]:
    """One token for every row of `logits`: f32 [rows, ≥ width], of which the first `width` columns count.

    settings: f64 [rows, 8]; seeds, positions: [rows]; masks: one bit for each token, [masked rows, ≥ ⌈width / 32⌉], and mask_of [rows] says
    which belongs to a row (−1: none). Lists of a row stand behind one another, with their starts [rows + 1] first: banned (starts, ids);
    bias (starts, ids, additions); seen (starts, ids, how often in the output, whether in the prompt). tops: alternatives to
    report, −1 for no log-probabilities, [rows].

    Returns tokens [rows], or NOT_FINITE, or NO_TOKEN; the token's log-probability [rows]; the best tokens and theirs [rows, max(tops)].
    """
    rows = logits.shape[0]
    tokens = np.empty(rows, np.int64)
    token_logs = np.zeros(rows)
    most = max(int(tops.max(initial=0)), 0)
    best = np.zeros((rows, most), np.int64)
    best_logs = np.zeros((rows, most))
    _rows(
        np.ascontiguousarray(logits),
        width,
        settings,
        seeds,
        positions,
        masks,
        mask_of,
        *banned,
        *bias,
        *seen,
        tops,
        tokens,
        token_logs,
        best,
        best_logs,
    )
    return tokens, token_logs, best, best_logs


@jit(parallel=True)
def _rows(
    logits: Any,
    width: int,
    settings: Any,
    seeds: Any,
    positions: Any,
    masks: Any,
    mask_of: Any,
    banned_at: Any,
    banned: Any,
    bias_at: Any,
    bias_ids: Any,
    bias: Any,
    seen_at: Any,
    seen_ids: Any,
    counts: Any,
    in_prompt: Any,
    tops: Any,
    tokens: Any,
    token_logs: Any,
    best: Any,
    best_logs: Any,
) -> None:
    for r in prange(logits.shape[0]):
        row = logits[r, :width]
        at = _argmax(row)
        if at < 0:
            tokens[r] = NOT_FINITE
            continue
        s = settings[r]
        ban = banned[banned_at[r] : banned_at[r + 1]]
        bias_id = bias_ids[bias_at[r] : bias_at[r + 1]]
        penalised = s[REPETITION] != 1.0 or s[PRESENCE] != 0.0 or s[FREQUENCY] != 0.0
        token = at
        if s[TEMPERATURE] > 0.0 or mask_of[r] >= 0 or len(ban) > 0 or len(bias_id) > 0 or penalised:
            adjusted = np.empty(width)
            for i in range(width):
                adjusted[i] = row[i]
            if mask_of[r] >= 0:
                _mask(adjusted, masks[mask_of[r]])
            for i in ban:
                adjusted[i] = -np.inf
            for i in range(len(bias_id)):
                adjusted[bias_id[i]] += bias[bias_at[r] + i]
            if penalised:
                first, last = seen_at[r], seen_at[r + 1]
                _penalise(adjusted, s, seen_ids[first:last], counts[first:last], in_prompt[first:last])
            token = _choose(adjusted, s, seeds[r], positions[r])
        tokens[r] = token
        if token >= 0 and tops[r] >= 0:
            token_logs[r] = _logprobs(row, row[at], token, tops[r], best[r], best_logs[r])


@jit()
def _argmax(row: Any) -> int:
    """The first of the greatest, or −1 if any is not finite. In integers, so that the machine takes several at a time."""
    bits = row.view(np.int32)
    strange = np.int32(0)
    high = np.int32(-(2**31))
    for i in range(len(bits)):
        b = bits[i]
        strange |= np.int32((b & EXPONENT) == EXPONENT)
        # In this form whole numbers have the order of the floats that they came from.
        high = max(high, np.int32(b ^ ((b >> np.int32(31)) & REST)))
    if strange != 0:
        return -1
    at = 0
    while np.int32(bits[at] ^ ((bits[at] >> np.int32(31)) & REST)) != high:
        at += 1
    if row[at] == 0.0:  # −0 is as great as 0
        at = 0
        while row[at] != 0.0:
            at += 1
    return at


@jit()
def _mask(adjusted: Any, mask: Any) -> None:
    for i in range(len(adjusted)):
        if (mask[i >> 5] >> np.uint32(i & 31)) & np.uint32(1) == 0:
            adjusted[i] = -np.inf


@jit()
def _penalise(adjusted: Any, s: Any, ids: Any, counts: Any, in_prompt: Any) -> None:
    for j in range(len(ids)):
        i = ids[j]
        if i >= len(adjusted):  # a prompt may hold tokens that are never chosen
            continue
        x = adjusted[i]
        if s[REPETITION] != 1.0 and (counts[j] > 0 or in_prompt[j]):
            x = min(x / s[REPETITION], 1e300) if x > 0.0 else x * s[REPETITION]
        if counts[j] > 0:
            x -= s[PRESENCE] + s[FREQUENCY] * counts[j]
        adjusted[i] = x


@jit()
def _choose(adjusted: Any, s: Any, seed: Any, position: Any) -> int:
    """The token for adjusted logits f64 [width], −inf for those that may not be chosen."""
    width = len(adjusted)
    high = -np.inf
    at = NO_TOKEN
    for i in range(width):
        if adjusted[i] > high:
            high = adjusted[i]
            at = i
    if at < 0 or s[TEMPERATURE] == 0.0:
        return at
    ids, costs = np.empty(width, np.int64), np.empty(width)
    count = 0
    for i in range(width):
        if adjusted[i] > -np.inf:
            ids[count] = i
            costs[count] = abs(high - adjusted[i]) / s[TEMPERATURE]  # −0 − 0 is −0, whose bits come last
            count += 1
    ids, costs = ids[:count], costs[:count]
    top_k = 0.0 < s[TOP_K] < width
    if top_k and s[TOP_K] < count:
        ones = np.ones(count)
        count = _keep(costs, _place(costs, ones, s[TOP_K], False), ids, costs, ones)
        ids, costs = ids[:count], costs[:count]
    weights = np.empty(count)
    for i in range(count):
        weights[i] = math.exp(-costs[i])
    if s[TYPICAL_P] < 1.0:
        distances = _distances(costs, weights)
        count = _keep(distances, _place(distances, weights, s[TYPICAL_P] * _sum(weights), False), ids, costs, weights)
        ids, costs, weights = ids[:count], costs[:count], weights[:count]
    if s[TOP_P] < 1.0:
        count = _keep(costs, _place(costs, weights, s[TOP_P] * _sum(weights), False), ids, costs, weights)
        ids, costs, weights = ids[:count], costs[:count], weights[:count]
    if s[MIN_P] > 0.0:
        count = _near(-math.log(s[MIN_P]), ids, costs, weights)
        ids, costs, weights = ids[:count], costs[:count], weights[:count]
    target = _uniform(seed, position) * _sum(weights)
    if top_k or s[TYPICAL_P] < 1.0 or s[TOP_P] < 1.0:
        return ids[_place(costs, weights, target, True)]
    return ids[_walk(weights, np.arange(count), count, 0.0, target, True)]


@jit()
def _sum(weights: Any) -> float:
    total = 0.0
    for w in weights:
        total += w
    return total


@jit()
def _distances(costs: Any, weights: Any) -> Any:
    """| −log p − H |, with H the entropy. As −log p is the cost plus a constant, so is H the mean cost plus the same one."""
    mean = 0.0
    for i in range(len(costs)):
        if weights[i] > 0.0:
            mean += weights[i] * costs[i]
    return np.abs(costs - mean / _sum(weights))


@jit()
def _keep(order: Any, place: int, ids: Any, costs: Any, weights: Any) -> int:
    """Move what stands best-first up to `place`, itself included, to the front; returns how many that are. `order` may be `costs`."""
    last = order[place]
    count = 0
    for i in range(len(ids)):
        if order[i] < last or (order[i] == last and i <= place):
            ids[count], costs[count], weights[count] = ids[i], costs[i], weights[i]
            count += 1
    return count


@jit()
def _near(distance: float, ids: Any, costs: Any, weights: Any) -> int:
    """Move what lies within `distance` of the least cost to the front; returns how many that are."""
    least = costs.min()
    count = 0
    for i in range(len(ids)):
        if costs[i] - least <= distance:
            ids[count], costs[count], weights[count] = ids[i], costs[i], weights[i]
            count += 1
    return count


@jit()
def _place(order: Any, weights: Any, limit: float, strict: bool) -> int:
    """Where the running sum of weights, taken best-first, first reaches `limit` (strict: exceeds it).

    order: f64 ≥ 0, the least is the best, the first among equals. Where rounding keeps the sum below `limit`: the last place with a weight.
    """
    bits = order.view(np.uint64)
    active = np.arange(len(order))
    count = len(order)
    before = 0.0
    shift = 64 - DIGIT
    sums = np.empty(1 << DIGIT)
    while count > FEW and shift > -DIGIT:
        digit, mask = np.uint64(max(shift, 0)), np.uint64((1 << DIGIT) - 1)
        sums[:] = 0.0
        for a in range(count):
            i = active[a]
            sums[np.int64((bits[i] >> digit) & mask)] += weights[i]
        chosen = -1
        reached = before
        for d in range(len(sums)):
            if sums[d] > 0.0:
                before, reached, chosen = reached, reached + sums[d], d
                if reached > limit or (reached == limit and not strict):
                    break
        left = 0
        for a in range(count):
            i = active[a]
            if np.int64((bits[i] >> digit) & mask) == chosen:
                active[left] = i
                left += 1
        count = left
        shift -= DIGIT
    if count <= FEW:
        _insertion_sort(order, active, count)
    return _walk(weights, active, count, before, limit, strict)


@jit()
def _insertion_sort(order: Any, active: Any, count: int) -> None:
    for a in range(1, count):
        i = active[a]
        b = a
        while b > 0 and order[active[b - 1]] > order[i]:
            active[b] = active[b - 1]
            b -= 1
        active[b] = i


@jit()
def _walk(weights: Any, active: Any, count: int, before: float, limit: float, strict: bool) -> int:
    last = active[0]
    for a in range(count):
        if weights[active[a]] > 0.0:
            last = active[a]
            before += weights[last]
            if before > limit or (before == limit and not strict):
                break
    return last


@jit()
def _logprobs(row: Any, high: Any, token: int, top: int, best: Any, logs: Any) -> float:
    """The log-softmax of `token`; the `top` best tokens and theirs into best, logs [≥ top]."""
    total = 0.0
    for x in row:
        total += math.exp(np.float64(x) - high)
    log_total = math.log(total)
    top = min(top, len(row))
    count = 0
    for i in range(len(row)):
        if count == top and (top == 0 or row[i] <= row[best[top - 1]]):
            continue
        count = min(count + 1, top)
        b = count - 1
        while b > 0 and row[best[b - 1]] < row[i]:
            best[b] = best[b - 1]
            b -= 1
        best[b] = i
    for b in range(top):
        logs[b] = np.float64(row[best[b]]) - high - log_total
    return np.float64(row[token]) - high - log_total


@jit()
def _times(a: Any, b: Any) -> Any:
    """The upper and the lower half of a 128-bit product."""
    low, half = np.uint64(0xFFFFFFFF), np.uint64(32)
    a0, a1, b0, b1 = a & low, a >> half, b & low, b >> half
    middle = a1 * b0 + ((a0 * b0) >> half)
    other = a0 * b1 + (middle & low)
    return a1 * b1 + (middle >> half) + (other >> half), a * b


@jit()
def _uniform(seed: Any, position: Any) -> float:
    """`run/sampling/noise.uniform` on its stream 0: Philox-4x64-10 with its counter stepped before the draw, as numpy does."""
    c0, c1, c2, c3 = position + np.uint64(1), np.uint64(0), np.uint64(0), np.uint64(0)
    k0, k1 = seed, np.uint64(0)
    for _ in range(10):
        high, low = _times(np.uint64(0xD2E7470EE14C6C93), c0)
        other_high, other_low = _times(np.uint64(0xCA5A826395121157), c2)
        c0, c1, c2, c3 = other_high ^ c1 ^ k0, other_low, high ^ c3 ^ k1, low
        k0, k1 = k0 + np.uint64(0x9E3779B97F4A7C15), k1 + np.uint64(0xBB67AE8584CAA73B)
    return np.float64(c0 >> np.uint64(11)) * 2.0**-53
