"""The subcommands on tiny checkpoints: what they write, what they print where, and that only source, recipe and seed move a byte."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path

import pytest
from commands import MODULE, SCRIPT, arctool, ok, refused, tree
from hub_stand_in import COMMIT, HubStandIn
from tiny_gguf import write_gguf
from zygote import Zygote

from arctool.bake.source.checkpoint import open_checkpoint
from arctool.run.models import Role
from arctool.uqff.container import open_artifact

SUBCOMMANDS = ("bake", "verify", "eval", "inspect", "diff", "run", "doctor")


def test_a_fresh_process_bakes_and_runs(tiny_llama: Path, tmp_path: Path) -> None:
    baked = ok(arctool("bake", tiny_llama, "--isq", "qtip4", "-o", "a", cwd=tmp_path))
    assert baked.stdout.startswith(f"{tmp_path}/a: ")
    assert "bits a quantised weight" in baked.stdout
    assert "21/21 lm_head q8_0" in baked.stderr
    said = json.loads((tmp_path / "a" / "uqff_report.json").read_text())["arctool"]["calibration"]
    assert (said["tokens"], said["window"], said["sampled"], said["auto"]) == (32768, 256, 4096, True)
    answered = ok(arctool("run", "a", "-p", "Hi", "--temperature", "0", "--max-tokens", "4", "--json", cwd=tmp_path))
    assert json.loads(answered.stdout)["completion_tokens"] == 4
    assert os.listdir(tmp_path) == ["a"]


def test_the_installed_script_is_the_same_command(tiny_artifact: Path) -> None:
    shown = ok(arctool("inspect", tiny_artifact, command=SCRIPT))
    assert "model.layers.1.self_attn.q_proj" in shown.stdout
    assert shown.stderr == ""


def test_every_architecture_bakes_and_the_artifact_holds_its_tensors(zygote: Zygote, tiny_checkpoint: Path, tmp_path: Path) -> None:
    ok(zygote.run("bake", tiny_checkpoint, "--isq", "qtip4", "--calib", "none", "-o", "a", cwd=tmp_path))
    with open_artifact(tmp_path / "a") as artifact, open_checkpoint(str(tiny_checkpoint)) as checkpoint:
        keys = artifact.keys()
        stored = {f"{key}.weight" for key in keys} | set(artifact.residual_names())
        biases = {spec.name for spec in checkpoint.specs if spec.name.endswith(".bias")}
        assert stored | biases == set(checkpoint.names())
        labels = {key: artifact.weight(key).label for key in keys}
        linear = [spec.key for spec in checkpoint.specs if spec.role is Role.LINEAR]
        assert [key for key, label in labels.items() if label.startswith("trellis-")] == linear
        tables = {"model.embed_tokens"} if checkpoint.config.tie_word_embeddings else {"model.embed_tokens", "lm_head"}
        assert {key for key, label in labels.items() if label == "q8_0"} == tables
        assert all(artifact.bias(name.removesuffix(".bias")) is not None for name in biases)
        assert artifact.config_json == checkpoint.config_json
    for name in ("tokenizer.json", "tokenizer_config.json", "generation_config.json"):
        assert (tmp_path / "a" / name).read_bytes() == (tiny_checkpoint / name).read_bytes()
    ok(zygote.run("verify", "a", "--source", tiny_checkpoint, cwd=tmp_path))


def test_every_choice_bakes_verifies_and_runs_here_all_in_one_artifact(zygote: Zygote, tiny_llama: Path, tmp_path: Path) -> None:
    rungs = ("qtip2", "qtip2b", "qtip2-v4", "qtip2.25-v4", "qtip3", "qtip3b", "qtip4", "qtip4b", "q8_0")
    projections = ("self_attn.q", "self_attn.k", "self_attn.v", "self_attn.o", "mlp.gate", "mlp.up", "mlp.down")
    names = [f"model.layers.{layer}.{name}_proj" for layer in (0, 1) for name in projections]
    rules = "".join(f'  - {{match: "{name}", isq: {rung}}}\n' for name, rung in zip(names, rungs, strict=False))
    (tmp_path / "r.yml").write_text(f"embedding: qtip4b\nhead: qtip4\nrules:\n{rules}")
    ok(zygote.run("bake", tiny_llama, "--isq", "bf16", "--recipe", "r.yml", "--calib", "none", "-o", "a", cwd=tmp_path))
    report = json.loads(ok(zygote.run("verify", "a", "--source", tiny_llama, "--json", cwd=tmp_path)).stdout)
    assert report["passed"]
    counts = report["implementations"]["counts"]
    assert (counts["tensors compared"], counts["trellis tensors"], counts["block tensors"]) == (11, 10, 1)
    assert len({row["label"] for row in report["errors"] if row["limit"] is not None}) == 9
    answer = ok(zygote.run("run", "a", "-p", "Hi", "--temperature", "0", "--max-tokens", "3", "--json", cwd=tmp_path))
    assert json.loads(answer.stdout)["completion_tokens"] == 3


def test_a_gguf_file_bakes_to_the_layers_of_the_directory_it_was_made_from(zygote: Zygote, tiny_llama: Path, tmp_path: Path) -> None:
    gguf = write_gguf(tiny_llama, tmp_path / "tiny.gguf", "llama")
    ok(zygote.run("bake", gguf, "--isq", "qtip4", "--calib", "none", cwd=tmp_path))
    ok(zygote.run("bake", tiny_llama, "--isq", "qtip4", "--calib", "none", cwd=tmp_path))
    assert sorted(os.listdir(tmp_path)) == ["llama-qtip4", "tiny-qtip4", "tiny.gguf"]
    for name in ("qtip4-0.uqff", "residual.safetensors"):
        assert (tmp_path / "tiny-qtip4" / name).read_bytes() == (tmp_path / "llama-qtip4" / name).read_bytes()


def test_a_hub_id_bakes_to_the_layers_of_its_directory(tiny_artifact: Path, tiny_llama: Path, tmp_path: Path) -> None:
    with HubStandIn(tiny_llama) as hub:
        environment = {"HF_ENDPOINT": hub.endpoint, "HF_HOME": str(tmp_path / "home"), "HF_HUB_OFFLINE": "0", "HF_HUB_DISABLE_XET": "1"}
        done = ok(arctool("bake", f"tiny/llama@{COMMIT}", "--isq", "qtip4", "--calib", "none", "--json", cwd=tmp_path, **environment))
        assert json.loads(done.stdout)["path"] == str(tmp_path / "llama-qtip4")
        missing = arctool("bake", "tiny/absent", "--isq", "qtip4", cwd=tmp_path, **environment)
    refused(missing, 3, "tiny/absent: no such repository")
    assert (tmp_path / "llama-qtip4" / "qtip4-0.uqff").read_bytes() == (tiny_artifact / "qtip4-0.uqff").read_bytes()
    assert sorted(os.listdir(tmp_path)) == ["home", "llama-qtip4"]


def test_without_an_output_the_artifact_is_named_after_model_and_rung(zygote: Zygote, tiny_llama: Path, tmp_path: Path) -> None:
    done = ok(zygote.run("bake", f"{tiny_llama}/", "--isq", "qtip4b", "--calib", "none", cwd=tmp_path))
    assert done.stdout.startswith(f"{tmp_path}/llama-qtip4b: ")
    assert os.listdir(tmp_path) == ["llama-qtip4b"]


def test_json_is_all_that_goes_to_standard_output_and_quiet_is_quiet(zygote: Zygote, tiny_llama: Path, tmp_path: Path) -> None:
    done = ok(zygote.run("bake", tiny_llama, "--isq", "qtip4", "--calib", "none", "-o", "a", "--json", cwd=tmp_path))
    result = json.loads(done.stdout)
    assert result["path"] == str(tmp_path / "a")
    assert result["resumed"] == 0
    assert result["quantised_parameters"] == 2 * (64 * 64 * 2 + 64 * 32 * 2 + 64 * 96 * 3) + 2 * 512 * 64
    (line,) = done.stderr.splitlines()
    assert line.startswith("21/21 lm_head q8_0")
    assert ok(zygote.run("bake", tiny_llama, "--isq", "qtip4", "--calib", "none", "-o", "b", "--quiet", cwd=tmp_path)).stderr == ""
    for argv in (("inspect", "a", "--json"), ("verify", "a", "--json"), ("doctor", "--json")):
        done = ok(zygote.run(*argv, cwd=tmp_path))
        assert isinstance(json.loads(done.stdout), dict)
        assert done.stderr == ""


def test_threads_move_no_byte_and_the_seed_does(zygote: Zygote, tiny_llama: Path, tmp_path: Path) -> None:
    for name, options in {
        "one": ("--jobs", "1"), "two": ("--jobs", "2"), "five": ("--jobs", "5"),
        "again": ("--seed", "0"), "seven": ("--seed", "7"), "seven2": ("--seed", "7"),
    }.items():  # fmt: skip
        ok(zygote.run("bake", tiny_llama, "--isq", "qtip4", "--calib", "none", "-o", name, *options, cwd=tmp_path))
    one, seven = tree(tmp_path / "one"), tree(tmp_path / "seven")
    assert tree(tmp_path / "two") == tree(tmp_path / "five") == tree(tmp_path / "again") == one
    assert tree(tmp_path / "seven2") == seven
    assert {name for name in one if one[name] != seven[name]} == {"qtip4-0.uqff", "uqff_report.json", "README.md"}


def test_a_recipe_decides_layer_by_layer(zygote: Zygote, tiny_llama: Path, tmp_path: Path) -> None:
    (tmp_path / "r.yml").write_text(
        '1: {isq: qtip2-v4}\nrules:\n  - {match: "*.v_proj", isq: qtip4b}\n  - {match: "*.up_proj", skip: true}\n'
    )
    ok(zygote.run("bake", tiny_llama, "--isq", "qtip4", "--calib", "none", "--recipe", "r.yml", "-o", "a", cwd=tmp_path))
    with open_artifact(tmp_path / "a") as artifact:
        keys = artifact.keys()
        labels = {key: artifact.weight(key).label for key in keys}
    layer = "model.layers.{}.{}"
    assert labels[layer.format(0, "self_attn.q_proj")] == labels[layer.format(0, "mlp.down_proj")]
    assert labels[layer.format(1, "self_attn.q_proj")].startswith("trellis-k8v4l12")
    assert labels[layer.format(0, "self_attn.v_proj")] == labels[layer.format(1, "self_attn.v_proj")]
    assert labels[layer.format(0, "mlp.up_proj")] == "bf16"
    assert (labels["model.embed_tokens"], labels["lm_head"]) == ("q8_0", "q8_0")
    assert len(set(labels.values())) == 5


def test_a_finished_bake_run_again_changes_nothing(zygote: Zygote, tiny_llama: Path, tmp_path: Path) -> None:
    argv = ("bake", tiny_llama, "--isq", "qtip4", "--calib", "none", "-o", "a")
    ok(zygote.run(*argv, cwd=tmp_path))

    def files() -> dict[Path, tuple[int, int, int]]:
        """Not when they were last read: the second run reads them to know that they are whole."""
        return {path: (path.stat().st_ino, path.stat().st_mtime_ns, path.stat().st_size) for path in (tmp_path / "a").iterdir()}

    before = files()
    again = ok(zygote.run(*argv, "--json", cwd=tmp_path))
    assert json.loads(again.stdout)["resumed"] == 21
    assert files() == before
    assert os.listdir(tmp_path) == ["a"]


def test_force_replaces_an_artifact_and_nothing_but_an_artifact(zygote: Zygote, tiny_llama: Path, tmp_path: Path) -> None:
    argv = ("bake", tiny_llama, "--calib", "none", "-o", "a", "--isq")
    ok(zygote.run(*argv, "qtip4", cwd=tmp_path))
    refused(zygote.run(*argv, "qtip4b", cwd=tmp_path), 6, f"{tmp_path}/a", "already exists")
    refused(zygote.run(*argv, "qtip4", "--seed", "1", cwd=tmp_path), 6, "already exists")
    first = tree(tmp_path / "a")
    ok(zygote.run(*argv, "qtip4b", "--force", cwd=tmp_path))
    assert tree(tmp_path / "a") != first
    (tmp_path / "a" / "qtip4b-0.uqff").write_bytes(b"damaged")
    ok(zygote.run(*argv, "qtip4", "--force", cwd=tmp_path))
    assert tree(tmp_path / "a") == first
    for precious in ("notes.md", "folder/x.json"):
        path = tmp_path / "a" / precious
        path.parent.mkdir(exist_ok=True)
        path.write_text("precious")
        refused(zygote.run(*argv, "qtip4b", "--force", cwd=tmp_path), 6, precious.split("/")[0])
        assert path.read_text() == "precious"
        path.unlink()
    (tmp_path / "home").mkdir()
    (tmp_path / "home" / "thesis.txt").touch()
    refused(zygote.run("bake", tiny_llama, "--isq", "qtip4", "-o", "home", "--force", cwd=tmp_path), 6, "home", "no artifact")
    assert os.listdir(tmp_path / "home") == ["thesis.txt"]
    assert sorted(os.listdir(tmp_path)) == ["a", "home"]


def test_force_never_takes_the_source_itself(zygote: Zygote, tiny_llama: Path, copy_checkpoint: object, tmp_path: Path) -> None:
    model = copy_checkpoint("llama")  # type: ignore[operator]
    refused(zygote.run("bake", model, "--isq", "qtip4", "-o", model, "--force"), 6, str(model))
    assert tree(model) == tree(tiny_llama)


def test_what_the_source_has_besides_the_model_is_noted(zygote: Zygote, copy_checkpoint: object, tmp_path: Path) -> None:
    from safetensors.numpy import load_file, save_file

    model = copy_checkpoint("llama")  # type: ignore[operator]
    weights = load_file(model / "model.safetensors")
    save_file({**weights, "vision.patch": weights["model.norm.weight"]}, model / "model.safetensors")
    done = ok(zygote.run("bake", model, "--isq", "qtip4", "--calib", "none", "-o", "a", "--json", cwd=tmp_path))
    assert "note: vision.patch" in done.stderr
    json.loads(done.stdout)


@pytest.mark.parametrize("kind", ["directory", "shard", "report"])
def test_an_artifact_is_named_by_its_directory_or_a_file_of_it(zygote: Zygote, tiny_artifact: Path, kind: str) -> None:
    path = {"directory": tiny_artifact, "shard": tiny_artifact / "qtip4-0.uqff", "report": tiny_artifact / "uqff_report.json"}[kind]
    found = json.loads(ok(zygote.run("inspect", path, "--json")).stdout)
    assert len(found["layers"]) == 16
    assert json.loads(ok(zygote.run("verify", path, "--json")).stdout)["passed"]


def test_the_error_of_each_layer_is_the_same_in_progress_report_and_verification(
    zygote: Zygote, tiny_artifact: Path, tiny_llama: Path
) -> None:
    report = json.loads(ok(zygote.run("verify", tiny_artifact, "--source", tiny_llama, "--json")).stdout)
    stated = {row["key"]: row["relative_error"] for row in json.loads(ok(zygote.run("inspect", tiny_artifact, "--json")).stdout)["layers"]}
    measured = {row["key"]: (row["relative_error"], row["label"]) for row in report["errors"] if row["limit"] is not None}
    assert sorted(label for _, label in measured.values()) == ["q8_0"] * 2 + ["trellis-k4v1l12-bf16"] * 14
    for key, (error, label) in measured.items():
        assert error == pytest.approx(stated[key], rel=1e-3)
        assert 2e-5 < error < 4e-5 if label == "q8_0" else 0.0039 < error < 0.012


def test_a_prompt_comes_from_standard_input_too(zygote: Zygote, tiny_artifact: Path, tmp_path: Path) -> None:
    (tmp_path / "p").write_text("once upon")
    options = ("--temperature", "0", "--max-tokens", "6", "--raw", "--json")
    piped = json.loads(ok(zygote.run("run", tiny_artifact, "-p", "-", *options, stdin=tmp_path / "p")).stdout)
    given = json.loads(ok(zygote.run("run", tiny_artifact, "-p", "once upon", *options)).stdout)
    assert piped["token_ids"] == given["token_ids"]
    assert len(set(given["token_ids"])) > 2
    streamed = ok(zygote.run("run", tiny_artifact, "-p", "once upon", *options[:-1]))
    assert streamed.stdout == given["text"] + "\n"
    assert "6 tokens" in streamed.stderr


def test_sampling_repeats_with_its_seed(zygote: Zygote, tiny_artifact: Path) -> None:
    def ids(seed: int) -> list[int]:
        options = ("--seed", str(seed), "--temperature", "1", "--max-tokens", "8", "--json")
        found: list[int] = json.loads(ok(zygote.run("run", tiny_artifact, "-p", "hi", *options)).stdout)["token_ids"]
        return found

    assert ids(1) == ids(1)
    assert ids(1) != ids(2)


def test_help_and_version_answer_without_the_heavy_rooms() -> None:
    hook = "import sys\nsys.modules['torch'] = sys.modules['numba'] = None\nfrom arctool.cli import main\nmain()"
    for argv in (["--version"], ["--help"], [], *([name, "--help"] for name in SUBCOMMANDS)):
        done = arctool(*argv, command=(MODULE[0], "-c", hook))
        assert done.code == (0 if argv else 2), done
        assert "Traceback" not in done.stderr
        text = done.stdout + done.stderr
        assert (argv == ["--version"] and text.startswith("arctool 0.")) or "Usage: " in text
        if argv in ([], ["--help"]):
            assert all(name in text for name in SUBCOMMANDS)


@pytest.mark.parametrize("argv", [("inspect", "{}"), ("inspect", "{}", "--json"), ("run", "{}", "-p", "hi", "--max-tokens", "3")])
def test_a_reader_that_has_gone_away_is_no_error_to_shout_about(argv: tuple[str, ...], tiny_artifact: Path) -> None:
    reader, writer = os.pipe()
    os.close(reader)
    command = [*MODULE, *(item.format(tiny_artifact) for item in argv)]
    done = subprocess.run(command, stdout=writer, stderr=subprocess.PIPE, text=True, cwd="/", check=False)
    os.close(writer)
    assert done.returncode == 1
    assert done.stderr == ""
