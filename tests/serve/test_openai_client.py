"""The official client of OpenAI drives the server: what it gets, whole or in a stream, is what the model says in process."""

from __future__ import annotations

import json
import re
from collections import defaultdict
from collections.abc import Iterator
from typing import Any

import openai
import pydantic
import pytest
from live import Live, live, until
from scripted import LLAMA
from tiny_models import DirectorySource
from wire import post

from arctool.run.llm import LLM, EngineOptions
from arctool.run.sampling.params import SamplingParams

MESSAGES: Any = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "What is it?"}]
KEY = "a-secret-of-ours"


def tiny() -> LLM:
    return LLM(DirectorySource(LLAMA), EngineOptions(max_seqs=16))


def client_of(server: Live, key: str = "none") -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{server.url}/v1", api_key=key, max_retries=0, timeout=30)


@pytest.fixture(scope="module")
def alone() -> LLM:
    """The same model without a server."""
    return tiny()


@pytest.fixture(scope="module")
def server() -> Iterator[Live]:
    with live(tiny()) as running:
        yield running


@pytest.fixture(scope="module")
def client(server: Live) -> Iterator[openai.OpenAI]:
    with client_of(server) as found:
        yield found


def test_the_model_is_listed_with_its_sizes(client: openai.OpenAI) -> None:
    [model] = client.models.list().data
    assert (model.id, model.object, model.owned_by) == ("tiny", "model", "arctool")
    assert model.max_model_len == 256  # type: ignore[attr-defined]
    assert model.kv_dtype == "float32"  # type: ignore[attr-defined]
    assert client.models.retrieve("tiny") == model
    with pytest.raises(openai.NotFoundError) as caught:
        client.models.retrieve("other")
    assert (caught.value.code, caught.value.param) == ("model_not_found", "model")


@pytest.mark.parametrize("text", ["What is it?", "Héllo 😀", "one\ntwo\n", "x" * 50])
def test_a_greedy_answer_is_the_one_in_process(text: str, client: openai.OpenAI, alone: LLM) -> None:
    found = client.chat.completions.create(model="tiny", messages=[{"role": "user", "content": text}], max_tokens=20, temperature=0)
    wanted = alone.chat([{"role": "user", "content": text}], SamplingParams(temperature=0, max_tokens=20))
    [choice] = found.choices
    assert choice.message.content == wanted.text
    assert choice.message.role == "assistant"
    assert choice.finish_reason == wanted.finish_reason.value
    assert found.usage is not None
    assert found.usage.prompt_tokens == len(wanted.prompt_ids)
    assert found.usage.completion_tokens == len(wanted.token_ids)
    assert found.usage.total_tokens == found.usage.prompt_tokens + found.usage.completion_tokens


SAMPLED: list[dict[str, Any]] = [
    {"temperature": 1, "seed": 1},
    {"temperature": 1.5, "seed": -5, "top_p": 0.9},
    {"temperature": 2, "seed": (1 << 64) - 1, "presence_penalty": 1, "frequency_penalty": 0.5},
    {"temperature": 1, "seed": 7, "extra_body": {"top_k": 20, "min_p": 0.01, "typical_p": 0.95, "repetition_penalty": 1.2}},
]


def test_a_sampled_answer_with_a_seed_is_the_one_in_process(client: openai.OpenAI, alone: LLM) -> None:
    texts = set()
    for fields in SAMPLED:
        body = {key: value for key, value in fields.items() if key != "extra_body"}
        params = SamplingParams(max_tokens=24, **body, **fields.get("extra_body", {}))
        for _ in range(2):
            found = client.chat.completions.create(model="tiny", messages=MESSAGES, max_tokens=24, **fields)
            assert found.choices[0].message.content == alone.chat(MESSAGES, params).text
        texts.add(found.choices[0].message.content)
    assert len(texts) == len(SAMPLED)


def test_a_stream_put_together_is_the_whole_answer_and_choices_come_interleaved(client: openai.OpenAI) -> None:
    fields: dict[str, Any] = {"model": "tiny", "messages": MESSAGES, "max_tokens": 30, "temperature": 1.2, "seed": 3, "n": 3}
    whole = client.chat.completions.create(**fields)
    texts: dict[int, str] = defaultdict(str)
    ends: dict[int, str] = {}
    order = []
    for chunk in client.chat.completions.create(**fields, stream=True):
        assert chunk.usage is None
        [choice] = chunk.choices
        assert choice.index not in ends
        texts[choice.index] += choice.delta.content or ""
        if choice.delta.content:
            order.append(choice.index)
        if choice.finish_reason:
            ends[choice.index] = choice.finish_reason
    assert [texts[i] for i in range(3)] == [choice.message.content for choice in whole.choices]
    assert [ends[i] for i in range(3)] == [choice.finish_reason for choice in whole.choices]
    assert len(set(texts.values())) == 3
    assert max(order.index(i) for i in range(3)) < min(len(order) - 1 - order[::-1].index(i) for i in range(3))


def test_log_probabilities_are_those_of_the_engine(client: openai.OpenAI, alone: LLM) -> None:
    found = client.chat.completions.create(
        model="tiny", messages=MESSAGES, max_tokens=12, temperature=0, logprobs=True, top_logprobs=4
    ).choices[0]
    wanted = alone.chat(MESSAGES, SamplingParams(temperature=0, max_tokens=12, logprobs=4))
    assert alone.tokenizer is not None
    assert wanted.logprobs is not None
    assert found.logprobs is not None
    assert found.logprobs.content is not None
    assert [one.logprob for one in found.logprobs.content] == [one.token for one in wanted.logprobs]
    for one, token, known in zip(found.logprobs.content, wanted.token_ids, wanted.logprobs, strict=True):
        assert one.bytes is not None
        assert bytes(one.bytes) == alone.tokenizer.token_bytes(token)
        assert one.token == bytes(one.bytes).decode("utf-8", "replace")
        assert [top.logprob for top in one.top_logprobs] == [logprob for _, logprob in known.top]
        assert len(one.top_logprobs) == 4
        assert one.top_logprobs[0].bytes == one.bytes  # greedy
    assert found.message.content == b"".join(bytes(one.bytes or ()) for one in found.logprobs.content).decode("utf-8", "replace")
    bare = client.chat.completions.create(model="tiny", messages=MESSAGES, max_tokens=2, temperature=0, logprobs=True).choices[0]
    assert bare.logprobs is not None
    assert [one.top_logprobs for one in bare.logprobs.content or ()] == [[], []]


def test_a_stop_string_ends_the_text_before_it(client: openai.OpenAI) -> None:
    fields: dict[str, Any] = {"model": "tiny", "messages": MESSAGES, "max_tokens": 40, "temperature": 0}
    text = client.chat.completions.create(**fields).choices[0].message.content
    assert text is not None
    stop = text[7:12]
    for given in (stop, ["never said", stop]):
        choice = client.chat.completions.create(**fields, stop=given).choices[0]
        assert (choice.message.content, choice.finish_reason) == (text[: text.index(stop)], "stop")
    kept = client.chat.completions.create(**fields, stop=stop, extra_body={"include_stop_str_in_output": True}).choices[0]
    assert kept.message.content == text[: text.index(stop) + len(stop)]


def test_a_bias_forces_and_forbids(client: openai.OpenAI, alone: LLM) -> None:
    assert alone.tokenizer is not None
    token = alone.tokenizer.token_id("x")
    fields: dict[str, Any] = {"model": "tiny", "messages": MESSAGES, "max_tokens": 5, "temperature": 0}
    assert client.chat.completions.create(**fields, logit_bias={str(token): 100}).choices[0].message.content == "xxxxx"
    first = alone.chat(MESSAGES, SamplingParams(temperature=0, max_tokens=5))
    other = client.chat.completions.create(**fields, logit_bias={str(first.token_ids[0]): -100}).choices[0].message.content
    assert other != first.text


class Weather(pydantic.BaseModel):
    """A schema as programs write it."""

    model_config = pydantic.ConfigDict(extra="forbid")

    city: str = pydantic.Field(max_length=5)
    degrees: int = pydantic.Field(ge=0, le=40)
    sky: list[str] = pydantic.Field(max_length=1)


def test_a_json_schema_is_held_to(client: openai.OpenAI) -> None:
    found = []
    for seed in range(3):
        answer = client.chat.completions.create(
            model="tiny",
            messages=MESSAGES,
            max_tokens=150,
            seed=seed,
            logit_bias={"220": -100, "10": -100},
            response_format={
                "type": "json_schema",
                "json_schema": {"name": "weather", "strict": True, "schema": Weather.model_json_schema()},
            },
        ).choices[0]
        if answer.finish_reason == "stop":
            found.append(Weather.model_validate_json(answer.message.content or ""))
    assert found


def test_json_is_json_and_a_regex_matches(client: openai.OpenAI) -> None:
    ended = 0
    for seed in range(4):
        answer = client.chat.completions.create(
            model="tiny", messages=MESSAGES, max_tokens=120, temperature=1.2, seed=seed, response_format={"type": "json_object"}
        ).choices[0]
        assert (answer.message.content or "").lstrip().startswith("{")
        if answer.finish_reason == "stop":
            ended += 1
            assert isinstance(json.loads(answer.message.content or ""), dict)
    assert ended
    for seed in range(3):
        answer = client.chat.completions.create(
            model="tiny",
            messages=MESSAGES,
            max_tokens=30,
            seed=seed,
            extra_body={"response_format": {"type": "regex", "regex": "[a-f]{3}-(yes|no)"}},
        ).choices[0]
        assert answer.finish_reason == "stop"
        assert re.fullmatch("[a-f]{3}-(yes|no)", answer.message.content or "")


def test_the_second_of_two_equal_prompts_is_cached_and_the_stream_tells_usage(client: openai.OpenAI) -> None:
    messages: Any = [{"role": "user", "content": "A prompt that is said twice, and is longer than a block. " * 2}]
    first = client.chat.completions.create(model="tiny", messages=messages, max_tokens=4, temperature=0)
    *chunks, last = client.chat.completions.create(
        model="tiny", messages=messages, max_tokens=4, temperature=0, stream=True, stream_options={"include_usage": True}
    )
    assert all(chunk.usage is None for chunk in chunks)
    assert last.choices == []
    assert first.usage is not None
    assert last.usage is not None
    assert first.usage.prompt_tokens_details is not None
    assert last.usage.prompt_tokens_details is not None
    assert first.usage.prompt_tokens_details.cached_tokens == 0
    cached = last.usage.prompt_tokens_details.cached_tokens
    assert cached is not None
    assert 0 < cached < last.usage.prompt_tokens
    assert cached % 16 == 0
    assert (last.usage.prompt_tokens, last.usage.total_tokens) == (first.usage.prompt_tokens, first.usage.total_tokens)


def test_several_prompts_are_continued_each_as_if_alone(client: openai.OpenAI, alone: LLM) -> None:
    prompts = ["Once upon", "a time", "there was 😀"]
    params = SamplingParams(temperature=1, max_tokens=10, n=2, seed=5)
    wanted = [one.text for one in alone.generate(prompts, params)]
    found = client.completions.create(model="tiny", prompt=prompts, max_tokens=10, temperature=1, n=2, seed=5)
    assert [choice.index for choice in found.choices] == list(range(6))
    assert [choice.text for choice in found.choices] == wanted
    assert len(set(wanted)) == 6
    ids = [alone.encode(prompt) for prompt in prompts]
    assert [c.text for c in client.completions.create(model="tiny", prompt=ids, max_tokens=10, n=2, seed=5).choices] == wanted
    assert found.usage is not None
    assert found.usage.prompt_tokens == sum(map(len, ids))
    texts: dict[int, str] = defaultdict(str)
    for chunk in client.completions.create(model="tiny", prompt=prompts, max_tokens=10, n=2, seed=5, stream=True):
        texts[chunk.choices[0].index] += chunk.choices[0].text
    assert [texts[i] for i in range(6)] == wanted


@pytest.mark.parametrize("streamed", [False, True], ids=["whole", "streamed"])
def test_a_completion_without_a_length_has_sixteen_tokens_and_may_echo_its_prompt(streamed: bool, client: openai.OpenAI) -> None:
    plain = client.completions.create(model="tiny", prompt="Once", temperature=0)
    assert plain.usage is not None
    assert plain.usage.completion_tokens == 16
    fields: dict[str, Any] = {"model": "tiny", "prompt": ["Once", "upon"], "temperature": 0, "echo": True}
    for most, text in ((None, "Once" + plain.choices[0].text), (0, "Once")):
        made = client.completions.create(**fields, max_tokens=most, stream=streamed)
        chunks = list(made) if streamed else [made]
        assert "".join(choice.text for chunk in chunks for choice in chunk.choices if choice.index == 0) == text
        ends = [choice.finish_reason for chunk in chunks for choice in chunk.choices if choice.index == 0 and choice.finish_reason]
        assert ends == ["length"]


@pytest.mark.parametrize("streamed", [False, True], ids=["whole", "streamed"])
def test_tokens_of_a_completion_lie_where_their_offsets_say(streamed: bool, client: openai.OpenAI, alone: LLM) -> None:
    partial = 0
    for seed in range(6):
        fields: dict[str, Any] = {"model": "tiny", "prompt": "Once", "max_tokens": 30, "seed": seed, "temperature": 1.5, "logprobs": 3}
        made = client.completions.create(**fields, stream=streamed)
        choices = [chunk.choices[0] for chunk in (made if streamed else [made])]
        text = "".join(choice.text for choice in choices)
        found = [choice.logprobs for choice in choices if choice.logprobs is not None]
        tokens = [token for one in found for token in one.tokens or ()]
        offsets = [offset for one in found for offset in one.text_offset or ()]
        tops = [top for one in found for top in one.top_logprobs or ()]
        values = [value for one in found for value in one.token_logprobs or ()]
        wanted = alone.generate(["Once"], SamplingParams(max_tokens=30, seed=seed, temperature=1.5, logprobs=3))[0]
        assert wanted.logprobs is not None
        assert values == [one.token for one in wanted.logprobs][: len(values)]
        assert len(tokens) == len(offsets) == len(tops) >= 10
        for token, offset, top, value in zip(tokens, offsets, tops, values, strict=True):
            assert top[token] == value
            assert len(top) in (3, 4)
            if token.startswith("bytes:"):
                partial += 1
            else:
                assert text[offset:].startswith(token)
    assert partial > 5


def test_text_becomes_tokens_and_comes_back(server: Live, client: openai.OpenAI, alone: LLM) -> None:
    text = "Héllo 😀, \0 wörld\n"
    found = post(server.port, "/tokenize", {"prompt": text}).json
    assert found == {"count": len(found["tokens"]), "max_model_len": 256, "tokens": alone.encode(text)}
    assert post(server.port, "/detokenize", {"tokens": found["tokens"]}).json == {"prompt": text}
    assert post(server.port, "/detokenize", {"tokens": []}).json == {"prompt": ""}
    chat = post(server.port, "/tokenize", {"messages": MESSAGES}).json
    assert chat["tokens"] == alone.encode_chat(MESSAGES)
    usage = client.chat.completions.create(model="tiny", messages=MESSAGES, max_tokens=1).usage
    assert usage is not None
    assert usage.prompt_tokens == chat["count"]
    bare = post(server.port, "/tokenize", {"messages": MESSAGES, "add_generation_prompt": False}).json["tokens"]
    assert chat["tokens"][: len(bare)] == bare != chat["tokens"]
    for body, param in (
        ({}, "prompt"),
        ({"prompt": "a", "messages": MESSAGES}, "prompt"),
        ({"prompt": "a", "add_generation_prompt": True}, "add_generation_prompt"),
        ({"messages": MESSAGES, "add_special_tokens": True}, "add_special_tokens"),
        ({"prompt": 5}, "prompt"),
    ):
        assert post(server.port, "/tokenize", body).error["param"] == param
    for tokens in ([512], [-1], ["a"], [1.5], None, [True], 5):
        reply = post(server.port, "/detokenize", {"tokens": tokens})
        assert (reply.status, reply.error["param"]) == (400, "tokens")


def test_errors_are_the_exceptions_that_programs_catch(client: openai.OpenAI) -> None:
    fields: dict[str, Any] = {"model": "tiny", "messages": MESSAGES}
    for bad, param, code in (
        ({"temperature": 5}, "temperature", None),
        ({"max_tokens": 1000}, "max_tokens", "context_length_exceeded"),
        ({"extra_body": {"best_of": 4}}, "best_of", "unknown_field"),
        ({"temperature": 5, "stream": True}, "temperature", None),
    ):
        with pytest.raises(openai.BadRequestError) as caught:
            client.chat.completions.create(**fields, **bad)
        assert (caught.value.param, caught.value.code, caught.value.type) == (param, code, "invalid_request_error")
    with pytest.raises(openai.NotFoundError):
        client.chat.completions.create(**{**fields, "model": "gpt-9"})
    with pytest.raises(openai.NotFoundError):
        client.embeddings.create(model="tiny", input="x", encoding_format="float")


def test_demands_that_leave_no_token_are_the_request_s_own_fault(client: openai.OpenAI, alone: LLM) -> None:
    assert alone.tokenizer is not None
    demands = {"response_format": {"type": "regex", "regex": "a"}, "stop_token_ids": [alone.tokenizer.token_id("a")], "min_tokens": 1}
    with pytest.raises(openai.BadRequestError, match="no token is left to choose") as caught:
        client.chat.completions.create(model="tiny", messages=MESSAGES, max_tokens=4, extra_body=demands)
    assert caught.value.code == "nothing_left"


@pytest.mark.parametrize("stream", [False, True])
def test_a_fault_of_ours_is_told_without_its_words(
    stream: bool, server: Live, client: openai.OpenAI, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fail(*_: object) -> None:
        raise LookupError("a secret of ours")

    monkeypatch.setattr(server.service.talk, "prepare", fail)
    reply = post(server.port, "/v1/chat/completions", {"messages": MESSAGES, "stream": stream})
    assert reply.status == 500
    assert reply.error["type"] == "internal_error"
    request_id = reply.header("X-Request-Id")
    assert request_id
    assert request_id in reply.error["message"]
    assert "secret" not in reply.error["message"]
    until(lambda: "a secret of ours" in caplog.text and request_id in caplog.text)  # it is written down after the answer
    with pytest.raises(openai.InternalServerError):
        client.chat.completions.create(model="tiny", messages=MESSAGES, stream=stream)


def test_a_server_that_takes_no_more_says_when_to_come_back(server: Live, client: openai.OpenAI) -> None:
    server.server.door.draining = True
    try:
        with pytest.raises(openai.InternalServerError) as caught:
            client.chat.completions.create(model="tiny", messages=MESSAGES, stream=True)
    finally:
        server.server.door.draining = False
    assert caught.value.status_code == 503
    assert caught.value.response.headers["retry-after"] == "1"
    assert client.chat.completions.create(model="tiny", messages=MESSAGES, max_tokens=1).choices


def test_a_key_that_does_not_fit_is_an_authentication_error() -> None:
    with live(tiny(), api_keys=(KEY,)) as guarded:
        with client_of(guarded, "another-secret") as stranger:
            for ask in (
                lambda: stranger.models.list(),
                lambda: stranger.chat.completions.create(model="tiny", messages=MESSAGES),
                lambda: stranger.chat.completions.create(model="tiny", messages=MESSAGES, stream=True),
            ):
                with pytest.raises(openai.AuthenticationError) as caught:
                    ask()
                assert caught.value.code == "invalid_api_key"
        with client_of(guarded, KEY) as friend:
            assert friend.chat.completions.create(model="tiny", messages=MESSAGES, max_tokens=2).choices
