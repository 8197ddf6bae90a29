"""The rules of the house that a machine can check: which room may import which, how long a file may be, and the tools' own verdicts."""

from __future__ import annotations

import ast
import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from locations import ROOT

from arctool.bake.budget.bake import ALGORITHM
from arctool.bake.provenance import FEEDBACK, ROUNDING

PACKAGE = ROOT / "arctool"
FILES = sorted(PACKAGE.rglob("*.py"))

MAY_IMPORT: dict[str, frozenset[str]] = {
    "__init__": frozenset({"api", "artifacts", "run"}),
    "errors": frozenset(),
    "quant": frozenset({"errors"}),
    "kernels": frozenset({"errors", "quant"}),
    "uqff": frozenset({"errors", "quant"}),
    "run": frozenset({"errors", "quant", "kernels", "uqff"}),
    "bake": frozenset({"errors", "quant", "kernels", "uqff", "run"}),
    "serve": frozenset({"errors", "quant", "kernels", "uqff", "run"}),
    "bench": frozenset({"errors", "quant", "kernels", "uqff", "run", "bake"}),
    "artifacts": frozenset({"errors", "quant", "kernels", "uqff", "run", "bake", "bench"}),
    "api": frozenset({"errors", "quant", "kernels", "uqff", "run", "bake", "bench"}),
    "terminal": frozenset({"api", "artifacts", "errors", "quant", "kernels", "uqff", "run", "serve", "bake", "bench"}),
    "cli_bench": frozenset({"api", "artifacts", "errors", "quant", "kernels", "uqff", "run", "bake", "bench", "terminal"}),
    "cli_serve": frozenset({"errors", "run", "serve", "terminal"}),
    "cli": frozenset(
        {"api", "artifacts", "errors", "quant", "kernels", "uqff", "run", "bake", "bench", "terminal", "cli_bench", "cli_serve"}
    ),
}
"""Room → the rooms that it stands on. `arctool/__init__.py` is the public door: it names what the rooms offer."""

BAKE_ROOMS: dict[str, frozenset[str]] = {
    "source": frozenset(),
    "calibration": frozenset({"source"}),
    "search": frozenset({"calibration"}),
    "card": frozenset({"source", "calibration"}),
    "budget": frozenset({"source", "calibration", "search"}),
}
"""Inside `bake/`: which of its rooms stand on which; the files beside them join them."""

LONGEST = 450
LONGEST_TEST = 600


def room_of(path: Path) -> str:
    return path.relative_to(PACKAGE).parts[0].removesuffix(".py")


def imported_rooms(source: str) -> set[str]:
    """Rooms of ours that a module imports, wherever in it the import stands; `import arctool` for its version is none."""
    found: set[str] = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"line {node.lineno}: a relative import; write the full name"
            names = [f"{node.module}.{alias.name}" for alias in node.names] if node.module == "arctool" else [node.module or ""]
        else:
            continue
        found |= {name.split(".")[1] for name in names if name.startswith("arctool.")}
    return found - {"__version__"}


def test_imported_rooms_are_seen_in_every_form() -> None:
    source = (
        "import arctool\nimport arctool.run.llm\nfrom arctool import bake, __version__\ndef f():\n    from arctool.quant.trellis import x\n"
    )
    assert imported_rooms(source) == {"run", "bake", "quant"}


def test_every_room_is_known() -> None:
    assert {room_of(path) for path in FILES} <= set(MAY_IMPORT)


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(PACKAGE)))
def test_no_import_runs_upwards(path: Path) -> None:
    room = room_of(path)
    upward = imported_rooms(path.read_text()) - MAY_IMPORT[room] - {room}
    assert not upward, f"{room} may not import {', '.join(sorted(upward))}"


@pytest.mark.parametrize("room", list(BAKE_ROOMS))
def test_the_rooms_of_bake_stand_on_each_other_one_way(room: str) -> None:
    found: set[str] = set()
    for path in (PACKAGE / "bake" / room).glob("*.py"):
        found |= set(re.findall(r"(?:from|import) arctool\.bake\.([a-z_]+)[. ]", path.read_text())) & set(BAKE_ROOMS)
    assert found - {room} == BAKE_ROOMS[room]
    assert {path.name for path in (PACKAGE / "bake").iterdir() if (path / "__init__.py").exists()} == set(BAKE_ROOMS)


@pytest.mark.parametrize("path", sorted([*FILES, *(ROOT / "tests").rglob("*.py"), *(ROOT / "fixtures").rglob("*.py")]), ids=str)
def test_no_file_is_too_long_to_read(path: Path) -> None:
    lines = len(path.read_text().splitlines())
    assert lines <= (LONGEST_TEST if path.is_relative_to(ROOT / "tests") else LONGEST), (
        f"{lines} lines; a file that needs so many has a second reason to exist"
    )


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(PACKAGE)))
def test_every_file_says_what_it_is_for(path: Path) -> None:
    tree = ast.parse(path.read_text())
    assert not tree.body or ast.get_docstring(tree)


@pytest.mark.parametrize("command", [("ruff", "check"), ("ruff", "format", "--check"), ("mypy",)], ids=" ".join)
def test_the_tools_have_nothing_to_say(command: tuple[str, ...]) -> None:
    done = subprocess.run([sys.executable, "-m", *command], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


def test_the_two_commands_of_the_readme_are_there() -> None:
    targets = {
        line.split(":")[0] for line in (ROOT / "Makefile").read_text().splitlines() if ":" in line and not line.startswith(("\t", "#", "."))
    }
    readme = (ROOT / "README.md").read_text()
    for target in ("demo", "test"):
        assert target in targets
        assert f"make {target}" in readme


QUALITY = "bench/results/smollm2-quality.json"
MEASURED = re.compile(r"<!-- measured: (\S+) -->\n((?:\|.*\n)+)")
"""A table of the README whose numbers a file holds."""

COLUMNS = ("nbytes", "linear_bits", "perplexity", "kl", "kl_p99", "same_top1", "seconds")
UNITS = {"nbytes": 1e6}


def differences(table: str, rows: list[dict[str, Any]]) -> list[str]:
    """What a table says that `rows` do not, each number within half of its last digit; the first two cells are the row's name."""
    lines = [[cell.strip() for cell in line.strip().strip("|").split("|")] for line in table.splitlines()[2:]]
    if len(lines) != len(rows):
        return [f"{len(lines)} lines for {len(rows)} rows"]
    found = []
    for cells, row in zip(lines, rows, strict=True):
        name = f"{row['model']}, {row['how']}"
        if cells[:2] != [row["model"], row["how"]] or len(cells) != 2 + len(COLUMNS):
            found.append(f"{name}: {cells}")
            continue
        for column, cell in zip(COLUMNS, cells[2:], strict=True):
            value = row[column]
            last = 10.0 ** -len(cell.partition(".")[2])
            held = cell == "—" if value is None else cell != "—" and abs(float(cell) - value / UNITS.get(column, 1)) <= 0.5001 * last
            if not held:
                found.append(f"{name}: {column}: {cell}, measured {value}")
    return found


def test_a_number_that_was_not_measured_is_seen() -> None:
    row = {"model": "m", "how": "h", "nbytes": 62_812_345, "linear_bits": 2.0497, "perplexity": 9.996, "kl": 0.75, "kl_p99": 3.0}
    rows = [row | {"same_top1": 0.5, "seconds": 61.4}, row | {"model": "n", "nbytes": None, "same_top1": 0.5, "seconds": 61.4}]
    cells = ["m", "h", "62.8", "2.050", "10.00", "0.7500", "3.000", "0.500", "61"]
    head = "| a |\n| --- |\n"

    def line(cells: list[str]) -> str:
        return f"| {' | '.join(cells)} |\n"

    second = line(["n", "h", "—", *cells[3:]])
    assert differences(head + line(cells) + second, rows) == []
    assert differences(head + line(cells), rows) == ["1 lines for 2 rows"]
    wrong = ["x", "x", "62.9", "2.051", "10.01", "0.7501", "3.001", "0.501", "62"]
    for at, cell in enumerate(wrong):
        assert len(differences(head + line([*cells[:at], cell, *cells[at + 1 :]]) + second, rows)) == 1
    assert len(differences(head + line(cells) + line(["n", "h", "62.8", *cells[3:]]), rows)) == 1
    assert len(differences(head + line(["m", "h", "—", *cells[3:]]) + second, rows)) == 1
    assert MEASURED.findall(f"text\n<!-- measured: a/b.json -->\n{head}{second}\n| other |\n") == [("a/b.json", head + second)]


def test_the_measured_tables_of_the_readme_are_what_was_measured() -> None:
    tables = MEASURED.findall((ROOT / "README.md").read_text())
    assert (QUALITY in dict(tables)) == (ROOT / QUALITY).exists()
    for place, table in tables:
        assert differences(table, json.loads((ROOT / place).read_text())["rows"]) == [], place


def test_the_quality_study_is_of_the_algorithms_that_this_code_has() -> None:
    """Whoever changes what a bake gives names it anew (`bake/provenance.py`, `bake/budget/bake.py`) and measures again."""
    settings = json.loads((ROOT / QUALITY).read_text())["settings"]
    assert settings["algorithms"] == [ROUNDING, FEEDBACK, ALGORITHM]
