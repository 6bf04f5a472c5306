"""A sender's memory (kernels/cpu/shared_memory.py), mapped by a receiver on the same host.

torch maps the memory, keeps its file open, and can tell a tensor's file. Another process of the same user opens the
file through /proc and maps it read-only.
"""

from __future__ import annotations

import mmap
import os

import numpy as np
import torch
from numpy.typing import NDArray

from alignedserve.kernels.cpu.shared_memory import empty, file_of
from alignedserve.transport.channel import HostMemory

__all__ = ["attach", "describe", "empty"]


def describe(blocks: torch.Tensor) -> HostMemory:
    """Returns a description for `attach` in another process. It is valid while this process has the memory."""
    return HostMemory(os.getpid(), *file_of(blocks))


def attach(memory: HostMemory) -> NDArray[np.uint8]:
    """Maps the bytes read-only. Raises OSError if the memory is gone."""
    path = f"/proc/{memory.pid}/fd/{memory.fd}"
    try:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except OSError as error:
        raise OSError(f"the sender's memory can't be opened: {error}") from error
    try:
        found = os.fstat(fd)
        if (found.st_ino, found.st_size) != (memory.inode, memory.num_bytes):
            raise OSError(
                f"the sender's memory is not at {path}: both ends have to be on one host, as one user"
            )
        return np.frombuffer(mmap.mmap(fd, memory.num_bytes, prot=mmap.PROT_READ), np.uint8)
    finally:
        os.close(fd)
