"""How long the tests took: `--record=FILE` prints the slowest files and the whole in a table, and fails the run if a
folder took longer than its budget (tests/budgets.py).

A plugin of pytest, which conftest.py registers. `--record FILE` in two words would make pytest take FILE's folder for
the root where FILE exists: this option is not known yet when pytest looks for its root.
"""

from __future__ import annotations

import json
import os
import time
from collections import defaultdict
from collections.abc import Mapping
from pathlib import Path
from statistics import fmean
from typing import Any

import pytest

from tests.budgets import Budget, Excess, Taken, excesses, pace_of
from tests.draws import TURN
from tests.fixed_work import SECONDS, FixedWork

NUM_SLOWEST = 20


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.getgroup("timings").addoption(
        "--record",
        type=Path,
        help="print how long files took, write it here, and hold folders to their budget",
    )


def pytest_configure(config: pytest.Config) -> None:
    if not config.option.record:
        return
    config.pluginmanager.register(FixedWork())
    if not hasattr(config, "workerinput"):
        config.pluginmanager.register(Timings(config.option.record, Budget.read()))


class Timings:
    """Adds up reports. What a test took that ran once more counts from its last run only."""

    def __init__(self, record: Path, budget: Budget) -> None:
        self._record, self._budget = record, budget
        # seconds by file: all, and those of tests that run in turn
        self._seconds: defaultdict[str, float] = defaultdict(float)
        self._turn_seconds: defaultdict[str, float] = defaultdict(float)
        # the turns that were run, by folder
        self._turns: defaultdict[str, set[str]] = defaultdict(set)
        self._pending: defaultdict[str, float] = defaultdict(float)
        self._work: list[float] = []
        self._begun_s = time.monotonic()

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        self._pending[report.nodeid] += report.duration
        # pytest-rerunfailures' word for the end of a run that failed and is followed by another one
        if str(report.outcome) == "rerun":
            del self._pending[report.nodeid]
        elif report.when == "teardown":
            self._count(report)

    def _count(self, report: pytest.TestReport) -> None:
        seconds = self._pending.pop(report.nodeid)
        file = report.nodeid.split("::")[0]
        properties: dict[str, Any] = dict(report.user_properties)
        self._seconds[file] += seconds
        if turn := properties.get(TURN):
            self._turn_seconds[file] += seconds
            self._turns[_folder(file)].add(turn)
        if work_s := properties.get(SECONDS):
            self._work.append(work_s)

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
        taken = self._taken
        found = {
            "cores": os.cpu_count(),
            "whole_s": round(whole_s, 1),
            "fixed_work_s": round(taken.fixed_work_s, 4),
            "folders": _rounded(taken.folders),
            "turns": _rounded(taken.turns),
            "files": _rounded(self._seconds),
        }
        self._record.write_text(json.dumps(found, indent=1) + "\n")

    @property
    def _taken(self) -> Taken:
        others = {
            file: seconds - self._turn_seconds.get(file, 0.0) for file, seconds in self._seconds.items()
        }
        return Taken(
            folders=_by_folder(others),
            turns=_by_folder(self._turn_seconds),
            num_turns={folder: len(turns) for folder, turns in self._turns.items()},
            fixed_work_s=fmean(self._work or [0.0]),
        )

    @property
    def _excesses(self) -> list[Excess]:
        return excesses(self._taken, self._budget)

    def _lines(self, whole_s: float) -> list[str]:
        taken, budget = self._taken, self._budget
        slowest = [f"{seconds:8.1f} s  {name}" for name, seconds in _ranked(self._seconds)[:NUM_SLOWEST]]
        rows = [
            f"{seconds:8.1f} s  of {budget.folders.get(name, 0):4.0f}  tests/{name}"
            for name, seconds in _ranked(taken.folders)
        ]
        turns = [
            f"{seconds:8.1f} s  of {budget.turns.get(name, 0):4.0f}  a turn, {taken.num_turns[name]} run  tests/{name}"
            for name, seconds in _ranked(taken.turns)
        ]
        work = (
            f"{taken.fixed_work_s:8.3f} s  of {budget.fixed_work_s:.3f}  fixed work, {len(self._work)} times"
        )
        pace = f"{pace_of(taken, budget):.2f} times the usual pace"
        whole = f"{whole_s:8.1f} s  in all; {sum(self._seconds.values()):.0f} s of tests, {pace}"
        return [*slowest, "", *rows, *turns, "", work, whole]


def _by_folder(seconds: Mapping[str, float]) -> dict[str, float]:
    found: defaultdict[str, float] = defaultdict(float)
    for file, each in seconds.items():
        found[_folder(file)] += each
    return found


def _folder(file: str) -> str:
    """A file beside the folders counts under `.`."""
    parts = Path(file).parts
    return parts[1] if len(parts) > 2 else "."


def _ranked(seconds: Mapping[str, float]) -> list[tuple[str, float]]:
    return sorted(seconds.items(), key=lambda each: -each[1])


def _rounded(seconds: Mapping[str, float]) -> dict[str, float]:
    return {name: round(each, 2) for name, each in _ranked(seconds)}
