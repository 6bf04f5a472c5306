"""Peak memory of loading, in a process of its own because the peak of this one is not known to be free."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from shutil import rmtree

import pytest

from benchmarks.load_memory import mixture, shapes, shapes_of, write_checkpoint

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[2]
Checkpoint = Callable[..., Path]
rarely = pytest.mark.drawn(one_in=3)
in_turn = pytest.mark.drawn(one_in=8, turn=7)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Checkpoint]:
    """Directory of a checkpoint, written once. `form`: of experts, or of large tensors alone."""
    written: list[Path] = []

    @cache
    def directory(gigabytes: float, form: str | None = None) -> Path:
        path, num_bytes = tmp_path_factory.mktemp("checkpoint"), int(gigabytes * 1e9)
        written.append(path)
        write_checkpoint(path, shapes_of(mixture(num_bytes, form)) if form else shapes(num_bytes))
        return path

    yield directory
    for path in written:
        rmtree(path)


@pytest.mark.parametrize("dtype", [pytest.param("bfloat16", marks=rarely), "float32"])
def test_loading_peaks_below_a_quarter_more_than_the_model(checkpoint: Checkpoint, dtype: str) -> None:
    """The checkpoint is float32, so bfloat16 is the case that converts; its model is half as large."""
    # a reader that keeps the map resident would show about 2
    assert 0.9 < ratio_of(checkpoint(0.3), 0.3, "--dtype", dtype) < 1.25


@pytest.mark.parametrize(
    ("gigabytes", "options"),
    [
        (0.3, ["--dtype", "bfloat16"]),
        pytest.param(0.3, ["--dtype", "float32"], marks=rarely),
        # Some 20 MB are there for a moment, whatever the size: a quarter of what 0.3 GB are in int8.
        pytest.param(0.9, ["--dtype", "bfloat16", "--quantization", "int8"], marks=in_turn),
    ],
    ids=str,
)
@pytest.mark.parametrize("form", ["qwen3-moe", "gpt-oss"])
def test_experts_are_loaded_one_by_one(
    checkpoint: Checkpoint, form: str, gigabytes: float, options: list[str]
) -> None:
    """All experts of a layer at once, in the checkpoint's dtype, would be a third of the checkpoint more, and 0.43 of
    the larger one's model."""
    assert 0.9 < ratio_of(checkpoint(gigabytes, form), gigabytes, "--mixture", form, *options) < 1.25


def test_experts_stay_in_mxfp4(checkpoint: Checkpoint) -> None:
    form = "gpt-oss-mxfp4"
    ratio = ratio_of(checkpoint(0.3, form), 0.3, "--mixture", form, "--dtype", "bfloat16")
    assert 0.9 < ratio < 1.25


def ratio_of(directory: Path, gigabytes: float, *options: str) -> float:
    command = [sys.executable, "-m", "benchmarks.load_memory", "--directory", str(directory)]
    result = subprocess.run(
        [*command, "--gigabytes", str(gigabytes), *options],
        capture_output=True,
        text=True,
        cwd=ROOT,
        # As here (tests/conftest.py).
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        check=True,
    )
    print(result.stdout)
    return float(result.stdout.split("ratio=")[1].split()[0])
