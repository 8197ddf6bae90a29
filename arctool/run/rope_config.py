"""The rotary embedding's numbers, out of the several ways in which a `config.json` may spell them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from arctool.run.fields import Fields, short

LLAMA3_FIELDS = ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings")


@dataclass(frozen=True)
class RopeConfig:
    """`theta`, and `scaling`: None, or a checked mapping with `rope_type` "linear" or "llama3" and its numbers."""

    theta: float
    scaling: Mapping[str, Any] | None


def read_rope(fields: Fields) -> RopeConfig:
    """transformers 5 writes `rope_parameters`, 4 writes `rope_theta` and `rope_scaling`; both may stand if they agree."""
    parameters, scaling = (_mapping(fields, name) for name in ("rope_parameters", "rope_scaling"))
    if parameters and scaling and not _agree(parameters, scaling):
        raise fields.error("rope_scaling", f"disagrees with rope_parameters: {short(dict(scaling))} against {short(dict(parameters))}")
    name = "rope_parameters" if parameters else "rope_scaling"
    merged = {**scaling, **parameters}
    inner, outer = merged.get("rope_theta"), fields.get("rope_theta")
    if inner is not None and outer is not None and inner != outer:
        raise fields.error("rope_theta", f"disagrees with {name}.rope_theta: {short(outer)} against {short(inner)}")
    # 10000 is the paper's base (RoFormer) and what configs that predate the field mean.
    stated = outer if inner is None else inner
    theta = fields.check_positive("rope_theta", 10000.0 if stated is None else stated)
    if any(f not in (None, 1, 1.0) for f in (merged.get("partial_rotary_factor"), fields.get("partial_rotary_factor"))):
        raise fields.error("partial_rotary_factor", "only 1.0 is supported: every dimension of a head is rotated")
    return RopeConfig(theta, _scaling(fields, name, merged))


def _mapping(fields: Fields, field: str) -> Mapping[str, Any]:
    value = fields.get(field)
    if value is None:
        return {}
    if not isinstance(value, Mapping) or any(isinstance(inner, Mapping) for inner in value.values()):
        raise fields.error(field, f"expected one flat mapping for all layers, found {short(value)}")
    return value


def _agree(a: Mapping[str, Any], b: Mapping[str, Any]) -> bool:
    def normal(m: Mapping[str, Any]) -> dict[str, Any]:
        plain = {k: v for k, v in m.items() if k not in ("type", "rope_type", "rope_theta")}
        return {**plain, "rope_type": m.get("rope_type", m.get("type", "default"))}

    return normal(a) == normal(b)


def _scaling(fields: Fields, name: str, merged: Mapping[str, Any]) -> Mapping[str, Any] | None:
    kinds = {merged[key] for key in ("rope_type", "type") if isinstance(merged.get(key), str)}
    if len(kinds) > 1:
        raise fields.error(f"{name}.rope_type", f"disagrees with {name}.type: {short(sorted(kinds))}")
    kind = next(iter(kinds), merged.get("rope_type", merged.get("type", "default")))

    def number(key: str) -> float:
        if merged.get(key) is None:
            raise fields.error(f"{name}.{key}", f"missing; rope_type {kind!r} needs it")
        return fields.check_positive(f"{name}.{key}", merged[key])

    if kind == "default":
        return None
    if kind == "linear":
        return {"rope_type": "linear", "factor": number("factor")}
    if kind == "llama3":
        scaling = {key: number(key) for key in LLAMA3_FIELDS}
        if scaling["low_freq_factor"] >= scaling["high_freq_factor"]:
            low, high = scaling["low_freq_factor"], scaling["high_freq_factor"]
            raise fields.error(f"{name}.low_freq_factor", f"expected less than high_freq_factor = {high}, found {low}")
        return {"rope_type": "llama3", **scaling}
    raise fields.error(
        f"{name}.rope_type", f"expected default, linear or llama3, found {short(kind)}; other scalings are not supported yet"
    )
