"""Which versions of AlignedServe may work together in one system.

While `alignedserve restart` upgrades a system, processes of two versions exchange messages. Versions that differ only
in the third number understand each other's messages: see Message in messages.py for the changes that these may have.
"""

from __future__ import annotations

import re

_VERSION = re.compile(r"(\d+)\.(\d+)(?:\.\d+)?(?:[.+-]?[a-z].*)?")
RULE = "versions work together if they differ only in the third number"


def work_together(ours: str, theirs: str) -> bool:
    """Returns whether processes of these versions may be in one system. It is symmetric."""
    return ours == theirs or (_series(ours) is not None and _series(ours) == _series(theirs))


def _series(version: str) -> tuple[str, str] | None:
    found = _VERSION.fullmatch(version)
    return (found[1], found[2]) if found else None
