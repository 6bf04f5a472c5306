from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.gateway.page.browser import Browser, browsing


@pytest.fixture(scope="session")
def chromium() -> Iterator[Browser]:
    with browsing() as found:
        yield found


@pytest.fixture
def browser(chromium: Browser) -> Iterator[Browser]:
    """Nothing is left of the tests before, nor of what they heard."""
    chromium.complaints()
    chromium.asked_for()
    yield chromium
    chromium.open("about:blank")
