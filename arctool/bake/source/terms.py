"""What a source says of its licence: the fields of its own card, and its licence files, which travel with everything made from it.

Only plain text travels, and only under a licence's usual names: no page, no script, nothing that a reader of an artifact would run.
"""

from __future__ import annotations

import logging
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from arctool.errors import SourceError

SOURCE_CARD = "README.md"

LICENCE_FILE = re.compile(r"(licen[cs]e|copying|notice|use_policy)[\w-]*(\.txt|\.md)?", re.ASCII | re.IGNORECASE)

LICENCE_PATTERNS = ("LICEN[CS]E*", "licen[cs]e*", "Licen[cs]e*", "COPYING*", "NOTICE*", "Notice*", "USE_POLICY*")
"""The same for the hub, which knows file name patterns only; what it brings too much is left out here."""

MAX_BYTES = 1 << 20
"""Of a card or a licence file; the longest licences have a tenth."""

MARKUP = re.compile(rb"<!doctype|<html|<script|<iframe", re.IGNORECASE)

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Terms:
    """The fields `license`, `license_name` and `license_link` of a card; without a card `licence` names a licence file."""

    licence: str | None = None
    name: str | None = None
    link: str | None = None


def terms_of(fields: dict[str, Any]) -> Terms:
    """Terms from a card's fields, of which only texts count; several licences are joined, a link is a web address or none."""
    licence = fields.get("license")
    if isinstance(licence, list) and licence and all(isinstance(item, str) for item in licence):
        licence = ", ".join(licence)
    name, link = fields.get("license_name"), fields.get("license_link")
    return Terms(
        licence if isinstance(licence, str) and licence.strip() else None,
        name if isinstance(name, str) and name.strip() else None,
        link if isinstance(link, str) and re.fullmatch(r"https://[^\s<>\"'`\\]+", link) else None,
    )


def read_terms(directory: Path) -> Terms:
    """What the card in `directory` declares, else the name of its first licence file, else nothing. Raises SourceError."""
    found = terms_of(_front_matter(directory / SOURCE_CARD))
    if found.licence is not None:
        return found
    first = next((path.name for path in _licence_paths(directory)), None)
    return Terms(first, found.name, found.link)


def licence_files(directory: Path) -> dict[str, bytes]:
    """File name → bytes of the licence files in `directory` that are plain text; others are left out with a warning. Raises SourceError."""
    found = {}
    for path in _licence_paths(directory):
        data = _head(path)
        if len(data) > MAX_BYTES or b"\0" in data or MARKUP.search(data) or data.startswith(b"#!") or not _utf8(data):
            logger.warning("%s: not plain text of at most %d bytes, so it does not travel with the artifact", path, MAX_BYTES)
        else:
            found[path.name] = data
    return found


def _licence_paths(directory: Path) -> list[Path]:
    return sorted(path for path in directory.iterdir() if LICENCE_FILE.fullmatch(path.name) and path.is_file())


def _front_matter(card: Path) -> dict[str, Any]:
    """The fields at the head of a card; none where there is no card, no head, or one that is no YAML mapping."""
    text = _head(card).decode("utf-8", "replace").replace("\r\n", "\n") if card.is_file() else ""
    end = text.find("\n---", 4)
    if not text.startswith("---\n") or end < 0:
        return {}
    try:
        front = yaml.safe_load(text[4:end])
    except (yaml.YAMLError, ValueError, RecursionError):
        return {}
    return front if isinstance(front, dict) else {}


def _head(path: Path) -> bytes:
    """The bytes of a file, of a longer one `MAX_BYTES` + 1."""
    try:
        with path.open("rb") as file:
            return file.read(MAX_BYTES + 1)
    except OSError as error:
        raise SourceError(f"{path}: cannot be read: {error.strerror or error}") from error


def _utf8(data: bytes) -> bool:
    try:
        data.decode()
    except UnicodeDecodeError:
        return False
    return True
