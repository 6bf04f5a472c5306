"""The progress shown during a simulation without a terminal."""

from __future__ import annotations

import queue
import sys
import threading

import pytest

from alignedserve.cli.simulate.progress import EVERY_S, ProgressLines, shown

LIMIT_S = 30.0


def is_running() -> bool:
    """Returns whether a thread prints lines."""
    return any(thread.name == "progress" for thread in threading.enumerate())


def test_there_is_a_line_now_and_then_also_while_no_request_ends() -> None:
    said: queue.Queue[str] = queue.Queue()
    lines = ProgressLines(said.put, every_s=0.001)
    lines.begin("fcfs 1+1", 40)
    for _ in range(3):
        lines.advance()
    lines.start()
    try:
        for _ in range(2):
            assert said.get(timeout=LIMIT_S) == "fcfs 1+1: 3 of 40 requests have ended"
        lines.begin("aligned 1+1", 50)
        while (line := said.get(timeout=LIMIT_S)).startswith("fcfs"):
            pass
        assert line == "aligned 1+1: 0 of 50 requests have ended"
    finally:
        lines.stop()
    while not said.empty():
        said.get()
    lines.advance()
    # Its thread has ended.
    assert not is_running() and said.empty()


def test_a_rate_that_was_tried_is_a_line_at_once() -> None:
    said: list[str] = []
    ProgressLines(said.append).tried("fcfs 1+1", 3.25, 0.955)
    assert said == ["fcfs 1+1: 3.25 requests/s, 95.5 % in time"]


def test_lines_are_for_where_there_is_no_terminal(capsys: pytest.CaptureFixture[str]) -> None:
    assert not sys.stderr.isatty() and EVERY_S >= 5
    with shown() as progress:
        assert isinstance(progress, ProgressLines) and is_running()
        progress.tried("fcfs 1+1", 2.0, 1.0)
    assert not is_running()
    assert capsys.readouterr() == ("", "fcfs 1+1: 2 requests/s, 100.0 % in time\n")
