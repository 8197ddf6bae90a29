"""What a tensor may become: the names that `--isq` and a recipe accept, which widths each takes and what it costs.

A name is a trellis rung, a GGML block type, `fp8`, a plain type (`bf16`, `f16`, `f32`: quantises nothing), or `as-is`, which stands for
the type that the source has. Only rungs need a search. Knows names and shapes, no values.
"""

from __future__ import annotations

import math
import re
import reprlib

from arctool.errors import UsageError
from arctool.quant.codebooks import RUNGS, rung
from arctool.quant.ggml import GGML_TYPES

KEEP = "bf16"
"""The choice that quantises nothing, where nothing else is said."""

F32 = "f32"
FP8 = "fp8"
"""One e4m3 code a weight and one scale a layer: the FP8 that mistral.rs loads."""

AS_IS = "as-is"
"""Each tensor as its source stores it: blocks of a GGUF file are copied."""

PLAIN = (KEEP, "f16", F32)
"""Choices that quantise nothing."""

CHOICES: tuple[str, ...] = (*RUNGS, *(name for name in GGML_TYPES if name not in PLAIN), FP8, *PLAIN, AS_IS)

ALIASES: dict[str, str] = {f"q{bits}_k": f"q{bits}k" for bits in (2, 3, 4, 5, 6)}
"""llama.cpp's spelling → ours, which is that of mistral.rs's reports."""

NARROWER: dict[str, str] = {"q2k": "q4_0", "q3k": "q4_0", "q4k": "q4_1", "q5k": "q5_1", "q6k": "q8_0"}
"""A K-quant has blocks of 256. What a layer gets whose width only the blocks of 32 divide, at no fewer bits."""

AUTO = "auto"
"""The fallback where nothing is said: `NARROWER` for K-quants, q8_0 for an FP8 layer with a bias, else bf16."""

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


def misfit(name: str, in_features: int, biased: bool = False) -> str:
    """Why rows of `in_features` weights cannot be stored as `name`; empty if they can. `biased`: the layer has a bias."""
    if name in PLAIN or name == AS_IS:
        return ""
    if name == FP8:
        return "mistral.rs cannot add a bias to an fp8 layer" if biased else ""
    ggml = GGML_TYPES.get(name)
    unit, what = (rung(name).geometry.v, "V=") if ggml is None else (ggml.block, "block of ")
    return f"{in_features} inputs are not a multiple of {name}'s {what}{unit}" if in_features % unit else ""


def fallback_of(name: str) -> str:
    """What `AUTO` means in place of `name`."""
    return NARROWER.get(name, "q8_0" if name == FP8 else KEEP)


def stored_bytes(name: str, shape: tuple[int, ...]) -> int:
    """Bytes of the weights of a tensor [out, in] stored as `name`: blocks, or streams and scales (tables and signs left out)."""
    if name in (KEEP, F32, FP8):
        return {KEEP: 2, F32: 4, FP8: 1}[name] * math.prod(shape)
    rows, in_features = math.prod(shape[:-1]), shape[-1]
    if name in GGML_TYPES:
        return rows * GGML_TYPES[name].row_bytes(in_features)
    return rows * (rung(name).geometry.stride(in_features) + 4)


def stored_bits(name: str, shape: tuple[int, ...]) -> int:
    """What a linear layer [out, in] stored as `name` will say of its `stored_bits`: `stored_bytes`, and the signs of a rung's rotation."""
    signs = sum(-(-size // 8) for size in shape) if searched(name) else 0
    return 8 * (stored_bytes(name, shape) + signs) + (32 if name == FP8 else 0)


def choice(value: object, where: str) -> str:
    """The name `value`, if it is one. Raises UsageError, naming `where`, that lists all."""
    shown = value if isinstance(value, str) else reprlib.repr(value)
    name = shown.casefold()
    name = ALIASES.get(name, name)
    if isinstance(value, str) and name in CHOICES:
        return name
    hint = f"{name} is read and not written; " if re.fullmatch(r"afq\d|mxfp4", name) else ""
    mixed = re.fullmatch(r"(q\d)_?k_[sml]", name)
    hint = f"llama.cpp's mixes are recipes here, their base is {mixed[1]}k; " if mixed else hint
    raise UsageError(f"{where}: unknown rung {shown[:80]!r}; {hint}known rungs: {', '.join(CHOICES)}")
