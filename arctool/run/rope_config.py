"""The rotary embedding's numbers, out of the several ways in which a `config.json` may spell them.

What a missing field means is what transformers takes it for (`modeling_rope_utils`); what it would ignore with a warning is refused.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from arctool.run.fields import Fields, short

# More positions than any real model has; keeps a lying config from asking for the machine's whole memory.
MAX_POSITIONS = 1 << 26

ORIGINAL = "original_max_position_embeddings"

NUMBERS: Mapping[str, tuple[str, ...]] = {
    "default": (),
    "linear": ("factor",),
    "dynamic": ("factor",),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor", ORIGINAL),
    "yarn": ("factor", ORIGINAL, "attention_factor", "mscale", "mscale_all_dim", "beta_fast", "beta_slow", "truncate"),
}
"""rope_type → the fields that it is made of. One that is for another type says nothing here, as in transformers."""

SAYS_NOTHING = (
    "rope_type",
    "type",
    "rope_theta",
    "partial_rotary_factor",
    "finetuned",
    *(name for names in NUMBERS.values() for name in names),
)
"""Fields that may stand beside those, `finetuned` being what the authors of YaRN wrote into theirs; any other may change the angles."""

# What the paper (YaRN, arXiv 2309.00071, 3.2) recommends for Llama: rotations within the original context from which on, and up to which.
BETA_FAST, BETA_SLOW = 32.0, 1.0


@dataclass(frozen=True)
class RopeConfig:
    """`theta`, and `scaling`: None, or a checked mapping with `rope_type` "linear", "dynamic", "llama3" or "yarn" and its numbers.

    A yarn mapping is complete: what the file leaves out has been filled in, and `attention_factor` is the one that holds.
    """

    theta: float
    scaling: Mapping[str, Any] | None

    @property
    def attention_factor(self) -> float:
        """What cos and sin are multiplied by: the softmax's temperature of YaRN, half of it at the queries and half at the keys."""
        return 1.0 if self.scaling is None else float(self.scaling.get("attention_factor", 1.0))

    @property
    def no_further(self) -> str:
        """Why no context beyond `max_position_embeddings` can be served by design, empty where there is no such reason.

        Dynamic NTK scaling takes its frequencies from the current length once that passes the original one, so every token beyond it
        would turn all keys before it anew: keys that are cached turned have the wrong angle. (transformers serves such a context with
        keys of many frequencies, and its logits then depend on how the prompt was cut.) Up to that length it is no scaling at all.
        """
        dynamic = self.scaling is not None and self.scaling["rope_type"] == "dynamic"
        return "beyond it dynamic rope scaling turns the keys that are already cached by other angles" if dynamic else ""


def read_rope(fields: Fields, default_theta: float = 10000.0) -> RopeConfig:
    """transformers 5 writes `rope_parameters`, 4 writes `rope_theta` and `rope_scaling`; both may stand if they agree.

    `default_theta`: the architecture's, where the file has none.
    """
    parameters, older = (_mapping(fields, name) for name in ("rope_parameters", "rope_scaling"))
    if parameters and older and not _agree(parameters, older):
        raise fields.error("rope_scaling", f"disagrees with rope_parameters: {short(dict(older))} against {short(dict(parameters))}")
    name = "rope_parameters" if parameters else "rope_scaling"
    merged = {**older, **parameters}
    inner, outer = merged.get("rope_theta"), fields.get("rope_theta")
    if inner is not None and outer is not None and inner != outer:
        raise fields.error("rope_theta", f"disagrees with {name}.rope_theta: {short(outer)} against {short(inner)}")
    stated = outer if inner is None else inner
    theta = fields.check_positive("rope_theta", default_theta if stated is None else stated)
    if any(f not in (None, 1, 1.0) for f in (merged.get("partial_rotary_factor"), fields.get("partial_rotary_factor"))):
        raise fields.error("partial_rotary_factor", "only 1.0 is supported: every dimension of a head is rotated")
    scaling = _scaling(fields, name, merged)
    if scaling is not None and scaling["rope_type"] == "yarn" and theta <= 1:
        raise fields.error("rope_theta", f"expected more than 1 for rope_type 'yarn', found {theta:g}")
    return RopeConfig(theta, scaling)


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

    if not isinstance(kind, str) or kind not in NUMBERS:
        known = ", ".join(NUMBERS)
        raise fields.error(f"{name}.rope_type", f"expected one of {known}, found {short(kind)}; other scalings are not supported yet")
    strange = [key for key, value in merged.items() if key not in SAYS_NOTHING and value is not None]
    if strange:
        raise fields.error(f"{name}.{short(strange[0])[1:-1]}", f"the meaning of this field for rope_type {kind!r} is not known here")
    if kind == "default":
        return None
    if kind in ("linear", "dynamic"):
        return {"rope_type": kind, "factor": number("factor")}
    original = _original_context(fields, name, merged)
    if kind == "yarn":
        return _yarn(fields, name, merged, original)
    scaling = {**{key: number(key) for key in NUMBERS["llama3"] if key != ORIGINAL}, ORIGINAL: original}
    if scaling["low_freq_factor"] >= scaling["high_freq_factor"]:
        low, high = scaling["low_freq_factor"], scaling["high_freq_factor"]
        raise fields.error(f"{name}.low_freq_factor", f"expected less than high_freq_factor = {high}, found {low}")
    return {"rope_type": "llama3", **scaling}


def _original_context(fields: Fields, name: str, merged: Mapping[str, Any]) -> int:
    """The length that the model was first trained on: in the mapping or beside it, else `max_position_embeddings`."""
    inner, outer = merged.get(ORIGINAL), fields.get(ORIGINAL)
    if inner is not None and outer is not None and inner != outer:
        raise fields.error(ORIGINAL, f"disagrees with {name}.{ORIGINAL}: {short(outer)} against {short(inner)}")
    if inner is not None or outer is not None:
        return fields.check_count(f"{name}.{ORIGINAL}", outer if inner is None else inner, MAX_POSITIONS)
    return fields.count("max_position_embeddings", MAX_POSITIONS)


def _yarn(fields: Fields, name: str, merged: Mapping[str, Any], original: int) -> Mapping[str, Any]:
    """The numbers of YaRN, complete."""

    def number(key: str, default: float | None = None) -> float:
        value = merged.get(key)
        return default if value is None and default is not None else fields.check_positive(f"{name}.{key}", value)

    if "factor" not in merged:
        raise fields.error(f"{name}.factor", "missing; rope_type 'yarn' needs it (null: max_position_embeddings over the original ones)")
    whole = fields.count("max_position_embeddings", MAX_POSITIONS)
    factor = number("factor", whole / original)
    fast, slow = number("beta_fast", BETA_FAST), number("beta_slow", BETA_SLOW)
    if fast < slow:
        raise fields.error(f"{name}.beta_fast", f"expected at least beta_slow = {slow:g}, found {fast:g}")
    truncate = merged.get("truncate", True)
    if not isinstance(truncate, bool):
        raise fields.error(f"{name}.truncate", f"expected true or false, found {short(truncate)}")
    return {
        "rope_type": "yarn",
        "factor": factor,
        ORIGINAL: original,
        "attention_factor": number("attention_factor", _yarn_attention(fields, name, merged, factor)),
        "beta_fast": fast,
        "beta_slow": slow,
        "truncate": truncate,
    }


def _yarn_attention(fields: Fields, name: str, merged: Mapping[str, Any], factor: float) -> float:
    """The factor of cos and sin where the file gives none: 0.1 ln(factor) + 1 (equation 22), or a quotient of two such with weights.

    The quotient is DeepSeek's; it needs both weights, and one that is 0 counts as none.
    """
    weights = []
    for key in ("mscale", "mscale_all_dim"):
        value = merged.get(key)
        weights.append(
            0.0 if value is None or (value == 0 and not isinstance(value, bool)) else fields.check_positive(f"{name}.{key}", value)
        )

    def temperature(weight: float) -> float:
        return 1.0 if factor <= 1 else 0.1 * weight * math.log(factor) + 1.0

    return temperature(weights[0]) / temperature(weights[1]) if all(weights) else temperature(1.0)
