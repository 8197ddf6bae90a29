"""Calibration text: which files, which documents, which windows; and that bad ones are refused by name."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from arctool.bake.calibration.text import (
    MAX_RECORD_CHARACTERS,
    PIECE_CHARACTERS,
    CalibrationText,
    document_start,
    read_calibration,
    windows,
)
from arctool.errors import ArctoolError, RequestError, SourceError, UsageError

BOS = 1000


def letters(text: str) -> list[int]:
    """An `encode` whose tokens are the characters."""
    return [ord(c) for c in text]


def write(path: Path, text: str) -> str:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(text.encode())
    return str(path)


def records(path: Path, *objects: object) -> str:
    return write(path, "".join(json.dumps(o) + "\n" for o in objects))


def documents(texts: Sequence[CalibrationText]) -> list[str]:
    """The documents of `texts`, put together from their pieces."""
    found: list[str] = []
    for text in texts:
        for piece in text.pieces():
            if piece.starts:
                found.append("")
            found[-1] += piece.text
    return found


def used(source: str, tokens: int, window: int, bos: int | None = None) -> dict[str, int]:
    return {Path(use.name).name: use.tokens for use in windows(read_calibration(source), letters, tokens, window, bos).sources}


# What is read ----------------------------------------------------------------------------------------------------------------------


def test_a_plain_file_is_one_document_whatever_its_suffix(tmp_path: Path) -> None:
    for name in ("a.txt", "b.md", "c.rst", "d"):
        assert documents(read_calibration(write(tmp_path / name, "one\r\n\n\n\ntwo\n"))) == ["one\n\n\n\ntwo\n"]


def test_a_byte_order_mark_is_no_text(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_bytes(b"\xef\xbb\xbfabc")
    assert documents(read_calibration(str(tmp_path / "a.txt"))) == ["abc"]


def test_a_long_document_comes_in_pieces_that_end_with_a_line(tmp_path: Path) -> None:
    text = "".join(f"line {i}\n" for i in range(9000))
    pieces = list(read_calibration(write(tmp_path / "a.txt", text))[0].pieces())
    assert len(pieces) == -(-len(text) // (PIECE_CHARACTERS + len("line 1234\n")))
    assert "".join(p.text for p in pieces) == text
    assert [p.starts for p in pieces] == [True] + [False] * (len(pieces) - 1)
    assert all(p.text.endswith("\n") for p in pieces)


def test_every_line_of_a_jsonl_file_is_a_document_of_its_text_or_of_its_rendered_messages(tmp_path: Path) -> None:
    def render(messages: Sequence[Mapping[str, Any]]) -> str:
        return "".join(f"<{m['role']}>{m['content']}" for m in messages)

    talk = [{"role": "user", "content": "Hi?"}, {"role": "assistant", "content": "Hi!"}]
    source = write(tmp_path / "a.jsonl", f'{{"text": "one\\nline"}}\n\n{{"messages": {json.dumps(talk)}, "id": 7}}\n{{"text": "last"}}')
    assert documents(read_calibration(source, render)) == ["one\nline", "<user>Hi?<assistant>Hi!", "last"]


def test_a_folder_gives_its_text_files_by_path_and_no_hidden_ones(tmp_path: Path) -> None:
    for name in ("b.txt", "a/z.md", "a/y.jsonl", ".hidden.txt", ".git/x.txt", "c.py", "a/.x/y.txt", "A.txt"):
        write(tmp_path / name, '{"text": "t"}')
    found = [Path(t.name).relative_to(tmp_path).as_posix() for t in read_calibration(str(tmp_path))]
    assert found == ["A.txt", "a/y.jsonl", "a/z.md", "b.txt"]


def test_auto_is_the_committed_mix_one_document_a_passage() -> None:
    found = documents(read_calibration("auto"))
    mix = (Path(__file__).parents[2] / "arctool" / "bake" / "calibration" / "texts" / "calibration.txt").read_text(encoding="utf-8")
    assert len(found) > 100
    assert "\n\n".join(found) == mix


# What is refused -------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "data", "message"),
    [
        ("a.txt", b"", "a.txt: empty; calibration needs text"),
        ("a.txt", b" \n\t\n", "a.txt: empty"),
        ("a.txt", b"abc\xff\xfedef", "a.txt: expected UTF-8 text, found the byte 0xff; convert it"),
        ("a.txt", b"caf\xe9", "a.txt: expected UTF-8 text, found the byte 0xe9"),
        ("a.txt", b"PK\x03\x04\x00\x00", "a.txt: expected text, found a NUL byte: a binary file"),
        ("a.jsonl", b"\n\n", "a.jsonl: no usable record: expected an object with text or messages on every line"),
        ("a.jsonl", b'{"text": ""}\n{"text": "  "}\n', "a.jsonl: no usable record"),
        ("a.jsonl", b'{"text": ""}\nnonsense\n', "a.jsonl: line 2: expected a JSON object"),
        ("a.jsonl", b'["text"]\n', "a.jsonl: line 1: expected an object with text (a string) or messages, found a list"),
        ("a.jsonl", b'{"text": 3}\n', "found an object with text"),
        ("a.jsonl", b'{"b": "x", "a": "y"}\n', "found an object with a, b"),
        ("a.jsonl", b"[" * 100_000, "a.jsonl: line 1: expected a JSON object"),
        ("a.jsonl", b'{"messages": []}\n', "a.jsonl: line 1: messages need the model's chat template, and it has none; give text"),
    ],
)
def test_a_file_that_is_no_text_is_refused_by_name(tmp_path: Path, name: str, data: bytes, message: str) -> None:
    (tmp_path / name).write_bytes(data)
    for source in (tmp_path / name, tmp_path):
        with pytest.raises(SourceError) as caught:
            read_calibration(str(source))
        assert message in str(caught.value)
        assert "\n" not in str(caught.value)


def test_what_is_wrong_further_on_is_found_when_it_is_reached(tmp_path: Path) -> None:
    good = [{"text": "x" * 100}] * 3
    (tmp_path / "a.jsonl").write_text("".join(json.dumps(o) + "\n" for o in good) + "{\n")
    texts = read_calibration(str(tmp_path / "a.jsonl"))
    assert windows(texts, letters, 300, 100, None).tokens == 300
    with pytest.raises(SourceError, match=r"a\.jsonl: line 4: expected a JSON object"):
        windows(texts, letters, 400, 100, None)


def test_a_record_that_the_template_or_the_tokenizer_refuses_is_named(tmp_path: Path) -> None:
    def refuse(_: object) -> list[int]:
        raise RequestError("messages[0]: no")

    source = records(tmp_path / "a.jsonl", {"messages": [{}]})
    with pytest.raises(SourceError, match=r"a\.jsonl: line 1: messages\[0\]: no"):
        read_calibration(source, refuse)  # type: ignore[arg-type]
    with pytest.raises(SourceError, match=r"b\.txt: messages\[0\]: no"):
        windows(read_calibration(write(tmp_path / "b.txt", "abc" * 99)), refuse, 32, 16, None)


def test_a_record_without_end_is_not_read_into_memory(tmp_path: Path) -> None:
    with (tmp_path / "a.jsonl").open("wb") as file:
        file.truncate(MAX_RECORD_CHARACTERS + 5)
    with pytest.raises(SourceError, match=r"a\.jsonl: line 1: longer than 16777216 characters"):
        read_calibration(str(tmp_path / "a.jsonl"))


@pytest.mark.parametrize(
    ("source", "error", "message"),
    [
        ("", UsageError, "expected a file, a folder or auto, found ''"),
        ("a\0b", UsageError, "found 'a\\x00b'"),
        ("{tmp}/nothing", SourceError, "nothing: cannot be read: No such file or directory"),
        ("{tmp}", UsageError, "no .jsonl, .md, .txt file in it"),
        ("/dev/zero", SourceError, "/dev/zero: expected a regular file of text"),
        ("/proc/self/mem", SourceError, "/proc/self/mem: cannot be read: Input/output error"),
        ("{tmp}/" + "x" * 300, SourceError, "cannot be read: File name too long"),
    ],
)
def test_a_source_that_is_none_is_refused(tmp_path: Path, source: str, error: type[ArctoolError], message: str) -> None:
    with pytest.raises(error) as caught:
        read_calibration(source.format(tmp=tmp_path))
    assert message in str(caught.value)


def test_a_broken_link_and_a_pipe_in_a_folder_are_named_and_not_waited_for(tmp_path: Path) -> None:
    (tmp_path / "a").mkdir()
    (tmp_path / "a" / "gone.txt").symlink_to(tmp_path / "nowhere")
    with pytest.raises(SourceError, match=r"gone\.txt: cannot be read"):
        read_calibration(str(tmp_path / "a"))
    (tmp_path / "b").mkdir()
    os.mkfifo(tmp_path / "b" / "pipe.txt")
    with pytest.raises(SourceError, match=r"pipe\.txt: expected a regular file"):
        read_calibration(str(tmp_path / "b"))


# Windows ---------------------------------------------------------------------------------------------------------------------------


def test_windows_are_the_text_in_order_and_whole(tmp_path: Path) -> None:
    texts = read_calibration(write(tmp_path / "a.txt", "".join(chr(97 + i % 26) for i in range(1000))))
    found = windows(texts, letters, 100, 32, None)
    assert found.ids.shape == (3, 32)
    assert found.ids.dtype == np.int32
    assert found.tokens == 96
    assert found.ids.ravel().tolist() == [97 + i % 26 for i in range(96)]
    [use] = found.sources
    assert (use.bytes, use.tokens) == (1000, 96)


def test_files_give_equal_shares_and_what_one_lacks_the_others_make_up(tmp_path: Path) -> None:
    for name, size in (("a", 10_000), ("b", 50), ("c", 10_000), ("d", 10_000)):
        write(tmp_path / f"{name}.txt", name * size)
    assert used(str(tmp_path), 800, 100) == {"a.txt": 250, "b.txt": 50, "c.txt": 250, "d.txt": 250}
    assert used(str(tmp_path), 199, 32) == {"a.txt": 48, "b.txt": 48, "c.txt": 48, "d.txt": 48}
    assert used(str(tmp_path), 160, 16) == {"a.txt": 40, "b.txt": 40, "c.txt": 40, "d.txt": 40}
    whole = windows(read_calibration(str(tmp_path)), letters, 160, 16, None).ids.ravel()
    assert "".join(map(chr, whole)) == "a" * 40 + "b" * 40 + "c" * 40 + "d" * 40


def test_a_file_of_which_nothing_was_used_is_no_source(tmp_path: Path) -> None:
    for i in range(20):
        write(tmp_path / f"{i:02}.txt", "abc")
    assert used(str(tmp_path), 18, 18) == {f"{i:02}.txt": 1 for i in range(18)}


def test_a_long_document_has_no_bos_where_its_pieces_meet(tmp_path: Path) -> None:
    source = write(tmp_path / "a.txt", "line of text\n" * 5000)
    found = windows(read_calibration(source), letters, 64_000, 2000, BOS).ids
    assert np.argwhere(found == BOS).tolist() == [[i, 0] for i in range(32)]


def test_a_file_is_read_only_as_far_as_it_is_needed(tmp_path: Path) -> None:
    path = tmp_path / "big.txt"
    write(path, "word " * 20_000)
    with path.open("r+b") as file:  # ten gigabytes, of which the disk holds nothing; reaching the hole would be refused as binary
        file.truncate(10_000_000_000)
    found = windows(read_calibration(str(path)), letters, 4096, 512, None)
    assert found.tokens == 4096
    assert found.sources[0].bytes <= 2 * PIECE_CHARACTERS


def test_every_window_and_every_document_begins_with_bos_and_none_has_two(tmp_path: Path) -> None:
    source = records(tmp_path / "a.jsonl", *({"text": "x" * n} for n in (40, 31, 20, 500)))
    found = windows(read_calibration(source), letters, 128, 32, BOS).ids
    x = ord("x")
    # 40 = 31 + 9; after them the second document (31), of which the rest of window 2 holds 21; then its last 10, the third, the fourth.
    expected = [
        [BOS] + [x] * 31,
        [BOS] + [x] * 9 + [BOS] + [x] * 21,
        [BOS] + [x] * 10 + [BOS] + [x] * 20,
        [BOS] + [x] * 31,
    ]
    assert found.tolist() == expected


def test_a_conversation_that_brings_its_bos_gets_no_second_one(tmp_path: Path) -> None:
    def encode(text: str) -> list[int]:
        return [BOS, *letters(text)]

    found = windows(read_calibration(write(tmp_path / "a.txt", "y" * 100)), encode, 32, 32, BOS).ids
    assert found.tolist() == [[BOS] + [ord("y")] * 31]


def test_fewer_tokens_than_asked_for_make_fewer_windows(tmp_path: Path) -> None:
    found = windows(read_calibration(write(tmp_path / "a.txt", "z" * 250)), letters, 100_000, 64, None)
    assert (found.ids.shape, found.tokens) == ((3, 64), 192)
    assert found.sources[0].tokens == 192


@pytest.mark.parametrize("bos", [None, BOS])
def test_a_text_shorter_than_a_window_makes_one_shorter_window(tmp_path: Path, bos: int | None) -> None:
    texts = read_calibration(write(tmp_path / "a.txt", "z" * 20))
    found = windows(texts, letters, 1000, 500, bos)
    assert found.ids.tolist() == [([] if bos is None else [bos]) + [122] * 20]
    with pytest.raises(UsageError, match=r"--calib .*b\.txt: expected at least 16 tokens of text, found 15; give more text"):
        windows(read_calibration(write(tmp_path / "b.txt", "z" * (15 if bos is None else 14))), letters, 1000, 500, bos)


def test_fewer_tokens_than_a_window_make_the_window_shorter(tmp_path: Path) -> None:
    texts = read_calibration(write(tmp_path / "a.txt", "z" * 5000))
    assert windows(texts, letters, 100, 2048, None).ids.shape == (1, 100)


@pytest.mark.parametrize(("tokens", "window"), [(15, 100), (0, 100), (-1, 100), (100, 15), (100, 0)])
def test_counts_that_make_no_sense_are_refused(tmp_path: Path, tokens: int, window: int) -> None:
    texts = read_calibration(write(tmp_path / "a.txt", "z" * 5000))
    with pytest.raises(UsageError, match=r"--calib-tokens: expected at least 16 tokens"):
        windows(texts, letters, tokens, window, None)


def test_the_identity_is_of_the_ids_and_their_shape(tmp_path: Path) -> None:
    a, b = write(tmp_path / "a.txt", "abcd" * 100), write(tmp_path / "b.txt", "abcd" * 200)
    first = windows(read_calibration(a), letters, 64, 32, None)
    assert first.identity == hashlib.sha256(b"32:" + np.array(letters("abcd" * 16), "<i4").tobytes()).hexdigest()
    assert windows(read_calibration(b), letters, 64, 32, None).identity == first.identity
    assert windows(read_calibration(a), letters, 64, 64, None).identity != first.identity
    assert windows(read_calibration(a), letters, 96, 32, None).identity != first.identity


def test_a_start_token_is_what_the_tokenizer_puts_before_nothing() -> None:
    assert document_start(lambda text: [7, *letters(text)]) == 7
    assert document_start(letters) is None


def test_the_committed_mix_is_enough_for_the_default_and_comes_in_its_own_order() -> None:
    found = windows(read_calibration("auto"), letters, 65_536, 2048, None)
    assert found.ids.shape == (32, 2048)
    head = "".join(map(chr, found.ids.ravel()))
    [(start, *_)] = [documents(read_calibration("auto"))]
    assert head.startswith(start)
