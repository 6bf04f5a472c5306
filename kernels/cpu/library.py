"""The compiled library, loaded once per process."""

from __future__ import annotations

import ctypes
import logging
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from alignedserve.kernels.cpu import build, structs

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class LoadedLibrary:
    functions: ctypes.CDLL
    path: Path
    # False if it was compiled for this call
    was_there: bool = True
    # why it is not the fastest one for this CPU; empty if it is
    why_slower: str = ""

    @property
    def uses_amx(self) -> bool:
        return bool(self.functions.uses_amx() == 1)

    @property
    def is_refused_amx(self) -> bool:
        """Whether the system does not let this process use AMX, for which the library has code."""
        return bool(self.functions.uses_amx() < 0)


def library() -> ctypes.CDLL:
    return loaded().functions


@cache
def loaded() -> LoadedLibrary:
    """Loads the fastest library that is there or can be compiled. If that fails, it takes a slower one of the wheel.
    Raises NoCompiler or BuildFailed if there is neither."""
    found = _load()
    functions = found.functions
    structs.declare(functions)
    sizes = {
        structs.Op: functions.size_of_op(),
        structs.Step: functions.size_of_step(),
        structs.KvBlocks: functions.size_of_kv_blocks(),
        structs.Ranks: functions.size_of_ranks(),
    }
    for struct, size in sizes.items():
        if ctypes.sizeof(struct) != size:
            raise RuntimeError(
                f"{struct.__name__} has {ctypes.sizeof(struct)} bytes in Python, {size} in C++"
            )
    if found.is_refused_amx:
        logger.warning(
            "The system does not let this process use AMX. Products in bfloat16 take several times as long"
        )
    return found


def _load() -> LoadedLibrary:
    try:
        return _fastest()
    except (build.NoCompiler, build.BuildFailed) as error:
        prebuilt = build.prebuilt()
        if not prebuilt:
            raise
        found = LoadedLibrary(_open(prebuilt), prebuilt, why_slower=str(error))
        logger.warning("The wheel's CPU kernels are used, which are slower on this CPU: %s", error)
        return found


def _fastest() -> LoadedLibrary:
    path = build.library_path()
    was_there = path.exists()
    build.build(path)
    try:
        return LoadedLibrary(_open(path), path, was_there)
    except build.BuildFailed:
        if path.parent == build.PREBUILT_DIR or not was_there:
            raise
    # The file is incomplete for some reason. Build it again.
    build.build(path, again=True)
    return LoadedLibrary(_open(path), path, was_there=False)


def _open(path: Path) -> ctypes.CDLL:
    try:
        return ctypes.CDLL(str(path))
    except OSError as error:
        if path.parent == build.PREBUILT_DIR:
            raise build.BuildFailed(f"the wheel's CPU kernels can't be loaded: {error}") from error
        raise build.BuildFailed(f"the CPU kernels can't be loaded: {error}") from error
