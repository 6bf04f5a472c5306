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
from tests.kernels.processors import AREAS, ROOT, needs_x86

COMPILER, EMULATOR, LIBRARIES = "aarch64-linux-gnu-g++", "qemu-aarch64", "/usr/aarch64-linux-gnu"
# The one has NEON alone, the other multiplies bfloat16 and eight bits as well. A run draws one of them.
PROCESSORS = ("armv8-a", "armv8.6-a")
# One in this number of a run's tests, since all of them take six minutes for each processor.
EVERY = 8
WARNINGS = ("-Wall", "-Wextra", "-Werror", "-fsyntax-only")

needs_compiler = pytest.mark.skipif(not shutil.which(COMPILER), reason=f"needs {COMPILER}")
drawn = pytest.mark.drawn(one_in=8)
needs_emulator = pytest.mark.skipif(not shutil.which(EMULATOR), reason=f"needs {EMULATOR}")


@pytest.mark.slow
@needs_x86
@needs_compiler
@needs_emulator
@pytest.mark.drawn(one_in=8, turn=3)
def test_kernels_of_arm_yield_the_same(
    pytestconfig: pytest.Config, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    everything, draw = pytestconfig.option.everything, pytestconfig.option.draw
    monkeypatch.setenv("CXX", COMPILER)
    call, source = tmp_path / "call", ROOT / "tests" / "kernels" / "arm" / "call.cpp"
    subprocess.run([COMPILER, "-std=c++20", str(source), "-o", str(call), "-ldl"], check=True)
    for processor in PROCESSORS if everything else [Random(f"{draw} processor").choice(PROCESSORS)]:
        monkeypatch.setenv("ALIGNEDSERVE_CPU", processor)
        every = 1 if everything else EVERY
        first = Random(f"{draw} {processor}").randrange(every)
        emulated = {
            "EMULATED_LIBRARY": f"{EMULATOR} -L {LIBRARIES} {call} {build.build(build.library_path())}",
            "EMULATED_TESTS": f"{first} {every}",
        }
        tests = [f"tests/kernels/test_{area}.py" for area in AREAS]
        plugins = ["-p", "no:cacheprovider", "-p", "tests.kernels.arm.emulated"]
        # Of large matrices a share, also where all else is run: in an emulator all of them take hours.
        options = [*plugins, "-m", "not slow", "--draw", draw]
        done = subprocess.run(
            [sys.executable, "-m", "pytest", "-q", *options, *tests],
            cwd=ROOT,
            env=os.environ | emulated,
            capture_output=True,
            text=True,
        )
        assert done.returncode == 0, f"{processor}: {done.stdout}"


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
