"""Writing under fire: killed at any call, on a full disk, interrupted, in a race. The target is absent or whole, nothing lingers."""

from __future__ import annotations

import errno
import os
import re
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import uqff_samples as samples

from arctool.errors import ArctoolError, StorageError
from arctool.uqff.container import ArtifactWriter, BakeInfo, open_artifact, recover
from arctool.uqff.staging import Staging
from arctool.uqff.verify import verify

CHILD = """
import builtins, io, os, signal, sys
from pathlib import Path
sys.path.insert(0, sys.argv[3])
import uqff_samples as samples
from arctool.uqff import spool, files, staging
left = int(sys.argv[2])

def fatal(function):
    def call(*args, **kwargs):
        global left
        left -= 1
        if left == 0:
            os.kill(os.getpid(), signal.SIGKILL)
        return function(*args, **kwargs)
    return call

os.fsync, os.rename, os.mkdir = fatal(os.fsync), fatal(os.rename), fatal(os.mkdir)
Path.open, Path.unlink = fatal(Path.open), fatal(Path.unlink)
spool.Spool.add = fatal(spool.Spool.add)
spool.shutil.copyfileobj = fatal(spool.shutil.copyfileobj)
staging.shutil.rmtree = fatal(staging.shutil.rmtree)
samples.write(Path(sys.argv[1]), ("model.embed_tokens", "model.layers.0.q", "lm_head"), shard_bytes=100)
print(left)
"""


def child(target: Path, at: int) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", CHILD, str(target), str(at), str(Path(__file__).parent)]
    return subprocess.run(command, capture_output=True, text=True, check=False)


def tree(directory: Path) -> dict[str, bytes]:
    return {item.name: item.read_bytes() for item in directory.iterdir()}


def test_killed_at_any_call_the_target_is_absent_or_whole_and_the_next_run_equals_an_undisturbed_one(tmp_path: Path) -> None:
    calm = child(tmp_path / "calm", 1_000_000)
    assert calm.returncode == 0, calm.stderr
    calls = 1_000_000 - int(calm.stdout)
    assert calls > 60
    whole = tree(tmp_path / "calm")
    target = tmp_path / "t"
    absent = 0
    # every call near the end, where names appear; every third before
    for at in sorted({*range(1, calls, 3), *range(calls - 12, calls + 1)}):
        result = child(target, at)
        assert result.returncode == -signal.SIGKILL, result.stderr
        if target.exists():
            assert tree(target) == whole
            shutil.rmtree(target)
        else:
            absent += 1
            assert set(os.listdir(tmp_path)) - {"calm"} == {name for name in os.listdir(tmp_path) if name.startswith(".t.arctool-staging-")}
    assert absent > 20
    samples.write(target, ("model.embed_tokens", "model.layers.0.q", "lm_head"), shard_bytes=100)
    assert tree(target) == whole
    assert sorted(os.listdir(tmp_path)) == ["calm", "t"]


def test_every_file_and_name_is_durable_before_the_artifact_appears(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    events: list[str] = []
    fsync, rename = os.fsync, os.rename

    def log_fsync(handle: int) -> None:
        events.append(Path(os.readlink(f"/proc/self/fd/{handle}")).name)
        fsync(handle)

    def log_rename(source: Path, target: Path) -> None:
        events.append("rename")
        rename(source, target)

    monkeypatch.setattr(os, "fsync", log_fsync)
    monkeypatch.setattr(os, "rename", log_rename)
    samples.write(tmp_path / "a")
    *files, report, staging, renamed, parent = events
    assert sorted([*files, report]) == sorted(os.listdir(tmp_path / "a"))
    assert report == "uqff_report.json"
    assert staging.startswith(".a.arctool-staging-")
    assert (renamed, parent) == ("rename", tmp_path.name)


SMALL_DISK = """
import resource, signal, sys
from pathlib import Path
sys.path.insert(0, sys.argv[1])
import uqff_samples as samples
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
resource.setrlimit(resource.RLIMIT_FSIZE, (16384, 16384))
samples.write(Path(sys.argv[2]) / "a")
"""
"""A file-size limit of 16 KiB stands for a disk that takes no more. In a process of its own: the tests' own log may be a longer file."""


def test_a_file_that_the_system_cuts_off_is_one_error_and_leaves_nothing(tmp_path: Path) -> None:
    command = [sys.executable, "-c", SMALL_DISK, str(Path(samples.__file__).parent), str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    last = done.stderr.splitlines()[-1]
    assert last.startswith("arctool.errors.StorageError: ")
    assert re.search(r"qtip2b-0\.uqff: cannot write: File too large; \d+ bytes are free there", last)
    assert os.listdir(tmp_path) == []


@pytest.mark.parametrize("call", ["fsync", "rename", "mkdir"])
@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EACCES, errno.EROFS])
def test_a_refusing_system_is_one_error_that_names_place_and_reason(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, call: str, code: int
) -> None:
    def refuse(*args: object, **kwargs: object) -> None:
        raise OSError(code, os.strerror(code))

    monkeypatch.setattr(os, call, refuse)
    with pytest.raises(StorageError, match=f"{tmp_path}.*: cannot write: {os.strerror(code)}; .* bytes are free"):
        samples.write(tmp_path / "a")
    monkeypatch.undo()
    assert os.listdir(tmp_path) == []


def test_a_disk_that_fills_up_at_any_write_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each write to a file of the artifact fails once, in turn, until one run meets no failure."""
    from arctool.uqff import files, spool

    failures = 0
    for at in range(1, 200):
        left = at

        def full(file: object, real: object = spool.sync) -> None:
            nonlocal left
            left -= 1
            if left == 0:
                raise OSError(errno.ENOSPC, "No space left on device")
            real(file)  # type: ignore[operator]

        monkeypatch.setattr(spool, "sync", full)
        monkeypatch.setattr(files, "sync", full)
        try:
            samples.write(tmp_path / "a", shard_bytes=300)
        except StorageError as error:
            failures += 1
            assert "No space left on device" in str(error)  # noqa: PT017 - the loop needs both outcomes
            assert os.listdir(tmp_path) == []
            monkeypatch.undo()
        else:
            break
    assert failures == 5 + 1 + 1 + 2 + 1  # shards, residual, config, assets, report
    assert os.listdir(tmp_path) == ["a"]


@pytest.mark.parametrize("error", [KeyboardInterrupt, SystemExit, ValueError])
def test_any_exception_removes_what_was_written(tmp_path: Path, error: type[BaseException]) -> None:
    def bake() -> None:
        with ArtifactWriter(tmp_path / "a", "q", config={}, assets={}) as w:
            w.add_layer("x", samples.dense(2, 2))
            assert len(os.listdir(tmp_path)) == 1
            raise error

    with pytest.raises(error):
        bake()
    assert os.listdir(tmp_path) == []


def test_leaving_without_finish_leaves_nothing(tmp_path: Path) -> None:
    with ArtifactWriter(tmp_path / "a", "q", config={}, assets={}) as w:
        w.add_layer("x", samples.dense(2, 2))
    assert os.listdir(tmp_path) == []


@pytest.mark.parametrize("kind", ["directory", "file", "dangling link"])
def test_an_existing_target_is_refused_before_any_work(tmp_path: Path, kind: str) -> None:
    target = tmp_path / "a"
    {"directory": target.mkdir, "file": target.touch, "dangling link": lambda: target.symlink_to("nowhere")}[kind]()
    with pytest.raises(StorageError, match="already exists"):
        ArtifactWriter(target, "q", config={}, assets={})
    assert os.listdir(tmp_path) == ["a"]


def test_overwriting_swaps_the_old_artifact_for_the_new(tmp_path: Path) -> None:
    samples.write(tmp_path / "a")
    with ArtifactWriter(tmp_path / "a", "new", config={}, assets={}, overwrite=True) as w:
        w.add_layer("x", samples.dense(2, 2))
        assert open_artifact(tmp_path / "a").keys() == tuple(samples.layers())
        w.finish(BakeInfo("new", 0))
    assert open_artifact(tmp_path / "a").keys() == ("x",)
    assert os.listdir(tmp_path) == ["a"]
    (tmp_path / "f").touch()
    with pytest.raises(StorageError, match="not a directory"):
        ArtifactWriter(tmp_path / "f", "q", config={}, assets={}, overwrite=True)


def test_a_swap_that_died_half_way_is_undone_by_the_next_run(tmp_path: Path) -> None:
    samples.write(tmp_path / "a")
    (tmp_path / "a").rename(tmp_path / ".a.arctool-old-0123")
    with ArtifactWriter(tmp_path / "a", "q", config={}, assets={}, overwrite=True):
        assert open_artifact(tmp_path / "a").keys() == tuple(samples.layers())
    assert os.listdir(tmp_path) == ["a"]


def test_after_a_swap_that_died_a_run_that_may_not_overwrite_is_refused_before_any_work(tmp_path: Path) -> None:
    samples.write(tmp_path / "a")
    before = tree(tmp_path / "a")
    (tmp_path / "a").rename(tmp_path / ".a.arctool-old-0123")
    dead = tmp_path / ".a.arctool-staging-dead"
    dead.mkdir()
    with pytest.raises(StorageError, match="already exists"):
        ArtifactWriter(tmp_path / "a", "q", config={}, assets={})
    assert os.listdir(tmp_path) == ["a"]
    assert tree(tmp_path / "a") == before


def test_recovering_touches_nothing_of_others_and_no_run_that_is_alive(tmp_path: Path) -> None:
    recover(tmp_path / "not" / "there")
    others = [".ab.arctool-old-0123", ".a.arctool-journal", ".b.arctool-staging-01", "x"]
    for name in others:
        (tmp_path / name).mkdir()
    live = Staging(tmp_path / "a", overwrite=True)
    (tmp_path / ".a.arctool-old-0123").mkdir()  # the live run is between its two renames
    recover(tmp_path / "a")
    assert sorted(os.listdir(tmp_path)) == sorted([*others, live.path.name, ".a.arctool-old-0123"])
    live.abandon()
    recover(tmp_path / "a")
    assert sorted(os.listdir(tmp_path)) == sorted([*others, "a"])


def test_an_old_artifact_beside_its_replacement_is_removed(tmp_path: Path) -> None:
    samples.write(tmp_path / "a")
    (tmp_path / ".a.arctool-old-0123").mkdir()
    recover(tmp_path / "a")
    assert os.listdir(tmp_path) == ["a"]


def test_a_target_that_appears_meanwhile_is_not_destroyed(tmp_path: Path) -> None:
    def bake() -> None:
        with ArtifactWriter(tmp_path / "a", "q", config={}, assets={}) as w:
            (tmp_path / "a").mkdir()
            (tmp_path / "a" / "precious").touch()
            w.finish(BakeInfo("q", 0))

    with pytest.raises(StorageError, match=r"a: cannot write: Directory not empty"):
        bake()
    assert os.listdir(tmp_path) == ["a"]
    assert os.listdir(tmp_path / "a") == ["precious"]


def test_a_live_run_for_the_same_target_is_left_alone_and_a_dead_one_is_cleared(tmp_path: Path) -> None:
    dead = tmp_path / ".a.arctool-staging-dead"
    dead.mkdir()
    (dead / "q-0.uqff").touch()
    other = tmp_path / ".ab.arctool-staging-beef"
    other.mkdir()
    live = Staging(tmp_path / "a", overwrite=False)
    assert not dead.exists()
    samples.write(tmp_path / "a")
    assert live.path.exists()
    assert other.exists()
    live.abandon()
    assert sorted(os.listdir(tmp_path)) == [".ab.arctool-staging-beef", "a"]


def test_a_parent_that_is_a_file_is_one_error(tmp_path: Path) -> None:
    (tmp_path / "f").touch()
    with pytest.raises(ArctoolError, match=r"cannot write|already exists"):
        samples.write(tmp_path / "f" / "a")


def test_a_missing_parent_is_made(tmp_path: Path) -> None:
    samples.write(tmp_path / "deep" / "er" / "a")
    assert verify(tmp_path / "deep" / "er" / "a").container.passed
