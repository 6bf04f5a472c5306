"""Foreign pages in a real browser: one with a name that resolves to this machine, and one that sends forms."""

from __future__ import annotations

from typing import Any

import pytest

from tests.gateway.page.browser import Browser, browsing
from tests.gateway.page.hosted import Hosted, hosted
from tests.gateway.page.test_page import ask

# What a page can send without asking the server first, and what it may send where it came from.
SENT = """
const [base, mode, done] = arguments;
const form = new FormData();
form.append('purpose', 'batch');
form.append('file', new Blob(['{}']), 'x.jsonl');
const chat = JSON.stringify({messages: [{role: 'user', content: 'How far?'}]});
const json = mode === 'no-cors' ? {} : {'Content-Type': 'application/json'};
Promise.all([
  fetch(base + '/v1/files', {mode}),
  fetch(base + '/v1/batches', {mode}),
  fetch(base + '/v1/files', {mode, method: 'POST', body: form}),
  fetch(base + '/v1/chat/completions', {mode, method: 'POST', body: chat, headers: json}),
]).then((all) => done(all.map((each) => [each.type, each.status])), (error) => done(String(error)));
"""


def sent(browser: Browser, url: str, mode: str) -> Any:
    return browser.driver.execute_async_script(SENT, url, mode)


def files(browser: Browser, host: Hosted) -> int:
    """How many there are, asked from this server's own page."""
    browser.open(host.url)
    script = "fetch('/v1/files').then((got) => got.json()).then((all) => arguments[0](all.data.length))"
    return int(browser.driver.execute_async_script(script))


@pytest.mark.drawn(one_in=2)
@pytest.mark.slow
def test_pages_from_elsewhere_get_nothing_and_change_nothing() -> None:
    with (
        hosted(has_store=True) as host,
        browsing(1280, "--host-resolver-rules=MAP *.example 127.0.0.1") as browser,
    ):
        rebound = host.url.replace("127.0.0.1", "evil.example")
        browser.open(rebound)
        assert "--allowed-hosts" in browser.text("body")
        assert sent(browser, rebound, "same-origin") == [["basic", 403]] * 4
        # what it does not know as its own it may send to, but not read from
        assert sent(browser, host.url, "no-cors") == [["opaque", 0]] * 4
        assert files(browser, host) == 0 and host.router.submitted == []
        # and the server's own page is none of them
        assert [status for _, status in sent(browser, host.url, "same-origin")] == [200] * 4
        assert files(browser, host) == 1 and len(host.router.submitted) == 1
        browser.open(host.url.replace("127.0.0.1", "localhost"))
        ask(browser, "How far?")
        browser.until_text(".message.model .text", "one two three")


@pytest.mark.drawn(one_in=2)
@pytest.mark.slow
def test_flags_let_them_in() -> None:
    with (
        hosted(has_store=True, allowed_hosts=("good.example",)) as host,
        browsing(1280, "--host-resolver-rules=MAP *.example 127.0.0.1") as browser,
    ):
        url = host.url.replace("127.0.0.1", "good.example")
        browser.open(url)
        ask(browser, "How far?")
        browser.until_text(".message.model .text", "one two three")
