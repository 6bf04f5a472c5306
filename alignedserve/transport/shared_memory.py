"""CPU memory that a process of the same user can map: a file in memory without a name, which goes with its last user.

torch maps it, keeps it open, and knows for a tensor which file its memory is. Another process opens the file by way of
/proc, which only the same user can do, and maps it to be read only.
"""

from __future__ import annotations

import fcntl
import math
import mmap
import os
from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray

from alignedserve.transport.channel import HostMemory

# If the file shrank, processes which read their mapping of it would be killed.
_SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL


def empty(shape: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Is like torch.empty, but on a CPU `describe` can tell where the memory is. Its pages cost nothing until they are
    written."""
    if device.type != "cpu":
        return torch.empty(shape, dtype=dtype, device=device)
    num_bytes = math.prod(shape) * dtype.itemsize
    fd = os.memfd_create("alignedserve-kv", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    try:
        os.fchmod(fd, 0o600)
        os.ftruncate(fd, num_bytes)
        fcntl.fcntl(fd, fcntl.F_ADD_SEALS, _SEALS)
        storage = torch.UntypedStorage._new_shared_fd_cpu(fd, num_bytes)  # type: ignore[attr-defined]
    finally:
        os.close(fd)
    os.set_inheritable(storage._share_fd_cpu_()[0], False)
    return torch.empty(0, dtype=dtype).set_(storage).view(*shape)


def describe(blocks: torch.Tensor) -> HostMemory:
    """Describes the memory for `attach` in another process. It is valid as long as this process has the memory."""
    storage = blocks.untyped_storage()
    if not storage.is_shared() or storage.nbytes() != blocks.nbytes:
        raise RuntimeError("the KV cache is in this process's own memory, which no other one can map")
    fd, num_bytes = storage._share_fd_cpu_()
    return HostMemory(os.getpid(), fd, os.fstat(fd).st_ino, num_bytes)


def attach(memory: HostMemory) -> NDArray[np.uint8]:
    """Maps the bytes to be read only. Raises OSError if the memory is not there."""
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
