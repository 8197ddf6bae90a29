"""Where keys and values lie: one paged store for all layers and sequences. It knows slots and blocks, not sequences."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

import torch

from arctool.errors import UsageError
from arctool.kernels.cpu.attention import value_pitch
from arctool.kernels.cpu.ir import LANES
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
    if max_seqs < 1:
        raise UsageError(f"max_seqs: expected at least 1, found {max_seqs}")
    if block_size < 1 or block_size % LANES:
        raise UsageError(f"block_size: expected a multiple of {LANES}, found {block_size}")
    model_limit = config.max_position_embeddings
    if max_model_len is not None and not 2 <= max_model_len <= model_limit:
        why = f": {config.rope.no_further}" if config.rope.no_further else ""
        raise UsageError(f"max_model_len: expected 2 to the model's max_position_embeddings = {model_limit}, found {max_model_len}{why}")
    token_bytes = config.num_layers * config.num_kv_heads * (config.head_dim + value_pitch(config.head_dim)) * DTYPES[kv_dtype].itemsize
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
    """Keys and values of every layer. Memory is touched only when used.

    Keys lie [blocks, kv_heads, block_size / 16, head_dim, 16] and values [blocks, kv_heads, block_size, head_dim padded to 16], as
    `kernels.cpu.attention` reads them. What a slot held before stays there until it is written.
    """

    def __init__(self, config: ModelConfig, num_blocks: int, block_size: int, dtype: torch.dtype = torch.float32) -> None:
        self.block_size = block_size
        self.num_blocks = num_blocks
        self.dtype = dtype
        head = (num_blocks, config.num_kv_heads)
        keys, values = (*head, block_size // LANES, config.head_dim, LANES), (*head, block_size, value_pitch(config.head_dim))
        try:
            self.keys = [torch.empty(keys, dtype=dtype) for _ in range(config.num_layers)]
            self.values = [torch.empty(values, dtype=dtype) for _ in range(config.num_layers)]
        except RuntimeError as error:  # torch's word for memory that the machine does not have
            size = config.num_layers * (math.prod(keys) + math.prod(values)) * dtype.itemsize
            raise UsageError(f"kv_memory: this machine cannot give {size} bytes to the cache; ask for less") from error

    def copy_blocks(self, pairs: Iterable[tuple[int, int]]) -> None:
        """Copy whole blocks, (source, target) each."""
        for source, target in pairs:
            for store in (*self.keys, *self.values):
                store[target] = store[source]
