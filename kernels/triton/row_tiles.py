"""How a program holds a whole row: code shared by the norms."""

from __future__ import annotations

# A row is held in registers. With more columns each thread would hold more than 32 of them.
MAX_ROW_WIDTH = 8192


def row_warps(block: int) -> int:
    """Returns the warps for a row of `block` columns. A thread has eight columns, 16 bytes of half precision; with
    16 warps it may have more."""
    return min(max(block // 256, 1), 16)
