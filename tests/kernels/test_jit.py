"""Compiled kernels: never stale after a change of any source, safe to call from several threads, usable without a writable home."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import threading
import time
from pathlib import Path

import numpy as np
import pytest

import arctool
from arctool.kernels.cpu import jit as jit_module
from arctool.kernels.cpu.jit import SOURCES, source_digest
from arctool.kernels.cpu.jit_cache import KeyedFiles, identity

PACKAGE = Path(arctool.__file__).parent

MULTIPLY = """
import sys, threading
import numpy as np, torch
from arctool.kernels.registry import default_registry
from arctool.quant.tensor import DenseTensor

weight = DenseTensor(np.arange(64 * 32, dtype=np.float32).reshape(64, 32))
x = torch.ones((2, 32))
expected = (weight.data.astype(np.float64).sum(axis=1)).astype(np.float32)
wrong = []

def work():
    registry = default_registry()
    prepared = registry.prepare(weight)
    for _ in range(200):
        if not np.array_equal(registry.linear(x, prepared).numpy()[0], expected):
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
    for name in ("kernels/cpu/ir.py", "kernels/cpu/linear.py", "quant/codebooks.py", "bake/search/viterbi_ir.py"):
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


CLOSURES = """
import sys
import threading
import time
import numpy as np
from arctool.kernels.cpu.jit import jit

def make(factor):
    @jit()
    def inner(x):  # too long to be inlined
        total = 0
        for i in range(len(x)):
            for j in range(i):
                if x[j] > x[i]:
                    x[i], x[j] = x[j] * factor, x[i]
                elif x[j] == 7:
                    total += x[j] // (factor + x[i])
            total += x[i] * factor
        for i in range(len(x)):
            for j in range(i):
                if x[j] > x[i]:
                    x[i], x[j] = x[j] * factor, x[i]
                elif x[j] == 7:
                    total += x[j] // (factor + x[i])
            total += x[i] * factor
        return total

    @jit()
    def outer(x):
        return inner(x) + inner(x[1:])

    return outer

kernels = [make(int(factor)) for factor in sys.argv[1:]]
print([kernel(np.arange(10)) for kernel in kernels], sum(sum(kernel.stats.cache_hits.values()) for kernel in kernels))
"""


def test_closures_that_different_processes_compiled_are_found_again_and_never_mixed_up(tmp_path: Path) -> None:
    """Each process numbers its symbols from 1, so both `inner` had one name, and whoever loaded both called one for both."""
    (tmp_path / "closures.py").write_text(CLOSURES)
    environment = {**os.environ, "XDG_CACHE_HOME": str(tmp_path / "cache")}
    found = []
    for factors in ("2", "3", "23"):
        argv = [sys.executable, tmp_path / "closures.py", *factors]
        found.append(subprocess.run(argv, capture_output=True, text=True, timeout=120, check=True, env=environment).stdout.strip())
    assert found == ["[360] 0", "[540] 0", "[360, 540] 2"]


def test_every_file_that_compiles_something_is_part_of_the_cache_directorys_name() -> None:
    users = {path for path in PACKAGE.rglob("*.py") if re.search(r"cpu\.jit import .*jit|import .*intrinsic", path.read_text())}
    assert len(users) >= 8
    named = {path for pattern in SOURCES for path in PACKAGE.glob(pattern)}
    assert users <= named


def test_two_processes_that_save_at_once_cannot_get_each_others_code(tmp_path: Path) -> None:
    """numba's own files: whoever numbers last wins the index, whoever writes last the code."""
    first, second = KeyedFiles(tmp_path, "kernel"), KeyedFiles(tmp_path, "kernel")
    assert first.load("a") is None
    first.save("a", [1])
    second.save("b", [2])
    first.save("a", [3])
    assert (second.load("a"), first.load("b")) == ([3], [2])
    assert len(list(tmp_path.iterdir())) == 2
    one, other = sorted(tmp_path.iterdir())
    one.write_bytes(other.read_bytes())  # a file that strayed to another key's name
    assert sorted([first.load("a") is None, first.load("b") is None]) == [False, True]


def test_a_disk_that_refuses_costs_nothing_but_the_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*arguments: object) -> None:
        raise OSError(28, "No space left on device")

    files = KeyedFiles(tmp_path, "kernel")
    monkeypatch.setattr(os, "replace", refuse)
    files.save("a", [1])
    assert files.load("a") is None
    assert list(tmp_path.iterdir()) == []


def test_identities_tell_closures_apart() -> None:
    def make(factor: object) -> object:
        def scaled(x: int) -> object:
            return x, factor

        return scaled

    texts = [identity(make(value)) for value in (1, np.uint32(1), 1.0, True, "1", (1, 2), make(1), make(2), None)]
    assert len(set(texts)) == len(texts)
    assert identity(make((1, make(5)))) == identity(make((1, make(5))))


def test_threads_that_make_kernels_at_once_all_cache_them_in_the_one_place(monkeypatch: pytest.MonkeyPatch) -> None:
    """numba's setting is one for all threads; restored while another thread needs it, the cache would lie in the working directory."""
    seen: list[str] = []

    def slowly(function: object) -> None:
        seen.append(jit_module.config.CACHE_DIR)
        time.sleep(0.005)
        seen.append(jit_module.config.CACHE_DIR)

    monkeypatch.setattr(jit_module, "KernelCache", slowly)
    before, place = jit_module.config.CACHE_DIR, str(jit_module.cache_directory())

    def make() -> None:
        jit_module.jit()(lambda x: x)

    threads = [threading.Thread(target=make) for _ in range(16)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert seen == [place] * 32
    assert before == jit_module.config.CACHE_DIR
