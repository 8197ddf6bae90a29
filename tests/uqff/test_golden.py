"""The golden artifacts of every version so far: they load, verify, run, and decode to the bits that were pinned when they were made."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from locations import FIXTURES

from arctool import LLM, SamplingParams
from arctool.artifacts import verify
from arctool.quant.codebooks import RUNGS, shipped_table
from arctool.quant.ggml import GGML_TYPES
from arctool.quant.tensor import TrellisTensor
from arctool.uqff.container import open_artifact
from arctool.uqff.families import encode

GOLDEN = FIXTURES / "golden"
PINNED: dict[str, dict[str, list[Any]]] = json.loads((GOLDEN / "digests.json").read_text())

BLOB_OF_THE_DEFAULT = "02" + "04" + "07" + "06"
"""Sections of a K4V2L16 layer with sum2 of 64 outputs and 256 inputs: the codebook, then the rotation; no geometry, ever."""

TOKENS = {
    "arctool-0.1.0": [320, 31, 190, 26, 304, 89, 359, 167],
    "mistralrs-afq3": [132, 441, 126, 254, 444, 4, 246, 444],
    "mistralrs-mxfp4": [214, 346, 221, 66, 238, 465, 18, 440],
}
"""Eight greedy tokens after "abc def"."""


def sha256(values: np.ndarray | None) -> str | None:
    return None if values is None else hashlib.sha256(values.astype("<f4").tobytes()).hexdigest()


def test_every_golden_artifact_is_pinned() -> None:
    assert {path.name for path in GOLDEN.iterdir() if path.is_dir()} == set(PINNED) == set(TOKENS)


@pytest.mark.parametrize("name", list(PINNED))
def test_it_verifies_with_every_decoder_of_this_machine(name: str) -> None:
    report = verify(GOLDEN / name)
    assert report.passed, report
    assert report.container.counts["layers"] == len(PINNED[name])
    assert report.implementations.counts["tensors compared"] == sum(row[0] not in ("f32", "bf16") for row in PINNED[name].values())


@pytest.mark.parametrize("name", list(PINNED))
def test_its_weights_are_the_pinned_bits(name: str) -> None:
    with open_artifact(GOLDEN / name) as artifact:
        assert list(artifact.keys()) == list(PINNED[name])
        for key, (label, shape, weight, bias) in PINNED[name].items():
            found = artifact.weight(key)
            assert (found.label, list(found.shape)) == (label, shape), key
            assert (sha256(found.dense()), sha256(artifact.bias(key))) == (weight, bias), key


@pytest.mark.parametrize("name", list(PINNED))
def test_it_says_what_it_always_said(name: str) -> None:
    llm = LLM(GOLDEN / name)
    found = llm.generate(["abc def"], SamplingParams(temperature=0, max_tokens=8))[0].token_ids
    assert list(found) == TOKENS[name]


def test_together_they_hold_every_way_of_storing_that_we_read() -> None:
    labels = {row[0] for layers in PINNED.values() for row in layers.values()}
    assert set(GGML_TYPES) <= labels
    assert {"f32", "bf16", "fp8", "afq3", "mxfp4"} <= labels
    kinds = {rung: "sum2" if rung.codebook_name == "sum2" else rung.codebook().dtype for rung in RUNGS.values()}
    assert {TrellisTensor.label_of(rung.geometry, kind) for rung, kind in kinds.items()} <= labels
    assert any(row[3] is not None for row in PINNED["arctool-0.1.0"].values())


def test_what_is_read_is_written_as_it_was() -> None:
    """The entries of a layer never change by a byte, the default geometry's above all."""
    with open_artifact(GOLDEN / "arctool-0.1.0") as artifact:
        for key in tuple(artifact.keys()):
            again = {entry.name: entry for entry in encode(key, artifact.weight(key), artifact.bias(key))}
            stored = artifact.entries(key)
            assert set(again) == set(stored)
            for name, entry in stored.items():
                found = again[name]
                assert (found.dtype, found.shape, found.raw.tobytes()) == (entry.dtype, entry.shape, entry.raw.tobytes()), name


def test_the_default_geometry_is_never_written_out() -> None:
    with open_artifact(GOLDEN / "arctool-0.1.0") as artifact:
        key = "model.layers.2.mlp.gate_proj"
        assert artifact.form(key).label == "trellis-k4v2l16-sum2"
        assert artifact.entries(key)[f"{key}.weight.sections"].raw.tobytes().hex() == BLOB_OF_THE_DEFAULT
        key = "model.layers.2.self_attn.o_proj"
        assert artifact.form(key).label == "trellis-k4v2l16-f32"
        table = bytes.fromhex(shipped_table("K4V2L16").digest)
        assert artifact.entries(key)[f"{key}.weight.sections"].raw.tobytes() == b"\1\0\2\x10" + table + b"\4\7\7"


def test_the_pins_see_a_changed_bit_that_a_foreign_report_cannot(tmp_path: Path) -> None:
    name = "mistralrs-afq3"
    for file in (GOLDEN / name).iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    shard = tmp_path / "afq3-0.uqff"
    data = bytearray(shard.read_bytes())
    data[len(data) // 2] ^= 1
    shard.write_bytes(data)
    with open_artifact(tmp_path) as artifact:
        changed = [key for key, row in PINNED[name].items() if sha256(artifact.weight(key).dense()) != row[2]]
    assert len(changed) == 1
