"""What happens to a sequence's blocks: found in the prefix cache, grown, forked, copied before they are written, cached, released.

Joins the pool (who owns what) and the prefix index (what is in it). Knows tables and tokens, but neither queues nor tensors.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from collections.abc import Sequence as Ordered
from dataclasses import dataclass

from arctool.run.kv.blocks import BlockPool, BlockTable, blocks_for
from arctool.run.kv.prefix import PrefixIndex, block_key, root_key

TokensOf = Callable[[int, int], Ordered[int]]
"""A sequence's tokens at positions [first, last)."""

Copy = tuple[int, int]
"""(source, target): the content of block `source` has to be in block `target` before the step runs."""


@dataclass(frozen=True)
class CacheUse:
    """Blocks by state; they add up to the pool. `cached`: nobody owns them, the prefix cache can still give them to somebody."""

    owned: int
    cached: int
    free: int


class Paging:
    """The blocks of all sequences. `identity` says what, besides tokens, the content of a block depends on (model, format)."""

    def __init__(self, num_blocks: int, block_size: int, identity: str = "", prefix_caching: bool = True) -> None:
        self.block_size = block_size
        self._identity = identity
        self._caching = prefix_caching
        self._index = PrefixIndex()
        self.pool = BlockPool(num_blocks, self._index.forget)

    @property
    def use(self) -> CacheUse:
        pool = self.pool
        return CacheUse(pool.num_blocks - pool.available, pool.idle, pool.free)

    def table(self, salt: str = "") -> BlockTable:
        """The empty table of a new sequence. Sequences share cached blocks only under the same `salt`."""
        return BlockTable(self.block_size, root_key(self._identity, salt))

    def match(self, table: BlockTable, length: int, tokens: TokensOf) -> list[int]:
        """The cached blocks that hold the first tokens of a sequence of `length` tokens; takes nothing.

        Its last token is never among them: it has to be computed, or there would be no logits to choose the next one by.
        """
        found: list[int] = []
        if self._caching:
            for index in range((length - 1) // self.block_size):
                block = self._index.find(self._key(table, index, tokens), self._block_tokens(index, tokens))
                if block is None:
                    break
                found.append(block)
        return found

    def claim(self, table: BlockTable, blocks: Ordered[int]) -> None:
        """Let the empty `table` begin with the cached `blocks` that `match` found."""
        if table.blocks:
            raise RuntimeError("a sequence that has blocks already claims cached ones")
        self.pool.share(blocks)
        table.blocks = list(blocks)
        table.cached = len(blocks)

    def missing(self, table: BlockTable, computed: int, tokens: int) -> int:
        """Blocks that `grow` will take at most."""
        return max(0, blocks_for(tokens, self.block_size) - len(table.blocks)) + len(self._shared(table, computed))

    def grow(self, table: BlockTable, computed: int, tokens: int) -> list[Copy]:
        """Make room to write the tokens [computed, tokens): new blocks at the end, and an own copy of each that others read too."""
        copies = []
        for index in self._shared(table, computed):
            shared = table.blocks[index]
            [own] = self.pool.allocate(1)
            self.pool.release([shared])
            table.blocks[index] = own
            copies.append((shared, own))
        table.blocks.extend(self.pool.allocate(max(0, blocks_for(tokens, self.block_size) - len(table.blocks))))
        return copies

    def fork(self, table: BlockTable) -> BlockTable:
        """A table over the same blocks. Whoever writes into one of them first gets a copy (`grow`)."""
        self.pool.share(table.blocks)
        return BlockTable(table.block_size, table.root, list(table.blocks), list(table.keys), table.cached)

    def commit(self, table: BlockTable, computed: int, tokens: TokensOf) -> None:
        """The first `computed` tokens are in the cache for good: the blocks that they fill are open to others from now on.

        A block whose content is cached already is given up for the cached one: they are equal, because the bits of a token
        depend on the tokens before it alone. So whoever owns a cached block owns all before it, and none is evicted before its child.
        """
        if not self._caching:
            return
        for index in range(table.cached, computed // self.block_size):
            key, content = self._key(table, index, tokens), self._block_tokens(index, tokens)
            block = self._index.find(key, content)
            if block is None:
                parent = table.keys[index - 1] if index else table.root
                self._index.enter(table.blocks[index], index, parent, content)
                self.pool.keep(table.blocks[index])
            elif block != table.blocks[index]:
                self.pool.share([block])
                self.pool.release([table.blocks[index]])
                table.blocks[index] = block
            table.cached = index + 1

    def release(self, table: BlockTable) -> None:
        """Give every block up; the table is empty afterwards. The last ones are the first to be evicted."""
        blocks, table.blocks, table.cached = table.blocks, [], 0
        self.pool.release(reversed(blocks))

    def check(self, tables: Iterable[BlockTable]) -> None:
        """Raise RuntimeError unless pool, index and `tables` (of all sequences that live) agree."""
        tables = list(tables)
        self.pool.check(tables)
        self._index.check(self.pool.kept(), self.block_size)
        entries = self._index.entries()
        places: dict[int, int] = {}
        for table in tables:
            for place, block in enumerate(table.blocks):
                if places.setdefault(block, place) != place:
                    raise RuntimeError(f"cache block {block} stands at places {places[block]} and {place} of its owners' tables")
            if any(b not in entries or entries[b].key != k for b, k in zip(table.blocks[: table.cached], table.keys, strict=False)):
                raise RuntimeError("a block table begins with cached blocks that are not its sequence's")

    def _shared(self, table: BlockTable, computed: int) -> list[int]:
        """Places in `table`, from the first token that will be written on, whose blocks have other owners."""
        return [i for i in range(computed // self.block_size, len(table.blocks)) if self.pool.owners(table.blocks[i]) > 1]

    def _key(self, table: BlockTable, index: int, tokens: TokensOf) -> bytes:
        while len(table.keys) <= index:
            parent = table.keys[-1] if table.keys else table.root
            table.keys.append(block_key(parent, self._block_tokens(len(table.keys), tokens)))
        return table.keys[index]

    def _block_tokens(self, index: int, tokens: TokensOf) -> Ordered[int]:
        return tokens(index * self.block_size, (index + 1) * self.block_size)
