"""The stated durations of tests, compared with the measurements of `python -m benchmarks.ci_time`."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from benchmarks.ci_time import CI, RESULTS, TEST, TEST_ALL, medians

ROOT = Path(__file__).parents[1]
# What is said may be off by this factor.
TOLERANCE = 1.5

# A number of minutes, or a range over processors.
MINUTES = r"(\d+)(?: to (\d+))? minutes on two"
SAID = [
    ("Makefile", TEST, rf"# {MINUTES} cores.*: without those that are marked slow, .*\n(?:#.*\n)*test:"),
    ("Makefile", TEST_ALL, rf"# {MINUTES} cores.*: all of them, with this commit's share"),
    ("CONTRIBUTING.md", TEST, rf"make test +# the quick tests, in {MINUTES} cores"),
    ("CONTRIBUTING.md", TEST_ALL, rf"make test-all +# .*, in {MINUTES} cores"),
    ("CONTRIBUTING.md", CI, rf"`\.ci/run` takes {MINUTES} quiet cores"),
]


@pytest.mark.parametrize(("file", "command", "pattern"), SAID, ids=lambda each: str(each)[:30])
def test_the_time_that_is_said_is_the_one_that_was_measured(file: str, command: str, pattern: str) -> None:
    found = re.search(pattern, (ROOT / file).read_text())
    assert found, f"{file} has nothing like {pattern!r}"
    measured_min = json.loads(RESULTS.read_text())["median_s"][command] / 60
    least, most = int(found[1]), int(found[2] or found[1])
    assert least / TOLERANCE <= measured_min <= most * TOLERANCE, measured_min


def test_the_middle_of_the_runs_counts() -> None:
    assert medians([{TEST: 1.0}, {TEST: 9.0}, {TEST: 2.0}]) == {TEST: 2.0}
