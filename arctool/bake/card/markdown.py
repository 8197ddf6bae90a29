"""Text as Markdown that says exactly that text: what comes from outside brings no markup, no HTML and no second line with it."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence


def table(heads: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A Markdown table; what a cell holds is Markdown already, and a bar in it must be none of the table's."""
    lines = [heads, ["---"] * len(heads), *rows]
    return "\n".join("| " + " | ".join(map(_cell, line)) + " |" for line in lines)


def _cell(text: str) -> str:
    """Bars are escaped; one behind a backslash, which would take the escape for itself, becomes a broken bar."""
    return text.replace("\\|", "\\¦").replace("|", "\\|")


def code(text: str) -> str:
    """`text` as a code span, in which nothing is markup: longer fences than any run of backticks in it, one line."""
    shown = plain(text) or "�"
    fence = "`" * (1 + max((len(run) for run in re.findall("`+", shown)), default=0))
    pad = " " if shown.startswith(("`", " ")) or shown.endswith(("`", " ")) else ""
    return f"{fence}{pad}{shown}{pad}{fence}"


def plain(text: str) -> str:
    """`text` with U+FFFD for what is no character of one line: control codes, line ends, marks that turn the direction of writing."""
    return "".join(c if c.isprintable() else "\ufffd" for c in text)


def sentence(text: str) -> str:
    """`text` in running text: escaped where Markdown, HTML, a formula or an address could begin."""
    return re.sub(r"[\\`*_\[\]<>&~@$]|:(?=//)|(?i:(?<=www))\.", r"\\\g<0>", plain(text))
