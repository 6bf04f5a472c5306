"""Tries mutants against tests of live systems, which take too long for each mutant by itself: all together in one copy.

When a test fails, halves of the mutants are tried against that test alone, until one is left. That one is caught, and
the others go on from the file of that test. A test that fails with all of them and with neither half needs two at once:
both stay in doubt, which is said.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections import defaultdict
from collections.abc import Callable, Sequence
from pathlib import Path

from benchmarks.mutants.edit import Edit

FOLDERS = ("tests/cluster", "tests/launch")

# Runs these tests, files or single ones, with the mutants, and returns the first that fails; None: all pass.
Run = Callable[[Sequence[Edit], Sequence[str]], str | None]


def caught_live(
    edits: Sequence[Edit], files: Sequence[str], run: Run, tell: Callable[[Edit, str], None]
) -> None:
    """`tell` is called with each mutant that a test catches, and the test."""
    for group in apart(edits):
        _caught(group, list(files), run, tell)


def apart(edits: Sequence[Edit]) -> list[list[Edit]]:
    """Groups in which no two change the same place."""
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
    """The text of a file with all of these, none of which changes the same place."""
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
    left = list(group)
    while left and files:
        test = run(left, files)
        if test is None:
            return
        one = _narrowed(left, test, run)
        if one is not None:
            tell(one, test)
            left.remove(one)
            files = files[files.index(test.split("::")[0]) :]
        else:
            print(f"{test} fails with several mutants together, and with no half of them", flush=True)
            files = files[files.index(test.split("::")[0]) + 1 :]


def _narrowed(group: list[Edit], test: str, run: Run) -> Edit | None:
    while len(group) > 1:
        halves = group[: len(group) // 2], group[len(group) // 2 :]
        failing = next((half for half in halves if run(half, [test])), None)
        if failing is None:
            return None
        group = failing
    return group[0]


def run_in(copy: Path) -> Run:
    """Each time in new processes, which import the mutants."""

    def run(edits: Sequence[Edit], tests: Sequence[str]) -> str | None:
        by_file: dict[str, list[Edit]] = defaultdict(list)
        for edit in edits:
            by_file[edit.file].append(edit)
        texts = {file: (copy / file).read_text() for file in by_file}
        for file, of_file in by_file.items():
            (copy / file).write_text(together(texts[file], of_file))
        try:
            return _first_failure(copy, tests)
        finally:
            for file, text in texts.items():
                (copy / file).write_text(text)

    return run


def _first_failure(copy: Path, tests: Sequence[str]) -> str | None:
    """Raises RuntimeError if pytest itself fails."""
    ran = subprocess.run(
        [sys.executable, "-m", "pytest", "-x", "-p", "no:cacheprovider", "-rfE", *tests],
        cwd=copy,
        env=os.environ | {"PYTHONPATH": str(copy), "PYTHONDONTWRITEBYTECODE": "1"},
        capture_output=True,
        text=True,
    )
    for line in ran.stdout.splitlines():
        if line.startswith(("FAILED ", "ERROR ")):
            return line.split(" ", 1)[1].split(" - ")[0]
    if ran.returncode != 0:
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
