"""Who owns which block of the cache: the pool with reference counts, and a sequence's block table. Knows neither tensors nor tokens."""

from __future__ import annotations

import heapq
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field


def blocks_for(tokens: int, block_size: int) -> int:
    """Blocks that hold `tokens` tokens."""
    return -(-tokens // block_size)


@dataclass
class BlockTable:
    """The blocks of one sequence, in order: token p lies in `blocks[p // block_size]`.

    `keys`: of its leading full blocks (`kv.prefix`), as far as they have been asked for; `root`: the key before the first.
    `cached`: how many leading blocks are in the prefix cache.
    """

    block_size: int
    root: bytes = b""
    blocks: list[int] = field(default_factory=list)
    keys: list[bytes] = field(default_factory=list)
    cached: int = 0


class BlockPool:
    """Block numbers 0 ... num_blocks−1. Each is always in exactly one of three states: free, owned, or idle.

    Owned: some tables hold it; it leaves that state when the last one releases it. Idle: nobody owns it, but it was marked `keep`
    (the prefix cache knows what it holds), so it stays as it is until it is owned again or its place is needed. Free blocks are
    given out first, lowest first, so that a sequence that runs alone lies contiguously; then the idle ones, longest idle first:
    `forget` is told of each.

    Misuse raises RuntimeError: it is a fault of the engine, never of a request, because planning asks for room before it takes any.
    """

    def __init__(self, num_blocks: int, forget: Callable[[int], None] = lambda block: None) -> None:
        self._references = [0] * num_blocks
        self._free = list(range(num_blocks))
        self._idle: dict[int, None] = {}
        self._kept: set[int] = set()
        self._forget = forget

    @property
    def num_blocks(self) -> int:
        return len(self._references)

    @property
    def free(self) -> int:
        """Blocks that hold nothing."""
        return len(self._free)

    @property
    def idle(self) -> int:
        """Blocks that nobody owns and that the prefix cache could give to somebody."""
        return len(self._idle)

    @property
    def available(self) -> int:
        """Blocks that `allocate` can give."""
        return len(self._free) + len(self._idle)

    def owners(self, block: int) -> int:
        return self._references[block]

    def is_idle(self, block: int) -> bool:
        return block in self._idle

    def allocate(self, count: int) -> list[int]:
        """Take `count` available blocks, each with one owner."""
        if count > self.available:
            raise RuntimeError(f"asked for {count} cache blocks, {self.available} are available")
        blocks = [heapq.heappop(self._free) if self._free else self._evict() for _ in range(count)]
        for block in blocks:
            self._references[block] = 1
        return blocks

    def share(self, blocks: Iterable[int]) -> None:
        """Add one owner to each of `blocks`, which are owned or idle."""
        for block in blocks:
            if self._references[block] < 1 and block not in self._idle:
                raise RuntimeError(f"cache block {block} is shared while free")
            self._idle.pop(block, None)
            self._references[block] += 1

    def release(self, blocks: Iterable[int]) -> None:
        """Take one owner from each of `blocks`. Those that become idle are evicted in this order."""
        for block in blocks:
            if self._references[block] < 1:
                raise RuntimeError(f"cache block {block} is freed twice")
            self._references[block] -= 1
            if self._references[block] == 0:
                if block in self._kept:
                    self._idle[block] = None
                else:
                    heapq.heappush(self._free, block)

    def keep(self, block: int) -> None:
        """Let an owned block stay as it is when its last owner has gone."""
        if self._references[block] < 1:
            raise RuntimeError(f"cache block {block} is kept while nobody owns it")
        self._kept.add(block)

    def check(self, tables: Iterable[BlockTable]) -> None:
        """Raise RuntimeError unless every block is free, idle or owned, once, and owned exactly as often as `tables` say."""
        owned = Counter(block for table in tables for block in table.blocks)
        free = Counter(self._free)
        for block, references in enumerate(self._references):
            if owned[block] != references:
                raise RuntimeError(f"cache block {block} has {owned[block]} owners, its count says {references}")
            idle = block in self._idle
            if free[block] + idle != (references == 0):
                raise RuntimeError(f"cache block {block} is {free[block]} times free and {int(idle)} times idle with {references} owners")
            if (free[block] and block in self._kept) or (idle and block not in self._kept):
                raise RuntimeError(f"cache block {block} is {'idle' if idle else 'free'}, its content says otherwise")
        strangers = (set(owned) | set(free) | set(self._idle)) - set(range(len(self._references)))
        if strangers:
            raise RuntimeError(f"cache block {min(strangers)} does not exist")

    def kept(self) -> frozenset[int]:
        return frozenset(self._kept)

    def _evict(self) -> int:
        block = next(iter(self._idle))
        del self._idle[block]
        self._kept.discard(block)
        self._forget(block)
        return block
