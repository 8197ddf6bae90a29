"""What makes a bake this very bake: source, recipe, seed, algorithm and tables, as the report states them.

Equal facts give equal bytes; where one differs, neither an artifact nor a journal counts as this bake's.
"""

from __future__ import annotations

import hashlib
import os
from pathlib import Path

import numpy as np

from arctool.bake.checkpoint import Checkpoint
from arctool.bake.recipe import KEEP, Recipe
from arctool.quant.codebooks import Rung, rung
from arctool.uqff.container import BakeInfo

ALGORITHM = "round-rows-1"
"""Names what turns weights into bytes; to be changed with any change of those bytes."""


def bake_info(checkpoint: Checkpoint, recipe: Recipe, seed: int) -> BakeInfo:
    """What the report says of the bake: printable names, never paths of this machine."""
    origin = checkpoint.origin
    rungs = {recipe.choose(spec, checkpoint.config.num_layers).rung for spec in checkpoint.specs} - {KEEP}
    return BakeInfo(
        rung=recipe.default,
        seed=seed,
        recipe=recipe.to_json(),
        base_model=printable(Path(origin).name if os.path.isabs(origin) else origin),
        fingerprint=checkpoint.fingerprint,
        licence=None if checkpoint.licence is None else printable(checkpoint.licence),
        algorithm=ALGORITHM,
        tables={name: table_digest(rung(name)) for name in sorted(rungs)},
    )


def printable(name: str) -> str:
    """`name` with U+FFFD for what no text file or terminal takes: bytes that are no UTF-8, control characters."""
    return "".join(c if c.isprintable() else "\ufffd" for c in name)


def table_digest(wanted: Rung) -> str:
    """SHA-256 (hex) of the values f32 [2^l, v] of a rung's states, little-endian: of what is searched, computed or shipped."""
    values = wanted.codebook().values(wanted.geometry)
    return hashlib.sha256(np.ascontiguousarray(values, "<f4").tobytes()).hexdigest()
