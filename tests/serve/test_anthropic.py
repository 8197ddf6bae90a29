"""/v1/messages, driven by Anthropic's own client over a real socket."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

import anthropic
import pytest
from anthropic.types import Message
from dialogues import PLAIN, REPLIES, TEMPLATE, TOWN, events_of, post
from live import Live, live, until
from pydantic import BaseModel
from scripted import scripted

WEATHER = {"name": "weather", "description": "How warm it is", "input_schema": TOWN}


def client(server: Live, key: str = "no key at all") -> anthropic.Anthropic:
    return anthropic.Anthropic(base_url=server.url, api_key=key, max_retries=0, timeout=60)


@pytest.fixture(scope="module")
def server() -> Iterator[Live]:
    with live(scripted(REPLIES, template=TEMPLATE)) as running:
        yield running


@pytest.fixture(scope="module")
def plain_server() -> Iterator[Live]:
    with live(scripted(REPLIES, template=PLAIN), api_keys=("correct horse", "battery staple")) as running:
        yield running


def user(text: Any) -> dict[str, Any]:
    return {"role": "user", "content": text}


def asked(text: Any, **fields: Any) -> dict[str, Any]:
    return {"model": "tiny", "max_tokens": 200, "messages": [user(text)], **fields}


def said(message: Message) -> dict[str, Any]:
    """What an answer says, without what differs each time."""
    found = message.model_dump(exclude={"id"}, exclude_none=True, warnings=False)
    for number, block in enumerate(found["content"]):
        if block["type"] == "tool_use":
            block["id"] = f"call {number}"
    return found


def test_an_answer_says_how_it_ended_and_what_it_took(server: Live) -> None:
    text = REPLIES["hello"]
    answer = client(server).messages.create(**asked("hello"))
    assert [block.to_dict() for block in answer.content] == [{"type": "text", "text": text}]
    assert (answer.role, answer.model, answer.type, answer.stop_reason, answer.stop_sequence) == (
        "assistant", "tiny", "message", "end_turn", None,
    )  # fmt: skip
    tokenizer = server.service.llm.tokenizer
    assert tokenizer is not None
    assert answer.usage.output_tokens == len(tokenizer.encode(text, add_special_tokens=False)) + 1


ASKED: dict[str, dict[str, Any]] = {
    "text": asked("hello"),
    "system in blocks": asked("hello", system=[{"type": "text", "text": "Be brief.", "cache_control": {"type": "ephemeral", "ttl": "1h"}}]),
    "cut off": asked("numbers", max_tokens=7),
    "stop sequence": asked("numbers", stop_sequences=["six", "three", "e t"]),
    "thinking": asked("think hard"),
    "a thought that is cut off": asked("think hard", max_tokens=15),
    "call": asked("the weather", tools=[WEATHER]),
    "calls": asked("both towns", tools=[WEATHER]),
    "no tool on offer": asked("the weather"),
    "a call that is cut off": asked("the weather", tools=[WEATHER], max_tokens=40),
    "a call that breaks off": asked("a bad call", tools=[WEATHER]),
    "forced call": asked("which town", tools=[WEATHER], tool_choice={"type": "any"}, extra_body={"temperature": 0}),
    "nothing": asked("numbers", stop_sequences=["o"]),
}


@pytest.mark.parametrize("fields", ASKED.values(), ids=ASKED)
def test_a_stream_put_together_is_the_answer_as_a_whole(server: Live, fields: dict[str, Any]) -> None:
    messages = client(server).messages
    messages.create(**fields)  # now the prompt is cached, whoever asks next
    whole = messages.create(**fields)
    with messages.stream(**fields) as stream:
        streamed = stream.get_final_message()
    assert said(streamed) == said(whole)


def test_the_answers_that_are_compared_are_of_every_kind(server: Live) -> None:
    answers = {name: client(server).messages.create(**fields) for name, fields in ASKED.items()}
    assert {name: ([block.type for block in answer.content], answer.stop_reason) for name, answer in answers.items()} == {
        "text": (["text"], "end_turn"),
        "system in blocks": (["text"], "end_turn"),
        "cut off": (["text"], "max_tokens"),
        "stop sequence": (["text"], "stop_sequence"),
        "thinking": (["thinking", "text"], "end_turn"),
        "a thought that is cut off": (["thinking"], "max_tokens"),
        "call": (["text", "tool_use"], "tool_use"),
        "calls": (["text", "tool_use", "tool_use"], "tool_use"),
        "no tool on offer": (["text"], "end_turn"),
        "a call that is cut off": (["text", "tool_use"], "max_tokens"),
        "a call that breaks off": (["tool_use", "text"], "end_turn"),
        "forced call": (["tool_use"], "tool_use"),
        "nothing": ([], "stop_sequence"),
    }


def test_every_event_has_its_name_and_its_place(server: Live) -> None:
    block = ["content_block_start", "content_block_delta", "content_block_stop"]
    for text in ("think hard", "the weather"):
        fields = asked(text, tools=[WEATHER], stream=True)
        events = events_of(post(f"{server.url}/v1/messages", fields, **{"anthropic-version": "2023-06-01"}))
        assert all(name == data["type"] for name, data in events)
        names = [name for i, (name, _) in enumerate(events) if i == 0 or events[i - 1][0] != name]
        assert names == ["message_start", *block, *block, "message_delta", "message_stop"]
    data = [data for _, data in events]
    assert [d["index"] for d in data if d["type"] == "content_block_start"] == [0, 1]
    assert data[0]["message"]["content"] == []
    assert data[0]["message"]["stop_reason"] is None
    assert data[-2]["delta"] == {"stop_reason": "tool_use", "stop_sequence": None}
    start, end = data[0]["message"]["usage"], data[-2]["usage"]
    assert start["input_tokens"] == end["input_tokens"] + end["cache_read_input_tokens"]
    assert end["output_tokens"] > start["output_tokens"]


@pytest.mark.parametrize(
    ("sequences", "found", "text"),
    [(["four", "three"], "three", "one two "), (["zzz"], None, REPLIES["numbers"]), (["ee", "three"], "three", "one two ")],
)
def test_the_stop_sequence_that_ended_the_text_is_named(server: Live, sequences: list[str], found: str | None, text: str) -> None:
    answer = client(server).messages.create(**asked("numbers", stop_sequences=sequences))
    assert answer.stop_sequence == found
    assert answer.stop_reason == ("end_turn" if found is None else "stop_sequence")
    assert answer.content[0].to_dict()["text"] == text


def test_a_call_may_be_cut_off_anywhere(server: Live) -> None:
    """Both tell the same part of its input: the client's reading of the pieces, and ours of the whole."""
    messages, inputs = client(server).messages, []
    for most in range(30, 70, 4):
        fields = asked("the weather", tools=[WEATHER], max_tokens=most)
        with messages.stream(**fields) as stream:
            streamed = said(stream.get_final_message())["content"]
        assert streamed == said(messages.create(**fields))["content"]
        inputs += [block["input"] for block in streamed if block["type"] == "tool_use"]
    assert {"town": "Paris"} in inputs
    assert len({str(found) for found in inputs}) > 2


@pytest.mark.parametrize("place", ["server", "plain_server"], ids=["a template with tools", "a template without"])
@pytest.mark.parametrize("streamed", [False, True], ids=["whole", "streamed"])
def test_a_tool_is_called_and_its_result_answered(request: pytest.FixtureRequest, place: str, streamed: bool) -> None:
    messages = client(request.getfixturevalue(place), "correct horse").messages
    conversation: list[Any] = [user("How is the weather?")]

    def ask() -> Message:
        fields: dict[str, Any] = {"model": "tiny", "max_tokens": 200, "tools": [WEATHER], "messages": conversation}
        if not streamed:
            return messages.create(**fields)
        with messages.stream(**fields) as stream:
            return stream.get_final_message()

    called = ask()
    text, use = called.content
    assert text.type == "text"
    assert text.text.strip() == "I look."
    assert use.type == "tool_use"
    assert (use.name, use.input) == ("weather", {"town": "Paris", "days": [1, 2]})
    conversation += [
        {"role": "assistant", "content": called.content},
        user([{"type": "tool_result", "tool_use_id": use.id, "content": [{"type": "text", "text": "19 degrees"}]}]),
    ]
    answer = ask()
    assert [block.to_dict() for block in answer.content] == [{"type": "text", "text": "Mild in Paris."}]


def test_a_result_that_is_an_error_says_so_to_the_model(server: Live) -> None:
    use = {"type": "tool_use", "id": "call 1", "name": "weather", "input": {}}
    result = {"type": "tool_result", "tool_use_id": "call 1", "content": "no such town", "is_error": True}
    turns = [user("How is the weather?"), {"role": "assistant", "content": [use]}, user([result])]
    answer = client(server).messages.create(model="tiny", max_tokens=99, tools=[WEATHER], messages=turns)
    assert answer.content[0].to_dict()["text"] == "I do not know that town."


def test_a_tool_choice_is_kept(server: Live) -> None:
    messages = client(server).messages
    other = {"name": "other", "input_schema": {"type": "object", "properties": {}}}
    for choice, names in [({"type": "tool", "name": "weather"}, {"weather"}), ({"type": "any"}, {"weather", "other"})]:
        answer = messages.create(**asked("which town", tools=[other, WEATHER], tool_choice=choice), extra_body={"temperature": 0})
        assert answer.stop_reason == "tool_use"
        assert {block.name for block in answer.content if block.type == "tool_use"} <= names
        assert answer.content[0].to_dict()["input"] in ({"town": "Paris"}, {"town": "Oslo"})
    free = messages.create(**asked("which town", tools=[WEATHER]))
    assert free.content[0].to_dict()["input"] == {"town": "Rome"}, "only a choice holds the model to the schema"
    unasked = messages.create(**asked("the weather", tools=[WEATHER], tool_choice={"type": "none"}))
    assert [block.type for block in unasked.content] == ["text"]
    one = messages.create(**asked("both towns", tools=[WEATHER], tool_choice={"type": "auto", "disable_parallel_tool_use": True}))
    assert [block.type for block in one.content] == ["text", "tool_use"]


def test_thinking_is_a_block_of_its_own_and_comes_back_to_the_model(server: Live) -> None:
    messages = client(server).messages
    answer = messages.create(**asked("think hard"))
    thought, text = answer.content
    assert thought.to_dict() == {"type": "thinking", "thinking": "Six times seven.", "signature": ""}
    assert text.to_dict() == {"type": "text", "text": "Forty-two."}
    assert answer.usage.output_tokens_details is not None
    assert 0 < answer.usage.output_tokens_details.thinking_tokens < answer.usage.output_tokens
    with_thought: Any = [user("think hard"), {"role": "assistant", "content": answer.content}, user("hello")]
    without: Any = [user("think hard"), {"role": "assistant", "content": [text]}, user("hello")]
    longer = messages.count_tokens(model="tiny", messages=with_thought).input_tokens
    assert longer > messages.count_tokens(model="tiny", messages=without).input_tokens


def test_thinking_is_switched_where_the_template_has_a_switch(server: Live, plain_server: Live) -> None:
    count = client(server).messages.count_tokens
    on, adaptive, off, unsaid = (
        count(model="tiny", messages=[user("hello")], **fields).input_tokens
        for fields in (
            {"thinking": {"type": "enabled", "budget_tokens": 1024}},
            {"thinking": {"type": "adaptive"}},
            {"thinking": {"type": "disabled"}},
            {},
        )
    )
    assert on == adaptive == unsaid < off, "the template of the test closes an empty thought"
    effort = count(model="tiny", messages=[user("hello")], output_config={"effort": "high"}).input_tokens
    assert effort > unsaid
    for field, fields in {
        "thinking": {"thinking": {"type": "enabled", "budget_tokens": 1024}},
        "output_config.effort": {"output_config": {"effort": "low"}},
    }.items():
        with pytest.raises(anthropic.BadRequestError, match=f"{field}: this model's chat template"):
            client(plain_server, "correct horse").messages.create(**asked("hello", **fields))
    assert client(plain_server, "correct horse").messages.create(**asked("hello", thinking={"type": "disabled"})).stop_reason == "end_turn"


def test_a_budget_that_would_cut_thinking_short_is_refused(server: Live) -> None:
    messages = client(server).messages
    with pytest.raises(anthropic.BadRequestError, match=r"thinking\.budget_tokens: thinking is not cut short here"):
        messages.create(**asked("think hard", thinking={"type": "enabled", "budget_tokens": 100}))
    answer = messages.create(**asked("think hard", thinking={"type": "enabled", "budget_tokens": 199}))
    assert answer.content[0].type == "thinking"


class Answer(BaseModel):
    answer: int
    sure: bool


def test_an_answer_is_held_to_a_schema(server: Live) -> None:
    parsed = client(server).messages.parse(**asked("as JSON"), output_format=Answer)
    assert parsed.parsed_output == Answer(answer=42, sure=True)
    schema = {"type": "object", "properties": {"answer": {"enum": [7]}}, "required": ["answer"], "additionalProperties": False}
    held = client(server).messages.create(**asked("as JSON", output_config={"format": {"type": "json_schema", "schema": schema}}))
    assert "7" in held.content[0].to_dict()["text"]


COUNTED: dict[str, dict[str, Any]] = {
    "text": {"messages": [user("hello")]},
    "blocks": {"messages": [user([{"type": "text", "text": "hel"}, {"type": "text", "text": "lo"}])], "system": "Be brief."},
    "tools": {"messages": [user("the weather")], "tools": [WEATHER], "tool_choice": {"type": "none"}},
    "thinking": {"messages": [user("hello")], "thinking": {"type": "disabled"}, "tools": [WEATHER]},
    "system in between": {"messages": [user("numbers"), {"role": "system", "content": "Now be brief."}, user("hello")]},
}


@pytest.mark.parametrize("fields", COUNTED.values(), ids=COUNTED)
def test_the_tokens_that_are_counted_are_those_of_the_answers_prompt(server: Live, fields: dict[str, Any]) -> None:
    messages = client(server).messages
    counted = messages.count_tokens(model="tiny", **fields).input_tokens
    for _ in range(2):  # the second finds the first in the cache
        usage = messages.create(model="tiny", max_tokens=50, **fields).usage
        assert counted == usage.input_tokens + (usage.cache_read_input_tokens or 0)
    assert usage.cache_read_input_tokens


def test_blocks_that_are_put_together_are_the_text(server: Live) -> None:
    counts = {
        client(server).messages.count_tokens(model="tiny", messages=[user(content)]).input_tokens
        for content in ("hello", [{"type": "text", "text": "hel"}, {"type": "text", "text": "lo", "cache_control": {"type": "ephemeral"}}])
    }
    assert len(counts) == 1


REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"max_tokens": 0}, "max_tokens: "),
    ({"max_tokens": 4096}, r"max_tokens: .* context"),
    ({"temperature": 1.5}, "temperature: "),
    ({"top_p": 0}, "top_p: "),
    ({"stop_sequences": [""]}, "stop_sequences: "),
    ({"stop_sequences": "a"}, "stop_sequences: "),
    ({"stop_sequences": [str(n) for n in range(17)]}, "stop_sequences: expected at most 16"),
    ({"messages": [user("a")] * 8193}, "messages: expected at most 8192"),
    ({"messages": [user([{"type": "text", "text": "a"}] * 8193)]}, r"messages\[0\]\.content: expected at most 8192 blocks, found 8193"),
    ({"seed": 1}, "seed: no such field here"),
    ({"container": "x"}, "container: no such field here"),
    ({"messages": []}, "messages: expected at least one message"),
    ({"messages": [user("a"), {"role": "assistant", "content": "b"}]}, r"messages\[1\]: the last message is the assistant's"),
    ({"messages": [{"role": "tool", "content": "a"}]}, r"messages\[0\]\.role: "),
    ({"messages": [user(7)]}, r"messages\[0\]\.content: expected a text or a list"),
    ({"messages": [user([{"type": "image", "source": {}}])]}, r"messages\[0\]\.content: .* found type image; this model reads text only"),
    ({"messages": [user([{"type": "text", "text": 7}])]}, r"messages\[0\]\.content\[0\]\.text: expected a text, found a number"),
    ({"messages": [user([{"type": "thinking", "thinking": "x"}])]}, r"messages\[0\]\.content\[0\]: expected text, tool_result from user"),
    (
        {"messages": [user([{"type": "tool_result", "tool_use_id": "x"}])]},
        r"messages\[0\]\.content\[0\]\.tool_use_id: no tool_use of this id",
    ),
    ({"tools": [{"name": "a b", "input_schema": TOWN}]}, r"tools\[0\]\.name: "),
    ({"tools": [{"name": "a", "input_schema": {"type": "array"}}]}, r"tools\[0\]\.input_schema: "),
    ({"tools": [WEATHER], "tool_choice": {"type": "tool", "name": "other"}}, r"tool_choice\.name: "),
    ({"tools": [{"type": "web_search_20250305", "name": "web_search"}]}, r"tools\[0\]\."),
    ({"tool_choice": {"type": "any"}}, "tool_choice: "),
    ({"output_config": {"format": {"type": "json_schema", "schema": {"type": 7}}}}, r"output_config\.format\.schema: "),
    (
        {
            "tools": [WEATHER],
            "tool_choice": {"type": "any"},
            "output_config": {"format": {"type": "json_schema", "schema": TOWN}},
        },
        r"output_config\.format: cannot be combined",
    ),
    ({"cache_control": {"type": "for ever"}}, r"cache_control\.type: "),
    ({"thread": {"type": "continue", "previous_message_id": "msg_1"}}, "thread: this server keeps nothing between requests"),
]


@pytest.mark.parametrize(("fields", "message"), REFUSED, ids=[f"{i}-{next(iter(fields))}" for i, (fields, _) in enumerate(REFUSED)])
@pytest.mark.parametrize("streamed", [False, True], ids=["whole", "streamed"])
def test_what_cannot_be_is_refused_by_its_field(server: Live, fields: dict[str, Any], message: str, streamed: bool) -> None:
    body = {**asked("hello"), **fields, **({"stream": True} if streamed else {})}
    with pytest.raises(anthropic.BadRequestError) as refused:
        client(server).post("/v1/messages", body=body, cast_to=object)
    assert isinstance(refused.value.body, dict)
    assert refused.value.body["type"] == "error"
    assert refused.value.body["error"]["type"] == "invalid_request_error"
    assert re.match(message, refused.value.body["error"]["message"])
    assert client(server).messages.create(**asked("numbers")).content[0].to_dict()["text"] == REPLIES["numbers"]


def test_max_tokens_must_be_given(server: Live) -> None:
    with pytest.raises(anthropic.BadRequestError, match="max_tokens: missing"):
        client(server).post("/v1/messages", body={"messages": [user("hello")]}, cast_to=object)


def test_another_model_and_another_key_are_refused_in_anthropics_words(plain_server: Live) -> None:
    with pytest.raises(anthropic.NotFoundError) as unknown:
        client(plain_server, "battery staple").messages.create(**asked("hello", model="claude"))
    assert "tiny" in str(unknown.value)
    for url in ("messages", "messages/count_tokens"):
        with pytest.raises(anthropic.AuthenticationError) as stranger:
            client(plain_server, "wrong").post(f"/v1/{url}", body=asked("hello"), cast_to=object)
        assert isinstance(stranger.value.body, dict)
        assert (stranger.value.body["type"], stranger.value.body["error"]["type"]) == ("error", "authentication_error")
    assert client(plain_server, "battery staple").messages.create(**asked("hello")).stop_reason == "end_turn"


def test_prefixes_are_cached_for_each_key_alone(plain_server: Live) -> None:
    fields = asked("numbers, and a text that is long enough to fill a block of the cache or two")
    found = [
        client(plain_server, key).messages.create(**fields).usage.cache_read_input_tokens
        for key in ("correct horse", "correct horse", "battery staple")
    ]
    assert found[1]
    assert found == [0, found[1], 0]


def test_a_reader_who_leaves_frees_what_was_theirs(server: Live) -> None:
    with client(server).messages.stream(**{**asked("without end"), "max_tokens": 3500}) as stream:
        assert next(stream.text_stream)
        assert server.service.engine.unfinished == 1
    until(lambda: server.service.engine.unfinished == 0, 5)


def test_anthropics_own_runner_of_tools_gets_to_the_end(server: Live) -> None:
    @anthropic.beta_tool
    def weather(town: str, days: list[int]) -> str:
        """How warm it is.

        Args:
            town: where
            days: when
        """
        return f"{sum(days) + 16} degrees in {town}"

    runner = client(server).beta.messages.tool_runner(model="tiny", max_tokens=200, tools=[weather], messages=[user("How is the weather?")])
    assert [message.content[0].to_dict()["text"] for message in runner] == ["I look.", "Mild in Paris."]


def test_an_answer_that_the_server_ends_is_an_error_and_no_turn_to_go_on_with() -> None:
    with live(scripted(REPLIES, template=TEMPLATE), request_timeout=0.3) as server:
        with pytest.raises(anthropic.APIStatusError) as whole:
            client(server).messages.create(**{**asked("without end"), "max_tokens": 3500})
        texts: list[str] = []
        with (
            pytest.raises(anthropic.APIStatusError, match="timeout: passed before the answer was complete"),
            client(server).messages.stream(**{**asked("without end"), "max_tokens": 3500}) as stream,
        ):
            texts.extend(stream.text_stream)
    assert whole.value.status_code == 504
    assert "".join(texts).startswith("word word ")


def test_what_fails_on_the_way_is_an_error_event_and_the_end() -> None:
    broken = [False]

    def before_step() -> None:
        if broken[0]:
            broken[0] = False
            raise ArithmeticError("a secret of ours")

    with live(scripted(REPLIES, template=TEMPLATE, before_step=before_step)) as server:
        messages = client(server).messages
        with messages.stream(**{**asked("without end"), "max_tokens": 3500}) as stream:
            broken[0] = next(stream.text_stream) != ""
            with pytest.raises(anthropic.APIStatusError) as failed:
                stream.until_done()
        assert isinstance(failed.value.body, dict)
        assert failed.value.body["type"] == "error"
        assert failed.value.body["error"]["type"] == "api_error"
        broken[0] = True
        with pytest.raises(anthropic.InternalServerError):
            messages.create(**asked("hello"))
        assert messages.create(**asked("hello")).stop_reason == "end_turn"
