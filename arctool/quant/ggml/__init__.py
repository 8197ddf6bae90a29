"""GGML block types: what each is called, how its bytes lie, and its oracle. This door is all that others import.

`block_type` says what a type is, `simple` and `k_types` list them; `k_quants` knows the bits of super-blocks, `k_search` finds their codes.
The bytes are ggml's own, so that llama.cpp, mistral.rs and gguf-py read them. Knows arrays of f32 and u8, not files or speed.
"""

from arctool.quant.ggml.block_type import Each, GgmlType, f16_column
from arctool.quant.ggml.k_types import Q2K, Q3K, Q4K, Q5K, Q6K
from arctool.quant.ggml.simple import F16, Q4_0, Q4_1, Q5_0, Q5_1, Q8_0

__all__ = [
    "F16",
    "GGML_BY_ID",
    "GGML_TYPES",
    "Q2K",
    "Q3K",
    "Q4K",
    "Q4_0",
    "Q4_1",
    "Q5K",
    "Q5_0",
    "Q5_1",
    "Q6K",
    "Q8_0",
    "Each",
    "GgmlType",
    "f16_column",
]

GGML_TYPES: dict[str, GgmlType] = {kind.name: kind for kind in (Q2K, Q3K, Q4_0, Q4_1, Q4K, Q5_0, Q5_1, Q5K, Q6K, Q8_0, F16)}
"""By the name that reports and `--isq` use, from few bits to many."""

GGML_BY_ID: dict[int, GgmlType] = {kind.id: kind for kind in GGML_TYPES.values()}
