"""Copies of the repository that contain mutants, and test servers in these copies."""

from __future__ import annotations

import json
import os
import select
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from benchmarks.mutants.edit import Edit
from benchmarks.mutants.mutant import with_text

_OWN_ROOT = Path(__file__).parents[2]
_LEFT_OUT = shutil.ignore_patterns(
    ".git", ".venv", ".clients", "__pycache__", ".mypy_cache", ".ruff_cache", ".hypothesis"
)
# Folders in a checkout that are in no commit.
_LINKED = (".venv", ".clients")
# A mutant's tests must not read bytecode compiled from another mutant.
_ENVIRONMENT = {"PYTHONDONTWRITEBYTECODE": "1", "CI": "true"}
# A process that collects tests for longer than this is considered hung. It takes ten seconds on an idle machine.
_COLLECTS_S = 600.0


def copy_tree(root: Path, to: Path) -> Path:
    shutil.copytree(root, to, symlinks=True, ignore=_LEFT_OUT)
    for name in _LINKED:
        if (root / name).exists():
            (to / name).symlink_to((root / name).resolve())
    return to


def copied_files(root: Path) -> Iterator[Path]:
    """Yields them in the order of their names."""
    for folder, folders, names in os.walk(root):
        left_out = _LEFT_OUT(folder, [*folders, *names])
        folders[:] = sorted(set(folders) - left_out)
        yield from (
            path
            for path in (Path(folder) / name for name in sorted(set(names) - left_out - set(_LINKED)))
            if path.is_file()
        )


@contextmanager
def mutated(copy: Path, edit: Edit) -> Iterator[str]:
    """The copy has the mutant while the block runs, so processes that tests start have it too. Yields the file's
    text."""
    path = copy / edit.file
    text = edit.applied(path.read_text())
    with with_text(path, text):
        yield text


def module_of(file: str) -> str:
    """Returns the module's name as tests import it."""
    parts = Path(file).with_suffix("").parts
    return ".".join(parts if parts[0] == "alignedserve" else ("alignedserve", *parts))


class CollectedTests:
    """Tests collected in a copy, in a process that runs any of them in a fork: see server.py."""

    def __init__(self, copy: Path, paths: list[str], mutated: list[str], log: Path) -> None:
        """`mutated`: the files that may contain mutants. Raises RuntimeError if the process ends, or does not finish,
        while it collects."""
        modules = json.dumps([module_of(file) for file in mutated])
        with log.open("a") as errors:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "benchmarks.mutants.server", str(copy), modules, *paths],
                cwd=_OWN_ROOT,
                env=os.environ | _ENVIRONMENT | {"PYTHONPATH": str(copy)},
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=errors,
                text=True,
                start_new_session=True,
            )
        self.copy = copy
        assert self._process.stdout is not None
        if not select.select([self._process.stdout], [], [], _COLLECTS_S)[0]:
            os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait()
            raise RuntimeError(f"tests are not collected within {_COLLECTS_S:g} s")
        collected = self._answer()
        # Each test's id, and whether CI runs it again if it fails.
        self.runs_twice: dict[str, bool] = dict(collected["items"])
        # The number of test files that could not be imported.
        self.num_broken: int = collected["num_broken"]

    def ask(self, request: dict[str, Any]) -> dict[str, Any]:
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(request) + "\n")
        self._process.stdin.flush()
        return self._answer()

    def _answer(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise RuntimeError(
                f"the server of tests ended with status {self._process.wait()}; its log says why"
            )
        answer: dict[str, Any] = json.loads(line)
        return answer

    def end(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait()
