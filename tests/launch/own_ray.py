"""A Ray cluster that a program of the tests' own runs, as long as a test takes."""

from __future__ import annotations

import secrets
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from alignedserve.launch.leftovers import descendants, end

ROOT = Path(__file__).parents[2]


@contextmanager
def running(module: str, monkeypatch: pytest.MonkeyPatch) -> Iterator[subprocess.Popen[str]]:
    """Runs the module with a directory of its own as its argument and as Ray's, until its input ends."""
    monkeypatch.setenv("RAY_AUTH_MODE", "token")
    monkeypatch.setenv("RAY_AUTH_TOKEN", secrets.token_hex(32))
    monkeypatch.setenv("RAY_USAGE_STATS_ENABLED", "0")
    monkeypatch.setenv("RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER", "0")
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    # directly in /tmp: sockets' paths must be short
    with tempfile.TemporaryDirectory(prefix="nodes-", dir="/tmp", ignore_cleanup_errors=True) as directory:
        (Path(directory) / "ray").mkdir()
        monkeypatch.setenv("RAY_TMPDIR", directory)
        command = [sys.executable, "-m", module, directory]
        with subprocess.Popen(
            command, cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        ) as process:
            assert process.stdin
            yield process
            ours = set(descendants(process.pid))
            process.stdin.close()
            process.wait()
            end(ours)
