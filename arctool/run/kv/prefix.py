"""Which full block holds which tokens after which prefix: SHA-256 keys in a chain, and the index of cached blocks. Owns no block.

A key names everything that the content of a block depends on: the model and the cache's format, the tenant's salt, all tokens
before the block (by the key of the block before) and its own. So two tenants with different salts never meet, and the same
tokens after a different beginning are a different block.
"""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Iterable, Mapping
from collections.abc import Sequence as Ordered
from dataclasses import dataclass


def root_key(identity: str, salt: str) -> bytes:
    """The key before the first block of every sequence of one tenant. `identity`: of the model and its cache."""
    digest = hashlib.sha256(b"arctool prefix cache 1")
    for part in (identity, salt):
        encoded = part.encode("utf-8", "surrogatepass")
        digest.update(struct.pack("<Q", len(encoded)) + encoded)
    return digest.digest()


def block_key(parent: bytes, tokens: Ordered[int]) -> bytes:
    """The key of a full block that holds `tokens` and follows the block with the key `parent`."""
    return hashlib.sha256(parent + struct.pack(f"<{len(tokens)}q", *tokens)).digest()


@dataclass(frozen=True)
class Entry:
    """A cached block: its place in its sequences, its key, the key of the block before it (or the root), its tokens."""

    place: int
    key: bytes
    parent: bytes
    tokens: tuple[int, ...]


class PrefixIndex:
    """Key → block, and back. At most one block has a key."""

    def __init__(self) -> None:
        self._blocks: dict[bytes, int] = {}
        self._entries: dict[int, Entry] = {}

    def __len__(self) -> int:
        return len(self._entries)

    def find(self, key: bytes, tokens: Ordered[int]) -> int | None:
        """The block that has this key and, to be sure, these tokens."""
        block = self._blocks.get(key)
        return block if block is not None and self._entries[block].tokens == tuple(tokens) else None

    def enter(self, block: int, place: int, parent: bytes, tokens: Ordered[int]) -> None:
        """Remember what `block` holds. Raises RuntimeError if block or key is there already: a fault of the engine."""
        entry = Entry(place, block_key(parent, tokens), parent, tuple(tokens))
        if block in self._entries or entry.key in self._blocks:
            raise RuntimeError(f"cache block {block} enters the prefix cache twice")
        self._entries[block] = entry
        self._blocks[entry.key] = block

    def forget(self, block: int) -> None:
        """Its content is about to be overwritten."""
        del self._blocks[self._entries.pop(block).key]

    def entries(self) -> Mapping[int, Entry]:
        return self._entries

    def check(self, kept: Iterable[int], block_size: int) -> None:
        """Raise RuntimeError unless the cached blocks are exactly `kept`, full, rightly named, and the one before each is cached."""
        if set(kept) != set(self._entries) or {entry.key: block for block, entry in self._entries.items()} != self._blocks:
            raise RuntimeError("the prefix cache and the pool do not agree on which blocks are cached")
        for block, entry in self._entries.items():
            if len(entry.tokens) != block_size or entry.key != block_key(entry.parent, entry.tokens):
                raise RuntimeError(f"cache block {block} is cached under a key that is not its content's")
            before = self._blocks.get(entry.parent)
            if entry.place and (before is None or self._entries[before].place != entry.place - 1):
                raise RuntimeError(f"cache block {block} is cached, the block before it is not")
