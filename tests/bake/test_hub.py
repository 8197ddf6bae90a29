"""The hub source against a stand-in of the hub's HTTP interface on the loopback, in child processes with a cache of their own.

`huggingface_hub` reads its environment when it is imported, so every case runs as a user would run it: a fresh interpreter.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hub_stand_in import COMMIT, HubStandIn
from locations import ROOT
from safetensors.numpy import load_file

from arctool.bake.source.checkpoint import open_checkpoint

FETCH = """
import json, sys
from arctool.bake.source.hub import fetch_snapshot
from arctool.errors import ArctoolError
try:
    print(json.dumps({"folder": str(fetch_snapshot(*sys.argv[1:]))}))
except ArctoolError as error:
    print(json.dumps({"error": str(error), "kind": type(error).__name__}))
"""

OPEN = """
import json, sys
from arctool.bake.source.checkpoint import open_checkpoint
checkpoint = open_checkpoint(sys.argv[1])
total = float(checkpoint.tensor("model.norm.weight").sum())
print(json.dumps({"names": len(checkpoint.names()), "licence": checkpoint.terms.licence, "origin": checkpoint.origin, "sum": total}))
"""


class Child:
    """Runs Python with a hub environment; `endpoint` may be changed between runs."""

    def __init__(self, home: Path, endpoint: str) -> None:
        self.home = home
        self.endpoint = endpoint

    def run(self, script: str, *arguments: str, **environment: str) -> dict[str, Any]:
        kept = {key: value for key, value in os.environ.items() if not key.startswith(("HF_", "HUGGING"))}
        hub = {"HF_ENDPOINT": self.endpoint, "HF_HOME": str(self.home), "HF_HUB_ETAG_TIMEOUT": "5", "HF_HUB_DISABLE_XET": "1"}
        done = subprocess.run(
            [sys.executable, "-c", script, *arguments],
            env={**kept, **hub, "PYTHONPATH": str(ROOT), **environment},
            capture_output=True,
            text=True,
            timeout=120,
            check=False,
        )
        assert "Traceback" not in done.stderr, done.stderr
        answer: dict[str, Any] = json.loads(done.stdout)
        assert "\n" not in answer.get("error", "")
        return answer


@pytest.fixture
def hub(copy_checkpoint: Any) -> Iterator[HubStandIn]:
    """A hub with one repository: the tiny Llama, with a card, a pickle and a folder that nobody needs."""
    folder = copy_checkpoint("llama")
    (folder / "README.md").write_text("---\nlicense: mit\n---\n")
    (folder / "pytorch_model.bin").write_bytes(b"pickle")
    (folder / "onnx").mkdir()
    (folder / "onnx" / "model.safetensors").write_bytes(b"other")
    with HubStandIn(folder) as server:
        yield server


@pytest.fixture
def child(hub: HubStandIn, tmp_path: Path) -> Child:
    return Child(tmp_path / "home", hub.endpoint)


def test_a_hub_id_is_downloaded_without_what_is_not_needed(hub: HubStandIn, child: Child, tiny_llama: Path) -> None:
    folder = Path(child.run(FETCH, hub.repo)["folder"])
    names = {path.name for path in folder.iterdir()}
    assert names == {
        "README.md", "config.json", "generation_config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json",
    }  # fmt: skip
    for path in tiny_llama.iterdir():
        assert (folder / path.name).read_bytes() == path.read_bytes()


def test_a_hub_id_opens_as_a_checkpoint(hub: HubStandIn, child: Child, tiny_llama: Path) -> None:
    answer = child.run(OPEN, f"{hub.repo}@main")
    norm = load_file(tiny_llama / "model.safetensors")["model.norm.weight"]
    assert answer == {"names": 21, "licence": "mit", "origin": "tiny/llama@main", "sum": float(np.sum(norm))}


def test_the_second_time_the_cache_serves_with_the_hub_down_or_offline(hub: HubStandIn, child: Child) -> None:
    folder = child.run(FETCH, hub.repo)["folder"]
    asked = len(hub.requests)
    child.endpoint = "http://127.0.0.1:9"
    assert child.run(FETCH, hub.repo)["folder"] == folder
    assert child.run(FETCH, hub.repo, HF_HUB_OFFLINE="1")["folder"] == folder
    assert child.run(FETCH, hub.repo, COMMIT, HF_HUB_OFFLINE="1")["folder"] == folder
    assert len(hub.requests) == asked
    assert open_checkpoint(folder).config.num_layers == 2


def test_an_unchanged_file_is_not_downloaded_again(hub: HubStandIn, child: Child) -> None:
    child.run(FETCH, hub.repo)
    hub.requests.clear()
    child.run(FETCH, hub.repo)
    assert not [line for line in hub.requests if line.startswith('"GET') and "/resolve/" in line]


@pytest.mark.parametrize(
    ("repo", "revision", "message"),
    [
        ("tiny/absent", "main", "tiny/absent@main: no such repository"),
        ("tiny/llama", "v9", "tiny/llama@v9: the repository has no branch, tag or commit v9"),
        ("-bad/na..me", "main", "-bad/na..me@main: not a valid hub id"),
    ],
)
def test_what_the_hub_does_not_have_is_named(repo: str, revision: str, message: str, child: Child) -> None:
    answer = child.run(FETCH, repo, revision)
    assert answer["error"].startswith(message)
    assert answer["kind"] == "SourceError"


def test_a_gated_repository_says_how_to_get_in(hub: HubStandIn, child: Child) -> None:
    hub.gated = True
    error = child.run(FETCH, hub.repo)["error"]
    assert "gated" in error
    assert "HF_TOKEN" in error


def test_no_network_and_no_cache_says_what_to_check(hub: HubStandIn, child: Child) -> None:
    child.endpoint = "http://127.0.0.1:9"
    for environment in ({}, {"HF_HUB_OFFLINE": "1"}):
        error = child.run(FETCH, hub.repo, **environment)["error"]
        assert error.startswith("tiny/llama: the hub cannot be reached")
        assert "HF_ENDPOINT" in error


def test_a_broken_download_is_refused_and_a_later_one_succeeds(hub: HubStandIn, child: Child, tiny_llama: Path) -> None:
    hub.cut_after["model.safetensors"] = 100_000
    answer = child.run(FETCH, hub.repo)
    assert answer["kind"] == "SourceError"
    assert "run the same command again" in answer["error"]
    offline = child.run(FETCH, hub.repo, HF_HUB_OFFLINE="1")
    assert "no complete copy" in offline["error"]
    hub.cut_after.clear()
    folder = Path(child.run(FETCH, hub.repo)["folder"])
    assert (folder / "model.safetensors").read_bytes() == (tiny_llama / "model.safetensors").read_bytes()


def test_a_repository_without_safetensors_is_refused_by_its_id(hub: HubStandIn, child: Child) -> None:
    (hub.folder / "model.safetensors").unlink()
    script = (
        "import json, sys\nfrom arctool.bake.source.checkpoint import open_checkpoint\nfrom arctool.errors import SourceError\n"
        "try:\n    open_checkpoint(sys.argv[1])\nexcept SourceError as error:\n    print(json.dumps({'error': str(error)}))\n"
    )
    error = child.run(script, hub.repo)["error"]
    assert error.startswith("tiny/llama: no *.safetensors")


def test_a_cache_that_cannot_be_written_is_a_storage_error(hub: HubStandIn, child: Child, tmp_path: Path) -> None:
    child.home = tmp_path / "file"
    child.home.write_text("not a folder")
    answer = child.run(FETCH, hub.repo)
    assert answer["kind"] == "StorageError"
    assert "HF_HOME" in answer["error"]
