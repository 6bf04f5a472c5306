"""How long the tests took: `--record=FILE` prints the slowest files and the whole in a table, and fails the run if a
folder took longer than its budget (tests/budgets.py).

A machine that others share is slow for minutes, and then a folder that has not grown may take twice as long as usual.
As a live test that fails runs once more, so do the tests of a folder that took too long. They fail the run if they take
longer than they may in the first run again. What that run has built and read stays there for the second one.

A plugin of pytest, which conftest.py registers. `--record FILE` in two words would make pytest take FILE's folder for
the root where FILE exists: this option is not known yet when pytest looks for its root.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections import defaultdict
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path
from statistics import fmean
from typing import Any

import pytest

from tests.budgets import BUDGET, Budget, Excess, Taken, excesses, pace_of
from tests.draws import TURN
from tests.fixed_work import SECONDS, FixedWork

NUM_SLOWEST = 20
# The tests of the two largest folders take less on a slow machine, and CI ends in time.
LONGEST_SECOND_RUN_S = 1200.0
# Shells make background commands ignore SIGINT.
INTERRUPTIBLE = ("env", "--default-signal=INT")


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("timings")
    group.addoption(
        "--record",
        type=Path,
        help="print how long files took, write it here, and hold folders to their budget",
    )
    group.addoption("--budget", type=Path, default=BUDGET, help="the file with the budgets")
    group.addoption(
        "--second-run",
        action="store_true",
        help="write down how long folders took, and hold them to no budget",
    )


def pytest_configure(config: pytest.Config) -> None:
    if not config.option.record:
        return
    config.pluginmanager.register(FixedWork())
    if not hasattr(config, "workerinput"):
        config.pluginmanager.register(Timings(config, Budget.read(config.option.budget)))


class Timings:
    """Adds up reports. What a test took that ran once more counts from its last run only."""

    def __init__(self, config: pytest.Config, budget: Budget) -> None:
        self._config, self._budget = config, budget
        # seconds by file: all, and those of tests that run in turn
        self._seconds: defaultdict[str, float] = defaultdict(float)
        self._turn_seconds: defaultdict[str, float] = defaultdict(float)
        # the turns that were run, by folder
        self._turns: defaultdict[str, set[str]] = defaultdict(set)
        # seconds of tests that have not ended, and tests that will run once more
        self._pending: defaultdict[str, float] = defaultdict(float)
        self._repeated: set[str] = set()
        self._work: list[float] = []
        self._begun_s = time.monotonic()
        # what fails the run, and what the summary ends with
        self._excesses: list[Excess] = []
        self._last_lines: list[str] = []

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.when == "setup":
            self._pending.pop(report.nodeid, None)
            self._repeated.discard(report.nodeid)
        self._pending[report.nodeid] += report.duration
        # pytest-rerunfailures' word for what failed in a run that is followed by another one
        if str(report.outcome) == "rerun":
            self._repeated.add(report.nodeid)
        elif report.when == "teardown" and report.nodeid not in self._repeated:
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
        self._whole_s = time.monotonic() - self._begun_s
        self._excesses = excesses(self._taken, self._budget)
        if session.exitstatus == pytest.ExitCode.OK and not self._config.option.second_run:
            self._time_again()
            if self._excesses:
                session.exitstatus = pytest.ExitCode.TESTS_FAILED
        self._last_lines += [f"OVER BUDGET {excess}" for excess in self._excesses]

    @pytest.hookimpl(hookwrapper=True)
    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> Iterator[None]:
        """Prints the table before what others say, and what is over its budget after it."""
        terminalreporter.section("how long it took")
        for line in self._lines(self._whole_s):
            terminalreporter.line(line)
        taken = self._taken
        found = {
            "cores": os.cpu_count(),
            "whole_s": round(self._whole_s, 1),
            "fixed_work_s": round(taken.fixed_work_s, 4),
            "folders": _rounded(taken.folders),
            "turns": _rounded(taken.turns),
            "files": _rounded(self._seconds),
        }
        self._config.option.record.write_text(json.dumps(found, indent=1) + "\n")
        yield
        for line in self._last_lines:
            terminalreporter.line(line, red=bool(self._excesses))

    def _time_again(self) -> None:
        """Runs the tests of folders that are over their budget once more, and excuses those that are within it then.
        The budget is that of the first run, whose pace more folders tell.

        A second run in which a test fails, or that takes far too long, excuses none.
        """
        again = [each for each in self._excesses if each.allowed_s > 0]
        if not again:
            return
        option, folders = self._config.option, {each.folder for each in again}
        record = option.record.with_name(f"{option.record.name}.again")
        with subprocess.Popen(
            self._second_run(folders, record),
            cwd=self._config.invocation_params.dir,
            stdout=subprocess.PIPE,
            text=True,
            start_new_session=True,
        ) as process:
            try:
                said, _ = process.communicate(timeout=LONGEST_SECOND_RUN_S)
            except subprocess.TimeoutExpired:
                said = f"{end(process)}\nit was stopped after {LONGEST_SECOND_RUN_S:g} s"
            except BaseException:
                end(process)
                raise
        if process.returncode != pytest.ExitCode.OK:
            self._last_lines += ["the second run of what was over its budget failed:", said[-2000:]]
            return
        found = json.loads(record.read_text())
        record.unlink()
        for each in again:
            if found["turns" if each.is_of_turns else "folders"][each.folder] <= each.allowed_s:
                self._excesses.remove(each)
                self._last_lines.append(
                    f"{each.tests} took {each.seconds:.0f} s, and was quick enough in a second run"
                )

    def _second_run(self, folders: Collection[str], record: Path) -> list[str]:
        """Returns the command that runs the same tests of these folders in the same way."""
        option = self._config.option
        left_out = {*self._config.args, "--record", str(option.record), f"--record={option.record}"}
        given = [str(each) for each in self._config.invocation_params.args if str(each) not in left_out]
        draw = [f"--draw={option.draw}"] if getattr(option, "draw", None) else []
        files = [str(self._config.rootpath / file) for file in self._seconds if _folder(file) in folders]
        return [
            *INTERRUPTIBLE,
            sys.executable,
            "-m",
            "pytest",
            *given,
            *draw,
            f"--record={record}",
            "--second-run",
            *files,
        ]

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


def end(process: subprocess.Popen[str]) -> str:
    """Lets its tests end the processes that they have started, for half a minute. Returns its output."""
    os.killpg(process.pid, signal.SIGINT)
    try:
        return process.communicate(timeout=30.0)[0]
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        return "its output did not end after SIGINT, and it was killed"


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
