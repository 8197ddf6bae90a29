"""Calls as Mistral's models write them: older ones as one JSON array behind a mark, newer ones each behind its own."""

from __future__ import annotations

from arctool.serve.output.calls import CallReader
from arctool.serve.output.form import ARGUMENTS, NAME, Form
from arctool.serve.output.json_text import Malformed, Steps, word
from arctool.serve.output.tools import MAX_NAME, NAME_LETTERS

CALLS, ARGS, ID = "[TOOL_CALLS]", "[ARGS]", "[CALL_ID]"

ARRAY = Form(before=(CALLS, "["), call=('{"name": "', NAME, '", "arguments": ', ARGUMENTS, "}"), between=(", ",), after=("]",))
MARKED = Form(call=(CALLS, NAME, ARGS, ARGUMENTS), between=())

LETTERS = frozenset(NAME_LETTERS)


class MistralReader(CallReader):
    """Both forms. Of the newer one `[ARGS]` may be missing, and an id stand before it: which is the case depends on the model's age."""

    def _next(self, c: str) -> Steps[str]:
        c = yield from self._text(c, CALLS)
        c = yield from self._space(c)
        yield from (self._array() if c == "[" else self._marked(c))
        return (yield)

    def _array(self) -> Steps[None]:
        c = yield from self._space((yield))
        while True:
            yield from self._call(c)
            c = yield from self._space((yield))
            if c == "]":
                self._frame()
                return
            yield from word(c, ",")
            self._in_frame = True
            c = yield from self._space((yield))
            self._in_frame = False

    def _marked(self, c: str) -> Steps[None]:
        name = ""
        while c in LETTERS and len(name) < MAX_NAME:
            name += c
            c = yield
        if name not in self._names:
            raise Malformed
        if c == "[":
            c = yield
            if c == ID[1]:
                yield from word(c, ID[1:])
                while (c := (yield)) in LETTERS:
                    pass
                yield from word(c, "[")
                c = yield
            yield from word(c, ARGS[1:])
            c = yield
        yield from self._arguments((yield from self._space(c)), name)
        self._frame()
