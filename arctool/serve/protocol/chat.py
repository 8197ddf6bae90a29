"""The body of /v1/chat/completions."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field, ValidationInfo, field_validator

from arctool.run.sampling.params import MAX_LOGPROBS
from arctool.serve.protocol.common import (
    MAX_MESSAGES,
    MAX_PARTS,
    MAX_TOOLS,
    Body,
    ResponseFormat,
    SamplingFields,
    ServiceFields,
    StreamOptions,
    within,
)

MAX_VARIABLES = 100


class TextPart(Body):
    type: Literal["text"]
    text: str


def _content(value: Any) -> Any:
    """Text, or parts of text. Says which kind of part it cannot read."""
    if value is None or isinstance(value, str):
        return value
    if not isinstance(value, list):
        raise ValueError("expected a text or a list of text parts")
    if not value:
        raise ValueError("expected at least one part, found none")
    if len(value) > MAX_PARTS:
        raise ValueError(f"expected at most {MAX_PARTS} parts, found {len(value)}")
    for part in value:
        kind = part.get("type") if isinstance(part, dict) else None
        if kind != "text":
            what = f"a part of type {kind[:40]}" if isinstance(kind, str) else "something else"
            raise ValueError(f"expected parts of type text, found {what}; this model reads text only")
    return value


Parts = Annotated[list[TextPart], Field(fail_fast=True)]
Content = Annotated[str | Parts | None, BeforeValidator(_content, json_schema_input_type=str | list[TextPart] | None)]


class FunctionCall(Body):
    name: str
    arguments: str


class ToolCallBody(Body):
    id: str
    type: Literal["function"] = "function"
    function: FunctionCall


class MessageBody(Body):
    """One message. Fields that OpenAI's clients send back with an answer of theirs are taken where they are empty."""

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: Content = None
    name: str | None = None
    tool_calls: list[ToolCallBody] | None = Field(None, max_length=MAX_TOOLS, fail_fast=True)
    tool_call_id: str | None = None
    reasoning_content: str | None = None
    refusal: None = None
    audio: None = None
    function_call: None = None
    annotations: list[Any] | None = Field(None, max_length=0)

    @field_validator("tool_calls", "reasoning_content", "tool_call_id")
    @classmethod
    def _whose(cls, value: Any, info: ValidationInfo) -> Any:
        owner = "tool" if info.field_name == "tool_call_id" else "assistant"
        if value and info.data.get("role") != owner:  # templates would pass over it in silence
            raise ValueError(f"only in messages of role {owner}")
        return value

    def plain(self) -> dict[str, Any]:
        """As templates know it: parts joined, absent fields absent."""
        content = self.content if self.content is None or isinstance(self.content, str) else "".join(part.text for part in self.content)
        message: dict[str, Any] = {"role": self.role, "content": content}
        for field in ("name", "tool_call_id", "reasoning_content"):
            if (value := getattr(self, field)) is not None:
                message[field] = value
        if self.tool_calls:
            message["tool_calls"] = [call.model_dump() for call in self.tool_calls]
        return message


TemplateVariables = Annotated[dict[str, Any] | None, Field(max_length=MAX_VARIABLES)]


class FunctionBody(Body):
    name: str
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class ToolBody(Body):
    type: Literal["function"]
    function: FunctionBody


class NamedFunction(Body):
    name: str


class NamedTool(Body):
    type: Literal["function"]
    function: NamedFunction


class ChatBody(SamplingFields, ServiceFields):
    """POST /v1/chat/completions."""

    messages: list[MessageBody] = Field(max_length=MAX_MESSAGES, fail_fast=True, json_schema_extra=within(minItems=1))
    model: str | None = None
    max_tokens: int | None = Field(None, json_schema_extra=within(minimum=1), description="Unless given: as many as the context holds.")
    max_completion_tokens: int | None = Field(None, json_schema_extra=within(minimum=1), description="OpenAI's newer name of max_tokens.")
    logprobs: bool | None = None
    top_logprobs: int | None = Field(
        None, json_schema_extra=within(minimum=0, maximum=MAX_LOGPROBS), description="Alternatives to report with each token, up to 20."
    )
    response_format: ResponseFormat | None = None
    tools: list[ToolBody] | None = Field(None, max_length=MAX_TOOLS, fail_fast=True)
    tool_choice: Literal["none", "auto", "required"] | NamedTool | None = None
    parallel_tool_calls: bool | None = None
    chat_template_kwargs: TemplateVariables = Field(None, description="Variables that the model's template knows, enable_thinking say.")
    reasoning_effort: str | None = Field(None, description="Only where the model's template knows it.")
    stream: bool | None = None
    stream_options: StreamOptions | None = None
