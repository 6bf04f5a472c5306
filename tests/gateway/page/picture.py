"""Takes the picture of the README, docs/page.png: the page under load, just after a decode process was killed.

`make page-picture` runs it. It starts a server of its own, and takes two minutes.
"""

from __future__ import annotations

import os
import signal
import time

from tests.doc_sessions import ROOT
from tests.gateway.page.browser import Browser, browsing
from tests.gateway.page.test_live import DECODE, load
from tests.launch.batch_job import client_of, submit
from tests.launch.server import serving

WIDTH = 1280
JOBS = (20, 50_000)
# Seconds under load before the process is killed and after it is back: enough for the chart to show both.
BEFORE_S = 25.0
AFTER_S = 6.0


def take(page: Browser) -> None:
    height = page.run("return document.documentElement.scrollHeight")
    page.driver.execute_cdp_cmd(
        "Emulation.setDeviceMetricsOverride",
        {"width": WIDTH, "height": height, "deviceScaleFactor": 1, "mobile": False},
    )
    page.driver.save_screenshot(str(ROOT / "docs/page.png"))


def main() -> None:
    with browsing(WIDTH) as page, serving() as server:
        page.open(server.url)
        page.until_text("#state", "● Ready")
        with client_of(server) as client:
            for num_lines in JOBS:
                submit(client, num_lines)
        page.find("#examples button").click()
        with load(server, "default", 4):
            page.until(lambda: page.number("#rt-rate") > 0 and page.number("#be-rate") > 0)
            time.sleep(BEFORE_S)
            os.kill(int(page.text(f"{DECODE} td:nth-child(3)").split()[0]), signal.SIGKILL)
            page.until_text(DECODE, "↻ back")
            time.sleep(AFTER_S)
            take(page)


if __name__ == "__main__":
    main()
