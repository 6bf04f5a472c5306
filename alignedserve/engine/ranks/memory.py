"""Memory of one rank that another one maps, to read and write: bytes of the host or of a GPU."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

import torch

from alignedserve.kernels.cpu import shared_memory

empty = shared_memory.empty
# torch's description of shared GPU memory, in torch's order. Another process maps it. Bytes travel as hex.
_SHARED_CUDA = (
    "device",
    "handle",
    "num_bytes",
    "offset",
    "counter_handle",
    "counter_offset",
    "event_handle",
    "is_event_needed",
)
_IN_BYTES = ("handle", "counter_handle", "event_handle")


def allocate(num_bytes: int) -> torch.Tensor:
    """Returns `num_bytes` zero bytes. A page takes memory once it is written."""
    return empty((num_bytes,), dtype=torch.uint8, device=torch.device("cpu"))


def describe(memory: torch.Tensor) -> dict[str, Any]:
    """Returns the location of the memory, for `attach`. It is valid while this process holds the memory."""
    if not memory.is_cuda:
        return {"pid": os.getpid()} | shared_memory.file_of(memory)._asdict()
    shared = memory.untyped_storage()._share_cuda_()  # type: ignore[no-untyped-call]
    found = dict(zip(_SHARED_CUDA, shared, strict=True))
    return found | {name: found[name].hex() for name in _IN_BYTES}


def attach(found: Mapping[str, Any]) -> torch.Tensor:
    """Maps the bytes. Raises OSError if they are not there."""
    storage = _attach_cuda(found) if "handle" in found else _attach_file(found)
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)


def _attach_cuda(found: Mapping[str, Any]) -> torch.UntypedStorage:
    values = [bytes.fromhex(found[name]) if name in _IN_BYTES else found[name] for name in _SHARED_CUDA]
    return torch.UntypedStorage._new_shared_cuda(*values)


def _attach_file(found: Mapping[str, Any]) -> torch.UntypedStorage:
    path, num_bytes = f"/proc/{found['pid']}/fd/{found['fd']}", int(found["num_bytes"])
    fd = os.open(path, os.O_RDWR | os.O_CLOEXEC)
    try:
        status = os.fstat(fd)
        if (status.st_ino, status.st_size) != (found["inode"], num_bytes):
            raise OSError(f"the other rank's memory is not at {path}")
        storage: torch.UntypedStorage = torch.UntypedStorage._new_shared_fd_cpu(fd, num_bytes)  # type: ignore[attr-defined]
    finally:
        os.close(fd)
    return storage
