"""Where keys and values lie: one paged store for all layers and sequences. It knows slots and blocks, not sequences."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from arctool.errors import UsageError
from arctool.run.config import ModelConfig
from arctool.run.kv.blocks import blocks_for
from arctool.run.kv.memory import parse_memory

DTYPES = {"f32": torch.float32, "bf16": torch.bfloat16}
DEFAULT_KV_MEMORY = 2 << 30


@dataclass(frozen=True)
class CachePlan:
    """How large the cache is, and the longest context that fits into it."""

    num_blocks: int
    block_size: int
    max_model_len: int
    dtype: torch.dtype


def plan_cache(
    config: ModelConfig,
    *,
    max_model_len: int | None = None,
    max_seqs: int = 256,
    kv_memory: int | str | None = None,
    block_size: int = 16,
    kv_dtype: str = "f32",
) -> CachePlan:
    """Size the cache: `max_seqs` contexts of `max_model_len` tokens, or less where `kv_memory` (bytes, or "2GiB", the default) forbids it.

    Without `max_model_len` the context is the model's own, shortened to what fits. A context that is asked for and does not
    fit, or is longer than the model's, raises UsageError.
    """
    if kv_dtype not in DTYPES:
        raise UsageError(f"kv_dtype: expected one of {', '.join(DTYPES)}, found {kv_dtype!r}")
    for name, value in (("max_seqs", max_seqs), ("block_size", block_size)):
        if value < 1:
            raise UsageError(f"{name}: expected at least 1, found {value}")
    model_limit = config.max_position_embeddings
    if max_model_len is not None and not 2 <= max_model_len <= model_limit:
        raise UsageError(f"max_model_len: expected 2 to the model's max_position_embeddings = {model_limit}, found {max_model_len}")
    token_bytes = 2 * config.num_layers * config.num_kv_heads * config.head_dim * DTYPES[kv_dtype].itemsize
    memory = DEFAULT_KV_MEMORY if kv_memory is None else parse_memory(kv_memory, "kv_memory")
    affordable = memory // (token_bytes * block_size)
    length = min(model_limit, affordable * block_size) if max_model_len is None else max_model_len
    if length < 2 or blocks_for(length, block_size) > affordable:
        wanted = max(length, 2)
        need = blocks_for(wanted, block_size) * token_bytes * block_size
        raise UsageError(
            f"kv_memory: a context of {wanted} tokens needs {need} bytes, found {memory}; give more or a shorter max_model_len"
        )
    return CachePlan(min(affordable, max_seqs * blocks_for(length, block_size)), block_size, length, DTYPES[kv_dtype])


class KVCache:
    """Keys and values of every layer, [blocks, block_size, kv_heads, head_dim] each. Memory is touched only when used."""

    def __init__(self, config: ModelConfig, num_blocks: int, block_size: int, dtype: torch.dtype = torch.float32) -> None:
        self.block_size = block_size
        self.num_blocks = num_blocks
        shape = (num_blocks, block_size, config.num_kv_heads, config.head_dim)
        self.keys = [torch.empty(shape, dtype=dtype) for _ in range(config.num_layers)]
        self.values = [torch.empty(shape, dtype=dtype) for _ in range(config.num_layers)]

    def write(self, layer: int, slots: torch.Tensor, keys: torch.Tensor, values: torch.Tensor) -> None:
        """Store keys and values f32 [tokens, kv_heads, head_dim] at `slots` i64 [tokens]."""
        for store, new in ((self.keys[layer], keys), (self.values[layer], values)):
            store.flatten(0, 1).index_copy_(0, slots, new.to(store.dtype))

    def copy_blocks(self, pairs: Sequence[tuple[int, int]]) -> None:
        """Copy whole blocks, in all layers: (source, target) each, all sources read before any target is written."""
        if pairs:
            sources, targets = torch.tensor(pairs, dtype=torch.int64).unbind(1)
            for store in (*self.keys, *self.values):
                store[targets] = store[sources]

    def read(self, layer: int, blocks: Sequence[int], first: int, last: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys and values f32 [last − first, kv_heads, head_dim] of tokens `[first, last)` of the sequence that owns `blocks`.

        Contiguous blocks are a view, others are gathered by whole blocks: either way the same strides and the same alignment,
        so that arithmetic on them cannot tell where a sequence lies.
        """
        head, tail = first // self.block_size, blocks_for(last, self.block_size)
        start = first - head * self.block_size
        wanted = list(blocks[head:tail])
        keys, values = (_take(store[layer], wanted)[start : start + last - first].float() for store in (self.keys, self.values))
        return keys, values


def _take(store: torch.Tensor, blocks: list[int]) -> torch.Tensor:
    """The tokens of `blocks`, [len(blocks) · block_size, kv_heads, head_dim]."""
    contiguous = blocks == list(range(blocks[0], blocks[0] + len(blocks)))
    taken = store[blocks[0] : blocks[0] + len(blocks)] if contiguous else store[torch.tensor(blocks)]
    return taken.flatten(0, 1)
