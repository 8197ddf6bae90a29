"""Calibration text: from `--calib FILE|DIR|auto` to windows of token ids. Knows files, text and ids; knows nothing of models.

Files are read piece by piece and only as far as their tokens are needed, so a 10 GB file costs no more than a small one; what is
read depends on the files and the counts asked for alone. Every file is looked at before any work starts (`read_calibration`); what
lies further on in a file is checked when it is reached.
"""

from __future__ import annotations

import hashlib
import json
import os
import stat
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from typing import Any, TextIO

import numpy as np
from numpy.typing import NDArray

from arctool.errors import RequestError, SourceError, UsageError

AUTO = "auto"
AUTO_FILE = Path(__file__).with_name("texts") / "calibration.txt"
PASSAGE_BREAK = "\n\n\n"
"""Parts the passages of the committed mix; inside a passage there is at most one blank line (texts/README.md)."""

SUFFIXES = (".jsonl", ".md", ".txt")
MAX_FILES = 10_000
PIECE_CHARACTERS = 16_384
"""Of a plain file are encoded at a time; the piece is then continued to its line's end, by at most as much again."""
MAX_RECORD_CHARACTERS = 16 << 20
MIN_TOKENS = 16
"""Fewer tell nothing about a layer's inputs."""

Encode = Callable[[str], Sequence[int]]
Render = Callable[[Sequence[Mapping[str, Any]]], str]
"""A conversation to the text that the model would see: its chat template, without a prompt for another answer."""


class Form(Enum):
    """How a file is cut into documents: it is one; one a line (JSON); one a passage (the committed mix)."""

    PLAIN = "plain"
    RECORDS = "records"
    PASSAGES = "passages"


@dataclass(frozen=True)
class Piece:
    """Consecutive text of a document; `starts` where it is the document's first."""

    text: str
    starts: bool


@dataclass(frozen=True)
class CalibrationText:
    """One file, not in memory. `name` is what messages call it; `render` serves records with `messages`."""

    name: str
    path: Path
    form: Form
    render: Render | None = None

    def pieces(self) -> Iterator[Piece]:
        """Its documents in order, long ones in pieces. Raises SourceError where it cannot be read, is not UTF-8 text, or a record
        is none."""
        try:
            with self.path.open(encoding="utf-8-sig") as file:
                yield from _PIECES[self.form](self, file)
        except UnicodeDecodeError as error:
            raise SourceError(f"{self.name}: expected UTF-8 text, found the byte 0x{error.object[error.start]:02x}; convert it") from error
        except OSError as error:
            raise SourceError(f"{self.name}: cannot be read: {error.strerror or error}") from error


@dataclass(frozen=True)
class SourceUse:
    """How much of a file was used: UTF-8 bytes of the pieces that were encoded, and the tokens that came into the windows."""

    name: str
    bytes: int
    tokens: int


@dataclass(frozen=True)
class Windows:
    """ids: i32 [count, window]. `sources`: only files that were used."""

    ids: NDArray[np.int32]
    sources: tuple[SourceUse, ...]

    @property
    def tokens(self) -> int:
        """Tokens in all windows, each window's BOS included."""
        return int(self.ids.size)

    @property
    def identity(self) -> str:
        """sha256, hex, over the window length and the ids: equal for equal windows, whatever files they came from."""
        head = f"{self.ids.shape[1]}:".encode()
        return hashlib.sha256(head + np.ascontiguousarray(self.ids, "<i4").tobytes()).hexdigest()


def read_calibration(source: str, render: Render | None = None) -> tuple[CalibrationText, ...]:
    """The texts of `source`: "auto" (the committed mix), a file, or a folder (every .jsonl, .md and .txt below it, by name; names
    with a leading dot are skipped). A .jsonl file has an object with `text` or `messages` on every line; any other is plain text.

    Raises UsageError for an empty source or one that names no text, SourceError for a file that is missing, unreadable, empty, not
    UTF-8 text or without a usable record.
    """
    if source == AUTO:
        return (CalibrationText(AUTO, AUTO_FILE, Form.PASSAGES),)
    if not source or "\0" in source:
        raise UsageError(f"--calib: expected a file, a folder or {AUTO}, found {source!r}")
    path = Path(source)
    paths = _below(path) if os.path.isdir(path) else [path]
    texts = tuple(CalibrationText(str(p), p, Form.RECORDS if p.suffix.lower() == ".jsonl" else Form.PLAIN, render) for p in paths)
    for text in texts:
        _check(text)
    return texts


def document_start(encode_with_special: Encode) -> int | None:
    """The token that a tokenizer puts before every text by itself (BOS), None where it puts none: what `windows` wants as `bos`."""
    special = encode_with_special("")
    return int(special[0]) if special else None


def windows(texts: Sequence[CalibrationText], encode: Encode, tokens: int, window: int, bos: int | None) -> Windows:
    """Windows of `window` tokens, as many as `tokens` hold, each and every document begun with `bos` if there is one.

    `encode`: text to ids without special tokens. The files give equal shares, and what one lacks the others make up; a share is a
    file's beginning. With fewer tokens than asked for there are fewer windows; with fewer than one window holds, one shorter one.
    Raises UsageError for counts that make no sense and for less than MIN_TOKENS tokens, SourceError as `CalibrationText.pieces`.
    """
    if tokens < MIN_TOKENS or window < MIN_TOKENS:
        raise UsageError(f"--calib-tokens: expected at least {MIN_TOKENS} tokens and a window of as many, found {tokens} and {window}")
    window = min(window, tokens)
    need = tokens // window * window
    streams = [_Stream(text, encode, bos) for text in texts]
    _share(streams, need)
    flow, ends = _joined(streams)
    cut, used = _cut(flow, window, need // window, bos)
    if not cut:
        names = ", ".join(text.name for text in texts[:3]) + (" ..." if len(texts) > 3 else "")
        raise UsageError(f"--calib {names}: expected at least {MIN_TOKENS} tokens of text, found {len(flow)}; give more text")
    uses = (SourceUse(s.text.name, s.bytes, min(end, used) - start) for s, start, end in zip(streams, (0, *ends), ends, strict=False))
    return Windows(np.array(cut, np.int32), tuple(use for use in uses if use.tokens > 0))


class _Stream:
    """The tokens of one file, encoded as they are asked for."""

    def __init__(self, text: CalibrationText, encode: Encode, bos: int | None) -> None:
        self.text = text
        self.bytes = 0
        self.taken = 0
        self.ids: list[int] = []
        self._encode = encode
        self._bos = bos
        self._pieces = text.pieces()

    def take(self, count: int) -> int:
        """Take up to `count` further tokens; returns how many there were. Fewer than asked: the file is used up."""
        while len(self.ids) < self.taken + count:
            piece = next(self._pieces, None)
            if piece is None:
                break
            self.ids += self._ids(piece)
            self.bytes += len(piece.text.encode("utf-8", "surrogatepass"))
        found = min(count, len(self.ids) - self.taken)
        self.taken += found
        return found

    def _ids(self, piece: Piece) -> list[int]:
        try:
            ids = [int(token) for token in self._encode(piece.text)]
        except RequestError as error:
            raise SourceError(f"{self.text.name}: {error}") from error
        # A rendered conversation brings its own BOS.
        return [self._bos, *ids] if piece.starts and self._bos is not None and ids[:1] != [self._bos] else ids


def _share(streams: Sequence[_Stream], need: int) -> None:
    """Take `need` tokens in equal shares; what a file lacks is shared again among those that have more."""
    live = list(streams)
    while need > 0 and live:
        share, extra = divmod(need, len(live))
        more: list[_Stream] = []
        for i, stream in enumerate(live):
            wanted = share + (i < extra)
            found = stream.take(wanted)
            need -= found
            if found == wanted:
                more.append(stream)
        live = more


def _joined(streams: Sequence[_Stream]) -> tuple[list[int], list[int]]:
    """The taken tokens of all files one after the other, and where each one's end."""
    flow: list[int] = []
    ends: list[int] = []
    for stream in streams:
        flow += stream.ids[: stream.taken]
        ends.append(len(flow))
    return flow, ends


def _cut(flow: Sequence[int], window: int, count: int, bos: int | None) -> tuple[list[list[int]], int]:
    """At most `count` windows off the front of `flow`, and how many of its tokens they used."""
    rows: list[list[int]] = []
    at = 0
    while len(rows) < count:
        lead = [] if bos is None or at >= len(flow) or flow[at] == bos else [bos]
        row = [*lead, *flow[at : at + window - len(lead)]]
        if len(row) < window and (rows or len(row) < MIN_TOKENS):
            break
        rows.append(row)
        at += len(row) - len(lead)
        if len(row) < window:
            break
    return rows, at


def _below(folder: Path) -> list[Path]:
    """The files with a known suffix below `folder`, sorted by their path, hidden ones and hidden folders left out."""
    found: list[Path] = []
    for root, folders, files in os.walk(folder, onerror=_unlistable):
        folders[:] = [name for name in folders if not name.startswith(".")]
        found += [Path(root) / name for name in files if not name.startswith(".") and Path(name).suffix.lower() in SUFFIXES]
        if len(found) > MAX_FILES:
            raise UsageError(f"--calib {folder}: more than {MAX_FILES} files; give a folder with fewer")
    if not found:
        raise UsageError(f"--calib {folder}: no {', '.join(SUFFIXES)} file in it")
    return sorted(found)


def _unlistable(error: OSError) -> None:
    raise SourceError(f"{error.filename}: cannot be listed: {error.strerror}") from error


def _check(text: CalibrationText) -> None:
    """Raise SourceError unless the beginning of a file gives text."""
    try:
        mode = text.path.stat().st_mode
    except OSError as error:
        raise SourceError(f"{text.name}: cannot be read: {error.strerror or error}") from error
    if not stat.S_ISREG(mode):  # a pipe would never end, or never begin
        raise SourceError(f"{text.name}: expected a regular file of text, found something else")
    if next((piece for piece in text.pieces() if piece.text.strip()), None) is None:
        what = "no usable record: expected an object with text or messages on every line" if text.form is Form.RECORDS else "empty"
        raise SourceError(f"{text.name}: {what}; calibration needs text")


def _plain(source: CalibrationText, file: TextIO) -> Iterator[Piece]:
    starts = True
    while text := _readable(source, file.read(PIECE_CHARACTERS) + file.readline(PIECE_CHARACTERS)):
        yield Piece(text, starts)
        starts = False


def _passages(source: CalibrationText, file: TextIO) -> Iterator[Piece]:
    for passage in _readable(source, file.read()).split(PASSAGE_BREAK):
        yield Piece(passage.rstrip("\n") + "\n", True)


def _records(source: CalibrationText, file: TextIO) -> Iterator[Piece]:
    number = 0
    while line := file.readline(MAX_RECORD_CHARACTERS + 1):
        number += 1
        where = f"{source.name}: line {number}"
        if len(line) > MAX_RECORD_CHARACTERS:
            raise SourceError(f"{where}: longer than {MAX_RECORD_CHARACTERS} characters; split the record")
        if line.strip():
            text = _record_text(_readable(source, line), where, source.render)
            if text:
                yield Piece(text, True)


_PIECES: Mapping[Form, Callable[[CalibrationText, TextIO], Iterator[Piece]]] = {
    Form.PLAIN: _plain,
    Form.RECORDS: _records,
    Form.PASSAGES: _passages,
}


def _readable(source: CalibrationText, text: str) -> str:
    if "\0" in text:
        raise SourceError(f"{source.name}: expected text, found a NUL byte: a binary file")
    return text


def _record_text(line: str, where: str, render: Render | None) -> str:
    """The text of one JSON record. Raises SourceError, naming the line, for anything but an object with `text` or `messages`."""
    try:
        record = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise SourceError(f"{where}: expected a JSON object: {error}") from error
    if isinstance(record, dict) and isinstance(record.get("text"), str):
        return str(record["text"])
    if isinstance(record, dict) and "messages" in record:
        if render is None:
            raise SourceError(f"{where}: messages need the model's chat template, and it has none; give text")
        try:
            return render(record["messages"])
        except RequestError as error:
            raise SourceError(f"{where}: {error}") from error
    found = f"an object with {', '.join(sorted(record)) or 'nothing'}"[:100] if isinstance(record, dict) else f"a {type(record).__name__}"
    raise SourceError(f"{where}: expected an object with text (a string) or messages, found {found}")
