"""This machine's decoders as `verify` asks them: what they give is the oracle's, and what they do not give is not claimed."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
import uqff_samples as samples

from arctool.kernels.decoders import CpuDecoder, ProductProbe, decoders, sampled_columns
from arctool.kernels.registry import Prepared, Registry, default_registry
from arctool.quant.codebooks import Codebook, ShippedTable
from arctool.quant.tensor import TrellisTensor
from arctool.quant.trellis import Geometry
from arctool.uqff.container import ArtifactWriter, BakeInfo
from arctool.uqff.verify import VerifyReport, verify


@pytest.mark.parametrize("in_features", [1, 4, 15, 16, 17, 32, 36, 100, 256, 260, 576, 1536, 53248])
def test_sampled_columns_reach_both_ends_and_every_partial_sum(in_features: int) -> None:
    columns = sampled_columns(in_features)
    assert columns[0] == 0
    assert columns[-1] == in_features - 1
    assert (np.diff(columns) > 0).all()
    assert {int(column) % 16 for column in columns} == set(range(min(16, in_features)))
    assert len(columns) <= 17


def test_at_the_bounds_the_sampled_columns_are_these() -> None:
    assert sampled_columns(17).tolist() == list(range(17))
    assert sampled_columns(260).tolist() == [17 * i for i in range(16)] + [259]


def verified(directory: Path, weight: TrellisTensor, registry: Registry) -> VerifyReport:
    with ArtifactWriter(directory, "q", config={}, assets={}) as w:
        w.add_layer("x", weight)
        w.finish(BakeInfo("q", 0))
    table = {} if weight.codebook.kind == "sum2" else {weight.geometry.name: ShippedTable("", "bf16", weight.codebook.digest)}
    return verify(directory, implementations=decoders(registry), shipped=table)


def test_only_sampled_columns_of_the_fused_kernel_are_counted(tmp_path: Path) -> None:
    report = verified(tmp_path / "a", samples.trellis("K4V2L16", inner=260), default_registry())
    assert report.passed, report
    assert [(c.implementation, c.weights) for c in report.coverage] == [("cpu.decode", 5 * 260), ("cpu.linear (sampled columns)", 5 * 17)]


class OneWrongBit(Registry):
    """Fused products of the unit vector of column 34 are off by one bit in row 2."""

    def linear(self, x: torch.Tensor, weight: Prepared) -> torch.Tensor:
        y = super().linear(x, weight)
        y.numpy().view(np.uint32)[x[:, 34].numpy() == 1, 2] ^= 1
        return y


def test_a_fused_kernel_that_is_off_by_one_bit_is_found(tmp_path: Path) -> None:
    report = verified(tmp_path / "a", samples.trellis("K4V2L16", inner=260), OneWrongBit(default_registry().implementations))
    assert report.implementations.failure_count == 1
    assert report.implementations.failures[0].startswith("x: cpu.linear (sampled columns): row 2, column 34: expected")
    assert [c.differing for c in report.coverage] == [0, 1]


def test_a_negative_zero_of_the_table_is_no_difference_of_the_fused_kernel_and_exact_in_the_decoder(tmp_path: Path) -> None:
    geometry = Geometry(8, 4, 12)
    table = samples.table(geometry).table
    assert table is not None
    table = table.copy()
    table[0] = [0x8000, 0x3F80, 0x0000, 0x8000]
    weight = samples.trellis("K8V4L12", Codebook("table", table), inner=20, rotated=False)
    still = replace(weight, packed=np.zeros_like(weight.packed), scales=np.array([1, -1, 2, -2, 3], np.float32))
    assert np.signbit(still.decode()[0, :4]).tolist() == [True, False, False, True]
    report = verified(tmp_path / "a", still, default_registry())
    assert report.passed, report.implementations
    columns, found = ProductProbe(default_registry()).decode(still)
    assert (found.view(np.uint32) != still.decode()[:, columns].view(np.uint32)).any()
    _, exact = CpuDecoder(default_registry()).decode(still)
    assert (exact.view(np.uint32) == still.decode().view(np.uint32)).all()
