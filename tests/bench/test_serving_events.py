"""Server-sent events: the same events however the bytes were cut, in all three line ends, and nothing that is not an event."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from arctool.bench.serving import events
from arctool.bench.serving.events import EventReader, EventTooLong

STREAM = (
    b": a comment that keeps the connection alive\r\n\r\n"
    b'data: {"a":\ndata:"b"}\n\n'
    b"data: one\r\ndata: two\r\n\r\n"
    b"event: message\rid: 7\rdata:plain\r\r"
    b"\n\n"
    b"data\n\n"
    b"data:  two spaces, and a colon: here\r\n\r\n"
    b": another\ndata: \xc3\xa9\xf0\x9f\x99\x82\n\n"
    b"retry: 10\n\n"
    b"data: [DONE]\n\n"
    b"data: cut off"
)
WANTED = [b'{"a":\n"b"}', b"one\ntwo", b"plain", b"", b" two spaces, and a colon: here", "é🙂".encode(), b"[DONE]"]


def read(pieces: list[bytes]) -> list[bytes]:
    reader = EventReader()
    return [event for piece in pieces for event in reader.feed(piece)]


def test_a_stream_in_one_piece_gives_its_events() -> None:
    assert read([STREAM]) == WANTED


def test_a_stream_cut_at_any_one_place_or_at_every_place_gives_the_same() -> None:
    assert read([STREAM[at : at + 1] for at in range(len(STREAM))]) == WANTED
    for at in range(len(STREAM)):
        assert read([STREAM[:at], STREAM[at:]]) == WANTED, at


@given(
    lines=st.lists(st.sampled_from(["data: x", "data:y", "", "", ": c", "event: e", "data: é "]), max_size=12),
    ends=st.lists(st.sampled_from(["\n", "\r\n", "\r"]), min_size=12, max_size=12),
    cuts=st.sets(st.integers(0, 90)),
)
def test_line_ends_and_cuts_change_nothing(lines: list[str], ends: list[str], cuts: set[int]) -> None:
    """Each line keeps one end, where CR and LF of neighbouring empty lines cannot be taken for one CR LF."""
    ends = ["\r\n" if end == "\r" and index + 1 < len(lines) and not lines[index + 1] else end for index, end in enumerate(ends)]
    data = "".join(line + end for line, end in zip(lines, ends, strict=False)).encode()
    places = sorted({0, len(data), *(cut for cut in cuts if cut < len(data))})
    pieces = [data[a:b] for a, b in pairwise(places)]
    held: list[str] = []
    wanted = []
    for line in lines:
        if line.startswith("data:"):
            held.append(line.removeprefix("data:").removeprefix(" "))
        elif not line and held:
            wanted.append("\n".join(held).encode())
            held = []
    assert read(pieces) == wanted


def test_an_event_that_never_ends_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(events, "LONGEST", 100)
    reader = EventReader()
    assert reader.feed(b"data: " + b"x" * 80 + b"\n\n" * 30) == [b"x" * 80]
    with pytest.raises(EventTooLong):
        reader.feed(b"data: " + b"x" * 100)
    lines = EventReader()
    with pytest.raises(EventTooLong):
        lines.feed(b"data: xxxxxxxxxxxxxxxx\n" * 6)
