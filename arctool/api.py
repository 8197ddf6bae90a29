"""The public verbs of the package, each a whole task: bake a model, verify an artifact, evaluate models. `arctool.LLM` is the fourth.

Joins the rooms below; shows nothing and parses no command line. The command line is a thin skin on this file.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from arctool.bake import pipeline
from arctool.bake.budget.bake import bake_to_budget
from arctool.bake.budget.need import check_bpw
from arctool.bake.calibration.text import AUTO
from arctool.bake.calibration.token_set import CALIB_TOKENS, choose_calibration
from arctool.bake.choices import choice
from arctool.bake.recipe import RecipeFile, read_recipe
from arctool.bake.search.codebook_training import PLANS, gaussian_table
from arctool.bake.source.checkpoint import open_checkpoint
from arctool.bench import evaluation, plot
from arctool.bench.reading import DEFAULT_TOKENS
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
    isq: str | None = None,
    *,
    bpw: float | None = None,
    recipe: str | Path | None = None,
    seed: int = 0,
    jobs: int | None = None,
    revision: str | None = None,
    overwrite: bool = False,
    calib: str | None = AUTO,
    calib_tokens: int = CALIB_TOKENS,
    measure: bool | None = None,
    progress: pipeline.Progress | None = None,
    status: pipeline.Status | None = None,
) -> pipeline.BakeResult:
    """Bake `model` (directory, GGUF file or hub id) into the directory `output`: at rung `isq`, or at most `bpw` stored bits a weight.

    `recipe`: YAML file that says which layer gets what; of its default, `isq` and `bpw` exactly one is to be given. `calib`: the text to
    calibrate with, a file, a folder or "auto"; None rounds every row by itself. `measure`: whether the model card tells perplexity and
    divergence from the source; None: of what is calibrated. Raises UsageError, SourceError, StorageError, InterruptedByUser.
    """
    file = RecipeFile() if recipe is None else read_recipe(Path(recipe))
    check_one_answer(isq, bpw, file)
    with open_checkpoint(model, revision=revision) as checkpoint:
        chosen = None if calib is None else choose_calibration(checkpoint, calib, calib_tokens)
        options: dict[str, Any] = {"seed": seed, "jobs": jobs, "overwrite": overwrite, "calibration": chosen, "measured": measure}
        if bpw is not None:
            return bake_to_budget(checkpoint, Path(output), bpw, pins=file, **options, progress=progress, status=status)
        plan = file.over(choice(isq or file.default, "--isq"))
        return pipeline.bake(checkpoint, Path(output), plan, **options, progress=progress, status=status)


def check_one_answer(isq: str | None, bpw: float | None, file: RecipeFile) -> None:
    """Raise UsageError unless exactly one thing says what a linear layer gets that no rule names, and it is sound."""
    said = [name for name, value in (("--isq", isq), ("--bpw", bpw), ("default in the recipe", file.default)) if value is not None]
    if len(said) != 1:
        found = " and ".join(said) or "none"
        raise UsageError(f"what linear layers get: expected --isq RUNG, --bpw X or a recipe with a default, exactly one; found {found}")
    if isq is not None:
        choice(isq, "--isq")
    if bpw is not None:
        check_bpw(bpw)


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


def evaluate(
    paths: str | Sequence[str],
    against: str | None = None,
    *,
    text: str | Path | None = None,
    window: int | None = None,
    tokens: int = DEFAULT_TOKENS,
    layers: bool = True,
    picture: str | Path | None = None,
    progress: evaluation.Progress | None = None,
) -> evaluation.Evaluation:
    """How good the models at `paths` (artifacts, checkpoints, GGUF files, hub ids) are on a text, and how far from the one at `against`.

    `text`: a UTF-8 file, None for the one that ships; `layers`: also the error of every quantised layer; `picture`: where to draw
    size against divergence. docs/quality.md says what is measured. Raises UsageError, SourceError, FormatError, StorageError, and
    VerificationError for a model whose logits are not finite.
    """
    where = None if picture is None else Path(picture)
    if where is not None:
        if against is None:
            raise UsageError(f"--plot: {where}: needs --against SOURCE, the model whose divergence it shows")
        plot.check_target(where)
    names = [paths] if isinstance(paths, str) else list(paths)
    given = None if text is None else Path(text)
    found = evaluation.evaluate(names, against=against, text=given, window=window, tokens=tokens, layers=layers, progress=progress)
    if where is not None:
        plot.draw(found, where)
    return found


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
