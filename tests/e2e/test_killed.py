"""A bake killed at any moment leaves no artifact or a whole one, and the same command then ends with the bytes of an undisturbed run."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import time
from pathlib import Path

import pytest
from commands import ok, refused, tree
from zygote import Child, Zygote

from arctool.errors import InterruptedByUser, StorageError

KILL = """
import builtins, io, os, pathlib, shutil, signal
calls = 0
def fatal(real):
    def call(*arguments, **options):
        global calls
        calls += 1
        if calls == {at}:
            os.kill(os.getpid(), signal.SIGKILL)
        if {at} < 0:
            handle = os.open({count!r}, os.O_WRONLY | os.O_CREAT)
            os.pwrite(handle, b"%d" % calls, 0)
            os.close(handle)
        return real(*arguments, **options)
    return call
for name in ("fsync", "replace", "rename", "mkdir", "unlink", "rmdir"):
    setattr(os, name, fatal(getattr(os, name)))
pathlib.Path.open = fatal(pathlib.Path.open)
shutil.copyfileobj = fatal(shutil.copyfileobj)
shutil.rmtree = fatal(shutil.rmtree)
"""
"""Dies at the chosen one of all calls that change what is on the disk."""

LEFT_OVER = re.compile(r"\.a\.arctool-(journal|staging-[0-9a-f]+)")


def strangers(folder: Path) -> list[str]:
    """What lies in `folder` that is neither the artifact `a` nor a left-over of a bake of it."""
    return [name for name in os.listdir(folder) if name != "a" and not LEFT_OVER.fullmatch(name)]


def test_killed_at_any_call_a_bake_leaves_nothing_or_all_and_the_next_run_is_the_same_to_the_byte(
    zygote: Zygote, one_layer: Path, memory_path: Path
) -> None:
    argv = ("bake", one_layer, "--isq", "qtip4", "--calib", "none", "-q", "-o", "a", "--json")
    place, count = memory_path / "place", memory_path / "count"
    place.mkdir()
    ok(zygote.run(*argv, cwd=place, hook=KILL.format(at=-1, count=str(count))))
    whole, calls = tree(place / "a"), int(count.read_text())
    assert calls > 50
    absent, resumed = 0, set()
    for at in range(1, calls + 1):
        shutil.rmtree(place)
        place.mkdir()
        died = zygote.run(*argv, cwd=place, hook=KILL.format(at=at, count=""))
        assert died.code == -signal.SIGKILL, died
        assert strangers(place) == []
        if (place / "a").exists():
            assert tree(place / "a") == whole
        else:
            absent += 1
        again = ok(zygote.run(*argv, cwd=place))
        resumed.add(json.loads(again.stdout)["resumed"])
        assert tree(place / "a") == whole, at
        assert os.listdir(place) == ["a"], at
    assert absent > 40
    assert resumed >= set(range(8))


@pytest.mark.parametrize("options", [("--calib", "none"), ("--calib-tokens", "512", "--no-measure")], ids=["rounded", "calibrated"])
def test_killed_by_the_clock_a_bake_leaves_nothing_or_all_and_goes_on(
    zygote: Zygote, tiny_llama: Path, tmp_path: Path, options: tuple[str, ...]
) -> None:
    """Wherever a kill falls, between the calls of the test above too: one run is killed again and again until it is through."""
    argv = ("bake", tiny_llama, "--isq", "qtip4", *options, "-q", "-o", "a", "--jobs", "2")
    ok(zygote.run(*argv, cwd=tmp_path))
    whole = tree(tmp_path / "a")
    shutil.rmtree(tmp_path / "a")
    began = time.monotonic()
    ok(zygote.run(*argv, cwd=tmp_path))
    span = time.monotonic() - began
    kills = 0
    for step in range(24):
        if (tmp_path / "a").exists():
            assert tree(tmp_path / "a") == whole
            shutil.rmtree(tmp_path / "a")
        kills += killed_after(zygote.start(*argv, cwd=tmp_path), span * (step % 12 + 0.5) / 12)
        assert strangers(tmp_path) == []
    assert kills >= 8
    ok(zygote.run(*argv, cwd=tmp_path))
    assert tree(tmp_path / "a") == whole
    assert os.listdir(tmp_path) == ["a"]


def killed_after(child: Child, seconds: float) -> bool:
    """Let the child live for `seconds`; whether it was still at work then."""
    until = time.monotonic() + seconds
    while time.monotonic() < until:
        os.sched_yield()
    child.kill()
    code = child.wait().code
    assert code in (0, -signal.SIGKILL)
    return code != 0


def test_a_replacement_killed_at_any_call_leaves_the_old_artifact_or_the_new(zygote: Zygote, one_layer: Path, memory_path: Path) -> None:
    argv = ("bake", one_layer, "-q", "--force", "-o", "a", "--calib", "none", "--isq")
    place, count = memory_path / "place", memory_path / "count"
    place.mkdir()
    ok(zygote.run(*argv, "bf16", cwd=place))
    old = tree(place / "a")
    shutil.copytree(place / "a", memory_path / "old")
    ok(zygote.run(*argv, "qtip4", cwd=place, hook=KILL.format(at=-1, count=str(count))))
    new, calls = tree(place / "a"), int(count.read_text())
    assert old != new
    seen = set()
    for at in (*range(calls - 34, calls - 16, 6), *range(calls - 16, calls + 1)):
        shutil.rmtree(place)
        shutil.copytree(memory_path / "old", place / "a")
        assert zygote.run(*argv, "qtip4", cwd=place, hook=KILL.format(at=at, count="")).code == -signal.SIGKILL
        found = [tree(path) for path in place.iterdir() if path.name == "a" or ".arctool-old-" in path.name]
        assert old in found or new in found, os.listdir(place)
        seen.add("new" if new in found else "old")
        ok(zygote.run(*argv, "qtip4", cwd=place))
        assert tree(place / "a") == new
        assert os.listdir(place) == ["a"], at
    assert seen == {"old", "new"}


AFTER_LAYERS = """
import os, signal
from arctool.bake.journal import Journal
store, stored = Journal.store, 0
def counted(self, *arguments):
    global stored
    store(self, *arguments)
    stored += 1
    if stored == {count}:
        {action}
Journal.store = counted
"""


@pytest.mark.parametrize("layers", [1, 5, 14])
def test_control_c_keeps_the_finished_layers_and_the_same_command_goes_on(
    zygote: Zygote, tiny_llama: Path, tiny_artifact: Path, tmp_path: Path, layers: int
) -> None:
    argv = ("bake", tiny_llama, "--isq", "qtip4", "--calib", "none", "-q", "-o", "a", "--json")
    hook = AFTER_LAYERS.format(count=layers, action="os.kill(os.getpid(), signal.SIGINT)")
    line = refused(
        zygote.run(*argv, cwd=tmp_path, hook=hook), InterruptedByUser.exit_code, f"interrupted; {layers} of 14 layers are kept in"
    )
    assert str(tmp_path / ".a.arctool-journal") in line
    assert os.listdir(tmp_path) == [".a.arctool-journal"]
    again = ok(zygote.run(*argv, cwd=tmp_path))
    assert json.loads(again.stdout)["resumed"] == layers
    assert tree(tmp_path / "a") == tree(tiny_artifact)
    assert os.listdir(tmp_path) == ["a"]


@pytest.mark.parametrize("place", ["arctool.api.open_checkpoint", "arctool.bake.pipeline.plan", "arctool.uqff.inspect.inspect"])
def test_control_c_anywhere_else_is_one_line_too(zygote: Zygote, tiny_llama: Path, tmp_path: Path, place: str) -> None:
    module, _, name = place.rpartition(".")
    hook = f"import os, signal, {module} as m\nm.{name} = lambda *a, **o: os.kill(os.getpid(), signal.SIGINT)"
    done = zygote.run("bake", tiny_llama, "--isq", "qtip4", "--calib", "none", "-q", "-o", "a", cwd=tmp_path, hook=hook)
    assert done.code == InterruptedByUser.exit_code
    assert done.stderr == "arctool: interrupted\n"
    assert set(os.listdir(tmp_path)) <= {"a"}


CALLBACK = """
import ctypes, time, arctool.bake.pipeline as m
real = m.plan

@ctypes.CFUNCTYPE(None)
def call():
    raise KeyboardInterrupt

def plan(*arguments):
    call()
    time.sleep(5)
    return real(*arguments)

m.plan = plan
"""
"""What a compiler does that calls back into Python: nothing can be raised out of it."""


def test_control_c_inside_a_call_from_c_is_heeded_behind_it(zygote: Zygote, tiny_llama: Path, tmp_path: Path) -> None:
    done = zygote.run("bake", tiny_llama, "--isq", "qtip4", "--calib", "none", "-q", "-o", "a", cwd=tmp_path, hook=CALLBACK)
    assert (done.code, done.stderr) == (InterruptedByUser.exit_code, "arctool: interrupted\n")
    assert os.listdir(tmp_path) == []


@pytest.mark.parametrize(("place", "kept"), [("CalibratedLayers", [".a.arctool-journal"]), ("sample_windows", [])])
def test_control_c_before_the_first_layer_says_truly_what_is_kept(
    zygote: Zygote, tiny_llama: Path, tmp_path: Path, place: str, kept: list[str]
) -> None:
    """The text that the model wrote is worth keeping."""
    argv = ("bake", tiny_llama, "--isq", "qtip4", "--calib-tokens", "2048", "-q", "-o", "a")
    hook = f"import os, signal, arctool.bake.pipeline as m\nm.{place} = lambda *a, **o: os.kill(os.getpid(), signal.SIGINT)"
    words = "0 of 14 layers are kept in" if kept else "interrupted; there was nothing to keep yet"
    refused(zygote.run(*argv, cwd=tmp_path, hook=hook), InterruptedByUser.exit_code, words)
    assert os.listdir(tmp_path) == kept
    ok(zygote.run(*argv, cwd=tmp_path))
    assert os.listdir(tmp_path) == ["a"]


def test_two_bakes_to_one_output_do_not_meet(zygote: Zygote, tiny_llama: Path, tiny_artifact: Path, tmp_path: Path) -> None:
    arrived, go_on, place = tmp_path / "arrived", tmp_path / "go_on", tmp_path / "place"
    place.mkdir()
    for pipe in (arrived, go_on):
        os.mkfifo(pipe)
    argv = ("bake", tiny_llama, "--isq", "qtip4", "--calib", "none", "-q", "-o", "a")
    wait = f"open({str(arrived)!r}, 'w').close(); open({str(go_on)!r}).close()"
    first = zygote.start(*argv, cwd=place, hook=AFTER_LAYERS.format(count=3, action=wait))
    arrived.open().close()
    before = tree(place)
    for other in (argv, (*argv, "--force"), (*argv, "--seed", "1")):
        second = zygote.run(*other, cwd=place)
        refused(second, StorageError.exit_code, str(place), "another bake to the same output is running")
    assert tree(place) == before
    go_on.open("w").close()
    ok(first.wait())
    assert tree(place / "a") == tree(tiny_artifact)
    assert os.listdir(place) == ["a"]


def recipe(folder: Path, *rungs: str) -> Path:
    """A recipe that gives each layer its rung."""
    path = folder / f"{'-'.join(rungs)}.yml"
    path.write_text("".join(f"{layer}: {{isq: {rung}}}\n" for layer, rung in enumerate(rungs)))
    return path


def test_layers_of_another_seed_source_or_recipe_are_not_mixed_in(
    zygote: Zygote, tiny_checkpoints: dict[str, Path], tmp_path: Path
) -> None:
    stop = AFTER_LAYERS.format(count=6, action="os.kill(os.getpid(), signal.SIGKILL)")
    llama = ("bake", tiny_checkpoints["llama"], "--calib", "none", "-q", "--json", "-o")
    wanted = ("--isq", "qtip4", "--seed", "3", "--recipe", str(recipe(tmp_path, "qtip4", "qtip3")))
    place = tmp_path / "place"
    place.mkdir()
    ok(zygote.run(*llama, "calm", *wanted, cwd=place))
    others = (
        (*llama, "a", *wanted, "--seed", "4"),
        (*llama, "a", "--isq", "qtip3", "--seed", "3"),
        (*llama, "a", "--isq", "qtip4", "--seed", "3", "--recipe", recipe(tmp_path, "qtip3", "qtip4")),
        ("bake", tiny_checkpoints["mistral"], "--calib", "none", "-q", "-o", "a", *wanted),
    )
    for other in others:
        assert zygote.run(*other, cwd=place, hook=stop).code == -signal.SIGKILL
        assert len(list((place / ".a.arctool-journal").glob("*.layer"))) == 6
        done = ok(zygote.run(*llama, "a", *wanted, cwd=place))
        assert json.loads(done.stdout)["resumed"] == 0
        assert tree(place / "a") == tree(place / "calm")
        shutil.rmtree(place / "a")
    assert os.listdir(place) == ["calm"]


def test_a_damaged_journal_costs_the_damaged_layers_only(zygote: Zygote, tiny_llama: Path, tiny_artifact: Path, tmp_path: Path) -> None:
    argv = ("bake", tiny_llama, "--isq", "qtip4", "--calib", "none", "-q", "--json", "-o", "a")
    stop = AFTER_LAYERS.format(count=8, action="os.kill(os.getpid(), signal.SIGKILL)")
    assert zygote.run(*argv, cwd=tmp_path, hook=stop).code == -signal.SIGKILL
    journal = tmp_path / ".a.arctool-journal"
    layers = sorted(journal.glob("*.layer"))
    layers[0].write_bytes(b"")
    layers[1].write_bytes(layers[1].read_bytes()[:-1])
    layers[2].write_bytes(layers[2].read_bytes()[:20])
    data = layers[3].read_bytes()
    layers[3].write_bytes(data[:-300] + bytes([data[-300] ^ 4]) + data[-299:])
    layers[4].write_bytes(data)
    (journal / "00099.layer.part").write_bytes(b"half")
    done = ok(zygote.run(*argv, cwd=tmp_path))
    assert json.loads(done.stdout)["resumed"] == 3
    assert tree(tmp_path / "a") == tree(tiny_artifact)
    assert os.listdir(tmp_path) == ["a"]


def test_a_damaged_journal_header_costs_the_journal(zygote: Zygote, tiny_llama: Path, tiny_artifact: Path, tmp_path: Path) -> None:
    argv = ("bake", tiny_llama, "--isq", "qtip4", "--calib", "none", "-q", "--json", "-o", "a")
    stop = AFTER_LAYERS.format(count=2, action="os.kill(os.getpid(), signal.SIGKILL)")
    assert zygote.run(*argv, cwd=tmp_path, hook=stop).code == -signal.SIGKILL
    (tmp_path / ".a.arctool-journal" / "bake.json").write_bytes(b"{")
    assert json.loads(ok(zygote.run(*argv, cwd=tmp_path)).stdout)["resumed"] == 0
    assert tree(tmp_path / "a") == tree(tiny_artifact)
    assert os.listdir(tmp_path) == ["a"]
