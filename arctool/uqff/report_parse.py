"""Reading `uqff_report.json`: every known field must have its type, or the report is refused by the field's name."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from arctool.errors import FormatError
from arctool.uqff.header import parse_json
from arctool.uqff.report import BakeInfo, Hashes, LayerDetails, LayerRecord, Output, Quality, Report


def parse_report(data: bytes, where: str) -> Report:
    """The report in `data`. Unknown fields are ignored, as upstream does; known ones must have their types (FormatError)."""
    top = parse_json(data, where)
    schema = _get(top, "schema", int, where)
    if schema != 1:
        raise FormatError(f"{where}: schema {schema} is unknown; this version reads schema 1")
    made = _get(top, "generated_by", dict, where)
    extra = _get(top, "arctool", dict | None, where)
    details = {} if extra is None else _get(extra, "layers", dict, f"{where}: arctool")
    items = _get(top, "outputs", list, where)
    outputs = tuple(_parse_output(item, details, f"{where}: outputs[{i}]") for i, item in enumerate(items))
    if not outputs:
        raise FormatError(f"{where}: outputs is empty; the report names no shard")
    base_model = _get(top, "base_model", str | None, where)
    return Report(
        tool=_get(made, "tool", str, f"{where}: generated_by"),
        tool_version=_get(made, "arctool_version", str | None, f"{where}: generated_by"),
        uqff_version=_get(top, "uqff_version", str, where),
        outputs=outputs,
        base_model=base_model,
        bake=None if extra is None else _parse_bake(extra, base_model, f"{where}: arctool"),
        hashes=None if extra is None else _parse_hashes(extra, f"{where}: arctool"),
        quality=None if extra is None else _parse_quality(extra, f"{where}: arctool"),
    )


def _get(value: Mapping[str, Any], key: str, kind: Any, where: str) -> Any:
    """`value[key]`, which must be of `kind`; a bool is no number here, and no integer has more than 64 bits."""
    found = value.get(key)
    if isinstance(found, int) and abs(found) >= 1 << 64:
        raise FormatError(f"{where}: {key}: expected an integer of at most 64 bits, found one of {found.bit_length()}")
    if not isinstance(found, kind) or isinstance(found, bool):
        name = getattr(kind, "__name__", str(kind))
        shown = "nothing" if key not in value else str(found)[:60]
        raise FormatError(f"{where}: {key}: expected {name}, found {shown}")
    return found


def _count(value: Mapping[str, Any], key: str, where: str) -> int:
    found: int = _get(value, key, int, where)
    if found < 0:
        raise FormatError(f"{where}: {key}: expected a count, found {found}")
    return found


def _number(value: Mapping[str, Any], key: str, where: str) -> float | None:
    found: float | None = _get(value, key, float | int | None, where)
    if found is not None and not (math.isfinite(found) and found >= 0):
        raise FormatError(f"{where}: {key}: expected a number from 0 up, found {found}")
    return found


def _parse_output(item: Any, details: Mapping[str, Any], where: str) -> Output:
    if not isinstance(item, dict):
        raise FormatError(f"{where}: expected an object, found {str(item)[:60]}")
    shards = _get(item, "shards", list, where)
    if not shards or not all(isinstance(name, str) for name in shards) or len(set(shards)) != len(shards):
        raise FormatError(f"{where}: shards: expected a list of different file names, found {str(shards)[:80]}")
    counts = _get(item, "actual_counts", dict, where)
    reasons = {}
    for row in _get(item, "fallbacks", list | None, where) or []:
        place = f"{where}: fallbacks"
        if not isinstance(row, dict):
            raise FormatError(f"{place}: expected objects, found {str(row)[:60]}")
        reasons[_get(row, "module", str, place)] = _get(row, "reason", str | None, place) or "not stated"
    rows = _get(item, "layer_details", list | None, where) or []
    layers = tuple(_parse_layer(row, details, reasons, f"{where}: layer_details[{i}]") for i, row in enumerate(rows))
    return Output(
        quant=_get(item, "quant", str, where),
        shards=tuple(shards),
        layers=layers,
        layer_count=_count(item, "layers", where),
        actual_counts={name: _count(counts, name, f"{where}: actual_counts") for name in counts},
        fallback_count=_count(item, "fallback_count", where),
    )


def _parse_layer(row: Any, details: Mapping[str, Any], reasons: Mapping[str, str], where: str) -> LayerRecord:
    if not isinstance(row, dict):
        raise FormatError(f"{where}: expected an object, found {str(row)[:60]}")
    module = _get(row, "module", str, where)
    shape = _get(row, "shape", list, where)
    if len(shape) > 8 or not all(type(size) is int and 0 < size < 1 << 63 for size in shape):
        raise FormatError(f"{where}: shape: expected at most 8 positive sizes, found {str(shape)[:60]}")
    own = _get(details, module, dict | None, f"{where}: arctool: layers") or {}
    return LayerRecord(
        module=module,
        shape=tuple(shape),
        stored=_get(row, "stored", str, where),
        nbytes=_get(own, "bytes", int | None, where),
        bits_per_weight=_number(own, "bits_per_weight", where),
        details=LayerDetails(
            default_target=_get(row, "default_target", str | None, where),
            resolved_target=_get(row, "resolved_target", str | None, where),
            fallback_reason=reasons.get(module),
            relative_error=_number(own, "relative_error", where),
            proxy_error=_number(own, "proxy_error", where),
            dropped_rows=_count(own, "dropped_rows", where) if "dropped_rows" in own else 0,
            note=_get(own, "note", str | None, where),
        ),
    )


def _parse_bake(extra: Mapping[str, Any], base_model: str | None, where: str) -> BakeInfo:
    source = _get(extra, "source", dict, where)
    tables = _get(extra, "tables", dict | None, where) or {}
    return BakeInfo(
        rung=_get(extra, "rung", str, where),
        seed=_get(extra, "seed", int, where),
        recipe=_get(extra, "recipe", dict, where),
        base_model=base_model,
        fingerprint=_get(source, "fingerprint", str | None, f"{where}: source"),
        licence=_get(source, "licence", str | None, f"{where}: source"),
        licence_name=_get(source, "licence_name", str | None, f"{where}: source"),
        licence_link=_get(source, "licence_link", str | None, f"{where}: source"),
        algorithm=_get(extra, "algorithm", str | None, where),
        tables={name: _get(tables, name, str, f"{where}: tables") for name in tables},
        calibration=_get(extra, "calibration", dict | None, where),
        budget=_get(extra, "budget", dict | None, where),
    )


def _parse_quality(extra: Mapping[str, Any], where: str) -> Quality | None:
    found, where = _get(extra, "quality", dict | None, where), f"{where}: quality"
    if found is None:
        return None
    quality = Quality(
        text=_get(found, "text", str, where),
        text_sha256=_get(found, "text_sha256", str, where),
        tokens_sha256=_get(found, "tokens_sha256", str, where),
        window=_count(found, "window", where),
        tokens=_count(found, "tokens", where),
        predicted=_count(found, "predicted", where),
        perplexity=_figure(found, "perplexity", where),
        base_perplexity=_figure(found, "base_perplexity", where),
        kl=_figure(found, "kl", where),
        kl_p99=_figure(found, "kl_p99", where),
        same_top1=_figure(found, "same_top1", where),
    )
    if quality.same_top1 > 1:
        raise FormatError(f"{where}: same_top1: expected a share of at most 1, found {quality.same_top1}")
    return quality


def _figure(value: Mapping[str, Any], key: str, where: str) -> float:
    found = _number(value, key, where)
    if found is None:
        raise FormatError(f"{where}: {key}: expected a number from 0 up, found nothing")
    return float(found)


def _parse_hashes(extra: Mapping[str, Any], where: str) -> Hashes:
    value, where = _get(extra, "sha256", dict, where), f"{where}: sha256"
    parts = {}
    for part in ("entries", "headers", "files"):
        found = _get(value, part, dict, where)
        for name, digest in found.items():
            if not isinstance(digest, str) or len(digest) != 64:
                raise FormatError(f"{where}: {part}: {name!r}: expected 64 hex digits, found {str(digest)[:60]}")
        parts[part] = found
    return Hashes(**parts)
