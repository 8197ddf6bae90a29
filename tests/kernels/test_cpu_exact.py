"""Every CPU kernel against the numpy oracle, bit for bit: random and adversarial streams, every rung, every width up to several hundred."""

from __future__ import annotations

import hashlib

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from arctool.kernels.cpu.ir import dot_oracle
from arctool.kernels.cpu.jit import jit
from arctool.kernels.cpu.rotation import restore, rotate_into
from arctool.kernels.registry import Registry, default_registry
from arctool.quant.codebooks import RUNGS, Rung
from arctool.quant.hadamard import Rotation
from arctool.quant.tensor import DenseTensor, TrellisTensor
from arctool.quant.trellis import pack_symbols

RUNG_LIST = list(RUNGS.values())


def tensor_of(symbols: NDArray[np.integer], rung: Rung, scales: NDArray[np.float32] | None = None, rotated: bool = False) -> TrellisTensor:
    rows, steps = symbols.shape
    in_features = steps * rung.geometry.v
    rotation = Rotation.seeded(0, "layer", rows, in_features) if rotated else None
    if scales is None:
        scales = np.linspace(0.5, 1.5, rows, dtype=np.float32)
    return TrellisTensor(rung.geometry, rung.codebook(), in_features, pack_symbols(symbols, rung.geometry), scales, rotation)


def random_tensor(rung: Rung, rows: int, steps: int, seed: int = 0, rotated: bool = False) -> TrellisTensor:
    symbols = np.random.default_rng(seed).integers(0, 1 << rung.geometry.k, (rows, steps))
    return tensor_of(symbols, rung, rotated=rotated)


@pytest.fixture(scope="module")
def registry() -> Registry:
    return default_registry()


@pytest.mark.parametrize("rung", RUNG_LIST, ids=lambda r: r.name)
def test_decoding_is_exact_at_every_width_from_one_step_up(rung: Rung, registry: Registry) -> None:
    for steps in range(1, 640 // rung.geometry.v):
        tensor = random_tensor(rung, 3, steps, seed=steps)
        np.testing.assert_array_equal(registry.decode(tensor), tensor.decode(), err_msg=f"{steps} steps")


@pytest.mark.parametrize("rung", RUNG_LIST, ids=lambda r: r.name)
@settings(max_examples=60)
@given(data=st.data())
def test_decoding_is_exact_on_any_stream(rung: Rung, data: st.DataObject) -> None:
    steps = data.draw(st.integers(1, 70))
    top = (1 << rung.geometry.k) - 1
    symbol = st.one_of(st.integers(0, top), st.sampled_from([0, 1, top, top - 1, (top + 1) >> 1]))
    symbols = data.draw(st.lists(st.lists(symbol, min_size=steps, max_size=steps), min_size=1, max_size=3))
    scale = st.floats(-(2.0**20), 2.0**20, width=32, allow_nan=False)
    scales = np.array(data.draw(st.lists(scale, min_size=len(symbols), max_size=len(symbols))), np.float32)
    tensor = tensor_of(np.array(symbols), rung, scales)
    np.testing.assert_array_equal(default_registry().decode(tensor).view(np.uint32), tensor.decode().view(np.uint32))


@pytest.mark.parametrize("rung", RUNG_LIST, ids=lambda r: r.name)
@pytest.mark.parametrize("pattern", ["zeros", "ones", "alternating", "one-hot-first", "one-hot-last"])
def test_decoding_is_exact_on_adversarial_streams(rung: Rung, pattern: str, registry: Registry) -> None:
    top, steps = (1 << rung.geometry.k) - 1, 65
    symbols = np.zeros((17, steps), np.int64)
    if pattern == "ones":
        symbols[:] = top
    elif pattern == "alternating":
        symbols[:, ::2] = top
    elif pattern == "one-hot-first":
        symbols[:, 0] = np.arange(17) % (top + 1)
    elif pattern == "one-hot-last":
        symbols[:, -1] = np.arange(17) % (top + 1)
    tensor = tensor_of(symbols, rung)
    np.testing.assert_array_equal(registry.decode(tensor), tensor.decode())


def test_every_state_of_every_codebook_is_reached_and_decoded(registry: Registry) -> None:
    for rung in RUNG_LIST:
        g = rung.geometry
        wanted = np.arange(g.states)
        steps = -(-g.l // g.k)
        # A stream of `steps` symbols that ends in state s: the bits of s from the top down, padded below with zeros.
        bits = wanted.astype(np.int64) << (steps * g.k - g.l)
        symbols = np.stack([(bits >> (g.k * t)) & ((1 << g.k) - 1) for t in range(steps)], axis=1)
        tensor = tensor_of(symbols, rung, np.ones(g.states, np.float32))
        last = registry.decode(tensor)[:, -g.v :]
        np.testing.assert_array_equal(last, rung.codebook().values(g))


@pytest.mark.parametrize("rung", RUNG_LIST, ids=lambda r: r.name)
@pytest.mark.parametrize("tokens", [1, 2, 5])
def test_a_product_is_the_oracle_dot_of_codebook_values_times_the_scale(rung: Rung, tokens: int, registry: Registry) -> None:
    for steps in (1, 4, 15, 37):
        tensor = random_tensor(rung, 19, steps, seed=steps)
        x = np.random.default_rng(1).standard_normal((tokens, tensor.in_features)).astype(np.float32)
        unscaled = TrellisTensor(
            tensor.geometry, tensor.codebook, tensor.in_features, tensor.packed, np.ones(19, np.float32), None
        ).decode()
        expected = np.stack([dot_oracle(unscaled, row) * tensor.scales for row in x])
        got = registry.linear(torch.from_numpy(x), registry.prepare(tensor)).numpy()
        np.testing.assert_array_equal(got, expected)


@pytest.mark.parametrize("rung", RUNG_LIST, ids=lambda r: r.name)
def test_a_rotated_product_stays_within_the_bound_of_f32_accumulation(rung: Rung, registry: Registry) -> None:
    tensor = random_tensor(rung, 48, 144 // rung.geometry.v, rotated=True)
    x = np.random.default_rng(2).standard_normal((3, tensor.in_features)).astype(np.float32)
    assert tensor.rotation is not None
    got = registry.linear(torch.from_numpy(x), registry.prepare(tensor)).numpy()
    inner = tensor.rotation.rotate_input(x).astype(np.float64)
    weights = tensor.decode().astype(np.float64)
    expected = tensor.rotation.restore_output((inner @ weights.T).astype(np.float32)).astype(np.float64)
    # n products and n additions in any order: relative error at most n·2^-24 of the sum of magnitudes (Higham, §3.1), then the
    # output transform adds log2(16) + 1 roundings and mixes 16 outputs with weight 1/4 each: a factor of 4 on the largest.
    magnitude = (np.abs(inner) @ np.abs(weights).T).max()
    bound = 4 * (tensor.in_features + 6) * 2.0**-24 * magnitude
    assert np.abs(got - expected).max() <= bound


@pytest.mark.parametrize("kind", ["bf16", "f32"])
@pytest.mark.parametrize("in_features", [1, 15, 16, 17, 100])
def test_dense_products_are_the_oracle_dot(kind: str, in_features: int, registry: Registry) -> None:
    generator = np.random.default_rng(3)
    if kind == "bf16":
        weight = DenseTensor((generator.standard_normal((37, in_features)).astype(np.float32).view(np.uint32) >> 16).astype(np.uint16))
    else:
        weight = DenseTensor(generator.standard_normal((37, in_features)).astype(np.float32))
    x = generator.standard_normal((2, in_features)).astype(np.float32)
    expected = np.stack([dot_oracle(weight.dense(), row) for row in x])
    got = registry.linear(torch.from_numpy(x), registry.prepare(weight)).numpy()
    np.testing.assert_array_equal(got, expected)


def test_a_tokens_result_does_not_depend_on_its_neighbours(registry: Registry) -> None:
    tensor = registry.prepare(random_tensor(RUNGS["qtip2-v4"], 192, 144, rotated=True))
    x = np.random.default_rng(4).standard_normal((130, 576)).astype(np.float32)
    alone = np.concatenate([registry.linear(torch.from_numpy(x[i : i + 1]), tensor).numpy() for i in range(130)])
    together = registry.linear(torch.from_numpy(x), tensor).numpy()
    assert len(np.unique(alone)) > 1000
    np.testing.assert_array_equal(alone, together)


@jit()
def turn_rows(x, signs, block, out, rows, width, back):  # type: ignore[no-untyped-def]  # numba infers the types
    for row in range(rows):
        if back:
            restore(out + 4 * width * row, signs, block, width)
        else:
            rotate_into(x + 4 * width * row, signs, block, out + 4 * width * row, width)


@pytest.mark.parametrize("block", [1, 2, 4, 8, 16, 32, 64, 128])
def test_the_rotation_kernels_give_the_bits_of_the_definition(block: int) -> None:
    for blocks in (1, 3):
        width = block * blocks
        generator = np.random.default_rng(6)
        signs = np.where(generator.integers(0, 2, width) == 1, 1, -1).astype(np.int8)
        rotation, wide = Rotation(block, block, signs, signs), signs.astype(np.float32)
        x = (generator.standard_normal((3, width)) * 2.0 ** generator.integers(-40, 40, (3, width))).astype(np.float32)
        out = np.zeros((3, width), np.float32)
        turn_rows(x.ctypes.data, wide.ctypes.data, block, out.ctypes.data, 3, width, False)
        np.testing.assert_array_equal(out, rotation.rotate_input(x))
        restored = x.copy()
        turn_rows(0, wide.ctypes.data, block, restored.ctypes.data, 3, width, True)
        np.testing.assert_array_equal(restored, rotation.restore_output(x))


def test_engagement_counts_what_really_served_each_call() -> None:
    registry = default_registry()
    trellis, dense = registry.prepare(random_tensor(RUNGS["qtip2b"], 8, 8)), registry.prepare(DenseTensor(np.ones((8, 16), np.float32)))
    x = torch.ones((1, 16))
    registry.linear(x, trellis)
    registry.linear(x, trellis)
    registry.linear(x, dense)
    registry.embedding(torch.tensor([1, 2]), dense)
    assert registry.engagement() == {
        "cpu.linear.trellis-sum2": 2,
        "cpu.linear.dense-f32": 1,
        "cpu.embedding.dense-f32": 1,
    }


@pytest.mark.parametrize("rung", RUNG_LIST, ids=lambda r: r.name)
def test_the_decoded_bits_of_this_version_never_change(rung: Rung) -> None:
    decoded = random_tensor(rung, 4, 64 // rung.geometry.v, seed=7).decode()
    assert hashlib.sha256(decoded.astype("<f4").tobytes()).hexdigest()[:16] == GOLDEN[rung.name]


GOLDEN = {
    "qtip2": "374a3c175fb0892c",
    "qtip2b": "8d2f4d1aa6c528f3",
    "qtip2-v4": "141cda6c37b68dc0",
    "qtip2.25-v4": "b7287031d683c72d",
    "qtip3": "504540f2ee3a7e39",
    "qtip3b": "d891dd86362a2d81",
    "qtip4": "3ab7433cb65e80c7",
    "qtip4b": "75fa928abdaed6f7",
}
