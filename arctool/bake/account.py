"""How a budget of bits was spent and why, as the report of an artifact keeps it and as people are shown it. Plain data; decides nothing."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from arctool.errors import FormatError


@dataclass(frozen=True)
class GroupSpent:
    """Layers that were measured together: their `weights`, what they cost alone in the uniform bake (`kl`, nats a token), what they get."""

    layers: tuple[str, ...]
    weights: int
    kl: float
    rung: str


@dataclass(frozen=True)
class Tried:
    """A bake that was checked: stored bits a weight of the linear layers; `kl` from the unquantised model on the checking text, None where
    it was not read, or predicted no numbers."""

    bits_per_weight: float
    kl: float | None


@dataclass(frozen=True)
class Account:
    """`question`: SHA-256 of all that the answer depends on; `asked`: bits a weight; `chosen`: "mixed" or "uniform", the better one of the
    two; `rung`: of the uniform bake; `text_sha256`: of the tokens that were read, some to measure and others to check
    (`checked_tokens`: 0 where both bakes are the same)."""

    algorithm: str
    question: str
    asked: float
    chosen: str
    rung: str
    uniform: Tried
    mixed: Tried
    text_sha256: str
    measured_tokens: int
    checked_tokens: int
    groups: tuple[GroupSpent, ...]

    @property
    def reached(self) -> float:
        """Bits a weight of what was chosen."""
        return (self.mixed if self.chosen == "mixed" else self.uniform).bits_per_weight

    def to_json(self) -> dict[str, Any]:
        """As the report has it; `parse_account` gives it back."""
        return {**asdict(self), "reached": self.reached, "groups": [{**asdict(g), "layers": list(g.layers)} for g in self.groups]}


def parse_account(value: Mapping[str, Any], where: str) -> Account:
    """The account in a report's `budget`. Raises FormatError, by field, for anything else."""
    tried = {}
    for name in ("uniform", "mixed"):
        one = _field(value, name, dict, where)
        kl = None if one.get("kl") is None else _number(one, "kl", f"{where}: {name}")
        tried[name] = Tried(_number(one, "bits_per_weight", f"{where}: {name}"), kl)
    chosen = _field(value, "chosen", str, where)
    if chosen not in tried:
        raise FormatError(f"{where}: chosen: expected uniform or mixed, found {chosen[:40]!r}")
    return Account(
        algorithm=_field(value, "algorithm", str, where),
        question=_field(value, "question", str, where),
        asked=_number(value, "asked", where),
        chosen=chosen,
        rung=_field(value, "rung", str, where),
        uniform=tried["uniform"],
        mixed=tried["mixed"],
        text_sha256=_field(value, "text_sha256", str, where),
        measured_tokens=_field(value, "measured_tokens", int, where),
        checked_tokens=_field(value, "checked_tokens", int, where),
        groups=tuple(_group(item, f"{where}: groups[{i}]") for i, item in enumerate(_field(value, "groups", list, where))),
    )


def _group(item: Any, where: str) -> GroupSpent:
    if not isinstance(item, dict):
        raise FormatError(f"{where}: expected an object, found {str(item)[:60]}")
    layers = _field(item, "layers", list, where)
    if not layers or not all(isinstance(key, str) for key in layers):
        raise FormatError(f"{where}: layers: expected names of layers, found {str(layers)[:60]}")
    weights = _field(item, "weights", int, where)
    return GroupSpent(tuple(layers), weights, _number(item, "kl", where), _field(item, "rung", str, where))


def _field(value: Mapping[str, Any], key: str, kind: type, where: str) -> Any:
    found = value.get(key)
    if not isinstance(found, kind) or isinstance(found, bool):
        raise FormatError(f"{where}: {key}: expected {kind.__name__}, found {str(found)[:60]}")
    return found


def _number(value: Mapping[str, Any], key: str, where: str) -> float:
    found = value.get(key)
    if not isinstance(found, float | int) or isinstance(found, bool) or not math.isfinite(found):
        raise FormatError(f"{where}: {key}: expected a number, found {str(found)[:60]}")
    return float(found)
