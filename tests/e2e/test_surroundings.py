"""Odd surroundings: an output that cannot spell, closed streams, no home, a working directory that is gone. One line, never a traceback."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest
from commands import MODULE, arctool, ok, refused


@pytest.mark.parametrize(
    "argv", [("inspect",), ("verify", "--quiet"), ("run", "--prompt", "née ✓", "--max-tokens", "4")], ids=lambda a: a[0]
)
def test_an_output_that_cannot_spell_a_character_shows_another(argv: tuple[str, ...], tiny_artifact: Path) -> None:
    ok(arctool(argv[0], tiny_artifact, *argv[1:], PYTHONIOENCODING="ascii"))


@pytest.mark.parametrize("closing", ["<&-", ">&-", "2>&-"])
def test_a_closed_stream_is_no_traceback(closing: str, tiny_artifact: Path) -> None:
    command = f'"$@" {closing}'
    for argv in (("run", tiny_artifact, "--prompt", "-"), ("run", tiny_artifact), ("inspect", tiny_artifact)):
        words = ["sh", "-c", command, "sh", *MODULE, *map(os.fspath, argv)]
        done = subprocess.run(words, capture_output=True, text=True, timeout=120, check=False, stdin=subprocess.DEVNULL)
        assert "Traceback" not in done.stdout + done.stderr
        assert done.returncode in (0, 7), done


def test_a_home_that_nobody_has_is_a_path_that_does_not_exist() -> None:
    refused(arctool("run", "~nobodyxx/model"), 3, "~nobodyxx/model")
    refused(arctool("bake", "~nobodyxx/model", "--isq", "qtip4"), 3, "~nobodyxx/model")


def test_a_working_directory_that_is_gone_is_said(tmp_path: Path) -> None:
    gone = tmp_path / "gone"
    gone.mkdir()
    words = ["sh", "-c", 'cd "$0" && rmdir "$0" && exec "$@"', str(gone), *MODULE, "doctor"]
    done = subprocess.run(words, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 6
    assert done.stderr.startswith("arctool: error: ")
    assert len(done.stderr.splitlines()) == 1


def test_names_that_say_nothing_are_refused(tiny_llama: Path) -> None:
    for argv in (("bake", "", "--isq", "qtip4"), ("run", "")):
        refused(arctool(*argv), 3, "an empty name")
    refused(arctool("bake", tiny_llama, "--isq", "qtip4", "-o", ""), 6, "already exists")


def test_kernels_without_their_compiler_are_refused_by_the_switch_that_took_it(tiny_artifact: Path) -> None:
    refused(arctool("run", tiny_artifact, "--prompt", "x", NUMBA_DISABLE_JIT="1"), 2, "NUMBA_DISABLE_JIT")


def test_a_prompt_that_no_context_holds_is_refused_by_its_length(tiny_artifact: Path) -> None:
    refused(arctool("run", tiny_artifact, "--prompt", "-", stdin="a" * 2_000_001), 7, "2000001 characters")
