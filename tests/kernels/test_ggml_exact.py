"""GGML blocks on the CPU against the numpy oracle, bit for bit: decode, both products, and the promise that company changes nothing."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from arctool.kernels.cpu.ggml import EXPAND
from arctool.kernels.cpu.ir import dot_oracle
from arctool.kernels.decoders import decoders
from arctool.kernels.prepared import GGML_KINDS
from arctool.kernels.registry import Registry, default_registry
from arctool.quant.ggml import GGML_TYPES, Q8_0, GgmlType
from arctool.quant.tensor import GgmlTensor

HALVES = np.arange(1 << 16, dtype=np.uint16)
FINITE = HALVES[np.isfinite(HALVES.view(np.float16))]


EVERY = list(GGML_TYPES.values())
every_type = pytest.mark.parametrize("kind", EVERY, ids=lambda kind: kind.name)


def widths(kind: GgmlType) -> list[int]:
    """One block, two, and more; of blocks of one also widths that are no multiple of the sixteen lanes."""
    return [1, 7, 16, 33, 576] if kind.block == 1 else [kind.block, 2 * kind.block, 3 * kind.block, 18 * kind.block]


def blocks(rows: int, in_features: int, seed: int = 0, kind: GgmlType = Q8_0) -> GgmlTensor:
    """Any bytes at all, but for the scales: finite halves of every size and sign."""
    generator = np.random.default_rng(seed)
    data = generator.integers(0, 256, (rows * in_features // kind.block, kind.block_bytes)).astype(np.uint8)
    for offset in kind.scales:
        data[:, offset : offset + 2] = generator.choice(FINITE, len(data)).astype("<u2")[:, None].view(np.uint8)
    return GgmlTensor(kind, in_features, data.reshape(rows, -1))


def gaussian(rows: int, in_features: int, seed: int = 0, kind: GgmlType = Q8_0) -> GgmlTensor:
    return GgmlTensor.encoded(kind, np.random.default_rng(seed).standard_normal((rows, in_features)).astype(np.float32), "w")


def tokens(count: int, in_features: int, seed: int = 1) -> NDArray[np.float32]:
    return np.random.default_rng(seed).standard_normal((count, in_features)).astype(np.float32)


@pytest.fixture(scope="module")
def registry() -> Registry:
    return default_registry()


def test_every_ggml_type_has_its_row_functions_and_its_kind() -> None:
    assert set(EXPAND) == set(GGML_KINDS) == set(GGML_TYPES)
    assert all(kind == f"ggml-{name}" for name, kind in GGML_KINDS.items())


@every_type
def test_every_type_is_decoded_to_the_oracles_bits_at_any_width(kind: GgmlType, registry: Registry) -> None:
    for in_features in widths(kind):
        for rows in (1, 16, 19):
            tensor = blocks(rows, in_features, in_features + rows, kind)
            np.testing.assert_array_equal(registry.decode(tensor).view(np.uint32), tensor.decode().view(np.uint32))


@every_type
def test_every_finite_half_is_a_factor_of_every_type(kind: GgmlType, registry: Registry) -> None:
    count = -(-len(FINITE) // 64)
    data = blocks(64 * count, kind.block, 1, kind).data.copy()
    for offset in kind.scales:
        data[:, offset : offset + 2] = np.resize(FINITE, len(data)).astype("<u2")[:, None].view(np.uint8)
    tensor = GgmlTensor(kind, 64 * kind.block, data.reshape(count, -1))
    np.testing.assert_array_equal(registry.decode(tensor).view(np.uint32), tensor.decode().view(np.uint32))


@every_type
def test_every_types_product_is_the_oracle_dot_whether_one_token_or_several(kind: GgmlType, registry: Registry) -> None:
    for in_features in widths(kind):
        tensor, x = gaussian(21, in_features, kind=kind), tokens(3, in_features)
        expected = np.array([dot_oracle(tensor.dense(), row) for row in x], np.float32)
        weight = registry.prepare(tensor)
        for count in (0, 1, 2, 3):
            got = registry.linear(torch.from_numpy(x[:count]), weight).numpy()
            np.testing.assert_array_equal(got.view(np.uint32), expected[:count].view(np.uint32))
        assert np.abs(expected - x @ tensor.dense().T).max() < 1e-3


@every_type
def test_every_type_gives_its_rows_to_an_embedding_and_its_columns_to_verify(kind: GgmlType, registry: Registry) -> None:
    tensor = gaussian(40, widths(kind)[2], kind=kind)
    ids = np.array([39, 0, 17, 17])
    rows = registry.embedding(torch.from_numpy(ids), registry.prepare(tensor)).numpy()
    np.testing.assert_array_equal(rows, tensor.dense()[ids])
    for decoder in decoders(registry):
        columns, values = decoder.decode(tensor)
        assert len(columns) >= min(16, tensor.in_features)
        np.testing.assert_array_equal(values, tensor.dense()[:, columns])


@every_type
@settings(max_examples=20, deadline=None)
@given(data=st.data())
def test_any_bytes_of_any_type_decode_to_the_oracles_bits(kind: GgmlType, data: st.DataObject) -> None:
    raw = np.frombuffer(data.draw(st.binary(min_size=2 * kind.block_bytes, max_size=2 * kind.block_bytes)), np.uint8).copy()
    rows = raw.reshape(-1, kind.block_bytes)
    for offset in kind.scales:
        halves = data.draw(st.lists(st.sampled_from(FINITE.tolist()), min_size=2, max_size=2))
        rows[:, offset : offset + 2] = np.array(halves, "<u2")[:, None].view(np.uint8)
    tensor = GgmlTensor(kind, 2 * kind.block, raw.reshape(1, -1))
    np.testing.assert_array_equal(default_registry().decode(tensor).view(np.uint32), tensor.decode().view(np.uint32))


def test_every_finite_scale_is_widened_exactly(registry: Registry) -> None:
    data = np.zeros((len(FINITE), 34), np.uint8)
    data[:, :2] = FINITE.astype("<u2")[:, None].view(np.uint8)
    data[:, 2:] = np.tile(np.array([1, 0xFF, 0x80, 0x7F], np.uint8), 8)
    decoded = registry.decode(GgmlTensor(Q8_0, 32, data))
    exact = FINITE.view(np.float16).astype(np.float64)
    for column, code in enumerate((1, -1, -128, 127)):
        np.testing.assert_array_equal(decoded[:, column].astype(np.float64), exact * code)


@pytest.mark.parametrize("in_features", [32, 64, 96, 576, 1536])
@pytest.mark.parametrize("rows", [1, 15, 16, 17, 40])
def test_decoding_is_exact_at_any_size(rows: int, in_features: int, registry: Registry) -> None:
    tensor = blocks(rows, in_features, seed=rows)
    np.testing.assert_array_equal(registry.decode(tensor).view(np.uint32), tensor.decode().view(np.uint32))


@settings(max_examples=60)
@given(data=st.data())
def test_decoding_is_exact_on_any_bytes(data: st.DataObject) -> None:
    count = data.draw(st.integers(1, 5))
    block = st.tuples(st.sampled_from(FINITE.tolist()), st.binary(min_size=32, max_size=32))
    raw = b"".join(int(half).to_bytes(2, "little") + codes for half, codes in data.draw(st.lists(block, min_size=count, max_size=count)))
    tensor = GgmlTensor(Q8_0, 32 * count, np.frombuffer(raw, np.uint8).reshape(1, -1))
    np.testing.assert_array_equal(default_registry().decode(tensor).view(np.uint32), tensor.decode().view(np.uint32))


@pytest.mark.parametrize("count", [0, 1, 2, 5])
@pytest.mark.parametrize("in_features", [32, 64, 160, 576])
def test_the_product_is_the_oracle_dot_whether_one_token_or_several(count: int, in_features: int, registry: Registry) -> None:
    tensor, x = gaussian(37, in_features), tokens(count, in_features)
    expected = np.array([dot_oracle(tensor.dense(), row) for row in x], np.float32).reshape(count, 37)
    got = registry.linear(torch.from_numpy(x), registry.prepare(tensor)).numpy()
    np.testing.assert_array_equal(got.view(np.uint32), expected.view(np.uint32))
    if count:
        assert np.abs(got - x @ tensor.dense().T).max() < 1e-3  # and the oracle is a product at all


def test_a_tokens_result_does_not_depend_on_its_neighbours(registry: Registry) -> None:
    weight, x = registry.prepare(gaussian(192, 576)), tokens(130, 576)
    alone = np.concatenate([registry.linear(torch.from_numpy(x[i : i + 1]), weight).numpy() for i in range(130)])
    assert len(np.unique(alone)) > 1000
    np.testing.assert_array_equal(alone, registry.linear(torch.from_numpy(x), weight).numpy())


def test_many_tokens_stay_within_the_bound_of_f32_accumulation() -> None:
    registry = default_registry()
    tensor, x = gaussian(192, 576), tokens(70, 576)
    got = registry.linear(torch.from_numpy(x), registry.prepare(tensor)).numpy()
    wide = tensor.dense().astype(np.float64)
    magnitude = np.abs(x).astype(np.float64) @ np.abs(wide).T
    assert (np.abs(got - x @ wide.T) <= 576 * 2.0**-24 * magnitude).all()  # Higham, §3.1
    assert registry.engagement() == {"cpu.linear.ggml-q8_0": 1}


def test_bytes_at_any_address_and_of_a_read_only_map_give_the_same(registry: Registry) -> None:
    tensor, x = gaussian(20, 96), torch.from_numpy(tokens(1, 96))
    expected = registry.linear(x, registry.prepare(tensor))
    for offset in range(4):
        raw = bytes(offset) + tensor.data.tobytes()
        view = np.frombuffer(raw, np.uint8)[offset:].reshape(tensor.data.shape)
        assert not view.flags.writeable
        moved = GgmlTensor(Q8_0, 96, view)
        assert torch.equal(registry.linear(x, registry.prepare(moved)), expected)
        np.testing.assert_array_equal(registry.decode(moved), tensor.decode())
    wider = np.zeros((20, 3 * 34 + 5), np.uint8)
    wider[:, : 3 * 34] = tensor.data
    assert torch.equal(registry.linear(x, registry.prepare(GgmlTensor(Q8_0, 96, wider[:, :102]))), expected)


def test_a_weight_with_an_infinite_scale_is_refused_when_it_is_prepared(registry: Registry) -> None:
    tensor = gaussian(2, 64)
    data = tensor.data.copy()
    data[1, 34:36] = (0, 0x7C)
    with pytest.raises(Exception, match="the q8_0 scale of row 1, block 1 is not finite"):
        registry.prepare(GgmlTensor(Q8_0, 64, data))
