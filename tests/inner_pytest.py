"""Runs pytest in its own process on test files that a test has written."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).parents[1]


def run_pytest(
    root: Path, files: dict[str, str], *options: str, plugins: Sequence[str] = (), only: str = ""
) -> tuple[int, str]:
    """Returns its exit code and output. `plugins`: used instead of this suite's conftest and all installed plugins,
    which take seconds to import. `only`: a test's name, to run only that test."""
    for name, text in files.items():
        path = root / "tests" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    config = [
        "-c",
        str(ROOT / "pyproject.toml"),
        "--rootdir",
        str(root),
        *(f"-p{each}" for each in plugins or ("tests.conftest",)),
    ]
    command = [
        sys.executable,
        "-m",
        "pytest",
        *config,
        "-p",
        "no:cacheprovider",
        *options,
        only or str(root / "tests"),
    ]
    environment = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST")}
    if plugins:
        environment["PYTEST_DISABLE_PLUGIN_AUTOLOAD"] = "1"
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, env=environment, timeout=300)
    return done.returncode, done.stdout + done.stderr
