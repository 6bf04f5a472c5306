"""Jobs against their windows, and pauses of best effort, as the page draws them."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Iterator
from typing import Any

import httpx2
import pytest

from alignedserve.batch.config import BatchConfig
from tests.gateway.batching import CHATS, jsonl, questions
from tests.gateway.page.browser import Browser
from tests.gateway.page.hosted import hosted

MODULE = "jobs.js"


@pytest.mark.slow
def test_a_job_that_runs_says_when_it_is_done_and_how_much_of_its_window_is_gone(browser: Browser) -> None:
    quick = BatchConfig(look_s=0.1, max_num_lines=2)
    with hosted(has_store=True, batches=quick) as host, httpx2.Client(base_url=f"{host.url}/v1") as http:
        host.router.allowed = 0
        file = http.post(
            "/files", data={"purpose": "batch"}, files={"file": ("x", jsonl(questions(400)))}
        ).json()
        asked = {"input_file_id": file["id"], "endpoint": CHATS, "completion_window": "1h"}
        batch = http.post("/batches", json=asked).json()
        job = f"li[data-job='{batch['id']}']"
        browser.open(host.url)
        browser.until(lambda: browser.find_all(f"{job} .estimate"))
        browser.until_text(f"{job} .estimate", "no estimate before one has ended; its window ends in 59 min")
        is_over = threading.Event()

        def answer_now_and_then() -> None:
            """A line each time that some are there."""
            num_said = 0
            while not is_over.wait(0.1):
                for submit in host.router.submitted[num_said : num_said + 1]:
                    num_said += 1
                    host.do(lambda submit=submit: say(submit))  # type: ignore[misc]

        def say(submit: Any) -> None:
            host.router.allowed = None
            host.router._say(submit.request.key)
            host.router.allowed = 0

        answering = threading.Thread(target=answer_now_and_then)
        answering.start()
        try:
            said = browser.until_text(f"{job} .estimate", "done in ")
        finally:
            is_over.set()
            answering.join()
        assert "; its window ends in 5" in said
        (mark,) = browser.find_all(f"{job} .due")
        assert mark.is_displayed()
        assert browser.find(f"{job} .window").get_attribute("data-late") == "false"
        at = http.get(f"/batches/{batch['id']}").json()["alignedserve"]["estimated_completion_at"]
        assert time.time() < at < time.time() + 3600
        # not without a yes
        for is_meant in (False, True):
            browser.find(f"{job} .cancel").click()
            alert = browser.driver.switch_to.alert
            alert.accept() if is_meant else alert.dismiss()
            status = http.get(f"/batches/{batch['id']}").json()["status"]
            assert is_meant or status == "in_progress"
        browser.until_text(job, "cancelled")
        assert not browser.find(f"{job} .window").is_displayed()
        assert not browser.find(f"{job} .cancel").is_displayed()


@pytest.fixture(scope="module")
def page(chromium: Browser) -> Iterator[Browser]:
    """Opened once: modules compute from what they are given."""
    with hosted() as host:
        chromium.open(host.url)
        yield chromium
        chromium.open("about:blank")


def shown(browser: Browser, **job: Any) -> dict[str, Any]:
    """What a row shows of a job, with what is left out as a job that runs has it."""
    whole = {
        "id": "batch_1",
        "status": "in_progress",
        "created_at": 1000,
        "expires_at": 4600,
        "serverTimeMs": 1900_000,
        "request_counts": {"total": 10, "completed": 4, "failed": 1},
        "alignedserve": {"progress": 0.5, "estimated_completion_at": 2800},
    } | job
    script = f"""(() => {{
      const row = m.rowOf({json.dumps(whole)});
      const of = (selector) => row.node.querySelector(selector);
      return {{ text: of(".estimate").textContent, hidden: of(".window").hidden, late: of(".window").dataset.late,
               due: of(".due").style.left, gone: of(".window .fill").style.width, done: of(".fill").style.width }};
    }})()"""
    found: dict[str, Any] = browser.imported(MODULE, script)
    return found


def test_hostile_names_of_jobs_are_text(page: Browser) -> None:
    hostile = "<img src=x onerror=alert(1)></li>"
    job = {
        **{"id": hostile, "status": hostile, "created_at": 1, "expires_at": 2, "serverTimeMs": 0},
        "request_counts": {"total": 1, "completed": 0, "failed": 0},
        "alignedserve": {"progress": 0, "estimated_completion_at": None},
    }
    script = f"""(() => {{
      const row = m.rowOf({json.dumps(job)});
      return {{ id: row.id.textContent, status: row.status.textContent, odd: row.node.querySelectorAll("img").length }};
    }})()"""
    assert page.imported(MODULE, script) == {"id": hostile, "status": f"… {hostile}", "odd": 0}


def test_a_job_against_its_window(page: Browser) -> None:
    found = shown(page)
    assert (found["due"], found["gone"], found["done"], found["late"]) == ("50%", "25%", "50%", "false")
    assert found["text"].startswith("done in 15 min, at ")
    assert found["text"].endswith("; its window ends in 45 min")
    late = shown(page, alignedserve={"progress": 0.1, "estimated_completion_at": 9000})
    assert (late["due"], late["late"]) == ("100%", "true")
    assert late["text"].endswith("; after its window, which ends in 45 min")
    unknown = shown(page, alignedserve={"progress": 0, "estimated_completion_at": None})
    assert unknown["text"] == "no estimate yet; its window ends in 45 min"
    first = shown(
        page,
        request_counts={"total": 10, "completed": 0, "failed": 0},
        alignedserve={"progress": 0, "estimated_completion_at": None},
    )
    assert first["text"].startswith(
        "its first lines are running; no estimate before one has ended; its window"
    )
    assert shown(page, status="completed")["hidden"]


RT = {"tokens": 9, "running": 1, "waiting": 0}


@pytest.mark.parametrize(
    ("be", "is_paused"),
    [
        ([(5, 1, 3), (5, 1, 3)], True),
        ([(5, 0, 3), (5, 0, 1)], True),
        ([(5, 1, 3), (6, 1, 3)], False),
        # There was nothing to be done.
        ([(5, 0, 0), (5, 0, 0)], False),
        ([(5, 0, 0), (5, 1, 0)], False),
        # No router answers: nobody knows.
        ([(5, None, None), (5, None, None)], False),
    ],
)
def test_best_effort_is_paused_when_it_has_requests_and_gets_no_token(
    page: Browser, be: list[tuple[int, int | None, int | None]], is_paused: bool
) -> None:
    def paused(**others: Any) -> bool:
        names = ("tokens", "running", "waiting")
        readings = [
            {"isUp": True, "rt": RT, "be": dict(zip(names, each, strict=True))} | others for each in be
        ]
        return bool(page.imported("reading.js", f"m.isPaused(...{json.dumps(readings)})"))

    assert paused() is is_paused
    assert not paused(isUp=False), "a process was missing"
    assert not paused(rt={"tokens": 0, "running": 0, "waiting": 0}), "real time did not have the machine"


def test_pauses_are_marked_in_the_band_of_best_effort_and_missing_processes_in_both(page: Browser) -> None:
    def reading(at_s: int, rt: int, be: int) -> dict[str, Any]:
        return {
            "atMs": at_s * 1000,
            "isUp": at_s != 8,
            "rt": {"tokens": rt, "running": 1, "waiting": 0},
            "be": {"tokens": be, "running": 1, "waiting": 2},
        }

    # Two pauses, one of two seconds. At 8 s a process is missing: nothing is known of the seconds beside.
    readings = [reading(at, 10 * at, be) for at, be in enumerate([0, 5, 5, 5, 9, 9, 12, 12, 12, 12])]
    readings[7]["be"]["tokens"] = 13
    readings[8]["be"]["tokens"] = readings[9]["be"]["tokens"] = 13
    script = f"""(() => {{
      const chart = new m.Chart();
      chart.show({json.dumps(readings)});
      const of = (name, attribute) =>
        [...chart.node.querySelectorAll(name)].map((rect) => Number(rect.getAttribute(attribute)));
      return {{ widths: of(".pauses rect", "width"), tops: of(".pauses rect", "y"),
               stops: of(".stops rect", "width"), heights: of(".stops rect", "height"),
               since: chart.node.querySelector(".left").textContent,
               said: ["rt", "be"].map((tier) => chart.node.querySelector(`.top.${{tier}}`).textContent) }};
    }})()"""
    found = page.imported("chart.js", script)
    # a minute is 300 wide
    assert found["since"] == "a minute ago"
    assert found["widths"] == pytest.approx([10, 5])
    assert all(top > 50 for top in found["tops"])
    assert (found["stops"], found["heights"]) == (pytest.approx([10]), [100])
    assert found["said"] == [
        "real time, up to 10 tokens/s, a process was missing for 2 s",
        "best effort, up to 10 tokens/s, paused by real time for 3 s",
    ]


@pytest.mark.parametrize(
    ("seconds", "since"), [(59, "a minute ago"), (61, "2 minutes ago"), (121, "5 minutes ago")]
)
def test_the_chart_is_as_wide_as_what_it_shows(page: Browser, seconds: int, since: str) -> None:
    nothing = {"tokens": 0, "running": 0, "waiting": 0}
    readings = [{"atMs": at * 1000, "isUp": True, "rt": nothing, "be": nothing} for at in (0, seconds)]
    script = (
        f"((c) => (c.show({json.dumps(readings)}), c.node.querySelector('.left').textContent))(new m.Chart())"
    )
    assert page.imported("chart.js", script) == since


def test_in_time_counts_open_requests_as_they_are_now(page: Browser) -> None:
    def reading(kept: int, missed: int, kept_so_far: int, missed_so_far: int) -> dict[str, Any]:
        names = ("kept", "missed", "keptSoFar", "missedSoFar")
        counts = (kept, missed, kept_so_far, missed_so_far)
        return {"rt": {name: {"tbt": count} for name, count in zip(names, counts, strict=True)}}

    def share(*readings: dict[str, Any]) -> float | None:
        found: float | None = page.imported(
            "reading.js", f"m.shareKept(...{json.dumps(readings)}, 'rt', 'tbt')"
        )
        return found

    assert share(reading(5, 0, 3, 0), reading(5, 0, 0, 8)) == 0, "eight streams are silent, none has ended"
    assert share(reading(5, 0, 0, 0), reading(7, 1, 1, 0)) == 0.75
    assert share(reading(5, 0, 9, 9), reading(5, 0, 0, 0)) is None
