"""A hostile template ends within seconds and a few hundred megabytes, and what a friendly one does costs it little."""

from __future__ import annotations

import json
import subprocess
import sys
import time

import pytest
from transformers.utils.chat_template_utils import render_jinja_template

from arctool.errors import RequestError
from arctool.run.chat import ChatTemplate

MESSAGES = [{"role": "user", "content": "Why?"}, {"role": "assistant", "content": "Because."}]

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
    "summing lists": "{{ ([[1]] * 120000) | sum(start=[]) }}",
    "summing constants": "{% if [[1], [2]] | sum(start=[]) %}x{% endif %}",
    "rounding up": "{% set n = 3 %}{{ n | round(6000000, 'ceil') }}",
    "rounding away": "{{ 5 | round(-60000000) }}",
    "percent of many": "{{ ('%999d' * 800000) % (([1] * 800000) | list) }}",
    "even": "{{ '%999999999d' is even }}",
    "divisible": "{{ '%999999999d' is divisibleby(1) }}",
    "bytes": "{{ (1).to_bytes(1000000000, 'big') }}",
    "hexadecimal": "{{ ('f' * 7999999) | int(0, 16) // (('f' * 3999999) | int(0, 16)) }}",
    "stripping": "{{ ('a' * 7000000).strip('b' * 900000 ~ 'a') }}",
    "trimming": "{{ ('a' * 4000000) | trim('b' * 3000000 ~ 'a') }}",
    "searching backwards": "{{ ('a' * 5000000).rfind('a' * 999999 ~ 'b' ~ 'a' * 999999) }}",
    "title": "{{ ('-' * 7999999) | title | length }}",
    "json indent": "{{ ([0] * 100000) | tojson(indent=1000) }}",
    "json separators": "{{ ([0] * 100000) | tojson(separators=('x' * 100000, ':')) }}",
    "recursive range": "{% for x in range(99999) recursive %}{% if loop.depth0 %}"
    + "{% if x.y %}{% endif %}" * 500
    + "{% else %}{{ loop(range(99999)) }}{% endif %}{% endfor %}",
    "joining lazily": "{{ (['x' * 1000000] * 4000) | select | join }}",
}  # fmt: skip

# Two values that share their elements: small in memory, 2^60 elements to walk.
LISTS = "{% set n = namespace(x=1, y=1) %}{% for i in range(60) %}{% set n.x = [n.x, n.x] %}{% set n.y = [n.y, n.y] %}{% endfor %}"
TUPLES = LISTS.replace("[", "(").replace("]", ")")
SPACES = "{% set n = namespace(x=1) %}{% for i in range(60) %}{% set n.x = namespace(a=n.x, b=n.x) %}{% endfor %}"
RUNAWAY |= {
    name: (TUPLES if "hash" in name else SPACES if "namespace" in name else LISTS) + source
    for name, source in {
        "compare": "{% if n.x == n.y %}{% endif %}",
        "order": "{% if n.x < n.y %}{% endif %}",
        "compare in": "{% if n.x in [n.y] %}{% endif %}",
        "compare by test": "{{ n.x is eq(n.y) }}",
        "compare by select": "{{ [n.x] | select('eq', n.y) | list | length }}",
        "compare by index": "{{ [n.x].index(n.y) }}",
        "compare by changed": "{% for i in [1, 2] %}{{ loop.changed(n.x if i == 1 else n.y) }}{% endfor %}",
        "compare by sort": "{{ [n.x, n.y] | sort | length }}",
        "compare by max": "{{ [n.x, n.y] | max | length }}",
        "compare views": "{{ {1: n.x}.items() == {1: n.y}.items() }}",
        "hash a key": "{% set d = {n.x: 1} %}",
        "hash in a lookup": "{{ {}[n.x] }}",
        "hash in get": "{{ {}.get(n.x) }}",
        "hash in a dict": "{{ dict([(n.x, 1)]) | length }}",
        "hash in unique": "{{ [n.x] | unique | list | length }}",
        "hash of views": "{{ {1: n.x}.items() - {1: n.y}.items() }}",
        "text by a filter": "{{ n.x | upper | length }}",
        "text by a test": "{{ n.x is lower }}",
        "text of a refusal": "{{ raise_exception(n.x) }}",
        "text of a view": "{{ {1: n.x}.values() }}",
        "text of namespaces": "{{ n }}",
        "text of a called namespace": "{% set n.unsafe_callable = true %}{{ n() }}",
    }.items()
}


@pytest.mark.parametrize("name", RUNAWAY)
def test_a_template_that_runs_away_is_stopped_soon(name: str) -> None:
    template = ChatTemplate(RUNAWAY[name], {})
    before = time.process_time()
    with pytest.raises(RequestError, match=r"^chat template: ") as caught:
        template.render(MESSAGES)
    assert time.process_time() - before < 3
    assert len(str(caught.value)) < 400


KEEP = "{% set n = namespace(l=[]) %}{% for i in range(9999) %}{% set n.l = [n.l, BODY] %}{% endfor %}"
GREEDY = {
    "fields": "{{ ('{0:>999}' * 800000).format(1) | length }}",
    "texts": KEEP.replace("BODY", "'a' * 7999999"),
    "slices": "{% set a = '€' * 7999999 %}" + KEEP.replace("BODY", "a[1:]"),
    "precision": "{{ '%.*f' % (6 * 10 ** 8, 1.5) }}",
    "keyed width": "{{ '%(a)999999999d' % {'a': 1} }}",
    "indent of other lines": "{{ ('a\\r' * 3000000) | indent(900) }}",
    "ranges": KEEP.replace("BODY", "range(99999) | list"),
    "characters": KEEP.replace("BODY", "('€' * 900000) | list"),
    "words": KEEP.replace("BODY", "('ab ' * 600000).split()"),
    "literals": KEEP.replace("BODY", "[" + "1," * 30000 + "]"),
    "set blocks": KEEP.replace("BODY", "y").replace("{% set n.l", "{% set y %}" + "x" * 90000 + "{{ i }}{% endset %}{% set n.l"),
    "macro output": "{% macro f() %}{% for i in range(99999) %}" + "x" * 90000 + "{% endfor %}{% endmacro %}{{ f() | length }}",
    "arguments": "{% macro f() %}{% set ns.l = ns.l + [varargs] %}{% endmacro %}{% set ns = namespace(l=[]) %}"
    "{% for i in range(9999) %}{{ f(*range(99999)) }}{% endfor %}",
    "attributes of a namespace": "{% set n = namespace(s='a' * 7000000) %}{{ ([n] * 100000) | join(attribute='s') | length }}",
    "fields of a namespace": "{% set n = namespace(s='a' * 7000000) %}{{ ('{0.s}' * 5000).format(n) | length }}",
}
# Each in the same process: the peak is that of the greediest.
SCRIPT = """
import json, resource, sys
from arctool.errors import RequestError
from arctool.run.chat import ChatTemplate
resource.setrlimit(resource.RLIMIT_AS, (4 << 30, 4 << 30))
before, found = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss, {}
for name, source in json.load(sys.stdin).items():
    try:
        ChatTemplate(source, {}).render([{"role": "user", "content": "x"}])
    except RequestError as error:
        found[name] = [str(error), resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before]
print(json.dumps(found))
"""


def test_a_template_that_hoards_is_stopped_before_it_takes_much_memory() -> None:
    done = subprocess.run([sys.executable, "-c", SCRIPT], input=json.dumps(GREEDY), capture_output=True, text=True, check=True, timeout=60)
    found = json.loads(done.stdout)
    assert set(found) == set(GREEDY), "the others rendered without complaint"
    assert not [name for name, (error, _) in found.items() if "MemoryError" in error], "stopped by the limit of this test's own"
    too_much = {name: taken >> 10 for name, (_, taken) in found.items() if taken >> 10 > 400}
    assert not too_much, "megabytes above those of an idle interpreter"


def test_nothing_of_a_template_runs_while_it_compiles() -> None:
    ran: list[object] = []
    template = ChatTemplate("x", {})
    environment = template._environment
    environment.filters["upper"] = lambda value: ran.append(value) or "X"
    environment.tests["lower"] = lambda value: ran.append(value) or True
    source = "{{ 'a' | upper }}{% if 'a' is lower %}{% set x = ('b' | upper)[:1] %}{% endif %}{{ ['c'] | map('upper') }}"
    compiled = environment.from_string(source)
    assert ran == []
    compiled.render()
    assert ran[:3] == ["a", "a", "b"]


THRIFTY = {
    "flags of every message": "{% for m in messages %}{% set last = loop.index0 == messages | length - 1 %}"
    "{{ m.role ~ ': ' ~ (m.content | trim) }}{{ messages[loop.index0 - 1].role }}{% if last %}!{% endif %}{% endfor %}",
    "the last user's turn": "{% set ns = namespace(i=-1) %}{% for m in messages[::-1] %}{% if ns.i < 0 and m.role == 'user' and "
    "m.content is string and not (m.content.startswith('<r>') and m.content.endswith('</r>')) %}{% set ns.i = loop.index0 %}"
    "{% endif %}{% endfor %}{{ ns.i }}{% for m in messages %}{{ m.content.split('</think>')[-1].lstrip('\n') }}{% endfor %}",
    "a list that grows": "{% set ns = namespace(l=[]) %}{% for m in messages %}{% set ns.l = ns.l + [m] %}{% endfor %}{{ ns.l | length }}",
    "tools": "{% for t in tools %}{{ t | tojson(indent=4) }}{{ t.function.parameters.properties | dictsort | length }}{% endfor %}",
    "lookups": "{% for m in messages %}{{ messages | selectattr('role', 'equalto', 'user') | list | length }}{% endfor %}",
    "nothing": "{{ none | selectattr('x') | list }}{{ missing | map('upper') | list }}{% if [] | select %}true{% endif %}",
}


@pytest.mark.parametrize("name", THRIFTY)
def test_a_long_conversation_and_many_tools_stay_within_the_budget(name: str) -> None:
    talk = [{"role": ("user", "assistant")[i % 2], "content": f"<think>{i}</think>\n" + "word " * 400} for i in range(400)]
    properties = {f"p{i}": {"type": "string", "description": "what it is " * 9} for i in range(40)}
    tools = [{"type": "function", "function": {"name": f"f{i}", "parameters": {"properties": properties}}} for i in range(40)]
    [wanted], _ = render_jinja_template([talk], tools=tools, chat_template=THRIFTY[name])
    assert ChatTemplate(THRIFTY[name], {}).render(talk, tools=tools) == wanted
