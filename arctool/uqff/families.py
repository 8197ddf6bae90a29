"""Families: which entries a layer of the file has, by format tag, and the weight that they mean.

The one place where wire tags meet quant modules. A family owns its exact set of entries (`wire/`): a missing, additional, mistyped or
mis-sized one is refused by name before anything is decoded. Knows no files: tables come from the caller by digest.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Final, TypeVar

import numpy as np
from numpy.typing import NDArray

from arctool.errors import FormatError
from arctool.quant.afq import AfqTensor
from arctool.quant.bf16 import widen
from arctool.quant.fp8 import Fp8Tensor
from arctool.quant.tensor import DenseTensor, GgmlTensor, TrellisTensor, Weight
from arctool.uqff.entries import MAX_RANK, Entry, check_form, check_key, entry_of, expect
from arctool.uqff.wire import ggml, plain, scaled, trellis
from arctool.uqff.wire.family import Family, Parts, TablePool

FAMILIES: Final[Mapping[int, Family]] = {
    ggml.TAG: ggml.FAMILY,
    plain.TAG: plain.FAMILY,
    scaled.FP8: scaled.FAMILY_FP8,
    scaled.AFQ: scaled.FAMILY_AFQ,
    scaled.MXFP4: scaled.FAMILY_MXFP4,
    trellis.TAG: trellis.FAMILY,
}
"""Every tag that this version reads. Tags up to 63 are mistral.rs's; ours start at 64."""

_FOREIGN_TAGS: Final = {2: "HQQ", 5: "F8Q8"}

AnyWeight = TypeVar("AnyWeight", bound=Weight)

BIAS_DTYPES: Final = ("F32", "F16", "BF16")
"""What a bias may be: mistral.rs writes the type that it ran in. Ours are F32, which its CPU engine needs."""


def encode(key: str, weight: Weight, bias: NDArray[np.float32] | None = None) -> list[Entry]:
    """The entries of one layer, tables excluded (`wire.tables`). `bias`: f32 [out]. Raises FormatError, GeometryError."""
    check_key(key)
    base = f"{key}.weight"
    if not 1 <= len(weight.shape) <= MAX_RANK or 0 in weight.shape:
        raise FormatError(f"{base}: a layer has 1 to {MAX_RANK} dimensions and at least one weight, found shape {list(weight.shape)}")
    if isinstance(weight, DenseTensor):
        weight.check_values(base)
    else:
        weight.check(base)
    entries = _encode_weight(base, weight)
    if bias is not None:
        checked_bias(bias, weight.shape, f"{key}.bias")
        if isinstance(weight, Fp8Tensor):
            raise FormatError(f"{key}.bias: mistral.rs cannot add a bias to an FP8 layer; store the layer as q8_0 or bf16")
        entries.append(entry_of(f"{key}.bias", "F32", bias))
    return entries


def _encode_weight(base: str, weight: Weight) -> list[Entry]:
    if isinstance(weight, TrellisTensor):
        return trellis.encode(base, weight)
    if isinstance(weight, DenseTensor | GgmlTensor):
        return ggml.encode(base, weight)
    if isinstance(weight, Fp8Tensor):
        return scaled.encode_fp8(base, weight)
    raise FormatError(f"{base}: {weight.label} is read, not written; decode the layer and choose another type")


def decode(key: str, entries: Mapping[str, Entry], tables: TablePool, where: str = "artifact", *, values: bool = True) -> Weight:
    """The weight of layer `key`. `entries` by full name: `<key>.weight…` and perhaps `<key>.bias`; arrays may be views of them.

    `values`: also look at every scale of a packed weight and at the padding of its streams; without it no data is read but the small
    entries that say what the others are. Dense values are never looked at here: they may be mapped and never used.
    Raises FormatError for a family or entry that is not readable, GeometryError where lengths and shapes disagree.
    """
    base = f"{key}.weight"
    parts = {name[len(base) + 1 :]: entry for name, entry in entries.items() if name == base or name.startswith(f"{base}.")}
    strange = [name for name in entries if name != f"{key}.bias" and not (name == base or name.startswith(f"{base}."))]
    if strange:
        raise FormatError(f"{where}: {strange[0]} does not belong to layer {key}")
    family = family_of(key, parts, where)
    for suffix in sorted(family.required - set(parts)):
        name = f"{base}.{suffix}" if suffix else base
        raise FormatError(f"{where}: {name} is missing: {family.name} layers need it; download or bake the artifact again")
    for suffix in sorted(set(parts) - family.required - family.optional):
        raise FormatError(f"{where}: {base}.{suffix} is not an entry of {family.name} layers; it may need a newer arctool")
    weight = family.decode(parts, tables, f"{where}: {base}")
    if not isinstance(weight, DenseTensor):
        weight.check_form(f"{where}: {base}")
        if values:
            weight.check_values(f"{where}: {base}")
    return aligned(weight) if values else weight


def aligned(weight: AnyWeight) -> AnyWeight:
    """The weight with every array where a kernel can read it: what lies at an odd address of a file is copied."""
    if isinstance(weight, DenseTensor):
        return weight if weight.data.flags.aligned else replace(weight, data=weight.data.copy())
    if isinstance(weight, AfqTensor):
        return replace(weight, scales=np.require(weight.scales, requirements="A"), offsets=np.require(weight.offsets, requirements="A"))
    return weight


def decode_bias(key: str, entries: Mapping[str, Entry], shape: tuple[int, ...], where: str) -> NDArray[np.float32] | None:
    """The bias f32 [out] of layer `key` ([experts, out] of a stack), None where it has none; `shape` is the weight's."""
    if bias_shape(key, entries, shape, where) is None:
        return None
    entry = entries[f"{key}.bias"]
    bias: NDArray[np.float32] = widen(expect(entry, entry.dtype, shape[:-1], where))
    checked_bias(bias, shape, f"{where}: {key}.bias")
    return bias


def bias_shape(key: str, entries: Mapping[str, Entry], shape: tuple[int, ...], where: str) -> tuple[int, ...] | None:
    """The shape of the bias of layer `key`, None where it has none; no value is looked at. Raises FormatError for one that does not fit."""
    entry = entries.get(f"{key}.bias")
    if entry is None:
        return None
    if entry.dtype not in BIAS_DTYPES:
        raise FormatError(f"{where}: {entry.name}: a bias is {', '.join(BIAS_DTYPES)}, found {entry.dtype}; it cannot be added to anything")
    if len(shape) < 2:
        raise FormatError(f"{where}: {entry.name}: a weight {list(shape)} takes no bias")
    check_form(entry, entry.dtype, shape[:-1], where)
    return entry.shape


def family_of(key: str, parts: Parts, where: str) -> Family:
    """The family that the format tag names. `parts` by suffix. Raises FormatError for one we do not read."""
    name = f"{key}.weight.format"
    if "format" not in parts:
        raise FormatError(f"{where}: {name} is missing: nothing says how the layer is stored")
    tag = int(expect(parts["format"], "U8", (), where))
    if tag in _FOREIGN_TAGS:
        raise FormatError(f"{where}: {name}: {_FOREIGN_TAGS[tag]} (tag {tag}) is not readable by this version")
    if tag not in FAMILIES:
        raise FormatError(f"{where}: {name}: tag {tag} is unknown to this version; known: {', '.join(map(str, FAMILIES))}")
    return FAMILIES[tag]


def checked_bias(bias: NDArray[np.float32], shape: tuple[int, ...], where: str) -> None:
    """Raise FormatError unless `bias` is a finite f32 [out] for a weight [out, in], or [experts, out] for a stack of them."""
    if len(shape) < 2 or bias.dtype != np.float32 or bias.shape != shape[:-1]:
        raise FormatError(f"{where}: a weight {list(shape)} takes an f32 bias {list(shape[:-1])}, found {bias.dtype} {list(bias.shape)}")
    if not np.isfinite(bias).all():
        raise FormatError(f"{where}: value {int(np.flatnonzero(~np.isfinite(bias))[0])} is not finite")
