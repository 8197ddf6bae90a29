"""Statistics of a tensor: every number is numpy's of the whole tensor, whatever the chunks; and what hostile bytes may hold is counted."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import uqff_samples as samples
from hypothesis import given
from hypothesis import strategies as st
from scipy.stats import kurtosis

from arctool.errors import FormatError, UsageError
from arctool.quant.hadamard import Rotation
from arctool.quant.tensor import DenseTensor, TrellisTensor, Weight
from arctool.uqff import chunks as chunking
from arctool.uqff.chunks import chunks, matrix_shape, run_length
from arctool.uqff.detail import inspect_tensor
from arctool.uqff.statistics import BINS, PERCENTILES, Statistics, measure, spread


def gaussian(*shape: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal(shape, np.float32) + np.float32(0.25)


def rotated(rows: int, inner: int, block_in: int, block_out: int) -> TrellisTensor:
    tensor = samples.trellis("K8V4L12", samples.table(samples.Geometry.parse("K8V4L12")), rows=rows, inner=inner, rotated=False)
    signs = np.random.default_rng(1).integers(0, 2, rows + inner).astype(np.int8) * 2 - 1
    rotation = Rotation(block_in, block_out, signs[:inner].astype(np.int8), signs[inner:].astype(np.int8))
    return TrellisTensor(tensor.geometry, tensor.codebook, inner, tensor.packed, tensor.scales, rotation)


class Stack:
    """A packed stack of experts, as a class that this room has never seen."""

    label, stored_bits = "stack", 32

    def __init__(self, data: np.ndarray) -> None:
        self.data, self.shape = data, data.shape

    def rows(self, which: slice) -> Stack:
        return Stack(self.data[which])

    def dense(self) -> np.ndarray:
        return self.data


def check(found: Statistics, dense: np.ndarray) -> None:
    """Against numpy and scipy over the finite values of the whole array."""
    finite = dense[np.isfinite(dense)].astype(np.float64)
    assert (found.count, found.nan, found.infinite) == (dense.size, np.isnan(dense).sum(), np.isinf(dense).sum())
    assert (found.minimum, found.maximum, found.abs_max) == (finite.min(), finite.max(), np.abs(finite).max())
    assert found.mean == pytest.approx(finite.mean(), rel=1e-12, abs=1e-12)
    assert found.std == pytest.approx(finite.std(), rel=1e-12)
    assert found.kurtosis == pytest.approx(kurtosis(finite), rel=1e-9, abs=1e-9)
    assert found.zeros == (finite == 0).mean()
    for q in PERCENTILES:
        assert found.percentiles[f"{q:g}"] == pytest.approx(np.percentile(finite, q), rel=1e-12, abs=1e-30)
    assert found.histogram is not None
    assert found.histogram.counts == tuple(np.histogram(finite, BINS)[0])
    assert (found.histogram.low, found.histogram.high) == (finite.min(), finite.max())


@pytest.mark.parametrize("chunk", [1, 64, 100, 1 << 20])
@pytest.mark.parametrize(("rows", "inner", "blocks"), [(24, 16, (8, 8)), (7, 12, (4, 1)), (128, 8, (8, 128)), (6, 4, (1, 2))])
def test_chunks_of_a_rotated_tensor_are_its_dense_weights_bit_for_bit(
    rows: int, inner: int, blocks: tuple[int, int], chunk: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(chunking, "CHUNK_WEIGHTS", chunk)
    tensor = rotated(rows, inner, *blocks)
    parts = list(chunks(tensor, run_length(tensor)))
    assert len(parts) > 1 or chunk >= rows * inner or blocks[1] == rows
    assert [start for start, _ in parts] == list(np.cumsum([0] + [len(values) for _, values in parts])[:-1])
    whole = np.concatenate([values for _, values in parts])
    dense = tensor.dense()
    assert np.unique(dense).size > 4
    assert whole.tobytes() == dense.tobytes()
    assert whole.shape == dense.shape


@pytest.mark.parametrize("shape", [(), (1,), (7,), (5, 3), (4, 6, 8), (2, 3, 4, 5)])
@pytest.mark.parametrize("chunk", [1, 10, 1 << 20])
def test_a_tensor_of_any_rank_is_a_matrix_of_rows(shape: tuple[int, ...], chunk: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(chunking, "CHUNK_WEIGHTS", chunk)
    dense = gaussian(*shape)
    weights: list[Weight] = [DenseTensor(np.asarray(dense, np.float32))]
    if len(shape) > 2:
        weights.append(Stack(dense))  # type: ignore[arg-type]
    for weight in weights:
        parts = [values for _, values in chunks(weight, run_length(*weights))]
        assert np.concatenate(parts).tobytes() == dense.tobytes()
        assert all(values.shape[1] == matrix_shape(shape)[1] for values in parts)


@pytest.mark.parametrize("chunk", [50, 1 << 20])
def test_every_number_is_that_of_the_whole_tensor(chunk: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(chunking, "CHUNK_WEIGHTS", chunk)
    dense = gaussian(40, 30)
    dense[3, 4:9] = 0
    dense[3, 9] = np.float32(-0.0)
    steps: list[tuple[int, int]] = []
    found = measure(DenseTensor(dense), lambda done, total: steps.append((done, total)))
    check(found, dense)
    norms = np.linalg.norm(dense.astype(np.float64), axis=1)
    assert [row.index for row in found.heaviest] == [(int(row),) for row in np.argsort(-norms)[:5]]
    assert [row.norm for row in found.heaviest] == pytest.approx(sorted(norms)[:-6:-1])
    assert steps[-1] == (2400, 2400)
    assert len(steps) == (2 if chunk > 1200 else 80)
    check(measure(samples.trellis("K4V2L16")), samples.trellis("K4V2L16").dense())
    tensor = rotated(24, 16, 8, 8)
    check(measure(tensor), tensor.dense())


@given(st.lists(st.floats(width=32, allow_nan=False, allow_infinity=False), min_size=1, max_size=60))
def test_percentiles_are_exact_whatever_the_values(given_values: list[float]) -> None:
    dense = np.array(given_values, np.float32)
    found = measure(DenseTensor(dense))
    for q in PERCENTILES:
        expected = np.percentile(dense.astype(np.float64), q)
        spread_of_values = float(np.ptp(dense.astype(np.float64)))
        assert found.percentiles[f"{q:g}"] == pytest.approx(expected, rel=1e-9, abs=1e-12 * spread_of_values)
    assert found.histogram is not None
    assert sum(found.histogram.counts) == len(given_values)
    json.dumps(found.to_json(), allow_nan=False)


def test_rows_of_stacked_experts_and_values_of_a_vector_are_named_by_their_index() -> None:
    stack = np.zeros((3, 4, 5), np.float32)
    stack[2, 1] = 3
    stack[0, 3, 2] = -5
    found = measure(Stack(stack))  # type: ignore[arg-type]
    assert [(row.index, row.norm) for row in found.heaviest[:2]] == [((2, 1), 45**0.5), ((0, 3), 5.0)]
    vector = np.array([1, -7, 2, 0], np.float32)
    assert [(row.index, row.norm) for row in measure(DenseTensor(vector)).heaviest] == [((1,), 7), ((2,), 2), ((0,), 1), ((3,), 0)]


def test_what_is_not_finite_is_counted_named_and_left_out() -> None:
    dense = gaussian(6, 50)
    dense[1, 2], dense[4, 0], dense[5, 49] = np.nan, np.inf, -np.inf
    found = measure(DenseTensor(dense))
    check(found, dense)
    assert [(place.index, place.value) for place in found.nonfinite] == [((1, 2), "nan"), ((4, 0), "inf"), ((5, 49), "-inf")]
    json.dumps(found.to_json(), allow_nan=False)
    nothing = measure(DenseTensor(np.full((2, 400), np.nan, np.float32)))
    assert (nothing.count, nothing.nan, nothing.mean, nothing.histogram, nothing.percentiles) == (800, 800, None, None, {})
    assert len(nothing.nonfinite) == 5
    assert nothing.nonfinite[4].index == (0, 4)


@pytest.mark.filterwarnings("error")
def test_extremes_give_numbers_and_no_warning() -> None:
    largest = np.finfo(np.float32).max
    wide = measure(DenseTensor(np.array([[largest, -largest, 0, 1]], np.float32)))
    assert wide.kurtosis == pytest.approx(kurtosis([float(largest), -float(largest), 0, 1]))
    tiny = measure(DenseTensor(np.array([[1e-45, 0, 0, 0]], np.float32)))
    assert tiny.histogram is not None
    assert (tiny.histogram.counts[0], tiny.histogram.counts[-1]) == (3, 1)
    constant = measure(DenseTensor(np.full(9, -2, np.float32)))
    assert (constant.std, constant.kurtosis, constant.mean) == (0, None, -2)
    assert constant.histogram is not None
    assert (constant.histogram.low, constant.histogram.high, sum(constant.histogram.counts)) == (-3, -1, 9)
    for shape in ((0,), (3, 0), (0, 3)):
        assert measure(DenseTensor(np.zeros(shape, np.float32))).count == 0
    loud = rotated(24, 16, 8, 8)
    overflowing = TrellisTensor(loud.geometry, loud.codebook, 16, loud.packed, loud.scales * np.float32(1e38), loud.rotation)
    assert measure(overflowing).nan + measure(overflowing).infinite > 0


def test_scales_are_summed_up() -> None:
    least, median, greatest, histogram = spread(np.array([1, 4, 2, 3], np.float32)) or (0, 0, 0, None)
    assert (least, median, greatest) == (1, 2.5, 4)
    assert histogram is not None
    assert sum(histogram.counts) == 4
    assert spread(np.array([np.nan], np.float32)) is None


def test_everything_about_one_layer(tmp_path: Path) -> None:
    samples.write(tmp_path / "a")
    found = inspect_tensor(tmp_path / "a", "model.layers.0.q.weight")
    weight = samples.layers()["model.layers.0.q"][0]
    assert (found.key, found.kind, found.label, found.shape) == ("model.layers.0.q", "layer", "trellis-k4v2l16-sum2", (5, 12))
    assert found.bits_per_weight == (20 + 20 + 3) * 8 / 60
    assert {(row.name.removeprefix("model.layers.0.q."), row.dtype, row.shape, row.nbytes) for row in found.entries} == {
        ("weight", "U8", (5, 4), 20),
        ("weight.format", "U8", (), 1),
        ("weight.shape", "U32", (2,), 8),
        ("weight.scales", "F32", (5,), 20),
        ("weight.sections", "U8", (4,), 4),
        ("weight.signs_in", "U8", (2,), 2),
        ("weight.signs_out", "U8", (1,), 1),
        ("bias", "F32", (5,), 20),
    }
    assert {row.file for row in found.entries} == {"qtip2b-0.uqff"}
    facts = found.trellis
    assert facts is not None
    assert (facts.geometry, facts.codebook, facts.table, facts.block_in, facts.block_out) == ("K4V2L16", "sum2", None, 4, 1)
    assert facts.scales is not None
    assert (facts.scales.minimum, facts.scales.median, facts.scales.maximum) == (0.125, 0.375, 0.625)
    assert found.report is not None
    assert (found.report.resolved_target, found.report.relative_error, found.rung) == ("qtip2b", 0.0625, "qtip2b")
    check(found.statistics, weight.dense())
    json.dumps(found.to_json(), allow_nan=False)


@pytest.mark.parametrize("name", ["model.norm", "model.norm.weight"])
def test_a_residual_tensor_and_a_bias_are_found_by_name(name: str, tmp_path: Path) -> None:
    samples.write(tmp_path / "a")
    found = inspect_tensor(tmp_path / "a", name)
    assert (found.key, found.kind, found.label, found.shape, found.trellis) == ("model.norm.weight", "residual", "f32", (12,), None)
    assert (found.report, found.statistics.mean, found.entries[0].file) == (None, 2.75, "residual.safetensors")
    bias = inspect_tensor(tmp_path / "a", "model.layers.0.q.bias")
    assert (bias.kind, bias.statistics.maximum, bias.statistics.mean, len(bias.entries)) == ("bias", 3.5, 1.0, 1)
    (tmp_path / "a" / "uqff_report.json").unlink()
    assert inspect_tensor(tmp_path / "a", "model.layers.0.q").report is None


@pytest.mark.parametrize(
    ("key", "words"),
    [
        ("layers.0.q", "did you mean model.layers.0.q"),
        ("model.0.up", "did you mean model.layers.0.up"),
        ("model.layer.0.up", "model.layers.0.up"),
        ("lm_haed", "did you mean lm_head?"),
        ("model.layers.0.k.bias", "model.layers.0.k"),
        ("zzz", "`arctool inspect` lists its 9"),
        ("", "`arctool inspect` lists its 9"),
    ],
)
def test_an_unknown_key_is_refused_with_names_that_come_near(key: str, words: str, tmp_path: Path) -> None:
    samples.write(tmp_path / "a")
    with pytest.raises(UsageError) as error:
        inspect_tensor(tmp_path / "a", key)
    assert words in str(error.value)
    assert repr(key) in str(error.value)


def test_a_damaged_layer_is_refused(tmp_path: Path) -> None:
    samples.write(tmp_path / "a")
    (shard,) = (tmp_path / "a").glob("*.uqff")
    data = shard.read_bytes()
    tensors = samples.unpack_safetensors(data)
    dtype, shape, payload = tensors["model.layers.0.q.weight.sections"]
    tensors["model.layers.0.q.weight.sections"] = (dtype, shape, b"\xff" * len(payload))
    shard.write_bytes(samples.raw_safetensors(tensors, metadata={"uqff.producer": "arctool"}))
    with pytest.raises(FormatError, match=r"model\.layers\.0\.q\.weight\.sections"):
        inspect_tensor(tmp_path / "a", "model.layers.0.q")
