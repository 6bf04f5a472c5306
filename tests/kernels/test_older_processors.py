"""The kernels built for x86 processors without AMX, AVX-512 or AVX2 pass the tests of kernels."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from alignedserve.kernels.cpu.build import cpu_features
from tests.kernels.processors import AREAS, ROOT, draw_options, needs_x86

# This library computes by AVX-512 what the processor's own computes by AMX.
needs_amx = pytest.mark.skipif("amx_bf16" not in cpu_features().split(), reason="needs a processor with AMX")


@pytest.mark.slow
@pytest.mark.drawn(one_in=8, turn=6)
@needs_x86
@pytest.mark.parametrize("processor", ["x86-64-v3", "x86-64", pytest.param("cooperlake", marks=needs_amx)])
def test_processors_without_the_instructions_yield_the_same(
    processor: str, pytestconfig: pytest.Config
) -> None:
    tests = [f"tests/kernels/test_{area}.py" for area in AREAS]
    options = ["-q", "-p", "no:cacheprovider", "-m", "not slow", *draw_options(pytestconfig)]
    done = subprocess.run(
        [sys.executable, "-m", "pytest", *options, *tests],
        cwd=ROOT,
        env=os.environ | {"ALIGNEDSERVE_CPU": processor},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout
