"""The compiled library, loaded once per process."""

from __future__ import annotations

import ctypes
from functools import cache

from alignedserve.kernels.cpu import build, structs


@cache
def library() -> ctypes.CDLL:
    loaded = _load()
    structs.declare(loaded)
    sizes = {
        structs.Op: loaded.size_of_op(),
        structs.Step: loaded.size_of_step(),
        structs.KvBlocks: loaded.size_of_kv_blocks(),
        structs.Ranks: loaded.size_of_ranks(),
    }
    for struct, size in sizes.items():
        if ctypes.sizeof(struct) != size:
            raise RuntimeError(
                f"{struct.__name__} has {ctypes.sizeof(struct)} bytes in Python, {size} in C++"
            )
    return loaded


def _load() -> ctypes.CDLL:
    path = build.build()
    try:
        return ctypes.CDLL(str(path))
    except OSError as error:
        if path.parent == build.PREBUILT_DIR:
            raise build.BuildFailed(f"the wheel's CPU kernels can't be loaded: {error}") from error
        # The file is incomplete for some reason. Build it again.
        path.unlink(missing_ok=True)
        try:
            return ctypes.CDLL(str(build.build()))
        except OSError as error:
            raise build.BuildFailed(f"the CPU kernels in {path.parent} can't be loaded: {error}") from error
