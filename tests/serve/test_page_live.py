"""The chat page over the server itself: what the stand-in of the other tests pretends, the engine does."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest
from live import NAME, Live, live, until
from page_driver import Page
from page_stand_in import HOSTILE, MARKDOWN
from scripted import scripted
from selenium import webdriver
from selenium.webdriver.common.keys import Keys

pytest_plugins = ["page_fixtures"]

SLOW = "word " * 500
KEY = "a-key-of-some-length"


class Gate:
    """Holds the engine before its steps while it is shut."""

    def __init__(self) -> None:
        self.open = threading.Event()
        self.open.set()
        self.steps = 0

    def __call__(self) -> None:
        self.open.wait(30)
        self.steps += 1


@pytest.fixture
def gate() -> Gate:
    return Gate()


def reply(prompt: str) -> str:
    """By the last message that the prompt has; a prompt as the tiny model's template writes it, special tokens left out."""
    last = prompt.rsplit("user\n", 1)[-1]
    return {"two plus two?": MARKDOWN, "hostile": HOSTILE, "slowly": SLOW}.get(last.split("\n")[0], "You said: " + last.split("\n")[0])


Open = Callable[..., tuple[Page, Live]]


@pytest.fixture
def open_page(_driver: webdriver.Chrome, gate: Gate) -> Iterator[Open]:
    running: list[Any] = []

    def start(**options: Any) -> tuple[Page, Live]:
        entered = live(scripted(reply, before_step=gate), **options)
        server = entered.__enter__()
        running.append(entered)
        _driver.get(f"{server.url}/page/icon.svg")
        _driver.execute_script("localStorage.clear(); sessionStorage.clear();")
        page = Page(_driver, SimpleNamespace(url=f"{server.url}/", models=[NAME]))  # type: ignore[arg-type]
        page.log()
        page.requests()
        page.open()
        return page, server

    yield start
    gate.open.set()
    _driver.get("about:blank")
    for entered in running:
        entered.__exit__(None, None, None)


def test_a_question_is_answered_counted_and_kept(open_page: Open) -> None:
    page, server = open_page()
    page.ask("two plus two?")
    assert page.text(".answer h3") == "Two plus two"
    assert page.text(".answer pre code") == "def add(a, b):\n    return a + b"
    [completion] = [line for line in server.logged if '"stream": true' in line]
    assert page.text(".numbers-told").split(" ")[0] in completion
    page.driver.refresh()
    page.until(lambda: page.text(".answer h3") == "Two plus two")
    assert page.log() == []


def test_stop_frees_the_sequence_in_the_engine(open_page: Open, gate: Gate) -> None:
    page, server = open_page()
    page.send("slowly")
    page.until(lambda: "word word" in page.text(".answer"))
    gate.open.clear()
    before = gate.steps
    page.click("#stop")
    page.finished()
    until(lambda: server.service.engine._commands)  # the abort has arrived; the engine stands before a step
    gate.open.set()
    until(lambda: server.service.engine.telemetry().running == 0)
    assert gate.steps <= before + 2
    assert page.ask("Hello").text == "You said: Hello"


def test_what_the_server_refuses_is_said_in_its_words(open_page: Open) -> None:
    page, _ = open_page()
    page.click("#open-settings")
    page.one("#setting-max_tokens").send_keys("5000")
    page.click("#settings .primary")
    page.ask("Hello")
    assert "exceed the context of 4096 tokens" in page.text(".error p")


def test_a_script_in_an_answer_does_not_run(open_page: Open) -> None:
    page, server = open_page()
    page.requests()
    assert "<script>window.pwned" in page.ask("hostile").text
    assert page.js("return window.pwned ?? null") is None
    assert page.all(".answer :is(script, img, iframe)") == []
    assert {address.startswith(server.url) for address in page.requests()} == {True}


def test_the_status_shows_what_runs(open_page: Open, gate: Gate) -> None:
    page, _ = open_page()
    page.until(lambda: page.text("#server-state") == "Ready")
    page.send("slowly")
    page.until(lambda: "word" in page.text(".answer"))
    gate.open.clear()
    page.until(lambda: page.text("#server-state") == "Working" and page.text("#status-running") == "1")
    assert page.text("#status-cache").endswith(" %")
    gate.open.set()
    page.finished()


def test_a_server_with_keys_asks_for_one(open_page: Open) -> None:
    page, _ = open_page(api_keys=(KEY,))
    page.until(lambda: page.one("#key").get_attribute("open"))
    page.one("#key-text").send_keys(KEY, Keys.ENTER)
    page.until(lambda: page.one("#model").get_attribute("value") == NAME)
    assert page.ask("Hello").text == "You said: Hello"
