"""`arctool eval` as a user runs it: the table, JSON, the picture, Ctrl-C, and bad input refused in one line before any work."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from commands import arctool, ok, refused, tree
from locations import FIXTURES
from safetensors.numpy import load_file, save_file
from zygote import Zygote

from arctool.errors import FormatError, InterruptedByUser, SourceError, StorageError, UsageError, VerificationError

TEXT = ("--text", FIXTURES / "texts" / "heldout.txt", "--window", "50", "--tokens", "150")


@pytest.fixture(scope="session")
def coarse_artifact(zygote: Zygote, tiny_llama: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The tiny Llama at qtip2-v4 (read only)."""
    target = tmp_path_factory.mktemp("coarse") / "coarse"
    ok(zygote.run("bake", tiny_llama, "--isq", "qtip2-v4", "--calib", "none", "-o", target))
    return target


@pytest.fixture
def loud_model(copy_checkpoint: Callable[[str], Path]) -> Path:
    """A checkpoint of finite weights whose logits are not."""
    model = copy_checkpoint("llama")
    weights = load_file(model / "model.safetensors")
    weights["lm_head.weight"][33] = np.float32(3e38)
    save_file(weights, model / "model.safetensors")
    return Path(shutil.move(model, model.parent / "loud"))


def test_a_fresh_process_measures_the_built_in_text(tiny_artifact: Path, tiny_llama: Path, tmp_path: Path) -> None:
    before = tree(tiny_artifact)
    done = ok(arctool("eval", tiny_artifact, "--against", tiny_llama, "--tokens", "300", cwd=tmp_path))
    last = [line for line in done.stdout.splitlines() if line.strip()][-3:]
    assert last[0].split()[:2] == ["llama", "(source)"]
    assert last[1].split()[0] == "llama"
    assert last[1].split()[-1].endswith("%")
    assert last[2] == "298 predicted tokens of evaluation.txt, 2 windows of at most 256"
    assert "model.layers.1.mlp.down_proj" in done.stdout
    assert os.listdir(tmp_path) == []
    assert tree(tiny_artifact) == before


def test_several_models_are_several_rows_and_a_picture(
    zygote: Zygote, tiny_artifact: Path, coarse_artifact: Path, tiny_llama: Path, tmp_path: Path
) -> None:
    argv = ("eval", tiny_artifact, coarse_artifact, tiny_llama, "--against", tiny_llama, *TEXT, "--plot", "q.png")
    value = json.loads(ok(zygote.run(*argv, "--json", cwd=tmp_path)).stdout)
    fine, coarse, same = value["models"]
    assert 0 == same["kl"]["mean"] < fine["kl"]["mean"] < coarse["kl"]["mean"]
    assert same["perplexity"] == value["source"]["perplexity"]
    assert (value["text"]["predicted"], value["text"]["windows"]) == (147, 3)
    assert {layer["label"] for layer in coarse["layers"] if "proj" in layer["key"]} == {"trellis-k8v4l12-bf16"}
    assert (tmp_path / "q.png").read_bytes().startswith(b"\x89PNG")
    assert os.listdir(tmp_path) == ["q.png"]
    shown = ok(zygote.run(*argv, "--no-layers", cwd=tmp_path)).stdout
    assert [line.split()[0] for line in shown.splitlines() if "%" in line] == ["llama", "coarse", "llama"]
    assert "proj" not in shown


def test_the_same_call_gives_the_same_numbers_in_any_company(
    zygote: Zygote, tiny_artifact: Path, coarse_artifact: Path, tiny_llama: Path
) -> None:
    def models(*paths: Path) -> list[dict[str, object]]:
        argv = ("eval", *paths, "--against", tiny_llama, *TEXT, "--json", "-q")
        found = json.loads(ok(zygote.run(*argv)).stdout)["models"]
        return [{name: value for name, value in model.items() if name != "seconds"} for model in found]

    alone = [*models(coarse_artifact), *models(tiny_artifact)]
    assert models(coarse_artifact, tiny_artifact) == alone
    assert alone[0] != alone[1]


def test_quiet_is_quiet_and_json_is_all_of_standard_output(zygote: Zygote, tiny_artifact: Path) -> None:
    done = ok(zygote.run("eval", tiny_artifact, *TEXT, "--json", "-q"))
    assert done.stderr == ""
    value = json.loads(done.stdout)
    assert value["source"] is None
    assert value["models"][0]["kl"] is None


def test_bad_options_are_refused_by_name(zygote: Zygote, tiny_artifact: Path, tiny_llama: Path, tmp_path: Path) -> None:
    (tmp_path / "empty").touch()
    (tmp_path / "binary").write_bytes(b"\xff\xfe\x00")
    (tmp_path / "folder.png").mkdir()
    os.mkfifo(tmp_path / "pipe")
    before = sorted(os.listdir(tmp_path))
    against = ("--against", tiny_llama)
    for options, code, named in (
        (("--text", "empty"), UsageError.exit_code, ("--text: empty: 0 tokens",)),
        (("--text", "binary"), UsageError.exit_code, ("--text: binary: not UTF-8 text", "byte 0")),
        (("--text", "pipe"), UsageError.exit_code, ("--text: pipe", "not a regular file")),
        (("--text", "gone"), UsageError.exit_code, ("--text: gone", "No such file")),
        (("--tokens", "1"), UsageError.exit_code, ("--tokens", "at least 2", "found 1")),
        (("--window", "257"), UsageError.exit_code, ("--window", "2 to 256", "found 257")),
        (("--window", "1"), UsageError.exit_code, ("--window", "found 1")),
        (("--against", "gone"), SourceError.exit_code, ("gone: no such file or directory",)),
        (("--plot", "a.png"), UsageError.exit_code, ("--plot: a.png", "needs --against")),
        ((*against, "--plot", "a.gif"), UsageError.exit_code, ("--plot: a.gif", ".png")),
        ((*against, "--plot", "folder.png"), UsageError.exit_code, ("--plot: folder.png", "directory")),
        ((*against, "--plot", "gone/a.png"), StorageError.exit_code, ("gone/a.png: cannot write",)),
    ):
        refused(zygote.run("eval", tiny_artifact, *options, cwd=tmp_path), code, *named)
    assert sorted(os.listdir(tmp_path)) == before


def test_nothing_is_loaded_before_every_path_and_option_is_known_to_be_good(
    zygote: Zygote, tiny_artifact: Path, tiny_llama: Path, tmp_path: Path
) -> None:
    hook = "import arctool.bench.evaluation as m\ndef load(*a):\n    raise AssertionError('loaded')\nm.load_model = load"
    good = ("eval", tiny_artifact, "--against", tiny_llama, *TEXT)
    assert "loaded" in zygote.run(*good, cwd=tmp_path, hook=hook).stderr
    for argv in ((*good, "gone"), (*good, "--plot", "gone/a.png"), (*good[:4], "--text", "gone"), (*good, "--tokens", "0")):
        done = zygote.run(*argv, cwd=tmp_path, hook=hook)
        assert done.code in (UsageError.exit_code, SourceError.exit_code, StorageError.exit_code)
        assert "loaded" not in done.stderr


def test_models_that_cannot_be_compared_are_refused(
    zygote: Zygote, tiny_artifact: Path, copy_checkpoint: Callable[[str], Path], tmp_path: Path
) -> None:
    model = copy_checkpoint("llama")
    weights = load_file(model / "model.safetensors")
    for name in ("model.embed_tokens.weight", "lm_head.weight"):
        weights[name] = np.concatenate((weights[name], weights[name][:8]))
    save_file(weights, model / "model.safetensors")
    config = json.loads((model / "config.json").read_text())
    (model / "config.json").write_text(json.dumps({**config, "vocab_size": 520}))
    refused(zygote.run("eval", tiny_artifact, "--against", model, *TEXT), UsageError.exit_code, "vocabulary of 512", "has 520")


def test_an_artifact_that_is_damaged_is_one_line_alone_and_one_row_among_others(
    zygote: Zygote, tiny_artifact: Path, tiny_llama: Path, loud_model: Path, tmp_path: Path
) -> None:
    broken = Path(shutil.copytree(tiny_artifact, tmp_path / "broken"))
    data = (broken / "qtip4-0.uqff").read_bytes()
    (broken / "qtip4-0.uqff").write_bytes(data[: len(data) // 2])
    refused(zygote.run("eval", broken, *TEXT), FormatError.exit_code, "qtip4-0.uqff")
    against = ("--against", tiny_llama, *TEXT, "-q")
    refused(zygote.run("eval", loud_model, *against), VerificationError.exit_code, str(loud_model), "window 0", "entry 33")
    several = zygote.run("eval", loud_model, tiny_artifact, *against, "--plot", tmp_path / "p.svg")
    assert several.code == VerificationError.exit_code
    assert several.stderr == ""
    assert "FAILED" in several.stdout
    assert "loud FAILED: " in several.stdout
    assert "Traceback" not in several.stdout
    assert any(line.split()[0] == "llama" and "%" in line for line in several.stdout.splitlines() if line.strip())
    assert "failed, not drawn: loud" in (tmp_path / "p.svg").read_text()


INTERRUPT = """
import os, signal, arctool.run.divergence as m
real, calls = m.score_rows, 0
def scored(*arguments):
    global calls
    calls += 1
    if calls == {at}:
        os.kill(os.getpid(), signal.SIGINT)
    return real(*arguments)
m.score_rows = scored
"""


@pytest.mark.parametrize("at", [1, 5])
def test_control_c_is_one_line_and_leaves_nothing(
    zygote: Zygote, tiny_artifact: Path, coarse_artifact: Path, tiny_llama: Path, tmp_path: Path, at: int
) -> None:
    argv = ("eval", tiny_artifact, coarse_artifact, "--against", tiny_llama, *TEXT, "--plot", "q.png", "-q")
    done = zygote.run(*argv, cwd=tmp_path, hook=INTERRUPT.format(at=at))
    assert done.code == InterruptedByUser.exit_code
    assert done.stderr == "arctool: interrupted\n"
    assert done.stdout == ""
    assert os.listdir(tmp_path) == []


def test_the_help_shows_every_option(zygote: Zygote) -> None:
    shown = ok(zygote.run("eval", "--help")).stdout
    for option in ("--against", "--text", "--window", "--tokens", "--plot", "--no-layers", "--json", "--quiet"):
        assert option in shown
