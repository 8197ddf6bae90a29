"""The section of a model card that tells how a budget of bits was spent. A pure function of the account; knows no other section."""

from __future__ import annotations

from collections.abc import Sequence

from arctool.bake.account import Account, GroupSpent, Tried
from arctool.bake.card.markdown import code, table
from arctool.bake.choices import LADDER

NAMED = 4
"""Layers of a row that are named, the ones that cost most first."""


def budget(account: Account) -> str:
    """Which bakes were tried and what they gave, then what every rung got, from many bits to few."""
    if not account.checked_tokens:
        return (
            f"## Budget\n\n{account.asked:g} bits a weight of the linear layers were asked for, {account.reached:.3f} were spent: uniform "
            f"{code(account.rung)}, because no group of layers can be moved to another rung within so many bits."
        )
    mixed = account.chosen == "mixed"
    tried = [
        (("**mixed**" if mixed else "mixed"), *_tried(account.mixed)),
        ((f"uniform {code(account.rung)}" if mixed else f"**uniform {code(account.rung)}**"), *_tried(account.uniform)),
    ]
    parts = [
        f"## Budget\n\n{account.asked:g} bits a weight of the linear layers were asked for, {account.reached:.3f} were spent. Each group "
        f"of layers was measured: what the model loses, over {account.measured_tokens:,} tokens, when this group alone is stored at "
        f"{code(account.rung)}, the highest rung that all layers could have had. The bits went where that says they pay; the result was "
        f"checked on {account.checked_tokens:,} other tokens, and the better of the two bakes is this one.",
        table(("bake", "bits a weight", "mean KL, nats a token"), tried),
    ]
    if mixed:
        names = [*reversed(LADDER), *sorted({group.rung for group in account.groups} - set(LADDER))]
        spent = [(name, [group for group in account.groups if group.rung == name]) for name in names]
        total = sum(group.weights for group in account.groups) or 1
        rows = [
            (code(name), str(sum(len(group.layers) for group in groups)), f"{sum(g.weights for g in groups) / total:.1%}", _named(groups))
            for name, groups in spent
            if groups
        ]
        parts.append(table(("rung", "layers", "of the weights that were allocated", "which, the costliest first"), rows))
    return "\n\n".join(parts)


def _tried(tried: Tried) -> tuple[str, str]:
    return f"{tried.bits_per_weight:.3f}", "not measured" if tried.kl is None else f"{tried.kl:.4g}"


def _named(groups: Sequence[GroupSpent]) -> str:
    keys = [key for group in sorted(groups, key=lambda group: -group.kl) for key in group.layers]
    more = f" and {len(keys) - NAMED} more" if len(keys) > NAMED else ""
    return ", ".join(map(code, keys[:NAMED])) + more
