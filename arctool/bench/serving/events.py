"""Server-sent events from bytes in any pieces (WHATWG HTML, section 9.2). Knows nothing of what the events say."""

from __future__ import annotations

LONGEST = 16 << 20
"""Bytes of one event: a server that never ends one must not fill our memory."""


class EventTooLong(Exception):
    """An event of more than `LONGEST` bytes."""


class EventReader:
    """Feed it what the socket brings; it gives back the data of every event that is whole.

    Comments, names and ids of events are dropped; a line ends with LF, CR LF or CR; several lines of data are joined by LF. What has no
    empty line behind it when the stream ends is no event.
    """

    __slots__ = ("_after_cr", "_data", "_held", "_rest")

    def __init__(self) -> None:
        self._rest = b""
        self._data: list[bytes] = []
        self._held = 0
        self._after_cr = False

    def feed(self, piece: bytes) -> list[bytes]:
        """The data of the events that end in `piece`. Raises EventTooLong."""
        if self._after_cr and piece:
            piece = piece.removeprefix(b"\n")
            self._after_cr = False
        if b"\r" in piece:
            self._after_cr = piece.endswith(b"\r")
            piece = piece.replace(b"\r\n", b"\n").replace(b"\r", b"\n")
        lines = (self._rest + piece).split(b"\n")
        self._rest = lines.pop()
        events = []
        for line in lines:
            if not line:
                if self._data:
                    events.append(self._data[0] if len(self._data) == 1 else b"\n".join(self._data))
                    self._data, self._held = [], 0
            elif line.startswith(b"data:"):
                self._data.append(line[6:] if line.startswith(b"data: ") else line[5:])
                self._held += len(line)
            elif line == b"data":
                self._data.append(b"")
        if self._held + len(self._rest) > LONGEST:
            raise EventTooLong
        return events
