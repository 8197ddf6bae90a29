"""Between the last layer and the report: a sealed artifact can be read where it hides, takes one more file, and appears with its report."""

from __future__ import annotations

import json
import os
import re
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest
import uqff_samples as samples

from arctool.errors import FormatError, UsageError
from arctool.uqff.container import ArtifactWriter, BakeInfo, LayerDetails, Quality, Report, open_artifact
from arctool.uqff.verify import verify

QUALITY = Quality("a text", "aa", "bb", 1024, 2048, 2046, 12.5, 10.25, 0.125, 2.5, 0.75)
INFO = replace(samples.INFO, licence_name="a name", licence_link="https://x.y")


def written(directory: Path, quality: Quality | None = QUALITY, seal: bool = True) -> Report:
    with ArtifactWriter(directory, "m", config={"a": 1}, assets={"LICENSE": b"terms"}) as writer:
        writer.add_layer("x", samples.dense(2, 3), None, LayerDetails("bf16", "bf16", dropped_rows=7))
        writer.add_residual("norm.weight", samples.dense(3))
        if seal:
            writer.seal()
            writer.add_asset("README.md", b"# card\n")
        return writer.finish(INFO, quality)


def test_a_sealed_artifact_is_readable_where_it_hides_and_nowhere_else(tmp_path: Path) -> None:
    with ArtifactWriter(tmp_path / "a", "m", config={"a": 1}, assets={"LICENSE": b"terms"}) as writer:
        writer.add_layer("x", samples.dense(2, 3))
        writer.add_residual("norm.weight", samples.dense(3))
        assert [record.module for record in writer.records] == ["x"]
        place = writer.seal()
        assert (place.parent, (tmp_path / "a").exists()) == (tmp_path, False)
        assert sorted(os.listdir(place)) == ["LICENSE", "config.json", "m-0.uqff", "residual.safetensors"]
        with open_artifact(place) as found:
            assert found.report is None
            assert found.weight("x").dense().tolist() == samples.dense(2, 3).dense().tolist()
            assert found.residual_names() == ("norm.weight",)
        with pytest.raises(UsageError, match="not open"):
            writer.add_layer("y", samples.dense(2, 3))
        with pytest.raises(UsageError, match="not open"):
            writer.add_residual("y.weight", samples.dense(3))
    assert os.listdir(tmp_path) == []


def test_a_late_asset_is_hashed_and_known_to_every_reader(tmp_path: Path) -> None:
    report = written(tmp_path / "a")
    assert report.hashes is not None
    assert set(report.hashes.files) == {"residual.safetensors", "config.json", "LICENSE", "README.md"}
    with open_artifact(tmp_path / "a") as found:
        assert found.assets["README.md"] == b"# card\n"
    answer = verify(tmp_path / "a").container
    assert answer.passed
    assert not any("README" in note or "LICENSE" in note for note in answer.notes)
    (tmp_path / "a" / "README.md").write_bytes(b"# cord\n")
    assert re.search(r"file README\.md: SHA-256 \w+ is not the", verify(tmp_path / "a").container.failures[0])
    (tmp_path / "a" / "README.md").unlink()
    assert "README.md" in verify(tmp_path / "a").container.failures[0]


def test_without_the_late_asset_the_bytes_are_those_of_a_plain_finish(tmp_path: Path) -> None:
    with ArtifactWriter(tmp_path / "a", "m", config={"a": 1}, assets={"LICENSE": b"terms"}) as writer:
        writer.add_layer("x", samples.dense(2, 3), None, LayerDetails("bf16", "bf16", dropped_rows=7))
        writer.add_residual("norm.weight", samples.dense(3))
        writer.seal()
        writer.finish(INFO, QUALITY)
    written(tmp_path / "b", seal=False)
    for name in os.listdir(tmp_path / "b"):
        assert (tmp_path / "a" / name).read_bytes() == (tmp_path / "b" / name).read_bytes()


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("LICENSE", "is in the artifact already"),
        ("config.json", "reserved"),
        ("uqff_report.json", "reserved"),
        ("m-1.uqff", "reserved"),
        ("../README.md", "no plain name"),
        ("model.safetensors", "hiding weights"),
    ],
)
def test_a_late_asset_takes_nobodys_name(name: str, words: str, tmp_path: Path) -> None:
    with ArtifactWriter(tmp_path / "a", "m", config={}, assets={"LICENSE": b"terms"}) as writer:
        writer.seal()
        with pytest.raises(UsageError, match=words):
            writer.add_asset(name, b"")
    assert os.listdir(tmp_path) == []


def test_a_late_asset_cannot_come_before_the_layers_are_sealed(tmp_path: Path) -> None:
    with ArtifactWriter(tmp_path / "a", "m", config={}, assets={}) as writer, pytest.raises(UsageError, match="not sealed"):
        writer.add_asset("README.md", b"")


def test_the_report_gives_back_quality_dropped_rows_and_terms(tmp_path: Path) -> None:
    report = written(tmp_path / "a")
    with open_artifact(tmp_path / "a") as found:
        assert found.report is not None
        assert found.report.quality == report.quality == QUALITY
        assert found.report.bake == INFO
        assert found.report.outputs[0].layers[0].details.dropped_rows == 7
    written(tmp_path / "b", None)
    with open_artifact(tmp_path / "b") as found:
        assert found.report is not None
        assert found.report.quality is None
    assert verify(tmp_path / "a").container.passed


WRONG: dict[str, tuple[dict[str, Any], str]] = {
    "no object": ({"quality": [1]}, r"arctool: quality: expected"),
    "a name for a number": ({"quality": {**asdict(QUALITY), "kl": "small"}}, "quality: kl: expected"),
    "a negative divergence": ({"quality": {**asdict(QUALITY), "kl_p99": -1}}, "quality: kl_p99: expected a number from 0 up, found -1"),
    "nothing": ({"quality": {**asdict(QUALITY), "perplexity": None}}, "quality: perplexity: expected a number from 0 up, found nothing"),
    "more than all": ({"quality": {**asdict(QUALITY), "same_top1": 1.5}}, "quality: same_top1: expected a share of at most 1, found 1.5"),
    "no count": ({"quality": {**asdict(QUALITY), "tokens": -5}}, "quality: tokens: expected a count, found -5"),
    "no text": ({"quality": {**asdict(QUALITY), "text_sha256": 1}}, "quality: text_sha256: expected str"),
}


@pytest.mark.parametrize("name", WRONG)
def test_a_quality_that_is_none_is_refused_by_field(name: str, tmp_path: Path) -> None:
    change, words = WRONG[name]
    written(tmp_path / "a")
    path = tmp_path / "a" / "uqff_report.json"
    report = json.loads(path.read_text())
    report["arctool"].update(change)
    path.write_text(json.dumps(report))
    with pytest.raises(FormatError, match=words):
        open_artifact(tmp_path / "a")


def test_dropped_rows_that_are_no_count_are_refused(tmp_path: Path) -> None:
    written(tmp_path / "a")
    path = tmp_path / "a" / "uqff_report.json"
    report = json.loads(path.read_text())
    assert report["arctool"]["layers"]["x"]["dropped_rows"] == 7
    report["arctool"]["layers"]["x"]["dropped_rows"] = -1
    path.write_text(json.dumps(report))
    with pytest.raises(FormatError, match="dropped_rows: expected a count, found -1"):
        open_artifact(tmp_path / "a")


def test_a_plain_bake_has_no_field_of_these(tmp_path: Path) -> None:
    with ArtifactWriter(tmp_path / "a", "m", config={}, assets={}) as writer:
        writer.add_layer("x", samples.dense(2, 3))
        writer.finish(BakeInfo("bf16", 0))
    own = json.loads((tmp_path / "a" / "uqff_report.json").read_text())["arctool"]
    assert "quality" not in own
    assert own["source"] == {}
    assert "dropped_rows" not in own["layers"]["x"]
