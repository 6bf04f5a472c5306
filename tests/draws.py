"""Which cases of a large matrix a run has: a share of them, drawn by the commit's number, so that all of them are run
over some days of commits.

    @pytest.mark.drawn(one_in=4)               a quarter of the function's cases that have this mark
    @pytest.mark.drawn(one_in=4, whole=True)   all tests of the file that have this mark, in a quarter of the runs
    @pytest.mark.drawn(one_in=8, turn=3)       these tests, in an eighth of the runs: those in which it is their turn

Tests that take minutes have different turns among the same number, so that no run has two of them.

The mark may stand on single cases: `pytest.param(..., marks=pytest.mark.drawn(one_in=4))`. `--draw NUMBER` repeats the
draw of another run, `--everything` runs all cases, and so does naming a test on the command line (`FILE::TEST`).

A plugin of pytest, which conftest.py registers.
"""

from __future__ import annotations

import subprocess
from collections import Counter
from pathlib import Path
from random import Random

import pytest


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("draws")
    group.addoption(
        "--draw", metavar="NUMBER", help="draw the cases of this run [default: the commit's number]"
    )
    group.addoption("--everything", action="store_true", help="run all cases of what is otherwise drawn")


def pytest_configure(config: pytest.Config) -> None:
    """The processes that run tests get the number of the one that hands these out."""
    config.addinivalue_line(
        "markers", "drawn(one_in, whole=False, turn=None): a share is run each time; see tests/draws.py"
    )
    if config.option.draw is None:
        config.option.draw = commit_of(config.rootpath)


def commit_of(repository: Path) -> str:
    """Returns the commit's number; "0" outside a repository."""
    command = ["git", "-C", str(repository), "rev-parse", "--short=7", "HEAD"]
    done = subprocess.run(command, capture_output=True, text=True)
    return done.stdout.strip() if done.returncode == 0 else "0"


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """How to repeat this draw, if anything was drawn."""
    config = terminalreporter.config
    if not config.option.everything and terminalreporter.stats.get("deselected"):
        terminalreporter.line(
            f"draw {config.option.draw}: the same cases again by --draw {config.option.draw}"
        )


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Takes the cases out of `items` that this run's number does not draw."""
    if config.option.everything or any("::" in each for each in config.args):
        return
    seen: Counter[str] = Counter()
    drawn, others = list[pytest.Item](), list[pytest.Item]()
    for item in items:
        (drawn if _is_drawn(item, config.option.draw, seen) else others).append(item)
    items[:] = drawn
    if others:
        config.hook.pytest_deselected(items=others)


def _is_drawn(item: pytest.Item, number: str, seen: Counter[str]) -> bool:
    """`seen`: how many cases of each function came before; this one is added."""
    mark = item.get_closest_marker("drawn")
    if mark is None:
        return True
    one_in, whole = int(mark.kwargs["one_in"]), mark.kwargs.get("whole", False)
    if (turn := mark.kwargs.get("turn")) is not None:
        return Random(number).randrange(one_in) == int(turn)
    place = item.nodeid.split("::")[0] if whole else item.nodeid.split("[")[0]
    # Functions are out of step with each other, or a run would have the first case of each.
    offset = Random(f"{number} {place}").randrange(one_in)
    if not whole:
        offset += seen[place]
        seen[place] += 1
    return offset % one_in == 0
