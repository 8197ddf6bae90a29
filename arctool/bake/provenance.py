"""What makes a bake this very bake: source, recipe, seed, algorithm and tables, as the report states them.

Equal facts give equal bytes; where one differs, neither an artifact nor a journal counts as this bake's.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from arctool.bake.choices import searched
from arctool.bake.recipe import Recipe
from arctool.bake.source.checkpoint import Checkpoint
from arctool.quant.codebooks import Rung, rung
from arctool.uqff.container import BakeInfo

ROUNDING = "round-rows-1"
FEEDBACK = "feedback-rows-2"
"""Name what turns weights into bytes, without and with calibration; to be changed with any change of those bytes."""


def bake_info(checkpoint: Checkpoint, recipe: Recipe, seed: int, calibration: Mapping[str, Any] | None = None) -> BakeInfo:
    """What the report says of the bake: printable names, never paths of this machine. `calibration`: what it calibrates with."""
    origin, terms = checkpoint.origin, checkpoint.terms
    chosen = {recipe.choose(spec, checkpoint.config.num_layers).rung for spec in checkpoint.specs}
    return BakeInfo(
        rung=recipe.default,
        seed=seed,
        recipe=recipe.to_json(),
        base_model=printable(Path(origin).name if os.path.isabs(origin) else origin),
        fingerprint=checkpoint.fingerprint,
        licence=None if terms.licence is None else printable(terms.licence),
        licence_name=None if terms.name is None else printable(terms.name),
        licence_link=None if terms.link is None else printable(terms.link),
        algorithm=ROUNDING if calibration is None else FEEDBACK,
        tables={name: table_digest(rung(name)) for name in sorted(filter(searched, chosen))},
        calibration=calibration,
    )


def printable(name: str) -> str:
    """`name` with U+FFFD for what no text file or terminal takes: bytes that are no UTF-8, control characters."""
    return "".join(c if c.isprintable() else "\ufffd" for c in name)


def table_digest(wanted: Rung) -> str:
    """SHA-256 (hex) of the values f32 [2^l, v] of a rung's states, little-endian: of what is searched, computed or shipped."""
    values = wanted.codebook().values(wanted.geometry)
    return hashlib.sha256(np.ascontiguousarray(values, "<f4").tobytes()).hexdigest()
