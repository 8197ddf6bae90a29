"""Tools and reasoning through the official client: each family's own words become the same calls, whole and streamed."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import openai
import pytest
from live import NAME, Live, live
from scripted import scripted

WEATHER = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "The weather in a city.",
        "parameters": {
            "type": "object",
            "properties": {"city": {"type": "string", "maxLength": 8}, "days": {"type": "integer", "minimum": 1, "maximum": 9}},
            "required": ["city", "days"],
        },
    },
}
TIME = {"type": "function", "function": {"name": "get_time"}}
OSLO = {"city": "Oslo", "days": 2}
SAID = "(m.content or '') ~ (m.tool_calls | tojson if m.tool_calls else '')"
ROLES = "{% for m in messages %}{{ '<|im_start|>' ~ m.role ~ '\n' ~ " + SAID + " ~ '<|im_end|>\n' }}{% endfor %}"
END = "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
HERMES = "{% if tools %}{{ tools | tojson }} use <tool_call>{% endif %}" + ROLES + END
MISTRAL = "{% if tools %}[AVAILABLE_TOOLS]{{ tools | tojson }} [TOOL_CALLS]{% endif %}" + ROLES + END
LLAMA = "{% if tools %}{{ tools | tojson }} <|python_tag|> ipython{% endif %}" + ROLES + END
THINKING = (
    HERMES
    + "{% if enable_thinking is not defined or enable_thinking %}{{ '<think>\n' }}{% else %}{{ '<think>\n\n</think>\n\n' }}{% endif %}"
)

CALL = json.dumps({"name": "get_weather", "arguments": OSLO})
FAMILIES = {
    "hermes": (HERMES, f"Let me see.\n<tool_call>\n{CALL}\n</tool_call>"),
    "mistral": (MISTRAL, f"[TOOL_CALLS] [{CALL}]"),
    "llama3": (LLAMA, json.dumps({"name": "get_weather", "parameters": OSLO})),
    "generic": (None, f"<tool_call>\n{CALL}\n</tool_call>"),
}


def client(server: Live) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0)


def ask(server: Live, text: str, **more: Any) -> Any:
    return client(server).chat.completions.create(model=NAME, messages=[{"role": "user", "content": text}], temperature=0, **more)


def gathered(chunks: Any) -> dict[str, Any]:
    """A stream put together as clients do it: content, reasoning, calls by index, and the one finish reason."""
    found: dict[str, Any] = {"content": "", "reasoning": "", "calls": [], "finish": []}
    for chunk in chunks:
        for choice in chunk.choices:
            found["content"] += choice.delta.content or ""
            found["reasoning"] += getattr(choice.delta, "reasoning_content", None) or ""
            for call in choice.delta.tool_calls or ():
                if call.index == len(found["calls"]):
                    assert call.id
                    assert call.type == "function"
                    found["calls"].append({"name": call.function.name, "arguments": ""})
                found["calls"][call.index]["arguments"] += call.function.arguments or ""
            found["finish"] += [choice.finish_reason] if choice.finish_reason else []
    return found


@pytest.fixture(scope="module", params=FAMILIES)
def family(request: pytest.FixtureRequest) -> Iterator[Live]:
    template, reply = FAMILIES[request.param]
    with live(scripted({"snow": "It will snow.", "umbrella": reply, "Hello": "Good day."}, template=template)) as server:
        yield server


def test_a_call_is_the_same_whole_and_streamed(family: Live) -> None:
    whole = ask(family, "umbrella?", tools=[WEATHER, TIME])
    [choice] = whole.choices
    [call] = choice.message.tool_calls
    assert (choice.finish_reason, call.function.name, json.loads(call.function.arguments)) == ("tool_calls", "get_weather", OSLO)
    streamed = gathered(ask(family, "umbrella?", tools=[WEATHER, TIME], stream=True))
    assert streamed["finish"] == ["tool_calls"]
    assert streamed["calls"] == [{"name": "get_weather", "arguments": call.function.arguments}]
    assert streamed["content"] == (choice.message.content or "")


def test_without_tools_the_same_words_are_content(family: Live) -> None:
    for more in ({}, {"tools": [WEATHER], "tool_choice": "none"}, {"tools": [TIME]}):
        message = ask(family, "umbrella?", **more).choices[0].message
        assert message.tool_calls is None
        assert "get_weather" in message.content


def test_an_answer_without_a_call_stays_an_answer(family: Live) -> None:
    choice = ask(family, "Hello", tools=[WEATHER]).choices[0]
    assert (choice.finish_reason, choice.message.content, choice.message.tool_calls) == ("stop", "Good day.", None)


def test_a_call_that_is_cut_off_is_none(family: Live) -> None:
    whole = ask(family, "umbrella?", tools=[WEATHER], max_tokens=12)
    streamed = gathered(ask(family, "umbrella?", tools=[WEATHER], max_tokens=12, stream=True))
    assert whole.choices[0].finish_reason == "length"
    assert streamed["finish"] == ["length"]


@pytest.mark.parametrize("choice", ["required", {"type": "function", "function": {"name": "get_weather"}}])
def test_a_call_that_is_demanded_comes_whatever_the_model_wants(family: Live, choice: Any) -> None:
    """This model wants to say good day; its grammar does not let it."""
    answer = ask(family, "Hello", tools=[WEATHER], tool_choice=choice, parallel_tool_calls=False, max_tokens=400)
    [call] = answer.choices[0].message.tool_calls
    arguments = json.loads(call.function.arguments)
    assert answer.choices[0].finish_reason == "tool_calls"
    assert call.function.name == "get_weather"
    assert len(arguments["city"]) <= 8
    assert 1 <= arguments["days"] <= 9


def test_a_result_is_read_and_answered(family: Live) -> None:
    call = ask(family, "umbrella?", tools=[WEATHER]).choices[0].message
    history = [{"role": "user", "content": "what?"}, call.model_dump(exclude_none=True)]
    history.append({"role": "tool", "tool_call_id": call.tool_calls[0].id, "content": "snow"})
    answer = client(family).chat.completions.create(model=NAME, messages=history, tools=[TIME], temperature=0)
    assert answer.choices[0].message.content == "It will snow."


@pytest.mark.parametrize(
    ("more", "param"),
    [
        ({"tools": [WEATHER, WEATHER]}, "tools[1].function.name"),
        ({"tools": [{"type": "function", "function": {"name": "no spaces"}}]}, "tools[0].function.name"),
        ({"tools": [TIME], "tool_choice": "required", "response_format": {"type": "json_object"}}, "response_format"),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"tools": [TIME], "tool_choice": {"type": "function", "function": {"name": "other"}}}, "tool_choice.function.name"),
        (
            {
                "tools": [
                    {
                        "type": "function",
                        "function": {"name": "a", "parameters": {"type": "object", "properties": {"x": {"type": "bogus"}}}},
                    }
                ],
                "tool_choice": "required",
            },
            "tools[0].function.parameters",
        ),
    ],
)
def test_tools_that_cannot_be_are_refused_by_name(family: Live, more: dict, param: str) -> None:
    with pytest.raises(openai.BadRequestError) as refused:
        ask(family, "Hello", **more)
    assert refused.value.param == param


@pytest.fixture(scope="module")
def thinker() -> Iterator[Live]:
    replies = {
        "umbrella": f"I should look.\n</think>\n\nOne moment.\n<tool_call>\n{CALL}\n</tool_call>",
        "plain": "Ready.",
        "sum": "Two and two.\n</think>\n\nFour.",
        "JSON": '{"a": 1}',
    }
    with live(scripted(replies, template=THINKING)) as server:
        yield server


def test_reasoning_is_told_from_the_answer(thinker: Live) -> None:
    message = ask(thinker, "sum?").choices[0].message
    assert (message.reasoning_content, message.content) == ("Two and two.", "Four.")
    streamed = gathered(ask(thinker, "sum?", stream=True))
    assert (streamed["reasoning"], streamed["content"], streamed["finish"]) == ("Two and two.", "Four.", ["stop"])


def test_reasoning_and_a_call_come_apart(thinker: Live) -> None:
    streamed = gathered(ask(thinker, "umbrella?", tools=[WEATHER], stream=True))
    assert (streamed["reasoning"], streamed["content"].strip(), streamed["finish"]) == ("I should look.", "One moment.", ["tool_calls"])
    assert json.loads(streamed["calls"][0]["arguments"]) == OSLO


def test_a_switch_of_the_template_is_honoured_and_another_one_refused(thinker: Live) -> None:
    message = ask(thinker, "plain?", extra_body={"chat_template_kwargs": {"enable_thinking": False}}).choices[0].message
    assert (message.content, getattr(message, "reasoning_content", None)) == ("Ready.", None)
    for kwargs, param in (
        ({"thinking_budget": 3}, "chat_template_kwargs.thinking_budget"),
        ({"messages": []}, "chat_template_kwargs.messages"),
    ):
        with pytest.raises(openai.BadRequestError) as refused:
            ask(thinker, "plain?", extra_body={"chat_template_kwargs": kwargs})
        assert refused.value.param == param


def test_a_format_is_never_taken_for_reasoning(thinker: Live) -> None:
    """The prompt ends with <think>, but the grammar lets no thought pass."""
    message = ask(thinker, "JSON?", response_format={"type": "json_object"}).choices[0].message
    assert json.loads(message.content) == {"a": 1}
    assert getattr(message, "reasoning_content", None) is None


def test_a_strict_tool_gets_the_arguments_of_its_schema_whatever_the_model_writes() -> None:
    """The model writes a number where the schema has a text."""
    strict = {"type": "function", "function": {**WEATHER["function"], "strict": True}}  # type: ignore[dict-item]
    wrong = json.dumps({"name": "get_weather", "arguments": {"city": 5, "days": 2}})
    with live(scripted({"umbrella": f"<tool_call>\n{wrong}\n</tool_call>"}, template=HERMES)) as server:
        loose = ask(server, "umbrella?", tools=[WEATHER]).choices[0].message.tool_calls[0]
        assert json.loads(loose.function.arguments) == {"city": 5, "days": 2}
        held = ask(server, "umbrella?", tools=[strict], max_tokens=400).choices[0].message.tool_calls[0]
        assert isinstance(json.loads(held.function.arguments)["city"], str)


def test_where_one_call_is_all_nothing_is_generated_after_it() -> None:
    chatter = f"<tool_call>\n{CALL}\n</tool_call>" + " And now to something else." * 20
    with live(scripted({"umbrella": chatter}, template=HERMES)) as server:
        one = ask(server, "umbrella?", tools=[WEATHER], parallel_tool_calls=False)
        streamed = gathered(ask(server, "umbrella?", tools=[WEATHER], parallel_tool_calls=False, stream=True))
        several = ask(server, "umbrella?", tools=[WEATHER])
    assert one.choices[0].finish_reason == "tool_calls"
    assert [json.loads(call.function.arguments) for call in one.choices[0].message.tool_calls] == [OSLO]
    assert (streamed["finish"], len(streamed["calls"]), streamed["content"].strip()) == (["tool_calls"], 1, "")
    assert several.usage.completion_tokens > one.usage.completion_tokens + 100
