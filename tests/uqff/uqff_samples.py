"""Small artifacts for the tests of this room: every family in a few hundred bytes, made of plain arithmetic and no generator."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np

from arctool.quant.codebooks import Codebook
from arctool.quant.hadamard import Rotation
from arctool.quant.tensor import DenseTensor, TrellisTensor, Weight
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


def write(
    directory: Path, only: tuple[str, ...] | None = None, *, shard_bytes: int = 10 << 30, assets: dict[str, bytes] | None = None
) -> Report:
    """The sample artifact, or the named layers of it, at `directory`."""
    chosen = {key: value for key, value in layers().items() if only is None or key in only}
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
