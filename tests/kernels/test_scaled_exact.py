"""FP8, AFQ and MXFP4 kernels: the oracle's bits at every width, and products that do not depend on how many tokens there are."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from arctool.kernels.cpu.ir import dot_oracle
from arctool.kernels.decoders import decoders
from arctool.kernels.registry import default_registry
from arctool.quant.afq import AfqTensor
from arctool.quant.bf16 import to_bf16
from arctool.quant.fp8 import Fp8Tensor
from arctool.quant.mxfp4 import Mxfp4Tensor
from arctool.quant.tensor import ScaledTensor


def weights() -> dict[str, ScaledTensor]:
    generator = np.random.default_rng(3)

    def octets(*shape: int) -> np.ndarray:
        return generator.integers(0, 256, shape, np.uint8)

    def factors(*shape: int) -> np.ndarray:
        return generator.standard_normal(shape).astype(np.float32)

    found: dict[str, ScaledTensor] = {}
    for rows, inner in ((1, 1), (5, 33), (37, 96), (16, 1000)):
        codes = octets(rows, inner)
        codes[codes & 0x7F == 0x7F] = 0x80
        found[f"fp8 {rows}x{inner}"] = Fp8Tensor(codes, np.float32(0.0371))
    for bits in (2, 3, 4, 6, 8):
        for group in (32, 64, 128):
            packed, scales, offsets = octets(19, 3 * group * bits // 8), factors(19, 3), factors(19, 3)
            found[f"afq{bits} groups of {group}"] = AfqTensor(bits, group, packed, scales, offsets)
    found["afq6 in bf16"] = AfqTensor(6, 64, octets(19, 96), to_bf16(factors(19, 2)), to_bf16(factors(19, 2)))
    found["mxfp4"] = Mxfp4Tensor(octets(21, 80), generator.integers(0, 253, (21, 5), np.uint8))
    found["mxfp4 of one group"] = Mxfp4Tensor(octets(1, 16), octets(1, 1) // 2)
    return found


SAMPLES = weights()


@pytest.mark.parametrize("name", list(SAMPLES))
def test_every_decoder_has_the_oracles_bits(name: str) -> None:
    weight = SAMPLES[name]
    weight.check(name)
    oracle = weight.decode()
    assert len(np.unique(oracle)) >= min(4, oracle.size)
    for decoder in decoders(default_registry()):
        columns, found = decoder.decode(weight)
        want = oracle[:, columns]
        differ = found.view(np.uint32) != want.view(np.uint32)
        if not decoder.zero_signs:
            differ &= (found != 0) | (want != 0)
        assert not differ.any(), decoder.name


@pytest.mark.parametrize("name", list(SAMPLES))
def test_a_tokens_product_has_one_order_in_any_company(name: str) -> None:
    weight, registry = SAMPLES[name], default_registry()
    prepared = registry.prepare(weight)
    x = np.random.default_rng(5).standard_normal((3, weight.in_features)).astype(np.float32)
    together = registry.linear(torch.from_numpy(x), prepared).numpy()
    alone = np.concatenate([registry.linear(torch.from_numpy(x[i : i + 1]), prepared).numpy() for i in range(3)])
    assert together.tobytes() == alone.tobytes()
    width = -(-weight.in_features // 16) * 16
    padded_x, padded_w = (np.pad(part, ((0, 0), (0, width - part.shape[1]))) for part in (x, weight.decode()))
    want = np.stack([dot_oracle(padded_w, token) for token in padded_x])
    assert together.tobytes() == want.tobytes()


@pytest.mark.parametrize("name", ["fp8 37x96", "afq3 groups of 64", "mxfp4"])
def test_rows_of_an_embedding_are_read_one_by_one(name: str) -> None:
    weight, registry = SAMPLES[name], default_registry()
    ids = torch.tensor([3, 0, 18, 3])
    assert registry.embedding(ids, registry.prepare(weight)).numpy().tobytes() == weight.decode()[ids.numpy()].tobytes()
