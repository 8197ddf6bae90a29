"""The chat page in a browser: what a reader sends, sees, stops and repeats, and what the server gets of it."""

from __future__ import annotations

from page_driver import Page
from page_stand_in import KEY, StandIn
from selenium.webdriver.common.by import By
from selenium.webdriver.common.keys import Keys

pytest_plugins = ["page_fixtures"]


def test_an_answer_is_streamed_and_shown_as_markdown(page: Page) -> None:
    page.ask("What is two plus two?")
    assert page.text(".asked") == "What is two plus two?"
    assert page.text(".answer h3") == "Two plus two"
    assert page.text(".answer strong") == "four"
    assert page.text(".answer pre code") == "def add(a, b):\n    return a + b"
    assert [item.text for item in page.all(".answer ol li")] == ["count two", "count two more"]
    assert [cell.text for cell in page.all(".answer td")] == ["2", "2", "4"]
    numbers = page.text(".numbers-told").split(" · ")
    assert numbers[0] == "46 tokens"
    assert numbers[-2].startswith("first token 0.")
    assert numbers[-1] == "prompt 21 (16 cached)"
    assert page.text("#context") == "Context: 67 of 4,096 tokens"
    assert page.driver.title == "What is two plus two? – arctool"


def test_text_is_seen_while_it_is_written_and_only_the_end_is_spoken(page: Page, server: StandIn) -> None:
    page.send("Speak slowly")
    page.until(lambda: page.text(".answer .prose:not(.reasoning .prose)") == "The f")
    assert page.one(".turn.assistant").get_attribute("aria-busy") == "true"
    assert page.js("return document.getElementById('announcer').textContent") == "Answering"
    page.until(lambda: "≈ 1 token" in page.text(".numbers-told"))
    server.go_on()
    page.finished()
    page.until(lambda: page.js("return document.getElementById('announcer').textContent") == "The first words, and then the last ones.\n")
    assert "≈" not in page.text(".numbers-told")


def test_stop_keeps_what_was_written_and_the_server_sees_the_client_go(page: Page, server: StandIn) -> None:
    page.send("Speak slowly")
    page.until(lambda: "The f" in page.text(".answer"))
    page.click("#stop")
    assert page.finished().text == "The f\nStopped."
    assert server.left.wait(5)
    assert not page.one("#stop").is_displayed()
    assert page.stored()[0]["messages"][1]["answers"][0]["finish"] == "stopped"
    page.ask("And now?")
    assert [message["content"] for message in server.bodies[-1]["messages"]] == ["Speak slowly", "The f", "And now?"]


def test_regenerate_asks_again_and_keeps_both_answers(page: Page, server: StandIn) -> None:
    page.ask("Think first")
    server.scripts["Think first"] = server.scripts["Be brief"]
    page.click(".regenerate")
    page.until(lambda: "Too lo" in page.finished().text)
    assert "Ended at the limit of tokens." in page.finished().text
    assert server.bodies[1]["messages"] == server.bodies[0]["messages"] == [{"role": "user", "content": "Think first"}]
    assert page.text(".choice") == "2 of 2"
    page.click(".choice button:first-child")
    page.until(lambda: page.text(".choice") == "1 of 2")
    assert "It is seven." in page.finished().text
    page.ask("Sure?")
    assert [message["content"] for message in server.bodies[-1]["messages"]] == ["Think first", "It is **seven**.", "Sure?"]


def test_a_message_can_be_edited_and_what_followed_is_answered_anew(page: Page, server: StandIn) -> None:
    page.ask("one")
    page.ask("two")
    page.js("document.querySelector('.turn.user button').click()")
    page.press(Keys.CONTROL, "a")
    page.press("three", Keys.ENTER)
    page.until(lambda: page.said() == ["three", "You said: three"])
    assert server.bodies[-1]["messages"] == [{"role": "user", "content": "three"}]


def test_reasoning_is_folded_away_and_can_be_opened(page: Page) -> None:
    page.ask("Think first")
    assert page.one(".answer > .prose").text == "It is seven."
    assert page.text(".reasoning summary") == "Thought for a moment"
    assert not page.one(".reasoning li").is_displayed()
    page.click(".reasoning summary")
    assert [item.text for item in page.all(".reasoning li")] == ["six is too few", "eight too many"]


def test_a_refusal_is_shown_in_the_servers_words_and_can_be_tried_again(page: Page, server: StandIn) -> None:
    page.ask("Refuse this")
    assert page.text(".error p") == "messages[0]: this server does not talk about that"
    del server.scripts["Refuse this"]
    page.click(".retry")
    page.until(lambda: page.said() == ["Refuse this", "You said: Refuse this"])
    assert not page.all(".choice")
    assert page.ask("You are full").text == "The queue is full. Try again in 3 s.\nTry again"


def test_an_error_within_the_stream_keeps_the_text_before_it(page: Page) -> None:
    page.ask("Break off")
    assert page.one(".answer > .prose").text == "Half of an"
    assert page.text(".error p") == "The engine has lost this request."
    page.ask("Hang up")
    assert page.all(".answer > .prose")[-1].text == "Half of an answer"
    assert page.all(".error p")[-1].text == "The connection ended before the answer was complete."


def test_a_question_that_was_never_answered_is_asked_with_the_next(page: Page, server: StandIn) -> None:
    page.ask("Refuse this")
    page.ask("Hello")
    assert server.bodies[-1]["messages"] == [{"role": "user", "content": "Refuse this\n\nHello"}]


def test_nothing_that_a_model_writes_runs_or_is_loaded(page: Page, server: StandIn) -> None:
    page.requests()
    answer = page.ask("Be hostile")
    # The text is shown as it is; the answer has reached its end.
    assert "<script>window.pwned" in answer.text
    assert "The end of it" in answer.text
    links = page.all(".answer a[href]")
    assert [link.get_attribute("href") for link in links] == ["https://evil.example/p.png", "https://example.com/"]
    assert {(link.get_attribute("target"), link.get_attribute("rel")) for link in links} == {("_blank", "noopener noreferrer nofollow")}
    for link in page.all(".answer a:not([href])"):
        page.js("arguments[0].click()", link)
    assert page.all(".answer :is(script, img, iframe, form, style, [style], [onclick], [onload], [onerror])") == []
    # A second look: what was stored is drawn by another way than what is streamed.
    page.driver.refresh()
    assert "The end of it" in page.finished().text
    assert page.js("return window.pwned ?? null") is None
    assert {address.startswith(server.url) for address in page.requests()} == {True}


def test_only_what_is_set_is_asked_of_the_server(page: Page, server: StandIn) -> None:
    page.ask("Hello")
    assert server.bodies[0] == {
        "model": "tiny-qtip4",
        "messages": [{"role": "user", "content": "Hello"}],
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    page.click("#open-settings")
    for name, value in {
        "system": "Be kind.",
        "temperature": "0",
        "top_k": "40",
        "min_p": "0.05",
        "seed": "7",
        "stop": "END\n\\n\\n",
    }.items():
        page.one(f"#setting-{name}").send_keys(value)
    page.one("#setting-top_p").send_keys("1.5")
    assert page.one("#setting-top_p").get_attribute("aria-invalid") == "true"
    assert page.text("#hint-top_p") == "Enter a number above 0 up to 1."
    page.click("#settings .primary")
    page.ask("Again")
    body = server.bodies[1]
    assert body.pop("messages")[0] == {"role": "system", "content": "Be kind."}
    sampling = {"temperature": 0, "top_k": 40, "min_p": 0.05, "seed": 7, "stop": ["END", "\n\n"]}
    assert body == {"model": "tiny-qtip4", "stream": True, "stream_options": {"include_usage": True}, **sampling}
    page.click("#open-settings")
    page.one("#setting-temperature").send_keys(Keys.CONTROL, "a", Keys.BACKSPACE)
    page.click("#settings .primary")
    page.click("#new-chat")
    page.ask("A new one starts with them")
    assert server.bodies[2]["seed"] == 7
    assert "temperature" not in server.bodies[2]
    page.click("#open-settings")
    page.click("#reset-settings")
    page.click("#settings .primary")
    page.ask("None")
    assert set(server.bodies[3]) == {"model", "messages", "stream", "stream_options"}


def test_the_model_can_be_chosen(page: Page, server: StandIn) -> None:
    server.models.append("other-qtip2")
    page.open()
    page.until(lambda: page.one("#model").is_enabled())
    page.one("#model").find_element(By.CSS_SELECTOR, "[value=other-qtip2]").click()
    page.ask("Hello")
    page.driver.refresh()
    page.finished()
    page.until(lambda: page.one("#model").get_attribute("value") == "other-qtip2")
    page.ask("Again")
    assert [body["model"] for body in server.bodies] == ["other-qtip2", "other-qtip2"]


def test_a_key_is_asked_for_and_sent(page: Page, server: StandIn) -> None:
    server.key = KEY
    page.open()
    page.until(lambda: page.one("#key").get_attribute("open"))
    page.one("#key-text").send_keys("wrong", Keys.ENTER)
    page.until(lambda: page.one("#key").get_attribute("open") and page.text("#key-why").startswith("A key is needed"))
    page.one("#key-text").send_keys(KEY, Keys.ENTER)
    page.until(lambda: page.one("#model").get_attribute("value") == "tiny-qtip4")
    page.ask("Hello")
    assert page.said() == ["Hello", "You said: Hello"]
    page.driver.refresh()
    page.until(lambda: page.one("#model").get_attribute("value") == "tiny-qtip4")
    assert page.js("return [sessionStorage['arctool.key'], localStorage['arctool.key'] ?? null]") == [KEY, None]


def test_the_status_of_the_server_is_shown_as_it_changes(page: Page, server: StandIn) -> None:
    page.until(lambda: page.text("#server-state") == "Ready")
    server.status |= {"running": 3, "waiting": 12, "kv_cache_usage": 0.372, "generated_tokens_per_second": 87.4}
    page.until(lambda: page.text("#server-state") == "Working")
    told = [page.text(f"#status-{name}") for name in ("running", "waiting", "generated", "prompt", "cache")]
    assert told == ["3", "12", "87 tok/s", "0 tok/s", "37.2 %"]
    assert page.one("#cache-meter").get_attribute("aria-valuenow") == "37.2"
    server.status = {"ready": False}
    page.open()
    page.until(lambda: page.text("#server-state") == "Loading")
    assert page.text("#status-running") == "–"


def test_a_reader_who_has_scrolled_up_is_left_there(page: Page, server: StandIn) -> None:
    page.send("Go on for long")
    page.until(lambda: page.all(".answer p"))
    server.go_on()
    page.finished()
    bottom = "const s = document.getElementById('scroller'); return s.scrollHeight - s.scrollTop - s.clientHeight"
    page.until(lambda: page.js(bottom) < 2)
    server.reset()
    page.send("Go on for long")
    page.until(lambda: len(page.all(".turn.assistant")) == 2)
    page.js("document.getElementById('scroller').scrollTop = 0")
    page.until(lambda: page.one("#to-end").is_displayed())
    server.go_on()
    page.finished()
    assert page.js("return document.getElementById('scroller').scrollTop") == 0
    page.click("#to-end")
    page.until(lambda: page.js(bottom) < 2)


def test_an_answer_goes_on_while_another_conversation_is_shown(page: Page, server: StandIn) -> None:
    page.send("Speak slowly")
    page.until(lambda: "The f" in page.text(".answer"))
    page.click("#new-chat")
    page.ask("Hello")
    assert page.said() == ["Hello", "You said: Hello"]
    page.js("document.querySelectorAll('#conversations .open')[1].click()")
    page.until(lambda: page.said()[0] == "Speak slowly" and "The f" in page.said()[1])
    server.go_on()
    assert page.finished().text == "The first words, and then the last ones."


def test_code_and_answers_can_be_copied(page: Page) -> None:
    page.driver.execute_cdp_cmd("Browser.grantPermissions", {"permissions": ["clipboardReadWrite", "clipboardSanitizedWrite"]})
    page.ask("What is two plus two?")
    page.click(".copy-code")
    page.until(lambda: page.module("return navigator.clipboard.readText()") == "def add(a, b):\n    return a + b\n")
    page.click("[aria-label='Copy answer']")
    page.until(lambda: page.module("return navigator.clipboard.readText()").startswith("# Two plus two\n\nIt is **four**"))
    assert page.js("return document.getElementById('announcer').textContent") == "Copied"
