"""What a quality study found, row by row: its file, its table, its marks on a picture. Measures nothing and knows no model.

The file is written whole after every row, so that an interrupted study keeps what it has. What must agree for rows of two runs to stand
in one table is in `settings`; a study goes on only under equal ones.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field, fields, replace
from pathlib import Path
from typing import Any

from arctool.bench.plot import Point
from arctool.errors import UsageError
from arctool.run.divergence import Comparison
from arctool.uqff.files import storage_errors

SOURCE, ROUNDED, BAKED = "source", "rounded", "baked"
PEER, WEIGHTED, CHECK = "llama.cpp", "llama.cpp, importance matrix", "llama.cpp, check"

FAMILIES = {BAKED: "arctool", PEER: PEER, WEIGHTED: WEIGHTED}
"""What is drawn, by how a row was made, and the name of its colour. Steps of the ladder have one size and no place on that axis."""

HEADER = ("model", "how", "MB", "bits/weight", "perplexity", "mean KL", "KL p99", "same top-1", "made in, s")
FAILED = "FAILED"
NOTHING = "—"


@dataclass(frozen=True)
class Row:
    """One model of the study, named by what it is and how it was made.

    `nbytes`: on the disk, None where no file was made; `linear_bits`: stored bits a weight of the linear layers; `seconds`: to make it,
    opening left out; `reading_seconds`: to read the windows; `stored`: how many linear layers are stored how (K-quants replace rows whose
    width they cannot take); `ran`: calls that each kernel served. A row that failed has a reason and no numbers.
    """

    model: str
    how: str
    nbytes: int | None = None
    linear_bits: float | None = None
    perplexity: float | None = None
    kl: float | None = None
    kl_p99: float | None = None
    kl_max: float | None = None
    same_top1: float | None = None
    seconds: float | None = None
    reading_seconds: float | None = None
    stored: Mapping[str, int] = field(default_factory=dict)
    ran: Mapping[str, int] = field(default_factory=dict)
    failure: str | None = None

    @property
    def name(self) -> str:
        return f"{self.model}, {self.how}"

    def measured(self, found: Comparison) -> Row:
        """The row with its numbers."""
        return replace(self, perplexity=found.perplexity, kl=found.kl, kl_p99=found.kl_p99, kl_max=found.kl_max, same_top1=found.same_top1)


@dataclass(frozen=True)
class Study:
    """Rows in the order of the table. `facts`: what else a reader of the numbers should know, such as the machine."""

    settings: Mapping[str, Any]
    facts: Mapping[str, Any]
    rows: tuple[Row, ...] = ()

    @property
    def failed(self) -> tuple[Row, ...]:
        return tuple(row for row in self.rows if row.failure is not None)

    def row(self, name: str) -> Row | None:
        """The row of that name that has numbers."""
        return next((row for row in self.rows if row.name == name and row.failure is None), None)

    def having(self, row: Row, order: Iterable[str]) -> Study:
        """With `row` in the place of one of its name; rows by `order`, those that it does not name behind."""
        places = {name: at for at, name in enumerate(order)}
        rows = [*(other for other in self.rows if other.name != row.name), row]
        return replace(self, rows=tuple(sorted(rows, key=lambda row: places.get(row.name, len(places)))))


def load(path: Path) -> Study:
    """Read a study. Raises StorageError, and UsageError for a file that is none, naming the field."""
    with storage_errors(path, "read"):
        data = path.read_bytes()
    try:
        document = json.loads(data)
    except ValueError as error:
        raise UsageError(f"{path}: expected the JSON of a quality study, found no JSON: {error}") from error
    if not isinstance(document, dict):
        raise UsageError(f"{path}: expected an object with settings, facts and rows, found {type(document).__name__}")
    for name, kind in (("settings", dict), ("facts", dict), ("rows", list)):
        if not isinstance(document.get(name), kind):
            raise UsageError(f"{path}: {name}: expected a {kind.__name__}, found {type(document.get(name)).__name__}; not a quality study")
    return Study(document["settings"], document["facts"], tuple(_row(path, at, value) for at, value in enumerate(document["rows"])))


def _row(path: Path, at: int, value: Any) -> Row:
    known = {field.name for field in fields(Row)}
    if not isinstance(value, dict) or not {"model", "how"} <= value.keys() <= known:
        found = sorted(value.keys() ^ known) if isinstance(value, dict) else type(value).__name__
        raise UsageError(f"{path}: rows: {at}: expected the fields of a row, {', '.join(sorted(known))}; found other ones: {found}")
    return Row(**value)


def save(study: Study, path: Path) -> None:
    """Write the study; it appears whole, by rename. Raises StorageError."""
    part = path.parent / f".{path.name}.{os.getpid()}"
    with storage_errors(path, "write"):
        try:
            part.write_text(json.dumps(asdict(study), indent=2, allow_nan=False) + "\n", encoding="utf-8")
            part.replace(path)
        finally:
            part.unlink(missing_ok=True)


def resumed(path: Path, fresh: Study) -> Study:
    """The study at `path` with the settings of `fresh`, or `fresh` if there is none. Raises UsageError naming what differs."""
    if not path.exists():
        return fresh
    found = load(path)
    for name in sorted(fresh.settings.keys() | found.settings.keys()):
        now, then = fresh.settings.get(name), found.settings.get(name)
        if now != then:
            raise UsageError(f"--resume: {path}: {name}: measured under {then!r}, asked for {now!r}; remove the file to begin anew")
    return replace(fresh, rows=found.rows)


def marker(path: Path) -> str:
    """The line above a table of the README: which file its numbers are held to by `tests/test_house.py`."""
    return f"<!-- measured: {path.as_posix()} -->\n"


def table(study: Study) -> str:
    """The rows in Markdown."""
    lines = [HEADER, ("---",) * len(HEADER), *map(_cells, study.rows)]
    return "".join(f"| {' | '.join(cells)} |\n" for cells in lines)


def _cells(row: Row) -> tuple[str, ...]:
    if row.failure is not None:
        return (row.model, row.how, FAILED, *("",) * (len(HEADER) - 3))
    return (
        row.model,
        row.how,
        NOTHING if row.nbytes is None else f"{row.nbytes / 1e6:.1f}",
        _number(row.linear_bits, ".3f"),
        _number(row.perplexity, ".2f"),
        _number(row.kl, ".4f"),
        _number(row.kl_p99, ".3f"),
        _number(row.same_top1, ".3f"),
        _number(row.seconds, ".0f"),
    )


def _number(value: float | None, form: str) -> str:
    return NOTHING if value is None else format(value, form)


def points(study: Study) -> list[Point]:
    """The marks of the picture: what has a size, a divergence and a family."""
    return [
        Point(row.model, FAMILIES[row.how], row.nbytes, row.linear_bits, row.kl)
        for row in study.rows
        if row.how in FAMILIES and row.nbytes is not None and row.linear_bits is not None and row.kl is not None
    ]
