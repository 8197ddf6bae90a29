"""One sample's text, as it is generated, into the parts that a client reads: reasoning, then content and calls."""

from __future__ import annotations

from collections.abc import Callable, Collection

from arctool.serve.output.families import ToolFamily
from arctool.serve.output.parts import Content, Part, Reasoning
from arctool.serve.output.reasoning import ReasoningSplitter, ReasoningTags


class OutputParser:
    """Feed it a sample's text in any pieces by `push`, then call `finish` once; the parts, put together, are the same for any pieces.

    Without a `family`, or with no `names` on offer, everything is content; without `reasoning` tags nothing is reasoning. `inside`: the
    prompt has opened them already. Nothing is lost: text that turns out to be no call, or one of a tool that is not among `names`, is
    content as it stood; only the frame of a call (its marks, white space beside it) and the tags of reasoning are dropped.

    A call that breaks off, because the text ends in it or goes on as no JSON can, keeps the parts that have left: a `CallStart` and the
    beginning of its arguments; what follows the break is content. `started` counts it, `calls` does not: that counts calls whose
    arguments are whole. A server gives `tool_calls` as the reason of the end only where the engine says `stop` and `calls` is not 0;
    what was cut by max_tokens keeps `length`, with whole calls or without.

    Without `parallel` the answer ends with its first whole call, as with a stop string: `done` becomes true, what follows is ignored, and
    the server may cancel the sample. (`forced_calls` lets the model write no second one.)
    """

    def __init__(
        self,
        family: ToolFamily | None = None,
        names: Collection[str] = (),
        *,
        reasoning: ReasoningTags | None = None,
        inside: bool = False,
        parallel: bool = True,
        new_id: Callable[[], str] | None = None,
    ) -> None:
        """`new_id` makes the calls' ids; the default makes random ones that the family's templates accept."""
        self._reader = None
        if family is not None and names:
            self._reader = family.reader(names, parallel=parallel, new_id=family.new_id if new_id is None else new_id)
        self._splitter = None if reasoning is None else ReasoningSplitter(reasoning, inside=inside)

    @property
    def calls(self) -> int:
        """Calls whose arguments are whole."""
        return 0 if self._reader is None else self._reader.calls

    @property
    def started(self) -> int:
        """Calls that have a `CallStart`: one more than `calls` where the last broke off or is not complete yet."""
        return 0 if self._reader is None else self._reader.started

    @property
    def done(self) -> bool:
        """Whether the answer is complete, and what follows is ignored."""
        return self._reader is not None and self._reader.done

    def push(self, text: str) -> list[Part]:
        """More of the text; the parts that it makes certain."""
        thought, answer = ("", text) if self._splitter is None else self._splitter.push(text)
        return [*_reasoning(thought), *self._answer(answer)]

    def finish(self) -> list[Part]:
        """The text ends here; the rest of its parts."""
        thought, answer = ("", "") if self._splitter is None else self._splitter.finish()
        return [*_reasoning(thought), *self._answer(answer), *(() if self._reader is None else self._reader.finish())]

    def _answer(self, text: str) -> list[Part]:
        if self._reader is not None:
            return self._reader.push(text)
        return [Content(text)] if text else []


def _reasoning(text: str) -> list[Part]:
    return [Reasoning(text)] if text else []
