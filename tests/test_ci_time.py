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

SAID = [
    ("Makefile", TEST, r"# (\d+) minutes on two cores: without those that are marked slow, .*\ntest:"),
    ("Makefile", TEST_ALL, r"# (\d+) minutes on two cores: all of them, with this commit's share"),
    ("README.md", TEST, r"make test +# the quick tests, in (\d+) minutes on two cores"),
    ("CONTRIBUTING.md", TEST, r"make test +# the quick tests, in (\d+) minutes on two cores"),
    ("CONTRIBUTING.md", TEST_ALL, r"make test-all +# .*, in (\d+) minutes"),
    ("CONTRIBUTING.md", CI, r"`\.ci/run` takes (\d+) minutes on two quiet cores"),
]


@pytest.mark.parametrize(("file", "command", "pattern"), SAID, ids=lambda each: str(each)[:30])
def test_the_time_that_is_said_is_the_one_that_was_measured(file: str, command: str, pattern: str) -> None:
    found = re.search(pattern, (ROOT / file).read_text())
    assert found, f"{file} has nothing like {pattern!r}"
    measured_min = json.loads(RESULTS.read_text())["median_s"][command] / 60
    assert measured_min / TOLERANCE <= int(found[1]) <= measured_min * TOLERANCE, measured_min


def test_the_middle_of_the_runs_counts() -> None:
    assert medians([{TEST: 1.0}, {TEST: 9.0}, {TEST: 2.0}]) == {TEST: 2.0}
