"""Fixtures of the measuring room's tests: the GGUF writer of the bake room, one thread, and a tiny model at two rates."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from arctool.bake.pipeline import bake
from arctool.bake.recipe import Recipe
from arctool.bake.source.checkpoint import open_checkpoint

sys.path.append(str(Path(__file__).parents[1] / "bake"))


@pytest.fixture(autouse=True, scope="session")
def _one_thread(one_thread: None) -> None:
    """For every test of this room."""


@pytest.fixture(scope="session")
def artifacts(tiny_llama: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Rung → the tiny Llama baked at it (read only)."""
    folder = tmp_path_factory.mktemp("baked")
    with open_checkpoint(str(tiny_llama)) as checkpoint:
        for rung in ("qtip4", "qtip2-v4"):
            bake(checkpoint, folder / rung, Recipe.uniform(rung))
    return {rung: folder / rung for rung in ("qtip4", "qtip2-v4")}
