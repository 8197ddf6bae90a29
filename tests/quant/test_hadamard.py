"""The rotation against dense Sylvester matrices, its inverse, and the block rule for the dimensions of real models."""

from __future__ import annotations

import numpy as np
import pytest
from scipy.linalg import hadamard

from arctool.errors import GeometryError
from arctool.quant.hadamard import Rotation, block_hadamard, block_size, seeded_signs


@pytest.mark.parametrize(
    ("dimension", "block"),
    [(576, 64), (192, 64), (1536, 128), (11008, 128), (18944, 128), (4096, 128), (49152, 128), (48, 16), (7, 1), (1, 1), (2, 2), (130, 2)],
)
def test_the_block_is_the_largest_power_of_two_that_divides_up_to_128(dimension: int, block: int) -> None:
    assert block_size(dimension) == block


@pytest.mark.parametrize("dimension", [576, 192, 1536, 11008, 18944, 6, 7])
def test_the_transform_is_the_dense_orthonormal_sylvester_matrix(dimension: int) -> None:
    block = block_size(dimension)
    x = np.random.default_rng(0).standard_normal((3, dimension)).astype(np.float32)
    dense = hadamard(block).astype(np.float64) / np.sqrt(block)
    expected = (x.astype(np.float64).reshape(3, -1, block) @ dense).reshape(3, dimension)
    # Each value is a sum of `block` terms of size 1 over √block: log2(block) roundings of at most 2^-24 of the partial sums.
    np.testing.assert_allclose(block_hadamard(x, block), expected, atol=2**-24 * 8 * np.abs(expected).max())


@pytest.mark.parametrize("shape", [(192, 576), (576, 1536), (7, 64), (30, 18)])
def test_restore_undoes_rotate(shape: tuple[int, int]) -> None:
    rotation = Rotation.seeded(3, "model.layers.0.mlp.up_proj", *shape)
    weight = np.random.default_rng(1).standard_normal(shape).astype(np.float32)
    rotated = rotation.rotate(weight)
    assert not np.allclose(rotated, weight)
    np.testing.assert_allclose(rotation.restore(rotated), weight, atol=4e-6)


def test_a_rotated_layer_gives_the_outputs_of_the_layer() -> None:
    rotation = Rotation.seeded(0, "layer", 192, 576)
    generator = np.random.default_rng(2)
    weight = generator.standard_normal((192, 576)).astype(np.float32)
    x = generator.standard_normal((5, 576)).astype(np.float32)
    through = rotation.restore_output(rotation.rotate_input(x) @ rotation.rotate(weight).T)
    np.testing.assert_allclose(through, x @ weight.T, atol=5e-4)


def test_an_outlier_channel_is_spread_over_its_block() -> None:
    weight = np.zeros((64, 64), np.float32)
    weight[5, 7] = 64.0
    assert np.abs(Rotation.seeded(0, "layer", 64, 64).rotate(weight)).max() == 1.0


def test_signs_depend_on_seed_key_and_side_and_are_balanced() -> None:
    base = seeded_signs(0, "a", "in", 4096)
    assert set(base.tolist()) == {-1, 1}
    assert abs(int(base.sum())) < 4 * 64
    for other in (seeded_signs(1, "a", "in", 4096), seeded_signs(0, "b", "in", 4096), seeded_signs(0, "a", "out", 4096)):
        assert 0.4 < (base == other).mean() < 0.6
    assert (base == seeded_signs(0, "a", "in", 4096)).all()


def test_the_signs_of_this_version_never_change() -> None:
    assert np.packbits(seeded_signs(0, "model.layers.0.self_attn.q_proj", "in", 32) < 0).tobytes().hex() == GOLDEN_SIGNS


GOLDEN_SIGNS = "217ea3c0"


@pytest.mark.parametrize(("block", "width"), [(3, 9), (0, 4), (8, 12), (-2, 4)])
def test_a_block_that_is_no_power_of_two_or_does_not_divide_is_refused(block: int, width: int) -> None:
    with pytest.raises(GeometryError, match="Hadamard block"):
        block_hadamard(np.zeros((1, width), np.float32), block)


def test_a_rotation_with_a_sign_that_is_not_one_is_refused() -> None:
    good = np.ones(8, np.int8)
    bad = good.copy()
    bad[3] = 0
    with pytest.raises(GeometryError, match="input signs"):
        Rotation(8, 8, bad, good)
    with pytest.raises(GeometryError, match="output block 16"):
        Rotation(8, 16, good, good)


def test_a_rotation_that_does_not_mix_rows_restores_each_row_from_itself_alone() -> None:
    rotation = Rotation.seeded(0, "model.embed_tokens", 512, 64, mix_rows=False)
    assert (rotation.block_in, rotation.block_out, rotation.mixes_rows) == (64, 1, False)
    assert set(rotation.signs_out.tolist()) == {1}
    np.testing.assert_array_equal(rotation.signs_in, Rotation.seeded(0, "model.embed_tokens", 512, 64).signs_in)
    weight = np.random.default_rng(4).standard_normal((512, 64)).astype(np.float32)
    rotated = rotation.rotate(weight)
    np.testing.assert_allclose(rotation.restore(rotated), weight, atol=4e-6)
    poisoned = np.full_like(rotated, np.nan)
    poisoned[[3, 500]] = rotated[[3, 500]]
    np.testing.assert_array_equal(rotation.restore(poisoned)[[3, 500]], rotation.restore(rotated)[[3, 500]])


def test_a_rotation_that_mixes_rows_says_so() -> None:
    assert Rotation.seeded(0, "k", 512, 64).mixes_rows
    assert not Rotation.seeded(0, "k", 511, 64).mixes_rows  # an odd number of rows has blocks of one
