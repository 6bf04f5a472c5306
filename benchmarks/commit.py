"""The commit that was measured."""

from __future__ import annotations

import subprocess
from pathlib import Path

ROOT = Path(__file__).parents[1]


def commit_of(root: Path = ROOT) -> str | None:
    """Returns None if this is not a git checkout."""
    done = subprocess.run(
        ["git", "-C", str(root), "rev-parse", "--verify", "HEAD"], capture_output=True, text=True
    )
    return done.stdout.strip() or None
