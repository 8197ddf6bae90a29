"""The chat page in a browser: conversations that are kept, named and deleted, and a storage that is full, blocked, or holds anything."""

from __future__ import annotations

import json
from collections.abc import Iterator

import pytest
from page_driver import Page
from page_stand_in import StandIn
from selenium.webdriver.common.keys import Keys

pytest_plugins = ["page_fixtures"]


def test_a_reload_finds_the_conversation_again(page: Page) -> None:
    page.ask("Think first")
    page.ask("Break off")
    before, numbers = page.said(), page.texts(".numbers-told")
    page.driver.refresh()
    page.finished()
    assert page.said() == before
    assert page.texts(".numbers-told") == numbers
    assert page.text("#title") == "Think first"
    assert page.texts(".error p")[-1] == "The engine has lost this request."


def test_an_answer_that_a_reload_interrupts_is_kept_as_far_as_it_came(page: Page) -> None:
    page.send("Speak slowly")
    page.until(lambda: "The f" in page.text(".answer"))
    page.driver.refresh()
    assert page.finished().text == "The f\nStopped."


def test_conversations_are_opened_renamed_and_deleted(page: Page) -> None:
    for message in ("first", "second", "third"):
        page.ask(message)
        page.click("#new-chat")
        page.until(lambda: page.text("#title") == "New chat")
    assert page.titles() == ["third", "second", "first"]
    page.click("#conversations li:nth-child(2) .open")
    page.until(lambda: page.said() == ["second", "You said: second"])
    assert page.one("#conversations [aria-current=true]").text == "second"
    page.click("#conversations .current .rename")
    page.press(Keys.CONTROL, "a")
    page.press("deux", Keys.ENTER)
    page.until(lambda: page.text("#title") == "deux")
    page.click("#conversations .current .rename")
    page.press("nothing of this", Keys.ESCAPE)
    page.until(lambda: sorted(page.titles()) == ["deux", "first", "third"])
    page.click("#conversations .current .delete")
    assert page.text("#confirm-text") == "Delete “deux”? It cannot be brought back."
    page.press(Keys.ESCAPE)
    page.until(lambda: not page.one("#confirm").is_displayed())
    assert len(page.stored()) == 3
    page.click("#conversations .current .delete")
    page.click("#confirm-yes")
    page.until(lambda: page.titles() == ["third", "first"])
    assert page.text("#title") == "New chat"
    page.driver.refresh()
    page.until(lambda: page.titles() == ["third", "first"])
    page.driver.back()
    page.click("#open-settings")
    page.js("document.getElementById('delete-all').click()")
    page.click("#confirm-yes")
    page.until(lambda: page.titles() == [])
    assert page.stored() == []


def test_the_back_button_leads_to_the_conversation_before(page: Page) -> None:
    page.ask("first")
    page.click("#new-chat")
    page.until(lambda: page.said() == [])
    page.driver.back()
    page.until(lambda: page.said() == ["first", "You said: first"])


def test_what_is_being_written_stays_with_its_conversation(page: Page) -> None:
    page.ask("first")
    page.one("#message").send_keys("half a thought")
    page.click("#new-chat")
    page.until(lambda: page.text("#title") == "New chat")
    assert page.one("#message").get_attribute("value") == ""
    page.one("#message").send_keys("a new one")
    page.click("#conversations .open")
    page.until(lambda: page.one("#message").get_attribute("value") == "half a thought")
    page.click("#new-chat")
    page.until(lambda: page.one("#message").get_attribute("value") == "a new one")
    page.press(Keys.ENTER)
    page.until(lambda: page.said() == ["a new one", "You said: a new one"])
    page.click("#new-chat")
    page.until(lambda: page.said() == [])
    assert page.one("#message").get_attribute("value") == ""


def test_settings_stay_with_their_conversation(page: Page, server: StandIn) -> None:
    page.click("#open-settings")
    page.one("#setting-seed").send_keys("7", Keys.ENTER)
    page.ask("first")
    page.click("#new-chat")
    page.until(lambda: page.said() == [])
    page.click("#open-settings")
    assert page.one("#setting-seed").get_attribute("value") == "7"
    page.one("#setting-seed").send_keys("8", Keys.ENTER)
    page.ask("second")
    page.click("#conversations li:nth-child(2) .open")
    page.until(lambda: page.said()[:1] == ["first"])
    page.click("#open-settings")
    assert page.one("#setting-seed").get_attribute("value") == "7"
    page.one("#setting-min_p").send_keys("0.1", Keys.ENTER)
    page.ask("third")
    assert [(body["seed"], body.get("min_p")) for body in server.bodies] == [(7, None), (78, None), (7, 0.1)]


def test_a_deleted_conversation_does_not_come_back_when_its_answer_ends(page: Page, server: StandIn) -> None:
    page.send("Speak slowly")
    page.until(lambda: "The f" in page.text(".answer"))
    page.click("#conversations .current .delete")
    page.click("#confirm-yes")
    assert server.left.wait(5)
    page.until(lambda: page.titles() == [] and page.text("#title") == "New chat")
    page.ask("Hello")
    assert page.titles() == ["Hello"]
    assert len(page.stored()) == 1


def test_what_another_tab_writes_is_shown(page: Page) -> None:
    page.ask("first")
    here = page.driver.current_window_handle
    page.driver.switch_to.new_window("tab")
    page.driver.get(page.server.url)
    page.until(lambda: page.titles() == ["first"])
    page.ask("second")
    page.driver.close()
    page.driver.switch_to.window(here)
    page.until(lambda: page.titles() == ["second", "first"])
    assert page.text("#title") == "first"


HOSTILE = {
    "not JSON": "{",
    "null": "null",
    "a list": "[1, 2]",
    "no messages": '{"title": "x"}',
    "messages of other kinds": '{"messages": [null, 1, "x", {"role": "system", "content": "x"}]}',
    "answers of other kinds": '{"messages": [{"role": "assistant", "answers": [7], "shown": 0}]}',
    "no answers": '{"messages": [{"role": "assistant", "answers": [], "shown": 0}]}',
}


def test_what_is_no_conversation_is_passed_over(page: Page) -> None:
    odd = {"title": 7, "updated": "now", "settings": {"temperature": "hot", "seed": 1e99, "stop": [1], "system": {}, "model": ["x"]}}
    answer = {"content": 1, "reasoning": {}, "usage": {"prompt": "many", "completion": -1}, "firstToken": "soon", "error": ["x"]}
    turns = [{"role": "user", "content": "<b>kept</b>"}, {"role": "assistant", "answers": [answer, {"content": "**this**"}], "shown": 99}]
    stored = {f"arctool.conversation.{at:016x}": text for at, text in enumerate(HOSTILE.values())}
    stored["arctool.conversation.00000000000000ff"] = json.dumps(odd | {"messages": turns})
    stored |= {
        "arctool.conversation.#a b/'\"<img>": stored["arctool.conversation.00000000000000ff"],
        "arctool.settings": "[",
        "arctool.theme": "pink",
    }
    page.js("for (const [key, text] of Object.entries(arguments[0])) localStorage.setItem(key, text)", stored)
    page.driver.refresh()
    page.until(lambda: page.titles() == ["Untitled"])
    page.click("#conversations .open")
    page.until(lambda: page.said() == ["<b>kept</b>", "this\nStopped."])
    page.ask("Hello")
    assert set(page.server.bodies[0]) == {"model", "messages", "stream", "stream_options"}
    page.js("location.hash = '#%00nobody\"<img>'")
    page.until(lambda: page.text("#title") == "New chat")
    page.ask("Hello")
    page.click("#open-settings")
    page.js("document.getElementById('delete-all').click()")
    page.click("#confirm-yes")
    page.until(lambda: page.js("return Object.keys(localStorage).filter((key) => key.includes('conversation')).length") == 0)


def test_a_full_storage_is_told_and_the_chat_goes_on(page: Page) -> None:
    page.ask("before")
    page.js(
        """
        for (let size = 1 << 22; size >= 1; size >>= 1) {
          try { for (let at = 0; ; at += 1) localStorage.setItem(`other.${size}.${at}`, "x".repeat(size)); } catch {}
        }
        """
    )
    page.ask("after")
    assert page.text("#notice-text").startswith("The browser has no more room for this page")
    page.click("#new-chat")
    page.ask("a new one")
    page.click("#conversations li:nth-child(2) .open")
    page.until(lambda: page.said()[2:] == ["after", "You said: after"])
    page.click("#close-notice")
    page.js("for (const key of Object.keys(localStorage)) if (key.startsWith('other.')) localStorage.removeItem(key)")
    page.ask("room again")
    assert not page.one("#notice").is_displayed()
    assert len(page.stored()) == 1
    page.driver.refresh()
    page.until(lambda: page.said()[-1:] == ["You said: room again"])


@pytest.fixture
def blocked(page: Page) -> Iterator[None]:
    """A browser that lets no page keep anything."""
    block = "Object.defineProperty(window, name, { get() { throw new Error('blocked'); } })"
    script = f"for (const name of ['localStorage', 'sessionStorage']) {block}"
    added = page.driver.execute_cdp_cmd("Page.addScriptToEvaluateOnNewDocument", {"source": script})
    yield
    page.driver.execute_cdp_cmd("Page.removeScriptToEvaluateOnNewDocument", added)


@pytest.mark.usefixtures("blocked")
def test_a_browser_without_storage_still_chats(page: Page) -> None:
    page.driver.refresh()
    page.ask("Hello")
    assert page.said() == ["Hello", "You said: Hello"]
    assert page.text("#notice-text").startswith("The browser does not let this page keep anything.")
    page.click("#new-chat")
    page.ask("Again")
    assert page.titles() == ["Again", "Hello"]
    page.js("document.querySelector('[name=theme][value=dark]').click()")
    assert page.js("return document.documentElement.dataset.theme") == "dark"
