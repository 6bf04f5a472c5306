"""How a program holds a whole row: the code that the norms share."""

from __future__ import annotations

# A row is held in registers; with more columns each thread would hold more than 32 of them.
MAX_ROW_WIDTH = 8192


def row_warps(block: int) -> int:
    """Returns the warps for a row of `block` columns: a thread has eight, 16 bytes of half precision, or more beyond
    16 warps."""
    return min(max(block // 256, 1), 16)
