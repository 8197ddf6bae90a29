"""Tools for models whose chat template has no place for them: described in the prompt, called in the form of Hermes.

Such templates know neither calls nor a role for results, so both become ordinary text of the roles that every template has.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from arctool.errors import RequestError
from arctool.run.chat import ChatTemplate, Message
from arctool.serve.output.families import HERMES
from arctool.serve.output.messages import template_messages
from arctool.serve.output.tools import Tool

SYSTEM = ("system", "developer")
PROBE = "arctool asks whether this is shown"


def generic_messages(messages: Sequence[Message], tools: Sequence[Tool], *, system: bool = True) -> list[dict[str, Any]]:
    """`messages` for such a template, with `tools` described in its system message, behind what that says.

    Without `system` (a template that takes no such message) the first message of the user begins with the description. Results of
    tools become messages of the user, and join their neighbours of that role, as many templates want the roles to alternate. Raises
    RequestError as `template_messages`.
    """
    made: list[dict[str, Any]] = []
    result_before = False
    for message in template_messages(messages):
        is_result = message["role"] == "tool"
        if is_result:
            message = {"role": "user", "content": f"<tool_response>\n{message['content']}\n</tool_response>"}
        elif "tool_calls" in message:
            message = {"role": "assistant", "content": _with_calls(message)}
        if made and made[-1]["role"] == message["role"] == "user" and (is_result or result_before):
            made[-1]["content"] += f"\n{message['content']}"
        else:
            made.append(message)
        result_before = is_result
    return _described(made, description(tools), system) if tools else made


def description(tools: Sequence[Tool]) -> str:
    """What the model is told about its tools."""
    listed = "\n".join(json.dumps(tool.as_given(), ensure_ascii=False) for tool in tools)
    example = HERMES.form.text([("name-of-the-function", '{"name-of-a-parameter": "its value"}')])
    return (
        "You can call functions. Call one where it helps to answer, and else answer as usual. These are their JSON descriptions:\n"
        f"<tools>\n{listed}\n</tools>\n"
        "To call a function, write a JSON object with its name and its arguments between tags, exactly like this:\n"
        f"{example}\n"
        "For several calls write several such blocks. You are then given each result between <tool_response> tags."
    )


def takes_system(template: ChatTemplate) -> bool:
    """Whether a template shows a system message; some refuse it, some leave it out."""
    try:
        return PROBE in template.render([{"role": "system", "content": PROBE}, {"role": "user", "content": "Hello"}])
    except RequestError:
        return False


def _with_calls(message: Message) -> str:
    calls = (call["function"] for call in message["tool_calls"])
    text = HERMES.form.text((call["name"], json.dumps(call["arguments"], ensure_ascii=False)) for call in calls)
    return f"{message['content']}\n{text}" if message.get("content") else text


def _described(messages: list[dict[str, Any]], text: str, system: bool) -> list[dict[str, Any]]:
    roles = SYSTEM if system else ("user",)
    at = next((i for i, message in enumerate(messages) if message["role"] in roles), None)
    if at is None:
        return [{"role": roles[0], "content": text}, *messages]
    first = messages[at]
    content = f"{first['content']}\n\n{text}" if system else f"{text}\n\n{first['content']}"
    return [*messages[:at], {**first, "content": content}, *messages[at + 1 :]]
