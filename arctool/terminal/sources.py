"""From what a user types to a model: an artifact, or any checkpoint that bake takes, run unquantised."""

from __future__ import annotations

import os
from pathlib import Path

from arctool.bake.source.checkpoint import open_checkpoint
from arctool.run.llm import LLM, EngineOptions
from arctool.uqff.discovery import is_artifact


def open_model(name: str, options: EngineOptions) -> LLM:
    """Load an artifact, a checkpoint directory, a GGUF file or a hub id. Raises the errors of each."""
    path = Path(os.path.expanduser(name))
    return LLM(path, options) if is_artifact(path) else LLM(open_checkpoint(name), options)


def default_output(model: str, isq: str | None, bpw: float | None = None, recipe: Path | None = None) -> Path:
    """`<model>-<rung>` in the working directory, or `-<rate>bpw`, or the recipe's name; a hub id's revision and a GGUF file's ending are
    left out."""
    path = Path(os.path.expanduser(model))
    name = path.resolve().name if path.exists() else model.split("@")[0].split("/")[-1]
    what = isq if isq is not None else f"{bpw:g}bpw" if bpw is not None else "baked" if recipe is None else recipe.stem
    return Path(f"{name.removesuffix('.gguf')}-{what}")
