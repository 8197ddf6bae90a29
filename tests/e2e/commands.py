"""`arctool` as a user starts it, and what every test of the command line asks of an answer."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from zygote import Outcome

MODULE = (sys.executable, "-m", "arctool.cli")
SCRIPT = (str(Path(sys.executable).parent / "arctool"),)


def arctool(
    *argv: str | Path, command: tuple[str, ...] = MODULE, cwd: Path | None = None, stdin: str | None = None, **environment: str
) -> Outcome:
    """A fresh interpreter, as a user starts one, from outside the repository unless `cwd` says otherwise."""
    done = subprocess.run(
        [*command, *map(os.fspath, argv)],
        cwd=cwd or "/",
        env={**os.environ, **environment},
        input=stdin,
        stdin=subprocess.DEVNULL if stdin is None else None,
        capture_output=True,
        text=True,
        errors="backslashreplace",
        timeout=300,
        check=False,
    )
    return Outcome(done.returncode, done.stdout, done.stderr)


def tree(directory: Path) -> dict[str, bytes]:
    """Every file below `directory`, by its relative path."""
    return {str(path.relative_to(directory)): path.read_bytes() for path in sorted(directory.rglob("*")) if path.is_file()}


def ok(outcome: Outcome) -> Outcome:
    """The outcome, which must be a success."""
    assert outcome.code == 0, outcome
    assert "Traceback" not in outcome.stderr, outcome
    return outcome


def refused(outcome: Outcome, code: int, *named: str) -> str:
    """The one line of an error with exit code `code` that names every one of `named`."""
    assert outcome.code == code, outcome
    lines = outcome.stderr.splitlines()
    assert len(lines) == 1, outcome
    assert lines[0].startswith("arctool: error: "), outcome
    for word in named:
        assert word in lines[0], (word, lines[0])
    return lines[0]
