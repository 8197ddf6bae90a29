"""The chat page as a reader works it, through a real browser. Every question waits for what it asks for; nothing sleeps."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar

from page_stand_in import StandIn
from selenium import webdriver
from selenium.webdriver.common.by import By
from selenium.webdriver.common.keys import Keys
from selenium.webdriver.remote.webelement import WebElement
from selenium.webdriver.support.ui import WebDriverWait

T = TypeVar("T")

PATIENCE = 30.0
"""Seconds until what is awaited counts as not coming."""


@dataclass(frozen=True)
class Page:
    """The page as a reader works it. Whatever is asked for is waited for."""

    driver: webdriver.Chrome
    server: StandIn

    def open(self) -> None:
        """The page anew, as kept storage has it."""
        self.driver.get(self.server.url)
        self.until(lambda: self.one("#model").get_attribute("value") in ("…", *self.server.models))

    def until(self, condition: Callable[[], T]) -> T:
        return WebDriverWait(self.driver, PATIENCE, poll_frequency=0.02).until(lambda _: condition())

    def one(self, selector: str) -> WebElement:
        return self.until(lambda: next(iter(self.all(selector)), None))

    def all(self, selector: str) -> list[WebElement]:
        return self.driver.find_elements(By.CSS_SELECTOR, selector)

    def text(self, selector: str) -> str:
        """What the first element that fits shows."""
        self.one(selector)
        return self.texts(selector)[0]

    def texts(self, selector: str) -> list[str]:
        """What all elements that fit show, at one moment."""
        found = self.js("return [...document.querySelectorAll(arguments[0])].map((element) => element.innerText)", selector)
        return [re.sub(r"\n+", "\n", text.strip()) for text in found]

    def click(self, selector: str) -> None:
        self.one(selector).click()
        if selector == "#new-chat":  # the old conversation leaves with an event of its own; what is counted meanwhile is its
            self.until(lambda: not self.all(".turn"))

    def press(self, *keys: str) -> None:
        """On whatever has the focus."""
        self.driver.switch_to.active_element.send_keys(*keys)

    def js(self, script: str, *arguments: Any) -> Any:
        return self.driver.execute_script(script, *arguments)

    def module(self, script: str, *arguments: Any) -> Any:
        """What the body of an async function of `given` returns, that may `await import("/page/…")`."""
        call = f"(async (...given) => {{ {script} }})(...[...arguments].slice(0, -1))"
        wrapped = f"const done = arguments[arguments.length - 1]; {call}.then((value) => done([value]), (error) => done(String(error)))"
        outcome = self.driver.execute_async_script(wrapped, *arguments)
        assert isinstance(outcome, list), outcome
        return outcome[0]

    def send(self, message: str) -> None:
        self.one("#message").send_keys(message, Keys.ENTER)

    def ask(self, message: str) -> WebElement:
        """Sends and waits until the answer, which is returned, is at its end."""
        before = len(self.all(".turn.assistant"))
        self.send(message)
        self.until(lambda: len(self.all(".turn.assistant")) > before)
        return self.finished()

    def finished(self) -> WebElement:
        return self.one(".turn.assistant:last-child[aria-busy=false] .answer")

    def said(self) -> list[str]:
        """The messages and answers, as they are read."""
        return self.texts(".asked, .answer")

    def titles(self) -> list[str]:
        return self.texts("#conversations .name")

    def stored(self) -> list[dict[str, Any]]:
        """The conversations in the browser's storage."""
        kept = self.js("return {...localStorage}")
        return [json.loads(text) for key, text in kept.items() if "conversation" in key]

    def log(self) -> list[str]:
        """What the console says is wrong, but for answers with an error's status."""
        entries = self.driver.get_log("browser")
        return [entry["message"] for entry in entries if "Failed to load resource" not in entry["message"]]

    def requests(self) -> list[str]:
        """The addresses that the page has asked for since the last call, answered or not."""
        messages = [json.loads(entry["message"])["message"] for entry in self.driver.get_log("performance")]
        return [message["params"]["request"]["url"] for message in messages if message["method"] == "Network.requestWillBeSent"]
