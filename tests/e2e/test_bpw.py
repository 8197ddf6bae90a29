"""`arctool bake --bpw`: from a checkpoint to an artifact within a budget, shown, resumable, refused by name where it cannot be."""

from __future__ import annotations

import json
import os
import shutil
import signal
from pathlib import Path

import pytest
from commands import ok, refused, tree
from zygote import Zygote

from arctool.bake.source.checkpoint import open_checkpoint
from arctool.errors import InterruptedByUser, UsageError
from arctool.run.models.spec import Role
from arctool.uqff.container import open_artifact

SHORT = """
import arctool.bake.budget.held_out as held_out
held_out.MEASURED_TOKENS, held_out.CHECKED_TOKENS = 32, 512
"""
"""A hook that leaves little to read, for tests that bake many times."""

AFTER = """
import os, signal
from arctool.bake.journal import Journal
calls = 0
def counted(real):
    def call(self, *arguments):
        global calls
        real(self, *arguments)
        calls += 1
        if calls == {at}:
            {action}
    return call
Journal.store, Journal.store_array = counted(Journal.store), counted(Journal.store_array)
"""
"""Acts once so many layers and arrays are in journals."""

ARGV = ("--calib-tokens", "256", "-q", "-o", "a", "--bpw", "3.3")
LINEAR = 2 * (64 * 64 * 2 + 64 * 32 * 2 + 64 * 96 * 3)


def rate(model: Path, artifact: Path) -> float:
    """Stored bits a weight of the linear layers."""
    with open_checkpoint(str(model)) as checkpoint, open_artifact(artifact) as opened:
        return sum(opened.weight(spec.key).stored_bits for spec in checkpoint.specs if spec.role is Role.LINEAR) / LINEAR


def test_a_budget_is_kept_shown_verified_and_the_model_runs(zygote: Zygote, tiny_llama: Path, tmp_path: Path) -> None:
    done = ok(zygote.run("bake", tiny_llama, "--bpw", "3.3", "--calib-tokens", "1024", cwd=tmp_path))
    assert os.listdir(tmp_path) == ["llama-3.3bpw"]
    assert 3.2 < rate(tiny_llama, tmp_path / "llama-3.3bpw") <= 3.3
    lines = done.stdout.splitlines()
    assert lines[0].startswith(f"{tmp_path}/llama-3.3bpw: ")
    assert lines[1].startswith("budget: 3.3 bits a weight asked, 3.2")
    assert "mean KL" in lines[1]
    assert "uniform qtip2.25-v4" in lines[1]
    shown = {line.split()[0] for line in lines[3:]}
    assert {"qtip4", "qtip3"} <= shown <= {"bf16", "q8_0", "qtip4", "qtip3", "qtip2.25-v4", "qtip2-v4"}
    report = json.loads((tmp_path / "llama-3.3bpw" / "uqff_report.json").read_text())["arctool"]
    names = {key: group["rung"] for group in report["budget"]["groups"] for key in group["layers"]}
    default = report["recipe"]["default"]
    assert {rule["match"]: rule["rung"] for rule in report["recipe"]["rules"]} == {k: n for k, n in names.items() if n != default}
    assert len(names) == 14
    ok(zygote.run("verify", "llama-3.3bpw", "--source", tiny_llama, cwd=tmp_path))
    answer = ok(zygote.run("run", "llama-3.3bpw", "-p", "Hi", "--temperature", "0", "--max-tokens", "3", "--json", cwd=tmp_path))
    assert json.loads(answer.stdout)["completion_tokens"] == 3


def test_json_has_the_account_and_the_same_command_again_finds_the_artifact(zygote: Zygote, tiny_llama: Path, tmp_path: Path) -> None:
    first = json.loads(ok(zygote.run("bake", tiny_llama, *ARGV, "--json", cwd=tmp_path, hook=SHORT)).stdout)
    budget = first["budget"]
    assert (budget["asked"], budget["chosen"], budget["rung"]) == (3.3, "mixed", "qtip2.25-v4")
    assert budget["reached"] == rate(tiny_llama, tmp_path / "a")
    assert budget["mixed"]["kl"] < budget["uniform"]["kl"]
    before = tree(tmp_path)
    again = json.loads(ok(zygote.run("bake", tiny_llama, *ARGV, "--json", cwd=tmp_path, hook=SHORT)).stdout)
    assert (again["resumed"], again["budget"]) == (21, budget)
    refused(zygote.run("bake", tiny_llama, *ARGV[:-1], "3.4", cwd=tmp_path, hook=SHORT), 6, "already exists")
    assert tree(tmp_path) == before
    plain = json.loads(
        ok(zygote.run("bake", tiny_llama, "--isq", "qtip4", "--calib", "none", "-q", "-o", "b", "--json", cwd=tmp_path)).stdout
    )
    assert plain["budget"] is None


def test_killed_after_any_step_the_same_command_ends_with_the_same_bytes(zygote: Zygote, one_layer: Path, memory_path: Path) -> None:
    place = memory_path / "place"
    place.mkdir()
    count = "handle = os.open({!r}, os.O_WRONLY | os.O_CREAT); os.pwrite(handle, b'%d' % calls, 0); os.close(handle)"
    told = AFTER.format(at="calls", action=count.format(str(memory_path / "count")))
    ok(zygote.run("bake", one_layer, *ARGV, cwd=place, hook=SHORT + told))
    whole, calls = tree(place / "a"), int((memory_path / "count").read_text())
    assert calls >= 2 * 7 + 3
    kept = []
    for at in (*range(1, calls, 2), calls):
        shutil.rmtree(place)
        place.mkdir()
        kill = AFTER.format(at=at, action="os.kill(os.getpid(), signal.SIGKILL)")
        assert zygote.run("bake", one_layer, *ARGV, cwd=place, hook=SHORT + kill).code == -signal.SIGKILL
        assert not (place / "a").exists()
        again = ok(zygote.run("bake", one_layer, *ARGV, "--json", cwd=place, hook=SHORT))
        kept.append(json.loads(again.stdout)["resumed"])
        assert tree(place / "a") == whole, at
        assert os.listdir(place) == ["a"]
    assert {0, 7} < set(kept)
    assert len(set(kept)) >= 4, kept


def test_control_c_says_where_the_layers_are(zygote: Zygote, one_layer: Path, tmp_path: Path) -> None:
    hook = SHORT + AFTER.format(at=9, action="os.kill(os.getpid(), signal.SIGINT)")
    line = refused(zygote.run("bake", one_layer, *ARGV, cwd=tmp_path, hook=hook), InterruptedByUser.exit_code, "7 of 7 layers are kept in")
    assert str(tmp_path / ".a.arctool-uniform.arctool-journal") in line


def test_another_bake_to_the_same_output_takes_what_an_interrupted_budget_left(zygote: Zygote, one_layer: Path, tmp_path: Path) -> None:
    hook = SHORT + AFTER.format(at=9, action="os.kill(os.getpid(), signal.SIGINT)")
    refused(zygote.run("bake", one_layer, *ARGV, cwd=tmp_path, hook=hook), InterruptedByUser.exit_code, "7 of 7 layers are kept in")
    assert ".a.arctool-uniform.arctool-journal" in os.listdir(tmp_path)
    ok(zygote.run("bake", one_layer, "--isq", "qtip4", "--calib", "none", "-q", "-o", "a", cwd=tmp_path))
    assert os.listdir(tmp_path) == ["a"]


@pytest.mark.parametrize(
    ("argv", "named"),
    [
        ((), ("--isq RUNG", "--bpw X", "a recipe with a default", "found none")),
        (("--isq", "qtip4", "--bpw", "3"), ("exactly one", "found --isq and --bpw")),
        (("--bpw", "3", "--recipe", "default.yml"), ("exactly one", "found --bpw and default in the recipe")),
        (("--isq", "qtip4", "--recipe", "default.yml"), ("exactly one", "found --isq and default in the recipe")),
        (("--recipe", "rule.yml"), ("found none",)),
        (("--bpw", "nan"), ("--bpw", "a positive number", "found nan")),
        (("--bpw", "0"), ("--bpw", "a positive number", "found 0")),
        (("--bpw=-2.5",), ("--bpw", "a positive number", "found -2.5")),
        (("--bpw", "2"), ("--bpw", "2.497", "qtip2-v4", "16.000", "bf16", "found 2")),
        (("--bpw", "20"), ("--bpw", "16.000", "found 20")),
        (("--bpw", "4", "--recipe", "all.yml"), ("--bpw", "nothing is left to allocate")),
    ],
)
def test_what_cannot_be_is_refused_in_one_line(
    zygote: Zygote, tiny_llama: Path, tmp_path: Path, argv: tuple[str, ...], named: tuple[str, ...]
) -> None:
    (tmp_path / "default.yml").write_text("default: {isq: qtip3}")
    (tmp_path / "rule.yml").write_text("0: {isq: qtip3}")
    (tmp_path / "all.yml").write_text("0-2: {isq: qtip3}")
    refused(zygote.run("bake", tiny_llama, "-o", "a", *argv, cwd=tmp_path), UsageError.exit_code, *named)
    assert sorted(os.listdir(tmp_path)) == ["all.yml", "default.yml", "rule.yml"]


def test_a_bad_budget_is_refused_before_the_model_is_looked_for(zygote: Zygote, tmp_path: Path) -> None:
    refused(zygote.run("bake", "no/such/model", "--bpw", "nan", cwd=tmp_path), UsageError.exit_code, "--bpw", "found nan")


def test_a_recipe_with_a_default_needs_nothing_else_and_one_without_pins_layers(zygote: Zygote, tiny_llama: Path, tmp_path: Path) -> None:
    (tmp_path / "mine.yml").write_text("default: {isq: qtip3}\n1: {isq: q8_0}")
    ok(zygote.run("bake", tiny_llama, "--recipe", "mine.yml", "--calib", "none", cwd=tmp_path))
    (tmp_path / "pins.yml").write_text("rules: [{match: '*.k_proj', isq: q8_0}]")
    done = ok(zygote.run("bake", tiny_llama, *ARGV[:-1], "4", "--recipe", "pins.yml", "--json", cwd=tmp_path, hook=SHORT))
    assert sorted(os.listdir(tmp_path)) == ["a", "llama-mine", "mine.yml", "pins.yml"]
    with open_artifact(tmp_path / "llama-mine") as artifact:
        assert artifact.weight("model.layers.0.self_attn.v_proj").label == "trellis-k3v1l12-bf16"
        assert artifact.weight("model.layers.1.self_attn.v_proj").label == "q8_0"
    with open_artifact(tmp_path / "a") as artifact:
        assert {artifact.weight(f"model.layers.{layer}.self_attn.k_proj").label for layer in (0, 1)} == {"q8_0"}
    assert 3.8 < rate(tiny_llama, tmp_path / "a") <= 4
    assert len(json.loads(done.stdout)["budget"]["groups"]) == 12
