"""From what a user types to a model: an artifact, or any checkpoint that bake takes, run unquantised."""

from __future__ import annotations

import os
from pathlib import Path

from arctool.bake.checkpoint import open_checkpoint
from arctool.run.llm import LLM, EngineOptions


def is_artifact(path: Path) -> bool:
    """Whether `path` is a `.uqff` file or a directory that holds one."""
    return path.suffix == ".uqff" or (path.is_dir() and any(path.glob("*.uqff")))


def open_model(name: str, options: EngineOptions) -> LLM:
    """Load an artifact, a checkpoint directory, a GGUF file or a hub id. Raises the errors of each."""
    path = Path(os.path.expanduser(name))
    return LLM(path, options) if is_artifact(path) else LLM(open_checkpoint(name), options)


def default_output(model: str, rung: str) -> Path:
    """`<model>-<rung>` in the working directory; a hub id's revision and a GGUF file's ending are left out."""
    path = Path(os.path.expanduser(model))
    name = path.resolve().name if path.exists() else model.split("@")[0].split("/")[-1]
    return Path(f"{name.removesuffix('.gguf')}-{rung}")
