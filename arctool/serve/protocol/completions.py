"""Bodies of /v1/completions, /tokenize and /detokenize."""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import Field, PlainValidator

from arctool.run.sampling.params import MAX_LOGPROBS
from arctool.serve.protocol.chat import MessageBody, TemplateVariables, ToolBody
from arctool.serve.protocol.common import (
    MAX_MESSAGES,
    MAX_TOOLS,
    Body,
    ResponseFormat,
    SamplingFields,
    ServiceFields,
    StreamOptions,
    within,
)

MAX_PROMPTS = 256


def _prompt(value: Any) -> list[str | list[int]]:
    """One text, one list of token ids, or a list of either."""
    if isinstance(value, str) or _are_ids(value):
        value = [value]
    if not isinstance(value, list):
        raise ValueError(EXPECTED)
    if len(value) > MAX_PROMPTS:
        raise ValueError(f"expected at most {MAX_PROMPTS} prompts, or token ids only, found {len(value)} values")
    if not value or any(item in ("", []) for item in value):
        raise ValueError("expected at least one token, found none")
    if not all(isinstance(item, str) or _are_ids(item) for item in value):
        raise ValueError(EXPECTED)
    return value


def _are_ids(value: Any) -> bool:
    return isinstance(value, list) and set(map(type, value)) == {int}


EXPECTED = "expected a text, a list of token ids, or a list of either"

# Pydantic does not look at the ids one by one: there may be a million.
Prompts = Annotated[list[str | list[int]], PlainValidator(_prompt, json_schema_input_type=str | list[str] | list[int] | list[list[int]])]


def _tokens(value: Any) -> list[int]:
    if value != [] and not _are_ids(value):
        raise ValueError("expected a list of token ids")
    return value


Tokens = Annotated[list[int], PlainValidator(_tokens, json_schema_input_type=list[int])]


class CompletionBody(SamplingFields, ServiceFields):
    """POST /v1/completions: plain text is continued, without a chat template."""

    prompt: Prompts
    model: str | None = None
    max_tokens: int | None = Field(None, json_schema_extra=within(minimum=0), description="16 unless given; 0 only with echo.")
    logprobs: int | None = Field(
        None, json_schema_extra=within(minimum=0, maximum=MAX_LOGPROBS), description="Alternatives to report with each token, up to 20."
    )
    echo: bool | None = None
    best_of: int | None = Field(None, description="Only the value of n.")
    response_format: ResponseFormat | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None


class TokenizeBody(Body):
    """POST /tokenize: a prompt, or messages that are rendered first."""

    model: str | None = None
    prompt: str | None = None
    messages: list[MessageBody] | None = Field(None, max_length=MAX_MESSAGES, fail_fast=True)
    tools: list[ToolBody] | None = Field(None, max_length=MAX_TOOLS, fail_fast=True)
    add_special_tokens: bool | None = Field(None, description="Of a prompt; true unless given.")
    add_generation_prompt: bool | None = Field(None, description="Of messages; true unless given.")
    chat_template_kwargs: TemplateVariables = None


class DetokenizeBody(Body):
    """POST /detokenize."""

    model: str | None = None
    tokens: Tokens
