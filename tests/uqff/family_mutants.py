"""Mutants that only someone who knows a family would make: several entries of a layer changed together, so that they agree in a lie."""

from __future__ import annotations

import struct
from collections.abc import Iterator
from typing import Any

from mutants import Base, Mutant, Parts, single

Changed = dict[str, tuple[str, list[int], bytes] | None]
"""Entries by suffix; None for one that goes."""

GGML = (0, 1, 2, 3, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15, 30, 39)


def f32(value: float) -> bytes:
    return struct.pack("<f", value)


def together(base: Base) -> Iterator[Mutant | None]:
    """For each layer of each shard, what its entries make possible."""
    for file in base.shards:
        parts = Parts.of(base.files[file])
        infos = dict(parts.entries)
        for name in infos:
            if not name.endswith(".weight.format"):
                continue
            key = name.removesuffix(".weight.format")
            found = {rest.removeprefix(f"{key}.weight"): info for rest, info in infos.items() if rest.startswith(f"{key}.weight")}
            for what, changed in _lies(key, found, parts):
                entries = {f"{key}.weight{suffix}": entry for suffix, entry in changed.items()}
                yield single(base, f"{key}: {what}", file, parts.with_payloads(entries), key)


def _lies(key: str, infos: dict[str, Any], parts: Parts) -> Iterator[tuple[str, Changed]]:
    """(what, entries by suffix that change)."""
    at = {suffix: (info["dtype"], info["shape"], parts.payload(f"{key}.weight{suffix}")) for suffix, info in infos.items()}
    if ".quant_scale" in at:
        yield from _scales(at)
    if ".bits" in at:
        for bits in (*range(10), 16, 32, 255):
            for group in (0, 1, 16, 31, 32, 33, 48, 64, 96, 127, 128, 129, 255):
                changed = {".bits": ("U8", [], bytes((bits,))), ".group_size": ("U8", [], bytes((group,)))}
                yield f"{bits} bits in groups of {group}", changed
        yield from _regrouped(at)
        for dtype in ("F16", "BF16", "U16", "I16", "F32", "U32", "I32"):
            if {dtype[-2:], at[".scales"][0][-2:]} in ({"16"}, {"32"}):
                yield f"scales and offsets as {dtype}", {suffix: (dtype, *at[suffix][1:]) for suffix in (".scales", ".biases")}
        yield "scales ⇄ offsets", {".scales": at[".biases"], ".biases": at[".scales"]}
    if ".dtype" in at and ".shape" in at:
        count = at[".shape"][1][0]
        shape = list(struct.unpack(f"<{count}I", at[".shape"][2]))
        for kind in GGML:
            for other in (shape[::-1], [1, *shape], [*shape, 1], [shape[0] * shape[1], *shape[2:]], [2 * shape[0], *shape[1:]]):
                for wide in (other, [*other[:-1], other[-1] * 2], [*other[:-1], max(1, other[-1] // 2)]):
                    packed = ("U32", [len(wide)], struct.pack(f"<{len(wide)}I", *wide))
                    if wide != shape:
                        yield f"type {kind} of {wide}", {".dtype": ("U32", [], struct.pack("<I", kind)), ".shape": packed}
        plain = dict.fromkeys((".dtype", ".shape"))
        for tag, dtype in ((1, "U8"), (1, "F16"), (1, "BF16"), (3, "F8_E4M3"), (6, "U8")):
            width = 2 if dtype in ("F16", "BF16") else 1
            raw = at[""][2]
            if len(raw) % width == 0:
                weight = (dtype, [1, len(raw) // width], raw)
                yield f"as tag {tag}, {dtype}", {"": weight, ".format": ("U8", [], bytes((tag,))), **plain}
    if set(at) == {"", ".format"}:
        for tag, more in ((0, (".dtype", ".shape")), (6, (".scales",)), (3, (".quant_scale",)), (4, (".bits", ".group_size"))):
            yield f"as tag {tag}", {".format": ("U8", [], bytes((tag,))), **{suffix: ("U32", [], bytes(4)) for suffix in more}}


def _scales(at: dict[str, Any]) -> Iterator[tuple[str, Changed]]:
    """FP8: one scale told three times."""
    names = (".dequant_w_scale", ".dequant_x_scale", ".quant_scale")
    for scale in (
        1.0,
        2.0**-20,
        3.0,
        448.0,
        2.0**100,
        -1.0,
        -0.125,
        0.0,
        -0.0,
        1e-45,
        1e-39,
        3e38,
        float("inf"),
        float("-inf"),
        float("nan"),
    ):
        inverse = 1 / scale if scale and abs(1 / scale) < 3.4e38 else float("inf") if not scale else float("nan")
        three = (scale, scale, inverse)
        yield f"every scale {scale}", {name: ("F32", [], f32(value)) for name, value in zip(names, three, strict=True)}
        for left in range(3):
            changed = {name: ("F32", [], f32(three[index])) for index, name in enumerate(names) if index != left}
            yield f"every scale {scale} but {names[left]}", changed
    for rank in ([1], [1, 1], [at[""][1][0], 1], at[""][1]):
        count = 1
        for size in rank:
            count *= size
        for name in names:
            yield f"{name} for {rank}", {name: ("F32", rank, at[name][2] * count)}
        yield f"all for {rank}", {name: ("F32", rank, at[name][2] * count) for name in names}


def _regrouped(at: dict[str, Any]) -> Iterator[tuple[str, Changed]]:
    """AFQ: factors for half or twice as many groups, with the number to match and without."""
    dtype, shape, _ = at[".scales"]
    width = 4 if dtype == "F32" else 2
    for change in (0.5, 2, 3):
        groups = int(shape[-1] * change)
        count = groups
        for size in shape[:-1]:
            count *= size
        for names in ((".scales",), (".biases",), (".scales", ".biases")):
            changed = {name: (dtype, [*shape[:-1], groups], (at[name][2] * 4)[: count * width]) for name in names}
            yield f"{' and '.join(names)} of {groups} groups", changed
