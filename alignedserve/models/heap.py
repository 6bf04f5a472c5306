"""Returns the C heap's free pages to the system."""

from __future__ import annotations

import ctypes
import sys
from functools import cache


def return_free_pages() -> None:
    """Trims the heap where the C library is glibc, which alone needs it; does nothing elsewhere.

    Copying and packing weights frees blocks of megabytes between blocks that stay. glibc keeps such holes,
    and the next aligned block rarely fits one: a model of 1 GB, each tensor converted, then copied, took 1.9.
    """
    trim = _malloc_trim()
    if trim is not None:
        trim(0)


@cache
def _malloc_trim() -> ctypes._NamedFuncPointer | None:
    return getattr(ctypes.CDLL(None), "malloc_trim", None) if sys.platform == "linux" else None
