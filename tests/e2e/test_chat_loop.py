"""The chat loop as a person sees it: in a pseudo-terminal, with a real keyboard's control characters."""

from __future__ import annotations

import os
import pty
import re
import select
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from commands import MODULE, ok
from zygote import Zygote

from arctool.run.llm import LLM
from arctool.run.sampling.params import SamplingParams

PROMPT = "> "
ESCAPES = re.compile(r"\x1b\[[0-9;?]*[a-zA-Z]")
OPTIONS = ("--temperature", "0", "--max-tokens", "12")
PATIENCE = 120.0

SLOWLY = (
    MODULE[0],
    "-c",
    "import time, arctool.run.engine as engine\nfrom arctool.cli import main\nreal = engine.sample\n"
    "engine.sample = lambda *arguments: (time.sleep(0.02), real(*arguments))[1]\nmain()",
)
"""`arctool` on a machine slow enough for a hand to interrupt."""


class Terminal:
    """`arctool` behind a pseudo-terminal: type lines, read until something appears."""

    def __init__(self, *argv: str | Path, command: tuple[str, ...] = MODULE) -> None:
        self._master, slave = pty.openpty()
        self._process = subprocess.Popen(
            [*command, *map(os.fspath, argv)],
            stdin=slave,
            stdout=slave,
            stderr=slave,
            cwd="/",
            env={**os.environ, "TERM": "dumb", "COLUMNS": "100", "PYTHONIOENCODING": "utf-8:replace"},
            start_new_session=True,
            preexec_fn=take_terminal,
        )
        os.close(slave)
        self._seen = ""

    def type(self, text: str) -> None:
        os.write(self._master, text.encode())

    def until(self, wanted: str) -> str:
        """What was shown up to and including the next `wanted`."""
        end = time.monotonic() + PATIENCE
        while wanted not in self._seen:
            ready, _, _ = select.select([self._master], [], [], max(0.0, end - time.monotonic()))
            data = self._read() if ready else b""
            assert data, f"waited for {wanted!r}, saw {self._seen!r}"
            self._seen += ESCAPES.sub("", data.decode("utf-8", "replace")).replace("\r\n", "\n")
        found, self._seen = self._seen.split(wanted, 1)
        return found + wanted

    def say(self, line: str) -> str:
        """Type a line; what came back before the next prompt, without the echo."""
        self.type(line + "\n")
        return self.until("\n" + PROMPT).split("\n", 1)[1].removesuffix("\n" + PROMPT)

    def end(self) -> int:
        """Read to the end; the exit code."""
        while select.select([self._master], [], [], PATIENCE)[0] and self._read():
            pass
        return self._process.wait(PATIENCE)

    def end_by_control_c(self) -> int:
        """As `end`, with ^C. One that falls between the prompt and the wait for a line goes unheard by the interpreter: press again."""
        for _ in range(10):
            self.type("\x03")
            while select.select([self._master], [], [], 5)[0]:
                if not self._read():
                    return self._process.wait(PATIENCE)
        return self._process.wait(PATIENCE)

    def close(self) -> None:
        if self._process.poll() is None:
            self._process.kill()
            self._process.wait()
        os.close(self._master)

    def _read(self) -> bytes:
        try:
            return os.read(self._master, 65536)
        except OSError:  # a pseudo-terminal whose other end is closed says EIO, not end of file
            return b""


def take_terminal() -> None:
    """Make the new session's terminal the one on standard input, so that its ^C is a signal."""
    import fcntl
    import termios

    fcntl.ioctl(0, termios.TIOCSCTTY, 0)


@pytest.fixture
def terminal() -> Iterator[Callable[..., Terminal]]:
    opened: list[Terminal] = []

    def start(*argv: str | Path, command: tuple[str, ...] = MODULE) -> Terminal:
        opened.append(Terminal(*argv, command=command))
        return opened[-1]

    yield start
    for item in opened:
        item.close()


def shown(answer: str) -> str:
    """The text of an answer: all but the line about its speed."""
    return answer.rsplit("\n", 1)[0]


def test_a_conversation_has_a_memory_that_can_be_cleared_and_steered(terminal: Callable[..., Terminal], tiny_artifact: Path) -> None:
    llm = LLM(tiny_artifact)
    params = SamplingParams(temperature=0, max_tokens=12, top_p=0.95)

    def expected(*messages: tuple[str, str]) -> str:
        answer = llm.chat([{"role": role, "content": content} for role, content in messages], params).text
        return " ".join(answer.split())

    first = expected(("user", "one two"))
    answer = llm.chat([{"role": "user", "content": "one two"}], params).text
    second = expected(("user", "one two"), ("assistant", answer), ("user", "and then"))
    alone = expected(("user", "and then"))
    steered = expected(("system", "be kind"), ("user", "one two"))
    assert len({first, second, alone, steered}) == 4

    chat = terminal("run", tiny_artifact, *OPTIONS)
    chat.until(PROMPT)
    said = chat.say("one two")
    assert " ".join(shown(said).split()) == first
    assert "12 tokens" in said
    assert " ".join(shown(chat.say("and then")).split()) == second
    assert "forgotten" in chat.say("/clear")
    assert " ".join(shown(chat.say("and then")).split()) == alone
    assert "system prompt set" in chat.say("/system be kind")
    assert " ".join(shown(chat.say("one two")).split()) == steered
    assert "/exit leave" in chat.say("/what")
    chat.type("/exit\n")
    assert chat.end() == 0


def test_control_c_stops_an_answer_and_the_conversation_goes_on_until_control_d(
    terminal: Callable[..., Terminal], tiny_artifact: Path
) -> None:
    chat = terminal("run", tiny_artifact, "--temperature", "0", "--max-tokens", "120", command=SLOWLY)
    chat.until(PROMPT)
    llm = LLM(tiny_artifact)
    answer = llm.chat([{"role": "user", "content": "one two"}], SamplingParams(temperature=0, max_tokens=120)).text
    assert len(answer) > 60
    chat.type("one two\n")
    chat.until("one two\n")
    chat.until(answer.strip()[:1])
    chat.type("\x03")
    rest = chat.until("\n" + PROMPT)
    assert rest.endswith("stopped\n" + PROMPT)
    assert len(rest) < len(answer)
    assert "forgotten" in chat.say("/clear")
    assert "tokens" in chat.say("hello")
    chat.type("\x04")
    assert chat.end() == 0


def test_a_turn_too_long_for_the_context_is_told_and_forgotten(terminal: Callable[..., Terminal], tiny_artifact: Path) -> None:
    chat = terminal("run", tiny_artifact, *OPTIONS)
    chat.until(PROMPT)
    assert "leave no room in the context" in " ".join(chat.say("word " * 300).split())
    assert "12 tokens" in chat.say("one two")
    assert chat.end_by_control_c() == 0


def test_lines_from_a_pipe_are_a_conversation_too(zygote: Zygote, tiny_artifact: Path, tmp_path: Path) -> None:
    (tmp_path / "lines").write_text("one two\n\n/clear\nand then\n")
    done = ok(zygote.run("run", tiny_artifact, *OPTIONS, stdin=tmp_path / "lines"))
    assert done.stdout.count("12 tokens") == 2
    assert "forgotten" in done.stdout
    assert done.stderr == ""


def test_an_answer_is_held_to_a_schema_or_an_expression(zygote: Zygote, tiny_artifact: Path, tmp_path: Path) -> None:
    (tmp_path / "schema.json").write_text('{"enum": ["yes", "no"]}')
    asked = ("run", tiny_artifact, "-p", "one two", "--temperature", "2", "--seed", "3")
    assert ok(zygote.run(*asked, "--json-schema", tmp_path / "schema.json")).stdout.strip() in ('"yes"', '"no"')
    penalties = ("--repetition-penalty", "1.2", "--presence-penalty", "1", "--frequency-penalty", "1", "--typical-p", "0.9")
    assert re.fullmatch("[0-9]{3}-[a-z]{2}", ok(zygote.run(*asked, "--regex", "[0-9]{3}-[a-z]{2}", *penalties)).stdout.strip())


def test_control_c_during_a_single_answer_ends_with_130(zygote: Zygote, tiny_artifact: Path) -> None:
    hook = (
        "import os, signal\nfrom arctool.run.sampling.sampler import sample\nimport arctool.run.engine as engine\nsteps = 0\n"
        "def third(*arguments):\n    global steps\n    steps += 1\n    if steps == 3:\n        os.kill(os.getpid(), signal.SIGINT)\n"
        "    return sample(*arguments)\nengine.sample = third"
    )
    done = zygote.run("run", tiny_artifact, "-p", "one two", *OPTIONS, hook=hook)
    assert done.code == 128 + signal.SIGINT
    assert done.stderr == "arctool: interrupted\n"
