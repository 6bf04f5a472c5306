"""CPU memory that another process of the same user can map: an unnamed file in memory, which is freed with its last
user."""

from __future__ import annotations

import fcntl
import math
import os
from collections.abc import Sequence
from typing import NamedTuple

import torch

# If the file shrank, processes that have mapped it would be killed.
_SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL


class MemoryFile(NamedTuple):
    """The place of a tensor's memory. `fd` is a descriptor of this process."""

    fd: int
    inode: int
    num_bytes: int


def empty(shape: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Like torch.empty, but on a CPU `file_of` can find the memory. A page takes no memory until it is written, and
    is zero until then."""
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


def file_of(tensor: torch.Tensor) -> MemoryFile:
    """Returns the file of the tensor's memory. It is valid while this process holds the memory. Raises RuntimeError
    if no other process can map it."""
    storage = tensor.untyped_storage()
    if not storage.is_shared() or storage.nbytes() != tensor.nbytes:
        raise RuntimeError("the KV cache is in private memory, which no other process can map")
    fd, num_bytes = storage._share_fd_cpu_()
    return MemoryFile(fd, os.fstat(fd).st_ino, num_bytes)
