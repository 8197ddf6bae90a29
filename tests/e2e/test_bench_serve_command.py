"""`arctool bench serve` as people start it: a table or JSON, a picture, one line for what is wrong, and Ctrl-C."""

from __future__ import annotations

import json
import os
import signal
import sys
import threading
from pathlib import Path

import pytest
from commands import ok, refused
from zygote import Zygote

sys.path.append(str(Path(__file__).parents[1] / "bench"))

from openai_stand_in import StandIn

SMALL = ("--input-len", "12", "--output-len", "6", "--num-prompts", "4", "--concurrency", "1,2")


def test_a_server_is_measured_by_its_address(zygote: Zygote, tmp_path: Path) -> None:
    with StandIn(key="secret").running() as url:
        command = ("bench", "serve", "--base-url", url + "/v1", "--api-key", "secret", *SMALL)
        shown = ok(zygote.run(*command, "--plot", "curve.png", "--goodput", "ttft:60000 e2el:60000", cwd=tmp_path))
        found = json.loads(ok(zygote.run(*command, "--json", "--workload", "multi-turn", "--turns", "2")).stdout)
        asked = ok(zygote.run(*command[:-8], *SMALL, hook="import os; os.environ['OPENAI_API_KEY'] = 'secret'"))
    for name in ("Successful requests", "Output token throughput (tok/s)", "Request goodput (req/s)", "Median TPOT (ms)", "P99 TTFT (ms)"):
        assert name in shown.stdout, name
        assert (name in asked.stdout) is ("goodput" not in name)
    assert "FAILED" not in shown.stdout
    assert (tmp_path / "curve.png").read_bytes().startswith(b"\x89PNG")
    assert [(row["max_concurrency"], row["completed"], row["total_output_tokens"]) for row in found["rows"]] == [(1, 4, 24), (2, 4, 24)]
    assert (found["failed"], found["interrupted"], found["workload"]) == (False, False, "multi-turn")
    assert "secret" not in json.dumps(found)


def test_a_load_that_failed_is_code_1_with_its_reason_in_the_table(zygote: Zygote) -> None:
    with StandIn(faults={6: "short"}).running() as url:
        done = zygote.run("bench", "serve", "--base-url", url, *SMALL)
    assert done.code == 1
    assert "2 clients FAILED: 1 of 4 requests failed; 1 of them: 5 tokens where 6 were asked for" in done.stdout
    assert not done.stderr


@pytest.mark.parametrize(
    ("options", "code", "culprit"),
    [
        (("--base-url", "nowhere"), 2, "--base-url"),
        (("--base-url", "http://127.0.0.1:1"), 7, "cannot connect: Connection refused"),
        (("--base-url", "http://127.0.0.1:1", "--concurrency", "many"), 2, "--concurrency"),
        (("--base-url", "http://127.0.0.1:1", "--goodput", "fast"), 2, "--goodput"),
        (("--base-url", "http://127.0.0.1:1", "--plot", "curve.gif"), 2, "--plot"),
        (("--base-url", "http://127.0.0.1:1", "--tokenizer", "gone"), 3, "gone"),
    ],
)
def test_what_cannot_be_measured_is_one_line(zygote: Zygote, options: tuple[str, ...], code: int, culprit: str) -> None:
    assert culprit in refused(zygote.run("bench", "serve", *options), code)


def test_an_interrupt_prints_what_was_finished(zygote: Zygote) -> None:
    stand_in = StandIn(faults={7: "silence"}, silent=threading.Event())
    with stand_in.running() as url:
        child = zygote.start("bench", "serve", "--base-url", url, *SMALL)
        assert stand_in.silent is not None
        assert stand_in.silent.wait(60)
        os.kill(child.pid, signal.SIGINT)
        done = child.wait()
    assert done.code == 130
    assert "interrupted: 1 of 2 loads were not finished" in done.stdout
    assert "1 client" in done.stdout
    assert done.stderr == "arctool: interrupted\n"


def test_the_help_names_the_measurement(zygote: Zygote) -> None:
    assert "--request-rate" in ok(zygote.run("bench", "serve", "--help")).stdout
    assert "bench serve" in ok(zygote.run("bench", "--help")).stdout
