"""`alignedserve top` in a pseudo-terminal of 80 by 24, at a gateway with a real Redis and a scripted island; and what
two looks say about the time between them."""

from __future__ import annotations

import asyncio
import json
import re
import subprocess
import sys
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, HTTPServer
from typing import Any

import httpx2
import pytest

from alignedserve.cli.top_reading import Away, Reading, ReadingHistory, Tier, look, quantile
from alignedserve.cli.top_view import screen
from alignedserve.gateway.http.keys import owners_of
from tests.cli.terminal import CTRL_C, Terminal
from tests.gateway.batching import System, play, questions
from tests.gateway.served import play as play_served
from tests.gateway.served import served

SIZE = (24, 80)
ESCAPE = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]")


def frames(shown: str) -> list[list[str]]:
    """What was drawn at a time, as lines without colours."""
    return [ESCAPE.sub("", frame).rstrip("\r\n").split("\r\n") for frame in shown.split("\x1b[H")[1:]]


def test_it_shows_classes_processes_and_jobs_and_q_ends_it() -> None:
    async def scenario(at: System) -> None:
        at.router.allowed = 0
        batch = await at.gateway.submit(questions(7))
        await at.gateway.until(batch, "in_progress")
        await asyncio.to_thread(watched, str(at.gateway.http.base_url), batch.id)

    play(scenario)


def watched(url: str, batch_id: str) -> None:
    terminal = Terminal("top", "--url", url, "--every", "0.2", term="xterm", size=SIZE)
    terminal.until(batch_id[-8:])
    terminal.until("in progress")
    # It is 59 min at the start, and less on a slow machine.
    assert any(re.search(r"\b5\d$", terminal.until(" min")) for _ in range(100))
    terminal.type("q")
    assert terminal.end() == 0
    assert terminal.shown.rstrip().endswith("\x1b[?25h") or "\x1b[?1049l" in terminal.shown
    whole = [frame for frame in frames(terminal.shown) if any(batch_id[-8:] in line for line in frame)]
    for frame in whole:
        assert len(frame) <= 24 and all(len(line) <= 80 for line in frame), frame
    text = "\n".join(whole[0])
    for part in ("real time", "best effort", "TTFT p99", "decode-0", "kvpool-0", "0/7", "KV in use"):
        assert part in text, text


def test_ctrl_c_ends_it_and_leaves_the_terminal_as_it_was() -> None:
    terminal = Terminal("top", "--url", "http://127.0.0.1:9", "--every", "0.2", term="xterm", size=SIZE)
    terminal.until("q: quit")
    terminal.until("Connection refused")
    terminal.type(CTRL_C)
    assert terminal.end(again=CTRL_C) == 0
    assert terminal.shown.count("\x1b[?1049h") == terminal.shown.count("\x1b[?1049l") == 1


def test_it_sends_a_key_and_says_that_one_is_wrong() -> None:
    def watch(url: str) -> None:
        wrong = Terminal("top", "--url", url, "--api-key", "wrong", term="xterm", size=SIZE)
        wrong.until("API key")
        wrong.type("q")
        assert wrong.end() == 0
        right = Terminal("top", "--url", url, "--api-key", "right", term="xterm", size=SIZE)
        right.until("best effort")
        right.until("no store")
        right.type("q")
        assert right.end() == 0

    async def scenario() -> None:
        async with served(key_owners=owners_of(["right"], None)) as at:
            await asyncio.to_thread(watch, str(at.http.base_url))

    play_served(scenario)


def test_it_needs_a_terminal() -> None:
    command = [sys.executable, "-m", "alignedserve", "top"]
    found = subprocess.run(command, capture_output=True, text=True, stdin=subprocess.DEVNULL, timeout=120)
    assert found.returncode == 2 and "needs a terminal" in found.stderr


# ---- what it computes ----


def reading(
    at_s: float, num_tokens: float, *counts: float, num_processes: int = 0, num_jobs: int = 0
) -> Reading:
    bounds = (0.1, 0.2, float("inf"))
    tier = Tier(num_tokens, 1, 2, list(zip(bounds, counts or (0.0, 0.0, 0.0), strict=True)))
    process = {
        **{"instance_id": "decode-0", "island": 0, "pid": 1, "state": "up", "requests": {"running": 1}},
        "blocks": {"used": 1, "free": 1},
    }
    job = {
        **{"id": "batch_" + "0" * 24, "status": "in_progress", "expires_at": 0},
        "request_counts": {"total": 50_000, "completed": 12_345, "failed": 1},
        "alignedserve": {"progress": 0.5, "estimated_completion_at": 9},
    }
    return Reading(at_s, "ok", {"rt": tier, "be": tier}, [process] * num_processes, [job] * num_jobs)


def test_rates_and_times_are_of_the_time_between_two_looks() -> None:
    history = ReadingHistory()
    for at in range(10):
        history.add(reading(float(at), 30.0 * at, 0.0, float(at), float(at)))
    assert history.tokens_per_s("rt") == pytest.approx(30)
    assert history.first_token_s("be", 0.5) == pytest.approx(0.15)
    # The gateway was started again.
    history.add(reading(10.0, 0.0))
    assert history.tokens_per_s("rt") == 0 and history.first_token_s("be", 0.5) is None
    history.add(reading(11.0, 5.0))
    assert history.tokens_per_s("rt") == pytest.approx(5)
    for at in range(12, 400):
        history.add(reading(float(at), 5.0 * at))
    assert len(history.readings) <= 121


def test_buckets_that_were_not_there_before_count_from_nothing() -> None:
    history = ReadingHistory()
    history.add(reading(0.0, 0.0))
    history.readings[0].tiers["rt"].first_token.clear()
    history.add(reading(1.0, 1.0, 0.0, 4.0, 4.0))
    assert history.first_token_s("rt", 0.5) == pytest.approx(0.15)


# What another server, or a hostile one, may answer.
OTHERS: list[Any] = [[], "x", 5, None, {"processes": [{}]}, {"processes": {"a": 1}}, {"data": [{"id": 1}]}]
OTHERS += [{"processes": [{"blocks": 5}]}, {"data": [{"request_counts": {"completed": float("inf")}}]}]


@pytest.mark.parametrize("body", OTHERS)
@pytest.mark.parametrize("path", ["/health", "/v1/cluster", "/v1/batches"])
def test_what_is_no_answer_of_this_server_is_told_in_a_line(path: str, body: Any) -> None:
    answers = {
        "/health": {"status": "ok"},
        "/metrics": "",
        "/v1/cluster": {"processes": []},
        "/v1/batches": {"data": []},
    }
    answers[path] = body
    no_answer = pytest.raises(Away, match="the server is not AlignedServe")
    with answering(answers) as url, httpx2.Client(base_url=url) as http, no_answer:
        look(http)


@contextmanager
def answering(answers: Mapping[str, Any]) -> Iterator[str]:
    class Answers(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            found = answers[self.path.partition("?")[0]]
            body = (found if self.path == "/metrics" else json.dumps(found)).encode()
            self.send_response(200)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, format: str, *args: Any) -> None:
            return

    with HTTPServer(("127.0.0.1", 0), Answers) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.01,))
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_port}"
        finally:
            server.shutdown()
            thread.join()


HOSTILE = "\x1b[2J\x1b]0;x\x07\u202ex\r\n\x9b31m[bold red]x[/]" + "w" * 5000


def test_hostile_names_stay_in_their_lines() -> None:
    from rich.console import Console

    history = ReadingHistory()
    history.add(reading(0.0, 1e6, num_processes=2, num_jobs=2))
    for process in history.latest.processes:
        process.update(instance_id=HOSTILE, state=HOSTILE)
    for job in history.latest.jobs or []:
        job.update(id=HOSTILE[:40], status=HOSTILE)
    history.readings = [replace(history.latest, status=HOSTILE)]
    console = Console(width=80, height=24, record=True, file=open("/dev/null", "w"))  # noqa: SIM115
    console.print(screen(history, "http://127.0.0.1:8000", HOSTILE, 24))
    text = console.export_text()
    lines = text.rstrip("\n").split("\n")
    assert len(lines) <= 24 and all(len(line) <= 80 for line in lines)
    assert all(each.isprintable() for line in lines for each in line)
    assert "[bold red]" in text


def test_quantiles_are_those_of_prometheus() -> None:
    assert quantile(0.5, []) is None
    assert quantile(0.5, [(1.0, 0.0), (float("inf"), 0.0)]) is None
    assert quantile(0.5, [(1.0, 4.0), (2.0, 8.0), (float("inf"), 8.0)]) == pytest.approx(1.0)
    assert quantile(0.75, [(1.0, 4.0), (2.0, 8.0), (float("inf"), 8.0)]) == pytest.approx(1.5)
    assert quantile(0.99, [(1.0, 4.0), (float("inf"), 8.0)]) == 1.0


@pytest.mark.parametrize(("num_processes", "num_jobs"), [(0, 0), (4, 20), (30, 0), (30, 20)])
@pytest.mark.parametrize("size", [(24, 80), (60, 200)])
def test_it_fits(num_processes: int, num_jobs: int, size: tuple[int, int]) -> None:
    from rich.console import Console

    history = ReadingHistory()
    history.add(reading(0.0, 1e6, num_processes=num_processes, num_jobs=num_jobs))
    console = Console(width=size[1], height=size[0], record=True, file=open("/dev/null", "w"))  # noqa: SIM115
    console.print(screen(history, "http://127.0.0.1:8000", "an error " * 30, size[0]))
    lines = console.export_text().rstrip("\n").split("\n")
    assert len(lines) <= size[0] and all(len(line) <= size[1] for line in lines)
    text = "\n".join(lines)
    assert ("…00000000" in text) == bool(num_jobs)
    if num_jobs:
        assert "12,346/50,000" in text
    if num_processes == 30 and size[0] == 24:
        assert "more" in text
