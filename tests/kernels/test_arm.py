"""The kernels built for ARM processors pass the tests of kernels, in an emulator."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path
from random import Random

import pytest

from alignedserve.kernels.cpu import build
from tests.kernels.processors import AREAS, ROOT, draw_options, needs_x86

COMPILER, EMULATOR, LIBRARIES = "aarch64-linux-gnu-g++", "qemu-aarch64", "/usr/aarch64-linux-gnu"
# One in this number of a run's tests, since all of them take six minutes for each processor.
EVERY = 8
WARNINGS = ("-Wall", "-Wextra", "-Werror", "-fsyntax-only")

needs_compiler = pytest.mark.skipif(not shutil.which(COMPILER), reason=f"needs {COMPILER}")
drawn = pytest.mark.drawn(one_in=4)
needs_emulator = pytest.mark.skipif(not shutil.which(EMULATOR), reason=f"needs {EMULATOR}")


@pytest.mark.slow
@needs_x86
@needs_compiler
@needs_emulator
@pytest.mark.drawn(one_in=2)
@pytest.mark.parametrize("processor", ["armv8-a", "armv8.6-a"])
def test_kernels_of_arm_yield_the_same(
    processor: str, pytestconfig: pytest.Config, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Those with NEON alone, and those that multiply bfloat16 and eight bits."""
    monkeypatch.setenv("CXX", COMPILER)
    monkeypatch.setenv("ALIGNEDSERVE_CPU", processor)
    library, call = build.build(), tmp_path / "call"
    source = ROOT / "tests" / "kernels" / "arm" / "call.cpp"
    subprocess.run([COMPILER, "-std=c++20", str(source), "-o", str(call), "-ldl"], check=True)
    tests = [f"tests/kernels/test_{area}.py" for area in AREAS]
    every = 1 if pytestconfig.option.everything else EVERY
    first = Random(f"{pytestconfig.option.draw} {processor}").randrange(every)
    plugins = ["-p", "no:cacheprovider", "-p", "tests.kernels.arm.emulated"]
    done = subprocess.run(
        [
            sys.executable,
            "-m",
            "pytest",
            "-q",
            *plugins,
            "-m",
            "not slow",
            *draw_options(pytestconfig),
            *tests,
        ],
        cwd=ROOT,
        env=os.environ
        | {
            "EMULATED_LIBRARY": f"{EMULATOR} -L {LIBRARIES} {call} {library}",
            "EMULATED_TESTS": f"{first} {every}",
        },
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout


@pytest.mark.slow
@pytest.mark.parametrize(
    ("compiler", "processor"),
    [
        pytest.param("g++", "native"),
        pytest.param("g++", "x86-64-v3", marks=[needs_x86, drawn]),
        pytest.param("g++", "x86-64", marks=[needs_x86, drawn]),
        pytest.param(COMPILER, "armv8-a", marks=[needs_compiler, drawn]),
        pytest.param(COMPILER, "armv8.6-a", marks=[needs_compiler, drawn]),
    ],
)
def test_nothing_is_warned_of(compiler: str, processor: str) -> None:
    sources = sorted(map(str, build.SOURCE_DIR.glob("*.cpp")))
    command = [compiler, *build.FLAGS, *WARNINGS, f"-march={processor}", *sources]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
