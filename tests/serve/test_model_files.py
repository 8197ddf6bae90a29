"""What a server was loaded from may change under it: nothing that it serves is read from there any more."""

from __future__ import annotations

from pathlib import Path

import pytest
from scripted import LLAMA

from arctool.run.llm import EngineOptions
from arctool.run.sampling.params import SamplingParams
from arctool.serve.model_files import ModelFiles
from arctool.terminal.sources import open_model

GOLDEN = LLAMA.parents[1] / "golden" / "arctool-0.1.0"


@pytest.mark.parametrize("source", [LLAMA, GOLDEN], ids=["checkpoint", "artifact"])
def test_no_file_of_a_loaded_model_is_mapped(source: Path) -> None:
    llm = open_model(str(source), EngineOptions(resident=True))
    llm.generate([[5, 6, 7]], SamplingParams(max_tokens=2))
    mapped = Path("/proc/self/maps").read_text()
    assert str(source) not in mapped


def test_what_was_written_to_replaced_or_deleted_is_named(tmp_path: Path) -> None:
    for name in ("a.uqff", "b.safetensors", "config.json"):
        (tmp_path / name).write_bytes(b"1")
    files = ModelFiles(tmp_path)
    (tmp_path / "config.json").write_bytes(b"22")
    assert files.changed() is None
    (tmp_path / "b.safetensors").unlink()
    assert files.changed() == "b.safetensors"
    (tmp_path / "a.uqff").write_bytes(b"22")
    assert files.changed() == "a.uqff"
    assert ModelFiles(tmp_path / "a.uqff").changed() is None
    strangers = ModelFiles(tmp_path / "not there")
    (tmp_path / "a.uqff").write_bytes(b"333")
    assert strangers.changed() is None
