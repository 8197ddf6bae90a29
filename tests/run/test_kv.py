"""Blocks are owned exactly as often as tables say, and the cache gives back what was written."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tiny_models import DirectorySource

from arctool.errors import UsageError
from arctool.run.kv.blocks import BlockAllocator, BlockTable, blocks_for
from arctool.run.kv.cache import KVCache, plan_cache


@given(st.lists(st.tuples(st.sampled_from(["grow", "release", "fork"]), st.integers(0, 4), st.integers(1, 30))))
def test_any_order_of_growing_sharing_and_releasing_keeps_the_books(actions: list[tuple[str, int, int]]) -> None:
    allocator = BlockAllocator(20)
    tables = [BlockTable(4) for _ in range(5)]
    for action, which, tokens in actions:
        table = tables[which]
        if action == "release":
            table.release(allocator)
        elif action == "fork" and not table.blocks:
            source = tables[(which + 1) % 5].blocks
            allocator.fork(source)
            table.blocks = list(source)
        elif action == "grow" and blocks_for(tokens, 4) - len(table.blocks) <= allocator.free_blocks:
            table.grow(tokens, allocator)
            assert len(table.blocks) >= blocks_for(tokens, 4)
        allocator.check(tables)
    for table in tables:
        table.release(allocator)
    allocator.check([])
    assert allocator.free_blocks == 20


def test_a_shared_block_is_free_only_when_its_last_owner_lets_go() -> None:
    allocator = BlockAllocator(3)
    blocks = allocator.allocate(2)
    allocator.fork(blocks)
    allocator.release(blocks)
    assert allocator.free_blocks == 1
    allocator.release(blocks)
    assert allocator.free_blocks == 3


def test_misuse_of_the_allocator_is_an_error_not_a_corruption() -> None:
    allocator = BlockAllocator(2)
    [block] = allocator.allocate(1)
    with pytest.raises(RuntimeError, match="asked for 2"):
        allocator.allocate(2)
    allocator.release([block])
    with pytest.raises(RuntimeError, match="freed twice"):
        allocator.release([block])
    with pytest.raises(RuntimeError, match="shared while free"):
        allocator.fork([block])


def test_the_checker_sees_a_leak_and_a_stolen_block() -> None:
    allocator = BlockAllocator(4)
    table = BlockTable(4)
    table.grow(8, allocator)
    with pytest.raises(RuntimeError, match="0 owners"):
        allocator.check([])
    with pytest.raises(RuntimeError, match="2 owners"):
        allocator.check([table, BlockTable(4, [table.blocks[0]])])


def test_a_lone_sequence_lies_contiguously() -> None:
    allocator = BlockAllocator(6)
    other, mine = BlockTable(2), BlockTable(2)
    other.grow(4, allocator)
    other.release(allocator)
    mine.grow(3, allocator)
    mine.grow(9, allocator)
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
    assert plan_cache(config, kv_memory=512 * 100, kv_dtype="bf16").max_model_len == 192
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
        ({"kv_dtype": "int3"}, "kv_dtype"),
    ],
)
def test_a_cache_that_cannot_be_is_refused_by_option(llama: DirectorySource, options: dict, field: str) -> None:
    with pytest.raises(UsageError, match=f"^{field}:"):
        plan_cache(llama.config, **options)
