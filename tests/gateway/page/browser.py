"""The page in a real browser (headless Chromium), with its requests and the console's messages."""

from __future__ import annotations

import json
import os
import shutil
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

import pytest
from selenium import webdriver
from selenium.common.exceptions import StaleElementReferenceException
from selenium.webdriver.common.by import By
from selenium.webdriver.remote.webelement import WebElement

Result = TypeVar("Result")

# Far more than anything takes on two idle cores, because tests share theirs.
TIMEOUT_S = 90.0
LOOK_S = 0.05


class Browser:
    def __init__(self, driver: webdriver.Chrome) -> None:
        self.driver = driver

    def open(self, url: str) -> None:
        self.driver.get(url)

    def find(self, selector: str) -> WebElement:
        return self.driver.find_element(By.CSS_SELECTOR, selector)

    def find_all(self, selector: str) -> list[WebElement]:
        return self.driver.find_elements(By.CSS_SELECTOR, selector)

    def text(self, selector: str) -> str:
        return self.find(selector).text

    def number(self, selector: str) -> float:
        """Returns the number that the text begins with, or 0 for a dash."""
        return float(self.text(selector).split()[0].replace(",", "").replace("\N{EN DASH}", "0"))

    def until(self, get: Callable[[], Result]) -> Result:
        """Returns the result as soon as it is true."""
        deadline = time.monotonic() + TIMEOUT_S
        while True:
            try:
                if found := get():
                    return found
            except StaleElementReferenceException:
                # It was replaced between two checks.
                pass
            assert time.monotonic() < deadline, f"never so:\n{self.text('body')}\n{self.complaints()}"
            time.sleep(LOOK_S)

    def until_text(self, selector: str, part: str) -> str:
        self.until(lambda: part in self.text(selector))
        return self.text(selector)

    def run(self, script: str, *args: Any) -> Any:
        return self.driver.execute_script(script, *args)

    def imported(self, module: str, expression: str) -> Any:
        """Returns the value of `expression`, in which `m` is one of the page's modules."""
        script = f"const done = arguments[0]; import('/page/{module}').then((m) => done({expression}))"
        return self.driver.execute_async_script(script)

    def complaints(self) -> list[str]:
        """Returns the console's messages since the last call."""
        return [str(entry["message"]) for entry in self._log("browser")]

    def asked_for(self) -> list[str]:
        """Returns all requested addresses since the last call."""
        events = [json.loads(entry["message"])["message"] for entry in self._log("performance")]
        return [
            each["params"]["request"]["url"]
            for each in events
            if each["method"] == "Network.requestWillBeSent"
        ]

    def _log(self, kind: str) -> list[dict[str, Any]]:
        found: list[dict[str, Any]] = self.driver.get_log(kind)  # type: ignore[no-untyped-call]
        return found


@contextmanager
def browsing(width: int = 1280, *arguments: str) -> Iterator[Browser]:
    """`arguments`: Chromium's. Skips the test without Chromium, except in CI."""
    chromium, chromedriver = shutil.which("chromium"), shutil.which("chromedriver")
    if not (chromium and chromedriver):
        message = "needs Chromium: apt-get install --no-install-recommends chromium chromium-driver"
        if os.environ.get("CI"):
            pytest.fail(message)
        pytest.skip(message)
    options = webdriver.ChromeOptions()
    options.binary_location = chromium
    for argument in (
        "--headless=new",
        "--no-sandbox",
        "--disable-dev-shm-usage",
        f"--window-size={width},1000",
        *arguments,
    ):
        options.add_argument(argument)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL", "performance": "ALL"})
    driver = webdriver.Chrome(options, webdriver.ChromeService(chromedriver))
    try:
        driver.set_script_timeout(TIMEOUT_S)
        yield Browser(driver)
    finally:
        driver.quit()
