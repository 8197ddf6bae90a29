"""`arctool serve` as people start it, stop it, and break what it stands on: real processes, their words and their exit codes."""

from __future__ import annotations

import contextlib
import json
import re
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import openai
import pytest
from commands import MODULE, ok, refused
from serving import Serving, attempt, serving
from zygote import Outcome, Zygote

from arctool.errors import SourceError, StorageError, UsageError
from arctool.serve.server import ServerFailed

sys.path.append(str(Path(__file__).parents[1] / "serve"))

from asking import CHAT, COMPLETIONS, Later, bare, get, post, read_all
from live import until

KEY = "a-key-that-nobody-guesses"
TELL = {"role": "user", "content": "tell"}
STREAM = {"messages": [TELL], "max_tokens": 150, "ignore_eos": True, "temperature": 0, "stream": True}

SLOW = """
import time
import arctool.run.runner as m
real = m.ModelRunner.run
def slow(*arguments):
    time.sleep(0.01)
    return real(*arguments)
m.ModelRunner.run = slow
"""

STUCK = """
import time
import arctool.run.runner as m
real = m.ModelRunner.run
def stuck(self, work, copies=()):
    if len(work[0][0].prompt_ids) == 13:
        time.sleep(1e6)
    return real(self, work, copies)
m.ModelRunner.run = stuck
"""
"""A step that never returns, for a prompt of 13 tokens."""

WATCHED = """
import dataclasses
import arctool.terminal.server as m
serve = m.serve
m.serve = lambda load, options, **others: serve(load, dataclasses.replace(options, stall=0.2, watchdog=0.5), **others)
"""


def ends(stream: str) -> list[str]:
    """Why each choice of a stream ended, if the stream itself ended as it should."""
    lines = [line.removeprefix("data: ") for line in stream.split("\n\n") if line.startswith("data: ")]
    assert lines[-1] == "[DONE]", stream
    chunks = [json.loads(line) for line in lines[:-1]]
    return [choice["finish_reason"] for chunk in chunks for choice in chunk["choices"] if choice["finish_reason"]]


def begun(server: Serving, count: int) -> None:
    """Wait until so many requests run."""
    until(lambda: get(server.port, "/status")[1]["running"] >= count)


def failed(outcome: Outcome, *words: str) -> None:
    """The process has left by itself, with an error in its last line."""
    assert outcome.code == ServerFailed.exit_code, outcome
    last = outcome.stderr.splitlines()[-1]
    assert last.startswith("arctool: error: "), outcome
    for word in words:
        assert word in last, last
    assert "Traceback" not in outcome.stderr, outcome


# Options.


def test_help_names_every_option_and_both_ways_to_set_a_key(zygote: Zygote) -> None:
    shown = ok(zygote.run("serve", "--help")).stdout
    for word in (
        "--port",
        "--api-key-file",
        "ARCTOOL_API_KEY",
        "--drain-timeout",
        "--max-queued",
        "--tls-cert",
        "--access-log",
        "Examples:",
    ):
        assert word in shown, word


@pytest.mark.parametrize(
    ("options", "code", "words"),
    [
        (("--port", "70000"), UsageError, ("--port", "65535", "70000")),
        (("--port", "-1"), UsageError, ("--port",)),
        (("--host", "no-such-host.invalid"), UsageError, ("--host", "no-such-host.invalid")),
        (("--host", "a..b"), UsageError, ("--host", "a..b")),
        (("--host", "203.0.113.1"), UsageError, ("cannot listen on 203.0.113.1",)),
        (("--max-queued", "0"), UsageError, ("--max-queued",)),
        (("--max-body", "10"), UsageError, ("--max-body", "1024")),
        (("--drain-timeout", "-1"), UsageError, ("--drain-timeout",)),
        (("--drain-timeout", "nan"), UsageError, ("--drain-timeout",)),
        (("--keep-alive", "0"), UsageError, ("--keep-alive",)),
        (("--request-timeout", "0"), UsageError, ("--request-timeout",)),
        (("--schedule-every", "-1"), UsageError, ("--schedule-every",)),
        (("--tool-parser", "telepathy"), UsageError, ("--tool-parser", "telepathy", "hermes")),
        (("--reasoning-parser", "telepathy"), UsageError, ("--reasoning-parser", "telepathy", "think")),
        (("--threads", "100000"), UsageError, ("--threads", "100000")),
        (("--api-key", "short"), UsageError, ("--api-key", "8 to 512")),
        (("--api-key-file", "none"), UsageError, ("--api-key-file", "none", "No such file")),
        (("--api-key-file", "empty"), UsageError, ("--api-key-file", "empty", "holds no key")),
        (("--tls-cert", "empty"), UsageError, ("--tls-cert", "--tls-key", "both")),
        (("--tls-cert", "none", "--tls-key", "empty"), UsageError, ("--tls-cert: none", "No such file")),
        (("--tls-cert", "empty", "--tls-key", "empty"), UsageError, ("--tls-cert", "PEM")),
        (("--chat-template", "none"), StorageError, ("--chat-template", "none", "No such file")),
        (("--chat-template", "broken"), SourceError, ("chat template",)),
        (("--access-log", "none/log"), StorageError, ("none/log", "No such file")),
        (("--cors-origin", "example.org"), UsageError, ("--cors-origin", "'example.org'", "https://example.org")),
        (("--cors-origin", "https://example.org/"), UsageError, ("--cors-origin", "https://example.org/")),
        (("--allowed-host", "http://example.org"), UsageError, ("--allowed-host", "http://example.org")),
        (("--allowed-host", "example.org:80"), UsageError, ("--allowed-host", "example.org:80")),
    ],
)
def test_bad_options_are_one_line_before_anything_is_loaded(
    zygote: Zygote, tiny_llama: Path, tmp_path: Path, options: tuple[str, ...], code: type[UsageError], words: tuple[str, ...]
) -> None:
    (tmp_path / "empty").touch()
    (tmp_path / "broken").write_text("{% for %}")
    refused(attempt(zygote, tiny_llama, "--port", "0", *options, cwd=tmp_path), code.exit_code, *words)


def test_a_port_in_use_is_one_line_before_anything_is_loaded(zygote: Zygote, tiny_llama: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        hook = "import arctool.terminal.server as m\nm.open_model = lambda *a: 1 / 0"
        refused(
            zygote.run("serve", tiny_llama, "--port", str(port), hook=hook), UsageError.exit_code, f"--port: {port} on 127.0.0.1 is in use"
        )


@pytest.mark.parametrize(
    ("options", "code", "words"),
    [
        (("--max-seqs", "0"), UsageError, ("max_seqs",)),
        (("--max-step-tokens", "1"), UsageError, ("max_step_tokens",)),
        (("--prefill-floor", "0"), UsageError, ("prefill_floor",)),
        (("--kv-memory", "much"), UsageError, ("kv", "much")),
        (("--max-model-len", "1000000"), UsageError, ("max_model_len", "256")),
    ],
)
def test_options_that_the_model_does_not_allow_end_the_server_with_one_line(
    zygote: Zygote, tiny_llama: Path, options: tuple[str, ...], code: type[UsageError], words: tuple[str, ...]
) -> None:
    outcome = attempt(zygote, tiny_llama, "--port", "0", *options)
    assert outcome.code == code.exit_code, outcome
    first, *_, last = outcome.stderr.splitlines()
    assert first.endswith("; loading the model")
    assert last.startswith("arctool: error: ")
    for word in words:
        assert word in last


def test_a_model_that_is_none_ends_the_server_with_the_loader_s_words(zygote: Zygote, tmp_path: Path) -> None:
    outcome = attempt(zygote, tmp_path, "--port", "0")
    assert outcome.code == SourceError.exit_code
    assert str(tmp_path) in outcome.stderr.splitlines()[-1]
    assert "Traceback" not in outcome.stderr


# Signals.


def test_a_signal_under_load_finishes_what_runs_refuses_what_comes_and_is_a_success(zygote: Zygote, tiny_llama: Path) -> None:
    with serving(zygote, tiny_llama, hook=SLOW) as server:
        asked = [
            Later(lambda i=i: post(server.port, CHAT, {**STREAM, "messages": [{"role": "user", "content": str(i)}]})) for i in range(8)
        ]
        whole = Later(lambda: post(server.port, CHAT, {**STREAM, "stream": False}))
        begun(server, 9)
        server.signal(signal.SIGTERM)
        server.until_said("finishing 9 requests")
        late = post(server.port, CHAT, STREAM)
        assert (late.status, late.headers["Retry-After"]) == (503, "1")
        assert get(server.port, "/ready")[0] == 503
        assert [ends(later.result().text) for later in asked] == [["length"]] * 8
        assert whole.result().json["choices"][0]["finish_reason"] == "length"
        outcome = server.wait()
    ok(outcome)
    assert outcome.stdout == ""
    assert outcome.stderr.splitlines()[-1] == "arctool: stopped"


def test_a_fresh_process_serves_and_leaves(tiny_llama: Path, tmp_path: Path) -> None:
    said = tmp_path / "said"
    with said.open("wb") as file:
        process = subprocess.Popen(
            [*MODULE, "serve", tiny_llama, "--port", "0"], cwd="/", stdin=subprocess.DEVNULL, stdout=file, stderr=file
        )
    try:
        until(lambda: "ready: http" in said.read_text() or process.poll() is not None, 120)
        found = re.search(r"listening on http://127.0.0.1:(\d+); loading the model", said.read_text())
        assert found, said.read_text()
        assert post(int(found[1]), CHAT, {**STREAM, "stream": False}).json["choices"][0]["finish_reason"] == "length"
        process.terminate()
        assert process.wait(30) == 0
    finally:
        process.kill()
    assert said.read_text().splitlines()[-1] == "arctool: stopped"


def test_time_to_drain_that_runs_out_ends_the_rest_and_is_a_success(zygote: Zygote, tiny_llama: Path) -> None:
    with serving(zygote, tiny_llama, "--drain-timeout", "0.1", hook=SLOW) as server:
        stream = Later(lambda: post(server.port, CHAT, {**STREAM, "max_tokens": 230}))
        begun(server, 1)
        server.signal(signal.SIGTERM)
        assert ends(stream.result().text) == ["abort"]
        ok(server.wait())


def test_a_second_interrupt_ends_what_runs_at_once(zygote: Zygote, tiny_llama: Path) -> None:
    with serving(zygote, tiny_llama, "--drain-timeout", "1000", hook=SLOW) as server:
        stream = Later(lambda: post(server.port, CHAT, {**STREAM, "max_tokens": 230}))
        begun(server, 1)
        server.signal(signal.SIGINT)
        server.until_said("a second Ctrl-C ends them now")
        server.signal(signal.SIGINT)
        assert ends(stream.result().text) == ["abort"]
        ok(server.wait())


def test_a_signal_while_the_model_is_loaded_is_a_success_too(zygote: Zygote, tiny_llama: Path) -> None:
    hook = "import time\nimport arctool.terminal.server as m\nm.open_model = lambda *a: time.sleep(1e6)"
    with serving(zygote, tiny_llama, hook=hook, ready=False) as server:
        assert get(server.port, "/health") == (200, {"status": "loading"})
        server.signal(signal.SIGTERM)
        ok(server.wait())


# Steps that never end, and threads that do.


def test_a_step_that_never_ends_is_told_to_its_clients_and_ends_the_server(zygote: Zygote, tiny_llama: Path) -> None:
    with serving(zygote, tiny_llama, hook=WATCHED + STUCK) as server:
        good = Later(lambda: post(server.port, COMPLETIONS, {"prompt": [5] * 12, "max_tokens": 3}))
        assert good.result().status == 200
        stream = Later(lambda: post(server.port, COMPLETIONS, {"prompt": [5] * 13, "stream": True}))
        begun(server, 1)
        whole = Later(lambda: post(server.port, COMPLETIONS, {"prompt": [5] * 12}))
        assert whole.result().status == 503
        assert whole.result().json["error"]["message"]
        assert stream.result().text.rstrip().splitlines()[-1].startswith('data: {"error"')
        failed(server.wait(), "the engine has not finished a step for 0.5 s")


@pytest.mark.parametrize("times", [1, 2])
def test_a_step_that_never_ends_does_not_keep_a_server_that_is_told_to_leave(zygote: Zygote, tiny_llama: Path, times: int) -> None:
    hook = "import arctool.serve.server as m\nm.GRACE_SECONDS = 1\n" + STUCK
    with serving(zygote, tiny_llama, "--drain-timeout", "0.2" if times == 1 else "1000", hook=hook) as server:
        stream = Later(lambda: post(server.port, COMPLETIONS, {"prompt": [5] * 13, "stream": True}))
        begun(server, 1)
        for time_ in range(times):
            server.signal(signal.SIGTERM)
            server.until_said("finishing 1 request")
            assert time_ < times
        assert stream.result().text.rstrip().splitlines()[-1].startswith('data: {"error"')
        failed(server.wait(), "does not end")


def test_an_engine_that_dies_ends_the_server_and_everybody_is_told(zygote: Zygote, tiny_llama: Path) -> None:
    dying = STUCK.replace("time.sleep(1e6)", "raise SystemExit(0)")
    with serving(zygote, tiny_llama, hook=dying) as server:
        answer = post(server.port, COMPLETIONS, {"prompt": [5] * 13})
        assert answer.status == 503
        assert "the engine has failed" in answer.json["error"]["message"]
        outcome = server.wait()
    assert outcome.code == ServerFailed.exit_code
    assert "the engine has failed: SystemExit: 0; start the server again" in outcome.stderr.splitlines()[-1]


# What it stands on.


def scribble(path: Path) -> None:
    with path.open("r+b") as file:
        file.write(bytes(path.stat().st_size))


def empty(path: Path) -> None:
    """As `cp` does first with a file that is there. Whoever reads a mapping of it now is ended by the system."""
    path.write_bytes(b"")


def replace(path: Path) -> None:
    other = path.with_name("other")
    other.write_bytes(bytes(path.stat().st_size))
    other.replace(path)


@pytest.mark.parametrize("kind", ["artifact", "checkpoint"])
@pytest.mark.parametrize("change", [scribble, empty, replace, Path.unlink])
def test_whatever_happens_to_the_model_s_files_is_noted_and_changes_no_answer(
    zygote: Zygote, artifact: Path, tiny_llama: Path, tmp_path: Path, kind: str, change: Callable[[Path], None]
) -> None:
    """While a request runs, too. Nothing comes from the prefix cache, so that every weight is read again."""
    model = artifact if kind == "artifact" else Path(shutil.copytree(tiny_llama, tmp_path / "model"))
    [weights] = model.glob("*.uqff" if kind == "artifact" else "*.safetensors")
    body = {**STREAM, "stream": False, "max_tokens": 60}
    hook = SLOW + "import arctool.serve.server as m\nm.LOOK_SECONDS = 0.05"
    with serving(zygote, model, "--no-prefix-caching", hook=hook) as server:
        before = post(server.port, CHAT, body).json["choices"]
        assert len(set(before[0]["message"]["content"])) > 20
        during = Later(lambda: post(server.port, CHAT, body))
        begun(server, 1)
        change(weights)
        server.until_said(f"note: {weights.name} has changed on the disk; what was loaded is served until the next start")
        assert during.result().json["choices"] == before
        assert post(server.port, CHAT, body).json["choices"] == before
        server.signal(signal.SIGTERM)
        ok(server.wait())


def test_a_full_disk_under_the_access_log_is_nobody_s_loss_but_the_log_s(zygote: Zygote, tiny_llama: Path) -> None:
    with serving(zygote, tiny_llama, "--access-log", "/dev/full") as server:
        for _ in range(20):
            assert post(server.port, CHAT, {**STREAM, "max_tokens": 3}).status == 200
        server.signal(signal.SIGTERM)
        ok(server.wait())


@pytest.mark.parametrize("place", ["os.open('/dev/full', os.O_WRONLY)", "os.pipe()[1]"], ids=["full disk", "pipe that nobody reads"])
def test_a_standard_error_that_takes_nothing_stops_neither_answers_nor_the_end(zygote: Zygote, tiny_llama: Path, place: str) -> None:
    with socket.create_server(("127.0.0.1", 0)) as found:
        port = found.getsockname()[1]
    hook = f"import os, sys\nos.dup2({place}, 2)\nsys.stderr = open(2, 'w', closefd=False)"
    child = zygote.start("serve", tiny_llama, "--port", str(port), hook=hook)
    server = Serving(child)
    try:
        end = time.monotonic() + 60
        while True:
            assert time.monotonic() < end
            try:
                if get(port, "/ready")[0] == 200:
                    break
            except OSError:
                time.sleep(0.02)
        for _ in range(300):  # more lines than a pipe holds
            assert post(port, COMPLETIONS, {"prompt": "a", "max_tokens": 1}).status == 200
        server.signal(signal.SIGTERM)
        assert server.wait().code == 0
    finally:
        if not server.ended:
            child.kill()
            child.wait()


@pytest.mark.parametrize("most", [70, 400], ids=["few files", "as many as it takes"])
def test_more_connections_than_files_neither_flood_the_log_nor_keep_anybody_out(zygote: Zygote, tiny_llama: Path, most: int) -> None:
    """64 files are what the process has at first, `most` what it may have; some of them are its own."""
    hook = f"import resource\nresource.setrlimit(resource.RLIMIT_NOFILE, (64, {most}))"
    with serving(zygote, tiny_llama, "--access-log", "none", hook=hook) as server, contextlib.ExitStack() as held:
        first, *_ = [held.enter_context(bare(server.port, b"GET / HT")) for _ in range(200)]
        assert post(server.port, COMPLETIONS, {"prompt": "a", "max_tokens": 1}).status == 200
        if most > 200:
            first.settimeout(0.01)
            with pytest.raises(TimeoutError):
                first.recv(1)
        else:
            with contextlib.suppress(ConnectionResetError):
                assert first.recv(1) == b""
        server.signal(signal.SIGTERM)
        outcome = server.wait()
    assert outcome.code == 0
    assert len(outcome.stderr.splitlines()) < 10, outcome.stderr[-2000:]


# Keys.


def test_keys_of_the_environment_open_the_door_and_are_told_to_nobody(zygote: Zygote, tiny_llama: Path, tmp_path: Path) -> None:
    log = tmp_path / "access.log"
    other = "another-key-of-somebody"
    with serving(zygote, tiny_llama, "--access-log", log, hook=f"import os\nos.environ['ARCTOOL_API_KEY'] = '{KEY},{other}'") as server:
        told = []
        for key in (None, "wrong-key-of-a-stranger", KEY, other):
            header = {} if key is None else {"Authorization": f"Bearer {key}"}
            answer = post(server.port, CHAT, {**STREAM, "max_tokens": 2}, header)
            assert answer.status == (200 if key in (KEY, other) else 401)
            told += [answer.text, str(answer.headers)]
        for path in ("/v1/models", "/metrics", "/status", "/health", "/ready", "/openapi.json"):
            with bare(
                server.port, f"GET {path} HTTP/1.1\r\nHost: localhost\r\nX-Api-Key: {KEY}\r\nConnection: close\r\n\r\n".encode()
            ) as link:
                text = read_all(link).decode()
                assert text.startswith("HTTP/1.1 200"), text
                told.append(text)
        # A key in the wrong place is still a key.
        with bare(server.port, f"GET /v1/models?key={KEY} HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n".encode()) as link:
            assert read_all(link).startswith(b"HTTP/1.1 401")
        command = Path(f"/proc/{server.pid}/cmdline").read_text()
        server.signal(signal.SIGTERM)
        outcome = ok(server.wait())
    assert "keys: 2" in outcome.stderr
    lines = log.read_text()
    assert len(lines.splitlines()) == 11
    for text in (*told, lines, outcome.stderr, outcome.stdout, command):
        for key in (KEY, other, "wrong-key-of-a-stranger"):
            assert key not in text


# The real model.


@pytest.mark.real
def test_the_real_model_answers_openai_s_client_as_it_answers_the_command_line(zygote: Zygote, smollm2_dir: Path) -> None:
    question = "What is the capital of France?"
    run = json.loads(ok(zygote.run("run", smollm2_dir, "--prompt", question, "--temperature", "0", "--json")).stdout)
    with serving(zygote, smollm2_dir, hook=f"import os\nos.environ['ARCTOOL_API_KEY'] = '{KEY}'") as server:
        messages: list[Any] = [{"role": "user", "content": question}]
        client = openai.OpenAI(base_url=f"{server.url}/v1", api_key=KEY, max_retries=0)
        [model] = client.models.list().data
        answer = client.chat.completions.create(model=model.id, messages=messages, temperature=0)
        assert answer.choices[0].message.content == run["text"] == "The capital of France is Paris."
        assert answer.choices[0].finish_reason == run["finish_reason"] == "stop"
        assert answer.usage is not None
        assert answer.usage.completion_tokens == len(run["token_ids"])
        stream = client.chat.completions.create(model=model.id, messages=messages, temperature=0, stream=True)
        pieces = [chunk.choices[0].delta.content or "" for chunk in stream]
        assert "".join(pieces) == run["text"]
        assert len(list(filter(None, pieces))) > 4
        with pytest.raises(openai.AuthenticationError):
            openai.OpenAI(base_url=f"{server.url}/v1", api_key="wrong", max_retries=0).models.list()
        server.signal(signal.SIGTERM)
        outcome = ok(server.wait())
    assert KEY not in outcome.stderr
