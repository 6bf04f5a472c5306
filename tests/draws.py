"""Draws which cases of a large matrix a run has. The commit's number determines the share, so all cases are run over
some days of commits.

    @pytest.mark.drawn(one_in=4)               a quarter of the function's cases with this mark
    @pytest.mark.drawn(one_in=4, whole=True)   all tests in the file with this mark, in a quarter of the runs
    @pytest.mark.drawn(one_in=8, turn=3)       these tests, in the eighth of the runs that is their turn
    @pytest.mark.drawn(one_in=8, turn=3, alone=True)    the same, for what takes minutes
    @pytest.mark.drawn(one_in=8, turn=3, due=True)      the same, which this time is run in any case

A function's share has each value of its parameters about equally often, and so at least once if it has enough cases. No
two files may have the same turn of the same number with `alone`, so that no run has both.

Single cases can have the mark: `pytest.param(..., marks=pytest.mark.drawn(one_in=4))`. `--draw NUMBER` repeats the draw
of another run. `--everything` runs all cases, and so does naming a test on the command line (`FILE::TEST`).

`--few N` then runs at most N of the remaining cases of each function, drawn in the same way. `make test` uses it.

This is a pytest plugin, which conftest.py registers.
"""

from __future__ import annotations

import subprocess
from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import Any

import pytest

# The number of a tree with an unknown commit.
UNKNOWN = "0"
# The property of a test's reports that names its turn.
TURN = "turn"


@dataclass(frozen=True, kw_only=True)
class Share:
    """A mark's arguments. Raises ValueError if they are invalid."""

    one_in: int
    whole: bool = False
    turn: int | None = None
    alone: bool = False
    due: bool = False

    def __post_init__(self) -> None:
        if self.one_in < 1:
            raise ValueError(f"one_in={self.one_in}: must be at least 1")
        if self.turn is None and (self.alone or self.due):
            raise ValueError(f"{'alone' if self.alone else 'due'}: needs a turn")
        if self.turn is not None and not 0 <= self.turn < self.one_in:
            raise ValueError(
                f"turn={self.turn}: must be from 0 to {self.one_in - 1} with one_in={self.one_in}"
            )


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("draws")
    group.addoption(
        "--draw", metavar="NUMBER", help="draw the cases of this run [default: the commit's number]"
    )
    group.addoption("--everything", action="store_true", help="run all cases of what is otherwise drawn")
    group.addoption("--few", type=int, metavar="N", help="run at most N cases of each function")


# An error that an xdist worker has found.
_ERROR = pytest.StashKey[ValueError]()


def pytest_configure(config: pytest.Config) -> None:
    """xdist's workers get the number from the process that starts them, because there may be a new commit meanwhile."""
    config.addinivalue_line(
        "markers",
        "drawn(one_in, whole=False, turn=None, alone=False, due=False): a share is run each time; see tests/draws.py",
    )
    if (given := getattr(config, "workerinput", {}).get("draw")) is not None:
        config.option.draw = given
    elif config.option.draw is None:
        config.option.draw = commit_of(config.rootpath)
    if config.option.few is not None:
        config.pluginmanager.register(Few(config.option.few))


@pytest.hookimpl(optionalhook=True)
def pytest_configure_node(node: Any) -> None:
    """`node`: an xdist worker that is about to start."""
    node.workerinput["draw"] = node.config.option.draw


def commit_of(repository: Path) -> str:
    """Returns the commit's number. Returns UNKNOWN outside a repository, in one that git distrusts, and without git."""
    command = ["git", "-C", str(repository), "rev-parse", "--short=7", "HEAD"]
    try:
        done = subprocess.run(command, capture_output=True, text=True)
    except OSError:
        return UNKNOWN
    return done.stdout.strip() if done.returncode == 0 else UNKNOWN


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Prints how to repeat this draw, regardless of which process drew and whether anything was left out."""
    config = terminalreporter.config
    if not _draws(config):
        return
    number = config.option.draw
    which = f"{number} (which each tree without a known commit has)" if number == UNKNOWN else number
    terminalreporter.line(f"draw {which}: the same cases again by --draw {number}")


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Removes the cases from `items` that this run's number does not draw. Raises UsageError for invalid marks."""
    try:
        groups = _groups_of(items)
    except ValueError as error:
        if not hasattr(config, "workerinput"):
            raise pytest.UsageError(str(error)) from None
        config.stash[_ERROR] = error
        return
    for (_, share), cases in groups.items():
        if share.turn is not None:
            for case in cases:
                case.user_properties.append((TURN, f"{share.turn} of {share.one_in}"))
    if not _draws(config):
        return
    others = [
        item
        for (place, share), cases in groups.items()
        for item in set(cases).difference(_drawn(cases, share, place, config.option.draw))
    ]
    if others:
        items[:] = [item for item in items if item not in set(others)]
        config.hook.pytest_deselected(items=others)


class Few:
    def __init__(self, most: int) -> None:
        self._most = most

    @pytest.hookimpl(trylast=True)
    def pytest_collection_modifyitems(self, config: pytest.Config, items: list[pytest.Item]) -> None:
        """Leaves at most N cases of each function, after other plugins have removed theirs."""
        if not _draws(config):
            return
        functions: defaultdict[str, list[pytest.Item]] = defaultdict(list)
        for item in items:
            functions[item.nodeid.split("[")[0]].append(item)
        kept = {
            case
            for place, cases in functions.items()
            for case in _varied(cases, min(len(cases), self._most), Random(f"{config.option.draw} {place}"))
        }
        others = [item for item in items if item not in kept]
        if others:
            items[:] = [item for item in items if item in kept]
            config.hook.pytest_deselected(items=others)


@pytest.hookimpl(tryfirst=True)
def pytest_collection_finish(session: pytest.Session) -> None:
    """Ends a worker with invalid marks before xdist's own hook reports that it has collected. Otherwise the worker
    would be sent tests, and xdist might only report that no worker took them. xdist doesn't print a worker's
    UsageError, but it prints all other exceptions."""
    if (error := session.config.stash.get(_ERROR, None)) is not None:
        raise error


def _draws(config: pytest.Config) -> bool:
    return not config.option.everything and not any("::" in each for each in config.args)


def _groups_of(items: Sequence[pytest.Item]) -> dict[tuple[str, Share], list[pytest.Item]]:
    """Returns the cases that are drawn together, by their function or file. Raises ValueError."""
    groups: defaultdict[tuple[str, Share], list[pytest.Item]] = defaultdict(list)
    for item in items:
        if share := _share_of(item):
            is_shared = share.whole or share.turn is not None
            groups[item.nodeid.split("::" if is_shared else "[")[0], share].append(item)
    _check_turns(list(groups))
    return groups


def _share_of(item: pytest.Item) -> Share | None:
    mark = item.get_closest_marker("drawn")
    if mark is None:
        return None
    try:
        return Share(*mark.args, **mark.kwargs)
    except (TypeError, ValueError) as error:
        raise ValueError(f"{item.nodeid}: drawn: {error}") from None


def _check_turns(groups: Sequence[tuple[str, Share]]) -> None:
    files: dict[tuple[int, int], str] = {}
    for file, share in groups:
        if share.turn is not None and share.alone:
            other = files.setdefault((share.one_in, share.turn), file)
            if other != file:
                raise ValueError(f"{other}, {file}: both have turn {share.turn} of {share.one_in}")


def _drawn(cases: list[pytest.Item], share: Share, place: str, number: str) -> list[pytest.Item]:
    """`place`: the function or file that these cases belong to."""
    if share.turn is not None:
        # The turns of eight must be independent of those of two. Otherwise one of them would fall into each of four of
        # those.
        turn = Random(f"{number} of {share.one_in}").randrange(share.one_in)
        return cases if share.due or turn == share.turn else []
    random = Random(f"{number} {place}")
    if share.whole:
        return cases if random.randrange(share.one_in) == 0 else []
    return _varied(cases, (len(cases) + random.randrange(share.one_in)) // share.one_in, random)


def _varied(cases: Sequence[pytest.Item], num_drawn: int, random: Random) -> list[pytest.Item]:
    """Returns this number of cases. Each next one has the values that were drawn least often so far."""
    left = {case: _values_of(case) for case in random.sample(cases, len(cases))}
    counts: Counter[tuple[str, str]] = Counter()
    drawn = list[pytest.Item]()
    for _ in range(num_drawn):
        rarest = min(left, key=lambda case: sum(counts[value] for value in left[case]))
        counts.update(left.pop(rarest))
        drawn.append(rarest)
    return drawn


def _values_of(case: pytest.Item) -> list[tuple[str, str]]:
    """Returns the values of its parameters, each with the parameter's name."""
    params = case.callspec.params if hasattr(case, "callspec") else {}
    return [(name, repr(value)) for name, value in params.items()]
