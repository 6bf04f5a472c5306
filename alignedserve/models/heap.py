"""Returns the C heap's free pages to the system."""

from __future__ import annotations

import ctypes
import sys
from functools import cache


def return_free_pages() -> None:
    """Trims the heap of glibc; does nothing with another C library, which does not need it.

    Copying and packing weights frees blocks of megabytes between blocks that stay. glibc keeps such holes, and the next
    aligned block rarely fits into one. A model of 1 GB, with each tensor converted and then copied, took 1.9 GB.
    """
    trim = _malloc_trim()
    if trim is not None:
        trim(0)


@cache
def _malloc_trim() -> ctypes._NamedFuncPointer | None:
    return getattr(ctypes.CDLL(None), "malloc_trim", None) if sys.platform == "linux" else None
