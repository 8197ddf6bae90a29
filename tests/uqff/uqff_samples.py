"""Small artifacts for the tests of this room: every family in a few hundred bytes, made of plain arithmetic and no generator."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from arctool.quant.afq import AfqTensor
from arctool.quant.codebooks import Codebook
from arctool.quant.fp8 import Fp8Tensor
from arctool.quant.ggml import GGML_TYPES
from arctool.quant.hadamard import Rotation
from arctool.quant.mxfp4 import Mxfp4Tensor
from arctool.quant.tensor import DenseTensor, GgmlTensor, TrellisTensor, Weight
from arctool.quant.trellis import Geometry
from arctool.uqff.container import ArtifactWriter, BakeInfo, LayerDetails, Report

CONFIG = {"architectures": ["LlamaForCausalLM"], "hidden_size": 12, "quantization_config": {"bits": 8}}
ASSETS = {"tokenizer.json": b'{"a": 1}\n', "chat_template.jinja": b"{{ x }}"}
INFO = BakeInfo(rung="qtip2b", seed=7, recipe={"default": "qtip2b"}, base_model="tiny/test", fingerprint="abc", licence="mit")


def table(geometry: Geometry) -> Codebook:
    """A table of distinct finite values: f32 k/1000 for 16 state bits, bf16 patterns below 1.0 else."""
    count = geometry.states * geometry.v
    if geometry.l == 16:
        values = (np.arange(count, dtype=np.float32) / np.float32(1000)).reshape(geometry.states, geometry.v)
    else:
        values = (np.arange(count, dtype=np.uint32) % 0x3F80).astype(np.uint16).reshape(geometry.states, geometry.v)
    return Codebook("table", values)


def streams(geometry: Geometry, rows: int, inner: int) -> np.ndarray:
    """Bytes 1, 38, 75, … with the padding zeroed by hand."""
    stride = geometry.stride(inner)
    packed = (np.arange(rows * stride, dtype=np.uint32) * 37 + 1).astype(np.uint8).reshape(rows, stride)
    bits = np.unpackbits(packed, axis=1, bitorder="little")
    bits[:, geometry.k * inner // geometry.v :] = 0
    return np.packbits(bits, axis=1, bitorder="little")


def trellis(name: str, codebook: Codebook | None = None, *, rows: int = 5, inner: int = 12, rotated: bool = True) -> TrellisTensor:
    geometry = Geometry.parse(name)
    scales = np.arange(1, rows + 1, dtype=np.float32) / np.float32(8)
    rotation = None
    if rotated:
        signs_in = np.where(np.arange(inner) % 3 == 0, -1, 1).astype(np.int8)
        signs_out = np.where(np.arange(rows) % 2 == 0, -1, 1).astype(np.int8)
        rotation = Rotation(4 if inner % 4 == 0 else 1, 1, signs_in, signs_out)
    return TrellisTensor(geometry, codebook or Codebook("sum2"), inner, streams(geometry, rows, inner), scales, rotation)


def dense(*shape: int, dtype: type = np.uint16) -> DenseTensor:
    """bf16 patterns 0x3F00, 0x3F01, … or f32 0, 0.5, 1, …"""
    count = int(np.prod(shape))
    if dtype is np.uint16:
        return DenseTensor((np.arange(count) + 0x3F00).astype(np.uint16).reshape(shape))
    return DenseTensor((np.arange(count, dtype=np.float32) / np.float32(2)).reshape(shape))


def layers() -> dict[str, tuple[Weight, np.ndarray | None]]:
    """One of each family and geometry, odd sizes among them so that later entries lie at odd offsets."""
    bias = np.array([0.5, -1.0, 2.0, 0.0, 3.5], np.float32)
    small = table(Geometry.parse("K8V4L12"))
    return {
        "model.embed_tokens": (dense(3, 5), None),
        "model.layers.0.q": (trellis("K4V2L16"), bias),
        "model.layers.0.k": (trellis("K8V4L12", small), None),
        "model.layers.0.v": (trellis("K8V4L12", small, rotated=False), None),
        "model.layers.0.o": (trellis("K3V1L12", table(Geometry.parse("K3V1L12")), rows=3, inner=7), None),
        "model.layers.0.up": (trellis("K6V2L16", rows=2), None),
        "lm_head": (dense(2, 3, dtype=np.float32), None),
    }


Layers = Mapping[str, tuple[Weight, np.ndarray | None]]


def write(
    directory: Path,
    only: tuple[str, ...] | None = None,
    *,
    shard_bytes: int = 10 << 30,
    assets: dict[str, bytes] | None = None,
    known: Layers | None = None,
) -> Report:
    """The sample artifact of `layers`, or of others that are `known`, or the named ones of them, at `directory`."""
    chosen = {key: value for key, value in (known or layers()).items() if only is None or key in only}
    writer = ArtifactWriter(
        directory,
        "qtip2b",
        config=CONFIG,
        assets=ASSETS if assets is None else assets,
        shard_bytes=shard_bytes,
        producer_version="0.1.0",
    )
    with writer as w:
        for key, (weight, bias) in chosen.items():
            w.add_layer(key, weight, bias, LayerDetails("qtip2b", "qtip2b", None, 0.0625 if "layers" in key else 0.0))
        w.add_residual("model.norm.weight", dense(12, dtype=np.float32))
        w.add_residual("model.layers.0.norm.weight", dense(7))
        return w.finish(INFO)


def same(left: Weight, right: Weight) -> bool:
    """Equal in every stored part, bit for bit."""
    if isinstance(left, DenseTensor) or isinstance(right, DenseTensor):
        return (
            type(left) is type(right)
            and left.data.dtype == right.data.dtype
            and left.shape == right.shape
            and left.data.tobytes() == right.data.tobytes()
        )
    if not isinstance(left, TrellisTensor) or not isinstance(right, TrellisTensor):
        return type(left) is type(right) and left.label == right.label and left.shape == right.shape and _bytes(left) == _bytes(right)
    return (
        left.geometry == right.geometry
        and left.codebook.kind == right.codebook.kind
        and left.codebook.digest == right.codebook.digest
        and left.in_features == right.in_features
        and np.array_equal(left.packed, right.packed)
        and left.scales.tobytes() == right.scales.tobytes()
        and (left.rotation is None) == (right.rotation is None)
        and (
            left.rotation is None
            or right.rotation is None
            or (
                (left.rotation.block_in, left.rotation.block_out) == (right.rotation.block_in, right.rotation.block_out)
                and np.array_equal(left.rotation.signs_in, right.rotation.signs_in)
                and np.array_equal(left.rotation.signs_out, right.rotation.signs_out)
            )
        )
    )


def _bytes(weight: Any) -> list[tuple[object, bytes]]:
    """Every array and number of a packed weight, with its type."""
    parts = [np.asarray(part) for part in vars(weight).values() if isinstance(part, np.ndarray | np.generic)]
    return [(part.dtype, part.tobytes()) for part in parts]


def raw_safetensors(tensors: dict[str, tuple[str, list[int], bytes]], *, metadata: dict[str, str] | None = None) -> bytes:
    """A safetensors file put together here, not by the code under test: name → (dtype, shape, bytes)."""
    table_: dict[str, object] = {} if metadata is None else {"__metadata__": metadata}
    data = b""
    for name, (dtype, shape, payload) in tensors.items():
        table_[name] = {"dtype": dtype, "shape": shape, "data_offsets": [len(data), len(data) + len(payload)]}
        data += payload
    text = json.dumps(table_).encode()
    return len(text).to_bytes(8, "little") + text + data


def unpack_safetensors(data: bytes) -> dict[str, tuple[str, list[int], bytes]]:
    """The inverse, equally independent; metadata are dropped."""
    length = int.from_bytes(data[:8], "little")
    header = json.loads(data[8 : 8 + length])
    header.pop("__metadata__", None)
    return {
        name: (info["dtype"], info["shape"], data[8 + length + info["data_offsets"][0] : 8 + length + info["data_offsets"][1]])
        for name, info in header.items()
    }


# ---- every other family ----------------------------------------------------------------------------------------------------------

Stored = tuple[str, list[int], bytes]
"""dtype, shape and bytes of an entry."""

BLOCKS: dict[str, tuple[int, int, int, tuple[int, ...]]] = {
    "f16": (1, 1, 2, (0,)),
    "q4_0": (2, 32, 18, (0,)),
    "q4_1": (3, 32, 20, (0, 2)),
    "q5_0": (6, 32, 22, (0,)),
    "q5_1": (7, 32, 24, (0, 2)),
    "q8_0": (8, 32, 34, (0,)),
    "q2k": (10, 256, 84, (80, 82)),
    "q3k": (11, 256, 110, (108,)),
    "q4k": (12, 256, 144, (0, 2)),
    "q5k": (13, 256, 176, (0, 2)),
    "q6k": (14, 256, 210, (208,)),
}
"""What ggml-common.h says of a type, written out again: number, weights and bytes of a block, where its f16 factors lie."""


def pattern(*shape: int) -> np.ndarray:
    """u8: 1, 38, 75, …"""
    return (np.arange(int(np.prod(shape)), dtype=np.uint32) * 37 + 1).astype(np.uint8).reshape(shape)


def blocks(name: str, *shape: int) -> GgmlTensor:
    """Blocks of plain bytes, whose factors are the f16 of 1/16 and a little more."""
    _, block, block_bytes, factors = BLOCKS[name]
    data = pattern(int(np.prod(shape)) // block, block_bytes)
    for place, offset in enumerate(factors):
        data[:, offset] = np.arange(len(data)) % 200 + place
        data[:, offset + 1] = 0x2C
    return GgmlTensor(GGML_TYPES[name], shape[-1], data.reshape(*shape[:-1], -1))


def afq(bits: int, group: int, *shape: int, factors: str = "F32") -> AfqTensor:
    """Scales 1/8, 2/8, …; offsets half of them, negative."""
    groups = (*shape[:-1], shape[-1] // group)
    scales = np.arange(1, int(np.prod(groups)) + 1, dtype=np.float32).reshape(groups) / np.float32(8)
    narrow = {"F32": lambda x: x, "F16": lambda x: x.astype(np.float16), "BF16": lambda x: (x.view(np.uint32) >> 16).astype(np.uint16)}
    return AfqTensor(bits, group, pattern(*shape[:-1], shape[-1] * bits // 8), narrow[factors](scales), narrow[factors](-scales / 2))


def mxfp4(*shape: int) -> Mxfp4Tensor:
    """Scales 2^-2, 2^-1, …"""
    scales = (np.arange(int(np.prod(shape)) // 32) % 8 + 125).astype(np.uint8).reshape(*shape[:-1], -1)
    return Mxfp4Tensor(pattern(*shape[:-1], shape[-1] // 2), scales)


def fp8(*shape: int) -> Fp8Tensor:
    codes = pattern(*shape)
    return Fp8Tensor(np.where(codes & 0x7F == 0x7F, 0, codes).astype(np.uint8), np.float32(0.125))


def families() -> dict[str, tuple[Weight, np.ndarray | None]]:
    """One of each family that `layers` has not, stacks of experts among them."""
    bias = np.array([0.5, -1.0, 2.0], np.float32)
    return {
        "model.layers.0.q4_0": (blocks("q4_0", 2, 64), None),
        "model.layers.0.q5_1": (blocks("q5_1", 3, 32), bias),
        "model.layers.0.experts.q8_0": (blocks("q8_0", 2, 3, 32), np.array([bias, -bias])),
        "model.layers.0.q2k": (blocks("q2k", 2, 256), None),
        "model.layers.0.q4k": (blocks("q4k", 1, 256), bias[:1]),
        "model.layers.0.q6k": (blocks("q6k", 1, 256), None),
        "model.layers.0.f16": (blocks("f16", 3, 5), None),
        "model.layers.0.fp8": (fp8(3, 7), None),
        "model.layers.0.afq3": (afq(3, 32, 2, 64), None),
        "model.layers.0.afq8": (afq(8, 64, 3, 64, factors="BF16"), bias),
        "model.layers.0.experts.afq2": (afq(2, 128, 2, 2, 128, factors="F16"), None),
        "model.layers.0.mxfp4": (mxfp4(2, 64), None),
        "model.layers.0.experts.mxfp4": (mxfp4(2, 2, 32), np.array([bias[:2], bias[1:]])),
        "model.layers.0.plain.f32": (dense(2, 3, dtype=np.float32), None),
        "model.layers.0.plain.f16": (blocks("f16", 2, 3), None),
        "model.layers.0.plain.bf16": (dense(3, 5), bias),
    }


NARROW_BIASES = {
    "model.layers.0.q5_1": "F16",
    "model.layers.0.q4k": "BF16",
    "model.layers.0.afq8": "BF16",
    "model.layers.0.experts.mxfp4": "BF16",
    "model.layers.0.plain.bf16": "BF16",
}
"""How a foreign artifact stores the biases that are not F32; each value of `families` is exact in all three."""

WRITTEN = tuple(k for k, (w, _) in families().items() if isinstance(w, GgmlTensor | Fp8Tensor) and ".plain." not in k)
"""Those of `families` that our own writer stores as a foreign one does."""


def _floats(values: np.ndarray, dtype: str) -> Stored:
    """An entry of f32 values that `dtype` holds exactly."""
    wide = np.ascontiguousarray(values, "<f4")
    raw = {"F32": wide, "F16": wide.astype("<f2"), "BF16": (wide.view("<u4") >> 16).astype("<u2")}[dtype]
    return dtype, list(values.shape), raw.tobytes()


def _u32(*values: int) -> bytes:
    return np.array(values, "<u4").tobytes()


def stored(key: str) -> dict[str, Stored]:
    """The entries of a layer of `families`, put together here as facts/uqff.md says, not by the code under test."""
    weight, bias = families()[key]
    tag, found = _stored(weight, plain=".plain." in key)
    entries = {f"{key}.weight{suffix}": entry for suffix, entry in found.items()}
    entries[f"{key}.weight.format"] = ("U8", [], bytes((tag,)))
    if bias is not None:
        entries[f"{key}.bias"] = _floats(bias, NARROW_BIASES.get(key, "F32"))
    return entries


def _stored(weight: Weight, *, plain: bool) -> tuple[int, dict[str, Stored]]:
    """Tag and entries by suffix."""
    if isinstance(weight, DenseTensor):
        dtype = "F32" if weight.data.dtype == np.float32 else "BF16"
        return 1, {"": (dtype, list(weight.shape), weight.data.tobytes())}
    if isinstance(weight, GgmlTensor) and plain:
        return 1, {"": ("F16", list(weight.shape), weight.data.tobytes())}
    if isinstance(weight, GgmlTensor):
        shape = ("U32", [len(weight.shape)], _u32(*weight.shape))
        return 0, {
            "": ("U8", [weight.data.size], weight.data.tobytes()),
            ".dtype": ("U32", [], _u32(BLOCKS[weight.label][0])),
            ".shape": shape,
        }
    if isinstance(weight, Fp8Tensor):
        scale = np.array(weight.scale)
        return 3, {
            "": ("F8_E4M3", list(weight.shape), weight.codes.tobytes()),
            ".dtype": ("U32", [], _u32(9)),
            ".dequant_w_scale": _floats(scale, "F32"),
            ".dequant_x_scale": _floats(scale, "F32"),
            ".quant_scale": _floats(1 / scale, "F32"),
        }
    if isinstance(weight, Mxfp4Tensor):
        return 6, {
            "": ("U8", list(weight.codes.shape), weight.codes.tobytes()),
            ".scales": ("U8", list(weight.scales.shape), weight.scales.tobytes()),
        }
    assert isinstance(weight, AfqTensor)
    dtype = {"float32": "F32", "float16": "F16", "uint16": "BF16"}[weight.scales.dtype.name]
    return 4, {
        "": ("U32", [*weight.packed.shape[:-1], weight.packed.shape[-1] // 4], weight.packed.tobytes()),
        ".bits": ("U8", [], bytes((weight.bits,))),
        ".group_size": ("U8", [], bytes((weight.group,))),
        ".scales": (dtype, list(weight.scales.shape), weight.scales.tobytes()),
        ".biases": (dtype, list(weight.offsets.shape), weight.offsets.tobytes()),
    }


VERSION: dict[str, Stored] = {
    f"uqff.version.{part}": ("U32", [], _u32(value)) for part, value in (("major", 1), ("minor", 2), ("patch", 0))
}
MISTRALRS = {"uqff.producer": "mistral.rs", "uqff.version": "1.2.0"}


def write_foreign(
    directory: Path,
    only: Iterable[str] | None = None,
    *,
    report: bool = False,
    stem: str = "mix",
    shards: int = 1,
    producer: str = "mistral.rs",
) -> None:
    """An artifact of `families`, or of the named ones, as mistral.rs leaves it: no hashes, and a report of its own or none."""
    directory.mkdir(parents=True)
    keys = [key for key in families() if only is None or key in only]
    metadata = MISTRALRS | {"uqff.producer": producer}
    per = -(-len(keys) // shards)
    for index in range(shards):
        part = [entry for key in keys[index * per : (index + 1) * per] for entry in stored(key).items()]
        tensors = (VERSION if index == 0 else {}) | dict(part)
        (directory / f"{stem}-{index}.uqff").write_bytes(raw_safetensors(tensors, metadata=metadata))
    norms = {
        "model.norm.weight": ("F32", [12], dense(12, dtype=np.float32).data.tobytes()),
        "model.layers.0.norm.weight": ("BF16", [7], dense(7).data.tobytes()),
    }
    (directory / "residual.safetensors").write_bytes(raw_safetensors(norms, metadata=metadata))
    (directory / "config.json").write_text(json.dumps({"architectures": ["LlamaForCausalLM"], "hidden_size": 12}))
    for name, raw in ASSETS.items():
        (directory / name).write_bytes(raw)
    if report:
        names = [f"{stem}-{index}.uqff" for index in range(shards)]
        (directory / "uqff_report.json").write_text(json.dumps(mistralrs_report(keys, names, stem)))


def mistralrs_report(keys: list[str], shards: list[str], quant: str) -> dict[str, Any]:
    """As mistral.rs 0.9.5 writes it: tag 1 is `unquant`, and of AFQ and MXFP4 it gives the shape of the words."""
    labels = {key: "unquant" if ".plain." in key else families()[key][0].label for key in keys}
    codes = {key: isinstance(families()[key][0], AfqTensor | Mxfp4Tensor) for key in keys}
    shapes = {key: stored(key)[f"{key}.weight"][1] if codes[key] else list(families()[key][0].shape) for key in keys}
    plain = [key for key in keys if labels[key] in ("unquant", "f16")]
    output = {
        "quant": quant,
        "shards": shards,
        "layers": len(keys),
        "actual_counts": {label: list(labels.values()).count(label) for label in sorted(set(labels.values()))},
        "fallback_count": len(plain),
        "fallbacks": [{"module": key, "from": quant, "to": labels[key], "shape": shapes[key]} for key in plain],
        "layer_details": [
            {"module": key, "default_target": quant, "resolved_target": quant, "stored": labels[key], "shape": shapes[key]} for key in keys
        ],
    }
    made = {"tool": "mistralrs quantize", "mistralrs_version": "0.9.5", "git_revision": "unknown"}
    return {"schema": 1, "generated_by": made, "uqff_version": "1.2.0", "outputs": [output]}
