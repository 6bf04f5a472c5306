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
    # a reader that keeps the map resident would show about 2
    assert 0.9 < ratio_of("--dtype", dtype) < 1.25


@pytest.mark.parametrize(
    "options",
    [
        ["--dtype", "bfloat16"],
        pytest.param(["--dtype", "float32"], marks=pytest.mark.slow),
        # Some 20 MB are there for a moment, whatever the size: a quarter of what 0.3 GB are in int8.
        pytest.param(
            ["--dtype", "bfloat16", "--quantization", "int8", "--gigabytes", "0.9"], marks=pytest.mark.slow
        ),
    ],
    ids=" ".join,
)
@pytest.mark.parametrize("form", ["qwen3-moe", "gpt-oss"])
def test_experts_are_loaded_one_by_one(form: str, options: list[str]) -> None:
    """All experts of a layer at once, in the checkpoint's dtype, would be a third of the checkpoint more, and 0.43 of
    the larger one's model."""
    assert 0.9 < ratio_of("--mixture", form, *options) < 1.25


def test_experts_stay_in_mxfp4() -> None:
    assert 0.9 < ratio_of("--mixture", "gpt-oss-mxfp4", "--dtype", "bfloat16") < 1.25


def ratio_of(*options: str) -> float:
    result = subprocess.run(
        [sys.executable, "-m", "benchmarks.load_memory", "--gigabytes", "0.3", *options],
        capture_output=True,
        text=True,
        cwd=ROOT,
        check=True,
    )
    print(result.stdout)
    return float(result.stdout.split("ratio=")[1].split()[0])
