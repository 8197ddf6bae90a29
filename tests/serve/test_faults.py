"""What can break under a server: who is told, by name, who never notices, and whether the server goes on or leaves: never in between."""

from __future__ import annotations

import contextlib
import http.client
import json
import random
import shutil
import ssl
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from asking import CHAT, COMPLETIONS, Later, bare, get, post, read_all, request
from live import live, until
from pace import Pace
from scripted import LLAMA, scripted
from tiny_models import DirectorySource

from arctool.errors import UsageError
from arctool.run.llm import LLM
from arctool.run.sampling.params import SamplingParams
from arctool.serve import server
from arctool.serve.listening import listen
from arctool.serve.output.parser import OutputParser
from arctool.serve.server import ServerFailed, serve
from arctool.serve.settings import ServeOptions

REPLY = " ".join(f"word{i}" for i in range(100))
TELL = {"role": "user", "content": "tell"}


class Panic(BaseException):
    """As a library in another language raises: no Exception."""


@pytest.fixture
def pace() -> Pace:
    return Pace()


@pytest.fixture
def llm(pace: Pace) -> LLM:
    """Says REPLY to everything, at the test's pace."""
    return scripted(lambda prompt: REPLY, before_step=pace)


def break_next(llm: LLM, place: Any, name: str, error: BaseException) -> None:
    """Let the next call of `place.name` raise."""
    real = getattr(place, name)

    def broken(*arguments: Any, **options: Any) -> Any:
        setattr(place, name, real)
        raise error

    setattr(place, name, broken)


def last_event(text: str) -> dict[str, Any]:
    """The error with which a stream ended, and after which nothing came."""
    *_, last, empty = text.split("\n\n")
    assert empty == ""
    error: dict[str, Any] = json.loads(last.removeprefix("data: "))["error"]
    return error


# Steps that fail.


def test_a_step_that_fails_ends_its_requests_by_name_and_nobody_else_s(llm: LLM, pace: Pace) -> None:
    with live(llm) as running:
        with pace.held():
            whole = Later(lambda: post(running.port, COMPLETIONS, {"prompt": "tell", "n": 63, "max_tokens": 50}))
            pace.until_step(3)
            stream = Later(lambda: post(running.port, CHAT, {"messages": [TELL], "stream": True}))
            until(lambda: running.service.engine.unfinished == 2)
            pace.until_step(5)
            waiting = Later(lambda: post(running.port, COMPLETIONS, {"prompt": "tell", "max_tokens": 5}))
            until(lambda: running.service.engine.unfinished == 3)
            break_next(llm, llm.runner, "run", RuntimeError("kernel 7 has no room"))
        assert whole.result().status == 500
        assert stream.result().status == 200
        for error in (whole.result().json["error"], last_event(stream.result().text)):
            assert error["type"] == error["code"] == "engine_error"
            assert error["message"] == "the engine failed in a step of this request"
        assert waiting.result().status == 200
        assert get(running.port, "/health") == (200, {"status": "ok"})
        assert post(running.port, CHAT, {"messages": [TELL]}).json["choices"][0]["message"]["content"] == REPLY
        assert running.server.failure is None


def test_a_broken_row_of_logits_ends_its_request_and_changes_no_neighbour() -> None:
    """The real model, every neighbour with the tokens it gets alone, though its row lay beside the broken one."""
    llm = LLM(DirectorySource(LLAMA))
    prompts = [f"neighbour {i}" for i in range(6)]
    params = [SamplingParams(temperature=i % 2, seed=i, max_tokens=20, ignore_eos=True) for i in range(6)]
    alone = [llm.generate([prompt], one)[0].text for prompt, one in zip(prompts, params, strict=True)]
    assert len(set(alone)) == 6
    bad = llm.encode("a broken one")
    run, together = llm.runner.run, []

    def one_row_broken(work: Any, copies: Any = ()) -> Any:
        logits = run(work, copies)
        rows = [sequence for sequence, item in work if item.emits]
        for row, sequence in enumerate(rows):
            if list(sequence.prompt_ids) == bad and len(sequence.output_ids) == 4:
                logits[row] = [np.nan, np.inf, -np.inf][sequence.params.seed % 3]
                together.append(len(rows))
        return logits

    llm.runner.run = one_row_broken  # type: ignore[method-assign]
    pace, step = Pace(), llm.engine.step
    llm.engine.step = lambda: (pace(), step())[1]  # type: ignore[method-assign]
    with live(llm) as running:
        with pace.held():
            good = [
                Later(lambda i=i: post(running.port, COMPLETIONS, {"prompt": prompts[i], **body_of(params[i]), "stream": i % 3 == 0}))
                for i in range(6)
            ]
            body = {"prompt": "a broken one", "max_tokens": 9, "ignore_eos": True}
            broken = [Later(lambda i=i: post(running.port, COMPLETIONS, {**body, "seed": i, "stream": i == 2})) for i in range(3)]
            until(lambda: running.service.engine.unfinished == 9)
        for i, later in enumerate(good):
            answer = later.result()
            assert answer.status == 200
            text = joined(answer.text) if i % 3 == 0 else answer.json["choices"][0]["text"]
            assert text == alone[i]
        for i, later in enumerate(broken):
            answer = later.result()
            assert answer.status == (200 if i == 2 else 500)
            error = last_event(answer.text) if i == 2 else answer.json["error"]
            assert error["type"] == "engine_error"
            assert "finite" in error["message"]
    assert max(together) > 3
    assert llm.engine.telemetry().total.corrupted == 3


def body_of(params: SamplingParams) -> dict[str, Any]:
    return {"temperature": params.temperature, "seed": params.seed, "max_tokens": params.max_tokens, "ignore_eos": params.ignore_eos}


def joined(stream: str) -> str:
    lines = [line.removeprefix("data: ") for line in stream.split("\n\n") if line.startswith("data: {")]
    return "".join(json.loads(line)["choices"][0]["text"] for line in lines)


# An engine whose thread dies.

DEATHS = {
    "a step is interrupted": lambda llm: break_next(llm, llm.runner, "run", KeyboardInterrupt("from nowhere")),
    "a step leaves": lambda llm: break_next(llm, llm.runner, "run", SystemExit(0)),
    "the plan fails": lambda llm: break_next(llm, llm.engine.scheduler, "schedule", RuntimeError("cache block 3 is freed twice")),
    "the plan panics": lambda llm: break_next(llm, llm.engine.scheduler, "schedule", Panic("index out of range")),
}


@pytest.mark.parametrize("death", DEATHS)
@pytest.mark.parametrize("look", [0.05, 1000.0], ids=["then the server leaves", "then somebody stops it"])
def test_an_engine_that_dies_takes_the_server_with_it_and_everybody_is_told(
    llm: LLM, pace: Pace, monkeypatch: pytest.MonkeyPatch, death: str, look: float
) -> None:
    monkeypatch.setattr(server, "LOOK_SECONDS", look)
    with live(llm, survives=False) as running:
        with pace.held():
            crowd = Later(lambda: post(running.port, COMPLETIONS, {"prompt": "tell", "n": 64, "max_tokens": 50}))
            pace.until_step(3)
            stream = Later(lambda: post(running.port, CHAT, {"messages": [TELL], "stream": True, "priority": -1}))
            whole = Later(lambda: post(running.port, CHAT, {"messages": [TELL], "priority": -1}))
            until(lambda: running.service.engine.unfinished == 3)
            pace.until_step(5)
            DEATHS[death](llm)
        for answer in (crowd.result(), whole.result()):
            assert answer.status == 503
            assert "the engine has failed" in answer.json["error"]["message"]
        told = stream.result()
        assert "the engine has failed" in (last_event(told.text)["message"] if told.status == 200 else told.text)
        if look > 1:
            assert get(running.port, "/health")[0] == get(running.port, "/ready")[0] == 503
            refused = post(running.port, CHAT, {"messages": [TELL]})
            assert (refused.status, refused.json["error"]["type"]) == (503, "service_unavailable")
            running.server.handle_exit(15, None)
        running.thread.join(30)
        assert not running.thread.is_alive()
        assert isinstance(running.server.failure, ServerFailed)
        assert "the engine has failed" in str(running.server.failure)


# Faults beside the engine.


def test_a_request_whose_check_panics_fails_alone(llm: LLM) -> None:
    """Grammars are compiled by a library in another language, in a thread of its own."""
    with live(llm) as running:
        for fault in (Panic("index out of range"), RuntimeError("secret insides")):
            break_next(llm, llm.engine, "check", fault)
            answer = post(running.port, CHAT, {"messages": [TELL], "stream": True})
            assert answer.status == 500
            assert "index" not in answer.text
            assert "secret" not in answer.text
            assert post(running.port, CHAT, {"messages": [TELL], "max_tokens": 2}).status == 200
        assert running.service.engine._entering == 0


def test_a_stream_whose_text_cannot_be_read_ends_with_an_error_and_frees_its_blocks(
    llm: LLM, pace: Pace, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    push, pushed = OutputParser.push, []

    def fragile(self: OutputParser, text: str) -> Any:
        pushed.append(text)
        if len(pushed) == 5:
            raise RuntimeError("secret insides")
        return push(self, text)

    monkeypatch.setattr(OutputParser, "push", fragile)
    with live(llm) as running:
        answer = post(running.port, CHAT, {"messages": [TELL], "stream": True})
        assert answer.status == 200
        assert last_event(answer.text)["type"] == "internal_error"
        assert "secret" not in answer.text
        until(lambda: not llm.engine.has_work())
        assert llm.engine.telemetry().total.decode_tokens < 60
    assert "secret insides" in caplog.text


def test_a_wall_clock_that_jumps_changes_nothing_but_what_is_called_created(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    rng, real = random.Random(3), time.time
    now = [real()]

    def jumping() -> float:
        now[0] += rng.choice([-1e9, 1e-3, 1e6, -1e6]) if 1e9 < now[0] < 4e9 else 2e9 - now[0]
        return now[0]

    with live(llm, request_timeout=60.0, keep_alive=30.0, stall=60.0) as running:
        calm = post(running.port, CHAT, {"messages": [TELL], "stream": True})
        monkeypatch.setattr(time, "time", jumping)
        for _ in range(10):
            answer = post(running.port, CHAT, {"messages": [TELL], "stream": True})
            assert without_names(answer.text) == without_names(calm.text)
            assert get(running.port, "/health") == (200, {"status": "ok"})
        monkeypatch.setattr(time, "time", lambda: 1234567890.5)
        assert post(running.port, CHAT, {"messages": [TELL], "max_tokens": 1}).json["created"] == 1234567890
        assert running.server.failure is None


def without_names(stream: str) -> list[Any]:
    found = []
    for line in stream.split("\n\n"):
        if line.startswith("data: {"):
            value = json.loads(line.removeprefix("data: "))
            del value["id"], value["created"]
            found.append(value)
        else:
            found.append(line)
    return found


# Model files.


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    made = tmp_path / "model"
    made.mkdir()
    shutil.copyfile(LLAMA / "model.safetensors", made / "model.safetensors")
    return made


def overwrite(path: Path) -> None:
    with path.open("r+b") as file:
        file.seek(100)
        file.write(b"other bytes")


def grow(path: Path) -> None:
    with path.open("ab") as file:
        file.write(b"more")


def empty(path: Path) -> None:
    path.write_bytes(b"")


def replace(path: Path) -> None:
    shutil.copyfile(path, path.with_name("new"))
    path.with_name("new").replace(path)


@pytest.mark.parametrize("change", [overwrite, grow, empty, replace, Path.unlink])
def test_a_model_file_that_changes_is_noted_once_and_the_server_goes_on(
    llm: LLM, monkeypatch: pytest.MonkeyPatch, folder: Path, change: Callable[[Path], None]
) -> None:
    looks = []
    monkeypatch.setattr(server, "LOOK_SECONDS", 0.01)
    changed = server.ModelFiles.changed
    monkeypatch.setattr(server.ModelFiles, "changed", lambda self: looks.append(0) or changed(self))
    with live(llm, files=folder) as running:
        change(folder / "model.safetensors")
        note = "note: model.safetensors has changed on the disk; what was loaded is served until the next start"
        until(lambda: note in running.said)
        seen = len(looks)
        until(lambda: len(looks) > seen + 5)
        assert running.said.count(note) == 1
        assert post(running.port, CHAT, {"messages": [TELL], "max_tokens": 2}).status == 200
        assert running.server.failure is None


# The door.


@pytest.fixture(scope="module")
def keys(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """own.crt and own.key, which belong together; other.key; locked.key, with a passphrase; junk."""
    made = tmp_path_factory.mktemp("tls")

    def openssl(*arguments: str) -> None:
        subprocess.run(["openssl", *arguments], cwd=made, check=True, capture_output=True, timeout=60)

    names = ("-subj", "/CN=localhost", "-addext", "subjectAltName=DNS:localhost,IP:127.0.0.1")
    kind = ("-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes")
    for name in ("own", "other"):
        openssl("req", "-x509", *kind, "-keyout", f"{name}.key", "-out", f"{name}.crt", "-days", "3", *names)
    openssl("ec", "-in", "own.key", "-aes128", "-passout", "pass:secret", "-out", "locked.key")
    (made / "junk").write_text("junk")
    return made


@pytest.mark.parametrize(
    ("certificate", "key", "words"),
    [
        ("none", "own.key", "--tls-cert: {}/none: cannot be read: No such file"),
        ("own.crt", "none", "--tls-key: {}/none: cannot be read: No such file"),
        ("own.crt", "", "--tls-key: {}: cannot be read: Is a directory"),
        ("own.crt", "other.key", "--tls-key: {}/other.key: is not the key of {}/own.crt"),
        ("own.crt", "locked.key", "--tls-key: {}/locked.key: is locked with a passphrase"),
        ("junk", "own.key", "{}/junk, {}/own.key: expected a certificate and its key in PEM"),
        ("own.crt", "junk", "{}/own.crt, {}/junk: expected a certificate and its key in PEM"),
    ],
)
def test_certificates_that_cannot_be_used_are_refused_before_the_model_is_loaded(
    keys: Path, certificate: str, key: str, words: str
) -> None:
    options = ServeOptions("tiny", port=0, tls_certificate=keys / certificate, tls_key=keys / key)
    with pytest.raises(UsageError) as raised:
        serve(lambda: pytest.fail("loaded"), options, say=lambda line: None)
    assert words.replace("{}", str(keys)) in str(raised.value)


def test_https_serves_and_survives_who_does_not_speak_it(llm: LLM, keys: Path) -> None:
    trust = ssl.create_default_context(cafile=str(keys / "own.crt"))
    with live(llm, tls_certificate=keys / "own.crt", tls_key=keys / "own.key") as running:
        assert f"listening on https://127.0.0.1:{running.port}; loading the model" in running.said
        with bare(running.port, request(CHAT, {"messages": [TELL]})) as plain, contextlib.suppress(ConnectionResetError):
            assert b"HTTP" not in read_all(plain)
        with bare(running.port, b"\x16\x03\x01\x02\x00"):  # the beginning of a handshake
            pass
        for stream in (False, True):
            link = http.client.HTTPSConnection("localhost", running.port, timeout=30, context=trust)
            link.request("POST", CHAT, json.dumps({"messages": [TELL], "stream": stream}), {"Content-Type": "application/json"})
            answer = link.getresponse()
            assert answer.status == 200
            assert (b"[DONE]" if stream else b"word99") in answer.read()
            if not stream:
                link.close()
        # The last one's connection stays in its client's pool, as they do.
        began = time.monotonic()
        running.stop()
        assert time.monotonic() - began < server.GRACE_SECONDS


@pytest.mark.parametrize(
    ("host", "words"),
    [
        ("no-such-host.invalid", "--host: no-such-host.invalid: "),
        ("a..b", "--host: a..b: "),
        ("203.0.113.1", "--port: cannot listen on 203.0.113.1 port 0: "),
    ],
)
def test_a_place_that_cannot_be_listened_on_is_refused_by_the_option_s_name(host: str, words: str) -> None:
    with pytest.raises(UsageError) as raised:
        listen(host, 0)
    assert str(raised.value).startswith(words)
