"""The page of a real server: its content changes with what the server does."""

from __future__ import annotations

import os
import re
import signal
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager

import httpx2
import pytest
from selenium.webdriver.common.keys import Keys

from tests.gateway.page.browser import Browser
from tests.launch.batch_job import client_of, submit
from tests.launch.server import Server, serving

# it needs a whole server and a browser; the page itself is tested at a gateway alone, beside this file
pytestmark = [pytest.mark.slow, pytest.mark.drawn(one_in=3, whole=True)]
NUM_LINES = 40
DECODE = "tr[data-instance='decode-0']"


@pytest.fixture(scope="module")
def server(chromium: Browser) -> Iterator[Server]:
    """Not started where there is no browser."""
    with serving() as found:
        yield found


@pytest.fixture
def page(browser: Browser, server: Server) -> Browser:
    browser.open(server.url)
    browser.until_text("#state", "● Ready")
    browser.until(lambda: browser.find_all(DECODE))
    return browser


def test_it_shows_every_process_asks_nobody_else_and_complains_of_nothing(
    page: Browser, server: Server
) -> None:
    for each in server.processes():
        row = page.text(f"tr[data-instance='{each['instance_id']}']")
        assert "● up" in row and str(each["pid"]) in row
        assert re.search(r"\b\d+ (s|min)\b", row), "it is up for no longer than this test runs"
    page.until_text("#about", "model demo")
    assert "days" not in page.until_text("#about", "up for")
    # it has looked more than once
    asked_for: list[str] = []

    def has_looked() -> bool:
        asked_for.extend(page.asked_for())
        return asked_for.count(f"{server.url}/metrics") > 2

    page.until(has_looked)
    assert not [url for url in asked_for if not url.startswith(f"{server.url}/")]
    assert page.complaints() == []


def test_the_demo_model_says_what_it_can_do_and_its_examples_are_answered(page: Browser) -> None:
    page.until(lambda: page.find("#small-model").is_displayed())
    assert "It counts, spells" in page.text("#small-model")
    answers = ["7, 8, 9", "k-e-t-t-l-e", "pmal", "Friday, Saturday, Sunday", "17 + 25 = 42"]
    examples = page.find_all("#examples button")
    for example, answer in zip(examples, answers, strict=True):
        page.until(lambda: page.find("#send").is_displayed())
        example.click()
        page.until_text(".message.model .text", answer)


def test_a_chat_is_answered(page: Browser) -> None:
    page.find("#text").send_keys("Count from 7 to 12.", Keys.ENTER)
    page.until_text(".message.model .text", "7, 8, 9")
    figures = page.until_text(".message.model .note", "tokens/s")
    assert figures.startswith("first token after ") and " tokens, " in figures


@contextmanager
def load(server: Server, tier: str, num_clients: int) -> Iterator[None]:
    """Requests, one after the other of each client, until the block ends."""
    is_over = False
    question = {"role": "user", "content": "Count from 7 to 60."}
    body = {"messages": [question], "service_tier": tier, "max_tokens": 600, "ignore_eos": True}

    def ask() -> None:
        while not is_over:
            answer = httpx2.post(f"{server.url}/v1/chat/completions", json=body, timeout=120)
            assert answer.status_code == 200, answer.text

    with ThreadPoolExecutor(num_clients) as pool:
        asking = [pool.submit(ask) for _ in range(num_clients)]
        try:
            yield
        finally:
            is_over = True
    for each in asking:
        each.result()


def test_numbers_move_under_load(page: Browser, server: Server) -> None:
    with load(server, "default", 2), load(server, "flex", 2):
        for tier in ("rt", "be"):
            page.until(lambda tier=tier: page.number(f"#{tier}-rate") > 0)  # type: ignore[misc]
            page.until(lambda tier=tier: page.number(f"#{tier}-running") > 0)  # type: ignore[misc]
            page.until_text(f"#{tier}-ttft", "s / ")
            page.until_text(f"#{tier}-tbt", "s / ")
        page.until_text("#rt-ttft-kept", "%")
        page.until_text("#rt-tbt-kept", "%")
        assert page.text("#be-ttft-kept") == "\N{EN DASH}"
        for tier in ("rt", "be"):
            page.until(lambda tier=tier: len(heights(page, tier)) > 1)  # type: ignore[misc]


def heights(page: Browser, tier: str) -> set[str]:
    """Of the points of its line, those that differ."""
    points = page.find(f".line.{tier}").get_attribute("points") or ""
    return {point.split(",")[1] for point in points.split()}


def test_a_batch_job_makes_progress(page: Browser, server: Server) -> None:
    with client_of(server) as client:
        job = f"li[data-job='{submit(client, NUM_LINES)}']"
    page.until(lambda: page.find_all(job))
    page.until_text(job, f"{NUM_LINES} of {NUM_LINES} completed, 0 failed")
    page.until_text(job, "✓ completed")


def test_it_fits_a_narrow_window(page: Browser) -> None:
    metrics = {"width": 380, "height": 800, "deviceScaleFactor": 1, "mobile": False}
    page.driver.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", metrics)
    try:
        assert page.run("return window.innerWidth") == 380
        assert page.run("return document.documentElement.scrollWidth") <= 380
    finally:
        page.driver.execute_cdp_cmd("Emulation.clearDeviceMetricsOverride", {})


def test_a_process_that_is_killed_shows_and_so_does_its_return(page: Browser) -> None:
    pid = int(page.text(f"{DECODE} td:nth-child(3)").split()[0])
    os.kill(pid, signal.SIGKILL)
    page.until_text(DECODE, "✕ down")
    page.until_text("#state", "no decode process is up")
    page.until_text(".chart .top.rt", "a process was missing for ")
    page.until_text(DECODE, "↻ back")
    page.until_text("#state", "● Ready")
    new = int(page.text(f"{DECODE} td:nth-child(3)").split()[0])
    assert new != pid and f"(was {pid})" in page.text(DECODE)
    assert f"decode-0 is back as pid {new}, after " in page.text("#events")
