"""Tags in text that comes bit by bit."""

from __future__ import annotations


def overlap(text: str, start: int, tag: str) -> int:
    """Returns how many letters at the end of `text`, from `start` on, may be the beginning of `tag`."""
    longest = min(len(text) - start, len(tag) - 1)
    return next((size for size in range(longest, 0, -1) if text.endswith(tag[:size])), 0)
