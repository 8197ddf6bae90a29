"""What memory held before a call never shows: every kind of row, at widths that fill no register, in scratch full of NaN."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from arctool.errors import UsageError
from arctool.kernels.cpu import linear, products, team
from arctool.kernels.cpu.ir import dot_oracle
from arctool.kernels.cpu.operands import padded_width, rows_of
from arctool.kernels.cpu.program import Program
from arctool.kernels.registry import default_registry
from arctool.quant.afq import AfqTensor
from arctool.quant.codebooks import RUNGS
from arctool.quant.fp8 import Fp8Tensor
from arctool.quant.ggml import GGML_TYPES
from arctool.quant.tensor import DenseTensor, GgmlTensor, TrellisTensor, Weight
from arctool.quant.trellis import pack_symbols

ROWS = 37


def weights() -> dict[str, Weight]:
    generator = np.random.default_rng(0)
    found: dict[str, Weight] = {}
    for width in (1, 2, 4, 15, 16, 17, 20, 31, 40, 64):
        dense = generator.standard_normal((ROWS, width)).astype(np.float32)
        found[f"f32 {width}"] = DenseTensor(dense)
        found[f"bf16 {width}"] = DenseTensor((dense.view(np.uint32) >> 16).astype(np.uint16))
        found[f"f16 {width}"] = GgmlTensor.encoded(GGML_TYPES["f16"], dense, "w")
        codes = generator.integers(0, 256, (ROWS, width), np.uint8)
        codes[codes & 0x7F == 0x7F] = 0x80
        found[f"fp8 {width}"] = Fp8Tensor(codes, np.float32(0.0371))
        for rung in RUNGS.values():
            if width % rung.geometry.v == 0:
                symbols = generator.integers(0, 1 << rung.geometry.k, (ROWS, width // rung.geometry.v))
                packed = pack_symbols(symbols, rung.geometry)
                found[f"{rung.name} {width}"] = TrellisTensor(
                    rung.geometry, rung.codebook(), width, packed, np.ones(ROWS, np.float32), None
                )
    for name, kind in GGML_TYPES.items():
        if kind.block > 1:
            found[f"{name} {kind.block}"] = GgmlTensor.encoded(kind, generator.standard_normal((ROWS, kind.block)).astype(np.float32), "w")
    packed = generator.integers(0, 256, (ROWS, 96 * 3 // 8), np.uint8)
    factors = generator.standard_normal((2, ROWS, 3)).astype(np.float32)
    found["afq3 96"] = AfqTensor(3, 32, packed, factors[0], factors[1])
    return found


SAMPLES = weights()


@pytest.mark.parametrize("name", list(SAMPLES))
def test_a_products_bits_do_not_depend_on_what_the_lanes_memory_held(name: str) -> None:
    weight = SAMPLES[name]
    rows = rows_of(default_registry().prepare(weight))
    inputs = weight.shape[1]
    for count in (1, 2, 5):
        x = np.zeros((count, padded_width(inputs)), np.float32)
        x[:, :inputs] = np.random.default_rng(count).standard_normal((count, inputs)).astype(np.float32)
        y = np.empty((count, ROWS), np.float32)
        program = Program(np.array([count], np.int64))
        program.add(linear.product(rows.kind), products.placed(rows, x, y), scratch=rows.scratch)
        program.seal()
        program._memory[:] = 0xFF
        program.run()
        dense = weight.decode() if hasattr(weight, "decode") else weight.dense()
        np.testing.assert_array_equal(y, np.stack([dot_oracle(dense, token[:inputs]) for token in x]))


def test_lanes_without_threads_of_their_own_are_refused_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    team.check_threads.cache_clear()
    monkeypatch.setattr(team, "threading_layer", lambda: "omp")
    with pytest.raises(UsageError, match=r"'omp' threads.*unset NUMBA_THREADING_LAYER"):
        default_registry().linear(torch.ones((1, 4)), default_registry().prepare(DenseTensor(np.ones((2, 4), np.float32))))
    team.check_threads.cache_clear()


def test_a_row_that_is_not_there_is_refused() -> None:
    registry = default_registry()
    table = registry.prepare(DenseTensor(np.ones((5, 4), np.float32)))
    for ids in ([5], [0, -1]):
        with pytest.raises(IndexError, match="rows from 0 to 4"):
            registry.embedding(torch.tensor(ids), table)
