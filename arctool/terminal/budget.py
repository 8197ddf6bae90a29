"""How a budget of bits was spent, as a table for people: which layers got more, which less, and whether it was worth it."""

from __future__ import annotations

from collections.abc import Sequence

from rich.console import Group, RenderableType
from rich.table import Column, Table

from arctool.bake.account import Account, GroupSpent, Tried
from arctool.bake.choices import LADDER
from arctool.terminal.tables import plain

NAMED = 6
"""Layers of a row that are named, the ones that cost most first."""


def spent(account: Account) -> RenderableType:
    """The rates and divergences of both bakes, then a row for every rung: what share of the weights got it, and which layers."""
    mixed = account.chosen == "mixed"
    lines: list[RenderableType] = [
        plain(f"budget: {account.asked:g} bits a weight asked, {account.reached:.3f} reached; {_verdict(account)}"),
    ]
    table = Table("rung", Column("layers", justify="right"), Column("weights", justify="right"), Column("which", overflow="fold"), box=None)
    total = sum(group.weights for group in account.groups)
    names = [name for name in reversed(LADDER) if any(group.rung == name for group in account.groups)]
    names += sorted({group.rung for group in account.groups} - set(names))
    for name in names:
        groups = [group for group in account.groups if group.rung == name]
        share = sum(group.weights for group in groups) / total if total else 0.0
        mark = " (uniform rung)" if name == account.rung else ""
        table.add_row(*map(plain, (name + mark, str(sum(len(group.layers) for group in groups)), f"{share:.1%}", _named(groups))))
    return Group(*lines, table) if mixed else Group(*lines)


def _verdict(account: Account) -> str:
    if account.chosen == "mixed":
        return f"mean KL {_kl(account.mixed)} on text that the allocation did not see, uniform {account.rung} {_kl(account.uniform)}"
    if account.mixed.kl is None and account.uniform.kl is None:
        return f"the same as uniform {account.rung}: nothing can be moved"
    return f"uniform {account.rung} is kept: mean KL {_kl(account.uniform)}, a mixed bake gave {_kl(account.mixed)}"


def _kl(tried: Tried) -> str:
    where = f" at {tried.bits_per_weight:.3f} bits"
    return ("no numbers" if tried.kl is None else f"{tried.kl:.4g}") + where


def _named(groups: Sequence[GroupSpent]) -> str:
    """The layers of some groups, the costly ones first, without what all names share."""
    keys = [key for group in sorted(groups, key=lambda group: -group.kl) for key in group.layers]
    shown = [key.removeprefix("model.layers.") for key in keys[:NAMED]]
    return ", ".join(shown) + (f" and {len(keys) - NAMED} more" if len(keys) > NAMED else "")
