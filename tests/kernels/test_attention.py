"""Paged attention on the CPU: the bits of its oracle, the formula in f64, and no bit that a tile, split, block or neighbour changes."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pytest
from numpy.typing import NDArray

from arctool.kernels.cpu import attention as kernel
from arctool.kernels.cpu import attention_work
from arctool.kernels.cpu.attention_ir import KvKind
from arctool.kernels.cpu.attention_work import units_of
from arctool.kernels.cpu.exp_ir import exp_oracle
from arctool.kernels.cpu.ir import fma_oracle
from arctool.kernels.cpu.program import Program
from arctool.quant.bf16 import to_bf16, widen

Array = NDArray[np.float32]


@dataclass(frozen=True)
class Sequence:
    """Keys and values f32 [tokens, kv_heads, dim] of one sequence, and its block table."""

    keys: Array
    values: Array
    blocks: list[int]


def sequence(tokens: int, kv_heads: int, dim: int, blocks: list[int], seed: int = 0) -> Sequence:
    generator = np.random.default_rng(seed)
    keys, values = (generator.standard_normal((tokens, kv_heads, dim)).astype(np.float32) for _ in range(2))
    return Sequence(keys, values, blocks)


def paged(sequences: list[Sequence], block_size: int, kind: KvKind) -> tuple[NDArray, NDArray]:
    """The two stores with the sequences in their blocks and NaN everywhere else."""
    kv_heads, dim = sequences[0].keys.shape[1:]
    count, pitch = 1 + max(max(s.blocks) for s in sequences), kernel.value_pitch(dim)
    keys = np.full((count, kv_heads, block_size // 16, dim, 16), np.nan, np.float32)
    values = np.full((count, kv_heads, block_size, pitch), np.nan, np.float32)
    for s in sequences:
        for token, (key, value) in enumerate(zip(s.keys, s.values, strict=True)):
            block, inside = s.blocks[token // block_size], token % block_size
            keys[block, :, inside // 16, :, inside % 16] = key
            values[block, :, inside, :dim] = value
    return (to_bf16(keys), to_bf16(values)) if kind == "bf16" else (keys, values)


def attend(
    queries: list[tuple[Sequence, int, Array]], window: int = 0, *, block_size: int = 16, kind: KvKind = "f32", splits: bool = True
) -> list[Array]:
    """Attention of spans in one batch: (sequence, first position, q f32 [tokens, heads, dim]) each."""
    heads, dim = queries[0][2].shape[1:]
    keys, values = paged([s for s, _, _ in queries], block_size, kind)
    counts = [len(q) for _, _, q in queries]
    starts = [sum(counts[:i]) for i in range(len(counts))]
    q = np.concatenate([q for _, _, q in queries]).reshape(sum(counts), -1)
    out = np.full(q.shape, np.nan, np.float32)
    tables = np.array([block for s, _, _ in queries for block in s.blocks], np.int64)
    begins = [sum(len(s.blocks) for s, _, _ in queries[:i]) for i in range(len(queries))]
    units, joins = units_of(starts, [first for _, first, _ in queries], counts, begins, [window if splits else 1])
    kv_heads = keys.shape[1]
    share = heads // kv_heads
    parts = np.full(attention_work.MOST_PARTS * kv_heads * kernel.part_floats(dim, share) // 64, np.nan, np.float32)
    program = Program(np.array([len(units), len(joins)], np.int64))
    operands = np.zeros(kernel.OPERANDS, np.int64)
    for field, value in (
        (kernel.Q, q.ctypes.data), (kernel.Q_PITCH, q.shape[1]), (kernel.OUT, out.ctypes.data), (kernel.OUT_PITCH, q.shape[1]),
        (kernel.KEYS, keys.ctypes.data), (kernel.VALUES, values.ctypes.data), (kernel.VALUE_PITCH, kernel.value_pitch(dim)),
        (kernel.BLOCK_SIZE, block_size), (kernel.HEADS, heads), (kernel.KV_HEADS, kv_heads), (kernel.DIM, dim), (kernel.WINDOW, window),
        (kernel.UNITS, units.ctypes.data), (kernel.TABLES, tables.ctypes.data), (kernel.PARTS, parts.ctypes.data), (kernel.COUNT, 0),
    ):  # fmt: skip
        operands[field] = value
    operands[kernel.SCALE : kernel.SCALE + 1].view(np.float32)[0] = np.float32(dim**-0.5)
    join = operands.copy()
    join[kernel.UNITS], join[kernel.COUNT] = joins.ctypes.data, 1
    scratch = 4 * kernel.scratch_floats(dim, share)
    program.add(kernel.attention(kind), operands, scratch=scratch)
    program.add(kernel.join_parts, join, scratch=scratch)
    program.seal()
    program.run()
    assert (
        not splits
        or window
        or len(joins) == sum(n == 1 and first >= attention_work.SPLIT_FROM for (_, first, _), n in zip(queries, counts, strict=True))
    )
    return [out[start : start + n].reshape(n, heads, dim) for start, n in zip(starts, counts, strict=True)]


def queries(tokens: int, heads: int, dim: int, seed: int = 9) -> Array:
    return np.random.default_rng(seed).standard_normal((tokens, heads, dim)).astype(np.float32)


def oracle(s: Sequence, position: int, q: Array, window: int) -> Array:
    """One query f32 [heads, dim], operation by operation."""
    heads, dim = q.shape
    out = np.empty((heads, dim), np.float32)
    scale = np.float32(dim**-0.5)
    for head in range(heads):
        group = head // (heads // s.keys.shape[1])
        top, total, mixed = np.float32(-np.inf), np.float32(0), np.zeros(dim, np.float32)
        oldest = max(0, position - window + 1) if window else 0
        for base in range(oldest // kernel.KEY_CHUNK * kernel.KEY_CHUNK, position + 1, kernel.KEY_CHUNK):
            first, last = max(base, oldest), min(base + kernel.KEY_CHUNK, position + 1)
            scores = np.zeros(last - first, np.float32)
            for d in range(dim):
                scores = fma_oracle(np.full(scores.shape, q[head, d] * scale, np.float32), s.keys[first:last, group, d], scores)
            chunk_top = scores.max()
            lanes = np.zeros(-(-(last - base) // 16) * 16, np.float32)
            lanes[first - base : last - base] = exp_oracle(scores - chunk_top)
            sums = np.zeros(16, np.float32)
            for start in range(0, len(lanes), 16):
                sums = sums + lanes[start : start + 16]
            while len(sums) > 1:
                sums = sums[: len(sums) // 2] + sums[len(sums) // 2 :]
            piece = np.zeros(dim, np.float32)
            for j in range(first, last):
                piece = fma_oracle(np.full(dim, lanes[j - base], np.float32), s.values[j, group], piece)
            higher = max(top, chunk_top)
            keep, add = (exp_oracle(np.array([value - higher], np.float32))[0] for value in (top, chunk_top))
            mixed, total, top = mixed * keep + piece * add, total * keep + sums[0] * add, higher
        out[head] = mixed / total
    return out


def formula(s: Sequence, position: int, q: Array, window: int) -> NDArray[np.float64]:
    """The same in f64, by definition."""
    oldest = max(0, position - window + 1) if window else 0
    group = np.arange(q.shape[0]) // (q.shape[0] // s.keys.shape[1])
    keys, values = (t[oldest : position + 1].astype(np.float64)[:, group] for t in (s.keys, s.values))
    scores = np.einsum("hd,khd->hk", q.astype(np.float64), keys) / np.sqrt(q.shape[1])
    weights = np.exp(scores - scores.max(1, keepdims=True))
    return np.einsum("hk,khd->hd", weights / weights.sum(1, keepdims=True), values)


def test_exp_is_within_two_ulp_and_the_kernels_bits_are_the_oracles() -> None:
    x = np.concatenate([np.linspace(-90, 88, 40001), -np.logspace(-30, 1, 500)]).astype(np.float32)
    truth = np.exp(x.astype(np.float64))
    got = exp_oracle(x)
    normal = x >= -87
    assert (np.abs(got[normal] - truth[normal]) <= 2 * np.spacing(truth[normal].astype(np.float32))).all()
    assert not got[~normal].any()
    assert exp_oracle(np.array([-np.inf, 0.0, -0.0], np.float32)).tolist() == [0.0, 1.0, 1.0]


@pytest.mark.parametrize("window", [0, 1, 40, 300])
@pytest.mark.parametrize(("heads", "kv_heads", "dim"), [(3, 1, 64), (4, 2, 20), (2, 2, 128)])
def test_a_querys_bits_are_the_oracles(heads: int, kv_heads: int, dim: int, window: int) -> None:
    s = sequence(560, kv_heads, dim, list(np.random.default_rng(1).permutation(35)))
    q = queries(560, heads, dim)
    for position in (0, 15, 16, 255, 256, 300, 559):
        [got] = attend([(s, position, q[position : position + 1])], window)
        np.testing.assert_array_equal(got[0], oracle(s, position, q[position], window))


@pytest.mark.parametrize("window", [0, 1, 2, 15, 16, 17, 255, 256, 257, 511])
@pytest.mark.parametrize(("heads", "kv_heads", "dim"), [(9, 3, 64), (7, 1, 16), (8, 8, 80)])
def test_attention_is_its_formula_for_every_window_and_shape(heads: int, kv_heads: int, dim: int, window: int) -> None:
    s = sequence(530, kv_heads, dim, list(range(34))[::-1])
    q = queries(530, heads, dim)
    [got] = attend([(s, 0, q)], window)
    for position in (0, 1, 14, 15, 16, 17, 254, 255, 256, 257, 400, 511, 512, 529):
        np.testing.assert_allclose(got[position], formula(s, position, q[position], window), atol=3e-6)


@pytest.mark.parametrize("window", [0, 50, 256])
@pytest.mark.parametrize("kind", ["f32", "bf16"])
def test_neither_tiles_nor_blocks_nor_neighbours_change_a_bit(kind: KvKind, window: int) -> None:
    lengths = [400, 37, 1]
    found = {}
    for block_size in (16, 32, 64):
        order = np.random.default_rng(block_size).permutation(200).tolist()
        many = [sequence(n, 2, 24, order[40 * i : 40 * i + 40], seed=i) for i, n in enumerate(lengths)]
        asked = [(s, 0, queries(n, 6, 24, seed=i)) for i, (s, n) in enumerate(zip(many, lengths, strict=True))]
        found[block_size] = attend(asked, window, block_size=block_size, kind=kind)
    whole = found[16]
    assert len(np.unique(whole[0])) > 10000
    for other in found.values():
        for a, b in zip(other, whole, strict=True):
            np.testing.assert_array_equal(a, b)
    s, _, q = asked[0]
    for first, last in [(0, 1), (3, 20), (255, 256), (256, 300), (399, 400), (100, 117)]:
        [part] = attend([(s, first, q[first:last])], window, block_size=64, kind=kind)
        np.testing.assert_array_equal(part, whole[0][first:last])


def test_chunks_that_go_to_several_lanes_give_the_bits_of_one_lane() -> None:
    length = attention_work.SPLIT_FROM + 700
    s = sequence(length, 2, 32, list(range(-(-length // 16))))
    q = queries(2, 6, 32)
    for position in (attention_work.SPLIT_FROM - 1, attention_work.SPLIT_FROM, length - 1):
        [apart] = attend([(s, position, q[:1])], splits=True)
        [together] = attend([(s, position, q[:1])], splits=False)
        np.testing.assert_array_equal(apart, together)
        np.testing.assert_allclose(apart[0], formula(s, position, q[0], 0), atol=3e-6)


def test_a_bf16_cache_is_read_as_the_numbers_that_it_holds() -> None:
    s = sequence(70, 1, 16, list(range(5)))
    rounded = Sequence(widen(to_bf16(s.keys)), widen(to_bf16(s.values)), s.blocks)
    q = queries(70, 2, 16)
    [got], [want] = attend([(s, 0, q)], kind="bf16"), attend([(rounded, 0, q)])
    np.testing.assert_array_equal(got, want)


def test_work_is_cut_by_tiles_and_only_long_contexts_of_single_queries_are_split() -> None:
    long = attention_work.SPLIT_FROM
    units, splits = units_of([0, 40, 41, 42], [0, 7, long, long - 1], [40, 1, 1, 1], [0, 3, 5, 90], [0])
    chunks = long // kernel.KEY_CHUNK + 1
    assert units.tolist() == [
        [0, 16, 0, 0, -1, 0], [16, 16, 16, 0, -1, 0], [32, 8, 32, 0, -1, 0], [40, 1, 7, 3, -1, 0],
        *([41, 1, long, 5, chunk, chunk] for chunk in range(chunks)),
        [42, 1, long - 1, 90, -1, 0],
    ]  # fmt: skip
    assert splits.tolist() == [[41, 0, chunks]]
    assert not len(units_of([0], [long], [1], [0], [128])[1]), "a window needs few chunks"
    spans = attention_work.MOST_SPLIT
    far = kernel.KEY_CHUNK * (attention_work.MOST_PARTS // (spans - 3))
    units, splits = units_of(range(spans), [far] * spans, [1] * spans, [0] * spans, [0])
    fit = attention_work.MOST_PARTS // (far // kernel.KEY_CHUNK + 1)
    assert 0 < fit < spans
    assert len(splits) == fit
    assert (units[:, kernel.CHUNK] == -1).sum() == spans - fit
    crowd = spans + 1
    assert not len(units_of(range(crowd), [long] * crowd, [1] * crowd, [0] * crowd, [0])[1]), "many spans keep all lanes busy anyway"
