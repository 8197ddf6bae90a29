"""/v1/responses, driven by OpenAI's own client over a real socket."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import Any

import openai
import pytest
from dialogues import PLAIN, REPLIES, TEMPLATE, TOWN, events_of, post
from live import Live, live
from openai.types.responses import Response
from pydantic import BaseModel
from scripted import scripted

from arctool.serve.problems import Problem
from arctool.serve.talk import Talk
from arctool.serve.thinking import strengthened

WEATHER = {"type": "function", "name": "weather", "description": "How warm it is", "parameters": TOWN, "strict": False}
LOGPROBS = ["message.output_text.logprobs"]


def client(server: Live, key: str = "no key at all") -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{server.url}/v1", api_key=key, max_retries=0, timeout=60)


@pytest.fixture(scope="module")
def server() -> Iterator[Live]:
    with live(scripted(REPLIES, template=TEMPLATE)) as running:
        yield running


@pytest.fixture(scope="module")
def plain_server() -> Iterator[Live]:
    with live(scripted(REPLIES, template=PLAIN), api_keys=("correct horse", "battery staple")) as running:
        yield running


def said(response: Response) -> dict[str, Any]:
    """What an answer says, without what differs each time."""
    found: dict[str, Any] = json.loads(response.to_json(exclude_unset=True, warnings=False))
    for number, item in enumerate(found["output"]):
        for part in item.get("content") or []:
            part.pop("parsed", None)
        item.pop("parsed_arguments", None)
        item["id"] = f"item {number}"
        if item["type"] == "function_call":
            item["call_id"] = f"call {number}"
    return {key: value for key, value in found.items() if key not in ("id", "created_at", "completed_at")}


def test_an_answer_says_how_it_ended_and_what_was_asked(server: Live) -> None:
    answer = client(server).responses.create(
        model="tiny", input="hello", instructions="Be brief.", metadata={"a": "b"}, temperature=0.5, max_output_tokens=90, store=False
    )
    assert answer.output_text == REPLIES["hello"]
    assert [item.type for item in answer.output] == ["message"]
    assert (answer.object, answer.model, answer.status, answer.error, answer.incomplete_details) == (
        "response", "tiny", "completed", None, None,
    )  # fmt: skip
    assert (answer.instructions, answer.metadata, answer.temperature, answer.max_output_tokens) == ("Be brief.", {"a": "b"}, 0.5, 90)
    assert (answer.tool_choice, answer.tools, answer.parallel_tool_calls) == ("auto", [], True)
    assert answer.completed_at is not None
    assert answer.usage is not None
    tokenizer = server.service.llm.tokenizer
    assert tokenizer is not None
    assert answer.usage.output_tokens == len(tokenizer.encode(REPLIES["hello"], add_special_tokens=False)) + 1
    assert answer.usage.total_tokens == answer.usage.input_tokens + answer.usage.output_tokens


ASKED: dict[str, dict[str, Any]] = {
    "text": {"input": "hello"},
    "cut off": {"input": "numbers", "max_output_tokens": 7},
    "thinking": {"input": "think hard"},
    "a thought that is cut off": {"input": "think hard", "max_output_tokens": 15},
    "call": {"input": "the weather", "tools": [WEATHER]},
    "calls": {"input": "both towns", "tools": [WEATHER]},
    "a call that is cut off": {"input": "the weather", "tools": [WEATHER], "max_output_tokens": 40},
    "a call that breaks off": {"input": "a bad call", "tools": [WEATHER]},
    "the second of two calls is cut off": {"input": "both towns", "tools": [WEATHER], "max_output_tokens": 96},
    "forced call": {"input": "which town", "tools": [WEATHER], "tool_choice": "required", "temperature": 0},
    "log-probabilities": {"input": "hello", "include": LOGPROBS, "top_logprobs": 2},
    "log-probabilities beside a thought": {"input": "think hard", "include": LOGPROBS},
    "nothing": {"input": "numbers", "extra_body": {"stop": "o"}},
}


@pytest.mark.parametrize("fields", ASKED.values(), ids=ASKED)
def test_a_stream_put_together_is_the_answer_as_a_whole(server: Live, fields: dict[str, Any]) -> None:
    responses = client(server).responses
    responses.create(model="tiny", **fields)  # now the prompt is cached, whoever asks next
    whole = responses.create(model="tiny", **fields)
    with responses.stream(model="tiny", **fields) as stream:
        events = list(stream)
    last: Any = events[-1]
    assert last.type == f"response.{whole.status}"
    assert said(last.response) == said(whole)
    if whole.status == "completed":
        assert said(stream.get_final_response()) == said(whole)
    assert [event.sequence_number for event in events] == list(range(len(events)))


def test_the_answers_that_are_compared_are_of_every_kind(server: Live) -> None:
    found = {}
    for name, fields in ASKED.items():
        answer = client(server).responses.create(model="tiny", **fields)
        reason = answer.incomplete_details.reason if answer.incomplete_details else None
        found[name] = ([f"{item.type} {item.status}" for item in answer.output], answer.status, reason)
    message, thought, function = "message completed", "reasoning completed", "function_call completed"
    cut = ("incomplete", "max_output_tokens")
    assert found == {
        "text": ([message], "completed", None),
        "cut off": (["message incomplete"], *cut),
        "thinking": ([thought, message], "completed", None),
        "a thought that is cut off": (["reasoning incomplete"], *cut),
        "call": ([message, function], "completed", None),
        "calls": ([message, function, function], "completed", None),
        "a call that is cut off": ([message, "function_call incomplete"], *cut),
        "a call that breaks off": (["function_call incomplete", message], "completed", None),
        "the second of two calls is cut off": ([message, function, "function_call incomplete"], *cut),
        "forced call": ([function], "completed", None),
        "log-probabilities": ([message], "completed", None),
        "log-probabilities beside a thought": ([thought, message], "completed", None),
        "nothing": ([], "completed", None),
    }


TEXT = ["output_item.added", "content_part.added", "{}.delta", "{}.done", "content_part.done", "output_item.done"]


def test_every_event_has_its_name_and_its_place(server: Live) -> None:
    def names(**fields: Any) -> list[str]:
        events = events_of(post(f"{server.url}/v1/responses", {"stream": True, **fields}))
        assert all(name == data["type"] for name, data in events)
        assert [data["sequence_number"] for _, data in events] == list(range(len(events)))
        assert events[0][1]["response"]["output"] == []
        assert events[0][1]["response"]["status"] == "in_progress"
        found = [name.removeprefix("response.") for name, _ in events]
        return [name for i, name in enumerate(found) if i == 0 or found[i - 1] != name]

    message = [name.format("output_text") for name in TEXT]
    thought = [name.format("reasoning_text") for name in TEXT]
    function = ["output_item.added", "function_call_arguments.delta", "function_call_arguments.done", "output_item.done"]
    assert names(input="hello") == ["created", "in_progress", *message, "completed"]
    assert names(input="think hard") == ["created", "in_progress", *thought, *message, "completed"]
    assert names(input="the weather", tools=[WEATHER]) == ["created", "in_progress", *message, *function, "completed"]
    assert names(input="numbers", max_output_tokens=3)[-1] == "incomplete"


def test_the_pieces_of_a_stream_are_the_parts_that_it_ends_with(server: Live) -> None:
    fields: dict[str, Any] = {"model": "tiny", "input": "both towns", "tools": [WEATHER], "include": LOGPROBS}
    pieces: dict[int, str] = {}
    logprobs: list[Any] = []
    for event in client(server).responses.create(**fields, stream=True):
        if event.type in ("response.output_text.delta", "response.function_call_arguments.delta"):
            pieces[event.output_index] = pieces.get(event.output_index, "") + event.delta
            logprobs += [entry.to_dict() for entry in getattr(event, "logprobs", [])]
        elif event.type == "response.output_text.done":
            assert event.text == pieces[event.output_index]
            assert [entry.to_dict() for entry in event.logprobs] == logprobs
            assert "".join(entry["token"] for entry in logprobs) == event.text == "I look twice."
        elif event.type == "response.function_call_arguments.done":
            assert event.arguments == pieces[event.output_index]
        elif event.type == "response.completed":
            assert [item.arguments for item in event.response.output if item.type == "function_call"] == [pieces[1], pieces[2]]
    assert [json.loads(pieces[i]) for i in (1, 2)] == [{"town": "Paris"}, {"town": "Oslo"}]
    assert len(pieces) == 3


@pytest.mark.parametrize("place", ["server", "plain_server"], ids=["a template with tools", "a template without"])
@pytest.mark.parametrize("streamed", [False, True], ids=["whole", "streamed"])
def test_a_tool_is_called_and_its_result_answered(request: pytest.FixtureRequest, place: str, streamed: bool) -> None:
    responses = client(request.getfixturevalue(place), "correct horse").responses
    conversation: list[Any] = [{"role": "user", "content": "How is the weather?"}]

    def ask() -> Response:
        fields: dict[str, Any] = {"model": "tiny", "tools": [WEATHER], "input": conversation}
        if not streamed:
            return responses.create(**fields)
        with responses.stream(**fields) as stream:
            return stream.get_final_response()

    called = ask()
    message, use = called.output
    assert message.type == "message"
    assert called.output_text.strip() == "I look."
    assert use.type == "function_call"
    assert (use.name, json.loads(use.arguments)) == ("weather", {"town": "Paris", "days": [1, 2]})
    conversation += called.output
    conversation.append({"type": "function_call_output", "call_id": use.call_id, "output": [{"type": "input_text", "text": "19 degrees"}]})
    assert ask().output_text == "Mild in Paris."


def tokens(server: Live, **fields: Any) -> int:
    usage = client(server).responses.create(model="tiny", max_output_tokens=2, **fields).usage
    assert usage is not None
    return usage.input_tokens


def test_the_items_of_one_turn_are_one_message_to_the_model(server: Live) -> None:
    turn: list[Any] = [
        {"type": "reasoning", "id": "rs_1", "summary": [], "content": [{"type": "reasoning_text", "text": "Hm."}], "status": "completed"},
        {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "I look.", "annotations": []}]},
        {"type": "function_call", "call_id": "a", "name": "weather", "arguments": "{}"},
        {"type": "function_call", "call_id": "b", "name": "weather", "arguments": ""},
    ]
    results = [{"type": "function_call_output", "call_id": call_id, "output": "19 degrees"} for call_id in "ab"]
    template = server.service.llm.template
    assert template is not None
    call: dict[str, Any] = {"function": {"name": "weather", "arguments": {}}}
    text = template.render(
        [
            {"role": "system", "content": "Be brief."},
            {"role": "user", "content": "How?"},
            {"role": "assistant", "content": "I look.", "reasoning_content": "Hm.", "tool_calls": [call, call]},
            {"role": "tool", "content": "19 degrees"},
            {"role": "tool", "content": "19 degrees"},
        ]
    )
    tokenizer = server.service.llm.tokenizer
    assert tokenizer is not None
    conversation = [{"role": "user", "content": "How?"}, *turn, *results]
    assert tokens(server, instructions="Be brief.", input=conversation) == len(tokenizer.encode(text, add_special_tokens=False))


def test_what_the_model_thought_comes_back_to_it(server: Live) -> None:
    answer = client(server).responses.create(model="tiny", input="think hard")
    thought, message = answer.output
    assert thought.type == "reasoning"
    assert thought.content is not None
    assert [part.text for part in thought.content] == ["Six times seven."]
    assert answer.output_text == "Forty-two."
    assert answer.usage is not None
    assert 0 < answer.usage.output_tokens_details.reasoning_tokens < answer.usage.output_tokens
    begin, end = {"role": "user", "content": "think hard"}, {"role": "user", "content": "hello"}
    assert tokens(server, input=[begin, thought, message, end]) > tokens(server, input=[begin, message, end])


def test_log_probabilities_are_those_of_the_text(server: Live) -> None:
    for asked, text in (("hello", REPLIES["hello"]), ("think hard", "Forty-two.")):
        answer = client(server).responses.create(model="tiny", input=asked, include=LOGPROBS, top_logprobs=2)
        part = answer.output[-1].content[0]
        assert part.text == text
        told = b"".join(bytes(entry.bytes) for entry in part.logprobs).decode()
        assert told.endswith(text)
        assert told.removesuffix(text).strip() in ("", "</think>"), "of what comes before, only the mark"
        assert all(len(entry.top_logprobs) == 2 for entry in part.logprobs)
    none: Any = client(server).responses.create(model="tiny", input="hello").output[0]
    assert none.content[0].logprobs == []


def test_a_tool_choice_is_kept(server: Live) -> None:
    responses = client(server).responses
    other = {"type": "function", "name": "other", "parameters": {"type": "object", "properties": {}}, "strict": None}
    for choice in ("required", {"type": "function", "name": "weather"}):
        answer: Any = responses.create(model="tiny", input="which town", tools=[other, WEATHER], tool_choice=choice, temperature=0)
        assert json.loads(answer.output[0].arguments) in ({"town": "Paris"}, {"town": "Oslo"})
        assert answer.tool_choice == choice or answer.tool_choice.to_dict() == choice
    free: Any = responses.create(model="tiny", input="which town", tools=[WEATHER])
    assert json.loads(free.output[0].arguments) == {"town": "Rome"}, "only a choice holds the model to the schema"
    unasked = responses.create(model="tiny", input="the weather", tools=[WEATHER], tool_choice="none")
    assert [item.type for item in unasked.output] == ["message"]
    one = responses.create(model="tiny", input="both towns", tools=[WEATHER], parallel_tool_calls=False)
    assert [item.type for item in one.output] == ["message", "function_call"]


class Answer(BaseModel):
    answer: int
    sure: bool


def test_an_answer_is_held_to_a_format(server: Live) -> None:
    responses = client(server).responses
    assert responses.parse(model="tiny", input="as JSON", text_format=Answer).output_parsed == Answer(answer=42, sure=True)
    with responses.stream(model="tiny", input="as JSON", text_format=Answer) as stream:
        assert stream.get_final_response().output_parsed == Answer(answer=42, sure=True)
    seven = {"type": "object", "properties": {"answer": {"enum": [7]}}, "required": ["answer"], "additionalProperties": False}
    held: Any = {"format": {"type": "json_schema", "name": "seven", "schema": seven, "strict": True}}
    answer = responses.create(model="tiny", input="as JSON", text=held, temperature=0, max_output_tokens=60)
    assert '"answer": 7' in answer.output_text
    assert answer.text is not None
    assert answer.text.to_dict() == held
    assert json.loads(responses.create(model="tiny", input="as JSON", text={"format": {"type": "json_object"}}).output_text)
    free = {"text": {"format": {"type": "regex", "regex": "[0-9]{4}"}}}
    assert re.fullmatch("[0-9]{4}", responses.create(model="tiny", input="hello", extra_body=free).output_text)


def test_effort_is_what_the_template_can_do_with_it(server: Live, plain_server: Live) -> None:
    low, none = (tokens(server, input="hello", reasoning={"effort": effort}) for effort in ("low", "none"))
    assert none > low > tokens(server, input="hello"), "the template of the test repeats the effort"
    with pytest.raises(openai.BadRequestError, match=r"reasoning\.effort: this model's chat template knows no such effort"):
        client(plain_server, "correct horse").responses.create(model="tiny", input="hello", reasoning={"effort": "low"})


def test_no_effort_is_what_a_switch_can_do() -> None:
    talk = Talk(scripted({"": ""}, template="{{ enable_thinking }}" + PLAIN))
    assert strengthened(talk, "none", "effort") == {"enable_thinking": False}
    with pytest.raises(Problem, match="effort: this model's chat template knows no such effort"):
        strengthened(talk, "low", "effort")


def test_the_fields_of_the_engine_are_honoured_here_too(server: Live) -> None:
    responses = client(server).responses
    stopped = responses.create(model="tiny", input="numbers", extra_body={"stop": ["three"], "priority": 3, "timeout": 60})
    assert (stopped.output_text, stopped.status) == ("one two ", "completed")
    wild = {"extra_body": {"seed": 7, "logit_bias": {"300": 100, "301": 100, "302": 100}}, "temperature": 2}
    first, second = (responses.create(model="tiny", input="hello", max_output_tokens=12, **wild).output_text for _ in range(2))
    assert first == second != REPLIES["hello"][: len(first)]
    long = "numbers and a text that is long enough to fill a block of the cache or two"
    cached = [
        responses.create(model="tiny", input=long, extra_body={"cache_salt": salt}).usage.input_tokens_details.cached_tokens
        for salt in ("a", "a", "b")
    ]
    assert cached[1] > 0
    assert cached == [0, cached[1], 0]


KEEPS_NOTHING = "this server keeps nothing between requests"

REFUSED: list[tuple[dict[str, Any], str, str]] = [
    ({"store": True}, "store", f"store: {KEEPS_NOTHING}"),
    ({"previous_response_id": "resp_1"}, "previous_response_id", f"previous_response_id: {KEEPS_NOTHING}"),
    ({"conversation": {"id": "conv_1"}}, "conversation", f"conversation: {KEEPS_NOTHING}"),
    ({"background": True}, "background", f"background: {KEEPS_NOTHING}"),
    ({"truncation": "auto"}, "truncation", f"truncation: {KEEPS_NOTHING}"),
    ({"max_output_tokens": 0}, "max_output_tokens", "max_output_tokens: "),
    ({"max_output_tokens": 4096}, "max_output_tokens", "max_output_tokens: .* context"),
    ({"temperature": 3}, "temperature", "temperature: "),
    ({"n": 2}, "n", "n: "),
    ({"top_logprobs": 2}, "top_logprobs", "top_logprobs: only with include"),
    ({"top_logprobs": 21, "include": LOGPROBS}, "top_logprobs", "top_logprobs: "),
    ({"include": ["reasoning.encrypted_content"]}, "include[0]", r"include\[0\]: "),
    ({"stream_options": {"include_obfuscation": False}, "stream": False}, "stream_options", "stream_options: only with stream"),
    ({"stream_options": {"include_obfuscation": True}}, "stream_options.include_obfuscation", "stream_options.include_obfuscation: "),
    ({"max_tokens": 9}, "max_tokens", "max_tokens: no such field here"),
    ({"input": []}, "input", "input: expected at least one item"),
    ({"input": [{"role": "user", "content": "a"}] * 16385}, "input", "input: expected at most 16384 items, found 16385"),
    ({"input": 7}, "input", "input: expected a text or a list"),
    ({"input": [{"type": "item_reference", "id": "x"}]}, "input", "input: .* found type item_reference$"),
    (
        {"input": [{"role": "user", "content": [{"type": "input_image", "image_url": "x"}]}]},
        "input[0].content",
        r"input\[0\]\.content: .* found type input_image; this model reads text only",
    ),
    (
        {"input": [{"type": "function_call_output", "call_id": "x", "output": "y"}]},
        "input[0].call_id",
        r"input\[0\]\.call_id: no function_call",
    ),
    (
        {"input": [{"type": "function_call", "call_id": "x", "name": "y", "arguments": "[]"}]},
        "input[0].arguments",
        r"input\[0\]\.arguments: expected the text of a JSON object",
    ),
    ({"tools": [{"type": "web_search"}]}, "tools[0].type", r"tools\[0\]\.type: "),
    ({"tools": [{**WEATHER, "name": "a b"}]}, "tools[0].name", r"tools\[0\]\.name: "),
    ({"tools": [{**WEATHER, "parameters": {"type": "array"}}]}, "tools[0].parameters", r"tools\[0\]\.parameters: "),
    ({"tool_choice": "required"}, "tool_choice", "tool_choice: "),
    ({"tools": [WEATHER], "tool_choice": {"type": "function", "name": "x"}}, "tool_choice.name", r"tool_choice\.name: "),
    (
        {"text": {"format": {"type": "json_schema", "name": "x", "schema": {"type": 7}}}},
        "text.format.schema",
        r"text\.format\.schema: ",
    ),
    ({"text": {"format": {"type": "regex", "regex": "["}}}, "text.format.regex", r"text\.format\.regex: "),
    (
        {"tools": [WEATHER], "tool_choice": "required", "text": {"format": {"type": "json_object"}}},
        "text.format",
        r"text\.format: cannot be combined",
    ),
    ({"reasoning": {"effort": "low", "summary": "auto"}}, "reasoning.summary", r"reasoning\.summary: no such field"),
    ({"timeout": -1}, "timeout", "timeout: "),
]


@pytest.mark.parametrize(("fields", "param", "message"), REFUSED, ids=[f"{i}-{param}" for i, (_, param, _) in enumerate(REFUSED)])
@pytest.mark.parametrize("streamed", [False, True], ids=["whole", "streamed"])
def test_what_cannot_be_is_refused_by_its_field(server: Live, fields: dict[str, Any], param: str, message: str, streamed: bool) -> None:
    body = {"model": "tiny", "input": "hello", **({"stream": True} if streamed else {}), **fields}
    with pytest.raises(openai.BadRequestError) as refused:
        client(server).post("/responses", body=body, cast_to=object)
    assert refused.value.param == param
    assert isinstance(refused.value.body, dict)
    assert re.match(message, refused.value.body["message"])
    assert client(server).responses.create(model="tiny", input="numbers").output_text == REPLIES["numbers"]


def test_another_model_and_another_key_are_refused(plain_server: Live) -> None:
    with pytest.raises(openai.NotFoundError):
        client(plain_server, "battery staple").responses.create(model="gpt", input="hello")
    with pytest.raises(openai.AuthenticationError):
        client(plain_server, "wrong").responses.create(model="tiny", input="hello")


@pytest.mark.parametrize("limit", ["the server's", "the request's"])
def test_an_answer_that_the_server_ends_has_failed_with_what_there_is_of_it(limit: str) -> None:
    options, fields = ({"request_timeout": 0.3}, {}) if limit == "the server's" else ({}, {"extra_body": {"timeout": 0.3}})
    with live(scripted(REPLIES, template=TEMPLATE), **options) as server:
        whole = client(server).responses.create(model="tiny", input="without end", **fields)
        with client(server).responses.stream(model="tiny", input="without end", **fields) as stream:
            last: Any = list(stream)[-1]
    assert last.type == "response.failed"
    for answer in (whole, last.response):
        assert answer.status == "failed"
        assert (answer.error.code, answer.error.message) == ("server_error", "the request's time was up")
        assert answer.output_text.startswith("word word ")
        assert answer.output[0].status == "incomplete"
        assert 1 < answer.usage.output_tokens < 3000


def test_what_fails_on_the_way_is_a_failed_response_and_the_end() -> None:
    broken = [False]

    def before_step() -> None:
        if broken[0]:
            broken[0] = False
            raise ArithmeticError("a secret of ours")

    with live(scripted(REPLIES, template=TEMPLATE, before_step=before_step)) as server:
        responses = client(server).responses
        events = []
        with responses.stream(model="tiny", input="without end") as stream:
            for event in stream:
                events.append(event)
                broken[0] = broken[0] or (event.type == "response.output_text.delta" and len(events) < 9)
        last: Any = events[-1]
        assert last.type == "response.failed"
        assert last.response.status == "failed"
        assert last.response.error.code == "server_error"
        assert last.response.output_text
        assert REPLIES["without end"].startswith(last.response.output_text)
        assert [event.sequence_number for event in events] == list(range(len(events)))
        broken[0] = True
        with pytest.raises(openai.InternalServerError):
            responses.create(model="tiny", input="hello")
        assert responses.create(model="tiny", input="hello").status == "completed"
