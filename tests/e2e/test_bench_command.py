"""`arctool bench PATH`: a table or JSON of real tokens, and refusals by option."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from commands import ok, refused
from zygote import Zygote

SMALL = ("--batches", "1,3", "--prompt-tokens", "12", "--new-tokens", "4", "--rounds", "1")


def test_a_model_is_measured_by_naming_it(zygote: Zygote, tiny_artifact: Path) -> None:
    found = json.loads(ok(zygote.run("bench", tiny_artifact, *SMALL, "--json", "-q")).stdout)
    assert [row["batch"] for row in found["rows"]] == [1, 3]
    assert all(row["decode"] > 0 and row["prefill"] > 0 and row["failure"] is None for row in found["rows"])
    assert found["failed"] is False
    assert found["engaged"]["cpu.linear.trellis-table"] == 14 * found["engaged"]["cpu.attention"] / 2
    shown = ok(zygote.run("bench", *SMALL, tiny_artifact))
    assert "at once" in shown.stdout
    assert "cpu.attention" in shown.stdout
    assert "medians of 1 interleaved rounds" in shown.stdout


@pytest.mark.parametrize(
    ("options", "culprit"),
    [
        (("--batches", "1,two"), "--batches"),
        (("--batches", "0"), "--batches"),
        (("--prompt-tokens", "0"), "--prompt-tokens"),
        (("--new-tokens", "1"), "--new-tokens"),
        (("--prompt-tokens", "256"), "max_model_len"),
        (("--kv-memory", "lots"), "kv_memory"),
    ],
)
def test_what_cannot_be_measured_is_refused_by_option(zygote: Zygote, tiny_artifact: Path, options: tuple[str, ...], culprit: str) -> None:
    assert culprit in refused(zygote.run("bench", tiny_artifact, *SMALL, *options), 2)


def test_a_path_that_is_no_model_is_refused_by_name(zygote: Zygote, tmp_path: Path) -> None:
    assert "nothing-here" in refused(zygote.run("bench", "nothing-here", cwd=tmp_path), 3)


def test_the_other_measurement_keeps_its_name(zygote: Zygote) -> None:
    assert "--curve" in ok(zygote.run("bench", "bake", "--help")).stdout
    assert "bench PATH" in ok(zygote.run("bench", "--help")).stdout
