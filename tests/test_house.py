"""No measure of the code (`python -m benchmarks.house`) is above its limit in tests/house.toml, or far below it."""

from __future__ import annotations

import json
import subprocess
import sys
from functools import cache
from typing import Any

import pytest

from benchmarks.house.ratchet import MEASURES, faults, read
from benchmarks.house.source import ROOT

pytestmark = pytest.mark.slow


@cache
def measured() -> Any:
    """In a process of its own: functions whose results are cached would not be called again."""
    command = [sys.executable, "-m", "benchmarks.house", "--json"]
    found = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    return json.loads(found.stdout)["figures"]


def test_each_measure_keeps_its_limit() -> None:
    limits = read(MEASURES)
    values = {name: each["now"] for name, each in measured().items() if name in limits}
    assert not list(faults(values, limits))
