"""deploy/check_host.py as `ray up` runs it."""

from __future__ import annotations

import ast
import os
import subprocess
import sys
from pathlib import Path

SCRIPT = Path(__file__).parents[2] / "deploy/check_host.py"


def check(*options: str, path: Path | None = None) -> tuple[int, list[str]]:
    """`path`: a folder whose programs are found first. Returns the exit status, and what was said to the operator."""
    environment = dict(os.environ, PATH=f"{path}:{os.environ['PATH']}" if path else os.environ["PATH"])
    done = subprocess.run(
        [sys.executable, str(SCRIPT), *options], capture_output=True, text=True, env=environment
    )
    assert not done.stdout
    return done.returncode, done.stderr.splitlines()


def a_host_with(tmp_path: Path, drivers: list[str]) -> Path:
    program = tmp_path / "nvidia-smi"
    program.write_text("#!/bin/sh\nprintf '%s\\n' " + " ".join(drivers) + "\n")
    program.chmod(0o755)
    return tmp_path


def test_a_host_that_fits_is_told_nothing(tmp_path: Path) -> None:
    host = a_host_with(tmp_path, ["580.105.08"] * 8)
    assert check("--gpus", "8", "--pool-memory-bytes", "4096", path=host) == (0, [])


def test_a_host_with_an_old_driver(tmp_path: Path) -> None:
    status, [line] = check(path=a_host_with(tmp_path, ["570.86.15"]))
    assert status == 1 and "driver is 570.86.15, and 580 or newer is needed" in line


def test_a_host_that_is_too_small(tmp_path: Path) -> None:
    host = a_host_with(tmp_path, ["595.91.07"] * 4)
    status, [gpus, shm] = check("--gpus", "8", "--pool-memory-bytes", str(1 << 60), path=host)
    assert status == 1
    assert "4 GPUs are here, and 8 are needed" in gpus
    assert "of /dev/shm are free" in shm and str(1 << 60) in shm


def test_a_driver_without_a_gpu_is_none(tmp_path: Path) -> None:
    program = tmp_path / "nvidia-smi"
    program.write_text("#!/bin/sh\necho 'No devices were found'\nexit 6\n")
    program.chmod(0o755)
    assert check(path=tmp_path) == (0, [])
    status, [line] = check("--gpus", "1", path=tmp_path)
    assert status == 1 and "0 GPUs are here" in line


def test_old_images_can_read_it() -> None:
    """It has to get as far as saying that the image is too old: Ubuntu 18.04 has Python 3.6."""
    ast.parse(SCRIPT.read_text(), feature_version=(3, 6))
