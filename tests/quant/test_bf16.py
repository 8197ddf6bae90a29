"""bf16 rounding against torch over every bf16 value and the halfway points between them."""

from __future__ import annotations

import numpy as np
import torch

from arctool.quant.bf16 import from_bf16, to_bf16, widen


def test_widening_all_65536_patterns_equals_torch() -> None:
    bits = np.arange(65536, dtype=np.uint32).astype(np.uint16)
    expected = torch.from_numpy(bits.view(np.int16)).view(torch.bfloat16).float().numpy()
    np.testing.assert_array_equal(from_bf16(bits).view(np.uint32), expected.view(np.uint32))


def test_rounding_equals_torch_at_every_value_and_around_every_halfway_point() -> None:
    high = np.arange(65536, dtype=np.uint32) << 16
    for low in (0x0000, 0x0001, 0x7FFF, 0x8000, 0x8001, 0xFFFF):
        x = (high | low).view(np.float32)
        expected = torch.from_numpy(x.copy()).to(torch.bfloat16).view(torch.int16).numpy().view(np.uint16)
        finite = ~np.isnan(x)
        np.testing.assert_array_equal(to_bf16(x)[finite], expected[finite])
        assert np.isnan(from_bf16(to_bf16(x)[~finite])).all()


def test_widen_takes_both_storage_types() -> None:
    x = np.array([1.0, -2.5], np.float32)
    assert widen(x) is x or np.shares_memory(widen(x), x)
    np.testing.assert_array_equal(widen(to_bf16(x)), x)
