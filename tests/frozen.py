"""Benchmarks that are frozen: named in benchmarks/results/README.md, and in the tree of a commit that it names too."""

from __future__ import annotations

import re
import subprocess
from functools import cache
from pathlib import Path

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "benchmarks/results/README.md"


def _commit_and_names() -> tuple[str, frozenset[str]]:
    text = PAGE.read_text()
    (commit,) = re.findall(r"^git worktree add \.\./frozen (\w+)$", text, re.MULTILINE)
    cells = re.findall(r"^\|[^|]*\| (`[^|]*), frozen \|", text, re.MULTILINE)
    return commit, frozenset(
        f"benchmarks.{name}" for cell in cells for name in re.findall(r"`([^`]+)`", cell)
    )


COMMIT, NAMES = _commit_and_names()


def are_frozen(words: list[str]) -> bool:
    """Returns whether `python -m MODULE ...` needs a frozen module, be it as a part of `benchmarks.gpu.run`."""
    parts = re.findall(r"[a-z_]+", words[words.index("--parts") + 1]) if "--parts" in words else []
    return not NAMES.isdisjoint([words[2], *(f"benchmarks.gpu.{part}" for part in parts)])


@cache
def source_of(name: str) -> str | None:
    """Returns the text of a frozen module, or None in a copy without the commit."""
    if _git("cat-file", "-e", f"{COMMIT}^{{commit}}") is None:
        return None
    path = name.replace(".", "/")
    return _git("show", f"{COMMIT}:{path}.py") or _git("show", f"{COMMIT}:{path}/__main__.py") or ""


def _git(*words: str) -> str | None:
    done = subprocess.run(["git", "-C", str(ROOT), *words], capture_output=True, text=True)
    return done.stdout if done.returncode == 0 else None
