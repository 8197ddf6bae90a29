"""The model card that a bake leaves: measured as `arctool eval` measures, the same bytes always, true to the source's terms, harmless."""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml
from commands import arctool, ok, refused, tree
from locations import ROOT
from markdown_it import MarkdownIt
from safetensors.numpy import load_file, save_file
from zygote import Zygote

from arctool.errors import InterruptedByUser

CALIB = ("--isq", "qtip4", "--calib-tokens", "256")
BAKE = (*CALIB, "-q", "-o", "a")


def report(directory: Path) -> dict[str, Any]:
    value: dict[str, Any] = json.loads((directory / "uqff_report.json").read_text())
    return value


def front(directory: Path) -> dict[str, Any]:
    value: dict[str, Any] = yaml.safe_load((directory / "README.md").read_text().split("\n---\n")[0])
    return value


@pytest.fixture(scope="module")
def carded(zygote: Zygote, tiny_llama: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The tiny Llama with a card that tells its quality (read only)."""
    place = tmp_path_factory.mktemp("carded")
    ok(zygote.run("bake", tiny_llama, *BAKE, cwd=place))
    return place / "a"


def test_the_card_tells_what_eval_measures_and_so_do_json_and_the_last_line(zygote: Zygote, tiny_llama: Path, tmp_path: Path) -> None:
    baked = json.loads(ok(zygote.run("bake", tiny_llama, *BAKE, "--json", cwd=tmp_path)).stdout)
    argv = ("eval", tmp_path / "a", "--against", tiny_llama, "--tokens", "512", "--json", "--no-layers", "-q")
    measured = json.loads(ok(zygote.run(*argv)).stdout)
    (model,), text = measured["models"], measured["text"]
    quality = baked["quality"]
    assert baked["unmeasured"] is None
    assert (quality["text"], quality["tokens"], quality["predicted"], quality["window"]) == ("evaluation.txt", 512, 510, 256)
    assert (quality["tokens_sha256"], quality["tokens"]) == (text["sha256"], text["tokens"])
    assert quality["text_sha256"] == hashlib.sha256((ROOT / "arctool" / "run" / "texts" / "evaluation.txt").read_bytes()).hexdigest()
    assert quality["perplexity"] == pytest.approx(model["perplexity"], rel=1e-5)
    assert quality["base_perplexity"] == pytest.approx(measured["source"]["perplexity"], rel=1e-5)
    assert quality["kl"] == pytest.approx(model["kl"]["mean"], rel=1e-5)
    assert quality["kl_p99"] == pytest.approx(model["kl"]["p99"], rel=1e-5)
    assert quality["same_top1"] == pytest.approx(model["same_top1"], rel=1e-5)
    assert 0 < quality["kl"] < quality["kl_p99"]
    assert report(tmp_path / "a")["arctool"]["quality"] == quality
    card = (tmp_path / "a" / "README.md").read_text()
    for number in (f"{model['perplexity']:.4g}", f"{model['kl']['mean']:.4g} nats", f"{model['same_top1']:.1%}", text["sha256"]):
        assert number in card
    line = ok(zygote.run("bake", tiny_llama, *BAKE, cwd=tmp_path)).stdout
    assert f"perplexity {model['perplexity']:.4g} (source {quality['base_perplexity']:.4g}), mean KL {model['kl']['mean']:.4g}" in line
    again = json.loads(ok(zygote.run("bake", tiny_llama, *BAKE, "--json", cwd=tmp_path)).stdout)
    assert (again["quality"], again["resumed"]) == (quality, 21)


def test_the_card_tells_the_layers_errors_and_sizes_of_the_report_and_the_disk(carded: Path) -> None:
    card, own = (carded / "README.md").read_text(), report(carded)["arctool"]
    layers = {key: value for key, value in own["layers"].items() if key.startswith("model.layers.")}
    worst = max(layers, key=lambda key: layers[key]["proxy_error"])
    assert f"{layers[worst]['proxy_error']:.4g} (`{worst}`)" in card
    worst = max(layers, key=lambda key: layers[key]["relative_error"])
    assert f"{layers[worst]['relative_error']:.4g} (`{worst}`)" in card
    nbytes = sum(path.stat().st_size for path in carded.iterdir() if path.name not in ("README.md", "uqff_report.json"))
    assert f"| {nbytes:,} |" in card
    assert own["source"]["fingerprint"] in card
    assert own["calibration"]["text"] in card
    assert front(carded)["library_name"] == "arctool"


def test_the_same_bytes_with_any_jobs_threads_place_and_time(zygote: Zygote, tiny_llama: Path, carded: Path, tmp_path: Path) -> None:
    whole = tree(carded)
    ok(zygote.run("bake", tiny_llama, *CALIB, "-q", "-o", "elsewhere/b", "--jobs", "2", cwd=tmp_path))
    assert tree(tmp_path / "elsewhere" / "b") == whole
    threads = {"OMP_NUM_THREADS": "2", "NUMBA_NUM_THREADS": "2", "TZ": "Pacific/Kiritimati"}
    ok(arctool("bake", tiny_llama, *CALIB, "-q", "-o", tmp_path / "c", "--jobs", "1", **threads))
    assert tree(tmp_path / "c") == whole
    card = whole["README.md"].decode()
    assert str(tmp_path) not in card
    assert str(tiny_llama.parent) not in card
    assert not re.search(r"\b20[23]\d-\d\d|\d\d:\d\d:\d\d", card)


def test_measuring_changes_the_card_and_what_the_report_says_of_it_and_nothing_else(
    zygote: Zygote, tiny_llama: Path, carded: Path, tmp_path: Path
) -> None:
    done = ok(zygote.run("bake", tiny_llama, *BAKE, "--no-measure", "--json", cwd=tmp_path))
    value = json.loads(done.stdout)
    assert (value["quality"], value["unmeasured"]) == (None, "it was asked not to (--no-measure)")
    bare, full = tree(tmp_path / "a"), tree(carded)
    assert bare.keys() == full.keys()
    assert {name for name in bare if bare[name] != full[name]} == {"README.md", "uqff_report.json"}
    ours, theirs = report(tmp_path / "a"), report(carded)
    theirs["arctool"].pop("quality")
    for one in (ours, theirs):
        one["arctool"]["sha256"]["files"].pop("README.md")
    assert ours == theirs
    card = bare["README.md"].decode()
    assert "was not measured when it was baked: it was asked not to (--no-measure)." in card
    assert "arctool eval DIRECTORY --against SOURCE" in card
    assert "(`model.layers." in card
    # What is finished is not measured afterwards, and says nothing that it does not know.
    again = json.loads(ok(zygote.run("bake", tiny_llama, *BAKE, "--measure", "--json", cwd=tmp_path)).stdout)
    assert (again["quality"], again["resumed"]) == (None, 21)
    assert tree(tmp_path / "a") == bare


def test_without_calibration_only_who_asks_is_told(zygote: Zygote, tiny_llama: Path, tmp_path: Path) -> None:
    plain = ("bake", tiny_llama, "--isq", "qtip4", "--calib", "none", "-q", "--json", "-o")
    value = json.loads(ok(zygote.run(*plain, "a", cwd=tmp_path)).stdout)
    assert value["quality"] is None
    assert "--measure" in value["unmeasured"]
    assert "None: what is quantised is rounded as it is" in (tmp_path / "a" / "README.md").read_text()
    asked = json.loads(ok(zygote.run(*plain, "b", "--measure", cwd=tmp_path)).stdout)
    assert asked["quality"]["kl"] > 0
    dense = ("bake", tiny_llama, "--isq", "bf16", "-q", "--json", "-o", "c", "--measure")
    value = json.loads(ok(zygote.run(*dense, cwd=tmp_path)).stdout)
    assert 0 < value["quality"]["kl"] < 0.01
    assert "No layer is quantised." in (tmp_path / "c" / "README.md").read_text()


def test_a_model_too_large_to_hold_is_not_measured_and_says_how(zygote: Zygote, tiny_llama: Path, tmp_path: Path) -> None:
    hook = "import arctool.bake.card.measurement as m\nm.SELF_WEIGHTS = {}\nm.load_model = None"
    for limit, options in ((127295, ()), (127295, ("--measure",))):
        argv = ("bake", tiny_llama, *CALIB, "-q", "--json", "--force", "-o", "a", *options)
        value = json.loads(ok(zygote.run(*argv, cwd=tmp_path, hook=hook.format(limit))).stdout)
        assert value["quality"] is None
        assert "too many to run it here unasked" in value["unmeasured"]
    assert "too many to run it here unasked" in (tmp_path / "a" / "README.md").read_text()
    argv = ("bake", tiny_llama, *CALIB, "-q", "-o", "b")
    assert "TypeError: 'NoneType'" in zygote.run(*argv, cwd=tmp_path, hook=hook.format(127296)).stderr


def test_a_model_whose_logits_are_not_finite_is_baked_and_the_card_says_so(
    zygote: Zygote, copy_checkpoint: Callable[[str], Path], tmp_path: Path
) -> None:
    model = copy_checkpoint("llama")
    weights = load_file(model / "model.safetensors")
    weights["lm_head.weight"][33] = np.float32(3e38)
    save_file(weights, model / "model.safetensors")
    (tmp_path / "r.yml").write_text("head: bf16\n")
    argv = ("bake", model, "--isq", "qtip4", "--calib", "none", "--measure", "--recipe", tmp_path / "r.yml", "-q", "--json", "-o", "a")
    value = json.loads(ok(zygote.run(*argv, cwd=tmp_path)).stdout)
    assert value["quality"] is None
    assert "the logit of entry 33 is" in value["unmeasured"]
    assert "the logit of entry 33 is" in (tmp_path / "a" / "README.md").read_text()
    assert str(tmp_path) not in (tmp_path / "a" / "README.md").read_text()
    ok(zygote.run("verify", tmp_path / "a"))


STOP = """
import os, signal, arctool.run.divergence as m
real = m.{name}
def stop(*arguments):
    os.kill(os.getpid(), signal.{signal})
    return real(*arguments)
m.{name} = stop
"""


@pytest.mark.parametrize(("name", "how"), [("final_states", "SIGINT"), ("score_rows", "SIGINT"), ("score_rows", "SIGKILL")])
def test_an_end_while_it_measures_costs_the_measurement_only(
    zygote: Zygote, tiny_llama: Path, carded: Path, tmp_path: Path, name: str, how: str
) -> None:
    stopped = zygote.run("bake", tiny_llama, *BAKE, cwd=tmp_path, hook=STOP.format(name=name, signal=how))
    if how == "SIGINT":
        refused(stopped, InterruptedByUser.exit_code, "interrupted; 14 of 14 layers are kept in")
        assert os.listdir(tmp_path) == [".a.arctool-journal"]
    else:
        assert stopped.code == -signal.SIGKILL
        assert not (tmp_path / "a").exists()
    again = json.loads(ok(zygote.run("bake", tiny_llama, *BAKE, "--json", cwd=tmp_path)).stdout)
    assert again["resumed"] == 14
    assert tree(tmp_path / "a") == tree(carded)
    assert os.listdir(tmp_path) == ["a"]


def test_rows_that_calibration_dropped_are_told_whatever_interrupted_it(
    zygote: Zygote, copy_checkpoint: Callable[[str], Path], tmp_path: Path
) -> None:
    model = copy_checkpoint("llama")
    weights = load_file(model / "model.safetensors")
    # One input of layer 0's down_proj is too large to be squared in a few rows.
    weights["model.layers.0.mlp.up_proj.weight"][5] *= np.float32(1e16)
    save_file(weights, model / "model.safetensors")
    ok(zygote.run("bake", model, *CALIB, "--no-measure", "-q", "-o", "calm", cwd=tmp_path))
    layers = report(tmp_path / "calm")["arctool"]["layers"]
    dropped = {name: layer["dropped_rows"] for name, layer in layers.items() if "dropped_rows" in layer}
    assert list(dropped) == ["model.layers.0.mlp.down_proj"]
    (count,) = dropped.values()
    assert 0 < count < 26, "so few of the 256 rows that the others still serve"
    card = (tmp_path / "calm" / "README.md").read_text()
    assert f"left out in 1 layer, at most {count} (`model.layers.0.mlp.down_proj`)." in card
    hook = STOP_AFTER.format(count=10)
    refused(zygote.run("bake", model, *CALIB, "--no-measure", "-q", "-o", "a", cwd=tmp_path, hook=hook), InterruptedByUser.exit_code)
    ok(zygote.run("bake", model, *CALIB, "--no-measure", "-q", "-o", "a", cwd=tmp_path))
    assert tree(tmp_path / "a") == tree(tmp_path / "calm")


STOP_AFTER = """
import os, signal
from arctool.bake.journal import Journal
store, stored = Journal.store, 0
def counted(self, *arguments):
    global stored
    store(self, *arguments)
    stored += 1
    if stored == {count}:
        os.kill(os.getpid(), signal.SIGINT)
Journal.store = counted
"""


def test_verify_holds_the_card_to_its_hash(zygote: Zygote, carded: Path, tmp_path: Path) -> None:
    ok(zygote.run("verify", carded))
    artifact = Path(shutil.copytree(carded, tmp_path / "a"))
    card = artifact / "README.md"
    card.write_text(card.read_text().replace("## Quality", "## Excellent quality"))
    found = zygote.run("verify", artifact)
    assert found.code == 5
    assert "file README.md: SHA-256" in found.stdout
    card.unlink()
    assert "README.md" in zygote.run("verify", artifact).stdout


def test_the_licence_goes_along_and_the_sources_page_does_not(
    zygote: Zygote, copy_checkpoint: Callable[[str], Path], tmp_path: Path
) -> None:
    model = copy_checkpoint("qwen2")
    (model / "README.md").write_text(
        "---\nlicense: other\nlicense_name: fair\nlicense_link: https://x.y/fair\n---\n<script>alert(1)</script><img src=x>"
    )
    (model / "LICENSE").write_bytes(b"Be fair.\r\n\xc3\xa4")
    (model / "NOTICE.txt").write_bytes(b"By us.")
    (model / "LICENSE.html").write_bytes(b"<script>alert(1)</script>")
    ok(zygote.run("bake", model, "--isq", "q8_0", "-q", "-o", "a", cwd=tmp_path))
    artifact = tmp_path / "a"
    assert (artifact / "LICENSE").read_bytes() == b"Be fair.\r\n\xc3\xa4"
    assert (artifact / "NOTICE.txt").read_bytes() == b"By us."
    assert sorted(os.listdir(artifact)) == [
        "LICENSE", "NOTICE.txt", "README.md", "config.json", "generation_config.json", "q8_0-0.uqff", "residual.safetensors",
        "tokenizer.json", "tokenizer_config.json", "uqff_report.json",
    ]  # fmt: skip
    fields = front(artifact)
    assert (fields["license"], fields["license_name"], fields["license_link"]) == ("other", "fair", "https://x.y/fair")
    card = (artifact / "README.md").read_text()
    assert "<script>" not in card
    assert "`LICENSE`, `NOTICE.txt`" in card
    ok(zygote.run("verify", artifact, "--source", model))
    before = report(artifact)["arctool"]["source"]["fingerprint"]
    (model / "LICENSE").write_bytes(b"Be very fair.")
    ok(zygote.run("bake", model, "--isq", "q8_0", "-q", "-o", "b", cwd=tmp_path))
    assert report(tmp_path / "b")["arctool"]["source"]["fingerprint"] != before


def test_a_hostile_directory_name_is_text_in_the_card(zygote: Zygote, copy_checkpoint: Callable[[str], Path], tmp_path: Path) -> None:
    name = "x`\n---\nlicense: mit\n<img src=x onerror=alert(1)> | [a](b)"
    model = copy_checkpoint("llama").rename(tmp_path / name)
    ok(zygote.run("bake", model, "--isq", "q8_0", "-q", "-o", "a", cwd=tmp_path))
    shown = name.replace("\n", "\ufffd")
    assert (front(tmp_path / "a")["base_model"], front(tmp_path / "a")["license"]) == (shown, "unknown")
    body = (tmp_path / "a" / "README.md").read_text().split("\n---\n", 1)[1]
    tokens = MarkdownIt("commonmark").enable("table").parse(body)
    kinds = {token.type for token in tokens} | {child.type for token in tokens for child in token.children or []}
    assert not kinds & {"html_block", "html_inline", "image", "link_open"}
    assert "code_inline" in kinds
    ok(zygote.run("verify", tmp_path / "a"))


def test_every_command_of_the_card_is_one_of_ours(zygote: Zygote, carded: Path) -> None:
    card = (carded / "README.md").read_text()
    commands = set(re.findall(r"^arctool (\w+) DIRECTORY", card, re.MULTILINE)) | set(re.findall(r"`arctool (\w+) ", card))
    assert commands == {"run", "serve", "verify", "inspect", "eval"}
    for command in sorted(commands - {"serve"}):
        ok(zygote.run(command, "--help"))
    (example,) = re.findall(r"```python\n(.*?)```", card, re.DOTALL)
    ok(zygote.run("doctor", cwd=carded.parent, hook=example.replace("DIRECTORY", "a")))
