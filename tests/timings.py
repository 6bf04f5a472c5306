"""How long the tests took: `--record=FILE` prints the slowest files and the whole in a table, and fails the run if a
folder took longer than its budget.

The budgets are those of tests/budget.toml. What a folder may take grows with how slow the machine is, which the other
folders show. A slow processor slows folders that compute and not those that wait, so a folder may be slowed as much as
the second most of the others: a budget holds on any machine, and only a folder that grew beside the others is over it.

A plugin of pytest, which conftest.py registers. `--record FILE` in two words would make pytest take FILE's folder for
the root where FILE exists: this option is not known yet when pytest looks for its root.
"""

from __future__ import annotations

import json
import os
import time
import tomllib
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass
from heapq import nlargest
from pathlib import Path
from statistics import median

import pytest

BUDGET = Path(__file__).parent / "budget.toml"
# A budget is the usual time of its folder and half of that.
GENEROSITY = 1.5
NUM_SLOWEST = 20
# A folder with a smaller budget than this, in seconds, says little about the machine's pace.
TELLING_S = 10.0


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.getgroup("timings").addoption(
        "--record",
        type=Path,
        help="print how long files took, write it here, and hold folders to their budget",
    )


def pytest_configure(config: pytest.Config) -> None:
    is_worker = hasattr(config, "workerinput")
    if config.option.record and not is_worker:
        config.pluginmanager.register(Timings(config.option.record, budgets(BUDGET)))


def budgets(path: Path) -> dict[str, float]:
    """Seconds by the name of a folder of tests/, those of its turns included."""
    found = tomllib.loads(path.read_text())
    turns = found.get("turns", {})
    return {name: float(seconds + turns.get(name, 0)) for name, seconds in found["seconds"].items()}


@dataclass(frozen=True)
class Excess:
    """A folder that took longer than it may."""

    folder: str
    seconds: float
    allowed_s: float

    def __str__(self) -> str:
        return (
            f"tests/{self.folder} took {self.seconds:.0f} s and may take {self.allowed_s:.0f}: make it quicker, or "
            "raise its budget in tests/budget.toml and say what the seconds are for"
        )


def pace_of(taken: Mapping[str, float], budget: Mapping[str, float]) -> float:
    """Returns how many times longer than usual this machine takes for the folders that were run, and at least 1."""
    return max(1.0, median(_paces(taken, budget) or [1.0]))


def slow_pace_of(taken: Mapping[str, float], budget: Mapping[str, float]) -> float:
    """The same for the folder that was slowed the second most, or for the only one: more for a slow processor."""
    return max(1.0, min(nlargest(2, _paces(taken, budget)), default=1.0))


def _paces(taken: Mapping[str, float], budget: Mapping[str, float]) -> list[float]:
    return [
        GENEROSITY * seconds / budget[name]
        for name, seconds in taken.items()
        if budget.get(name, 0.0) >= TELLING_S
    ]


def excesses(taken: Mapping[str, float], budget: Mapping[str, float]) -> list[Excess]:
    """Returns the folders that are over their budget; one without a budget may take nothing."""
    # A folder says nothing about the pace that it is held to itself, or one alone would never be over its budget.
    allowed = {
        folder: budget.get(folder, 0.0)
        * slow_pace_of({name: taken[name] for name in taken if name != folder}, budget)
        for folder in taken
    }
    return [
        Excess(folder, seconds, allowed[folder])
        for folder, seconds in sorted(taken.items())
        if seconds > allowed[folder]
    ]


class Timings:
    """Adds up reports. What a test took that ran once more counts from its last run only."""

    def __init__(self, record: Path, budget: Mapping[str, float]) -> None:
        self._record, self._budget = record, budget
        self._seconds: defaultdict[str, float] = defaultdict(float)
        self._pending: defaultdict[str, float] = defaultdict(float)
        self._begun_s = time.monotonic()

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        self._pending[report.nodeid] += report.duration
        # pytest-rerunfailures' word for the end of a run that failed and is followed by another one
        is_run_again = str(report.outcome) == "rerun"
        if report.when == "teardown" or is_run_again:
            seconds = self._pending.pop(report.nodeid)
            self._seconds[report.nodeid.split("::")[0]] += 0.0 if is_run_again else seconds

    @pytest.hookimpl(tryfirst=True)
    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        if self._excesses and session.exitstatus == pytest.ExitCode.OK:
            session.exitstatus = pytest.ExitCode.TESTS_FAILED

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        whole_s = time.monotonic() - self._begun_s
        terminalreporter.section("how long it took")
        for line in self._lines(whole_s):
            terminalreporter.line(line)
        for excess in self._excesses:
            terminalreporter.line(f"OVER BUDGET {excess}", red=True)
        found = {"cores": os.cpu_count(), "whole_s": round(whole_s, 1), "folders": _rounded(self._folders)}
        self._record.write_text(json.dumps(found | {"files": _rounded(self._seconds)}, indent=1) + "\n")

    @property
    def _folders(self) -> dict[str, float]:
        """A file beside the folders counts under `.`."""
        found: defaultdict[str, float] = defaultdict(float)
        for name, seconds in self._seconds.items():
            parts = Path(name).parts
            found[parts[1] if len(parts) > 2 else "."] += seconds
        return found

    @property
    def _excesses(self) -> list[Excess]:
        return excesses(self._folders, self._budget)

    def _lines(self, whole_s: float) -> list[str]:
        folders = self._folders
        slowest = [f"{seconds:8.1f} s  {name}" for name, seconds in _ranked(self._seconds)[:NUM_SLOWEST]]
        rows = [
            f"{seconds:8.1f} s  of {self._budget.get(name, 0):4.0f}  tests/{name}"
            for name, seconds in _ranked(folders)
        ]
        pace = f"{pace_of(folders, self._budget):.2f} times the usual pace"
        return [
            *slowest,
            "",
            *rows,
            "",
            f"{whole_s:8.1f} s  in all; {sum(folders.values()):.0f} s of tests, {pace}",
        ]


def _ranked(seconds: Mapping[str, float]) -> list[tuple[str, float]]:
    return sorted(seconds.items(), key=lambda each: -each[1])


def _rounded(seconds: Mapping[str, float]) -> dict[str, float]:
    return {name: round(each, 2) for name, each in _ranked(seconds)}
