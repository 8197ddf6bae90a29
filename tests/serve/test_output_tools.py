"""Tools and conversations as OpenAI's API gives them: checked by field, made ready for templates that know tools and for others."""

from __future__ import annotations

import json
from typing import Any

import pytest

from arctool.errors import RequestError
from arctool.run.chat import ChatTemplate
from arctool.serve.output.families import HERMES, MISTRAL
from arctool.serve.output.generic import description, generic_messages, takes_system
from arctool.serve.output.messages import template_messages
from arctool.serve.output.parser import OutputParser
from arctool.serve.output.parts import CallStart, joined
from arctool.serve.output.tools import MAX_TOOLS, Tool, ToolChoice, read_choice, read_tools

SCHEMA = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
WEATHER = {"type": "function", "function": {"name": "get_weather", "description": "Now & here", "parameters": SCHEMA, "strict": True}}
NOW = {"type": "function", "function": {"name": "now"}}
TOOLS = read_tools([WEATHER, NOW])


def test_tools_are_read_as_given() -> None:
    weather, now = TOOLS
    assert weather == Tool("get_weather", "Now & here", SCHEMA, True)
    assert now == Tool("now", None, {"type": "object", "properties": {}}, False)
    assert read_tools(None) == read_tools([]) == ()
    assert (
        read_tools([{"type": "function", "function": {"name": "a.b_C-1" + "x" * 57, "parameters": None, "strict": None}}])[0].strict
        is False
    )
    assert read_tools([{"type": "function", "function": {"name": "f", "parameters": {}}}])[0].parameters == TOOLS[1].parameters
    assert TOOLS[1].as_given() == {"type": "function", "function": {"name": "now", "parameters": {"type": "object", "properties": {}}}}
    assert TOOLS[0].as_given()["function"] == {"name": "get_weather", "description": "Now & here", "parameters": SCHEMA}


def deep(depth: int) -> dict[str, Any]:
    found: Any = {}
    for _ in range(depth):
        found = {"items": found}
    return {"type": "object", **found}


def function(**fields: Any) -> list[Any]:
    return [NOW, {"type": "function", "function": fields}]


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({}, r"tools: expected a list of at most 128 tools, found a dict"),
        ("tools", r"tools: expected a list of at most 128 tools, found a str"),
        ([NOW] * (MAX_TOOLS + 1), r"tools: expected a list of at most 128 tools, found 129"),
        ([NOW, "f"], r"tools\[1\]: expected an object with type and function, found 'f'"),
        ([{"type": "retrieval"}], r"tools\[0\].type: expected function, found 'retrieval'"),
        ([{"function": {"name": "f"}}], r"tools\[0\].type: expected function, found None"),
        ([{"type": "function"}], r"tools\[0\].function: expected an object, found None"),
        ([{**NOW, "cache": 1}], r"tools\[0\].cache: not known here; expected only type, function"),
        (function(), r"tools\[1\].function.name: expected 1 to 64 of the characters a-z A-Z 0-9 _ . -, found None"),
        (function(name=""), r"tools\[1\].function.name: "),
        (function(name="a b"), r"tools\[1\].function.name: "),
        (function(name="é"), r"tools\[1\].function.name: "),
        (function(name="a" * 65), r"tools\[1\].function.name: "),
        (function(name="a\n"), r"tools\[1\].function.name: "),
        (function(name="now"), r"tools\[1\].function.name: 'now' is the name of an earlier tool"),
        (function(name="f", description=3), r"tools\[1\].function.description: "),
        (function(name="f", description="\ud800"), r"tools\[1\].function.description: "),
        (function(name="f", strict="yes"), r"tools\[1\].function.strict: expected true or false"),
        (function(name="f", returns={}), r"tools\[1\].function.returns: not known here"),
        (function(name="f", parameters=[]), r'tools\[1\].function.parameters: expected a JSON schema of "type": "object", found \[\]'),
        (function(name="f", parameters={"properties": {}}), r"tools\[1\].function.parameters: expected a JSON schema"),
        (function(name="f", parameters={"type": "array"}), r"tools\[1\].function.parameters: expected a JSON schema"),
        (function(name="f", parameters=deep(64)), r"tools\[1\].function.parameters: expected nesting of at most 64, found 65"),
        ([deep(100_000)], r"tools\[0\].items: not known here"),
        (deep(100_000), "tools: expected a list"),
        ([[deep(100_000)]], r"tools\[0\]: expected an object with type and function, found a list too large to print"),
        (function(name="f", parameters=deep(100_000)), r"tools\[1\].function.parameters: "),
        (function(name="f", parameters={**SCHEMA, "x": "y" * (1 << 16)}), r"tools\[1\].function.parameters: expected "),
        (function(name="f", parameters={**SCHEMA, "minimum": float("nan")}), r"tools\[1\].function.parameters: expected JSON"),
        (function(name="f", parameters={**SCHEMA, "x": "\ud800"}), None),
    ],
    ids=lambda value: value[:50] if isinstance(value, str) else "",
)
def test_bad_tools_are_refused_by_field(given: Any, message: str | None) -> None:
    if message is None:
        assert read_tools(given)  # JSON writes it as an escape
        return
    with pytest.raises(RequestError, match=f"^{message}") as refused:
        read_tools(given)
    assert len(str(refused.value)) < 400


def test_a_choice_is_read_as_given() -> None:
    assert read_choice(None, TOOLS) == read_choice("auto", TOOLS) == ToolChoice("auto")
    assert read_choice(None, ()) == read_choice("none", ()) == read_choice("none", TOOLS) == ToolChoice("none")
    assert read_choice("required", TOOLS) == ToolChoice("required")
    assert read_choice({"type": "function", "function": {"name": "now"}}, TOOLS) == ToolChoice("required", "now")


@pytest.mark.parametrize(
    ("given", "tools", "message"),
    [
        ("any", TOOLS, "tool_choice: expected none, auto, required or an object that names a function, found 'any'"),
        (1, TOOLS, "tool_choice: expected none"),
        (["auto"], TOOLS, "tool_choice: expected none"),
        ("required", (), "tool_choice: there are no tools"),
        ("auto", (), "tool_choice: there are no tools"),
        ({"type": "function", "function": {"name": "other"}}, TOOLS, "tool_choice.function.name: expected the name of one"),
        ({"type": "function", "function": {"name": ["now"]}}, TOOLS, "tool_choice.function.name: "),
        ({"type": "function", "function": {"name": "now", "x": 1}}, TOOLS, "tool_choice.function.x: not known here"),
        ({"type": "function", "name": "now"}, TOOLS, "tool_choice.name: not known here"),
        ({"type": "function"}, TOOLS, "tool_choice.function: expected an object"),
        ({"type": "custom"}, TOOLS, "tool_choice.type: expected function"),
    ],
)  # fmt: skip
def test_a_bad_choice_is_refused_by_field(given: Any, tools: tuple[Tool, ...], message: str) -> None:
    with pytest.raises(RequestError, match=f"^{message}"):
        read_choice(given, tools)


def call(arguments: Any = '{"city": "Zürich"}', name: Any = "get_weather", call_id: Any = "call_1", **fields: Any) -> dict[str, Any]:
    return {"id": call_id, "type": "function", "function": {"name": name, "arguments": arguments}, **fields}


ASKED: list[dict[str, Any]] = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "Weather?"},
    {"role": "assistant", "content": "Let me see.", "tool_calls": [call(), call("", "now", "call_2")]},
    {"role": "tool", "tool_call_id": "call_1", "content": "rain"},
    {"role": "tool", "tool_call_id": "call_2", "content": "noon"},
    {"role": "user", "content": "And now?"},
]


def test_arguments_become_objects_and_the_rest_stays() -> None:
    made = template_messages(ASKED)
    assert [call["function"] for call in made[2]["tool_calls"]] == [
        {"name": "get_weather", "arguments": {"city": "Zürich"}},
        {"name": "now", "arguments": {}},
    ]
    assert [call["id"] for call in made[2]["tool_calls"]] == ["call_1", "call_2"]
    assert [{**message, "tool_calls": None} for message in made] == [{**message, "tool_calls": None} for message in ASKED]
    assert ASKED[2]["tool_calls"][0]["function"]["arguments"] == '{"city": "Zürich"}', "what was given is left alone"
    assert template_messages([{"role": "assistant", "content": "a", "tool_calls": [], "name": "x"}]) == [
        {"role": "assistant", "content": "a", "name": "x"}
    ]
    assert template_messages([{"role": "assistant", "content": None, "tool_calls": [call()]}])[0]["content"] is None


def test_ids_fit_the_family_and_results_still_belong_to_their_calls() -> None:
    made = template_messages(ASKED, MISTRAL)
    ids = [call["id"] for call in made[2]["tool_calls"]]
    assert all(len(one) == 9 and one.isalnum() for one in ids)
    assert ids == [made[3]["tool_call_id"], made[4]["tool_call_id"]]
    assert len(set(ids)) == 2


def assistant(*calls: Any) -> list[dict[str, Any]]:
    return [
        ASKED[1],
        {"role": "assistant", "content": "", "tool_calls": calls[0] if len(calls) == 1 and not isinstance(calls[0], dict) else list(calls)},
    ]


@pytest.mark.parametrize(
    ("messages", "message"),
    [
        (assistant(call(), call("{")), r"messages\[1\].tool_calls\[1\].function.arguments: expected a JSON object as text: "),
        (assistant(call("[1]")), r"messages\[1\].tool_calls\[0\].function.arguments: expected a JSON object as text, found a list"),
        (assistant(call('{"a": NaN}')), r"messages\[1\].tool_calls\[0\].function.arguments: expected a JSON object as text: NaN"),
        (assistant(call('{"a":' + "[" * 100_000)), r"messages\[1\].tool_calls\[0\].function.arguments: "),
        (assistant(call({"a": 1})), r"messages\[1\].tool_calls\[0\].function.arguments: expected a JSON object as text, found {'a': 1}"),
        (assistant(call(None)), r"messages\[1\].tool_calls\[0\].function.arguments: "),
        (assistant(call(name="a b")), r"messages\[1\].tool_calls\[0\].function.name: "),
        (assistant(call(name=None)), r"messages\[1\].tool_calls\[0\].function.name: "),
        (assistant(call(call_id=None)), r"messages\[1\].tool_calls\[0\].id: "),
        (assistant(call(call_id="")), r"messages\[1\].tool_calls\[0\].id: expected an id, found an empty text"),
        (assistant(call(call_id="x" * 257)), r"messages\[1\].tool_calls\[0\].id: "),
        (assistant(call(type="custom")), r"messages\[1\].tool_calls\[0\]: expected an object with id, type function and function"),
        (assistant({"id": "a", "type": "function"}), r"messages\[1\].tool_calls\[0\]: expected an object"),
        (assistant("calls"), r"messages\[1\].tool_calls: expected a list of at most 128 calls, found 'calls'"),
        (assistant([call()] * 129), r"messages\[1\].tool_calls: expected a list of at most 128 calls"),
        ([{"role": "user", "content": "a", "tool_calls": [call()]}], r"messages\[0\].tool_calls: only an assistant calls tools, not user"),
        ([ASKED[1], {"role": "tool", "content": "a"}], r"messages\[1\].tool_call_id: "),
        ([ASKED[1], {"role": "tool", "content": "a", "tool_call_id": ""}], r"messages\[1\].tool_call_id: "),
        ([{"role": "robot", "content": "a"}], r"messages\[0\].role: "),
        ([], r"messages: expected a list"),
    ],
    ids=lambda value: value[-50:] if isinstance(value, str) else "",
)  # fmt: skip
def test_a_bad_conversation_is_refused_by_index_and_field(messages: list[Any], message: str) -> None:
    for prepare in (template_messages, lambda given: generic_messages(given, TOOLS)):
        with pytest.raises(RequestError, match=f"^{message}") as refused:
            prepare(messages)
        assert len(str(refused.value)) < 300


def test_without_a_place_for_tools_they_are_described_and_calls_and_results_are_text() -> None:
    made = generic_messages(ASKED, TOOLS)
    assert [message["role"] for message in made] == ["system", "user", "assistant", "user"]
    assert made[0]["content"].startswith("Be brief.\n\n")
    for tool in TOOLS:
        assert json.dumps(tool.as_given(), ensure_ascii=False) in made[0]["content"]
    assert made[2] == {
        "role": "assistant",
        "content": 'Let me see.\n<tool_call>\n{"name": "get_weather", "arguments": {"city": "Zürich"}}\n</tool_call>\n'
        '<tool_call>\n{"name": "now", "arguments": {}}\n</tool_call>',
    }
    assert made[3]["content"] == "<tool_response>\nrain\n</tool_response>\n<tool_response>\nnoon\n</tool_response>\nAnd now?"
    assert generic_messages(made, ()) == made, "without tools there is nothing to describe"
    parser = OutputParser(HERMES, ["get_weather", "now"])
    parts = joined([*parser.push(made[2]["content"]), *parser.finish()])
    assert [part.name for part in parts if isinstance(part, CallStart)] == ["get_weather", "now"], "a model that copies this calls"
    assert parser.calls == 2


@pytest.mark.parametrize("system", [True, False])
def test_the_description_finds_a_place_in_every_conversation(system: bool) -> None:
    text = description(TOOLS)
    user = {"role": "user", "content": "Hello"}
    role = "system" if system else "user"
    made = generic_messages([user], TOOLS, system=system)
    assert made == ([{"role": "system", "content": text}, user] if system else [{"role": "user", "content": f"{text}\n\nHello"}])
    spoken = {"role": "assistant", "content": "Hi"}
    assert generic_messages([spoken], TOOLS, system=system) == [{"role": role, "content": text}, spoken]
    developer = {"role": "developer", "content": "Be brief."}
    assert generic_messages([developer, user], TOOLS)[0] == {"role": "developer", "content": f"Be brief.\n\n{text}"}
    assert generic_messages([user, user], TOOLS, system=system)[-1] == user, "only results join their neighbours"


def test_whether_a_template_takes_a_system_message_is_tried() -> None:
    loop = "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}"
    assert takes_system(ChatTemplate(loop, {}))
    refuses = "{% if messages[0].role == 'system' %}{{ raise_exception('System role not supported') }}{% endif %}" + loop
    assert not takes_system(ChatTemplate(refuses, {}))
    leaves_out = "{% for m in messages if m.role != 'system' %}{{ m.content }}{% endfor %}"
    assert not takes_system(ChatTemplate(leaves_out, {}))
    made = generic_messages(ASKED[1:], TOOLS, system=takes_system(ChatTemplate(refuses, {})))
    assert "get_weather" in ChatTemplate(refuses, {}).render(made)
