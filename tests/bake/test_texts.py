"""The committed texts: what they are by hash, that provenance names every passage, and that none shares text with another."""

from __future__ import annotations

import hashlib
import re
from itertools import combinations
from pathlib import Path

import pytest
from locations import FIXTURES, ROOT

TEXTS = {
    "calibration": ROOT / "arctool" / "bake" / "calibration" / "texts" / "calibration.txt",
    "evaluation": ROOT / "arctool" / "run" / "texts" / "evaluation.txt",
    "validation": ROOT / "arctool" / "run" / "texts" / "validation.txt",
}
OTHERS = {"heldout": FIXTURES / "texts" / "heldout.txt", "training": FIXTURES / "texts" / "training.txt"}
PINNED = {
    "calibration": (321_003, "ad3195918b00888d9b9332613f367437b5c1c93fa17b287284c63a646b2978f9"),
    "evaluation": (102_303, "22d5ad0e6a0d86a085586daf8d646e0c41bac9e68825945cd8049603ef05d564"),
    "validation": (39_417, "f4e5bafd05f3b3cb44603f6b3501c0e0ff2dd7cf219d27a83edb7c07b6444145"),
}
KINDS = {
    "calibration": {"technical": 0.36, "code": 0.25, "prose": 0.24, "dialogue": 0.10, "other": 0.05},
    "evaluation": {"technical": 0.50, "code": 0.26, "prose": 0.19, "dialogue": 0.03, "other": 0.02},
    "validation": {"technical": 0.40, "code": 0.28, "prose": 0.22, "dialogue": 0.05, "other": 0.05},
}
FREE = re.compile(r"public domain|CC0 1\.0|Unlicense")
BREAK = "\n\n\n"
LINE = 60
RUN = 200


def passages(name: str) -> list[str]:
    return TEXTS[name].read_text(encoding="utf-8").removesuffix("\n").split(BREAK)


def tables(name: str) -> tuple[dict[str, list[str]], list[list[str]]]:
    """The sources (key → cells) and the passages (cells) that the README beside a text lists for it."""
    section = (TEXTS[name].parent / "README.md").read_text(encoding="utf-8").split(f"## `{name}.txt`")[1].split("\n## ")[0]
    rows = [[cell.strip(" `") for cell in line.split("|")[1:-1]] for line in section.splitlines() if line.startswith("|")]
    sources = {row[0]: row for row in rows if len(row) == 8 and row[0] not in ("key", "---")}
    return sources, [row for row in rows if len(row) == 5 and row[0].isdigit()]


@pytest.mark.parametrize("name", TEXTS)
def test_a_text_is_the_bytes_that_were_measured_with(name: str) -> None:
    data = TEXTS[name].read_bytes()
    assert (len(data), hashlib.sha256(data).hexdigest()) == PINNED[name]
    readme = (TEXTS[name].parent / "README.md").read_text(encoding="utf-8")
    assert f"{len(data):,} bytes, {len(passages(name))} passages, sha256 `{PINNED[name][1]}`" in readme


@pytest.mark.parametrize("name", TEXTS)
def test_a_text_is_clean(name: str) -> None:
    text = TEXTS[name].read_text(encoding="utf-8")
    assert text.endswith("\n")
    assert not text.endswith("\n\n")
    assert all(line == line.rstrip() for line in text.split("\n"))
    assert not re.search(r"\r|\ufeff|\ufffd|\u00a0|[\x00-\x08\x0b-\x1f]|\n{4}", text)
    assert not re.search(r"(?i)project gutenberg|gutenberg-tm|all rights reserved|©|SPDX-License", text)


@pytest.mark.parametrize("name", TEXTS)
def test_provenance_lists_every_passage_in_its_place(name: str) -> None:
    sources, rows = tables(name)
    found = [[str(i), str(len(p.encode())), hashlib.sha256(p.encode()).hexdigest()] for i, p in enumerate(passages(name), 1)]
    assert [[row[0], row[3].replace(",", ""), row[4]] for row in rows] == found
    assert {row[2] for row in rows} == set(sources)


@pytest.mark.parametrize("name", TEXTS)
def test_every_source_is_free_and_says_where_it_comes_from(name: str) -> None:
    sources, rows = tables(name)
    for key, work, author, year, licence, origin, size, digest in sources.values():
        assert work, key
        assert author, key
        assert re.search(r"\d{4}", year), key
        assert FREE.search(licence), key
        assert int(size.replace(",", "")) == sum(int(row[3].replace(",", "")) for row in rows if row[2] == key), key
        if re.match(r"Debian|npm|PyPI", origin):
            assert re.fullmatch(r"[0-9a-f]{64}", digest), key
        else:
            assert re.match(r"copied from Project Gutenberg no\. \d+, GitHub `|written for this file", origin), key


def test_no_work_serves_two_texts() -> None:
    works = {name: {row[1] for row in tables(name)[0].values()} - {"Messages to Congress on the State of the Union"} for name in TEXTS}
    for a, b in combinations(TEXTS, 2):
        assert not works[a] & works[b]
    # One author of one speech a year: the messages are shared as a series, no president is.
    presidents = {name: set(re.findall(r"((?:[A-Z]\. )+\w+) \d{4}", tables(name)[0]["sotu"][2])) for name in TEXTS}
    assert {name: len(found) for name, found in presidents.items()} == {"calibration": 11, "evaluation": 2, "validation": 2}
    for a, b in combinations(TEXTS, 2):
        assert not presidents[a] & presidents[b]


@pytest.mark.parametrize("name", TEXTS)
@pytest.mark.parametrize("share", [0.2, 1.0])
def test_every_prefix_is_the_same_mixture(name: str, share: float) -> None:
    _, rows = tables(name)
    total = sum(int(row[3].replace(",", "")) for row in rows)
    sizes: dict[str, int] = {}
    for row in rows:
        if sum(sizes.values()) < share * total:
            sizes[row[1]] = sizes.get(row[1], 0) + int(row[3].replace(",", ""))
    for kind, expected in KINDS[name].items():
        assert abs(sizes.get(kind, 0) / sum(sizes.values()) - expected) < (0.02 if share == 1.0 else 0.14), kind


def long_lines(text: str) -> set[str]:
    return {line.strip() for line in text.splitlines() if len(line.strip()) >= LINE}


def runs(text: str) -> set[str]:
    """Every run of RUN characters, with white space made one blank, so that other line breaks hide nothing."""
    flat = " ".join(text.split())
    return {flat[i : i + RUN] for i in range(len(flat) - RUN + 1)}


def shares_text(a: str, b: str) -> bool:
    return bool(long_lines(a) & long_lines(b) or runs(a) & runs(b))


def test_shared_text_is_seen_through_other_line_breaks() -> None:
    text = "".join(f"{i} sheep and " for i in range(100))
    assert shares_text("Once. " + text[:RUN].strip(), "Never! " + text[:RUN].replace(" ", "\n"))
    assert shares_text("x\n" + "y" * LINE + "\nz", "a\n " + "y" * LINE + " \nb")
    assert not shares_text(text[: RUN - 1], text[1:RUN] + "?")


@pytest.mark.parametrize(("a", "b"), list(combinations([*TEXTS, *OTHERS], 2)))
def test_no_two_texts_share_a_long_line_or_a_long_run(a: str, b: str) -> None:
    both = TEXTS | OTHERS
    first, second = (Path(both[name]).read_text(encoding="utf-8") for name in (a, b))
    assert not long_lines(first) & long_lines(second)
    assert not runs(first) & runs(second)
