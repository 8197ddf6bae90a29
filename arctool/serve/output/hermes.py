"""Calls as Hermes and Qwen write them: a JSON object in tags, several in a row, text before and between."""

from __future__ import annotations

from arctool.serve.output.calls import CallReader
from arctool.serve.output.form import ARGUMENTS, NAME, Form
from arctool.serve.output.json_text import Steps, word

OPEN, CLOSE = "<tool_call>", "</tool_call>"

FORM = Form(call=(OPEN, "\n", '{"name": "', NAME, '", "arguments": ', ARGUMENTS, "}", "\n", CLOSE), between=("\n",))


class HermesReader(CallReader):
    """A closing tag may be missing before the next opening one, and at the end: models forget it."""

    def _next(self, c: str) -> Steps[str]:
        c = yield from self._text(c, OPEN)
        while True:
            yield from self._call((yield from self._space(c)))
            c = yield from self._space((yield))
            yield from word(c, "<")
            self._in_frame = True  # as long as it may be the closing tag
            c = yield
            if c == CLOSE[1]:
                yield from word(c, CLOSE[1:])
                self._frame()
                return (yield)
            self._in_frame = False
            yield from word(c, OPEN[1:])
            c = yield
