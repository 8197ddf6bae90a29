"""The body of /v1/responses, without what needs a server that keeps something, and the conversation that it describes.

Items that one answer consists of (reasoning, a message, calls) become one message for the chat template, as they were one turn.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field

from arctool.serve.problems import Problem
from arctool.serve.protocol.common import (
    MAX_MESSAGES,
    MAX_PARTS,
    MAX_TOOLS,
    Body,
    CallId,
    GrammarFormat,
    JsonObjectFormat,
    JsonSchema,
    JsonSchemaFormat,
    RegexFormat,
    ResponseFormat,
    SamplingFields,
    ServiceFields,
    TextFormat,
    ToolName,
    kinds_of,
)
from arctool.serve.talk import Conversation

LOGPROBS = "message.output_text.logprobs"
STATELESS = "this server keeps nothing between requests"

Status = Literal["in_progress", "completed", "incomplete"] | None


def _stateless(*allowed: Any) -> BeforeValidator:
    """Refuses what only a server with a memory could do."""

    def check(value: Any) -> Any:
        if not any(value is one or value == one for one in allowed):
            raise ValueError(f"{STATELESS}; send the whole conversation in input, and leave this out")
        return value

    return BeforeValidator(check)


class InputText(Body):
    type: Literal["input_text"]
    text: str


class OutputText(Body):
    """Text of an answer as we gave it. Its log-probabilities are no part of a prompt."""

    type: Literal["output_text"]
    text: str
    annotations: list[Any] | None = Field(None, max_length=0)
    logprobs: list[Any] | None = None


Content = Annotated[InputText | OutputText, Field(discriminator="type")]


def _contents(value: Any) -> Any:
    return kinds_of(value, ("input_text", "output_text"), "parts", MAX_PARTS)


class MessageItem(Body):
    type: Literal["message"]
    role: Literal["user", "assistant", "system", "developer"]
    content: Annotated[list[Content], Field(fail_fast=True), BeforeValidator(_contents, json_schema_input_type=str | list[Content])]
    id: str | None = None
    status: Status = None
    phase: None = None


def _arguments(value: Any) -> Any:
    try:
        if not isinstance(value, str) or not isinstance(json.loads(value or "{}"), dict):
            raise ValueError
    except (ValueError, RecursionError) as error:
        raise ValueError("expected the text of a JSON object") from error
    return value


class CallItem(Body):
    type: Literal["function_call"]
    call_id: CallId
    name: ToolName
    arguments: Annotated[str, BeforeValidator(_arguments)]
    id: str | None = None
    status: Status = None


def _texts(value: Any) -> Any:
    return kinds_of(value, ("input_text",), "parts", MAX_PARTS)


class CallOutputItem(Body):
    type: Literal["function_call_output"]
    call_id: CallId
    output: Annotated[list[InputText], Field(fail_fast=True), BeforeValidator(_texts, json_schema_input_type=str | list[InputText])]
    id: str | None = None
    status: Status = None


class ReasoningText(Body):
    type: Literal["reasoning_text"]
    text: str


class ReasoningItem(Body):
    """What the model thought; a summary was for people."""

    type: Literal["reasoning"]
    id: str | None = None
    summary: list[Any] | None = None
    content: list[ReasoningText] | None = Field(None, max_length=MAX_PARTS, fail_fast=True)
    encrypted_content: None = None
    status: Status = None


Item = Annotated[MessageItem | CallItem | CallOutputItem | ReasoningItem, Field(discriminator="type")]

MAX_ITEMS = 2 * MAX_MESSAGES
ITEMS = ("message", "function_call", "function_call_output", "reasoning")


def _items(value: Any) -> Any:
    """One text of the user, or items; a message may leave its type out."""
    if isinstance(value, str):
        return [{"type": "message", "role": "user", "content": value}]
    if isinstance(value, list) and len(value) <= MAX_ITEMS:
        value = [
            {**item, "type": "message"} if isinstance(item, dict) and "role" in item and "type" not in item else item for item in value
        ]
    return kinds_of(value, ITEMS, "items", MAX_ITEMS)


class FunctionTool(Body):
    type: Literal["function"]
    name: str
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None

    def plain(self) -> dict[str, Any]:
        """As chats write a tool."""
        function = {"name": self.name, "description": self.description, "parameters": self.parameters, "strict": self.strict}
        return {"type": "function", "function": {key: value for key, value in function.items() if value is not None}}


class NamedTool(Body):
    type: Literal["function"]
    name: str


class FlatJsonSchemaFormat(Body):
    type: Literal["json_schema"]
    name: str | None = None
    description: str | None = None
    schema_: dict[str, Any] = Field(alias="schema")
    strict: bool | None = None


class TextConfig(Body):
    format: (
        Annotated[TextFormat | JsonObjectFormat | FlatJsonSchemaFormat | RegexFormat | GrammarFormat, Field(discriminator="type")] | None
    ) = None

    def response_format(self) -> ResponseFormat | None:
        """As chats write it."""
        if isinstance(self.format, FlatJsonSchemaFormat):
            return JsonSchemaFormat(type="json_schema", json_schema=JsonSchema(schema=self.format.schema_))
        return self.format


class ReasoningConfig(Body):
    effort: Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"] | None = Field(
        None, description="Only where the model's template knows reasoning_effort; none also where it knows enable_thinking."
    )


class ResponseStreamOptions(Body):
    include_obfuscation: Literal[False] | None = None


class ResponsesBody(SamplingFields, ServiceFields):
    """POST /v1/responses. The fields of sampling that OpenAI does not have are those of /v1/chat/completions."""

    input: Annotated[list[Item], Field(fail_fast=True), BeforeValidator(_items, json_schema_input_type=str | list[Item])]
    model: str | None = None
    instructions: str | None = None
    max_output_tokens: int | None = Field(None, description="Unless given: as many as the context holds.")
    n: Literal[1] | None = None
    tools: list[FunctionTool] | None = Field(None, max_length=MAX_TOOLS, fail_fast=True)
    tool_choice: Literal["none", "auto", "required"] | NamedTool | None = None
    parallel_tool_calls: bool | None = None
    text: TextConfig | None = None
    reasoning: ReasoningConfig | None = None
    include: list[Literal["message.output_text.logprobs"]] | None = Field(None, max_length=1, fail_fast=True)
    top_logprobs: int | None = Field(None, description=f"Alternatives to report with each token, up to 20; only with include {LOGPROBS}.")
    stream: bool | None = None
    stream_options: ResponseStreamOptions | None = None
    safety_identifier: str | None = None
    prompt_cache_key: str | None = None
    store: Annotated[Literal[False] | None, _stateless(False, None)] = None
    background: Annotated[Literal[False] | None, _stateless(False, None)] = None
    previous_response_id: Annotated[None, _stateless(None)] = None
    conversation: Annotated[None, _stateless(None)] = None
    truncation: Annotated[Literal["disabled"] | None, _stateless("disabled", None)] = None


def conversation_of(body: ResponsesBody, variables: Mapping[str, Any]) -> Conversation:
    """What is asked. `variables` go to the template. Raises Problem, by the body's field."""
    choice = body.tool_choice
    return Conversation(
        messages=_messages(body.input, body.instructions),
        tools=[tool.plain() for tool in body.tools or ()],
        tool_choice=choice.name if isinstance(choice, NamedTool) else choice or "auto",
        named=isinstance(choice, NamedTool),
        parallel=body.parallel_tool_calls is not False,
        variables=variables,
    )


def _messages(items: Sequence[Item], instructions: str | None) -> list[dict[str, Any]]:
    """As templates know them."""
    if not items:
        raise Problem(400, "input: expected at least one item", param="input")
    found: list[dict[str, Any]] = [{"role": "system", "content": instructions}] if instructions else []
    called: dict[str, str] = {}
    for i, item in enumerate(items):
        if isinstance(item, CallOutputItem):
            if item.call_id not in called:
                field = f"input[{i}].call_id"
                raise Problem(400, f"{field}: no function_call of this id comes before it", param=field)
            found.append({"role": "tool", "tool_call_id": item.call_id, "name": called[item.call_id], "content": _joined(item.output)})
        elif isinstance(item, MessageItem) and item.role != "assistant":
            found.append({"role": item.role, "content": _joined(item.content)})
        else:
            _answered(found, item)
            if isinstance(item, CallItem):
                called[item.call_id] = item.name
    return found


def _answered(found: list[dict[str, Any]], item: MessageItem | CallItem | ReasoningItem) -> None:
    """One more item of the model's: in the message of its turn, as far as their order lets it be there, else in a new one."""
    turn = found[-1] if found and found[-1]["role"] == "assistant" else None
    begun = turn is not None and (bool(turn["content"]) or "tool_calls" in turn)
    if turn is None or (begun and not isinstance(item, CallItem)):
        turn = {"role": "assistant", "content": ""}
        found.append(turn)
    if isinstance(item, CallItem):
        function = {"name": item.name, "arguments": item.arguments or "{}"}
        turn.setdefault("tool_calls", []).append({"id": item.call_id, "type": "function", "function": function})
        turn["content"] = turn["content"] or None
    elif isinstance(item, MessageItem):
        turn["content"] = _joined(item.content)
    else:
        thought = "".join(text.text for text in item.content or ())
        if thought:
            turn["reasoning_content"] = turn.get("reasoning_content", "") + thought


def _joined(parts: Sequence[InputText | OutputText]) -> str:
    return "".join(part.text for part in parts)
