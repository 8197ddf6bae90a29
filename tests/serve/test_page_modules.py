"""The page's own modules in a browser: event streams cut anywhere, Markdown piece by piece, what the sanitizer lets through."""

from __future__ import annotations

import json

import pytest
from page_driver import Page

pytest_plugins = ["page_fixtures"]

STREAM = 'data: {"a": "é漢😀"}\r\n\r\n: comment\n\nevent: x\ndata:two\r\ndata: lines\n\nid: 1\rdata: three\r\rdata: cut off'


def test_events_are_the_same_however_the_bytes_are_cut(modules: Page) -> None:
    script = """
    const { events } = await import("/page/sse.js");
    const bytes = new TextEncoder().encode(given[0]);
    const outcomes = new Set();
    for (let size = 1; size <= bytes.length; size += 1) {
      const stream = new ReadableStream({ start(controller) {
        for (let at = 0; at < bytes.length; at += size) controller.enqueue(bytes.slice(at, at + size));
        controller.close();
      }});
      const all = [];
      for await (const data of events(stream)) all.push(data);
      outcomes.add(JSON.stringify(all));
    }
    return [...outcomes];
    """
    (outcome,) = modules.module(script, STREAM)
    assert json.loads(outcome) == ['{"a": "é漢😀"}', "two\nlines", "three"]


DOCUMENTS = {
    "blocks": "# One\n\npara *em*\nmore\n\n## Two\n***\n**bold** end\n\n> quote\n> more\n\n---\nlast",
    "setext": "Title\n=====\n\nSub\n---\n\ntext",
    "lists": "1. one\n2. two\n   - inner\n   - inner\n\n   para in two\n3. three\n\nafter\n\n- [x] done\n- [ ] open\n\n+ other",
    "code": "before\n```py\na = 1\n\n`x`\n~~~\n``\n```\nafter\n~~~\n```\n~~~~\nend `inline`\n\n    indented\n\nlast",
    "open code": "text\n\n```js\nlet x = `1`;\n``",
    "longer fence": "````md\n```\nx\n```\n````\nafter",
    "fence in a list": "- a\n  ```\n  x\n  ```\n- b\n",
    "not a fence": "```a`b```\nc\n\nd",
    "empty fence": "```\n```\nafter",
    "table": "a\n\n| x | y |\n|:-:|--:|\n| 1 | `2` |\n| 3 | 4 |\n\nafter",
    "html": "<div>\nfoo\n</div>\n\n<b>x</b> a<br>b\n\n<!-- c -->\n\nend",
    "lines": "one\r\ntwo\r\n\r\nthree\n\n\n\nfour",
    "hash that is none": "para\n#no heading\n\n#also none",
}


@pytest.mark.parametrize("name", list(DOCUMENTS))
def test_markdown_that_streams_in_ends_as_the_whole_text_would(modules: Page, name: str) -> None:
    script = """
    const { StreamingMarkdown, rendered } = await import("/page/markdown.js");
    const [text] = given;
    const html = (nodes) => { const e = document.createElement("div"); e.append(nodes); return e.innerHTML; };
    const blocks = (html) => html.replace(/>\\s+</g, "><").trim();
    const whole = html(rendered(text));
    const ends = [];
    for (const size of [1, 2, 3, 7, 1000]) {
      const root = document.createElement("div");
      const stream = new StreamingMarkdown(root);
      for (let at = 0; at < text.length; at += size) { stream.push(text.slice(at, at + size)); stream.draw(); }
      const before = blocks(root.innerHTML);
      stream.finish(text);
      ends.push([root.innerHTML === whole, before === blocks(whole)]);
    }
    return ends;
    """
    ends = modules.module(script, DOCUMENTS[name])
    # A fence that has not ended shows no line that may still end it; all else is there before the end.
    assert ends == [[True, name != "open code"]] * 5


def test_what_has_been_written_is_not_drawn_again(modules: Page) -> None:
    script = """
    const { StreamingMarkdown } = await import("/page/markdown.js");
    const root = document.createElement("div");
    const stream = new StreamingMarkdown(root);
    const write = (text) => { stream.push(text); stream.draw(); };
    write("first *paragraph*\\n\\nsecond"); write(" goes on\\n\\n"); write("```py\\nx");
    const [first, second, code] = [...root.querySelectorAll("p, pre code")];
    let redrawn = 0;
    const observer = new MutationObserver(() => {});
    observer.observe(root, { childList: true, subtree: true });
    for (let line = 0; line < 2000; line += 1) write(` = ${line}\\ny`);
    redrawn = observer.takeRecords().length;
    write("\\n```\\nlast");
    const now = [...root.querySelectorAll("p, pre code")];
    return [redrawn, now[0] === first, now[1] === second, now[2] === code, now.length, code.textContent.split("\\n").length];
    """
    assert modules.module(script) == [0, True, True, True, 4, 2002]


def test_a_text_is_drawn_once_a_frame_at_most(modules: Page) -> None:
    script = """
    const { StreamingMarkdown } = await import("/page/markdown.js");
    const root = document.createElement("div");
    let drawn = 0;
    const stream = new StreamingMarkdown(root, () => { drawn += 1; });
    const frame = () => new Promise((resolve) => requestAnimationFrame(resolve));
    for (let at = 0; at < 100; at += 1) stream.push(`${at} `);
    const before = drawn;
    await frame(); await frame();
    return [before, drawn, root.textContent.trim().split(" ").length];
    """
    assert modules.module(script) == [0, 1, 100]


@pytest.mark.parametrize(
    ("html", "left"),
    [
        ("<script>alert(1)</script><p>x</p>", "<p>x</p>"),
        ("<img src=x onerror=alert(1)><svg><script>1</script></svg>x", "x"),
        ('<a href="javascript:alert(1)">x</a>', "<a>x</a>"),
        ('<a href=" java\nscript:alert(1)">x</a>', "<a>x</a>"),
        ('<a href="data:text/html,x">x</a><a href="/v1/models">y</a><a href="#z">z</a>', "<a>x</a><a>y</a><a>z</a>"),
        (
            '<a href="https://x.org/" target="_self" onclick="x()" style="position:fixed" class="primary" id="send">x</a>',
            '<a href="https://x.org/" target="_blank" rel="noopener noreferrer nofollow">x</a>',
        ),
        ('<code class="language-c++">x</code><code class="quiet language-x">y</code>', '<code class="language-c++">x</code><code>y</code>'),
        ('<form action="/x"><input name="y"><button>z</button></form><iframe src="/"></iframe><style>*{}</style>', "z"),
        ('<td align="right" background="https://x.org/">x</td>', "x"),
        ('<ol start="3" data-icon="x" aria-label="y" name="z"><li>x</li></ol>', '<ol start="3"><li>x</li></ol>'),
    ],
)
def test_only_harmless_html_passes_the_sanitizer(modules: Page, html: str, left: str) -> None:
    script = """
    const { sanitized } = await import("/page/markdown.js");
    const e = document.createElement("div");
    e.append(sanitized(given[0]));
    return e.innerHTML;
    """
    assert modules.module(script, html) == left
    # The policy's refusals of what was only looked at stand in the console.
    modules.log()
