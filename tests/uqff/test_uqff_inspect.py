"""`inspect`: the numbers of a small artifact, worked out by hand."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import uqff_samples as samples

from arctool.errors import FormatError
from arctool.uqff.inspect import inspect


def test_the_numbers_of_a_small_artifact(tmp_path: Path) -> None:
    samples.write(tmp_path / "a", ("model.embed_tokens", "model.layers.0.q", "model.layers.0.k"))
    found = inspect(tmp_path / "a")
    rows = {row.key: row for row in found.layers}
    q = rows["model.layers.0.q"]
    assert (q.shape, q.label, q.has_bias, q.relative_error) == ((5, 12), "trellis-k4v2l16-sum2", True, 0.0625)
    assert q.bits_per_weight == (20 + 20 + 3) * 8 / 60
    assert q.nbytes == 20 + 1 + 8 + 20 + 4 + 2 + 1 + 20
    assert rows["model.embed_tokens"].bits_per_weight == 16
    assert [row.key for row in found.residual] == ["model.norm.weight", "model.layers.0.norm.weight"]
    totals = found.totals
    assert totals.parameters == 15 + 60 + 60 + 12 + 7
    assert totals.quantised_parameters == 120
    assert totals.quantised_bits_per_weight == pytest.approx((20 + 20 + 3) * 8 / 60)
    assert totals.bits_per_weight == pytest.approx((15 * 16 + 2 * 43 * 8 + 12 * 32 + 7 * 16) / 154)
    assert totals.table_bytes == 4096 * 4 * 2
    assert totals.nbytes == sum(item.stat().st_size for item in (tmp_path / "a").iterdir())
    assert (found.producer, found.producer_version, found.rung, found.seed) == ("arctool", "0.1.0", "qtip2b", 7)
    assert (found.source, found.licence, found.uqff_version) == ("tiny/test", "mit", "1.2.0")
    assert json.loads(json.dumps(found.to_json()))["totals"]["parameters"] == 154


def test_without_a_report_only_its_facts_are_missing(tmp_path: Path) -> None:
    samples.write(tmp_path / "a")
    (tmp_path / "a" / "uqff_report.json").unlink()
    found = inspect(tmp_path / "a")
    assert len(found.layers) == 7
    assert (found.rung, found.source, found.layers[1].relative_error) == (None, None, None)


def test_a_damaged_artifact_is_refused(tmp_path: Path) -> None:
    samples.write(tmp_path / "a")
    (tmp_path / "a" / "residual.safetensors").write_bytes(b"PK\x03\x04" + b"\0" * 9)
    with pytest.raises(FormatError, match="zip"):
        inspect(tmp_path / "a")
