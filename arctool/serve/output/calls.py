"""Finding calls in a text as it is generated: what the readers of all families share. A family says where a call begins and ends.

Every character becomes content, or part of a call's arguments, or is dropped as the frame around a call (its marks, its name, white
space beside it). Until that is decided it is held; a text that turns out to be no call is content, as it stood. What is decided never
depends on how the text was cut: a reader is a generator that is sent one character after the other.
"""

from __future__ import annotations

import json
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection

from arctool.serve.output.json_text import WHITESPACE, Malformed, Steps, container, object_text, space, string, value, word
from arctool.serve.output.parts import CallArguments, CallStart, Content, Part

MAX_HELD = 1 << 16
"""Characters that may wait for a decision, such as arguments that come before their tool's name."""

MAX_SPACE = 64
"""So much white space before a call is its frame, and what is before that is content."""

NAME_KEY = "name"
ARGUMENTS_KEYS = ("arguments", "parameters")
"""Each family has its own word, and models mix them up."""

OTHER_KEYS = ("id", "type")
"""What else a call may have, as text. With any other key it is none: under that the model may have meant arguments."""


class CallReader(ABC):
    """Reads one sample. `names`: the tools on offer; a call to another is content. Not `parallel`: the text ends with its first call.

    `calls`: those whose arguments are complete. `started`: those that began; at most one, the last, is not complete.
    """

    def __init__(self, names: Collection[str], *, parallel: bool, new_id: Callable[[], str]) -> None:
        self.calls = 0
        self.started = 0
        self._names = frozenset(names)
        self._parallel = parallel
        self._new_id = new_id
        self._held: list[str] = []  # not decided yet, the character at hand included
        self._in_frame = False  # what is held can only be the end of a complete call's frame
        self._beside_call = False  # nothing but white space since the last call
        self._spoke = False  # there was content
        self._parts: list[Part] = []
        self._run: list[str] = []  # the newest part's text, as long as its kind does not change
        self._in_arguments = False  # its kind
        self._steps = self._read()
        next(self._steps)

    @property
    def done(self) -> bool:
        """Whether nothing that follows can count."""
        return self.calls > 0 and not self._parallel

    def push(self, text: str) -> list[Part]:
        """More of the text; the parts that it makes certain."""
        for c in text:
            if self.done:
                break
            self._held.append(c)
            self._steps.send(c)
            if len(self._held) > MAX_HELD:
                self._steps.throw(Malformed())
        return self._certain()

    def finish(self) -> list[Part]:
        """The text ends here: what is still held is content, unless it can only be the frame of a complete call."""
        text = "".join(self._held)
        if not self.done and not self._in_frame and not (self._beside_call and not text.strip(WHITESPACE)):
            self._say(text)
        self._held.clear()
        self._steps.close()
        return self._certain()

    @abstractmethod
    def _next(self, c: str) -> Steps[str]:
        """Content up to the next call, and that call, from `c` on; returns the character behind them."""

    def _read(self) -> Steps[None]:
        c = yield
        while True:
            try:
                c = yield from self._next(c)
            except Malformed:
                *text, c = self._held
                self._say("".join(text))
                self._held[:] = [c]

    def _text(self, c: str, opener: str) -> Steps[str]:
        """Content from `c` on up to `opener`, whose first character is not in it again; returns the character behind that."""
        while c != opener[0]:
            if c not in WHITESPACE:
                self._say("".join(self._held))
                self._held.clear()
            elif len(self._held) > MAX_SPACE:
                self._say(self._held.pop(0))
            c = yield
        yield from word(c, opener)
        return (yield)

    def _call(self, c: str, *, bare: bool = False) -> Steps[None]:
        """A call as a JSON object, from its brace `c` to the other. `bare`: nothing but that it has both keys says so."""
        if c != "{":
            raise Malformed
        name = arguments = None
        opened = self.started
        c = yield from self._space((yield))
        while True:
            key = yield from self._string(c)
            c = yield from self._space((yield))
            if c != ":":
                raise Malformed
            c = yield from self._space((yield))
            if key == NAME_KEY and name is None:
                name = yield from self._string(c)
                if name not in self._names:
                    raise Malformed
                c = yield
            elif key in ARGUMENTS_KEYS and arguments is None and name is not None and c == "{":
                arguments = ""
                yield from self._arguments(c, name)
                c = yield
            elif key in ARGUMENTS_KEYS and arguments is None:
                pieces: list[str] = []
                c = yield from value(c, pieces.append)
                arguments = _as_object("".join(pieces))
            elif key in OTHER_KEYS:
                yield from string(c, _ignore)
                c = yield
            else:
                raise Malformed
            c = yield from self._space(c)
            if c == "}":
                break
            if c != ",":
                raise Malformed
            c = yield from self._space((yield))
        if opened == self.started:
            if name is None or (bare and arguments is None):
                raise Malformed
            self._start(name)
            self._argue("{}" if arguments is None else arguments)
            self._complete()
        self._frame()

    def _arguments(self, c: str, name: str) -> Steps[None]:
        """The arguments of a call to `name`, from their brace `c` to the other, streamed."""
        if c != "{":
            raise Malformed
        self._start(name)
        yield from container(c, self._argue)
        self._complete()

    def _space(self, c: str) -> Steps[str]:
        """White space from `c` on, which may belong to a frame; returns the first character behind it."""
        return (yield from space(c, _ignore))

    def _string(self, c: str) -> Steps[str]:
        pieces: list[str] = []
        yield from string(c, pieces.append)
        return str(json.loads("".join(pieces)))

    def _start(self, name: str) -> None:
        """It is a call: all that is held is its frame."""
        self._flush()
        self._parts.append(CallStart(self.started, self._new_id(), name))
        self.started += 1

    def _argue(self, text: str) -> None:
        self._append(text, arguments=True)
        self._held.clear()

    def _complete(self) -> None:
        self.calls += 1
        self._in_frame = self._beside_call = True

    def _frame(self) -> None:
        """What is held is a frame, and that is complete."""
        self._held.clear()
        self._in_frame = False

    def _say(self, text: str) -> None:
        """Content. White space between a call and content is some only where it parts that from content before."""
        self._in_frame = False
        if self._beside_call and not self._spoke:
            text = text.lstrip(WHITESPACE)
        if text:
            self._beside_call = False
            self._spoke = True
            self._append(text, arguments=False)

    def _append(self, text: str, *, arguments: bool) -> None:
        if arguments != self._in_arguments:
            self._flush()
            self._in_arguments = arguments
        self._run.append(text)

    def _flush(self) -> None:
        if self._run:
            text = "".join(self._run)
            self._parts.append(CallArguments(self.started - 1, text) if self._in_arguments else Content(text))
            self._run.clear()

    def _certain(self) -> list[Part]:
        self._flush()
        parts, self._parts = self._parts, []
        return parts


def _ignore(text: str) -> None:
    """What is read needs no keeping."""


def _as_object(text: str) -> str:
    """Arguments that were read as a whole: an object; one in a string, as some models write them; null for none. Else raises Malformed."""
    if text == "null":
        return "{}"
    return object_text(json.loads(text)) if text.startswith('"') else object_text(text)
