"""GitHub's Markdown as Python-Markdown reads it.

Two things differ. Python-Markdown wants four spaces where a list's items contain blocks, however wide the mark is.
And it wants a blank line before a list, and between items that contain blocks.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

ITEM = re.compile(r"([-*+]|\d+[.)])( +)(?=\S)")
FENCE = re.compile(r"```|~~~")
# a line that begins like this ends a paragraph, even within a list
NOT_PROSE = re.compile(r"[#|<]|```|~~~")
WIDTH = 4


def converted(text: str) -> str:
    """Returns the page as Python-Markdown needs it."""
    return "\n".join(_Converter().lines(text.split("\n")))


@dataclass
class _Item:
    # the column at which its text begins
    column: int
    has_blocks: bool = False


class _Converter:
    def __init__(self) -> None:
        # those that are open, from outside to inside
        self.items: list[_Item] = []
        self.is_after_blank = True

    def lines(self, lines: list[str]) -> list[str]:
        found: list[str] = []
        shift: int | None = None
        for line in lines:
            text = line.lstrip()
            indent = len(line) - len(text)
            if shift is not None:
                # within a fence
                found.append(" " * max(indent + shift, 0) + text if text else "")
                shift = None if FENCE.match(text) else shift
                continue
            if not text:
                found.append("")
                self.is_after_blank = True
                continue
            item = ITEM.match(text)
            closed = self._close(indent, text, bool(item))
            outer = self.items[-1].column if self.items else 0
            moved = WIDTH * len(self.items) + max(indent - outer, 0)
            begins = item is not None and (closed is None or closed.has_blocks)
            if begins and not self.is_after_blank:
                found.append("")
            if begins or self.is_after_blank:
                for each in self.items:
                    each.has_blocks = True
            if item:
                text = item[1].replace(")", ".") + " " + text[item.end() :]
                self.items.append(_Item(indent + item.end()))
            elif FENCE.match(text):
                shift = moved - indent
            found.append(" " * moved + text)
            self.is_after_blank = False
        return found

    def _close(self, indent: int, text: str, is_item: bool) -> _Item | None:
        """Closes the items to which this line does not belong. Returns the outermost of them."""
        closed = None
        if self.is_after_blank or is_item or NOT_PROSE.match(text):
            while self.items and indent < self.items[-1].column:
                closed = self.items.pop()
        return closed
