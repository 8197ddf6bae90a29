"""The public verbs that run a model: bake one, evaluate some. Those that look at an artifact are in `artifacts`; `arctool.LLM` is one more.

Joins the rooms below; shows nothing and parses no command line. The command line is a thin skin on this file.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from arctool.bake import pipeline
from arctool.bake.budget.bake import bake_to_budget
from arctool.bake.budget.need import check_bpw
from arctool.bake.calibration.text import AUTO
from arctool.bake.calibration.token_set import CALIB_TOKENS, choose_calibration
from arctool.bake.choices import choice
from arctool.bake.recipe import RecipeFile, read_recipe
from arctool.bake.source.checkpoint import open_checkpoint
from arctool.bench import canvas, evaluation, plot
from arctool.bench.reading import DEFAULT_TOKENS
from arctool.errors import UsageError


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
    if picture is not None and against is None:
        raise UsageError(f"--plot: {picture}: needs --against SOURCE, the model whose divergence it shows")
    where = canvas.picture_target(picture)
    names = [paths] if isinstance(paths, str) else list(paths)
    given = None if text is None else Path(text)
    found = evaluation.evaluate(names, against=against, text=given, window=window, tokens=tokens, layers=layers, progress=progress)
    if where is not None:
        plot.draw(found, where)
    return found
