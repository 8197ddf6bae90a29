"""The row decoders of GGML blocks on a CPU, one a type."""

from __future__ import annotations

from typing import Any

from arctool.kernels.cpu.ggml_ir import expand_q8_0
from arctool.kernels.cpu.ggml_rows import ROW_DECODERS

EXPAND: dict[str, Any] = {"q8_0": expand_q8_0, **ROW_DECODERS}
"""Type → expand(row u8 [row_bytes], blocks, out f32 [in]): the oracle's weights of one row."""
