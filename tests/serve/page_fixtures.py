"""Fixtures of the chat page's tests, as a plugin: one Chromium for the session, an empty storage and a fresh server for each test.

The tests ask `page` for what a reader sees and `server` for what arrived there. Whoever wants them run against another server gives
`server` the attributes of `StandIn`.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from page_driver import Page
from page_stand_in import StandIn, running
from selenium import webdriver

ARGUMENTS = (
    "--headless=new",
    "--no-sandbox",
    "--disable-dev-shm-usage",
    "--disable-background-networking",
    "--window-size=1280,800",
    "--force-prefers-reduced-motion",
    # A headless browser has no mouse; as a page sees it, this one does.
    "--blink-settings=primaryHoverType=2,availableHoverTypes=2,primaryPointerType=4,availablePointerTypes=4",
)


@pytest.fixture(scope="session")
def _server() -> Iterator[StandIn]:
    with running() as stand_in:
        yield stand_in


@pytest.fixture(scope="session")
def _driver(tmp_path_factory: pytest.TempPathFactory) -> Iterator[webdriver.Chrome]:
    options = webdriver.ChromeOptions()
    options.binary_location = "/usr/bin/chromium"
    profile: Path = tmp_path_factory.mktemp("chromium")
    for argument in (*ARGUMENTS, f"--user-data-dir={profile}"):
        options.add_argument(argument)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL", "performance": "ALL"})
    driver = webdriver.Chrome(options, webdriver.ChromeService("/usr/bin/chromedriver"))
    yield driver
    driver.quit()


@pytest.fixture
def server(_server: StandIn) -> StandIn:
    _server.reset()
    return _server


@pytest.fixture
def modules(_driver: webdriver.Chrome, _server: StandIn) -> Page:
    """Somewhere to run the page's modules, whatever was on the page before."""
    if not _driver.current_url.startswith(_server.url):
        _driver.get(_server.url)
    return Page(_driver, _server)


@pytest.fixture
def page(_driver: webdriver.Chrome, server: StandIn) -> Iterator[Page]:
    # A page of the same origin that runs nothing.
    _driver.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": []})
    _driver.get(f"{server.url}page/icon.svg")
    _driver.execute_script("localStorage.clear(); sessionStorage.clear();")
    page = Page(_driver, server)
    page.log()
    page.requests()
    page.open()
    yield page
    server.go_on()
    assert page.log() == []
