"""Templates render as transformers renders them, and a hostile one cannot get out (test_template_sandbox.py: nor run for ever)."""

from __future__ import annotations

import json
from datetime import datetime
from typing import Any

import pytest
from transformers.utils.chat_template_utils import render_jinja_template

from arctool.errors import RequestError, SourceError
from arctool.run.chat import ChatTemplate, check_messages, load_template, template_variables

MESSAGES = [
    {"role": "system", "content": "Be <brief> & kind."},
    {"role": "user", "content": '  What\'s\n"2+2"? é '},
    {"role": "assistant", "content": "4"},
    {"role": "user", "content": "Sure?"},
]
FRIENDLY = {
    "plain loop": "{% for m in messages %}<|{{ m.role }}|>{{ m['content'] }}\n{% endfor %}{% if add_generation_prompt %}A:{% endif %}",
    "blocks trimmed": "{%- for m in messages %}\n    {%- if m.role == 'user' %}\n  U {{ m.content }}\n    {% endif %}\n{%- endfor %}\nend",
    "loop variables": "{% for m in messages %}{{ loop.index0 }}{{ loop.last }}{{ loop.first }}{{ loop.index % 2 }}{% endfor %}",
    "break and continue": "{% for m in messages %}{% if m.role == 'system' %}{% continue %}{% endif %}{{ m.role }}{% break %}{% endfor %}",
    "json": "{{ messages | tojson }}{{ messages[0] | tojson(indent=2) }}",
    "namespace": "{% set ns = namespace(n=0) %}{% for m in messages %}{% set ns.n = ns.n + 1 %}{% endfor %}{{ ns.n }}{{ 'abc' ~ 1 }}",
    "filters": "{{ messages | selectattr('role', 'equalto', 'user') | map(attribute='content') | join('|') | upper }}",
    "methods": "{% for m in messages %}{{ m.content.strip().split(' ')[-1] }}{{ m.content.startswith('Be') }}{% endfor %}",
    "macro": "{% macro turn(m) %}[{{ m.role }}: {{ m.content }}]{% endmacro %}{% for m in messages %}{{ turn(m) }}{% endfor %}",
    "generation": "{% for m in messages %}{% generation %}{{ m.content }}{% endgeneration %}{% endfor %}",
    "special tokens": "{{ bos_token }}{{ messages[-1]['content'] }}{{ eos_token }}",
    "slices": "{% for m in messages[1:] %}{{ m.content[:3] }}{% endfor %}{{ messages[::-1][0].role }}",
    "formats": "{{ '%s-%d' % ('a', 3) }}{{ '{} {x}'.format(1, x=2) }}{{ 'a.b'.replace('.', ', ') }}{{ 'é\nü' | indent(2) }}",
    "undefined": "{% if tools is defined and tools %}T{% else %}none{% endif %}{{ messages[0].name or '' }}",
}


@pytest.mark.parametrize("name", FRIENDLY)
def test_templates_render_as_transformers_renders_them(name: str) -> None:
    special = {"bos_token": "<s>", "eos_token": "</s>"}
    [wanted], _ = render_jinja_template([MESSAGES], chat_template=FRIENDLY[name], add_generation_prompt=True, **special)
    assert len(wanted) > 3
    assert ChatTemplate(FRIENDLY[name], special).render(MESSAGES) == wanted


HOSTILE = [
    "{{ ''.__class__.__mro__ }}",
    "{{ ''.__class__.__base__.__subclasses__() }}",
    "{{ messages.append(1) }}",
    "{{ messages[0].update({'role': 'x'}) }}",
    "{{ raise_exception.__globals__['os'] }}",
    "{{ strftime_now.__globals__.sys }}",
    "{{ namespace.__init__.__globals__ }}",
    "{{ (messages | attr('__class__')).__name__.upper() }}",
    "{{ cycler.__init__.__globals__.os }}",
    "{{ '{0.__class__.__mro__}'.format(1) }}",
    "{{ self.__init__ }}{{ self._TemplateReference__context.parent.__class__() }}",
]


@pytest.mark.parametrize("source", HOSTILE)
def test_a_template_cannot_reach_out_of_the_sandbox(source: str) -> None:
    with pytest.raises(RequestError, match=r"^chat template: ") as caught:
        ChatTemplate(source, {}).render(MESSAGES)
    assert "\n" not in str(caught.value)
    assert MESSAGES[0]["role"] == "system"


def test_a_template_that_is_slow_runs_out_of_time() -> None:
    template = ChatTemplate("{% for i in range(10) %}{{ i }}{% endfor %}", {})
    ticks = iter(range(100))
    template._environment._clock = lambda: float(next(ticks))
    with pytest.raises(RequestError, match="more than 2 seconds"):
        template.render(MESSAGES)


def test_a_failed_rendering_leaves_nothing_behind_for_the_next() -> None:
    template = ChatTemplate("{% for m in messages %}{% for i in range(m.content | int) %}{% endfor %}{% endfor %}ok", {})
    with pytest.raises(RequestError):
        template.render([{"role": "user", "content": "99999"}] * 9)
    for _ in range(3):
        assert template.render([{"role": "user", "content": "99999"}] * 4) == "ok"


def test_a_template_s_own_refusal_reaches_the_user() -> None:
    with pytest.raises(RequestError, match=r"^chat template: no system role, please$"):
        ChatTemplate("{{ raise_exception('no system role, please') }}", {}).render(MESSAGES)


def test_a_template_knows_the_date() -> None:
    template = ChatTemplate("{{ strftime_now('%d %b %Y') }}", {}, now=lambda: datetime(2024, 7, 26))
    assert template.render(MESSAGES) == "26 Jul 2024"
    with pytest.raises(RequestError, match="strftime_now: expected a text of at most 1000 characters"):
        ChatTemplate("{{ strftime_now('%c' * 3999999) }}", {}).render(MESSAGES)


NO_TEMPLATES = [
    "{% for %}",
    "{{ x | no_such_filter }}",
    "{{ x is filter }}",
    "{{ " + "(" * 3000 + ")" * 3000 + " }}",
    "x" * 100_001,
    "{{ " + "9" * 5000 + " }}",
    "{% include '/etc/passwd' %}",
    "{% import 'os' as os %}",
    "{% from 'os' import path %}",
    "{% extends 'base' %}",
    "{% for m in messages %}{% block b scoped %}{% endblock %}{% endfor %}",
    "{% autoescape true %}{% endautoescape %}",
]


@pytest.mark.parametrize("source", NO_TEMPLATES, ids=lambda s: s[:30])
def test_a_template_that_does_not_compile_is_refused_at_load(source: str) -> None:
    with pytest.raises(SourceError, match=r"^chat template: ") as caught:
        ChatTemplate(source, {})
    assert "\n" not in str(caught.value)


def _config(value: Any) -> dict[str, bytes]:
    return {"tokenizer_config.json": json.dumps({"chat_template": value}).encode()}


def test_the_template_comes_from_its_file_or_from_the_tokenizer_config() -> None:
    named = [{"name": "tool_use", "template": "no"}, {"name": "default", "template": "list"}]
    for assets, wanted in [
        ({"chat_template.jinja": b"file", **_config("config")}, "file"),
        (_config("config"), "config"),
        (_config(named), "list"),
    ]:
        template = load_template(assets, {})
        assert template is not None
        assert template.render(MESSAGES) == wanted
    assert load_template({}, {}) is None
    assert load_template(_config(None), {}) is None


@pytest.mark.parametrize(
    "assets", [_config(3), _config([{"name": "rag", "template": "x"}]), _config([3]), {"chat_template.jinja": b"\xff"}]
)
def test_an_unusable_template_is_refused_by_file(assets: dict[str, bytes]) -> None:
    with pytest.raises(SourceError, match=r"^(tokenizer_config\.json: chat_template|chat_template\.jinja)"):
        load_template(assets, {})


@pytest.mark.parametrize(
    ("messages", "field"),
    [
        ([], "messages"),
        ("hello", "messages"),
        (None, "messages"),
        ([3], r"messages\[0\]"),
        ([{"role": "zzz", "content": "x"}], r"messages\[0\]\.role"),
        ([{"content": "x"}], r"messages\[0\]\.role"),
        ([{"role": "user", "content": "x"}, {"role": "user", "content": None}], r"messages\[1\]\.content"),
        ([{"role": "user", "content": [{"type": "image"}]}], r"messages\[0\]\.content"),
    ],
)
def test_malformed_messages_are_refused_by_index_and_field(messages: Any, field: str) -> None:
    with pytest.raises(RequestError, match=f"^{field}: expected"):
        check_messages(messages)


@pytest.mark.parametrize(
    ("source", "reads"),
    [
        ("{% if tools %}T{% endif %}", True),
        ("{% for m in messages %}{% if tools and loop.last %}{{ tools | tojson }}{% break %}{% endif %}{% endfor %}", True),
        ("{% if not tools is defined %}{% set tools = none %}{% endif %}{% if tools is not none %}T{% endif %}", True),
        ("{% macro list() %}{{ tools }}{% endmacro %}{{ list() }}", True),
        ("{% generation %}{{ tools }}{% endgeneration %}", True),
        ("Use your tools {# tools #} {{ 'tools' }}", False),
        ("{{ messages[0].tools }}{{ messages[0]['tools'] }}", False),
        ("{% for tools in messages %}{{ tools.role }}{% endfor %}", False),
        ("{% macro list(tools) %}{{ tools }}{% endmacro %}{{ list(messages) }}", False),
        ("{% set tools = [] %}{{ tools }}", False),
    ],
)
def test_a_template_has_a_place_for_tools_where_it_reads_the_variable(source: str, reads: bool) -> None:
    template = ChatTemplate(source, {})
    assert template.source == source
    assert ("tools" in template_variables(template.source)) == reads
    if reads:
        assert template.render(MESSAGES, tools=[{"name": "f"}]) != template.render(MESSAGES)


def test_variables_of_a_text_that_is_no_template_are_refused() -> None:
    with pytest.raises(SourceError, match=r"^chat template: does not compile: "):
        template_variables("{% if %}")
