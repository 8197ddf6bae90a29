"""The account of a budget comes back from a report as it went in, and anything else is refused by its field."""

from __future__ import annotations

import json
from typing import Any

import pytest

from arctool.bake.account import Account, GroupSpent, Tried, parse_account
from arctool.errors import FormatError

ACCOUNT = Account(
    algorithm="budget-1",
    question="ab" * 32,
    asked=2.5,
    chosen="mixed",
    rung="qtip2-v4",
    uniform=Tried(2.05, 1.25),
    mixed=Tried(2.4987, 0.5),
    text_sha256="cd" * 32,
    measured_tokens=1024,
    checked_tokens=8192,
    groups=(
        GroupSpent(("model.layers.0.self_attn.v_proj",), 110_592, 0.031, "q8_0"),
        GroupSpent(("model.layers.2.mlp.gate_proj", "model.layers.2.mlp.up_proj"), 1_769_472, 0.002, "qtip2-v4"),
    ),
)


def as_read(value: Any) -> Any:
    return json.loads(json.dumps(value, allow_nan=False))


def test_an_account_comes_back_from_json_as_it_was() -> None:
    value = as_read(ACCOUNT.to_json())
    assert value["reached"] == 2.4987
    assert value["groups"][1]["layers"] == ["model.layers.2.mlp.gate_proj", "model.layers.2.mlp.up_proj"]
    assert parse_account(value, "x") == ACCOUNT


def test_what_was_not_checked_is_null_and_the_rate_is_that_of_what_was_chosen() -> None:
    kept = Account(**{**ACCOUNT.__dict__, "chosen": "uniform", "mixed": Tried(2.4987, None)})
    value = as_read(kept.to_json())
    assert (value["reached"], value["mixed"]["kl"]) == (2.05, None)
    assert parse_account(value, "x") == kept


@pytest.mark.parametrize(
    ("path", "bad", "message"),
    [
        (("asked",), "2", "x: asked: expected a number, found 2"),
        (("asked",), True, "x: asked: expected a number"),
        (("chosen",), "best", "x: chosen: expected uniform or mixed, found 'best'"),
        (("rung",), 7, "x: rung: expected str, found 7"),
        (("uniform",), [], "x: uniform: expected dict"),
        (("mixed", "kl"), "low", "x: mixed: kl: expected a number"),
        (("mixed", "bits_per_weight"), None, "x: mixed: bits_per_weight: expected a number, found None"),
        (("checked_tokens",), 1.5, "x: checked_tokens: expected int"),
        (("groups",), {}, "x: groups: expected list"),
        (("groups", 1), "g", r"x: groups\[1\]: expected an object, found g"),
        (("groups", 0, "layers"), [], r"x: groups\[0\]: layers: expected names of layers"),
        (("groups", 0, "layers"), [3], r"x: groups\[0\]: layers: expected names of layers"),
        (("groups", 0, "kl"), float("inf"), r"x: groups\[0\]: kl: expected a number, found inf"),
        (("groups", 0, "weights"), None, r"x: groups\[0\]: weights: expected int"),
    ],
)
def test_anything_else_is_refused_by_its_field(path: tuple[str | int, ...], bad: object, message: str) -> None:
    value = as_read(ACCOUNT.to_json())
    *parents, last = path
    place = value
    for step in parents:
        place = place[step]
    place[last] = bad
    with pytest.raises(FormatError, match=message):
        parse_account(value, "x")
