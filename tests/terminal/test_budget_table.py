"""What a person sees of a budget: both rates, both divergences, and which layers got more or less; hostile names are text."""

from __future__ import annotations

import io
from dataclasses import replace

from rich.console import Console

from arctool.bake.account import Account, GroupSpent, Tried
from arctool.terminal.budget import spent

GROUPS = (
    GroupSpent(("model.layers.0.self_attn.v_proj",), 100, 0.5, "q8_0"),
    GroupSpent(("model.layers.3.mlp.gate_proj", "model.layers.3.mlp.up_proj"), 600, 0.01, "qtip2-v4"),
    *(GroupSpent((f"model.layers.{i}.mlp.down_proj",), 100, i / 100, "qtip2-v4") for i in range(4, 12)),
    GroupSpent(("model.layers.1.self_attn.o_proj",), 500, 0.2, "qtip4"),
)
ACCOUNT = Account("budget-1", "q", 2.5, "mixed", "qtip2-v4", Tried(2.05, 1.25), Tried(2.4987, 0.51234), "t", 1024, 8192, GROUPS)


def text(account: Account) -> list[str]:
    stream = io.StringIO()
    Console(file=stream, width=200, force_terminal=True, color_system=None).print(spent(account))
    return [line.rstrip() for line in stream.getvalue().splitlines()]


def test_a_mixed_bake_shows_what_it_gained_and_a_row_for_every_rung() -> None:
    first, head, *rows = text(ACCOUNT)
    assert first == (
        "budget: 2.5 bits a weight asked, 2.499 reached; mean KL 0.5123 at 2.499 bits on text that the allocation did not see, "
        "uniform qtip2-v4 1.25 at 2.050 bits"
    )
    assert head.split() == ["rung", "layers", "weights", "which"]
    assert [row.split()[0] for row in rows] == ["q8_0", "qtip4", "qtip2-v4"]
    assert rows[0].split() == ["q8_0", "1", "5.0%", "0.self_attn.v_proj"]
    assert rows[1].split() == ["qtip4", "1", "25.0%", "1.self_attn.o_proj"]
    assert rows[2].split()[:5] == ["qtip2-v4", "(uniform", "rung)", "10", "70.0%"]
    assert rows[2].endswith(
        "11.mlp.down_proj, 10.mlp.down_proj, 9.mlp.down_proj, 8.mlp.down_proj, 7.mlp.down_proj, 6.mlp.down_proj and 4 more"
    )


def test_a_kept_uniform_bake_says_so_and_why() -> None:
    kept = replace(ACCOUNT, chosen="uniform", mixed=Tried(2.4987, 1.5))
    verdict = "uniform qtip2-v4 is kept: mean KL 1.25 at 2.050 bits, a mixed bake gave 1.5 at 2.499 bits"
    assert text(kept) == [f"budget: 2.5 bits a weight asked, 2.050 reached; {verdict}"]
    broken = replace(kept, mixed=Tried(2.4987, None))
    assert text(broken)[0].endswith("a mixed bake gave no numbers at 2.499 bits")
    same = replace(kept, mixed=Tried(2.05, None), uniform=Tried(2.05, None))
    assert text(same) == ["budget: 2.5 bits a weight asked, 2.050 reached; the same as uniform qtip2-v4: nothing can be moved"]


def test_names_from_a_file_are_text_and_an_unknown_rung_is_still_a_row() -> None:
    hostile = GroupSpent(("\x1b[31mmodel.layers.0[bold]x",), 100, 0.5, "[red]qtip9\n")
    lines = text(replace(ACCOUNT, groups=(hostile,), rung="\x1b[2J"))
    assert lines[-1].split() == ["[red]qtip9\\n", "1", "100.0%", "\\x1b[31mmodel.layers.0[bold]x"]
    assert all("\x1b[31m" not in line and "\x1b[2J" not in line for line in lines)
