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
    """A browser without anything left over from earlier tests."""
    chromium.complaints()
    chromium.asked_for()
    yield chromium
    chromium.open("about:blank")
