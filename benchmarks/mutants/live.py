"""Tries mutants against tests of live systems. They take too long per mutant, so all mutants are tried in one copy.

When a test fails, it is run alone without any mutant. If it passes, halves of the mutants are tried with it until one
is left. If it fails with only that mutant, the mutant is caught. A test that fails without mutants, or with neither
half, is left out from then on, and this is printed. Then the remaining mutants continue from that test's file.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections import defaultdict
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Protocol

from benchmarks.mutants.edit import Edit

FOLDERS = ("tests/cluster", "tests/launch")

# A test in pytest's short summary, or a file that can't be imported.
_FAILURE = re.compile(r"(?:FAILED|ERROR) (tests/\S.*?)(?: - .*)?")
# pytest's exit status if all tests are deselected.
_NO_TESTS = 5


class Run(Protocol):
    def __call__(
        self, edits: Sequence[Edit], tests: Sequence[str], left_out: Sequence[str] = ()
    ) -> str | None:
        """Runs the tests (files or single ones) with the mutants. Returns the first that fails, or None if all pass."""


def caught_live(
    edits: Sequence[Edit], files: Sequence[str], run: Run, tell: Callable[[Edit, str], None]
) -> None:
    """`tell` is called with each caught mutant and the test that caught it."""
    for group in apart(edits):
        _caught(group, list(files), run, tell)


def apart(edits: Sequence[Edit]) -> list[list[Edit]]:
    """Returns groups in which no two mutants change the same place."""
    groups: list[list[Edit]] = []
    for edit in edits:
        fitting = (group for group in groups if not any(_overlap(edit, other) for other in group))
        found = next(fitting, None)
        if found is None:
            groups.append([edit])
        else:
            found.append(edit)
    return groups


def together(text: str, edits: Sequence[Edit]) -> str:
    """Returns a file's text with all these mutants, no two of which change the same place."""
    for edit in sorted(edits, key=lambda each: (each.line, each.column), reverse=True):
        text = edit.applied(text)
    return text


def _overlap(one: Edit, other: Edit) -> bool:
    begins, ends = (one.line, one.column), (one.end_line, one.end_column)
    return (
        one.file == other.file
        and begins < (other.end_line, other.end_column)
        and (other.line, other.column) < ends
    )


def _caught(group: list[Edit], files: list[str], run: Run, tell: Callable[[Edit, str], None]) -> None:
    left, left_out = list(group), list[str]()
    while left:
        test = run(left, files, left_out)
        if test is None:
            return
        files = files[files.index(test.split("::")[0]) :]
        one = _narrowed(left, test, run)
        if one is not None:
            tell(one, test)
            left.remove(one)
        else:
            print(
                f"{test} is left out: it fails without mutants too, or only with several together", flush=True
            )
            left_out.append(test)


def _narrowed(group: list[Edit], test: str, run: Run) -> Edit | None:
    """Returns the mutant that makes the test fail, or None if there is no such mutant."""
    if run([], [test]):
        return None
    while len(group) > 1:
        halves = group[: len(group) // 2], group[len(group) // 2 :]
        failing = next((half for half in halves if run(half, [test])), None)
        if failing is None:
            return None
        group = failing
    return group[0] if run(group, [test]) else None


def run_in(copy: Path) -> Run:
    """Each run uses new processes, which import the mutants."""

    def run(edits: Sequence[Edit], tests: Sequence[str], left_out: Sequence[str] = ()) -> str | None:
        by_file: dict[str, list[Edit]] = defaultdict(list)
        for edit in edits:
            by_file[edit.file].append(edit)
        texts = {file: (copy / file).read_text() for file in by_file}
        for file, of_file in by_file.items():
            (copy / file).write_text(together(texts[file], of_file))
        try:
            return _first_failure(copy, tests, left_out)
        finally:
            for file, text in texts.items():
                (copy / file).write_text(text)

    return run


def _first_failure(copy: Path, tests: Sequence[str], left_out: Sequence[str]) -> str | None:
    """Raises RuntimeError if pytest itself fails."""
    # A file that can't be imported has no tests to deselect.
    chosen = [*(each for each in tests if each not in left_out), *(f"--deselect={each}" for each in left_out)]
    if len(chosen) == len(left_out):
        return None
    ran = subprocess.run(
        [sys.executable, "-m", "pytest", "-x", "-p", "no:cacheprovider", "-rfE", *chosen],
        cwd=copy,
        env=os.environ | {"PYTHONPATH": str(copy), "PYTHONDONTWRITEBYTECODE": "1"},
        capture_output=True,
        text=True,
    )
    # Lines of captured logs, which come before the summary, may also begin with "ERROR".
    _, _, summary = ran.stdout.rpartition("= short test summary info =")
    failures = filter(None, map(_FAILURE.fullmatch, summary.splitlines()))
    for failure in failures:
        return failure[1]
    if ran.returncode not in (0, _NO_TESTS):
        raise RuntimeError(
            f"pytest ended with status {ran.returncode}: {ran.stdout[-1000:]}{ran.stderr[-1000:]}"
        )
    return None


def files_in(copy: Path, folders: Sequence[str] = FOLDERS) -> list[str]:
    return [
        str(path.relative_to(copy))
        for folder in folders
        for path in sorted((copy / folder).rglob("test_*.py"))
    ]
