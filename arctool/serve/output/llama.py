"""Calls as Llama 3 writes them: a JSON object that is the whole answer, or follows a mark."""

from __future__ import annotations

from arctool.serve.output.calls import CallReader
from arctool.serve.output.form import ARGUMENTS, NAME, Form
from arctool.serve.output.json_text import Steps

TAG = "<|python_tag|>"

FORM = Form(call=('{"name": "', NAME, '", "parameters": ', ARGUMENTS, "}"), between=("; ",))


class LlamaReader(CallReader):
    """Without the mark only an answer that begins with its brace can be a call, and needs both keys: other JSON is an ordinary answer.

    Several calls are parted by semicolons or white space.
    """

    _begins = True

    def _next(self, c: str) -> Steps[str]:
        bare, self._begins = self._begins, False
        if bare:
            c = yield from self._space(c)
        if not bare or c != "{":
            bare = False
            c = yield from self._text(c, TAG)
            c = yield from self._space(c)
        while True:
            yield from self._call(c, bare=bare)
            c = yield from self._space((yield))
            if c == ";":
                self._in_frame = True
                c = yield from self._space((yield))
                self._in_frame = False
            if c != "{":
                return c
