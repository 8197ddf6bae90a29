"""Tensors whose parts do not agree are refused by the layer's name; those that do say what they hold."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from arctool.errors import GeometryError
from arctool.quant.codebooks import RUNGS, Codebook
from arctool.quant.ggml import Q8_0
from arctool.quant.hadamard import Rotation
from arctool.quant.tensor import DenseTensor, GgmlTensor, TrellisTensor
from arctool.quant.trellis import pack_symbols


def sound() -> TrellisTensor:
    rung = RUNGS["qtip2-v4"]
    symbols = np.random.default_rng(0).integers(0, 256, (16, 16))
    scales = np.linspace(0.5, 2, 16, dtype=np.float32)
    return TrellisTensor(rung.geometry, rung.codebook(), 64, pack_symbols(symbols, rung.geometry), scales, Rotation.seeded(0, "k", 16, 64))


def test_a_sound_tensor_passes_and_counts_its_bits() -> None:
    tensor = sound()
    tensor.check("layer")
    assert tensor.shape == (16, 64)
    assert tensor.label == "trellis-k8v4l12-bf16"
    # 16 rows of 16 bytes, 16 scales of 4 bytes, 2 + 8 bytes of signs.
    assert tensor.stored_bits == 8 * (16 * 16 + 16 * 4 + 2 + 8)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"codebook": Codebook("sum2")}, "sum2 is defined for"),
        ({"codebook": Codebook("table", np.zeros((65536, 2), np.float32))}, r"needs a bf16 table \[4096, 4\]"),
        ({"in_features": 60, "rotation": None}, "row 0 has set bits in the padding after bit 120"),
        ({"in_features": 68}, "need u8"),
        ({"scales": np.ones(15, np.float32)}, r"expected f32 scales \[16\]"),
        ({"scales": np.ones(16, np.float64)}, "found float64"),
        ({"scales": np.full(16, np.nan, np.float32)}, "scale of row 0 is not finite"),
        ({"rotation": Rotation.seeded(0, "k", 32, 64)}, r"the rotation is for \[32, 64\]"),
    ],
)
def test_parts_that_disagree_are_refused_by_the_layers_name(change: dict[str, object], message: str) -> None:
    with pytest.raises(GeometryError, match=message) as caught:
        replace(sound(), **change).check("model.layers.3.mlp.up_proj")  # type: ignore[arg-type]
    assert "model.layers.3.mlp.up_proj" in str(caught.value)


def test_a_dense_tensor_holds_f32_or_bf16_bits_and_nothing_else() -> None:
    assert DenseTensor(np.zeros((2, 3), np.float32)).label == "f32"
    assert DenseTensor(np.zeros((2, 3), np.uint16)).stored_bits == 96
    with pytest.raises(GeometryError, match="found float16"):
        DenseTensor(np.zeros((2, 3), np.float16))  # type: ignore[arg-type]


def test_the_dense_form_of_a_rotated_tensor_is_the_decoded_one_turned_back() -> None:
    tensor = sound()
    assert tensor.rotation is not None
    np.testing.assert_allclose(tensor.rotation.rotate(tensor.dense()), tensor.decode(), atol=1e-5)
    np.testing.assert_array_equal(replace(tensor, rotation=None).dense(), tensor.decode())


def test_blocks_count_their_bits_and_decode_to_what_they_were_made_of() -> None:
    weights = np.arange(-64, 128, dtype=np.float32).reshape(3, 64)
    tensor = GgmlTensor.encoded(Q8_0, weights, "layer")
    tensor.check("layer")
    assert (tensor.shape, tensor.label, tensor.stored_bits) == ((3, 64), "q8_0", 3 * 2 * 34 * 8)
    # The largest of a block, 31 to 127, sets a step of at most one: half of it and the f16 of the scale are what may be off.
    assert np.abs(tensor.dense() - weights).max() <= 0.5 + 127 / 2048
    np.testing.assert_array_equal(tensor.dense(), tensor.decode())
    with pytest.raises(GeometryError, match=r"^a\.b: q8_0 rows of 96 weights"):
        replace(tensor, in_features=96).check("a.b")
    with pytest.raises(GeometryError, match=r"^a\.b: the value at \[0, 0\] is nan"):
        GgmlTensor.encoded(Q8_0, np.full((1, 32), np.nan, np.float32), "a.b")


def test_rows_of_a_tensor_decode_as_in_the_whole() -> None:
    trellis, blocks = sound(), GgmlTensor.encoded(Q8_0, np.random.default_rng(1).standard_normal((16, 64)).astype(np.float32), "k")
    dense = DenseTensor(np.arange(48, dtype=np.uint16).reshape(16, 3))
    for which in (slice(3, 7), np.array([15, 0, 0, 9])):
        np.testing.assert_array_equal(trellis.rows(which).dense(), trellis.decode()[which])
        np.testing.assert_array_equal(blocks.rows(which).dense(), blocks.dense()[which])
        np.testing.assert_array_equal(dense.rows(which).data, dense.data[which])
