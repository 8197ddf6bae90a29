"""The types that other programs know, and `verify --fast`, from the command line."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from commands import arctool, ok, refused
from gguf import GGMLQuantizationType
from tiny_gguf import write_gguf
from zygote import Zygote

from arctool.errors import UsageError, VerificationError


def stored(artifact: Path) -> dict[str, str]:
    report = json.loads((artifact / "uqff_report.json").read_text())
    return {row["module"]: row["stored"] for row in report["outputs"][0]["layer_details"]}


def damaged(artifact: Path, name: str, at: int) -> None:
    data = bytearray((artifact / name).read_bytes())
    data[at] ^= 1
    (artifact / name).write_bytes(data)


@pytest.mark.parametrize(
    ("asked", "label"), [("q4_0", "q4_0"), ("q8_0", "q8_0"), ("fp8", "fp8"), ("f16", "f16"), ("q4_k", "q4_1"), ("q6k", "q8_0")]
)
def test_a_type_bakes_verifies_and_runs(asked: str, label: str, zygote: Zygote, tiny_llama: Path, tmp_path: Path) -> None:
    ok(zygote.run("bake", tiny_llama, "--isq", asked, "-o", "a", cwd=tmp_path))
    found = stored(tmp_path / "a")
    assert {found[key] for key in found if ".layers." in key} == {label}
    told = json.loads(ok(zygote.run("verify", "a", "--source", tiny_llama, "--json", cwd=tmp_path)).stdout)
    assert told["passed"]
    notes = " ".join(told["container"]["notes"])
    canonical = "q4k" if asked == "q4_k" else asked
    assert (f"says {canonical}: 14 of 14 layers are stored otherwise (14 {label})" in notes) == (canonical != label)
    answer = json.loads(ok(zygote.run("run", "a", "-p", "Hi", "--temperature", "0", "--max-tokens", "3", "--json", cwd=tmp_path)).stdout)
    assert answer["completion_tokens"] == 3


def test_a_gguf_becomes_an_artifact_and_loses_nothing(zygote: Zygote, tiny_llama: Path, tmp_path: Path) -> None:
    gguf = write_gguf(tiny_llama, tmp_path / "tiny.gguf", "llama", tensor_type=GGMLQuantizationType.Q5_1)
    ok(zygote.run("bake", gguf, "--isq", "as-is", cwd=tmp_path))
    assert set(stored(tmp_path / "tiny-as-is").values()) == {"q5_1"}
    told = json.loads(ok(zygote.run("verify", "tiny-as-is", "--source", gguf, "--json", cwd=tmp_path)).stdout)
    assert {row["relative_error"] for row in told["errors"]} == {0.0}
    both = [
        json.loads(
            ok(zygote.run("run", name, "--raw", "-p", "Hi", "--temperature", "0", "--max-tokens", "8", "--json", cwd=tmp_path)).stdout
        )
        for name in ("tiny-as-is", gguf)
    ]
    assert both[0]["text"] == both[1]["text"]


def test_fast_needs_neither_torch_nor_a_compiler(tiny_artifact: Path, tmp_path: Path) -> None:
    for name in ("torch", "numba"):
        (tmp_path / f"{name}.py").write_text("raise ImportError('not wanted')\n")
    done = ok(arctool("verify", tiny_artifact, "--fast", PYTHONPATH=str(tmp_path)))
    assert "headers are sound; no data was read" in done.stdout
    assert "not wanted" in arctool("verify", tiny_artifact, PYTHONPATH=str(tmp_path)).stderr


def test_fast_reads_headers_and_leaves_the_data_to_the_other(zygote: Zygote, artifact: Path) -> None:
    told = json.loads(ok(zygote.run("verify", artifact, "--fast", "--json")).stdout)
    assert (told["passed"], told["fast"]) == (True, True)
    assert [told[name]["asked"] for name in ("container", "implementations", "tables", "source")] == [True, False, False, False]
    size = (artifact / "qtip4-0.uqff").stat().st_size
    damaged(artifact, "qtip4-0.uqff", size // 2)
    ok(zygote.run("verify", artifact, "--fast"))
    assert zygote.run("verify", artifact).code == VerificationError.exit_code


@pytest.mark.parametrize("name", ["config.json", "tokenizer.json", "uqff_report.json", "qtip4-0.uqff"])
def test_fast_sees_what_was_done_to_headers_and_texts(name: str, zygote: Zygote, artifact: Path) -> None:
    at = (artifact / name).read_bytes().index(b"arctool" if name in ("uqff_report.json", "qtip4-0.uqff") else b"e") + 1
    damaged(artifact, name, at)
    done = zygote.run("verify", artifact, "--fast")
    assert done.code == VerificationError.exit_code
    assert "NOT VERIFIED" in done.stdout
    assert name in done.stdout


def test_fast_sees_a_short_file(zygote: Zygote, artifact: Path) -> None:
    shard = artifact / "qtip4-0.uqff"
    shard.write_bytes(shard.read_bytes()[:-1])
    done = zygote.run("verify", artifact, "--fast")
    assert (done.code, "is truncated" in done.stdout) == (VerificationError.exit_code, True)


def test_fast_with_a_source_is_a_contradiction(zygote: Zygote, tiny_artifact: Path, tiny_llama: Path) -> None:
    refused(zygote.run("verify", tiny_artifact, "--fast", "--source", tiny_llama), UsageError.exit_code, "--fast", "--source")


def test_a_link_in_an_artifact_is_refused_with_what_to_do(zygote: Zygote, artifact: Path, tmp_path: Path) -> None:
    """As a hub's cache would have it."""
    (artifact / "qtip4-0.uqff").rename(tmp_path / "blob")
    (artifact / "qtip4-0.uqff").symlink_to(tmp_path / "blob")
    done = zygote.run("verify", artifact)
    assert done.code == VerificationError.exit_code
    assert "qtip4-0.uqff" in done.stdout
    assert "hf download" in done.stdout
