"""The chat page in a browser: by keyboard alone, for a screen reader, in light and dark, from wide to narrow."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from page_driver import Page
from page_stand_in import Script, StandIn
from selenium.webdriver.common.keys import Keys

pytest_plugins = ["page_fixtures"]


def focused(page: Page) -> str:
    """What has the focus: its id, or what it is called."""
    return page.js("const e = document.activeElement; return e.id || e.getAttribute('aria-label') || e.textContent.trim()")


def test_everything_can_be_done_by_keyboard(page: Page, server: StandIn) -> None:
    assert focused(page) == "message"
    page.press("two", Keys.SHIFT, Keys.ENTER)
    page.press("lines")
    assert page.one("#message").get_attribute("value") == "two\nlines"
    page.press(Keys.ENTER)
    page.finished()
    assert server.bodies[0]["messages"][0]["content"] == "two\nlines"
    assert focused(page) == "message"
    page.press("Speak slowly", Keys.ENTER)
    page.until(lambda: "The f" in page.all(".answer")[-1].text)
    page.press("meanwhile", Keys.ENTER)
    assert len(server.bodies) == 2
    page.press(Keys.ESCAPE)
    assert page.finished().text == "The f\nStopped."
    assert server.left.wait(5)
    assert page.one("#message").get_attribute("value") == "meanwhile"
    # Back from the message box to the last answer's buttons, which show themselves.
    page.press(Keys.SHIFT, Keys.TAB)
    assert focused(page) == "Regenerate"
    page.until(lambda: page.js("return getComputedStyle(document.activeElement).outlineStyle") == "solid")
    page.js("document.getElementById('open-settings').focus()")
    page.press(Keys.ENTER)
    page.until(lambda: page.one("#settings").is_displayed())
    page.press(Keys.ESCAPE)
    page.until(lambda: not page.one("#settings").is_displayed())
    assert focused(page) == "open-settings"
    page.js("document.querySelector('.rename').focus()")
    page.press(Keys.ENTER)
    assert focused(page) == "Name of the conversation"
    page.press("renamed", Keys.ENTER)
    page.until(lambda: page.text("#title") == "renamed")
    assert focused(page) == "Rename “renamed”"


def test_the_first_stop_of_the_tab_key_leads_past_the_sidebar(page: Page) -> None:
    page.js("document.body.tabIndex = -1; document.body.focus()")
    page.press(Keys.TAB)
    assert focused(page) == "Skip to the message box"
    page.press(Keys.ENTER)
    page.until(lambda: focused(page) == "message")
    assert page.text("#title") == "New chat"


def controls_of(page: Page) -> set[tuple[str, str]]:
    """Role and name of everything that assistive technology meets."""
    nodes = page.driver.execute_cdp_cmd("Accessibility.getFullAXTree", {})["nodes"]
    return {(node["role"]["value"], node.get("name", {}).get("value", "")) for node in nodes if not node["ignored"]}


def test_every_control_has_a_name_and_every_part_a_landmark(page: Page) -> None:
    page.ask("What is two plus two?")
    page.ask("Break off")
    page.click("#open-settings")
    names = controls_of(page)
    page.press(Keys.ESCAPE)
    page.until(lambda: not page.one("#settings").is_displayed())
    names |= controls_of(page)
    controls = {"button", "textbox", "combobox", "radio", "checkbox", "link", "meter", "dialog", "navigation", "complementary", "main"}
    assert {role for role, name in names if role in controls and not name} == set()
    expected = [("main", "Conversation"), ("navigation", "Conversations"), ("complementary", "Conversations and server")]
    expected += [("form", "Write a message"), ("textbox", "Message"), ("button", "Send"), ("combobox", "Model"), ("button", "Settings")]
    expected += [("radio", "Dark"), ("meter", "Cache in use"), ("button", "Copy answer"), ("button", "Regenerate"), ("button", "Copy code")]
    expected += [("dialog", "Settings"), ("textbox", "Temperature"), ("textbox", "Stop strings"), ("button", "Try again")]
    assert [pair for pair in expected if pair not in names] == []
    assert page.js("return document.getElementById('announcer').getAttribute('aria-live')") == "polite"
    assert len(page.js("return [...document.querySelectorAll('[aria-live], [role=status], [role=alert], [role=log]')].map(e => e.id)")) == 2
    assert page.js("const ids = [...document.querySelectorAll('[id]')].map(e => e.id); return ids.length - new Set(ids).size") == 0


def test_dark_and_light_follow_the_system_until_one_is_chosen(page: Page) -> None:
    def ground() -> int:
        return page.js("return parseInt(getComputedStyle(document.body).backgroundColor.match(/\\d+/)[0])")

    def system(scheme: str) -> None:
        page.driver.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": [{"name": "prefers-color-scheme", "value": scheme}]})

    system("dark")
    assert ground() < 60
    system("light")
    assert ground() > 200
    page.js("document.querySelector('[name=theme][value=dark]').click()")
    assert ground() < 60
    page.driver.refresh()
    assert ground() < 60
    assert page.one("[name=theme][value=dark]").is_selected()
    page.js("document.querySelector('[name=theme][value=system]').click()")
    assert ground() > 200


CONTRASTS = """
const channel = (c) => (c /= 255) <= 0.04045 ? c / 12.92 : ((c + 0.055) / 1.055) ** 2.4;
const canvas = document.createElement("canvas").getContext("2d", {willReadFrequently: true});
const rgba = (colour) => { canvas.clearRect(0, 0, 1, 1); canvas.fillStyle = colour; canvas.fillRect(0, 0, 1, 1);
  const [r, g, b, a] = canvas.getImageData(0, 0, 1, 1).data; return [r, g, b, a / 255]; };
const over = (top, under) => [0, 1, 2].map((i) => top[i] * top[3] + under[i] * (1 - top[3])).concat(1);
const light = ([r, g, b]) => 0.2126 * channel(r) + 0.7152 * channel(g) + 0.0722 * channel(b);
const seen = [];
const walker = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT);
while (walker.nextNode()) {
  const element = walker.currentNode.parentElement;
  if (!walker.currentNode.data.trim() || !element.checkVisibility({opacityProperty: true, visibilityProperty: true})) continue;
  if (element.closest(".visually-hidden, .skip, :disabled:not(select), option, script, noscript")) continue;
  const layers = [];
  for (let e = element; e; e = e.parentElement) layers.unshift(rgba(getComputedStyle(e).backgroundColor));
  const ground = layers.reduce((under, top) => over(top, under), [255, 255, 255, 1]);
  const [a, b] = [light(over(rgba(getComputedStyle(element).color), ground)), light(ground)].sort((x, y) => y - x);
  seen.push([walker.currentNode.data.trim().slice(0, 40), (a + 0.05) / (b + 0.05)]);
}
return seen;
"""


@pytest.mark.parametrize("theme", ["light", "dark"])
def test_every_text_has_the_contrast_that_wcag_asks_for(page: Page, theme: str) -> None:
    page.js("document.querySelector(`[name=theme][value=${arguments[0]}]`).click()", theme)
    page.ask("What is two plus two?")
    page.ask("Think first")
    page.js("document.querySelectorAll('details').forEach((e) => (e.open = true))")
    page.ask("Refuse this")
    contrasts = page.js(CONTRASTS)
    page.click("#open-settings")
    page.one("#setting-seed").send_keys("none")
    contrasts += page.js(CONTRASTS)
    assert len(contrasts) > 60
    assert {text: round(contrast, 2) for text, contrast in contrasts if contrast < 4.5} == {}


@pytest.fixture
def narrow(page: Page) -> Iterator[None]:
    metrics = {"width": 360, "height": 740, "deviceScaleFactor": 1, "mobile": False}
    page.driver.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", metrics)
    yield
    page.driver.execute_cdp_cmd("Emulation.clearDeviceMetricsOverride", {})


@pytest.mark.usefixtures("narrow")
def test_a_narrow_screen_shows_all_and_keeps_the_sidebar_in_a_drawer(page: Page, server: StandIn) -> None:
    page.ask("What is two plus two?")
    server.scripts["A long line"] = Script(f"```\n{'x' * 200}\n```\n\n|{'wide|' * 20}\n|{'--|' * 20}\n")
    page.ask("A long line")
    for inner in (".turn:last-child pre", ".turn:last-child .table"):
        assert page.js("const e = document.querySelector(arguments[0]); e.scrollLeft = 50; return e.scrollLeft", inner) == 50
    page.ask("word" * 30)
    assert page.js("return document.documentElement.scrollWidth") == 360
    assert page.js("const s = document.getElementById('scroller'); return s.scrollWidth - s.clientWidth") == 0
    assert not page.one("#sidebar").is_displayed()
    page.click("#open-sidebar")
    page.until(lambda: page.one("#sidebar").is_displayed())
    assert page.one("#open-sidebar").get_attribute("aria-expanded") == "true"
    page.js("document.getElementById('message').focus()")
    assert focused(page) == "close-sidebar"
    page.press(Keys.ESCAPE)
    page.until(lambda: not page.one("#sidebar").is_displayed())
    assert focused(page) == "open-sidebar"
    page.click("#open-sidebar")
    page.click("#new-chat")
    page.until(lambda: page.said() == [] and not page.one("#sidebar").is_displayed())
