"""Templates render as transformers renders them, and a hostile one can neither get out nor run for ever."""

from __future__ import annotations

import json
import time
from datetime import datetime
from typing import Any

import pytest
from transformers.utils.chat_template_utils import render_jinja_template

from arctool.errors import RequestError, SourceError
from arctool.run.chat import ChatTemplate, check_messages, load_template

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
    "{% include '/etc/passwd' %}",
    "{% import 'os' as os %}",
]


@pytest.mark.parametrize("source", HOSTILE)
def test_a_template_cannot_reach_out_of_the_sandbox(source: str) -> None:
    with pytest.raises(RequestError, match=r"^chat template: ") as caught:
        ChatTemplate(source, {}).render(MESSAGES)
    assert "\n" not in str(caught.value)
    assert MESSAGES[0]["role"] == "system"


GROW = "{% set ns = namespace(x='ab') %}{% for i in range(100) %}{% set ns.x = BODY %}{% endfor %}{{ ns.x }}"
RUNAWAY = {
    "nested loops": "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}",
    "endless output": "{% for i in range(99999) %}{% for m in messages %}{{ m.content * 99 }}{% endfor %}{% endfor %}",
    "endless recursion": "{% macro f(n) %}{{ f(n + 1) }}{% endmacro %}{{ f(0) }}",
    "branching recursion": "{% macro f(n) %}{% if n %}{{ f(n - 1) }}{{ f(n - 1) }}{% endif %}{% endmacro %}{{ f(60) }}",
    "recursive loop": "{% for m in messages recursive %}{{ loop(messages) }}{% endfor %}",
    "large range": "{{ range(10 ** 12) | list }}",
    "doubling by tilde": GROW.replace("BODY", "ns.x ~ ns.x"),
    "doubling by plus": GROW.replace("BODY", "ns.x + ns.x"),
    "doubling by set block": GROW.replace("{% set ns.x = BODY %}", "{% set y %}{{ ns.x }}{{ ns.x }}{% endset %}{% set ns.x = y %}"),
    "doubling lists to print": GROW.replace("BODY", "[ns.x, ns.x]"),
    "doubling lists to json": GROW.replace("BODY", "[ns.x, ns.x]").replace("{{ ns.x }}", "{{ ns.x | tojson }}"),
    "doubling lists to text": GROW.replace("BODY", "[ns.x, ns.x]").replace("{{ ns.x }}", "{{ ns.x | string | length }}"),
    "squaring": "{% set ns = namespace(x=3) %}{% for i in range(99) %}{% set ns.x = ns.x * ns.x %}{% endfor %}{{ ns.x }}",
    "repetition": "{{ 'a' * 10 ** 10 }}",
    "list repetition": "{{ [1] * 9999 * 9999 }}",
    "powers": "{{ 9 ** 9 ** 9 }}",
    "percent width": "{{ '%999999999d' % 1 }}",
    "percent star": "{{ '%*d' % (999999999, 1) }}",
    "format width": "{{ '{:999999999}'.format(1) }}",
    "format nested width": "{{ '{:{w}}'.format(1, w=999999999) }}",
    "format repeated": "{{ ('{0}' * 99999).format('a' * 99999) }}",
    "format filter": "{{ '%999999999d' | format(1) }}",
    "replace": "{{ ('a' * 99999).replace('a', 'b' * 99999) }}",
    "replace filter": "{{ ('a' * 99999) | replace('a', 'b' * 99999) }}",
    "join": "{{ ('x' * 99999).join(['a'] * 99999) }}",
    "join filter": "{{ (['a'] * 99999) | join('x' * 99999) }}",
    "indent": "{{ ('\n' * 99999) | indent(999) }}",
    "padding": "{{ 'a'.ljust(10 ** 10) }}",
}  # fmt: skip


@pytest.mark.parametrize("name", RUNAWAY)
def test_a_template_that_runs_away_is_stopped_soon(name: str) -> None:
    template = ChatTemplate(RUNAWAY[name], {})
    before = time.process_time()
    with pytest.raises(RequestError, match=r"^chat template: "):
        template.render(MESSAGES)
    assert time.process_time() - before < 10


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


@pytest.mark.parametrize("source", ["{% for %}", "{{ x | no_such_filter }}", "{{ " + "(" * 3000 + ")" * 3000 + " }}", "x" * 2_000_000])
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
