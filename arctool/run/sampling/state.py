"""What one sequence remembers for the sampler. It belongs to the sequence, moves with its row, and is nothing for most."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from arctool.errors import RequestError
from arctool.run.sampling.grammar import Grammars, GrammarState
from arctool.run.sampling.history import History
from arctool.run.sampling.params import SamplingParams


@dataclass(eq=False)
class RowState:
    """`history` where penalties ask for it, `grammar` where the text is constrained."""

    history: History | None = None
    grammar: GrammarState | None = None

    @property
    def finished(self) -> bool:
        """Whether the constraint is fulfilled and nothing can follow."""
        return self.grammar is not None and self.grammar.finished

    def push(self, token: int) -> None:
        """`token` joined the output."""
        if self.history is not None:
            self.history.push(token)
        if self.grammar is not None:
            self.grammar.push(token)

    def pop(self, tokens: Sequence[int]) -> None:
        """The last of the output, `tokens`, left it again (a speculation that failed)."""
        if self.history is not None:
            for token in tokens:
                self.history.pop(token)
        if self.grammar is not None and tokens:
            self.grammar.pop(len(tokens))


def open_state(params: SamplingParams, prompt_ids: Iterable[int], grammars: Grammars) -> RowState:
    """The state of a new sequence. Raises RequestError for a constraint that cannot be compiled."""
    return RowState(
        history=History(prompt_ids) if params.penalised else None,
        grammar=None if params.constraint is None else grammars.open(params.constraint),
    )


def check_for_model(params: SamplingParams, *, choices: int, room: int, has_text: bool) -> None:
    """What `params` cannot check by itself. Raises RequestError, by field.

    choices: how many tokens the model may choose from; room: how many may follow the prompt; has_text: there is a tokenizer.
    """
    if params.stop and not has_text:
        raise RequestError("stop: strings need a tokenizer, and this model came without one; use stop_token_ids")
    for token in params.bias[0].tolist():
        if token >= choices:
            raise RequestError(f"logit_bias: expected token ids from 0 to {choices - 1}, found {token}")
    if params.min_tokens > room:
        raise RequestError(f"min_tokens: expected at most the {room} tokens that may follow this prompt, found {params.min_tokens}")
