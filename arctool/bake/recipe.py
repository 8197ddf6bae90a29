"""Which tensor gets which rung: a default, layer ranges and name rules read from a YAML file, applied as a pure function.

    default: {isq: qtip3}          # else the rung of the command line
    fallback: bf16                 # for a layer whose width the rung cannot take: a rung, or bf16 (which is the default)
    0-8: {isq: qtip4}              # layers 0 to 7: as in a mistral.rs topology the end is exclusive
    31: {isq: bf16}
    rules:
      - {match: "*.v_proj", layers: "0-4", isq: qtip4b}
      - {match: "*.down_proj", skip: true}

Order: default, then ranges, then rules; where several apply the later in the file wins. (mistral.rs lets the range with the
higher end win; a file whose ranges do not overlap means the same to both.) Only linear layers take a rung: embeddings, head and
norms stay bf16. Knows tensors by name, role and shape, not their values.
"""

from __future__ import annotations

import re
import reprlib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

import yaml

from arctool.errors import UsageError
from arctool.quant.codebooks import rung
from arctool.run.models.spec import Role, TensorSpec

KEEP = "bf16"
"""The choice that quantises nothing."""

RULE_KEYS = ("match", "layers", "isq", "skip")
MAX_FILE_BYTES = 1 << 20
MAX_LAYER = 100_000


@dataclass(frozen=True)
class Choice:
    """What a tensor gets: a rung's name or `bf16`, why, and whether that is in place of a rung that its width cannot take."""

    rung: str
    reason: str
    fallback: bool = False


@dataclass(frozen=True)
class Rule:
    """One line of a recipe. `match`: a glob over the module path; `first` ≤ layer < `end`, any tensor where `first` is None.

    `where`: file and key, for messages; no part of what the recipe is.
    """

    where: str
    rung: str
    match: str = "*"
    first: int | None = None
    end: int = 0

    def applies(self, spec: TensorSpec) -> bool:
        """Whether the rule names `spec`."""
        if self.first is not None and (spec.layer is None or not self.first <= spec.layer < self.end):
            return False
        return fnmatchcase(spec.key, self.match)


@dataclass(frozen=True)
class Recipe:
    """Rules in order of rising precedence. `fallback` serves layers whose width a rung's V does not divide."""

    default: str
    rules: tuple[Rule, ...] = ()
    fallback: str = KEEP

    @classmethod
    def uniform(cls, rung_name: str) -> Recipe:
        """Every linear layer gets `rung_name` (or `bf16`). Raises UsageError for an unknown rung."""
        return cls(_rung(rung_name, "--isq"))

    def to_json(self) -> dict[str, Any]:
        """The recipe as plain JSON: what it does to any model, not which file and line said so."""
        rules = [{"rung": rule.rung, "match": rule.match, "first": rule.first, "end": rule.end} for rule in self.rules]
        return {"default": self.default, "fallback": self.fallback, "rules": rules}

    def choose(self, spec: TensorSpec, layer_count: int) -> Choice:
        """The rung for tensor `spec` of a model with `layer_count` layers.

        Raises UsageError where a rule names a tensor that must stay bf16, or a layer that the model does not have.
        """
        self._check_layers(layer_count)
        rule = next((rule for rule in reversed(self.rules) if rule.applies(spec)), None)
        if spec.role is not Role.LINEAR:
            if spec.role in (Role.EMBEDDING, Role.HEAD) and rule is not None and rule.rung != KEEP and rule.match != "*":
                raise UsageError(f"{rule.where}: {spec.key} ({spec.role.value}) stays {KEEP}; {rule.rung} is for linear layers only")
            return Choice(KEEP, f"{spec.role.value} stays {KEEP}")
        wanted = self.default if rule is None else rule.rung
        reason = "default" if rule is None else rule.where
        in_features = spec.shape[-1]
        if fits(wanted, in_features):
            return Choice(wanted, reason)
        misfit = f"{in_features} inputs are not a multiple of {wanted}'s V={rung(wanted).geometry.v}"
        if fits(self.fallback, in_features):
            return Choice(self.fallback, f"fallback: {misfit}", True)
        return Choice(KEEP, f"fallback: {misfit}, nor of {self.fallback}'s V={rung(self.fallback).geometry.v}", True)

    def check(self, specs: Iterable[TensorSpec]) -> None:
        """Raise UsageError for a rule that names nothing in the model, or that names a tensor or layer it cannot have."""
        specs = tuple(specs)
        layer_count = 1 + max((spec.layer for spec in specs if spec.layer is not None), default=-1)
        for spec in specs:
            self.choose(spec, layer_count)
        for rule in self.rules:
            roles = {spec.role for spec in specs if rule.applies(spec)} - {Role.BIAS}
            if rule.rung != KEEP and roles and Role.LINEAR not in roles:
                raise UsageError(f"{rule.where}: matches no linear layer; {', '.join(r.value for r in roles)} stays {KEEP}")
            if not roles:
                raise UsageError(f"{rule.where}: matches no tensor of the model; names look like {specs[0].key}, {_example(specs)}")

    def _check_layers(self, layer_count: int) -> None:
        for rule in self.rules:
            if rule.first is not None and rule.end > layer_count:
                raise UsageError(f"{rule.where}: reaches to layer {rule.end - 1}, the model's layers are 0 to {layer_count - 1}")


def fits(name: str, in_features: int) -> bool:
    """Whether rows of `in_features` weights can be stored as `name`."""
    return name == KEEP or in_features % rung(name).geometry.v == 0


def load_recipe(path: Path, default_rung: str) -> Recipe:
    """The recipe in the YAML file at `path`; `default_rung` serves where the file names no default.

    Raises UsageError naming file and key for anything that is not exactly the form above.
    """
    document = _read(path)
    default, fallback = default_rung, KEEP
    ranges: list[Rule] = []
    rules: list[Rule] = []
    for key, value in document.items():
        where = f"{path.name}: {key}"
        if key == "default":
            default = _isq(value, where)
        elif key == "fallback":
            fallback = _rung(value, where)
        elif key == "rules":
            rules = _rules(value, where)
        elif key == "device" or re.fullmatch(r"/.*/", str(key)):
            raise UsageError(f'{where}: not supported here; name tensors with rules: [{{match: "*.v_proj", isq: ...}}]')
        else:
            first, end = _layers(key, where)
            ranges.append(Rule(where, _isq(value, where), "*", first, end))
    return Recipe(_rung(default, "--isq"), (*ranges, *rules), fallback)


def _read(path: Path) -> Mapping[Any, Any]:
    """The mapping in the file, with no key twice."""
    try:
        if path.exists() and not path.is_file():
            raise UsageError(f"{path}: cannot be read: not a regular file")
        if path.stat().st_size > MAX_FILE_BYTES:
            raise UsageError(f"{path}: larger than {MAX_FILE_BYTES} bytes, so it is no recipe")
        text = path.read_text(encoding="utf-8")
        node = yaml.compose(text, yaml.SafeLoader)
        _refuse_repeated_keys(node, path, set())
        document = yaml.safe_load(text)
    except OSError as error:
        raise UsageError(f"{path}: cannot be read: {error.strerror or error}") from error
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        raise UsageError(f"{path}: not valid YAML: {' '.join(str(error).split())[:200]}") from error
    if not isinstance(document, dict):
        raise UsageError(f"{path}: expected a mapping such as '0-8: {{isq: qtip4}}', found {type(document).__name__}")
    return document


def _refuse_repeated_keys(node: yaml.Node | None, path: Path, seen: set[int]) -> None:
    """Raise UsageError for a key that comes twice in one mapping: YAML itself lets the second win in silence."""
    if node is None or id(node) in seen:
        return
    seen.add(id(node))
    if isinstance(node, yaml.SequenceNode):
        for item in node.value:
            _refuse_repeated_keys(item, path, seen)
    if isinstance(node, yaml.MappingNode):
        keys = [key.value for key, _ in node.value if isinstance(key, yaml.ScalarNode)]
        for key, value in node.value:
            if keys.count(key.value) > 1:
                raise UsageError(f"{path}: {key.value}: comes twice; keep one")
            _refuse_repeated_keys(value, path, seen)


def _rules(value: object, where: str) -> list[Rule]:
    if not isinstance(value, list):
        raise UsageError(f"{where}: expected a list of rules, found {type(value).__name__}")
    return [_rule(item, f"{where}[{index}]") for index, item in enumerate(value)]


def _rule(value: object, where: str) -> Rule:
    if not isinstance(value, dict):
        raise UsageError(f"{where}: expected {{match: ..., isq: ...}}, found {reprlib.repr(value)}")
    unknown = [key for key in value if key not in RULE_KEYS]
    if unknown:
        raise UsageError(f"{where}: unknown key {unknown[0]!r}; known: {', '.join(RULE_KEYS)}")
    match, skip = value.get("match"), value.get("skip", False)
    if not isinstance(match, str) or not match or not match.isprintable():
        raise UsageError(f'{where}: match: expected a pattern such as "*.v_proj", found {reprlib.repr(match)}')
    if not isinstance(skip, bool):
        raise UsageError(f"{where}: skip: expected true or false, found {reprlib.repr(skip)}")
    if skip == ("isq" in value):
        raise UsageError(f"{where}: expected either isq or skip: true, found {'both' if skip else 'neither'}")
    first, end = _layers(value["layers"], f"{where}: layers") if "layers" in value else (None, 0)
    name = KEEP if skip else _rung(value["isq"], f"{where}: isq")
    return Rule(f"{where} {match!r}", name, match.removesuffix(".weight"), first, end)


def _isq(value: object, where: str) -> str:
    """The rung in `{isq: rung}`."""
    if not isinstance(value, dict):
        raise UsageError(f"{where}: expected {{isq: RUNG}}, found {reprlib.repr(value)}")
    unknown = [key for key in value if key != "isq"]
    if unknown or "isq" not in value:
        raise UsageError(f"{where}: expected the one key isq, found {', '.join(map(str, value)) or 'none'}")
    return _rung(value["isq"], where)


def _rung(value: object, where: str) -> str:
    """A known rung's name, or `bf16`."""
    if value == KEEP:
        return KEEP
    try:
        return rung(value if isinstance(value, str) else reprlib.repr(value)).name
    except UsageError as error:
        raise UsageError(f"{where}: {error}, {KEEP}") from error


def _layers(value: object, where: str) -> tuple[int, int]:
    """(first, end) of `3` or `0-8`; the end is exclusive."""
    match = re.fullmatch(r"(\d{1,6})(?:-(\d{1,6}))?", str(value)) if isinstance(value, str | int) else None
    if match is None or isinstance(value, bool):
        raise UsageError(
            f"{where}: unknown key or bad layer range {reprlib.repr(value)}; expected a layer (3) or a range (0-8, its end exclusive)"
        )
    first = int(match.group(1))
    end = first + 1 if match.group(2) is None else int(match.group(2))
    if not first < end <= MAX_LAYER:
        raise UsageError(f"{where}: the range {value} is empty; its end is exclusive and must lie above its start")
    return first, end


def _example(specs: tuple[TensorSpec, ...]) -> str:
    return next((spec.key for spec in specs if spec.role is Role.LINEAR), specs[-1].key)
