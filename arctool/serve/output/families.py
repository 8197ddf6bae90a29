"""Which family of models writes its calls how, and which of them a model belongs to. A new family is a reader, a form and a line here."""

from __future__ import annotations

import hashlib
import secrets
import string
from collections.abc import Iterable
from dataclasses import dataclass

from arctool.errors import UsageError
from arctool.run.tokenizer import Tokenizer
from arctool.serve.output import hermes, llama, mistral
from arctool.serve.output.calls import CallReader
from arctool.serve.output.form import Form
from arctool.serve.output.reasoning import ReasoningTags

ID_LETTERS = string.ascii_letters + string.digits


@dataclass(frozen=True)
class ToolFamily:
    """`marks`: texts that may be single tokens, and must then be visible. `id_length`: of ids that its templates accept (None: any)."""

    name: str
    reader: type[CallReader]
    form: Form
    marks: tuple[str, ...]
    id_length: int | None = None

    def new_id(self) -> str:
        """An id for a call."""
        if self.id_length is None:
            return f"call_{secrets.token_hex(12)}"
        return "".join(secrets.choice(ID_LETTERS) for _ in range(self.id_length))

    def fitting_id(self, call_id: str) -> str:
        """`call_id` as the family's templates accept it: itself, or always the same other one."""
        if self.id_length is None or (len(call_id) == self.id_length and call_id.isascii() and call_id.isalnum()):
            return call_id
        digest = hashlib.sha256(call_id.encode("utf-8", "surrogatepass")).digest()
        return "".join(ID_LETTERS[byte % len(ID_LETTERS)] for byte in digest[: self.id_length])


HERMES = ToolFamily("hermes", hermes.HermesReader, hermes.FORM, (hermes.OPEN, hermes.CLOSE))
LLAMA3 = ToolFamily("llama3", llama.LlamaReader, llama.FORM, (llama.TAG,))
MISTRAL = ToolFamily("mistral", mistral.MistralReader, mistral.ARRAY, (mistral.CALLS, mistral.ARGS, mistral.ID), id_length=9)
MISTRAL_MARKED = ToolFamily("mistral-args", mistral.MistralReader, mistral.MARKED, MISTRAL.marks, id_length=9)

FAMILIES = {family.name: family for family in (HERMES, LLAMA3, MISTRAL, MISTRAL_MARKED)}

OTHER_TAGGED = ("<function=", "<arg_key>")
"""Templates with the tags of Hermes around something that is no JSON (Qwen3-Coder, GLM)."""


def by_name(name: str) -> ToolFamily:
    """The family that `--tool-parser` names. Raises UsageError."""
    if name not in FAMILIES:
        raise UsageError(f"--tool-parser: expected auto, none or one of {', '.join(FAMILIES)}, found {name!r:.40}")
    return FAMILIES[name]


def detect(template_source: str) -> ToolFamily | None:
    """The family of a model by the text of its chat template; None: none that we read (`generic.py` serves such models)."""
    if mistral.CALLS in template_source:
        return MISTRAL_MARKED if mistral.ARGS in template_source else MISTRAL
    if llama.TAG in template_source or ("ipython" in template_source and '"parameters"' in template_source):
        return LLAMA3
    if hermes.OPEN in template_source and not any(mark in template_source for mark in OTHER_TAGGED):
        return HERMES
    return None


def shown_token_ids(tokenizer: Tokenizer, family: ToolFamily | None, reasoning: ReasoningTags | None) -> tuple[int, ...]:
    """What `SamplingParams.shown_token_ids` must name so that the parser sees the family's marks and the tags of reasoning."""
    wanted: Iterable[str] = (*(family.marks if family else ()), *((reasoning.open, reasoning.close) if reasoning else ()))
    found = (tokenizer.added.get(text) for text in wanted)
    return tuple(sorted(token for token in found if token is not None and tokenizer.is_hidden(token)))
