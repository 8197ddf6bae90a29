"""Every bad request that anybody has thought of, each on every endpoint that it concerns: refused with words that help, in one shape, and
the next client gets the very tokens that it got before. One server for the whole table."""

from __future__ import annotations

import gzip
import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import pytest
from live import Live, live
from scripted import LLAMA
from tiny_models import DirectorySource
from wire import JSON, Reply, get, head, post, send

from arctool.run.llm import LLM, EngineOptions

CHAT, PLAIN = "/v1/chat/completions", "/v1/completions"
GOOD: Mapping[str, Mapping[str, Any]] = {
    CHAT: {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 4, "temperature": 0},
    PLAIN: {"prompt": "Hi", "max_tokens": 4, "temperature": 0},
}
BOTH = (CHAT, PLAIN)
CONTEXT = 256
VOCABULARY = 512


@dataclass(frozen=True)
class Item:
    """`fields` are laid over a good body. `param`: the field that is blamed; `words`: what the message says, a regular expression."""

    name: str
    fields: Mapping[str, Any]
    status: int = 400
    param: str | None = None
    words: str = ""
    paths: tuple[str, ...] = BOTH


@dataclass(frozen=True)
class Raw:
    """JSON that `json.dumps` would not write."""

    text: str


def written(value: Any) -> bytes:
    """As JSON, `Raw` as it stands; a field that is Raw("") is left out."""

    def plain(value: Any) -> Any:
        if isinstance(value, Raw):
            return f"@@{value.text}@@"
        if isinstance(value, dict):
            return {key: plain(inner) for key, inner in value.items() if inner != Raw("")}
        return [plain(inner) for inner in value] if isinstance(value, list) else value

    return re.sub(r'"@@(.*?)@@"', lambda found: json.loads(f'"{found[1]}"'), json.dumps(plain(value))).encode()


def field(name: str, value: Any, words: str = "", *, status: int = 400, param: str | None = None, paths: tuple[str, ...] = BOTH) -> Item:
    """One field with a value that is refused by the field's name."""
    return Item(f"{name} {_shown(value)}", {name: value}, status, name if param is None else param, words, paths)


def fine(name: str, value: Any, paths: tuple[str, ...] = BOTH) -> Item:
    return Item(f"{name} {_shown(value)} is fine", {name: value}, 200, paths=paths)


def _shown(value: Any) -> str:
    text = written(value).decode()
    return text if len(text) <= 24 else f"{text[:20]}... ({len(text)})"


def user(content: Any) -> list[dict[str, Any]]:
    return [{"role": "user", "content": content}]


def schema(value: Any) -> dict[str, Any]:
    return {"type": "json_schema", "json_schema": {"name": "x", "schema": value}}


def deep(levels: int) -> Raw:
    return Raw('{"items":' * levels + '{"type":"string"}' + "}" * levels)


def tool(name: str = "look", **more: Any) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name, "parameters": {"type": "object"}, **more}}


LONG = "S" * 5000
HUGE = Raw("1" + "0" * 400)
HUGER = Raw("1" + "0" * 5000)
IMAGE = [{"type": "text", "text": "what is it?"}, {"type": "image_url", "image_url": {"url": "http://127.0.0.1:1/x.png"}}]
CHOICE = {"type": "function", "function": {"name": "look"}}
CALL = {"id": "call_1", "type": "function", "function": {"name": "look", "arguments": "{}"}}

PROMPTS = (
    field("prompt", "", "at least one token", paths=(PLAIN,)),
    field("prompt", [], "at least one token", paths=(PLAIN,)),
    field("prompt", [[]], "at least one token", paths=(PLAIN,)),
    field("prompt", ["Hi", ""], "at least one token", paths=(PLAIN,)),
    field("prompt", None, "expected a text", paths=(PLAIN,)),
    field("prompt", 5, "expected a text", paths=(PLAIN,)),
    field("prompt", {"text": "Hi"}, "expected a text", paths=(PLAIN,)),
    field("prompt", [1.5], "expected a text", paths=(PLAIN,)),
    field("prompt", [True], "expected a text", paths=(PLAIN,)),
    field("prompt", [5, "Hi"], "expected a text", paths=(PLAIN,)),
    field("prompt", [VOCABULARY], "token ids from 0 to 511, found 512", paths=(PLAIN,)),
    field("prompt", [-1], "token ids from 0 to 511, found -1", paths=(PLAIN,)),
    field("prompt", [HUGE], "token ids from 0 to 511", paths=(PLAIN,)),
    field("prompt", [[5], [9999]], "token ids from 0 to 511, found 9999", paths=(PLAIN,)),
    field("prompt", ["a"] * 257, "at most 256 prompts.*found 257", paths=(PLAIN,)),
    field("prompt", [5] * 300, "300.*256", paths=(PLAIN,)),
    field("prompt", "word " * 300, r"\d+.*256", paths=(PLAIN,)),
    field("messages", user("word " * 300), r"\d+.*256", paths=(CHAT,)),
    field("messages", [], "at least one message", paths=(CHAT,)),
    field("messages", None, paths=(CHAT,)),
    field("messages", "Hi", paths=(CHAT,)),
    field("messages", {"role": "user", "content": "Hi"}, paths=(CHAT,)),
    field("messages", ["Hi"], param="messages[0]", paths=(CHAT,)),
    field("messages", [{}], param="messages[0].role", paths=(CHAT,)),
    field("messages", [{"role": "zzz", "content": "Hi"}], "'system', 'developer', 'user'", param="messages[0].role", paths=(CHAT,)),
    field("messages", [{"role": ["user"], "content": "Hi"}], param="messages[0].role", paths=(CHAT,)),
    field("messages", [{"role": "user"}], param="messages[0].content", paths=(CHAT,)),
    field("messages", user(None), param="messages[0].content", paths=(CHAT,)),
    field("messages", user(5), param="messages[0].content", paths=(CHAT,)),
    field("messages", user([]), param="messages[0].content", paths=(CHAT,)),
    field("messages", user({"type": "text", "text": "Hi"}), param="messages[0].content", paths=(CHAT,)),
    field("messages", user(IMAGE), "image_url.*reads text only", param="messages[0].content", paths=(CHAT,)),
    field("messages", user([{"type": "input_audio"}]), "input_audio", param="messages[0].content", paths=(CHAT,)),
    field("messages", user([{"type": {}, "text": "Hi"}]), param="messages[0].content", paths=(CHAT,)),
    field("messages", user([{"type": "text", "text": 5}]), param="messages[0].content[0].text", paths=(CHAT,)),
    field("messages", [{**user("Hi")[0], "colour": 5}], "no such field", param="messages[0].colour", paths=(CHAT,)),
    field("messages", [{**user("Hi")[0], "tool_calls": [CALL]}], "assistant", param="messages[0].tool_calls", paths=(CHAT,)),
    field("messages", [{**user("Hi")[0], "tool_call_id": "x"}], "tool", param="messages[0].tool_call_id", paths=(CHAT,)),
    field("messages", [{"role": "assistant", "tool_calls": [{"id": "x"}]}], param="messages[0].tool_calls[0].function", paths=(CHAT,)),
    field("messages", [{"role": "assistant", "tool_calls": []}], param="messages[0].content", paths=(CHAT,)),
    field("messages", [{"role": "assistant", "function_call": {"name": "x"}}], param="messages[0].function_call", paths=(CHAT,)),
    Item("messages absent", {"messages": Raw("")}, 400, "messages", "missing", (CHAT,)),
    Item("prompt absent", {"prompt": Raw("")}, 400, "prompt", "missing", (PLAIN,)),
    Item("a prompt for chat", {"prompt": "Hi"}, 400, "prompt", "no such field", (CHAT,)),
    Item("messages for completions", {"messages": user("Hi")}, 400, "messages", "no such field", (PLAIN,)),
    Item("parts of text", {"messages": user([{"type": "text", "text": "H"}, {"type": "text", "text": "i"}])}, 200, paths=(CHAT,)),
    Item("an answer sent back", {"messages": [*user("Hi"), {"role": "assistant", "content": "x", "refusal": None}]}, 200, paths=(CHAT,)),
    fine("prompt", [[5, 6], [7]], (PLAIN,)),
    fine("prompt", "\0", (PLAIN,)),
    fine("messages", user("a\0b"), (CHAT,)),
    fine("messages", user(Raw('"\\ud83d\\ude00"')), (CHAT,)),
    fine("prompt", Raw('"\\ud83d\\ude00"'), (PLAIN,)),
)

LENGTHS = (
    field("max_tokens", 0, "from 1|at least 1"),
    field("max_tokens", -1),
    field("max_tokens", 1.5, "integer"),
    field("max_tokens", "4", "integer"),
    field("max_tokens", True, "integer"),
    field("max_tokens", [4]),
    field("max_tokens", 10**9, "256"),
    field("max_tokens", (1 << 31) - 1, "256"),
    field("max_tokens", 1 << 31),
    field("max_tokens", HUGE),
    field("max_tokens", CONTEXT, r"\d+.*256"),
    field("max_completion_tokens", 5, "max_tokens says otherwise", paths=(CHAT,)),
    Item(
        "max_completion_tokens 0 alone", {"max_completion_tokens": 0, "max_tokens": None}, 400, "max_completion_tokens", "from 1", (CHAT,)
    ),
    Item("max_completion_tokens 2.0", {"max_completion_tokens": Raw("2.0")}, 400, "max_completion_tokens", "integer", (CHAT,)),
    Item(
        "far too many completion tokens", {"max_completion_tokens": 10**9, "max_tokens": None}, 400, "max_completion_tokens", "256", (CHAT,)
    ),
    fine("max_completion_tokens", 4, (CHAT,)),
    field("max_completion_tokens", 4, "no such field", paths=(PLAIN,)),
    field("min_tokens", 5, "from 0 to 4"),
    field("min_tokens", -1),
    field("min_tokens", HUGE),
    field("timeout", 0),
    field("timeout", -5),
    field("timeout", Raw("1e999")),
    field("timeout", HUGE),
    field("timeout", 1e7),
    field("timeout", "5"),
    Item("max_tokens 0 with echo", {"max_tokens": 0, "echo": True}, 200, paths=(PLAIN,)),
    Item("max_tokens 0 with echo of too long a prompt", {"max_tokens": 0, "echo": True, "prompt": [5] * 300}, 400, "prompt", "", (PLAIN,)),
    Item("max_tokens 0 with echo of no token", {"max_tokens": 0, "echo": True, "prompt": [600]}, 400, "prompt", "", (PLAIN,)),
    fine("max_tokens", None),
)

SAMPLING = (
    *(field("temperature", value) for value in (-1, 100, 2.01, "1", True, [1], {}, HUGE, Raw("1e999"), Raw("-1e999"))),
    *(field("top_p", value) for value in (0, 1.1, -0.1, HUGE)),
    *(field("top_k", value) for value in (-2, 1.5, "5", HUGE)),
    *(field("min_p", value) for value in (2, -0.1)),
    *(field("typical_p", value) for value in (0, 1.1)),
    *(field("repetition_penalty", value) for value in (0, -1, 3, HUGE)),
    *(field("presence_penalty", value) for value in (3, -2.1)),
    *(field("frequency_penalty", value) for value in (3, -2.1)),
    *(field("seed", value) for value in (1 << 70, -(1 << 70), 0.5, "1", HUGE)),
    *(field("priority", value) for value in (1 << 31, 0.5, HUGE)),
    *(fine("top_k", value) for value in (10**9, -1, 0)),
    *(fine("seed", value) for value in (-1, 0, (1 << 64) - 1)),
    fine("temperature", 1e-300),
    *(field("n", value) for value in (0, -1, 129, 100_000, 1.5, HUGE)),
    fine("n", 2),
    fine("n", None),
    *(field("best_of", value, paths=(PLAIN,)) for value in (5, 0)),
    field("best_of", 5, "no such field", paths=(CHAT,)),
    fine("best_of", 1, (PLAIN,)),
    Item("more choices than may be", {"prompt": ["a"] * 17, "n": 64}, 400, "n", "at most 1024 choices", (PLAIN,)),
    *(field("logprobs", value, paths=(PLAIN,)) for value in (21, -5, True, 1.5, HUGE)),
    *(field("logprobs", value, paths=(CHAT,)) for value in (5, "true")),
    *(Item(f"top_logprobs {value}", {"logprobs": True, "top_logprobs": value}, 400, "top_logprobs", "", (CHAT,)) for value in (21, -5)),
    field("top_logprobs", 3, "only with logprobs", paths=(CHAT,)),
    Item("top_logprobs with logprobs false", {"logprobs": False, "top_logprobs": 3}, 400, "top_logprobs", "only with", (CHAT,)),
    field("top_logprobs", 3, "no such field", paths=(PLAIN,)),
    Item("logprobs of an echo", {"logprobs": 1, "echo": True}, 400, "echo", "", (PLAIN,)),
    field("echo", "yes", paths=(PLAIN,)),
    *(field("stop", value) for value in ("", [""], ["a"] * 17, [5], {}, 5, [["a"]], ["a", None])),
    *(fine("stop", value) for value in ("qq", ["q\0"] * 16, [], None)),
    *(field("stop_token_ids", value) for value in ([-1], 5, [HUGE], [1 << 31], [5] * 1025)),
    *(field("stop_token_ids", value, "integer", param="stop_token_ids[0]") for value in ([1.5], ["a"])),
    field("logit_bias", {str(VOCABULARY): 1}, "from 0 to 511, found 512"),
    field("logit_bias", {"-1": 1}),
    field("logit_bias", {"abc": 1}),
    field("logit_bias", {"": 1}),
    field("logit_bias", {"5": 1, "05": 1}, "twice"),
    field("logit_bias", {"5": 1000}, "-100 to 100"),
    field("logit_bias", {"5": "1"}),
    field("logit_bias", {"5": None}),
    field("logit_bias", {"5": True}),
    field("logit_bias", {"5": Raw("1e999")}),
    field("logit_bias", {"5": HUGE}),
    field("logit_bias", {"9" * 30: 1}),
    field("logit_bias", [5]),
    field("logit_bias", {str(token): 1 for token in range(2000)}, "from 0 to 511, found 512"),
    fine("logit_bias", {str(token): -1 for token in range(VOCABULARY)}),
    field("ignore_eos", "true"),
    field("include_stop_str_in_output", 1),
    field("cache_salt", "s" * 257),
    field("cache_salt", 5),
)

FORMATS = (
    field("response_format", {"type": "xml"}, "json_schema"),
    field("response_format", "json_object"),
    field("response_format", {}),
    field("response_format", {"type": "json_object", "more": 1}, param="response_format.more"),
    field("response_format", {"type": "json_schema"}, "missing", param="response_format.json_schema"),
    field("response_format", schema(5), param="response_format.json_schema.schema"),
    *(
        field("response_format", schema(value), words, param="response_format.json_schema")
        for value, words in (
            ({"type": "bogus"}, "bogus"),
            (deep(70), "nesting of at most 64"),
            ({"$ref": "#"}, ""),
            ({"$ref": "#/$defs/a", "$defs": {"a": {"$ref": "#/$defs/b"}, "b": {"$ref": "#/$defs/a"}}}, ""),
            ({"$ref": "http://127.0.0.1:1/schema.json"}, ""),
            ({"type": "string", "pattern": "(" * 500}, ""),
            ({"type": "string", "pattern": "[z-a]"}, ""),
            ({"type": "string", "format": "no-such-format"}, ""),
            ({"type": "integer", "maximum": Raw("1e999")}, ""),
            ({"type": "integer", "minimum": 5, "maximum": 4}, ""),
            ({"type": "array", "uniqueItems": True}, "uniqueItems"),
            ({"enum": []}, ""),
            ({"type": "string", "description": "x" * 70_000}, "at most 65536"),
        )
    ),
    field("response_format", schema(deep(200)), "nesting of at most 100", param="body"),
    field("response_format", schema(deep(3000)), "nesting of at most 100", param="body"),
    *(
        field("response_format", {"type": "regex", "regex": value}, param="response_format.regex")
        for value in ("(", "[", "a{1000000}", "\\", "(" * 70 + ")" * 70, "a" * 70_000, "(?=a)b")
    ),
    field("response_format", {"type": "regex", "regex": 5}, param="response_format.regex"),
    *(
        field("response_format", {"type": "grammar", "grammar": value}, param="response_format.grammar")
        for value in ("", "start: nowhere", "start: start", "%%%", "start: /(/")
    ),
    fine("response_format", {"type": "text"}),
    fine("response_format", {"type": "json_object"}),
    fine("response_format", schema({"type": "boolean"})),
    fine("response_format", {"type": "regex", "regex": "a|b"}),
)

EXTRAS = (
    field("model", "another", "another is not served here; this is tiny", status=404),
    field("model", "", status=404),
    field("model", LONG, status=404),
    field("model", 5),
    fine("model", "tiny"),
    fine("model", None),
    field("colour", "blue", "no such field"),
    field("chat_template", "{{ 1 }}", "no such field"),
    field("suffix", "x", "no such field"),
    field("guided_json", {}, "no such field"),
    field("functions", [], "no such field"),
    field("__class__", 5, "no such field"),
    field("", 5, "no such field", param="body"),
    field("a" * 5000, 5, "no such field", param="a" * 200),
    field("a\nb\u202e", 5, "no such field", param="a?b?"),
    field("stream_options", {"include_usage": True}, "only with stream"),
    Item("stream_options of a stream that is none", {"stream": False, "stream_options": {}}, 400, "stream_options", "only with stream"),
    field("stream_options", {"colour": 1}, "no such field", param="stream_options.colour"),
    field("stream", "yes"),
    field("stream", 1),
    field("user", 5),
    field("metadata", {"a": 5}, param="metadata.a"),
    field("metadata", {str(n): "b" for n in range(65)}, "at most 64"),
    Item("a hundred unknown fields", {f"f{n}": n for n in range(100)}, 400, "body", "at most 100 fields"),
    field("messages", user("Hi") * 8193, "at most 8192", paths=(CHAT,)),
    field("messages", user([{"type": "text", "text": "a"}] * 8193), "at most 8192", param="messages[0].content", paths=(CHAT,)),
    field("metadata", Raw("[" + ",".join(["{}"] * 50_001) + "]"), "at most 50000 objects and lists", param="body"),
    field("store", True),
    field("service_tier", "priority"),
    fine("service_tier", "auto"),
    fine("metadata", {"a": "b"}),
    field("chat_template_kwargs", [], paths=(CHAT,)),
    *(
        field("chat_template_kwargs", {name: "x"}, "no such switch", param=f"chat_template_kwargs.{name}", paths=(CHAT,))
        for name in (
            "messages",
            "add_generation_prompt",
            "tools",
            "bos_token",
            "chat_template",
            "tokenize",
            "self",
            "raise_exception",
            "a1",
        )
    ),
    field("chat_template_kwargs", {str(n): 1 for n in range(101)}, "at most 100", paths=(CHAT,)),
    field("reasoning_effort", "high", "no such switch", paths=(CHAT,)),
    field("reasoning_effort", 5, paths=(CHAT,)),
)

TOOLS = (
    field("tools", "look", paths=(CHAT,)),
    field("tools", [{}], param="tools[0].type", paths=(CHAT,)),
    field("tools", [{"type": "web_search"}], param="tools[0].type", paths=(CHAT,)),
    field("tools", [{"type": "function"}], param="tools[0].function", paths=(CHAT,)),
    field("tools", [{"type": "function", "function": {}}], param="tools[0].function.name", paths=(CHAT,)),
    field("tools", [tool(parameters=[])], param="tools[0].function.parameters", paths=(CHAT,)),
    field("tools", [tool(colour=5)], param="tools[0].function.colour", paths=(CHAT,)),
    field("tools", [tool()] * 2, "earlier tool", param="tools[1].function.name", paths=(CHAT,)),
    field("tools", [tool("a b")], param="tools[0].function.name", paths=(CHAT,)),
    field("tools", [tool(f"t{n}") for n in range(129)], "at most 128", paths=(CHAT,)),
    Item("tool_choice maybe", {"tools": [tool()], "tool_choice": "maybe"}, 400, "tool_choice", "'none', 'auto' or 'required'", (CHAT,)),
    Item("tool_choice of no kind", {"tools": [tool()], "tool_choice": {"type": "zzz"}}, 400, "tool_choice.type", "", (CHAT,)),
    Item("tool_choice without a name", {"tools": [tool()], "tool_choice": {"type": "function"}}, 400, "tool_choice.function", "", (CHAT,)),
    field("tool_choice", "required", "no tools", paths=(CHAT,)),
    field("tool_choice", CHOICE, "name of one of the tools", param="tool_choice.function.name", paths=(CHAT,)),
    Item("a tool that is not offered", {"tools": [tool("a")], "tool_choice": CHOICE}, 400, "tool_choice.function.name", "", (CHAT,)),
    Item(
        "a format and tools", {"tools": [tool()], "response_format": {"type": "json_object"}}, 400, "response_format", "combined", (CHAT,)
    ),
    field("tools", [tool()], "no such field", paths=(PLAIN,)),
    Item("parallel_tool_calls maybe", {"tools": [tool()], "parallel_tool_calls": "maybe"}, 400, "parallel_tool_calls", "", (CHAT,)),
)

TABLE = [(item, path) for item in (*PROMPTS, *LENGTHS, *SAMPLING, *FORMATS, *EXTRAS, *TOOLS) for path in item.paths]


@pytest.fixture(scope="module")
def server() -> Iterator[Live]:
    with live(LLM(DirectorySource(LLAMA), EngineOptions(max_seqs=16))) as running:
        yield running


def tokens(server: Live) -> list[Any]:
    """What a good request is answered with, on both endpoints: text, tokens and their probabilities."""
    chat = post(server.port, CHAT, {**GOOD[CHAT], "logprobs": True}).json["choices"][0]
    plain = post(server.port, PLAIN, {**GOOD[PLAIN], "logprobs": 0}).json["choices"][0]
    assert chat["message"]["content"]
    assert plain["text"]
    return [chat, plain]


@pytest.fixture(scope="module")
def before(server: Live) -> list[Any]:
    return tokens(server)


def check_refusal(reply: Reply, status: int, param: str | None, words: str = "") -> None:
    """An error in the one shape, by the field's name, with no more of the request in it than a sample."""
    assert reply.status == status, reply
    error = reply.error
    assert error["param"] == param, error
    assert re.search(words, error["message"], re.DOTALL), error
    for name in set(re.findall(r"S{60,}|x{60,}|[01]{60,}|(?:word ){12,}", error["message"])):
        raise AssertionError(f"an echo of {len(name)} characters")


@pytest.mark.parametrize(("item", "path"), TABLE, ids=lambda value: value.name if isinstance(value, Item) else value.split("/")[2])
def test_what_is_wrong_is_refused_by_its_name_and_the_next_request_gets_its_tokens(
    item: Item, path: str, server: Live, before: list[Any]
) -> None:
    body = written({**GOOD[path], **item.fields})
    reply = post(server.port, path, body)
    if item.status == 200:
        assert reply.status == 200, reply
        assert reply.json["choices"][0]["finish_reason"] in ("stop", "length")
    else:
        check_refusal(reply, item.status, item.param, item.words)
        if item not in FORMATS and not item.name.startswith("stream"):
            streamed = post(server.port, path, written({**GOOD[path], **item.fields, "stream": True}))
            check_refusal(streamed, item.status, item.param, item.words)  # as JSON, before any event
    assert tokens(server) == before


BODIES: list[tuple[str, bytes, str]] = [
    ("empty", b"", "expected JSON"),
    ("white space", b" \n", "expected JSON"),
    ("no JSON", b"hello", "expected JSON"),
    ("cut off", b'{"prompt": "Hi"', "expected JSON"),
    ("more after it", b"{} {}", "expected JSON"),
    ("a comma too many", b'{"prompt": "Hi",}', "expected JSON"),
    ("single quotes", b"{'prompt': 'Hi'}", "expected JSON"),
    ("a list", b"[]", "JSON object, found a list"),
    ("a text", b'"Hi"', "JSON object, found a str"),
    ("null", b"null", "JSON object"),
    ("a number", b"5", "JSON object"),
    ("NaN", b'{"temperature": NaN}', "NaN is no JSON number"),
    ("Infinity", b'{"timeout": Infinity}', "Infinity is no JSON number"),
    ("a name twice", b'{"prompt": "a", "prompt": "b"}', "'prompt' is given twice"),
    ("a name twice, deep", b'{"metadata": {"a\\u0000": "b", "a\\u0000": "c"}}', "is given twice"),
    ("5000 digits", b'{"seed": 1' + b"0" * 5000 + b"}", "fewer digits"),
    ("no UTF-8", b'{"prompt": "\xff"}', "byte 12 is not"),
    ("a cut character", '{"prompt": "é"}'.encode()[:-3], "expected UTF-8"),
    ("UTF-16", '{"prompt": "Hi"}'.encode("utf-16"), "expected UTF-8"),
    ("a byte order mark", b"\xef\xbb\xbf{}", "byte order mark"),
    ("half a surrogate pair", b'{"prompt": "\\ud83d"}', "surrogate"),
    ("the other half", b'{"prompt": "\\uDE00 x"}', "surrogate"),
    ("halves in the wrong order", b'{"prompt": "\\ude00\\ud83d"}', "surrogate"),
    ("a surrogate in UTF-8", b'{"prompt": "\xed\xa0\xbd"}', "expected UTF-8"),
    ("half a pair in a name", b'{"\\ud83d": 5}', "surrogate"),
    ("a raw control character", b'{"prompt": "a\x00b"}', "control character"),
    ("gzip", gzip.compress(b'{"prompt": "Hi"}'), "expected UTF-8"),
    ("101 deep", b'{"metadata": ' + b"[" * 100 + b"]" * 100 + b"}", "nesting of at most 100"),
    ("a million deep", b"[" * 1_000_000, "at most 50000 objects and lists"),
    ("40000 deep", b'{"a":' * 40_000, "nesting of at most 100"),
    ("brackets in texts", json.dumps({"prompt": "Hi", "user": '[{"' * 60_000, "seed": "x"}).encode(), ""),
]


@pytest.mark.parametrize("path", [*BOTH, "/tokenize", "/detokenize"])
@pytest.mark.parametrize(("body", "words"), [pytest.param(body, words, id=name) for name, body, words in BODIES])
def test_a_body_that_is_no_json_object_is_refused(body: bytes, words: str, path: str, server: Live, before: list[Any]) -> None:
    reply = post(server.port, path, body)
    assert reply.status == 400
    check_refusal(reply, 400, reply.error["param"] if not words else "body", words)
    assert tokens(server) == before


KINDS = [
    ("text/plain", 415),
    ("application/x-www-form-urlencoded", 415),
    ("multipart/form-data; boundary=x", 415),
    ("", 415),
    ("application/jsonp", 415),
    ("application/json, text/plain", 415),
    ("application/json; charset=latin-1", 415),
    ("application/json; charset=utf-16", 415),
    ("application/json", 200),
    ("Application/JSON ; Charset=UTF-8", 200),
    ('application/json;charset="utf-8"', 200),
]


@pytest.mark.parametrize("path", BOTH)
@pytest.mark.parametrize(("kind", "status"), KINDS)
def test_only_json_in_utf_8_is_read(kind: str, status: int, path: str, server: Live) -> None:
    reply = post(server.port, path, GOOD[path], {"Content-Type": kind} if kind else {})
    assert reply.status == status
    if status != 200:
        check_refusal(reply, 415, "Content-Type", "expected application/json")


@pytest.mark.parametrize("encoding", ["gzip", "br", "deflate", "identity, gzip", "GZIP"])
def test_a_compressed_body_is_refused_by_its_header(encoding: str, server: Live) -> None:
    body = gzip.compress(json.dumps(GOOD[PLAIN]).encode())
    reply = post(server.port, PLAIN, body, {"Content-Type": "application/json", "Content-Encoding": encoding})
    check_refusal(reply, 415, "Content-Encoding")


ROUTES = [
    ("GET", "/v1/nothing", 404, "unknown_url"),
    ("GET", "/v1/models/other", 404, "model_not_found"),
    ("GET", "/v1/models/", 404, None),
    ("GET", "//v1/models", 404, "unknown_url"),
    ("GET", "/v1/../v1/models", 404, "unknown_url"),
    ("GET", "/%00", 404, "unknown_url"),
    ("GET", "/%ff%fe", 404, "unknown_url"),
    ("GET", "/v1/models/%F0%9F%98%80", 404, "model_not_found"),
    ("GET", "/docs", 404, "unknown_url"),
    ("GET", "/redoc", 404, "unknown_url"),
    ("GET", "/" + "x" * 5000, 404, "unknown_url"),
    ("GET", "http://elsewhere.example/v1/models", 404, "unknown_url"),
    ("GET", CHAT, 405, "method_not_allowed"),
    ("GET", PLAIN, 405, "method_not_allowed"),
    ("HEAD", CHAT, 405, "method_not_allowed"),
    ("PUT", CHAT, 405, "method_not_allowed"),
    ("PATCH", CHAT, 405, "method_not_allowed"),
    ("DELETE", "/v1/models/tiny", 405, "method_not_allowed"),
    ("OPTIONS", CHAT, 405, "method_not_allowed"),
    ("TRACE", CHAT, 405, "method_not_allowed"),
    ("BREW", CHAT, 405, "method_not_allowed"),
]


@pytest.mark.parametrize(("method", "path", "status", "code"), ROUTES)
def test_a_wrong_door_is_refused_in_the_same_shape(method: str, path: str, status: int, code: str | None, server: Live) -> None:
    reply = get(server.port, path, method=method)
    assert reply.status == status, reply
    if method != "HEAD":
        error = reply.error
        assert code is None or error["code"] == code
        assert len(error["message"]) < 250
    if status == 405:
        assert set(str(reply.header("Allow")).split(", ")) >= {"POST"} if path in BOTH else {"GET"}


def test_a_post_to_an_unknown_place_is_told_so_whatever_its_body(server: Live) -> None:
    assert post(server.port, "/v1/nothing", {}).error["code"] == "unknown_url"
    assert post(server.port, "/v1/models", {}).status == 405


HTTP: list[tuple[str, bytes, int]] = [
    ("no HTTP", b"hello\r\n\r\n", 400),
    ("TLS", b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + b"\r\n\r\n", 400),
    ("no Host", head("GET", "/health", host=None), 400),
    ("two Hosts", head("GET", "/health", [("Host", "localhost")]), 400),
    ("two lengths", head("POST", PLAIN, [("Content-Length", "5"), ("Content-Length", "6")]), 400),
    ("a length that is no number", head("POST", PLAIN, [("Content-Length", "five")]), 400),
    ("a negative length", head("POST", PLAIN, [("Content-Length", "-5")]), 400),
    ("a length beyond measure", head("POST", PLAIN, {**JSON, "Expect": "100-continue", "Content-Length": "9" * 20}), 413),
    ("a length of 30 digits", head("POST", PLAIN, [("Content-Type", "application/json"), ("Content-Length", "9" * 30)]), 400),
    ("another transfer coding", head("POST", PLAIN, [("Transfer-Encoding", "gzip, chunked")]), 400),
    ("a header without a name", b"GET /health HTTP/1.1\r\nHost: localhost\r\n: x\r\n\r\n", 400),
    ("a header with a space in its name", b"GET /health HTTP/1.1\r\nHost: localhost\r\nA b: x\r\n\r\n", 400),
    ("a folded header", b"GET /health HTTP/1.1\r\nHost: localhost\r\n x\r\nA\r\n\r\n", 400),
    ("NUL in a header", b"GET /health HTTP/1.1\r\nHost: localhost\r\nA: \x00\r\n\r\n", 400),
    ("a header of 100 KB", head("GET", "/health", {"A": "x" * 100_000}), 431),
    ("2000 headers", head("GET", "/health", [(f"A{n}", "x" * 40) for n in range(2000)]), 431),
    ("a path of 100 KB", head("GET", "/" + "x" * 100_000), 431),
    ("a head without an end", b"GET /health HTTP/1.1\r\nA: " + b"x" * 20_000, 431),
]


@pytest.mark.parametrize(("data", "status"), [pytest.param(data, status, id=name) for name, data, status in HTTP])
def test_what_is_hardly_http_gets_an_answer_and_a_closed_connection(data: bytes, status: int, server: Live, before: list[Any]) -> None:
    reply = send(server.port, data)
    assert reply.status == status
    assert reply.error["param"] is None
    assert reply.header("Connection") == "close"
    assert tokens(server) == before
