"""Which tensor becomes what: a default, layer ranges and name rules read from a YAML file, applied as a pure function.

    default: {isq: qtip3}          # linear layers; else the choice of the command line
    embedding: qtip4b              # what the token table gets, and
    head: bf16                     # the head where it is not the table itself: q8_0 if the file does not say
    fallback: qtip4                # for a linear layer that a choice cannot take (auto: a K-quant's narrower kin, else bf16)
    0-8: {isq: qtip4}              # layers 0 to 7: as in a mistral.rs topology the end is exclusive
    31: {isq: bf16}
    rules:
      - {match: "*.v_proj", layers: "0-4", isq: qtip4b}
      - {match: "*.down_proj", skip: true}

A choice is a trellis rung, a GGML type, `fp8`, a plain type, or `as-is` (`choices`). Order: default, then ranges, then `embedding` and
`head`, then rules; where several apply the later in the file wins. (mistral.rs lets the range with the higher end win; a file whose ranges
do not overlap means the same to both.) `default`, ranges and a rule for "*" are for linear layers. Embedding and head get what their key or
a rule that names them says, else q8_0; in a recipe whose default quantises nothing they get that default too. Norms stay as they are, and
so do the routers of a mixture of experts, but for a rule whose last part is their very name ("*.mlp.gate", not "*.mlp.*").
Knows tensors by name, role and shape.
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

from arctool.bake.choices import AS_IS, AUTO, KEEP, PLAIN, choice, fallback_of, misfit
from arctool.errors import UsageError
from arctool.quant.ggml import Q8_0
from arctool.run.models.spec import EMBEDDING_KEY, HEAD_KEY, Role, TensorSpec

VOCABULARY = (Role.EMBEDDING, Role.HEAD)
"""The roles of tables over the vocabulary: everything a model says goes through them, so they get more bits."""

VOCABULARY_KEYS = {"embedding": EMBEDDING_KEY, "head": HEAD_KEY}
"""Key of the file → the module that it is for."""

RULE_KEYS = ("match", "layers", "isq", "skip")
MAX_FILE_BYTES = 1 << 20
MAX_LAYER = 100_000


@dataclass(frozen=True)
class Choice:
    """What a tensor gets: the name of a choice, why, and in place of which choice that it cannot take, if of one."""

    rung: str
    reason: str
    instead_of: str | None = None

    @property
    def fallback(self) -> bool:
        return self.instead_of is not None


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
        """Whether the rule is for `spec`: it names it; a table over the vocabulary not merely by naming all, a router by its name."""
        if self.first is not None and (spec.layer is None or not self.first <= spec.layer < self.end):
            return False
        if spec.role in VOCABULARY and not self.match.strip("*"):
            return False
        if spec.role is Role.ROUTER and self.match.rpartition(".")[2] != spec.key.rpartition(".")[2]:
            return False
        return fnmatchcase(spec.key, self.match)


@dataclass(frozen=True)
class Recipe:
    """Rules in order of rising precedence. `fallback` serves linear layers that a choice cannot take; `AUTO` depends on that choice.

    `vocabulary`: what embedding and head get where no rule names them.
    """

    default: str
    rules: tuple[Rule, ...] = ()
    fallback: str = AUTO
    vocabulary: str = Q8_0.name

    @classmethod
    def uniform(cls, name: str) -> Recipe:
        """Every linear layer gets `name`. Raises UsageError for an unknown one."""
        name = choice(name, "--isq")
        return cls(name, vocabulary=vocabulary_default(name))

    def to_json(self) -> dict[str, Any]:
        """The recipe as plain JSON: what it does to any model, not which file and line said so."""
        rules = [{"rung": rule.rung, "match": rule.match, "first": rule.first, "end": rule.end} for rule in self.rules]
        return {"default": self.default, "fallback": self.fallback, "vocabulary": self.vocabulary, "rules": rules}

    def choose(self, spec: TensorSpec, layer_count: int) -> Choice:
        """What tensor `spec` of a model with `layer_count` layers gets. Raises UsageError where a rule names a layer it does not have."""
        self._check_layers(layer_count)
        if spec.role in (Role.NORM, Role.BIAS):
            return Choice(KEEP, f"{spec.role.value} is not quantised")
        rule = next((rule for rule in reversed(self.rules) if rule.applies(spec)), None)
        if spec.role is Role.ROUTER and rule is None:
            return Choice(KEEP, "router is not quantised")
        linear = spec.role is Role.LINEAR
        wanted = (self.default if linear else self.vocabulary) if rule is None else rule.rung
        reason = ("default" if linear else f"default of the {spec.role.value}") if rule is None else rule.where
        return _fitting(wanted, reason, spec, self.fallback if linear else AUTO)

    def check(self, specs: Iterable[TensorSpec]) -> None:
        """Raise UsageError for a rule that names nothing in the model, or nothing that can be quantised, or a layer it does not have."""
        specs = tuple(specs)
        self._check_layers(1 + max((spec.layer for spec in specs if spec.layer is not None), default=-1))
        for rule in self.rules:
            roles = {spec.role for spec in specs if rule.applies(spec)} - {Role.BIAS}
            if rule.match == HEAD_KEY and not roles:
                raise UsageError(f"{rule.where}: the model has no {HEAD_KEY}: its head is its embedding; say embedding: {rule.rung}")
            if rule.rung not in (*PLAIN, AS_IS) and roles and not roles & {Role.LINEAR, Role.ROUTER, *VOCABULARY}:
                raise UsageError(f"{rule.where}: matches nothing to quantise; {', '.join(r.value for r in roles)} is not quantised")
            if not roles:
                raise UsageError(f"{rule.where}: matches no tensor of the model; names look like {specs[0].key}, {_example(specs)}")

    def _check_layers(self, layer_count: int) -> None:
        for rule in self.rules:
            if rule.first is not None and rule.end > layer_count:
                raise UsageError(f"{rule.where}: reaches to layer {rule.end - 1}, the model's layers are 0 to {layer_count - 1}")


def vocabulary_default(default: str) -> str:
    """What embedding and head get beside linear layers that get `default`: 8 bits, and the same where nothing is quantised anew."""
    return default if default in (*PLAIN, AS_IS) else Q8_0.name


def _fitting(wanted: str, reason: str, spec: TensorSpec, fallback: str) -> Choice:
    """`wanted` where `spec` can be stored so, else `fallback`, else bf16, and why."""
    why = misfit(wanted, spec.shape[-1], spec.biased)
    if not why:
        return Choice(wanted, reason)
    second = fallback_of(wanted) if fallback == AUTO else fallback
    also = misfit(second, spec.shape[-1], spec.biased)
    if not also:
        return Choice(second, f"fallback: {why}", wanted)
    return Choice(KEEP, f"fallback: {why}; {also}", wanted)


@dataclass(frozen=True)
class RecipeFile:
    """What a recipe file says; `default` is None where it names none."""

    default: str | None = None
    rules: tuple[Rule, ...] = ()
    fallback: str = AUTO

    def over(self, default: str) -> Recipe:
        """The recipe, with `default` where the file names none."""
        default = self.default or default
        return Recipe(default, self.rules, self.fallback, vocabulary_default(default))


def load_recipe(path: Path, default: str) -> Recipe:
    """The recipe in the YAML file at `path`; `default` serves where the file names none. Raises UsageError as `read_recipe`."""
    return read_recipe(path).over(choice(default, "--isq"))


def read_recipe(path: Path) -> RecipeFile:
    """The YAML file at `path`. Raises UsageError naming file and key for anything that is not exactly the form above."""
    document = _read(path)
    default, fallback = None, AUTO
    ranges: list[Rule] = []
    tables: list[Rule] = []
    rules: list[Rule] = []
    for key, value in document.items():
        where = f"{path.name}: {key}"
        if key == "default":
            default = _isq(value, where)
        elif key == "fallback":
            fallback = AUTO if value == AUTO else _fallback(value, where)
        elif key in VOCABULARY_KEYS:
            tables.append(Rule(where, choice(value, where), VOCABULARY_KEYS[key]))
        elif key == "rules":
            rules = _rules(value, where)
        elif key == "device" or re.fullmatch(r"/.*/", str(key)):
            raise UsageError(f'{where}: not supported here; name tensors with rules: [{{match: "*.v_proj", isq: ...}}]')
        else:
            first, end = _layers(key, where)
            ranges.append(Rule(where, _isq(value, where), "*", first, end))
    return RecipeFile(default, (*ranges, *tables, *rules), fallback)


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
        found = "nothing" if document is None else f"a {type(document).__name__}"
        raise UsageError(f"{path}: expected a mapping such as '0-8: {{isq: qtip4}}', found {found}")
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
    name = KEEP if skip else choice(value["isq"], f"{where}: isq")
    return Rule(f"{where} {match!r}", name, match.removesuffix(".weight"), first, end)


def _isq(value: object, where: str) -> str:
    """The choice in `{isq: CHOICE}`."""
    if not isinstance(value, dict):
        raise UsageError(f"{where}: expected {{isq: RUNG}}, found {reprlib.repr(value)}")
    unknown = [key for key in value if key != "isq"]
    if unknown or "isq" not in value:
        raise UsageError(f"{where}: expected the one key isq, found {', '.join(map(str, value)) or 'none'}")
    return choice(value["isq"], where)


def _fallback(value: object, where: str) -> str:
    """A choice that can stand in for another one."""
    name = choice(value, where)
    if name == AS_IS:
        raise UsageError(f"{where}: {AS_IS} fits every layer, so it is no fallback; name a type, or {AUTO}")
    return name


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
