"""Tags 3, 4, 6: codes under scales in entries of their own, as mistral.rs lays them out: FP8 (read and written), AFQ and MXFP4 (read)."""

from __future__ import annotations

from typing import Final

import numpy as np

from arctool.errors import FormatError
from arctool.quant.afq import AfqTensor
from arctool.quant.fp8 import Fp8Tensor
from arctool.quant.mxfp4 import Mxfp4Tensor
from arctool.uqff.entries import Entry, check_form, entry_of, expect, scalar_entry, view
from arctool.uqff.wire.family import Family, Parts, TablePool

FP8: Final = 3
AFQ: Final = 4
MXFP4: Final = 6

F8_E4M3: Final = 9
"""mistral.rs's number of the type, in the entry `.dtype`."""

RECIPROCAL: Final = 2.0**-7
"""By how much quant_scale · dequant_w_scale may miss 1: mistral.rs rounds the former to bf16."""


def encode_fp8(base: str, weight: Fp8Tensor) -> list[Entry]:
    """The entries of a scalar FP8 layer. One scale serves weights and activations, as upstream writes it."""
    scale = np.float32(weight.scale)
    with np.errstate(over="ignore"):
        inverse = np.float32(1) / scale
    if not np.isfinite(inverse):
        raise FormatError(f"{base}.quant_scale: the scale {scale} has no reciprocal in f32; store the layer as bf16")
    return [
        entry_of(base, "F8_E4M3", weight.codes),
        scalar_entry(f"{base}.format", "U8", FP8),
        scalar_entry(f"{base}.dtype", "U32", F8_E4M3),
        entry_of(f"{base}.dequant_w_scale", "F32", np.array(scale)),
        entry_of(f"{base}.dequant_x_scale", "F32", np.array(scale)),
        entry_of(f"{base}.quant_scale", "F32", np.array(inverse)),
    ]


def decode_fp8(parts: Parts, tables: TablePool, where: str) -> Fp8Tensor:
    """The weight; the codes stay a view."""
    kind = int(expect(parts["dtype"], "U32", (), where))
    if kind != F8_E4M3:
        raise FormatError(f"{where}.dtype: {kind} is not e4m3 ({F8_E4M3}), the only FP8 that is read")
    shape = parts[""].shape
    if len(shape) != 2 or 0 in shape:
        raise FormatError(f"{where}: an FP8 weight is [out, in], found {list(shape)}")
    codes = expect(parts[""], "F8_E4M3", shape, where)
    scale, inputs, inverse = (
        np.float32(expect(parts[name], "F32", (), where)) for name in ("dequant_w_scale", "dequant_x_scale", "quant_scale")
    )
    with np.errstate(over="ignore", invalid="ignore"):
        if scale != inputs or not abs(float(scale) * float(inverse) - 1) <= RECIPROCAL:
            raise FormatError(
                f"{where}: dequant_w_scale {scale}, dequant_x_scale {inputs} and quant_scale {inverse} contradict each other; "
                "expected two equal numbers and their reciprocal"
            )
    return Fp8Tensor(codes, scale)


def decode_afq(parts: Parts, tables: TablePool, where: str) -> AfqTensor:
    """The weight; everything stays a view."""
    bits = int(expect(parts["bits"], "U8", (), where))
    group = int(expect(parts["group_size"], "U8", (), where))
    entry = parts[""]
    _check_rank(entry, where)
    check_form(entry, "U32", entry.shape, where)
    factors = []
    for name in ("scales", "biases"):
        if parts[name].dtype not in ("F32", "F16", "BF16"):
            raise FormatError(f"{where}.{name}: expected F32, F16 or BF16, found {parts[name].dtype}")
        factors.append(view(parts[name], where))
    return AfqTensor(bits, group, entry.raw.reshape(*entry.shape[:-1], 4 * entry.shape[-1]), *factors)


def decode_mxfp4(parts: Parts, tables: TablePool, where: str) -> Mxfp4Tensor:
    """The weight; codes and scales stay views."""
    entry = parts[""]
    _check_rank(entry, where)
    scales = parts["scales"]
    return Mxfp4Tensor(expect(entry, "U8", entry.shape, where), expect(scales, "U8", scales.shape, where))


def _check_rank(entry: Entry, where: str) -> None:
    if len(entry.shape) not in (2, 3) or 0 in entry.shape:
        raise FormatError(f"{where}: expected codes [out, …] or [experts, out, …], found {list(entry.shape)}")


FAMILY_FP8: Final = Family(
    "FP8", frozenset(("", "format", "dtype", "dequant_w_scale", "dequant_x_scale", "quant_scale")), frozenset(), decode_fp8
)
FAMILY_AFQ: Final = Family("AFQ", frozenset(("", "format", "bits", "group_size", "scales", "biases")), frozenset(), decode_afq)
FAMILY_MXFP4: Final = Family("MXFP4", frozenset(("", "format", "scales")), frozenset(), decode_mxfp4)
