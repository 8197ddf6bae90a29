"""Disks that are full, fail, or end: one line, its exit code, nothing half-written but finished layers, and the next run is whole."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from commands import ok, refused, tree
from zygote import Zygote

from arctool.errors import SourceError, StorageError

SOURCE, STORAGE = SourceError.exit_code, StorageError.exit_code


def test_a_full_disk_behind_standard_output_is_one_line(tiny_artifact: Path, zygote: Zygote) -> None:
    full = "import os\nos.dup2(os.open('/dev/full', os.O_WRONLY), 1)"
    for argv in (("inspect", tiny_artifact), ("inspect", tiny_artifact, "--json"), ("run", tiny_artifact, "-p", "x", "--max-tokens", "2")):
        refused(zygote.run(*argv, hook=full), STORAGE, "No space left on device")


LIMIT = "import resource, signal\nsignal.signal(signal.SIGXFSZ, signal.SIG_IGN)\nresource.setrlimit(resource.RLIMIT_FSIZE, ({0}, {0}))"


@pytest.mark.parametrize("limit", [1000, 30_000, 60_000, 110_000])
def test_a_disk_that_takes_no_more_leaves_nothing_but_finished_layers(
    zygote: Zygote, tiny_llama: Path, tiny_artifact: Path, tmp_path: Path, limit: int
) -> None:
    argv = ("bake", tiny_llama, "--isq", "qtip4", "--calib", "none", "-q", "-o", "a")
    refused(zygote.run(*argv, cwd=tmp_path, hook=LIMIT.format(limit)), STORAGE, str(tmp_path), "cannot write", "File too large")
    left = os.listdir(tmp_path)
    layers = len(list(tmp_path.glob(".a.arctool-journal/*.layer")))
    assert left == ([".a.arctool-journal"] if layers else [])
    assert not list(tmp_path.glob("*/*.part"))
    assert (layers == 0) == (limit < 512 * 2 * 34)  # the embedding, which comes first and is not journalled
    again = json.loads(ok(zygote.run(*argv, "--json", cwd=tmp_path)).stdout)
    assert again["resumed"] == layers
    assert tree(tmp_path / "a") == tree(tiny_artifact)
    assert os.listdir(tmp_path) == ["a"]


REFUSE = """
import errno, os
calls = 0
def refusing(real):
    def call(*arguments, **options):
        global calls
        calls += 1
        open({count!r}, "w").write(str(calls))
        if calls == {at}:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return real(*arguments, **options)
    return call
for name in ("fsync", "replace", "rename", "mkdir"):
    setattr(os, name, refusing(getattr(os, name)))
"""


def test_a_disk_that_is_full_at_any_one_call_is_one_line_and_leaves_nothing_half_written(
    zygote: Zygote, one_layer: Path, memory_path: Path
) -> None:
    argv = ("bake", one_layer, "--isq", "qtip4", "--calib", "none", "-q", "-o", "a")
    place, count = memory_path / "place", memory_path / "count"
    place.mkdir()
    ok(zygote.run(*argv, cwd=place, hook=REFUSE.format(at=-1, count=str(count))))
    whole, calls = tree(place / "a"), int(count.read_text())
    assert calls > 30
    refusals = 0
    for at in range(1, calls + 1):
        for item in list(place.iterdir()):
            shutil.rmtree(item)
        done = zygote.run(*argv, cwd=place, hook=REFUSE.format(at=at, count=str(count)))
        left = os.listdir(place)
        if done.code == 0:  # the compiler's cache could not be made, which costs time and nothing else
            assert tree(place / "a") == whole
            assert left == ["a"]
            continue
        refusals += 1
        refused(done, STORAGE, str(place), "cannot write: No space left on device")
        layers = len(list(place.glob(".a.arctool-journal/*.layer")))
        assert left == ([".a.arctool-journal"] if layers else []) or tree(place / "a") == whole, (at, left)
    assert refusals > 30


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Callable[[int], Path]]:
    """Mounts a file system of so many bytes at a folder, or makes it larger; where mounting is not allowed the folder has no limit."""
    folder = tmp_path / "disk"
    folder.mkdir()
    mounted = False

    def size(nbytes: int) -> Path:
        nonlocal mounted
        option = f"{'remount,' if mounted else ''}size={nbytes}"
        done = subprocess.run(["mount", "-t", "tmpfs", "-o", option, "tmpfs", folder], capture_output=True, check=False)
        mounted = mounted or done.returncode == 0
        return folder

    yield size
    if mounted:
        subprocess.run(["umount", folder], check=True)


def test_on_a_disk_too_small_nothing_appears_and_on_a_larger_one_the_bake_goes_on(
    zygote: Zygote, tiny_llama: Path, tiny_artifact: Path, small_disk: Callable[[int], Path]
) -> None:
    for size in range(16 << 10, 1 << 20, 48 << 10):
        folder = small_disk(size)
        done = zygote.run("bake", tiny_llama, "--isq", "qtip4", "--calib", "none", "-o", folder / "a", "-q")
        if done.code == 0:
            break
        refused(done, STORAGE, str(folder), "cannot write: No space left on device")
        assert not (folder / "a").exists()
        assert os.listdir(folder) in ([], [".a.arctool-journal"])
    assert done.code == 0
    assert tree(folder / "a") == tree(tiny_artifact)
    assert os.listdir(folder) == ["a"]


SHRINK = """
import arctool.bake.pipeline as pipeline
store = pipeline.Journal.store
def shrinking(self, index, layer):
    store(self, index, layer)
    open({path!r}, "r+b").truncate(300000)
pipeline.Journal.store = shrinking
"""


def test_a_source_that_fails_while_it_is_read_is_one_line_and_keeps_what_was_done(
    zygote: Zygote, copy_checkpoint: Callable[[str], Path], tmp_path: Path
) -> None:
    model = copy_checkpoint("llama")
    weights = model / "model.safetensors"
    whole = weights.read_bytes()
    argv = ("bake", model, "--isq", "qtip4", "--calib", "none", "-o", "a")
    refused(zygote.run(*argv, cwd=tmp_path, hook=SHRINK.format(path=str(weights))), SOURCE, str(weights), "the file ends after")
    assert sorted(os.listdir(tmp_path)) == [".a.arctool-journal", "llama"]
    weights.write_bytes(whole)
    assert json.loads(ok(zygote.run(*argv, "--json", cwd=tmp_path)).stdout)["resumed"] > 0
