"""Codebooks: sum2 by plain integers, shipped tables by their hashes, every mismatch of table and geometry refused."""

from __future__ import annotations

import hashlib
from importlib.resources import files

import numpy as np
import pytest

from arctool.errors import GeometryError, UsageError
from arctool.quant.codebooks import (
    RUNGS,
    SHIPPED_TABLES,
    SUM2_CONSTANTS,
    SUM2_STEP,
    Codebook,
    ShippedTable,
    rung,
    shipped_table,
    sum2_values,
)
from arctool.quant.trellis import Geometry

SUM2_RUNGS = [r for r in RUNGS.values() if r.codebook_name == "sum2"]


@pytest.mark.parametrize("k", [r.geometry.k for r in SUM2_RUNGS])
def test_sum2_is_the_byte_sum_of_two_hashes_in_plain_integers(k: int) -> None:
    values = sum2_values(Geometry(k, 2, 16))
    assert values.shape == (65536, 2)
    for state in [0, 1, 2, 255, 256, 4097, 32768, 65534, 65535]:
        for column, (multiplier, increment) in enumerate(SUM2_CONSTANTS[k]):
            hashed = (state * multiplier + increment) % 2**32
            total = sum(hashed.to_bytes(4, "little")) - 510
            assert values[state, column] == np.float32(total) * SUM2_STEP


@pytest.mark.parametrize("k", [r.geometry.k for r in SUM2_RUNGS])
def test_sum2_looks_like_independent_unit_gaussians(k: int) -> None:
    values = sum2_values(Geometry(k, 2, 16)).astype(np.float64)
    assert np.abs(values.mean(axis=0)).max() < 0.02
    assert np.abs(values.std(axis=0) - 1).max() < 0.02
    assert abs(np.corrcoef(values.T)[0, 1]) < 0.02
    # The 2^k branches of a trellis node are the states with its l−k low bits: a node whose branches huddle together has no choice.
    branches = values.reshape(1 << k, -1, 2)
    assert branches.var(axis=0).mean() > 0.6
    assert branches.var(axis=0).min() > 0.1


def test_sum2_refuses_what_it_cannot_serve() -> None:
    for geometry in (Geometry(8, 4, 12), Geometry(4, 1, 12), Geometry(4, 2, 12), Geometry(8, 4, 16), Geometry(5, 2, 16)):
        with pytest.raises(GeometryError, match=f"sum2.*{geometry.name}"):
            Codebook("sum2").check(geometry, "layer")
        with pytest.raises(GeometryError, match="sum2"):
            sum2_values(geometry)


@pytest.mark.parametrize("name", list(SHIPPED_TABLES))
def test_a_shipped_table_has_its_pinned_hash_type_and_shape(name: str) -> None:
    entry, geometry = SHIPPED_TABLES[name], Geometry.parse(name)
    data = files("arctool.quant").joinpath("tables", entry.file).read_bytes()
    assert hashlib.sha256(data).hexdigest() == entry.sha256
    codebook = shipped_table(name)
    assert codebook.digest == entry.sha256
    values = codebook.values(geometry)
    assert values.shape == (geometry.states, geometry.v)
    assert np.isfinite(values).all()
    assert len(np.unique(values, axis=0)) > 0.05 * geometry.states
    assert 0.95 < values.std() < 1.2


def test_a_table_that_was_tampered_with_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    entry = SHIPPED_TABLES["K8V4L12"]
    monkeypatch.setitem(SHIPPED_TABLES, "K8V4L12", ShippedTable(entry.file, entry.dtype, "0" * 64))
    shipped_table.cache_clear()
    with pytest.raises(GeometryError, match=r"k8v4l12\.bin: SHA-256"):
        shipped_table("K8V4L12")
    shipped_table.cache_clear()


@pytest.mark.parametrize(
    ("geometry", "table"),
    [
        ("K8V4L12", np.zeros((65536, 2), np.float32)),
        ("K4V2L16", np.zeros((4096, 4), np.uint16)),
        ("K8V4L12", np.zeros((4096, 4), np.float32)),
        ("K4V2L16", np.zeros((65536, 2), np.uint16)),
        ("K4V1L12", np.zeros((4096, 4), np.uint16)),
        ("K8V4L12", np.zeros((4095, 4), np.uint16)),
        ("K8V4L12", np.zeros((4096, 4), np.int8)),
    ],
)
def test_a_table_of_another_geometry_is_refused_although_the_bytes_of_a_row_agree(geometry: str, table: np.ndarray) -> None:
    with pytest.raises(GeometryError, match="layer"):
        Codebook("table", table).check(Geometry.parse(geometry), "layer")


def test_the_rungs_are_those_of_the_design() -> None:
    found = {name: (r.geometry.name, r.bits_per_weight, r.codebook_name == "sum2") for name, r in RUNGS.items()}
    assert found == {
        "qtip2": ("K4V2L16", 2, False),
        "qtip2b": ("K4V2L16", 2, True),
        "qtip2-v4": ("K8V4L12", 2, False),
        "qtip2.25-v4": ("K9V4L12", 2.25, False),
        "qtip3": ("K3V1L12", 3, False),
        "qtip3b": ("K6V2L16", 3, True),
        "qtip4": ("K4V1L12", 4, False),
        "qtip4b": ("K8V2L16", 4, True),
    }


@pytest.mark.parametrize("name", ["", "QTIP4", "qtip5", "q4_0", "qtip4 "])
def test_an_unknown_rung_is_refused_with_the_known_ones(name: str) -> None:
    with pytest.raises(UsageError, match="known rungs: qtip2, qtip2b"):
        rung(name)
