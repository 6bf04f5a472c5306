"""The page in front of a scripted island: keys, text that looks like HTML, processes, and a server that is away."""

from __future__ import annotations

import re
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
from selenium.webdriver.common.keys import Keys

from alignedserve.gateway.http.keys import owners_of
from alignedserve.types import InstanceId
from tests.gateway.http.test_access import KEYED
from tests.gateway.page.browser import Browser
from tests.gateway.page.hosted import hosted
from tests.gateway.scripted import TOKENIZER, ScriptedRouter, answer_of, process_status

HOSTILE = "<img src=x onerror=\"document.title='hacked'\"><script>document.title='hacked'</script><b>bold</b>"


def enter_key(browser: Browser, key: str) -> None:
    browser.until(lambda: browser.find("#ask-key").is_displayed())
    browser.find("#key").send_keys(key, Keys.ENTER)


@pytest.mark.slow
def test_it_asks_for_a_key_says_that_one_is_wrong_and_forgets(browser: Browser) -> None:
    with hosted(key_owners=owners_of(["secret"], None)) as host:
        browser.open(host.url)
        browser.until(lambda: browser.find("#ask-key").is_displayed())
        # what is public is shown
        assert "Ready" in browser.text("#state") and not browser.find("#main").is_displayed()
        assert browser.text("#key-problem") == ""
        enter_key(browser, "wrong")
        browser.until_text("#key-problem", "does not know this key")
        enter_key(browser, "secret")
        browser.until(lambda: browser.find_all("tr[data-instance='decode-0']"))
        assert browser.find("#main").is_displayed() and not browser.find("#ask-key").is_displayed()
        ask(browser, "How far?")
        browser.until_text("#said", "one two three")
        # it outlives a reload, and not the tab
        browser.open(host.url)
        browser.until(lambda: browser.find("#forget").is_displayed())
        assert browser.run("return Object.values(sessionStorage)") == ["secret"]
        assert browser.run("return localStorage.length + document.cookie.length") == 0
        browser.find("#forget").click()
        browser.until(lambda: browser.find("#ask-key").is_displayed())
        assert browser.run("return sessionStorage.length") == 0
        assert not browser.find("#forget").is_displayed()
        asked_for = browser.asked_for()
        assert len(asked_for) > 20 and not [url for url in asked_for if "secret" in url or "wrong" in url]


@pytest.mark.slow
def test_with_a_key_that_may_not_read_counts_it_says_so_and_chats(browser: Browser) -> None:
    with hosted(has_store=True, **KEYED) as host:
        browser.open(host.url)
        enter_key(browser, "secret")
        browser.until_text("#no-counters", "see --operator-key")
        browser.until_text("#jobs", "None yet")
        assert not browser.find("#traffic").is_displayed() and not browser.find("#memory").is_displayed()
        ask(browser, "How far?")
        browser.until_text("#said", "one two three")
        browser.asked_for()
        browser.until(lambda: num_looks(browser))
        assert not [url for url in browser.asked_for() if "metrics" in url or "cluster" in url]


@pytest.mark.slow
def test_another_key_may_read_counts_that_the_last_one_could_not(browser: Browser) -> None:
    keys = owners_of(["first", "second"], None, ["operator"])
    with hosted(key_owners=keys) as host:
        browser.open(host.url)
        enter_key(browser, "first")
        browser.until_text("#no-counters", "see --operator-key")
        host.do(lambda: host.keys.change(owners_of(["second"], None, ["operator"])))
        enter_key(browser, "operator")
        browser.until(lambda: browser.find_all("tr[data-instance='decode-0']"))
        assert browser.find("#traffic").is_displayed() and browser.text("#no-counters") == ""


def ask(browser: Browser, text: str) -> None:
    browser.find("#text").send_keys(text, Keys.ENTER)


@pytest.mark.slow
def test_text_is_shown_as_text(browser: Browser) -> None:
    down = process_status("decode", "down")
    router = ScriptedRouter(answer=answer_of(HOSTILE))
    assert TOKENIZER.decode(router.answer[:-1]) == HOSTILE
    odd = process_status("decode")
    odd.instance_id = InstanceId(HOSTILE)
    router.processes = [process_status(role) for role in ("router", "kvpool", "prefill")] + [down, odd]
    down.requests = {HOSTILE: 3}
    with hosted(router) as host:
        browser.open(host.url)
        browser.until_text("#processes", "decode-0")
        assert HOSTILE in browser.text("#processes")
        ask(browser, HOSTILE)
        browser.until_text(".message.model .note", "tokens/s")
        assert browser.text(".message.you .text") == browser.text(".message.model .text") == HOSTILE
        assert not browser.find_all("#main img, #main script, #main b")
        assert "hacked" not in browser.driver.title


@pytest.mark.drawn(one_in=2)
@pytest.mark.slow
def test_an_answer_can_be_stopped(browser: Browser) -> None:
    router = ScriptedRouter()
    router.allowed = 5
    with hosted(router) as host:
        browser.open(host.url)
        browser.find("#tier").send_keys("best effort")
        ask(browser, "How far?")
        browser.until(lambda: browser.find_all(".message.model") and browser.text(".message.model .text"))
        assert not browser.find("#send").is_displayed()
        browser.find("#stop").click()
        browser.until_text(".message.model .note", "stopped")
        browser.until(lambda: router.aborted)
        assert [submit.request.tier for submit in router.submitted] == ["be"]
        # and then one can go on
        host.do(lambda: router.allow(None))
        ask(browser, "And now?")
        browser.until_text(".message.model:last-child .note", "tokens/s")
        assert browser.text(".message.model:last-child .text") == "one two three"
        browser.find("#clear").click()
        assert not browser.find_all(".message")


@pytest.mark.drawn(one_in=2)
@pytest.mark.slow
def test_it_shows_how_much_of_a_long_prompt_is_read(browser: Browser) -> None:
    router = ScriptedRouter()
    router.allowed = 0
    with hosted(router) as host:
        browser.open(host.url)
        ask(browser, "How far?")
        browser.until(lambda: router.submitted)
        total = len(router.submitted[0].request.prompt)
        host.do(lambda: router.read(total // 2, 0, 0.25))
        bar = ".message.model .bar"
        browser.until_text(".message.model .note", f"read {total // 2} of {total} tokens")
        assert browser.find(bar).is_displayed()
        share = float(browser.find(bar).get_attribute("aria-valuenow") or 0)
        assert 40 < share <= 50
        host.do(lambda: router.read(total, 0, 0.5))
        browser.until(lambda: not browser.find(bar).is_displayed())
        host.do(lambda: router.allow(None))
        browser.until_text(".message.model .note", "tokens/s")
        assert browser.text(".message.model .text") == "one two three"
        assert not browser.find(".message.you .bar").is_displayed()


@pytest.mark.drawn(one_in=2)
@pytest.mark.slow
def test_what_fails_is_said_in_the_conversation(browser: Browser) -> None:
    router = ScriptedRouter()
    router.allowed = 5
    with hosted(router) as host:
        browser.open(host.url)
        ask(browser, "How far?")
        browser.until(lambda: browser.find_all(".message.model") and browser.text(".message.model .text"))
        host.do(lambda: router.fail("NaN in its logits"))
        browser.until_text(".message.model .note", "failed: ")
        browser.until_text(".message.model .note", "NaN in its logits")
        # too long to be typed
        browser.run("arguments[0].value = 'x'.repeat(10_000)", browser.find("#text"))
        ask(browser, "x")
        browser.until_text(".message.model:last-child .note", "failed: ")


@pytest.mark.drawn(one_in=2)
@pytest.mark.slow
def test_a_process_that_is_down_stands_out(browser: Browser) -> None:
    router = ScriptedRouter()
    with hosted(router) as host:
        browser.open(host.url)
        browser.until(lambda: "Ready" in browser.text("#state") and browser.find_all("[data-instance]"))
        row = "tr[data-instance='decode-0']"
        assert "6 of 10" in browser.text(row) and "● up" in browser.text(row)
        router.processes = [
            process_status("kvpool"),
            process_status("prefill"),
            process_status("decode", "down"),
        ]
        browser.until_text(row, "✕ down")
        browser.until_text("#state", "✕ Unavailable: no decode process is up")
        assert "✕" in browser.driver.title
        assert "decode-0 (pid 42) is down" in browser.text("#events")


@pytest.mark.drawn(one_in=2)
@pytest.mark.slow
def test_it_waits_for_a_server_that_is_away(browser: Browser) -> None:
    with hosted() as host:
        browser.open(host.url)
        browser.until_text("#state", "Ready")
        with cut_off(browser):
            # every 2 s at first, then every 4
            browser.until(lambda: re.search(r"retrying every \d+ s$", browser.text("#state")))
        browser.until_text("#state", "Ready")


@contextmanager
def cut_off(browser: Browser) -> Iterator[None]:
    conditions: dict[str, Any] = {"latency": 0, "downloadThroughput": -1, "uploadThroughput": -1}
    command = "Network.emulateNetworkConditions"
    browser.driver.execute_cdp_cmd(command, {"offline": True, **conditions})
    try:
        yield
    finally:
        # Other tests, and a second run of this one, use the browser as well.
        browser.driver.execute_cdp_cmd(command, {"offline": False, **conditions})


@pytest.mark.drawn(one_in=2)
@pytest.mark.slow
def test_a_hidden_tab_asks_for_nothing(browser: Browser) -> None:
    with hosted() as host:
        browser.open(host.url)
        browser.until_text("#state", "Ready")
        hide(browser, True)
        browser.asked_for()
        # of two looks and a half; one may have begun before
        time.sleep(2.5)
        assert num_looks(browser) <= 1
        hide(browser, False)
        browser.until(lambda: num_looks(browser))


def hide(browser: Browser, is_hidden: bool) -> None:
    """As far as the page can tell."""
    script = "Object.defineProperty(document, 'hidden', { value: arguments[0], configurable: true })"
    browser.run(f"{script}; document.dispatchEvent(new Event('visibilitychange'))", is_hidden)


def num_looks(browser: Browser) -> int:
    """Since the last time."""
    return len([url for url in browser.asked_for() if url.endswith("/health")])
