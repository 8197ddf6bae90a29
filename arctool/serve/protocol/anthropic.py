"""The bodies of /v1/messages and /v1/messages/count_tokens, and the conversation that they describe.

`cache_control` is taken wherever Anthropic takes it: it asks for a prefix to be found again, and here every prefix is, marked or not, as
long as there is room; `usage` says what really was. Texts of several blocks are put together as they are, without anything between them.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field

from arctool.run.sampling.params import MAX_STOP_STRINGS
from arctool.serve.problems import Problem
from arctool.serve.protocol.common import MAX_MESSAGES, MAX_PARTS, MAX_TOOLS, Body, CallId, SamplingFields, ToolName, kinds_of
from arctool.serve.talk import Conversation

ERROR = "Error: "
"""What a result begins with that is an error: templates have no other place for it."""


class CacheControl(Body):
    type: Literal["ephemeral"]
    ttl: Literal["5m", "1h"] | None = None


class Block(Body):
    cache_control: CacheControl | None = None


class TextBlock(Block):
    type: Literal["text"]
    text: str
    citations: None = None


class DirectCaller(Body):
    type: Literal["direct"]


class ToolUseBlock(Block):
    type: Literal["tool_use"]
    id: CallId
    name: ToolName
    input: dict[str, Any]
    caller: DirectCaller | None = None


def _texts(value: Any) -> Any:
    """Text, or blocks of text, as blocks of text."""
    return kinds_of(value, ("text",), "blocks", MAX_PARTS)


Texts = Annotated[list[TextBlock], Field(fail_fast=True), BeforeValidator(_texts, json_schema_input_type=str | list[TextBlock])]


class ToolResultBlock(Block):
    type: Literal["tool_result"]
    tool_use_id: CallId
    content: Texts | None = None
    is_error: bool | None = None


class ThinkingBlock(Body):
    """What the model thought. `signature` is of Anthropic's models; ours have none, and anyone's text is as good as theirs."""

    type: Literal["thinking"]
    thinking: str
    signature: str | None = None


AnyBlock = Annotated[TextBlock | ToolUseBlock | ToolResultBlock | ThinkingBlock, Field(discriminator="type")]


def _blocks(value: Any) -> Any:
    return kinds_of(value, ("text", "tool_use", "tool_result", "thinking"), "blocks", MAX_PARTS)


Blocks = Annotated[list[AnyBlock], Field(fail_fast=True), BeforeValidator(_blocks, json_schema_input_type=str | list[AnyBlock])]


class MessageBody(Body):
    role: Literal["user", "assistant", "system"]
    content: Blocks


class ToolBody(Block):
    type: Literal["custom"] | None = None
    name: str
    description: str | None = None
    input_schema: dict[str, Any]
    strict: bool | None = None

    def plain(self) -> dict[str, Any]:
        """As OpenAI writes a tool."""
        function = {"name": self.name, "description": self.description, "parameters": self.input_schema, "strict": self.strict}
        return {"type": "function", "function": {key: value for key, value in function.items() if value is not None}}


class AutoChoice(Body):
    type: Literal["auto"]
    disable_parallel_tool_use: bool | None = None


class AnyChoice(Body):
    type: Literal["any"]
    disable_parallel_tool_use: bool | None = None


class NamedChoice(Body):
    type: Literal["tool"]
    name: str
    disable_parallel_tool_use: bool | None = None


class NoChoice(Body):
    type: Literal["none"]


class Thinking(Body):
    type: Literal["enabled"]
    budget_tokens: int | None = Field(None, ge=1, description="Nothing here cuts thinking short: at least max_tokens − 1, or leave it out.")


class NoThinking(Body):
    type: Literal["disabled"]


class AdaptiveThinking(Body):
    type: Literal["adaptive"]


class JsonFormat(Body):
    type: Literal["json_schema"]
    schema_: dict[str, Any] = Field(alias="schema")


class OutputConfig(Body):
    effort: Literal["low", "medium", "high"] | None = Field(None, description="Only where the model's template knows reasoning_effort.")
    format: JsonFormat | None = None


class Metadata(Body):
    user_id: str | None = None


class PromptFields(Body):
    """What a prompt is made of."""

    messages: list[MessageBody] = Field(max_length=MAX_MESSAGES, fail_fast=True)
    model: str | None = None
    system: Texts | None = None
    tools: list[ToolBody] | None = Field(None, max_length=MAX_TOOLS, fail_fast=True)
    tool_choice: Annotated[AutoChoice | AnyChoice | NamedChoice | NoChoice, Field(discriminator="type")] | None = None
    thinking: Annotated[Thinking | NoThinking | AdaptiveThinking, Field(discriminator="type")] | None = Field(
        None, description="Only where the model's template knows enable_thinking."
    )
    output_config: OutputConfig | None = None
    cache_control: CacheControl | None = None
    thread: dict[str, Any] | None = Field(None, description="Refused: nothing is kept here. Clients then send the whole conversation.")


class CountBody(PromptFields):
    """POST /v1/messages/count_tokens."""


class MessagesBody(PromptFields):
    """POST /v1/messages."""

    max_tokens: int
    temperature: float | None = Field(None, ge=0, le=1)
    top_p: float | None = None
    top_k: int | None = None
    stop_sequences: list[str] | None = Field(
        None, max_length=MAX_STOP_STRINGS, fail_fast=True, description="Up to 16 strings that end the text and are not part of it."
    )
    stream: bool | None = None
    metadata: Metadata | None = None
    service_tier: Literal["auto", "standard_only"] | None = None

    def sampling(self) -> SamplingFields:
        """How tokens are chosen, in the words of the other protocols."""
        return SamplingFields.model_validate(
            {"temperature": self.temperature, "top_p": self.top_p, "top_k": self.top_k, "stop": self.stop_sequences}
        )


def conversation_of(body: PromptFields, variables: Mapping[str, Any]) -> Conversation:
    """What is asked. `variables` go to the template. Raises Problem, by the body's field."""
    choice = body.tool_choice
    parallel = isinstance(choice, NoChoice) or choice is None or not choice.disable_parallel_tool_use
    modes = {"auto": "auto", "any": "required", "none": "none"}
    return Conversation(
        messages=_messages(body),
        tools=[tool.plain() for tool in body.tools or ()],
        tool_choice=choice.name if isinstance(choice, NamedChoice) else modes[choice.type] if choice is not None else "auto",
        named=isinstance(choice, NamedChoice),
        parallel=parallel,
        variables=variables,
    )


def _messages(body: PromptFields) -> list[dict[str, Any]]:
    """As templates know them."""
    if body.thread is not None:
        text = "thread: this server keeps nothing between requests; send the whole conversation, without it"
        raise Problem(400, text, param="thread", code="thread_unsupported_request")  # by this code Anthropic's clients do so themselves
    if not body.messages:
        raise Problem(400, "messages: expected at least one message", param="messages")
    if body.messages[-1].role == "assistant":
        where = f"messages[{len(body.messages) - 1}]"
        raise Problem(
            400, f"{where}: the last message is the assistant's; an answer cannot be continued here, end with a user message", param=where
        )
    system = _joined(body.system or ())
    found: list[dict[str, Any]] = [{"role": "system", "content": system}] if system else []
    called: dict[str, str] = {}
    for i, message in enumerate(body.messages):
        where = f"messages[{i}].content"
        _check_places(where, message)
        if message.role == "assistant":
            found.append(_assistant(message.content))
            called.update((block.id, block.name) for block in message.content if isinstance(block, ToolUseBlock))
        else:
            found += _given(where, message, called)
    return found


PLACES: Mapping[str, tuple[str, ...]] = {
    "user": ("text", "tool_result"),
    "assistant": ("text", "thinking", "tool_use"),
    "system": ("text",),
}
"""Role → the blocks that its messages may have."""


def _check_places(where: str, message: MessageBody) -> None:
    for j, block in enumerate(message.content):
        if block.type not in PLACES[message.role]:
            allowed = ", ".join(PLACES[message.role])
            raise Problem(400, f"{where}[{j}]: expected {allowed} from {message.role}, found {block.type}", param=f"{where}[{j}]")


def _assistant(blocks: Sequence[AnyBlock]) -> dict[str, Any]:
    message: dict[str, Any] = {"role": "assistant", "content": _joined(blocks)}
    if thinking := "".join(block.thinking for block in blocks if isinstance(block, ThinkingBlock)):
        message["reasoning_content"] = thinking
    calls = [
        {"id": block.id, "type": "function", "function": {"name": block.name, "arguments": json.dumps(block.input, ensure_ascii=False)}}
        for block in blocks
        if isinstance(block, ToolUseBlock)
    ]
    if calls:
        message["tool_calls"] = calls
        message["content"] = message["content"] or None
    return message


def _given(where: str, message: MessageBody, called: Mapping[str, str]) -> list[dict[str, Any]]:
    """A message of user or system: its results are messages of their own, in their places between its texts."""
    found: list[dict[str, Any]] = []
    for j, block in enumerate(message.content):
        if isinstance(block, ToolResultBlock):
            if block.tool_use_id not in called:
                field = f"{where}[{j}].tool_use_id"
                raise Problem(400, f"{field}: no tool_use of this id comes before it", param=field)
            text = (ERROR if block.is_error else "") + _joined(block.content or ())
            found.append({"role": "tool", "tool_call_id": block.tool_use_id, "name": called[block.tool_use_id], "content": text})
        elif isinstance(block, TextBlock):
            if found and found[-1]["role"] == message.role:
                found[-1]["content"] += block.text
            else:
                found.append({"role": message.role, "content": block.text})
    return found or [{"role": message.role, "content": ""}]


def _joined(blocks: Sequence[Any]) -> str:
    return "".join(block.text for block in blocks if isinstance(block, TextBlock))
