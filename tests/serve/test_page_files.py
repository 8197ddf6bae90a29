"""The files of the chat page: where they lie, how they are sent, and that they ask for nothing from elsewhere."""

from __future__ import annotations

import hashlib
import re
from html.parser import HTMLParser
from importlib.resources import files
from pathlib import Path

import pytest
from fastapi import FastAPI
from starlette.testclient import TestClient

import arctool.serve
from arctool.serve import page
from arctool.serve.page import CONTENT_SECURITY_POLICY, mount_page, page_files

OURS = [name for name in page_files() if not name.startswith("vendor/")]


@pytest.fixture(scope="module")
def client() -> TestClient:
    app = FastAPI()
    mount_page(app)
    return TestClient(app)


def test_the_files_lie_beside_the_package() -> None:
    beside = files(arctool.serve) / "page"
    assert (beside / "index.html").is_file()
    assert Path(str(beside)) == page.DIRECTORY
    assert {"index.html", "main.js", "style.css", "icon.svg", "vendor/marked.esm.js", "vendor/purify.es.mjs"} <= set(page_files())
    assert not [name for name in page_files() if name.endswith((".md", ".py")) or "LICENSE" in name]


def test_every_file_is_sent_with_its_type_and_the_headers_that_keep_readers_safe(client: TestClient) -> None:
    types = {"html": "text/html; charset=utf-8", "css": "text/css; charset=utf-8", "svg": "image/svg+xml"}
    script = "text/javascript; charset=utf-8"
    for name, file in page_files().items():
        answer = client.get("/" if name == "index.html" else f"/page/{name}")
        assert answer.status_code == 200
        assert answer.content == file.body == (page.DIRECTORY / name).read_bytes()
        assert answer.headers["Content-Type"] == types.get(name.rpartition(".")[2], script)
        assert answer.headers["Content-Security-Policy"] == CONTENT_SECURITY_POLICY
        assert answer.headers["X-Content-Type-Options"] == "nosniff"
        assert answer.headers["Referrer-Policy"] == "no-referrer"
        assert answer.headers["X-DNS-Prefetch-Control"] == "off"
        assert answer.headers["Cache-Control"] == "no-cache"


def test_the_policy_is_strict() -> None:
    policy = {words[0]: words[1:] for words in (part.split() for part in CONTENT_SECURITY_POLICY.split(";"))}
    nothing = {name: ["'none'"] for name in ("default-src", "base-uri", "form-action", "frame-ancestors")}
    ours = {name: ["'self'"] for name in ("script-src", "style-src", "connect-src")}
    assert policy == nothing | ours | {"img-src": ["'self'", "data:"]}


def test_a_browser_that_has_a_file_is_sent_no_body(client: TestClient) -> None:
    tag = client.get("/").headers["ETag"]
    for known in (tag, f'"other", W/{tag}'):
        answer = client.get("/", headers={"If-None-Match": known})
        assert (answer.status_code, answer.content, answer.headers["ETag"]) == (304, b"", tag)
        assert answer.headers["Content-Security-Policy"] == CONTENT_SECURITY_POLICY
    assert client.get("/", headers={"If-None-Match": '"other"'}).status_code == 200
    assert client.get("/page/main.js").headers["ETag"] != tag
    assert client.head("/").status_code == 200


@pytest.mark.parametrize(
    "name",
    [
        "",
        "nothing.js",
        "../page.py",
        "..%2fpage.py",
        "%2e%2e/page.py",
        "vendor",
        "vendor/README.md",
        "vendor/LICENSE-marked",
        "Main.js",
        "/main.js",
    ],
)
def test_no_other_name_is_served(client: TestClient, name: str) -> None:
    assert client.get(f"/page/{name}").status_code == 404


def test_the_page_is_no_part_of_the_api_document() -> None:
    app = FastAPI()
    mount_page(app)
    assert app.openapi()["paths"] == {}


def test_the_vendored_libraries_are_what_their_readme_says() -> None:
    lines = re.findall(
        r"\| `(\S+)` \| `(\S+)`.*\| ([\d.]+) \| .*\[(LICENSE-\S+)\].* \| `([0-9a-f]{64})` \|",
        (page.DIRECTORY / "vendor/README.md").read_text(),
    )
    assert {line[0]: line[1] for line in lines} == {"marked.esm.js": "marked", "purify.es.mjs": "dompurify"}
    for name, _, version, licence, sha256 in lines:
        body = (page.DIRECTORY / "vendor" / name).read_bytes()
        assert hashlib.sha256(body).hexdigest() == sha256
        assert version in body[:300].decode()
        assert (page.DIRECTORY / "vendor" / licence).stat().st_size > 1000
    beside = {path.name for path in (page.DIRECTORY / "vendor").iterdir()}
    assert beside == {"README.md", *(line[0] for line in lines), *(line[3] for line in lines)}


@pytest.mark.parametrize("name", OURS)
def test_nothing_of_ours_names_another_host(name: str) -> None:
    addresses = set(re.findall(r"(?:https?:)?//[\w.-]+\.\w+", (page.DIRECTORY / name).read_text()))
    assert addresses <= {"http://www.w3.org"}, "only the name of SVG's namespace, which nobody loads"


class _Inline(HTMLParser):
    """Collects what a policy without 'unsafe-inline' would refuse."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[str] = []
        self.named: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        given = dict(attrs)
        self.found += [f"{tag} {name}" for name in given if name == "style" or name.startswith("on")]
        if tag == "style" or (tag == "script" and "src" not in given):
            self.found.append(tag)
        self.named += [value for name in ("src", "href") if (value := given.get(name)) and not value.startswith("#")]


def test_the_html_holds_no_script_and_no_style_and_names_only_files_that_are_served() -> None:
    parser = _Inline()
    parser.feed((page.DIRECTORY / "index.html").read_text())
    assert parser.found == []
    assert {name.removeprefix("page/") for name in parser.named} <= set(page_files())


@pytest.mark.parametrize("name", [name for name in OURS if name.endswith(".js")])
def test_a_module_imports_only_files_that_are_served_and_says_what_it_is_for(name: str) -> None:
    source = (page.DIRECTORY / name).read_text()
    assert source.startswith("// ")
    assert len(source.splitlines()) <= 450
    assert set(re.findall(r'from "\./(.+?)"', source)) <= set(page_files())
    assert not re.search(r"innerHTML\s*=|outerHTML|insertAdjacentHTML|document\.write|\beval\b|new Function", source)
