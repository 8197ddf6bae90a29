"""`arctool inspect --tensor`, `--plot` and `arctool diff` as a user runs them: numbers, pictures, exit codes, and bad input refused."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path

import numpy as np
import pytest
from commands import arctool, ok, refused, tree
from zygote import Zygote

from arctool.uqff.container import open_artifact

KEY = "model.layers.1.mlp.down_proj"


@pytest.fixture(scope="module")
def mixed_artifact(zygote: Zygote, tiny_llama: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The tiny Llama at qtip4 but for one layer, which is qtip2-v4 (read only)."""
    folder = tmp_path_factory.mktemp("mixed")
    (folder / "r.yml").write_text(f'rules:\n  - {{match: "{KEY}", isq: qtip2-v4}}\n')
    ok(zygote.run("bake", tiny_llama, "--isq", "qtip4", "--recipe", folder / "r.yml", "--calib", "none", "-o", folder / "mixed"))
    return folder / "mixed"


def test_a_fresh_process_shows_one_tensor_and_draws_it(tiny_artifact: Path, tmp_path: Path) -> None:
    before = tree(tiny_artifact)
    done = ok(arctool("inspect", tiny_artifact, "--tensor", KEY, "--plot", "w.png", cwd=tmp_path))
    with open_artifact(tiny_artifact) as artifact:
        dense = artifact.weight(KEY).dense()
    assert f"{dense.min():.6g} to {dense.max():.6g}" in done.stdout
    assert f"{KEY}.weight.signs_out" in done.stdout
    assert "blocks of 32 inputs and 64 outputs" in done.stdout
    assert done.stderr == ""
    assert (tmp_path / "w.png").read_bytes().startswith(b"\x89PNG")
    assert os.listdir(tmp_path) == ["w.png"]
    assert tree(tiny_artifact) == before


def test_json_of_a_tensor_holds_the_numbers_of_its_dense_weights(zygote: Zygote, tiny_artifact: Path, tmp_path: Path) -> None:
    for key in (KEY, "lm_head.weight", "model.norm"):
        value = json.loads(ok(zygote.run("inspect", tiny_artifact, "--tensor", key, "--json", "--plot", "w.svg", cwd=tmp_path)).stdout)
        with open_artifact(tiny_artifact) as artifact:
            dense = artifact.weight(key.removesuffix(".weight")).dense().astype(np.float64)
        found = value["statistics"]
        assert found["count"] == dense.size == sum(found["histogram"]["counts"])
        assert found["std"] == pytest.approx(dense.std())
        assert found["percentiles"]["95"] == pytest.approx(np.percentile(dense, 95))
        assert (tmp_path / "w.svg").read_text().startswith("<?xml")


def test_an_inspection_draws_its_layers_and_tells_targets(zygote: Zygote, mixed_artifact: Path, tmp_path: Path) -> None:
    value = json.loads(ok(zygote.run("inspect", mixed_artifact, "--json", "--plot", "l.pdf", cwd=tmp_path)).stdout)
    targets = {row["key"]: row["target"] for row in value["layers"]}
    assert targets[KEY] == "qtip2-v4"
    assert targets["model.layers.0.mlp.down_proj"] == "qtip4"
    assert targets["lm_head"] == "q8_0"
    assert all(row["proxy_error"] is None for row in value["layers"])
    assert (tmp_path / "l.pdf").read_bytes().startswith(b"%PDF")
    assert "asked for" in ok(zygote.run("inspect", mixed_artifact)).stdout


def test_equal_artifacts_leave_0_and_different_ones_1(zygote: Zygote, tiny_artifact: Path, mixed_artifact: Path, tmp_path: Path) -> None:
    shutil.copytree(tiny_artifact, tmp_path / "copy")
    same = ok(zygote.run("diff", tiny_artifact, tmp_path / "copy"))
    assert "no difference in " in same.stdout
    assert json.loads(ok(zygote.run("diff", tiny_artifact, "copy", "--json", cwd=tmp_path)).stdout)["same"] is True
    done = zygote.run("diff", tiny_artifact, mixed_artifact)
    assert (done.code, done.stderr) == (1, "")
    assert KEY in done.stdout
    assert "different: 1 of " in done.stdout.splitlines()[-1]
    short = zygote.run("diff", tiny_artifact, mixed_artifact, "--no-layers")
    assert short.code == 1
    assert KEY not in short.stdout
    value = json.loads(zygote.run("diff", tiny_artifact, mixed_artifact, "--json").stdout)
    (row,) = value["tensors"]
    with open_artifact(tiny_artifact) as a, open_artifact(mixed_artifact) as b:
        left, right = (side.weight(KEY).dense().astype(np.float64) for side in (a, b))
    assert (row["name"], row["what"], value["same"]) == (KEY, "storage", False)
    assert row["relative_error"] == pytest.approx(np.square(left - right).sum() / np.square(left).sum())
    assert {item["name"] for item in value["files"]} == {"README.md", "uqff_report.json"}


def test_bad_input_is_one_line_and_draws_nothing(zygote: Zygote, tiny_artifact: Path, tmp_path: Path) -> None:
    refused(zygote.run("inspect", tiny_artifact, "--tensor", "1.mlp.down_proj", "--plot", "w.png", cwd=tmp_path), 2, "did you mean", KEY)
    refused(zygote.run("inspect", tiny_artifact, "--tensor", "a\x1b[2J\nb", cwd=tmp_path), 2, "no tensor")
    refused(zygote.run("inspect", tiny_artifact, "--plot", "w.gif", cwd=tmp_path), 2, "--plot: w.gif", ".png, .svg, .pdf")
    refused(zygote.run("inspect", tiny_artifact, "--plot", "gone/w.png", cwd=tmp_path), 6, "gone/w.png")
    refused(zygote.run("diff", tiny_artifact, "gone", cwd=tmp_path), 6, "gone", "no such file")
    damaged = Path(shutil.copytree(tiny_artifact, tmp_path / "damaged"))
    (shard,) = damaged.glob("*.uqff")
    shard.write_bytes(shard.read_bytes()[:-5])
    refused(zygote.run("diff", tiny_artifact, damaged), 4, "truncated")
    refused(zygote.run("inspect", damaged, "--tensor", KEY, "--plot", "w.png", cwd=tmp_path), 4, "truncated")
    assert os.listdir(tmp_path) == ["damaged"]


def test_infinities_in_a_tensor_are_named_and_crash_nothing(zygote: Zygote, tiny_artifact: Path, tmp_path: Path) -> None:
    damaged = Path(shutil.copytree(tiny_artifact, tmp_path / "damaged"))
    with open_artifact(damaged) as artifact:
        info = artifact.residual_shard.header.tensors["model.norm.weight"]
        at = artifact.residual_shard.header.data_start + info.begin
        width = (info.end - info.begin) // 64
    data = bytearray((damaged / "residual.safetensors").read_bytes())
    data[at : at + width] = b"\0\0\xc0\x7f"[-width:]
    (damaged / "residual.safetensors").write_bytes(data)
    done = ok(zygote.run("inspect", damaged, "--tensor", "model.norm", "--plot", "w.png", cwd=tmp_path))
    assert "1 NaN, 0 infinite" in done.stdout
    assert "nan at [0]" in done.stdout
    assert done.stderr == ""
    found = zygote.run("diff", tiny_artifact, damaged, "--json")
    assert found.code == 1
    (row,) = json.loads(found.stdout)["tensors"]
    assert (row["name"], row["relative_error"]) == ("model.norm.weight", None)


def test_help_of_diff_teaches_its_exit_codes(zygote: Zygote) -> None:
    text = ok(zygote.run("diff", "--help")).stdout
    assert "Exit code 0 if nothing differs" in text
    assert "Example: arctool diff" in text
    assert "diff" in ok(zygote.run("--help")).stdout
