"""Q8_0 in the container: golden entries, every way they can lie, verification by every decoder, and a file that another program wrote."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
import uqff_samples as samples
from gguf import GGMLQuantizationType, quantize
from numpy.typing import NDArray

from arctool.errors import FormatError, GeometryError
from arctool.kernels.decoders import ProductProbe, decoders
from arctool.kernels.registry import Prepared, Registry, default_registry
from arctool.quant.ggml import Q8_0
from arctool.quant.hadamard import Rotation
from arctool.quant.tensor import DenseTensor, GgmlTensor, TrellisTensor, Weight
from arctool.uqff.container import ArtifactWriter, BakeInfo, LayerDetails, open_artifact
from arctool.uqff.entries import Entry
from arctool.uqff.families import decode, encode
from arctool.uqff.inspect import inspect
from arctool.uqff.verify import VerifyReport, verify

ROWS, INNER = 3, 64


def values() -> NDArray[np.float32]:
    """Plain arithmetic, no generator: 192 different values, some of them negative."""
    return (((np.arange(ROWS * INNER) * 37) % 193) - 90).astype(np.float32).reshape(ROWS, INNER) / 64


def blocks() -> GgmlTensor:
    return GgmlTensor.encoded(Q8_0, values(), "sample")


def tables(ref: object) -> None:
    raise AssertionError("no table belongs to blocks")


def entry(name: str, dtype: str, shape: tuple[int, ...], data: bytes) -> Entry:
    return Entry(name, dtype, shape, np.frombuffer(data, np.uint8))


def by_name(entries: list[Entry]) -> dict[str, Entry]:
    return {item.name: item for item in entries}


def u32(*numbers: int) -> bytes:
    return np.array(numbers, "<u4").tobytes()


def write(directory: Path, weight: Weight | None = None, key: str = "model.embed_tokens") -> Path:
    with ArtifactWriter(directory, "q", config={}, assets={}) as writer:
        writer.add_layer(key, weight or blocks(), None, LayerDetails("q8_0", "q8_0", None, 3e-5))
        writer.finish(BakeInfo("q8_0", 0))
    return directory


def test_a_tiny_q8_0_layer_is_a_ggml_layer_of_type_8() -> None:
    weights = np.zeros((1, 32), np.float32)
    weights[0, :3] = (127, -127, 0.5)
    found = by_name(encode("e", GgmlTensor.encoded(Q8_0, weights, "e"), np.array([1.0], np.float32)))
    assert {name: (e.dtype, e.shape, e.raw.tobytes().hex()) for name, e in found.items()} == {
        "e.weight": ("U8", (34,), "003c" + "7f8101" + "00" * 29),
        "e.weight.format": ("U8", (), "00"),
        "e.weight.dtype": ("U32", (), "08000000"),
        "e.weight.shape": ("U32", (2,), "0100000020000000"),
        "e.bias": ("F32", (1,), "0000803f"),
    }


@pytest.mark.parametrize("shape", [(ROWS * 68,), (ROWS, 68), (1, ROWS * 68)])
def test_it_comes_back_bit_for_bit_from_one_dimension_or_two_at_any_address(shape: tuple[int, ...]) -> None:
    entries = by_name(encode("k", blocks()))
    whole = np.zeros(ROWS * 68 + 1, np.uint8)
    whole[1:] = entries["k.weight"].raw
    entries["k.weight"] = replace(entries["k.weight"], shape=shape, raw=whole[1:])
    found = decode("k", entries, tables)  # type: ignore[arg-type]
    assert isinstance(found, GgmlTensor)
    assert (found.shape, found.label) == ((ROWS, INNER), "q8_0")
    assert found.data.tobytes() == blocks().data.tobytes()
    assert np.shares_memory(found.data, whole)  # a table over the vocabulary is never copied


Change = Callable[[dict[str, Entry]], object]


def put(suffix: str, dtype: str, shape: tuple[int, ...], data: bytes) -> Change:
    name = f"k.weight{suffix}"
    return lambda entries: entries.__setitem__(name, entry(name, dtype, shape, data))


LIES: dict[str, tuple[Change, str]] = {
    "a block short": (put("", "U8", (170,), bytes(170)), r"q8_0 \[3, 64\] takes 204 bytes as U8, found U8 \[170\]"),
    "a byte short": (put("", "U8", (203,), bytes(203)), r"q8_0 \[3, 64\] takes 204 bytes"),
    "a byte long": (put("", "U8", (205,), bytes(205)), r"q8_0 \[3, 64\] takes 204 bytes"),
    "signed bytes": (put("", "I8", (204,), bytes(204)), "as U8, found I8"),
    "three dimensions": (put("", "U8", (3, 2, 34), bytes(204)), r"as U8, found U8 \[3, 2, 34\]"),
    "more rows": (put(".shape", "U32", (2,), u32(4, 64)), r"q8_0 \[4, 64\] takes 272 bytes"),
    "fewer rows": (put(".shape", "U32", (2,), u32(2, 64)), r"q8_0 \[2, 64\] takes 136 bytes"),
    "the shape of a stack of stacks": (
        put(".shape", "U32", (4,), u32(1, 1, 3, 64)),
        r"expected a U32 shape of 1 to 3 sizes, found U32 \[4\]",
    ),
    "a flat shape": (put(".shape", "U32", (1,), u32(192)), r"needs a weight \[out, in\] or \[experts, out, in\], found \[192\]"),
    "rows that are no whole blocks": (put(".shape", "U32", (2,), u32(4, 48)), "q8_0: in_features 48 is not a positive multiple"),
    "no rows": (put(".shape", "U32", (2,), u32(0, 64)), "not the shape of a weight"),
    "an enormous shape": (put(".shape", "U32", (2,), u32(1 << 31, 1 << 31)), "not the shape of a weight"),
    "Q4_0 of the same bytes": (put(".dtype", "U32", (), u32(2)), r"q4_0 \[3, 64\] takes 108 bytes as U8, found U8 \[204\]"),
    "Q8_1": (put(".dtype", "U32", (), u32(9)), r"q8_1 \(ggml 9\) is not readable .*it reads f32 \(0\).*q8_0 \(8\)"),
    "F32 of the same bytes": (put(".dtype", "U32", (), u32(0)), r"f32 \[3, 64\] takes 768 bytes"),
    "dtype as U8": (put(".dtype", "U8", (), b"\x08"), r"k.weight.dtype: expected U32 \[\], found U8"),
    "an infinite scale": (put("", "U8", (204,), bytes(102) + b"\x00\x7c" + bytes(100)), "scale of row 1, block 1 is not finite"),
    "a NaN scale": (put("", "U8", (204,), b"\x01\xfe" + bytes(202)), "scale of row 0, block 0 is not finite"),
    "scales beside them": (put(".scales", "F32", (3,), bytes(12)), "k.weight.scales is not an entry of GGML layers"),
}


@pytest.mark.parametrize("name", LIES)
def test_a_lying_layer_is_refused_by_name(name: str) -> None:
    change, words = LIES[name]
    entries = by_name(encode("k", blocks()))
    change(entries)
    with pytest.raises(FormatError, match=f"^f.uqff: (?=.*k.weight).*(?:{words})"):
        decode("k", entries, tables, "f.uqff")  # type: ignore[arg-type]


def test_what_could_not_be_read_is_never_written() -> None:
    with pytest.raises(GeometryError, match=r"k\.weight: q8_0 rows of 96 weights need"):
        encode("k", replace(blocks(), in_features=96))
    poisoned = blocks().data.copy()
    poisoned[2, :2] = (0, 0xFC)
    with pytest.raises(GeometryError, match=r"k\.weight: the q8_0 scale of row 2, block 0 is not finite"):
        encode("k", replace(blocks(), data=poisoned))
    with pytest.raises(FormatError, match="at least one weight"):
        encode("k", replace(blocks(), data=blocks().data[:0]))


def test_every_decoder_of_this_machine_gives_the_oracles_bits(tmp_path: Path) -> None:
    report = verify(write(tmp_path / "a"), implementations=decoders(default_registry()))
    assert report.passed, report
    assert report.implementations.counts["block tensors"] == 1
    assert "trellis tensors" not in report.implementations.counts
    assert [(c.implementation, c.tensors, c.weights) for c in report.coverage] == [
        ("cpu.decode", 1, ROWS * INNER),
        ("cpu.linear (sampled columns)", 1, ROWS * 16),
    ]
    assert report.tables.counts == {}


def test_the_probe_of_a_product_asks_once_for_all_its_columns() -> None:
    registry = default_registry()
    ProductProbe(registry).decode(blocks())
    assert registry.engagement() == {"cpu.linear.ggml-q8_0": 1}


class OneWrongBit(Registry):
    """Decoding, and products alone, are off by one bit in row 2."""

    def decode(self, weight: object) -> NDArray[np.float32]:
        dense = super().decode(weight)  # type: ignore[arg-type]
        dense.view(np.uint32)[2, 5] ^= 1
        return dense

    def linear(self, x: torch.Tensor, weight: Prepared) -> torch.Tensor:
        y = super().linear(x, weight)
        y.numpy().view(np.uint32)[(x[:, 63] == 1).numpy(), 2] ^= 1
        return y


def test_decoders_that_are_off_by_one_bit_are_found(tmp_path: Path) -> None:
    report = verify(write(tmp_path / "a"), implementations=decoders(OneWrongBit(default_registry().implementations)))
    first, second = report.implementations.failures
    assert first.startswith("model.embed_tokens: cpu.decode: row 2, column 5: expected")
    assert second.startswith("model.embed_tokens: cpu.linear (sampled columns): row 2, column 63: expected")


def test_a_flipped_bit_in_any_byte_of_the_shard_is_found(tmp_path: Path) -> None:
    path = write(tmp_path / "a") / "q-0.uqff"
    whole = path.read_bytes()
    assert verify(tmp_path / "a", implementations=decoders(default_registry())).passed
    for at in range(len(whole)):
        changed = bytearray(whole)
        changed[at] ^= 1 << at % 8
        path.write_bytes(changed)
        assert not verify(tmp_path / "a").container.passed, f"byte {at}"


class Source:
    def __init__(self, weights: NDArray[np.float32]) -> None:
        self.weights = weights

    def lazily(self, key: str) -> Weight:
        return DenseTensor(self.weights)

    def bias(self, key: str) -> None:
        return None


def against(directory: Path, weights: NDArray[np.float32]) -> VerifyReport:
    return verify(directory, source=Source(weights), implementations=decoders(default_registry()))


def test_the_source_may_differ_by_what_rounding_costs_and_no_more(tmp_path: Path) -> None:
    report = against(write(tmp_path / "a"), values())
    assert report.passed, report.source
    (error,) = report.errors
    gap = ((blocks().dense() - values()).astype(np.float64) ** 2).sum() / (values().astype(np.float64) ** 2).sum()
    assert error.relative_error == pytest.approx(gap)
    assert 1e-6 < gap < 1e-4
    assert (error.limit, error.plausible) == (2.0**-17, Q8_0.worst_error)
    other = values()
    other[1] *= np.float32(1.05)  # a twentieth of a third of the rows: 8e-4 of the power
    answer = against(tmp_path / "a", other).source
    assert not answer.passed
    assert "relative error" in answer.failures[0]
    assert "of q8_0, at most 0.000627" in answer.failures[0]


def test_the_numbers_of_a_layer_of_blocks(tmp_path: Path) -> None:
    found = inspect(write(tmp_path / "a"))
    (row,) = found.layers
    assert (row.label, row.shape, row.bits_per_weight, row.relative_error) == ("q8_0", (ROWS, INNER), 8.5, 3e-5)
    assert row.nbytes == ROWS * 68 + 1 + 4 + 8
    assert (found.totals.quantised_parameters, found.totals.quantised_bits_per_weight) == (ROWS * INNER, 8.5)
    report = json.loads((tmp_path / "a" / "uqff_report.json").read_text())
    assert report["outputs"][0]["actual_counts"] == {"q8_0": 1}
    assert report["outputs"][0]["fallback_count"] == 0
    assert report["arctool"]["bits_per_weight"] == {"quantised": 8.5, "all": 8.5}


def test_a_file_that_another_program_wrote_is_read_and_verified(tmp_path: Path) -> None:
    """As mistral.rs lays it out (facts/uqff.md): flat bytes of gguf-py, no metadata, no report."""
    theirs = quantize(values(), GGMLQuantizationType.Q8_0)
    tensors = {f"uqff.version.{part}": ("U32", [], u32(number)) for part, number in (("major", 1), ("minor", 2), ("patch", 0))}
    tensors |= {
        "lm_head.weight": ("U8", [theirs.size], theirs.tobytes()),
        "lm_head.weight.dtype": ("U32", [], u32(8)),
        "lm_head.weight.format": ("U8", [], b"\x00"),
        "lm_head.weight.shape": ("U32", [2], u32(*values().shape)),
    }
    (tmp_path / "q8_0-0.uqff").write_bytes(samples.raw_safetensors(tensors))
    (tmp_path / "residual.safetensors").write_bytes(samples.raw_safetensors({}))
    (tmp_path / "config.json").write_text("{}")
    with open_artifact(tmp_path) as artifact:
        weight = artifact.weight("lm_head")
        assert isinstance(weight, GgmlTensor)
        assert weight.data.tobytes() == blocks().data.tobytes()
    report = against(tmp_path, values())
    assert report.passed, report


def test_a_trellis_embedding_needs_nothing_new_of_the_wire(tmp_path: Path) -> None:
    """Section 4 says that the output block is one, and the output signs are all plus."""
    signs = np.where(np.arange(64) % 3 == 0, -1, 1).astype(np.int8)
    rotation = Rotation(64, 1, signs, np.ones(ROWS, np.int8))
    table = replace(samples.trellis("K8V2L16", rows=ROWS, inner=64, rotated=False), rotation=rotation)
    found = by_name(encode("e", table))
    assert found["e.weight.sections"].raw.tobytes().hex() == "03081002" + "02" + "040600"
    assert found["e.weight.signs_out"].raw.tobytes() == b"\x00"
    directory = write(tmp_path / "a", table)
    assert verify(directory, implementations=decoders(default_registry())).passed
    with open_artifact(directory) as artifact:
        stored = artifact.weight("model.embed_tokens")
        assert isinstance(stored, TrellisTensor)
        registry = default_registry()
        rows = registry.embedding(torch.tensor([2, 0]), registry.prepare(stored)).numpy()
        np.testing.assert_array_equal(rows.view(np.uint32), table.dense()[[2, 0]].view(np.uint32))
