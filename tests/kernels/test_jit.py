"""Compiled kernels: never stale after a change of any source, safe to call from several threads, usable without a writable home."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import arctool
from arctool.kernels.cpu.jit import source_digest

PACKAGE = Path(arctool.__file__).parent

MULTIPLY = """
import sys, threading
import numpy as np, torch
from arctool.kernels.registry import TokenClass, default_registry
from arctool.quant.tensor import DenseTensor

weight = DenseTensor(np.arange(64 * 32, dtype=np.float32).reshape(64, 32))
x = torch.ones((2, 32))
expected = (weight.data.astype(np.float64).sum(axis=1)).astype(np.float32)
wrong = []

def work():
    registry = default_registry()
    prepared = registry.prepare(weight)
    for _ in range(200):
        if not np.array_equal(registry.linear(x, prepared, TokenClass.DECODE).numpy()[0], expected):
            wrong.append(1)

threads = [threading.Thread(target=work) for _ in range(4)]
for thread in threads: thread.start()
for thread in threads: thread.join()
sys.exit(len(wrong))
"""


def test_a_change_in_any_source_of_machine_code_changes_the_cache_directory(tmp_path: Path) -> None:
    copy = tmp_path / "arctool"
    shutil.copytree(PACKAGE, copy, ignore=shutil.ignore_patterns("__pycache__"))
    before = source_digest(copy)
    assert before == source_digest(PACKAGE)
    for name in ("kernels/cpu/ir.py", "kernels/cpu/rows.py", "quant/codebooks.py", "bake/viterbi_ir.py"):
        file = copy / name
        original = file.read_bytes()
        file.write_bytes(original + b"\n")
        assert source_digest(copy) != before, name
        file.write_bytes(original)


def test_parallel_kernels_may_be_called_from_several_threads_at_once() -> None:
    """numba's work queue ends the process when two threads enter it together."""
    done = subprocess.run([sys.executable, "-c", MULTIPLY], capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr


def test_kernels_run_where_no_cache_can_be_written(tmp_path: Path) -> None:
    blocked = tmp_path / "file"
    blocked.write_text("not a directory")
    environment = {**os.environ, "XDG_CACHE_HOME": str(blocked), "HOME": str(blocked)}
    done = subprocess.run([sys.executable, "-c", MULTIPLY], capture_output=True, text=True, timeout=120, check=False, env=environment)
    assert done.returncode == 0, done.stderr
