"""Who owns which block of the cache: the allocator with reference counts, and a sequence's block table. Knows no tensors."""

from __future__ import annotations

import heapq
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field


def blocks_for(tokens: int, block_size: int) -> int:
    """Blocks that hold `tokens` tokens."""
    return -(-tokens // block_size)


class BlockAllocator:
    """Hands out block numbers 0 ... num_blocks−1, lowest first, so that a sequence that runs alone lies contiguously.

    A block with several owners (fork) is free again when the last one has released it. Misuse raises RuntimeError: it is a
    fault of the engine, never of a request, because planning asks for room before it takes any.
    """

    def __init__(self, num_blocks: int) -> None:
        self._references = [0] * num_blocks
        self._free = list(range(num_blocks))

    @property
    def num_blocks(self) -> int:
        return len(self._references)

    @property
    def free_blocks(self) -> int:
        return len(self._free)

    def allocate(self, count: int) -> list[int]:
        """Take `count` free blocks, each with one owner."""
        if count > len(self._free):
            raise RuntimeError(f"asked for {count} cache blocks, {len(self._free)} are free")
        blocks = [heapq.heappop(self._free) for _ in range(count)]
        for block in blocks:
            self._references[block] = 1
        return blocks

    def fork(self, blocks: Iterable[int]) -> None:
        """Add one owner to each of `blocks`."""
        for block in blocks:
            if self._references[block] < 1:
                raise RuntimeError(f"cache block {block} is shared while free")
            self._references[block] += 1

    def release(self, blocks: Iterable[int]) -> None:
        """Take one owner from each of `blocks`."""
        for block in blocks:
            if self._references[block] < 1:
                raise RuntimeError(f"cache block {block} is freed twice")
            self._references[block] -= 1
            if self._references[block] == 0:
                heapq.heappush(self._free, block)

    def check(self, tables: Iterable[BlockTable]) -> None:
        """Raise RuntimeError unless every block is either free once, or owned exactly as often as `tables` say."""
        owned = Counter(block for table in tables for block in table.blocks)
        free = Counter(self._free)
        for block, references in enumerate(self._references):
            if owned[block] != references:
                raise RuntimeError(f"cache block {block} has {owned[block]} owners, its count says {references}")
            if free[block] != (references == 0):
                raise RuntimeError(f"cache block {block} is {free[block]} times in the free list with {references} owners")
        strangers = (set(owned) | set(free)) - set(range(len(self._references)))
        if strangers:
            raise RuntimeError(f"cache block {min(strangers)} does not exist")


@dataclass
class BlockTable:
    """The blocks of one sequence, in order: token p lies in `blocks[p // block_size]`."""

    block_size: int
    blocks: list[int] = field(default_factory=list)

    def grow(self, tokens: int, allocator: BlockAllocator) -> None:
        """Make room for the first `tokens` tokens of the sequence."""
        missing = blocks_for(tokens, self.block_size) - len(self.blocks)
        if missing > 0:
            self.blocks.extend(allocator.allocate(missing))

    def release(self, allocator: BlockAllocator) -> None:
        """Give every block back; the table is empty afterwards."""
        blocks, self.blocks = self.blocks, []
        allocator.release(blocks)
