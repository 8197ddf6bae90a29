"""Which model writes which calls, and what becomes of calls that are written unusually, or wrongly: case by case."""

from __future__ import annotations

import json
from typing import Any

import pytest
from scripted import LLAMA

from arctool.errors import UsageError
from arctool.run.tokenizer import TOKENIZER_FILE, Tokenizer
from arctool.serve.output.families import FAMILIES, HERMES, LLAMA3, MISTRAL, MISTRAL_MARKED, ToolFamily, by_name, detect, shown_token_ids
from arctool.serve.output.parser import OutputParser
from arctool.serve.output.parts import CallArguments, CallStart, Content, Part, joined
from arctool.serve.output.reasoning import THINK

F = CallStart(0, "id", "f")


def read(family: ToolFamily, text: str) -> tuple[list[Part], int]:
    parser = OutputParser(family, ("f", "g"), new_id=lambda: "id")
    return joined([*parser.push(text), *parser.finish()]), parser.calls


def one_call(arguments: str) -> tuple[list[Part], int]:
    return [F, CallArguments(0, arguments)], 1


def no_call(text: str) -> tuple[list[Part], int]:
    return [Content(text)], 0


H = "<tool_call>\n{}\n</tool_call>"
"""Not a format: `.replace("{}", …)` fills it."""


@pytest.mark.parametrize(
    ("family", "text", "arguments"),
    [
        (HERMES, H.replace("{}", '{"arguments": {"a": 1}, "name": "f"}'), '{"a": 1}'),
        (HERMES, H.replace("{}", '{"name": "f"}'), "{}"),
        (HERMES, H.replace("{}", '{"name": "f", "arguments": null}'), "{}"),
        (HERMES, H.replace("{}", '{"name": "f", "arguments": "{\\"a\\": \\"b\\\\n\\"}"}'), '{"a": "b\\n"}'),
        (HERMES, H.replace("{}", '{"id": "x", "type": "function", "name": "f", "parameters": {"a": 1}}'), '{"a": 1}'),
        (HERMES, H.replace("{}", '{"name": "f", "arguments": {"a": 1}, "id": "x"}'), '{"a": 1}'),
        (HERMES, H.replace("{}", '{"n\\u0061me": "\\u0066", "arguments": {"a": "two\nlines\t"}}'), '{"a": "two\\nlines\\t"}'),
        (HERMES, '<tool_call>{"name":"f","arguments":{"a":1}}</tool_call>', '{"a":1}'),
        (HERMES, '<tool_call>\n{"name": "f", "arguments": {"a": 1}}', '{"a": 1}'),
        (HERMES, '<tool_call>\n{"name": "f", "arguments": {"a": 1}}\n</tool_c', '{"a": 1}'),
        (LLAMA3, ' \n{"name": "f", "parameters": {"a": 1}}', '{"a": 1}'),
        (LLAMA3, '{"type": "function", "name": "f", "parameters": {"a": 1}}', '{"a": 1}'),
        (LLAMA3, '{"name": "f", "arguments": {"a": 1}}', '{"a": 1}'),
        (LLAMA3, '<|python_tag|>{"name": "f", "parameters": {"a": 1}}', '{"a": 1}'),
        (LLAMA3, '<|python_tag|> {"name": "f"}', "{}"),
        (LLAMA3, '{"name": "f", "parameters": {"a": 1}}; ', '{"a": 1}'),
        (MISTRAL, '[TOOL_CALLS][{"name": "f", "arguments": {"a": 1}}]', '{"a": 1}'),
        (MISTRAL, '[TOOL_CALLS] [ {"arguments": {"a": 1}, "name": "f", "id": "abc"} ] ', '{"a": 1}'),
        (MISTRAL, '[TOOL_CALLS] [{"name": "f", "arguments": {"a": 1}}, ', '{"a": 1}'),
        (MISTRAL, '[TOOL_CALLS]f[ARGS]{"a": 1}', '{"a": 1}'),
        (MISTRAL_MARKED, '[TOOL_CALLS]f{"a": 1}', '{"a": 1}'),
        (MISTRAL_MARKED, '[TOOL_CALLS] f [ARGS] {"a": 1}'.replace(" [", "["), '{"a": 1}'),
        (MISTRAL_MARKED, '[TOOL_CALLS]f[CALL_ID]a1B2c3D4e[ARGS]{"a": 1}', '{"a": 1}'),
        (MISTRAL_MARKED, '[TOOL_CALLS][{"name": "f", "arguments": {"a": 1}}]', '{"a": 1}'),
    ],
)
def test_an_unusual_way_to_write_a_call_is_read(family: ToolFamily, text: str, arguments: str) -> None:
    assert read(family, text) == one_call(arguments)


@pytest.mark.parametrize(
    ("family", "text"),
    [
        (HERMES, H.replace("{}", '{"name": "other", "arguments": {"a": 1}}')),
        (HERMES, H.replace("{}", '{"name": "F", "arguments": {}}')),
        (HERMES, H.replace("{}", '{"name": "f", "args": {"a": 1}}')),
        (HERMES, H.replace("{}", '{"name": "f", "arguments": [1]}')),
        (HERMES, H.replace("{}", '{"name": "f", "arguments": "a"}')),
        (HERMES, H.replace("{}", '{"name": "f", "arguments": "{} {}"}')),
        (HERMES, H.replace("{}", '{"name": "f", "name": "f", "arguments": {}}')),
        (HERMES, H.replace("{}", '{"name": 3, "arguments": {}}')),
        (HERMES, H.replace("{}", '{"arguments": {"a": 1}}')),
        (HERMES, H.replace("{}", '{"arguments": {"a": 1}, "parameters": {}, "name": "f"}')),
        (HERMES, H.replace("{}", "{}")),
        (HERMES, H.replace("{}", "f(a=1)")),
        (HERMES, '<tool_call>\n{"name": "f"'),
        (HERMES, '<tool_call>\n{"arguments": {"a": 1}, "name": "f"'),
        (HERMES, "<tool_"),
        (HERMES, '{"name": "f", "arguments": {}}'),
        (HERMES, "a </tool_call> < tool_call>"),
        (LLAMA3, '{"name": "Alice", "parameters": {"age": 5}}'),
        (LLAMA3, '{"name": "f", "age": 5}'),
        (LLAMA3, '{"name": "f"}'),
        (LLAMA3, '{"answer": 42}'),
        (LLAMA3, '{{"name": "f", "parameters": {}}}'),
        (LLAMA3, '[{"name": "f", "parameters": {}}]'),
        (LLAMA3, 'It is {"name": "f", "parameters": {}}'),
        (LLAMA3, '<|python_tag|>print("hello")'),
        (LLAMA3, '<|python_tag|>brave_search.call(query="x")'),
        (MISTRAL, "[TOOL_CALLS] []"),
        (MISTRAL, "[TOOL_CALLS]"),
        (MISTRAL, '[TOOL_CALLS] {"name": "f", "arguments": {}}'),
        (MISTRAL, '[TOOL_CALLS] [{"name": "other", "arguments": {}}]'),
        (MISTRAL_MARKED, "[TOOL_CALLS]other[ARGS]{}"),
        (MISTRAL_MARKED, "[TOOL_CALLS]f[ARGS][]"),
        (MISTRAL_MARKED, "[TOOL_CALLS]f[CALL_ID]a b[ARGS]{}"),
        (MISTRAL_MARKED, "[TOOL_CALLS]" + "f" * 65 + "[ARGS]{}"),
        (MISTRAL_MARKED, "[ARGS]f{}"),
    ],
)
def test_what_is_no_call_to_an_offered_tool_is_content_as_it_stands(family: ToolFamily, text: str) -> None:
    assert read(family, text) == no_call(text)


@pytest.mark.parametrize(
    ("family", "text", "arguments", "calls", "content"),
    [
        (HERMES, H.replace("{}", '{"name": "f", "arguments": {"a": tru}}'), '{"a": tru', 0, "}}\n</tool_call>"),
        (HERMES, H.replace("{}", '{"name": "f", "arguments": {"a": 1,}}'), '{"a": 1,', 0, "}}\n</tool_call>"),
        (HERMES, H.replace("{}", '{"name": "f", "arguments": {"a": 1}, "b": 2}'), '{"a": 1}', 1, ', "b": 2}\n</tool_call>'),
        (
            HERMES,
            H.replace("{}", '{"name": "f", "arguments": {"a": 1}, "arguments": {}}'),
            '{"a": 1}',
            1,
            ', "arguments": {}}\n</tool_call>',
        ),
        (HERMES, '<tool_call>{"name": "f", "arguments": {"a": 1}}\n\nDone.', '{"a": 1}', 1, "Done."),
        (HERMES, '<tool_call>{"name": "f", "arguments": {"a": "b', '{"a": "b', 0, None),
        (HERMES, '<tool_call>{"name": "f", "arguments": {"a": 1}}\n<tool_ca', '{"a": 1}', 1, "<tool_ca"),
        (LLAMA3, '{"name": "f", "parameters": {"a": 1}} I called it.', '{"a": 1}', 1, "I called it."),
        (LLAMA3, '{"name": "f", "parameters": {"a": 1}}; {"x": 1}', '{"a": 1}', 1, '; {"x": 1}'),
        (MISTRAL, '[TOOL_CALLS] [{"name": "f", "arguments": {"a": 1}}, {"name": "h"}]', '{"a": 1}', 1, ', {"name": "h"}]'),
        (MISTRAL_MARKED, '[TOOL_CALLS]f[ARGS]{"a": 1}}', '{"a": 1}', 1, "}"),
        (MISTRAL_MARKED, "[TOOL_CALLS]f[ARGS]{'a': 1}", "{", 0, "'a': 1}"),
    ],
)
def test_what_follows_the_break_of_a_call_is_content(
    family: ToolFamily, text: str, arguments: str, calls: int, content: str | None
) -> None:
    said = [] if content is None else [Content(content)]
    assert read(family, text) == ([F, CallArguments(0, arguments), *said], calls)


def test_a_call_after_one_that_broke_off_is_read() -> None:
    broken, good = '<tool_call>{"name": "f", "arguments": {"a": ', '<tool_call>{"name": "g", "arguments": {}}</tool_call>'
    wanted = [F, CallArguments(0, '{"a": '), CallStart(1, "id", "g"), CallArguments(1, "{}")]
    assert read(HERMES, broken + good) == (wanted, 1)
    assert read(HERMES, "<tool_call>\n" + good) == ([Content("<tool_call>\n"), CallStart(0, "id", "g"), CallArguments(0, "{}")], 1)


def test_calls_without_closing_tags_are_read_one_after_the_other() -> None:
    text = '<tool_call>\n{"name": "f", "arguments": {}}\n<tool_call>\n{"name": "g", "arguments": {}}\n'
    assert read(HERMES, text) == ([F, CallArguments(0, "{}"), CallStart(1, "id", "g"), CallArguments(1, "{}")], 2)


@pytest.mark.parametrize("parting", ["; ", ";", "\n", " ;\n", "<|python_tag|>", "; <|python_tag|> "])
def test_calls_of_llama_are_parted_by_semicolons_or_space_or_marks(parting: str) -> None:
    text = parting.join(['{"name": "f", "parameters": {}}', '{"name": "g", "parameters": {}}'])
    assert read(LLAMA3, text) == ([F, CallArguments(0, "{}"), CallStart(1, "id", "g"), CallArguments(1, "{}")], 2)


QWEN = """{%- if tools %}{{- '<|im_start|>system\\n# Tools\\n<tools>' }}{%- for tool in tools %}{{- tool | tojson }}{%- endfor %}
{{- '</tools>\\n<tool_call>\\n{"name": <function-name>, "arguments": <args-json-object>}\\n</tool_call><|im_end|>\\n' }}{%- endif %}"""
LLAMA_3_2 = """{{- "Environment: ipython\\n" }}
{%- if tools is not none %}{{- '{"name": function name, "parameters": dictionary}.' }}{%- endif %}
{%- if message.role == "tool" or message.role == "ipython" %}{%- endif %}"""


@pytest.mark.parametrize(
    ("template", "family"),
    [
        (QWEN, HERMES),
        (LLAMA_3_2, LLAMA3),
        ("{{ '<|python_tag|>' + tool_call.name + '.call(' }}", LLAMA3),
        ("{{ '[AVAILABLE_TOOLS]' }}{{ '[TOOL_CALLS] [' }}", MISTRAL),
        ("{{ '[TOOL_CALLS]' + name + '[ARGS]' + arguments }}", MISTRAL_MARKED),
        ("<tool_call>\n<function=example>\n<parameter=a>\n1\n</parameter>\n</function>\n</tool_call>", None),
        ("<tool_call>{function-name}\n<arg_key>{arg-key-1}</arg_key>", None),
        ("{% for m in messages %}{{ m.content }}{% endfor %}", None),
        ("You speak ipython.", None),
    ],
)
def test_a_model_s_family_is_seen_by_its_template(template: str, family: ToolFamily | None) -> None:
    assert detect(template) is family


def test_a_family_is_known_by_its_name_and_no_other() -> None:
    assert [by_name(name) for name in ("hermes", "llama3", "mistral", "mistral-args")] == list(FAMILIES.values())
    with pytest.raises(
        UsageError, match=r"^--tool-parser: expected auto, none or one of hermes, llama3, mistral, mistral-args, found 'xml'"
    ):
        by_name("xml")


def test_ids_are_new_and_such_as_the_family_s_templates_accept() -> None:
    for family in FAMILIES.values():
        ids = {family.new_id() for _ in range(100)}
        assert len(ids) == 100
        assert all(family.fitting_id(one) == one for one in ids)
        parser = OutputParser(family, ["f"])
        [start, _] = parser.push(family.form.text([("f", "{}")]))[:2]
        assert isinstance(start, CallStart)
        assert family.fitting_id(start.call_id) == start.call_id
    assert HERMES.fitting_id("anything at all") == "anything at all"
    fitted = MISTRAL.fitting_id("call_0123456789")
    assert fitted.isalnum()
    assert len(fitted) == 9
    assert fitted == MISTRAL.fitting_id("call_0123456789") != MISTRAL.fitting_id("call_0123456788")
    assert len({MISTRAL.fitting_id(odd) for odd in ("abcdefghé", "abc-efghi", "\ud800", "abcdefgh")}) == 4


def test_hidden_marks_are_to_be_shown_and_visible_ones_need_not() -> None:
    parsed: dict[str, Any] = json.loads((LLAMA / TOKENIZER_FILE).read_text())
    for i, (mark, special) in enumerate({"<tool_call>": False, "[TOOL_CALLS]": True, "[ARGS]": True, "<think>": True}.items(), 512):
        plain = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False}
        parsed["added_tokens"].append({"id": i, "content": mark, "special": special, **plain})
    tokenizer = Tokenizer({TOKENIZER_FILE: json.dumps(parsed).encode()}, 516)
    assert shown_token_ids(tokenizer, HERMES, None) == ()
    assert shown_token_ids(tokenizer, MISTRAL, None) == (513, 514)
    assert shown_token_ids(tokenizer, None, THINK) == (515,)
    assert shown_token_ids(tokenizer, MISTRAL_MARKED, THINK) == (513, 514, 515)
    text = '[TOOL_CALLS]f[ARGS]{"a": 1}'
    ids = tokenizer.encode(text, add_special_tokens=False)
    assert tokenizer.decode(ids) == 'f{"a": 1}'
    assert tokenizer.decode(ids, frozenset(shown_token_ids(tokenizer, MISTRAL, None))) == text
