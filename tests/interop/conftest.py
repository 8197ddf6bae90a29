"""Artifacts of SmolLM2 that either program made, each made once."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from pathlib import Path

import pytest
from exchange import HERE, RAW, upstream
from locations import FIXTURES

from arctool.api import bake_model


@pytest.fixture(scope="session")
def baked(smollm2_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """SmolLM2 by our baker: a type's name, or that of a recipe beside this file."""
    folder = tmp_path_factory.mktemp("ours")

    @cache
    def bake(name: str) -> Path:
        recipe = HERE / f"{name}.yaml"
        bake_model(
            str(smollm2_dir),
            folder / name,
            None if recipe.exists() else name,
            recipe=recipe if recipe.exists() else None,
            calib=None,
            measure=False,
        )
        return folder / name

    return bake


@pytest.fixture(scope="session")
def theirs(smollm2_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Callable[..., tuple[Path, list[str]]]:
    """SmolLM2 by mistral.rs as a type, and what it generated while it wrote."""
    folder = tmp_path_factory.mktemp("theirs")

    @cache
    def write(kind: str, tokens: int = 16) -> tuple[Path, list[str]]:
        (folder / kind).mkdir()
        job = {"model": str(smollm2_dir), "write": [str(folder / kind / f"{kind}.uqff"), kind]}
        return folder / kind, upstream(job, (RAW,), tokens)

    return write


@pytest.fixture(scope="session")
def qwen3_dir() -> Path:
    """The tiny Qwen3 checkpoint, whose tokenizer others borrow."""
    return FIXTURES / "checkpoints" / "qwen3"
