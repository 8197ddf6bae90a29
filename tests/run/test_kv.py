"""Blocks are owned exactly as often as tables say, and the cache gives back what was written."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tiny_models import DirectorySource

from arctool.errors import UsageError
from arctool.run.kv.blocks import BlockPool, BlockTable
from arctool.run.kv.cache import KVCache, plan_cache
from arctool.run.kv.memory import parse_memory
from arctool.run.kv.paging import Paging


@given(st.lists(st.tuples(st.sampled_from(["allocate", "release", "share", "keep"]), st.integers(0, 4), st.integers(1, 6))))
def test_any_order_of_taking_sharing_and_releasing_keeps_the_books(actions: list[tuple[str, int, int]]) -> None:
    forgotten: list[int] = []
    pool = BlockPool(20, forgotten.append)
    tables = [BlockTable(4) for _ in range(5)]
    kept: set[int] = set()
    for action, which, count in actions:
        table = tables[which]
        if action == "release":
            pool.release(reversed(table.blocks))
            table.blocks = []
        elif action == "share" and not table.blocks:
            source = tables[(which + 1) % 5].blocks
            pool.share(source)
            table.blocks = list(source)
        elif action == "keep":
            for block in table.blocks[:count]:
                pool.keep(block)
                kept.add(block)
        elif action == "allocate" and count <= pool.available:
            taken = pool.allocate(count)
            assert len(set(taken)) == count
            table.blocks += taken
        kept -= set(forgotten)
        forgotten.clear()
        pool.check(tables)
        assert pool.kept() == kept
    for table in tables:
        pool.release(table.blocks)
    pool.check([])
    assert pool.available == 20
    assert pool.idle == len(kept)


def test_a_shared_block_is_free_only_when_its_last_owner_lets_go() -> None:
    pool = BlockPool(3)
    blocks = pool.allocate(2)
    pool.share(blocks)
    pool.release(blocks)
    assert pool.free == 1
    pool.release(blocks)
    assert pool.free == 3


def test_free_blocks_go_first_then_the_longest_idle() -> None:
    forgotten: list[int] = []
    pool = BlockPool(4, forgotten.append)
    first, second, third, last = pool.allocate(4)
    for block in (first, second, third):
        pool.keep(block)
    pool.release([second])
    pool.release([third, first])
    pool.release([last])
    assert (pool.free, pool.idle, pool.available) == (1, 3, 4)
    assert pool.allocate(3) == [last, second, third]
    assert forgotten == [second, third]
    assert pool.is_idle(first)


def test_an_idle_block_that_is_used_again_is_no_longer_the_first_to_go() -> None:
    pool = BlockPool(3)
    blocks = pool.allocate(3)
    for block in blocks:
        pool.keep(block)
    pool.release(blocks)
    pool.share(blocks[:1])
    assert pool.allocate(1) == blocks[1:2]
    pool.release(blocks[:1])
    assert pool.allocate(2) == [blocks[2], blocks[0]]


def test_misuse_of_the_pool_is_an_error_not_a_corruption() -> None:
    pool = BlockPool(2)
    [block] = pool.allocate(1)
    with pytest.raises(RuntimeError, match="asked for 2"):
        pool.allocate(2)
    pool.release([block])
    with pytest.raises(RuntimeError, match="freed twice"):
        pool.release([block])
    with pytest.raises(RuntimeError, match="shared while free"):
        pool.share([block])
    with pytest.raises(RuntimeError, match="kept while nobody owns it"):
        pool.keep(block)


def test_the_checker_sees_a_leak_and_a_stolen_block() -> None:
    pool = BlockPool(4)
    table = BlockTable(4, blocks=pool.allocate(2))
    with pytest.raises(RuntimeError, match="0 owners"):
        pool.check([])
    with pytest.raises(RuntimeError, match="2 owners"):
        pool.check([table, BlockTable(4, blocks=[table.blocks[0]])])


def test_a_lone_sequence_lies_contiguously() -> None:
    paging = Paging(6, 2)
    other, mine = paging.table(), paging.table()
    paging.grow(other, 0, 4)
    paging.release(other)
    paging.grow(mine, 0, 3)
    paging.grow(mine, 3, 9)
    assert mine.blocks == [0, 1, 2, 3, 4]


def test_whole_blocks_are_copied_in_every_layer(llama: DirectorySource) -> None:
    cache = KVCache(llama.config, num_blocks=5, block_size=16)
    for n, store in enumerate((*cache.keys, *cache.values)):
        store.copy_(torch.arange(5).reshape(5, *[1] * (store.ndim - 1)) + 10 * n)
    cache.copy_blocks([(1, 4), (0, 2)])
    for n, store in enumerate((*cache.keys, *cache.values)):
        assert [block.unique().tolist() for block in store] == [[10 * n + b] for b in (0, 1, 0, 3, 1)]


def test_the_cache_is_sized_by_sequences_or_by_bytes(llama: DirectorySource) -> None:
    config = llama.config  # 256 positions, 2 layers × 2 (k, v) × 2 heads × 16 wide × 4 bytes = 512 bytes a token
    assert plan_cache(config, max_seqs=3).num_blocks == 3 * 16
    by_bytes = plan_cache(config, max_seqs=3, kv_memory=512 * 100)
    assert (by_bytes.num_blocks, by_bytes.max_model_len) == (6, 96)
    assert plan_cache(config, max_seqs=1, kv_memory=512 * 100, kv_dtype="bf16").max_model_len == 192
    assert plan_cache(config, max_model_len=33, max_seqs=2).num_blocks == 6


@pytest.mark.parametrize(
    ("options", "field"),
    [
        ({"max_model_len": 257}, "max_model_len"),
        ({"max_model_len": 1}, "max_model_len"),
        ({"max_seqs": 0}, "max_seqs"),
        ({"block_size": 0}, "block_size"),
        ({"kv_memory": 100}, "kv_memory"),
        ({"max_model_len": 256, "kv_memory": 512 * 255}, "kv_memory"),
        ({"kv_memory": -5}, "kv_memory"),
        ({"kv_memory": "-5"}, "kv_memory"),
        ({"kv_memory": "2 gibs"}, "kv_memory"),
        ({"kv_memory": "much"}, "kv_memory"),
        ({"kv_memory": ""}, "kv_memory"),
        ({"kv_memory": "1e9"}, "kv_memory"),
        ({"kv_memory": True}, "kv_memory"),
        ({"kv_memory": "9" * 400}, "kv_memory"),
        ({"kv_dtype": "int3"}, "kv_dtype"),
    ],
)
def test_a_cache_that_cannot_be_is_refused_by_option(llama: DirectorySource, options: dict, field: str) -> None:
    with pytest.raises(UsageError, match=f"^{field}:"):
        plan_cache(llama.config, **options)


@pytest.mark.parametrize(
    ("text", "nbytes"),
    [
        ("512", 512),
        ("512B", 512),
        ("512MB", 512_000_000),
        ("2GiB", 2 << 30),
        ("1.5 gib", 3 << 29),
        (" 3KiB ", 3072),
        ("1tb", 10**12),
        (7, 7),
    ],
)
def test_memory_is_written_as_people_write_it(text: str | int, nbytes: int) -> None:
    assert parse_memory(text, "kv_memory") == nbytes


def test_by_default_many_sequences_share_two_gibibytes_at_most(llama: DirectorySource) -> None:
    assert plan_cache(llama.config).num_blocks == 256 * 16
    wide = replace(llama.config, max_position_embeddings=1 << 20)
    assert plan_cache(wide).num_blocks == (2 << 30) // (512 * 16)
    assert plan_cache(wide, kv_memory="1MiB").max_model_len == 2048
