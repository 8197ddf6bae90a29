"""Fixtures of the engine's tests: one thread, and one registry and loaded model for each tiny checkpoint."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numba
import pytest
import torch
from tiny_models import VARIANTS, DirectorySource, Reference, make_variant, reference

from arctool.kernels.registry import Registry, default_registry

CHECKPOINTS = Path(__file__).resolve().parents[2] / "fixtures" / "checkpoints"
NAMES = (*VARIANTS, "llama", "mistral", "qwen2", "qwen3", "mixtral", "qwen3_moe")


@pytest.fixture(autouse=True, scope="session")
def _one_thread(one_thread: None) -> None:
    """For every test of this room."""


@pytest.fixture
def threads(request: pytest.FixtureRequest) -> Iterator[int]:
    """As many threads as the parameter says, for torch and (as far as the machine has them) for numba."""
    before = torch.get_num_threads(), numba.get_num_threads()
    torch.set_num_threads(request.param)
    numba.set_num_threads(min(request.param, numba.config.NUMBA_NUM_THREADS))
    yield request.param
    torch.set_num_threads(before[0])
    numba.set_num_threads(before[1])


@pytest.fixture(scope="session")
def registry() -> Registry:
    return default_registry()


@pytest.fixture(scope="session", params=NAMES)
def tiny_dir(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Each tiny model's directory: the committed checkpoints, and the variants made here."""
    if request.param in VARIANTS:
        return make_variant(request.param, tmp_path_factory.mktemp(request.param))
    return CHECKPOINTS / str(request.param)


@pytest.fixture(scope="session")
def tiny(tiny_dir: Path) -> DirectorySource:
    return DirectorySource(tiny_dir)


@pytest.fixture(scope="session")
def expected(tiny_dir: Path) -> Reference:
    """What transformers computes for the same directory."""
    return reference(tiny_dir)


@pytest.fixture(scope="session")
def llama() -> DirectorySource:
    return DirectorySource(CHECKPOINTS / "llama")
