"""Runs an `alignedserve` command in a fork of a process that has already imported what commands use, including torch.

Such a command starts in a moment. What a process does from its imports on can only be tested in one that is started as
a user starts it.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path

from alignedserve.cli import bench, chat, generate
from alignedserve.cli.main import main
from alignedserve.offline import llm
from tests.forkserver import forking

# Commands import these when they run.
IMPORTED = (bench, chat, generate, llm)
_FORKED = forking(__name__)
LIMIT_S = 120.0


def forked(
    *words: str, environment: Mapping[str, str] | None = None, said: str = ""
) -> subprocess.CompletedProcess[str]:
    """`environment`: variables to set for it, in addition to those of this process. `said`: its standard input."""
    with tempfile.TemporaryDirectory() as directory:
        (Path(directory) / "stdin").write_text(said)
        process = _FORKED.Process(
            target=_run, args=(words, {**os.environ, **(environment or {})}, directory), daemon=True
        )
        process.start()
        process.join(LIMIT_S)
        if process.exitcode is None:
            process.kill()
            raise subprocess.TimeoutExpired(words, LIMIT_S)
        stdout, stderr = ((Path(directory) / name).read_text() for name in ("stdout", "stderr"))
        return subprocess.CompletedProcess(words, process.exitcode, stdout, stderr)


def _run(words: Sequence[str], environment: Mapping[str, str], directory: str) -> None:
    os.environ.clear()
    os.environ.update(environment)
    with (Path(directory) / "stdin").open("rb") as file:
        os.dup2(file.fileno(), sys.stdin.fileno())
    for stream, name in ((sys.stdout, "stdout"), (sys.stderr, "stderr")):
        with (Path(directory) / name).open("wb") as file:
            os.dup2(file.fileno(), stream.fileno())
    sys.argv = ["alignedserve", *words]
    main()
