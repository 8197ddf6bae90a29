"""Runs `arctool` in forked children of a process that has already imported everything, so that a test may start hundreds.

A child is a real process with its own files, signals and exit code, entered through `arctool.cli.main`; only the seconds that
imports and compilation take are saved. `hook` is Python that runs in the child first: it breaks a call, or kills at a chosen one.
Run as a script it is the server: one JSON request a line on standard input, one answer a line on standard output.
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import io
import json
import os
import signal
import subprocess
import sys
import tempfile
import traceback
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any


@dataclass(frozen=True)
class Outcome:
    """How a process ended: its exit code (−9 for SIGKILL, as in `subprocess`), and what it wrote."""

    code: int
    stdout: str
    stderr: str


class Child:
    """A running `arctool`. `signal` may be sent any time; `wait` once."""

    def __init__(self, zygote: Zygote, pid: int, folder: Path) -> None:
        self._zygote = zygote
        self._folder = folder
        self.pid = pid

    def kill(self) -> None:
        """SIGKILL; a child that has ended already waits as a zombie, so the number is still its own."""
        os.kill(self.pid, signal.SIGKILL)

    def wait(self) -> Outcome:
        code = self._zygote.ask({"wait": self.pid})["code"]
        return Outcome(code, self.said("stdout"), self.said("stderr"))

    def said(self, name: str) -> str:
        """What the child wrote; one that was killed before it could open its files wrote nothing."""
        path = self._folder / name
        return path.read_text(errors="backslashreplace") if path.exists() else ""


class Zygote:
    """The parent of the children. A context manager."""

    def __init__(self, warm: Path) -> None:
        """`warm`: a checkpoint that the server bakes in memory once, so that children find the search compiled."""
        self._folder = tempfile.TemporaryDirectory(prefix="arctool-e2e-")
        self._count = 0
        # numba's thread pool is the one thing here that must outlive a fork, and its work queue does.
        environment = {**os.environ, "NUMBA_THREADING_LAYER": "workqueue", "NUMBA_NUM_THREADS": "1", "OMP_NUM_THREADS": "1"}
        command = [sys.executable, __file__, str(warm)]
        self._server = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment)

    def start(self, *argv: str | Path, cwd: Path | None = None, hook: str = "", stdin: Path | None = None) -> Child:
        """Begin `arctool argv`."""
        self._count += 1
        folder = Path(self._folder.name) / str(self._count)
        folder.mkdir()
        request = {
            "argv": [os.fspath(item) for item in argv],
            "cwd": os.fspath(cwd or folder),
            "hook": hook,
            "stdin": os.devnull if stdin is None else os.fspath(stdin),
            "stdout": str(folder / "stdout"),
            "stderr": str(folder / "stderr"),
        }
        return Child(self, self.ask(request)["pid"], folder)

    def run(self, *argv: str | Path, cwd: Path | None = None, hook: str = "", stdin: Path | None = None) -> Outcome:
        """`arctool argv` from start to end."""
        return self.start(*argv, cwd=cwd, hook=hook, stdin=stdin).wait()

    def ask(self, request: dict[str, Any]) -> dict[str, Any]:
        assert self._server.stdin is not None
        assert self._server.stdout is not None
        self._server.stdin.write(json.dumps(request) + "\n")
        self._server.stdin.flush()
        answer: dict[str, Any] = json.loads(self._server.stdout.readline())
        return answer

    def __enter__(self) -> Zygote:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        assert self._server.stdin is not None
        self._server.stdin.close()
        self._server.wait()
        self._folder.cleanup()


def serve(warm: str) -> None:
    """The server: import and compile, then fork a child for every request until standard input ends."""
    from arctool import cli

    importlib.import_module("arctool.terminal.server")  # a second of imports that only `serve` needs
    with tempfile.TemporaryDirectory() as folder, contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
        path = str(Path(folder) / "a")
        for argv in (
            ["bake", warm, "--isq", "qtip4", "--calib-tokens", "64", "--no-measure", "-o", path],
            ["inspect", path],
            ["verify", path, "--source", warm],
            ["run", path, "--prompt", "warm", "--max-tokens", "2"],
            ["doctor", "--json"],
        ):
            cli.app(argv, standalone_mode=False)
    # A collection in a child would touch, and so copy, every page that the imports left.
    gc.collect()
    gc.freeze()
    for line in sys.stdin:
        request = json.loads(line)
        if "wait" in request:
            _, status = os.waitpid(request["wait"], 0)
            _answer({"code": os.waitstatus_to_exitcode(status)})
            continue
        pid = os.fork()
        if pid == 0:
            os._exit(_child(request, cli.main))
        _answer({"pid": pid})


def _answer(value: dict[str, int]) -> None:
    os.write(1, (json.dumps(value) + "\n").encode())


def _child(request: dict[str, Any], main: Any) -> int:
    """What the interpreter does around `main`: its exit code, an uncaught exception as a traceback and 1, buffers flushed."""
    for number, name, flags in ((0, "stdin", os.O_RDONLY), (1, "stdout", os.O_WRONLY), (2, "stderr", os.O_WRONLY)):
        handle = os.open(request[name], flags | (os.O_CREAT if number else 0), 0o600)
        os.dup2(handle, number)
        os.close(handle)
    sys.stdin = open(0, closefd=False)  # noqa: SIM115 - the server's own has read ahead
    os.chdir(request["cwd"])
    sys.argv = ["arctool", *request["argv"]]
    try:
        exec(request["hook"], {})
        main()
        code: Any = 0
    except SystemExit as leaving:
        code = leaving.code
    except BaseException:
        traceback.print_exc()
        code = 1
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError):
            stream.flush()
    return code if isinstance(code, int) else 1


if __name__ == "__main__":
    serve(sys.argv[1])
