"""A source's licence: what its card and its files say, which of them travel, and that nothing else does."""

from __future__ import annotations

import fnmatch
import logging
import os
from pathlib import Path

import pytest

from arctool.bake.source.terms import LICENCE_PATTERNS, MAX_BYTES, Terms, licence_files, read_terms, terms_of
from arctool.errors import SourceError

TEXT = b"Permission is hereby granted"


def test_the_card_is_asked_first_and_then_the_first_licence_file(tmp_path: Path) -> None:
    assert read_terms(tmp_path) == Terms()
    (tmp_path / "NOTICE").write_bytes(TEXT)
    (tmp_path / "LICENSE.txt").write_bytes(TEXT)
    assert read_terms(tmp_path) == Terms("LICENSE.txt")
    (tmp_path / "README.md").write_text("---\nlanguage: en\nlicense_name: qwen\n---\n")
    assert read_terms(tmp_path) == Terms("LICENSE.txt", "qwen")
    (tmp_path / "README.md").write_text("---\nlicense: other\nlicense_name: qwen\nlicense_link: https://x.y/LICENSE\n---\nlicense: mit\n")
    assert read_terms(tmp_path) == Terms("other", "qwen", "https://x.y/LICENSE")


@pytest.mark.parametrize(
    ("licence", "found"),
    [("mit", "mit"), (["mit", "apache-2.0"], "mit, apache-2.0"), (["mit", 1], None), ([], None), (" ", None), (7, None), ({"a": 1}, None)],
)
def test_a_licence_is_a_text_or_several(licence: object, found: str | None) -> None:
    assert terms_of({"license": licence}).licence == found


@pytest.mark.parametrize(
    ("link", "kept"),
    [
        ("https://huggingface.co/a/b/blob/main/LICENSE", True),
        ("http://plain.example", False),
        ("javascript:alert(1)", False),
        ("https://x/<script>", False),
        ("https://x/a b", False),
        ("LICENSE", False),
        (["https://x"], False),
    ],
)
def test_a_link_is_a_web_address_or_none(link: object, kept: bool) -> None:
    assert terms_of({"license_link": link}).link == (link if kept else None)


def test_a_card_of_any_size_is_read_at_its_head_only(tmp_path: Path) -> None:
    with (tmp_path / "README.md").open("wb") as file:
        file.write(b"---\nlicense: mit\n---\n")
        file.truncate(1 << 40)
    assert read_terms(tmp_path) == Terms("mit")


def test_licence_files_travel_under_their_usual_names_only(tmp_path: Path) -> None:
    ours = ("LICENSE", "LICENCE.txt", "license.md", "COPYING", "NOTICE", "Notice.txt", "USE_POLICY.md", "LICENSE-MODEL", "LICENSE_CODE.txt")
    others = ("LICENSE.html", "LICENSE.py", "LICENSE.sh", "README.md", "MYLICENSE", "LICENSE.bin", "notices.html", "COPYING.tar.gz", "a.md")
    for name in (*ours, *others):
        (tmp_path / name).write_bytes(TEXT)
    (tmp_path / "LICENCE").mkdir()
    os.mkfifo(tmp_path / "LICENSE.txt")
    assert licence_files(tmp_path) == dict.fromkeys(ours, TEXT)
    # What a hub is asked for by pattern has all of them.
    assert [name for name in ours if not any(fnmatch.fnmatchcase(name, pattern) for pattern in LICENCE_PATTERNS)] == []


@pytest.mark.parametrize(
    "data",
    [
        b"<!DOCTYPE html><p>404</p>",
        b"terms\n<ScRipT>alert(1)</script>",
        b"text <iframe src=x>",
        b"#!/bin/sh\nrm -rf x",
        b"PK\x03\x04\0\0",
        b"\xff\xfe not UTF-8",
        b"x" * (MAX_BYTES + 1),
    ],
    ids=["page", "script", "frame", "program", "archive", "bytes", "too long"],
)
def test_a_licence_file_that_is_no_plain_text_stays_behind_with_a_warning(
    data: bytes, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "LICENSE").write_bytes(data)
    (tmp_path / "NOTICE").write_bytes(b"x" * MAX_BYTES)
    with caplog.at_level(logging.WARNING):
        assert list(licence_files(tmp_path)) == ["NOTICE"]
    assert [record.getMessage().split(": ")[0] for record in caplog.records] == [str(tmp_path / "LICENSE")]


def test_a_licence_file_that_cannot_be_read_is_refused_by_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "LICENSE").write_bytes(TEXT)

    def refuse(self: Path, *arguments: object) -> None:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(Path, "open", refuse)
    with pytest.raises(SourceError, match=r"LICENSE: cannot be read: Permission denied"):
        licence_files(tmp_path)
