"""What an answer's events say, in the shapes of several servers: when the first text came, what counts as a chunk, how it ended."""

from __future__ import annotations

import json
from typing import Any

import pytest

from arctool.bench.serving.answer import Answer, said
from arctool.bench.serving.exchange import Ask, Endpoint, Outcome

COMPLETION = Ask("random", Endpoint.COMPLETIONS, b"", keeps_text=True)
CHAT = Ask("random", Endpoint.CHAT, b"", keeps_text=True)

LLAMA_CPP = [
    b'{"choices":[{"text":"i","index":0,"logprobs":null,"finish_reason":null}],"created":1,"model":"m","object":"text_completion","id":"c"}',
    b'{"choices":[{"text":", \\"text\\": \\"","index":0,"logprobs":null,"finish_reason":null}],"created":1,"model":"m"}',
    b'{"choices":[{"text":"","index":0,"logprobs":null,"finish_reason":"length"}],"created":1,"model":"m","usage":{"completion_tokens":4,'
    b'"prompt_tokens":7,"total_tokens":11,"prompt_tokens_details":{"cached_tokens":2}},"timings":{"prompt_n":4}}',
    b"[DONE]",
]
VLLM_CHAT = [
    b'{"id":"chatcmpl-1","object":"chat.completion.chunk","created":1,"model":"m","choices":[{"index":0,"delta":{"role":"assistant",'
    b'"content":""},"logprobs":null,"finish_reason":null}],"usage":null}',
    b'{"id":"chatcmpl-1","choices":[{"index":0,"delta":{"reasoning_content":"hm"},"logprobs":null,"finish_reason":null}]}',
    b'{"id":"chatcmpl-1","choices":[{"index":0,"delta":{"content":"Hel"},"logprobs":null,"finish_reason":null}]}',
    b'{"id":"chatcmpl-1","choices":[{"index":0,"delta":{"content":"lo"},"logprobs":null,"finish_reason":"stop","stop_reason":null}]}',
    b'{"id":"chatcmpl-1","choices":[],"usage":{"prompt_tokens":31,"total_tokens":34,"completion_tokens":3,"prompt_tokens_details":null}}',
    b"[DONE]",
]


def outcome(ask: Ask, events: list[bytes], ended: float = 9.0, **more: Any) -> Outcome:
    """Each event a second after the one before it, sent at 0."""
    answer = Answer(ask, 0.0)
    for at, event in enumerate(events):
        answer.take([event], 1.0 + at)
    return answer.outcome(ended, **more)


def test_llama_cpp_tells_usage_with_the_end_and_its_end_is_no_chunk() -> None:
    found = outcome(COMPLETION, LLAMA_CPP)
    assert (found.first, found.last, found.ended, found.gaps, found.chunks) == (1.0, 3.0, 9.0, (1.0,), 2)
    assert (found.prompt_tokens, found.completion_tokens, found.cached_tokens) == (7, 4, 2)
    assert (found.finish_reason, found.text, found.failure) == ("length", 'i, "text": "', None)


def test_vllms_chat_begins_with_a_role_that_is_no_token_and_ends_with_text() -> None:
    found = outcome(CHAT, VLLM_CHAT)
    assert (found.first, found.last, found.gaps, found.chunks) == (2.0, 4.0, (1.0, 1.0), 3)
    assert (found.prompt_tokens, found.completion_tokens, found.cached_tokens) == (31, 3, None)
    assert (found.finish_reason, found.text, found.failure) == ("stop", "Hello", None)


def test_spaces_in_the_json_and_several_events_in_one_read_change_nothing() -> None:
    spaced = [event if event == b"[DONE]" else json.dumps(json.loads(event), indent=1).encode() for event in VLLM_CHAT]
    assert outcome(CHAT, spaced) == outcome(CHAT, VLLM_CHAT)
    answer = Answer(CHAT, 0.0)
    answer.take(VLLM_CHAT, 5.0)
    found = answer.outcome(5.0)
    assert (found.first, found.last, found.gaps, found.completion_tokens) == (5.0, 5.0, (0.0, 0.0), 3)


def test_a_token_that_cannot_be_shown_is_a_token() -> None:
    empty = b'{"choices":[{"index":0,"delta":{"content":""},"finish_reason":null}]}'
    assert outcome(CHAT, [VLLM_CHAT[0], empty, *VLLM_CHAT[1:]]).first == 2.0
    nothing = b'{"choices":[{"text":"","finish_reason":null}]}'
    assert outcome(COMPLETION, [nothing, *LLAMA_CPP]).chunks == 3


def test_what_the_model_says_is_never_taken_for_a_key() -> None:
    text = '"finish_reason":"stop","error":{"message":"no"},"usage":{"completion_tokens":99},"choices":[{"text":"x"}],[DONE]'
    event = json.dumps({"choices": [{"text": text, "finish_reason": None}]}).encode()
    found = outcome(COMPLETION, [event, *LLAMA_CPP[1:]])
    assert found.failure is None
    assert found.completion_tokens == 4
    assert found.text.startswith(text)


def test_what_follows_the_end_of_an_answer_is_not_read() -> None:
    assert outcome(COMPLETION, [*LLAMA_CPP, b'{"error":{"message":"too late"}}']) == outcome(COMPLETION, LLAMA_CPP)


@pytest.mark.parametrize(
    ("events", "words"),
    [
        ([*LLAMA_CPP[:2], b'{"error":{"message":"the engine died","code":500}}', b"[DONE]"], "error in the stream: the engine died"),
        (
            [LLAMA_CPP[0], b'{"choices":[{"text":"","finish_reason":"error"}],"error":{"message":"mid-way"}}'],
            "error in the stream: mid-way",
        ),
        ([LLAMA_CPP[0], b"Internal Server Error"], "an event that is no JSON object: Internal Server Error"),
        ([LLAMA_CPP[0], b'{"choi'], 'an event that is no JSON object: {"choi'),
        ([LLAMA_CPP[0], b"[1]"], "an event that is no JSON object: [1]"),
        ([LLAMA_CPP[0], b'{"choices":[{"text":"x","finish_reason":"stop"}'], "an event that is no completion"),
        ([b'{"choices":[{"finish_reason":"stop"}],"usage":{"x"', b"[DONE]"], "an event that is no completion"),
        (LLAMA_CPP[:2], "the stream ended before the answer did"),
        ([], "the stream ended before the answer did"),
    ],
)
def test_a_broken_stream_is_a_failure_that_says_why(events: list[bytes], words: str) -> None:
    assert outcome(COMPLETION, events).failure == words


def test_an_end_without_done_is_an_end() -> None:
    assert outcome(COMPLETION, LLAMA_CPP[:3]).failure is None
    assert outcome(COMPLETION, [*LLAMA_CPP[:2], b"[DONE]"]).failure is None


def test_what_went_wrong_outside_of_the_stream_counts_and_a_cancelled_answer_has_no_end() -> None:
    assert outcome(COMPLETION, LLAMA_CPP, failure="HTTP 500: no").failure == "HTTP 500: no"
    assert outcome(COMPLETION, LLAMA_CPP[:2], cancelled=True).failure is None


@pytest.mark.parametrize("usage", ['{"completion_tokens":true}', '{"completion_tokens":-1}', '{"completion_tokens":"4"}', "{}"])
def test_a_usage_that_is_no_count_is_none(usage: str) -> None:
    end = b'{"choices":[{"text":"","finish_reason":"stop"}],"usage":' + usage.encode() + b"}"
    assert outcome(COMPLETION, [LLAMA_CPP[0], end, b"[DONE]"]).completion_tokens is None


@pytest.mark.parametrize(
    ("body", "words"),
    [
        (b'{"error":{"message":"bad","type":"t"}}', "bad"),
        (b'{"error":"bad"}', "bad"),
        (b'{"object":"error","message":"bad"}', "bad"),
        (b'{"detail":"bad"}', "bad"),
        (b'{"detail":[{"loc":["body"],"msg":"bad"}]}', '{"detail":[{"loc":["body"],"msg":"bad"}]}'),
        (b"<html>bad</html>\n", "<html>bad</html>"),
        (b"\xff", "�"),
        (b"", "nothing"),
        (b"[1]", "[1]"),
        (b"x" * 1000, "x" * 300),
    ],
)
def test_a_servers_error_is_read_in_every_form(body: bytes, words: str) -> None:
    assert said(body) == words
