"""Measures how long some fixed work takes during a run of the tests: longer on a slow processor, and if many share it.

Each worker does the work between two of its tests, beside the tests of the other workers. A test's reports hold the
seconds under SECONDS, because xdist passes reports on to the process that adds them up.
"""

from __future__ import annotations

import time

import numpy as np
import pytest

# the name of the property of a test's reports
SECONDS = "fixed_work_s"
# The work takes about 20 ms. Once in ten seconds, that is a five-hundredth of the run.
_EVERY_S = 10.0
_NUM_STEPS = 100_000
_NUM_PASSES = 250


def fixed_work() -> None:
    """Computes half of the time in Python, and half in numpy on one thread."""
    number = 0
    for step in range(_NUM_STEPS):
        number = (number + step * step) % 1_000_003
    values = np.linspace(0.0, 1.0, 1 << 15)
    for _ in range(_NUM_PASSES):
        values = np.sqrt(values * values + 1.0)


class FixedWork:
    """The plugin of one worker."""

    def __init__(self) -> None:
        self._next_s = 0.0

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> None:
        begun_s = time.monotonic()
        if begun_s >= self._next_s:
            fixed_work()
            ended_s = time.monotonic()
            self._next_s = ended_s + _EVERY_S
            item.user_properties.append((SECONDS, ended_s - begun_s))
