"""The public verbs of the package, each a whole task: bake a model, verify an artifact. `arctool.LLM` is the third.

Joins the rooms below; shows nothing and parses no command line. The command line is a thin skin on this file.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import nullcontext
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from arctool.bake import pipeline
from arctool.bake.checkpoint import open_checkpoint
from arctool.bake.codebook_training import PLANS, gaussian_table
from arctool.bake.recipe import Recipe, load_recipe
from arctool.errors import FormatError, SourceError, UsageError
from arctool.kernels.decoders import decoders
from arctool.kernels.registry import default_registry
from arctool.quant.trellis import Geometry
from arctool.run.config import ModelConfig
from arctool.run.models import architecture
from arctool.uqff import verify as checks
from arctool.uqff.container import open_artifact


def bake_model(
    model: str,
    output: str | Path,
    isq: str,
    *,
    recipe: str | Path | None = None,
    seed: int = 0,
    jobs: int | None = None,
    revision: str | None = None,
    overwrite: bool = False,
    progress: pipeline.Progress | None = None,
) -> pipeline.BakeResult:
    """Bake `model` (directory, GGUF file or hub id) at rung `isq` into the directory `output`.

    `recipe`: YAML file that says which layer gets what. Raises UsageError, SourceError, StorageError, InterruptedByUser.
    """
    plan = Recipe.uniform(isq) if recipe is None else load_recipe(Path(recipe), isq)
    with open_checkpoint(model, revision=revision) as checkpoint:
        return pipeline.bake(checkpoint, Path(output), plan, seed=seed, jobs=jobs, overwrite=overwrite, progress=progress)


def verify(path: str | Path, source: str | None = None, progress: checks.Progress | None = None) -> checks.VerifyReport:
    """All that this machine can prove of the artifact at `path`; with `source`, each layer's error against that checkpoint too.

    An artifact that fails is a report, not an exception. Raises StorageError, UsageError, and SourceError for `source`.
    """
    path = Path(path)
    expected, complaint = expected_shapes(path)
    with open_checkpoint(source) if source is not None else nullcontext() as checkpoint:
        return checks.verify(
            path,
            source=checkpoint,
            implementations=decoders(default_registry()),
            tables=regenerate,
            expected=expected,
            config_error=complaint,
            progress=progress,
        )


def expected_shapes(path: Path) -> tuple[Mapping[str, tuple[int, ...]] | None, str | None]:
    """(shapes by tensor name that the artifact's own config implies, None) or (None, why that config is of no use).

    An artifact that cannot be opened at all gives (None, None): `verify` says so itself.
    """
    try:
        with open_artifact(path) as artifact:
            config_json = artifact.config_json
    except FormatError:
        return None, None
    try:
        config = ModelConfig.from_hf(config_json, "config.json")
        specs = architecture(config.architecture, "config.json").tensors(config)
    except (SourceError, UsageError) as error:
        return None, str(error)
    return {spec.name: spec.shape for spec in specs}, None


def regenerate(name: str) -> NDArray[np.float32] | None:
    """The table of geometry `name` from its seed, where that takes no training; the trained ones are held by their pinned hash."""
    return None if name in PLANS else gaussian_table(Geometry.parse(name), 1, 1.0)
