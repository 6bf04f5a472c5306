"""Draws the screen of `alignedserve top`, for terminals of at least 80 columns and 24 lines."""

from __future__ import annotations

import time
from typing import Any

from rich.console import Group, RenderableType
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from alignedserve.cli.top_reading import TIERS, ReadingHistory
from alignedserve.process.logs import one_line

_BAR_COLUMNS = 14
_NONE = "\N{EN DASH}"
_MARKS = {"completed": "green", "failed": "red", "expired": "red", "cancelled": "dim"}
_COLOURS = {"rt": "blue", "be": "yellow"}
_OPEN = ("validating", "in_progress", "finalizing", "cancelling")


def screen(history: ReadingHistory, url: str, problem: str | None, num_lines: int) -> RenderableType:
    """Returns the screen. `problem` is the error of the last update, if it failed."""
    if not history.readings:
        return Text(
            f"{url}: {one_line(problem or 'connecting …')}\n\nq: quit", style="red" if problem else ""
        )
    # Lines for the state, the classes (3), two table heads, two blank lines, and "more".
    num_free = num_lines - 1 - 3 - 2 - 2 - 1
    num_processes = min(len(history.latest.processes), max(1, num_free // 2))
    processes, jobs = _processes(history, num_processes), _jobs(history, max(1, num_free - num_processes))
    return Group(_state(history, url, problem), _classes(history), Text(), processes, Text(), jobs)


def _state(history: ReadingHistory, url: str, problem: str | None) -> Text:
    status = one_line(history.latest.status)
    text = Text(no_wrap=True, overflow="ellipsis")
    if problem:
        text.append(f"✕ away: {one_line(problem)}", style="bold red")
    else:
        text.append(f"● {status}", style="bold green" if status == "ok" else "bold yellow")
    text.append(f"  {url}  {time.strftime('%H:%M:%S')}  q: quit", style="dim")
    return text


def _table(*columns: str) -> Table:
    table = Table(box=None, expand=True, pad_edge=False, header_style="dim")
    for number, column in enumerate(columns):
        table.add_column(column, justify="left" if not number else "right", no_wrap=True, overflow="ellipsis")
    return table


def _classes(history: ReadingHistory) -> Table:
    table = _table("class", "tokens/s", "running", "waiting", "TTFT p50", "TTFT p99")
    for tier, name in TIERS.items():
        found = history.latest.tiers[tier]
        table.add_row(
            Text(name, style=_COLOURS[tier]),
            f"{history.tokens_per_s(tier):,.0f}",
            f"{found.num_running:.0f}",
            f"{found.num_waiting:.0f}",
            _duration(history.first_token_s(tier, 0.5)),
            _duration(history.first_token_s(tier, 0.99)),
        )
    return table


def _processes(history: ReadingHistory, count: int) -> Table:
    table = _table("process", "pid", "state", "requests", "KV in use")
    processes = history.latest.processes
    for each in processes[:count]:
        used, free = each["blocks"]["used"], each["blocks"]["free"]
        name = each["instance_id"] + (f" @{each['island']}" if each["island"] else "")
        table.add_row(
            Text(one_line(name)),
            str(each["pid"]),
            Text(one_line(each["state"]), style="green" if each["state"] == "up" else "bold red"),
            str(sum(each["requests"].values())),
            f"{used / (used + free):.0%}" if used + free else _NONE,
        )
    if more := len(processes) - count:
        table.add_row(Text(f"and {more} more", style="dim"))
    return table


def _jobs(history: ReadingHistory, count: int) -> RenderableType:
    jobs = history.latest.jobs
    if not jobs:
        return Text("no batch jobs" if jobs is not None else "no store: no batch jobs", style="dim")
    table = _table("job", "status", "lines", "", "done in", "window ends in")
    # Open jobs first, and the newest first within both parts.
    for job in sorted(jobs, key=lambda job: job["status"] not in _OPEN)[:count]:
        table.add_row(*_job_row(job))
    return table


def _job_row(job: dict[str, Any]) -> list[RenderableType]:
    counts, ours, now = job["request_counts"], job["alignedserve"], time.time()
    status = Text(one_line(job["status"]).replace("_", " "), style=_MARKS.get(job["status"], ""))
    done = counts["completed"] + counts["failed"]
    due = ours["estimated_completion_at"]
    is_open = job["status"] in _OPEN
    is_late = due is not None and due > job["expires_at"]
    return [
        # All ids begin alike, so the end is shown.
        Text(one_line(f"…{job['id'][-8:]}")),
        status,
        f"{done:,}/{counts['total']:,}",
        ProgressBar(total=1.0, completed=ours["progress"], width=_BAR_COLUMNS),
        Text(_age(due - now), style="bold red" if is_late else "") if due is not None else _NONE,
        _age(job["expires_at"] - now) if is_open else _NONE,
    ]


def _duration(seconds: float | None) -> str:
    if seconds is None:
        return _NONE
    return f"{seconds * 1000:.0f} ms" if seconds < 1 else f"{seconds:.1f} s"


def _age(seconds: float) -> str:
    seconds = max(0, round(seconds))
    if seconds < 60:
        return f"{seconds} s"
    minutes = seconds // 60
    return f"{minutes} min" if minutes < 60 else f"{minutes // 60} h {minutes % 60} min"
