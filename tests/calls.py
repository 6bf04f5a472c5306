"""Counts work, because seconds would depend more on the machine than on the code."""

from __future__ import annotations

import sys
from collections.abc import Callable


def num_calls(action: Callable[[], object]) -> int:
    """Counts calls of Python and C functions."""
    count = 0

    def called(frame: object, event: str, argument: object) -> None:
        nonlocal count
        count += event in ("call", "c_call")

    sys.setprofile(called)
    try:
        action()
    finally:
        sys.setprofile(None)
    return count
