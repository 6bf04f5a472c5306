"""The compiled library, loaded once per process."""

from __future__ import annotations

import ctypes
from functools import cache

from kernels.cpu import build, structs


@cache
def library() -> ctypes.CDLL:
    loaded = ctypes.CDLL(str(build.build()))
    structs.declare(loaded)
    for struct, size in ((structs.Op, loaded.size_of_op()), (structs.Step, loaded.size_of_step())):
        if ctypes.sizeof(struct) != size:
            raise RuntimeError(
                f"{struct.__name__} has {ctypes.sizeof(struct)} bytes in Python, {size} in C++"
            )
    return loaded
