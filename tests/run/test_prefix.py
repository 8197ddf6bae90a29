"""The prefix cache gives a block only to a sequence with the same tokens before and in it, of the same tenant; copies precede writes."""

from __future__ import annotations

import hashlib

import pytest

from arctool.run.kv import paging as paging_module
from arctool.run.kv import prefix
from arctool.run.kv.blocks import BlockTable
from arctool.run.kv.paging import CacheUse, Paging

TEXT = list(range(100, 140))


class Written:
    """A sequence that has computed and committed `tokens`."""

    def __init__(self, paging: Paging, tokens: list[int], salt: str = "", committed: int | None = None) -> None:
        self.ids, self.paging, self.table = tokens, paging, paging.table(salt)
        paging.claim(self.table, self.hit())
        paging.grow(self.table, len(self.table.blocks) * paging.block_size, len(tokens))
        paging.commit(self.table, len(tokens) if committed is None else committed, self.tokens)

    def tokens(self, first: int, last: int) -> list[int]:
        return self.ids[first:last]

    def hit(self) -> list[int]:
        return self.paging.match(self.table, len(self.ids), self.tokens)


def hits(paging: Paging, tokens: list[int], salt: str = "") -> list[int]:
    return paging.match(paging.table(salt), len(tokens), lambda first, last: tokens[first:last])


def test_a_prompt_finds_the_full_blocks_of_the_same_beginning() -> None:
    paging = Paging(8, 4)
    first = Written(paging, TEXT[:14])
    assert first.table.blocks == [0, 1, 2, 3]
    assert hits(paging, TEXT[:20]) == [0, 1, 2]
    assert hits(paging, [*TEXT[:9], 7, 7, 7, 7]) == [0, 1]
    assert hits(paging, [7, *TEXT[1:20]]) == []


def test_the_last_token_is_always_left_to_compute() -> None:
    paging = Paging(8, 4)
    Written(paging, TEXT[:8])
    assert hits(paging, TEXT[:9]) == [0, 1]
    assert hits(paging, TEXT[:8]) == [0]
    assert hits(paging, TEXT[:4]) == []


def test_a_block_is_found_only_when_all_its_tokens_are_committed() -> None:
    paging = Paging(8, 4)
    one = Written(paging, TEXT[:12], committed=7)
    assert hits(paging, TEXT[:12]) == [0]
    paging.commit(one.table, 8, one.tokens)
    assert hits(paging, TEXT[:12]) == [0, 1]


def test_the_same_block_after_another_beginning_is_another_block() -> None:
    paging = Paging(8, 4)
    Written(paging, [1, 1, 1, 1, *TEXT[:8]])
    Written(paging, [2, 2, 2, 2, *TEXT[:8]])
    assert hits(paging, [2, 2, 2, 2, *TEXT[:5]]) == [3, 4]
    assert hits(paging, [*TEXT[:5]]) == []


def test_tenants_and_models_share_nothing() -> None:
    paging = Paging(8, 4)
    Written(paging, TEXT[:12], salt="a")
    assert hits(paging, TEXT[:12], salt="a") == [0, 1]
    assert hits(paging, TEXT[:12], salt="b") == []
    assert hits(paging, TEXT[:12]) == []
    keys = {prefix.root_key(*parts) for parts in [("m", "s"), ("ms", ""), ("", "ms"), ("m", ""), ("", "m"), ("m", "\ud800")]}
    assert len(keys) == 6


def test_keys_are_a_sha256_chain_over_the_token_ids() -> None:
    root = prefix.root_key("model", "tenant")
    tokens = b"".join(n.to_bytes(8, "little") for n in (5, 6))
    assert prefix.block_key(root, [5, 6]) == hashlib.sha256(root + tokens).digest()


def test_equal_keys_of_different_tokens_are_no_hit(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (prefix, paging_module):
        monkeypatch.setattr(module, "block_key", lambda parent, tokens: bytes([parent[0] + 1]) + bytes(31))
    paging = Paging(8, 4)
    Written(paging, TEXT[:12])
    assert hits(paging, TEXT[:12]) == [0, 1]
    assert hits(paging, TEXT[20:32]) == []


def test_a_block_computed_twice_is_kept_once() -> None:
    paging = Paging(8, 4)
    one, two = (Written(paging, TEXT[:10], committed=0) for _ in range(2))
    assert (one.table.blocks, two.table.blocks) == ([0, 1, 2], [3, 4, 5])
    paging.commit(one.table, 10, one.tokens)
    paging.commit(two.table, 10, two.tokens)
    assert two.table.blocks == [0, 1, 5]
    paging.check([one.table, two.table])
    assert paging.use == CacheUse(owned=4, cached=0, free=4)


def test_a_finished_sequence_leaves_its_full_blocks_to_others_until_room_is_needed() -> None:
    paging = Paging(4, 4)
    paging.release(Written(paging, TEXT[:14]).table)
    assert paging.use == CacheUse(owned=0, cached=3, free=1)
    stranger = Written(paging, [7] * 8)
    assert hits(paging, TEXT[:20]) == [0, 1], "the end of a chain goes first"
    paging.check([stranger.table])
    paging.release(stranger.table)
    assert Written(paging, TEXT[:9]).table.blocks[:2] == [0, 1]
    assert paging.use.owned == 3


def test_of_two_chains_the_one_used_longer_ago_goes_first() -> None:
    paging = Paging(6, 4)
    old, new = Written(paging, TEXT[:12]), Written(paging, TEXT[20:32])
    paging.release(old.table)
    paging.release(new.table)
    paging.release(Written(paging, TEXT[:9]).table)  # the old one is used again; its third block is not
    taken = Written(paging, [7] * 16, committed=0)
    assert hits(paging, TEXT[:12]) == [0, 1]
    assert hits(paging, TEXT[20:32]) == []
    paging.check([taken.table])


def test_without_prefix_caching_nothing_is_found_or_kept() -> None:
    paging = Paging(4, 4, prefix_caching=False)
    one = Written(paging, TEXT[:12])
    assert hits(paging, TEXT[:12]) == []
    paging.release(one.table)
    assert paging.use == CacheUse(owned=0, cached=0, free=4)


def test_a_fork_shares_all_blocks_and_copies_the_one_it_writes() -> None:
    paging = Paging(8, 4)
    one = Written(paging, TEXT[:10])
    fork = paging.fork(one.table)
    assert fork.blocks == [0, 1, 2]
    assert paging.use.owned == 3
    assert paging.missing(fork, 10, 11) == 1
    assert paging.grow(fork, 10, 11) == [(2, 3)]
    assert (one.table.blocks, fork.blocks) == ([0, 1, 2], [0, 1, 3])
    assert paging.grow(one.table, 10, 11) == [], "the last owner writes in place"
    paging.check([one.table, fork])


def test_a_fork_at_the_end_of_a_block_copies_nothing() -> None:
    paging = Paging(8, 4)
    one = Written(paging, TEXT[:8])
    fork = paging.fork(one.table)
    assert paging.missing(fork, 8, 9) == 1
    assert paging.grow(fork, 8, 9) == []
    assert fork.blocks == [0, 1, 2]


def damaged(paging: Paging, what: str) -> list[BlockTable]:
    one = Written(paging, TEXT[:12])
    two = Written(paging, [7] * 5)
    index = paging._index
    if what == "foreign":
        two.table.blocks[0], two.table.cached = one.table.blocks[0], 1
        paging.pool.share([one.table.blocks[0]])
        paging.pool.release([3])
        two.table.keys = [bytes(32)]
    elif what == "order":
        one.table.blocks.reverse()
    elif what == "places":
        paging.pool.share([2])
        two.table.blocks.append(2)
        two.table.blocks.append(two.table.blocks.pop(1))
    elif what == "name":
        index._entries[0] = prefix.Entry(0, index._entries[0].key, index._entries[0].parent, (1, 2, 3, 4))
    elif what == "parent":
        index.forget(0)
        paging.pool._kept.discard(0)
        one.table.cached = 0
    elif what == "lost":
        index.forget(2)
    return [one.table, two.table]


@pytest.mark.parametrize(
    ("what", "complaint"),
    [
        ("foreign", "not its sequence's"),
        ("order", "not its sequence's"),
        ("places", "stands at places"),
        ("name", "not its content's"),
        ("parent", "the block before it is not"),
        ("lost", "do not agree"),
    ],
)
def test_the_checker_sees_a_damaged_cache(what: str, complaint: str) -> None:
    paging = Paging(8, 4)
    tables = damaged(paging, what)
    with pytest.raises(RuntimeError, match=complaint):
        paging.check(tables)


def test_misuse_of_the_prefix_cache_is_an_error() -> None:
    paging = Paging(8, 4)
    one = Written(paging, TEXT[:12])
    with pytest.raises(RuntimeError, match="already claims"):
        paging.claim(one.table, [0])
    with pytest.raises(RuntimeError, match="enters the prefix cache twice"):
        paging._index.enter(5, 0, one.table.root, TEXT[:4])
