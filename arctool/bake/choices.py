"""What a tensor may become: the names that `--isq` and a recipe accept, which widths each takes and what it costs.

A name is `bf16` (quantises nothing), a GGML block type, or a trellis rung. Only rungs need a search. Knows names and shapes, no values.
"""

from __future__ import annotations

import math
import reprlib

from arctool.errors import UsageError
from arctool.quant.codebooks import RUNGS, rung
from arctool.quant.ggml import GGML_TYPES

KEEP = "bf16"
"""The choice that quantises nothing."""

CHOICES: tuple[str, ...] = (*RUNGS, *GGML_TYPES, KEEP)

LADDER: dict[str, float] = {
    "qtip2-v4": 0.0752,
    "qtip2.25-v4": 0.0554,
    "qtip3": 0.0181,
    "qtip4": 0.0047,
    "q8_0": 2.9e-5,
    "bf16": 2.8e-6,
}
"""The choices of a budgeted bake, from few bits to many → error over variance of Gaussian weights (README; of the last two measured on
rows of 4096). A rate has one choice: the fast one of its rungs, or the same budget would have two answers of nearly the same worth."""


def searched(name: str) -> bool:
    """Whether the choice is a trellis rung: what a search makes, a journal keeps and a table stands behind."""
    return name in RUNGS


def misfit(name: str, in_features: int) -> str:
    """Why rows of `in_features` weights cannot be stored as `name`; empty if they can."""
    if name == KEEP:
        return ""
    ggml = GGML_TYPES.get(name)
    unit, what = (rung(name).geometry.v, "V=") if ggml is None else (ggml.block, "block of ")
    return f"{in_features} inputs are not a multiple of {name}'s {what}{unit}" if in_features % unit else ""


def stored_bytes(name: str, shape: tuple[int, ...]) -> int:
    """Bytes of the weights of a tensor [out, in] stored as `name`: blocks, or streams and scales (tables and signs left out)."""
    if name == KEEP:
        return 2 * math.prod(shape)
    rows, in_features = math.prod(shape[:-1]), shape[-1]
    if name in GGML_TYPES:
        return rows * GGML_TYPES[name].row_bytes(in_features)
    return rows * (rung(name).geometry.stride(in_features) + 4)


def stored_bits(name: str, shape: tuple[int, ...]) -> int:
    """What a linear layer [out, in] stored as `name` will say of its `stored_bits`: `stored_bytes`, and the signs of a rung's rotation."""
    signs = sum(-(-size // 8) for size in shape) if searched(name) else 0
    return 8 * (stored_bytes(name, shape) + signs)


def choice(value: object, where: str) -> str:
    """The name `value`, if it is one. Raises UsageError, naming `where`, that lists all."""
    if isinstance(value, str) and value in CHOICES:
        return value
    shown = value if isinstance(value, str) else reprlib.repr(value)
    raise UsageError(f"{where}: unknown rung {shown[:80]!r}; known rungs: {', '.join(CHOICES)}")
