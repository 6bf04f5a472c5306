"""Memory of the leading rank that the others map, to read and to write."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

import torch

from alignedserve.kernels.cpu import shared_memory


def allocate(num_bytes: int) -> torch.Tensor:
    """Returns so many zero bytes, which take memory when they are written."""
    return shared_memory.empty((num_bytes,), dtype=torch.uint8, device=torch.device("cpu"))


def describe(memory: torch.Tensor) -> dict[str, int]:
    """Tells `attach` where it is."""
    return {"pid": os.getpid()} | shared_memory.file_of(memory)._asdict()


def attach(found: Mapping[str, Any]) -> torch.Tensor:
    """Maps the bytes. Raises OSError if they are not there."""
    path, num_bytes = f"/proc/{found['pid']}/fd/{found['fd']}", int(found["num_bytes"])
    fd = os.open(path, os.O_RDWR | os.O_CLOEXEC)
    try:
        status = os.fstat(fd)
        if (status.st_ino, status.st_size) != (found["inode"], num_bytes):
            raise OSError(f"the leading rank's memory is not at {path}")
        storage = torch.UntypedStorage._new_shared_fd_cpu(fd, num_bytes)  # type: ignore[attr-defined]
    finally:
        os.close(fd)
    return torch.empty(0, dtype=torch.uint8).set_(storage)
