"""Fixtures of the end-to-end tests."""

from __future__ import annotations

import json
import os
import shutil
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from commands import ok
from safetensors.numpy import load_file, save_file
from zygote import Zygote

# The hub stand-in and the GGUF writer of that room serve here too.
sys.path.append(str(Path(__file__).parents[1] / "bake"))


@pytest.fixture(scope="session")
def zygote(tiny_llama: Path) -> Iterator[Zygote]:
    """Starts `arctool` in milliseconds; see `zygote.py`."""
    with Zygote(tiny_llama) as server:
        yield server


@pytest.fixture(scope="session")
def tiny_artifact(zygote: Zygote, tiny_llama: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The tiny Llama at qtip4, baked by the command line without calibration (read only)."""
    target = tmp_path_factory.mktemp("baked") / "llama"
    ok(zygote.run("bake", tiny_llama, "--isq", "qtip4", "--calib", "none", "-o", target))
    return target


@pytest.fixture
def memory_path(tmp_path: Path) -> Iterator[Path]:
    """An empty folder in memory where the machine has one, for tests that wait for the disk thousands of times."""
    shared = Path("/dev/shm")
    if not os.access(shared, os.W_OK):
        yield tmp_path
        return
    with tempfile.TemporaryDirectory(dir=shared, prefix="arctool-e2e-") as folder:
        yield Path(folder)


@pytest.fixture(scope="session")
def one_layer(tiny_llama: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The tiny Llama cut down to one layer, so that a test can bake it a hundred times (read only)."""
    folder = Path(shutil.copytree(tiny_llama, tmp_path_factory.mktemp("one") / "one"))
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "num_hidden_layers": 1}))
    weights = load_file(folder / "model.safetensors")
    kept = {name: values for name, values in weights.items() if not name.startswith("model.layers.1.")}
    save_file(kept, folder / "model.safetensors")
    return folder


@pytest.fixture
def artifact(tiny_artifact: Path, tmp_path: Path) -> Path:
    """A baked tiny Llama to be broken."""
    return Path(shutil.copytree(tiny_artifact, tmp_path / "artifact"))
