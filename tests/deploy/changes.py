"""How often tests that take minutes run: in turn, and whenever a commit changes what they deploy."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
DEPLOYED = ("deploy", "cluster.yaml", "tests/deploy")


def in_turn(turn: int) -> pytest.MarkDecorator:
    """Returns the mark of a test that runs in an eighth of the runs. It also runs whenever this tree differs from the
    previous commit in what is deployed or how that is tested. The commit before a merge is the one merged into."""
    return pytest.mark.drawn(one_in=8, turn=turn, alone=True, due=differs(ROOT))


def differs(root: Path) -> bool:
    """Returns whether the tree at `root` differs from the previous commit; False if there is none."""
    command = ["git", "-C", str(root), "diff", "--quiet", "HEAD~1", "--", *DEPLOYED]
    try:
        # 1: there are differences; 128: there is no such commit, or no repository.
        return subprocess.run(command, stderr=subprocess.DEVNULL).returncode == 1
    except OSError:
        # git is not installed.
        return False
