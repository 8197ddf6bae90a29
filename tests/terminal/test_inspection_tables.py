"""The tables of one tensor and of a difference show what a file says and do nothing of it, and say how much differs in the last line."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from test_hostile_text import HOSTILE, shown

from arctool.quant.tensor import DenseTensor
from arctool.terminal.inspection import difference, summary, tensor
from arctool.uqff.contrast import FileDifference
from arctool.uqff.detail import EntryRow, TensorDetail, TrellisFacts
from arctool.uqff.difference import Difference, Side, Stored, TensorDifference
from arctool.uqff.inspect import Totals
from arctool.uqff.json_changes import Change
from arctool.uqff.report import LayerDetails
from arctool.uqff.statistics import measure

TOTALS = Totals(12, 6, 0, None, 16.0, 0)


def detail(text: str) -> TensorDetail:
    return TensorDetail(
        path=text,
        artifact=text,
        key=text,
        kind="layer",
        label=text,
        shape=(2, 3),
        parameters=6,
        bits_per_weight=2.0,
        nbytes=12,
        entries=(EntryRow(text, text, (2, 3), 12, text),),
        trellis=TrellisFacts("K4V2L16", text, None, 2.0, None, None, None),
        rung=text,
        report=LayerDetails(text, f"{text}.", text, 0.5, None, 0, text),
        statistics=measure(DenseTensor(np.array([[1, 2, np.nan]], np.float32))),
    )


def contrast(text: str) -> Difference:
    row = TensorDifference(text, "storage", Stored((2, 3), text, 2.0, 3), Stored((2, 3), text, 3.0, 4), (), "differs", 0.25)
    return Difference(
        a=Side(text, text, TOTALS),
        b=Side(text, text, TOTALS),
        facts=(Change(text, text, text),),
        config=(Change(text, text, None),),
        tensors=(row,),
        tables=(FileDifference(text, "only in A"),),
        files=(FileDifference(text, "differs"),),
        notes=(text,),
        tensors_compared=7,
        relative_error=0.25,
    )


@pytest.mark.parametrize("name", HOSTILE)
def test_hostile_text_is_shown_as_it_is(name: str) -> None:
    text, seen = HOSTILE[name]
    found = shown(tensor(detail(text)))
    # path, key, label; codebook; both targets, reason, note; an entry's name, dtype, file
    assert found.count(seen) == 3 + 1 + 4 + 3
    assert "\x1b" not in found
    found = shown(difference(contrast(text), layers=True))
    # both paths; a fact with both values; a place of the config with one; a tensor with both labels; table, file, note
    assert found.count(seen) == 2 + 3 + 2 + 3 + 1 + 1 + 1
    assert "\x1b" not in found


def test_values_that_are_not_finite_are_named() -> None:
    found = shown(tensor(detail("a")))
    assert "1 NaN, 0 infinite, left out below; the first: nan at [0, 2]" in found
    assert "1 to 2, largest size 2" in found


def test_the_last_line_says_it_all() -> None:
    found = contrast("a")
    counts = "different: 1 of 7 tensors, 1 fact, 1 place of config.json, 1 table, 1 file"
    assert shown(difference(found, layers=False)).splitlines()[-1].startswith(counts)
    assert "storage, bias" in shown(difference(found, layers=True))
    assert "storage" not in shown(difference(found, layers=False))
    same = replace(found, facts=(), config=(), tensors=(), tables=(), files=(), notes=())
    assert summary(same) == "no difference in 7 tensors, config and files"
    assert summary(replace(same, facts=found.facts * 2)).startswith("different: 2 facts;")
