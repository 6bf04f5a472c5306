from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.kernels.triton.launches import LAUNCHES

ROOT = Path(__file__).parents[3]


@pytest.mark.slow
@pytest.mark.drawn(one_in=8, turn=7)
def test_every_kernel_compiles_for_hopper_without_spills(tmp_path: Path) -> None:
    environment = {**os.environ, "TRITON_INTERPRET": "0", "TRITON_CACHE_DIR": str(tmp_path)}
    command = [sys.executable, "-m", "tests.kernels.triton.offline"]
    done = subprocess.run(
        command, capture_output=True, text=True, cwd=ROOT, env=environment, check=False, timeout=600
    )
    assert done.returncode == 0, done.stdout + done.stderr
    names = {line[:42].strip() for line in done.stdout.splitlines()}
    assert names == set(LAUNCHES)
