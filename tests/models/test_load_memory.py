"""Peak memory of loading, in a process of its own because the peak of this one is not known to be free."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize("dtype", [pytest.param("bfloat16", marks=pytest.mark.slow), "float32"])
def test_loading_peaks_below_a_quarter_more_than_the_model(dtype: str) -> None:
    """The checkpoint is float32, so bfloat16 is the case that converts; its model is half as large."""
    result = subprocess.run(
        [sys.executable, "-m", "benchmarks.load_memory", "--gigabytes", "0.3", "--dtype", dtype],
        capture_output=True,
        text=True,
        cwd=ROOT,
        check=True,
    )
    ratio = float(result.stdout.split("ratio=")[1].split()[0])
    # a reader that keeps the map resident would show about 2
    assert 0.9 < ratio < 1.25, result.stdout
