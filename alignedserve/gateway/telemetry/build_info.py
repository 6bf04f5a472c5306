"""Which AlignedServe this is: its version and, if that can be found out, the commit."""

from __future__ import annotations

import os
import re
from functools import cache
from pathlib import Path

import alignedserve
from alignedserve.version import __version__

# An image has no repository. Its build sets this variable.
VARIABLE = "ALIGNEDSERVE_COMMIT"
_DIGITS = 12
_COMMIT = re.compile(r"[0-9a-f]{7,64}")


@cache
def build_info() -> tuple[str, str]:
    """Returns the version and the commit. The commit is empty if it is not known. Changes that were not committed are
    not seen."""
    return __version__, commit_of(Path(alignedserve.__file__).parents[1], os.environ.get(VARIABLE))


def commit_of(root: Path, given: str | None) -> str:
    """Returns the commit of the repository at `root`, unless one is given."""
    found = (given or _head(root / ".git") or "").strip()
    return found[:_DIGITS] if _COMMIT.fullmatch(found) else ""


def _head(git: Path) -> str | None:
    if git.is_file() and (pointer := _text(git)):
        # a work tree beside others
        git = (git.parent / pointer.removeprefix("gitdir:").strip()).resolve()
    head = _text(git / "HEAD")
    if head is None or not head.startswith("ref: "):
        return head
    name = head.removeprefix("ref: ").strip()
    common = (git / (_text(git / "commondir") or ".").strip()).resolve()
    for place in (git, common):
        if found := _text(place / name):
            return found
    lines = (_text(common / "packed-refs") or "").splitlines()
    return next((line.split()[0] for line in lines if line.endswith(f" {name}")), None)


def _text(path: Path) -> str | None:
    try:
        return path.read_text()
    except (OSError, UnicodeDecodeError):
        return None
