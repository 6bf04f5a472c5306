"""The transports' interface to CUDA, with types."""

from __future__ import annotations

import ctypes

import numpy as np
import torch
from numpy.typing import NDArray


def new_stream(device: torch.device) -> torch.cuda.Stream:
    return torch.cuda.Stream(device)  # type: ignore[no-untyped-call]


def record(stream: torch.cuda.Stream) -> torch.cuda.Event:
    """Returns an event after all work that is queued on the stream. A thread that waits for it sleeps."""
    event = torch.cuda.Event(blocking=True)  # type: ignore[no-untyped-call]
    event.record(stream)
    return event


def is_through(event: torch.cuda.Event) -> bool:
    """Returns whether all work before the event is done. Does not wait."""
    return bool(event.query())  # type: ignore[no-untyped-call]


def use(device: torch.device) -> None:
    """Creates a CUDA context for this thread, which the driver's calls need. A thread that has used the runtime already
    has one."""
    with torch.cuda.device(device):
        record(new_stream(device)).synchronize()


def pin(memory: NDArray[np.uint8]) -> None:
    """Pins memory that CUDA did not allocate, such as the pool's segment. Copies to and from it then need no CPU."""
    cudart = torch.cuda.cudart()  # type: ignore[no-untyped-call]
    torch.cuda.check_error(cudart.cudaHostRegister(memory.ctypes.data, memory.nbytes, 0))


def unpin(memory: NDArray[np.uint8]) -> None:
    cudart = torch.cuda.cudart()  # type: ignore[no-untyped-call]
    torch.cuda.check_error(cudart.cudaHostUnregister(memory.ctypes.data))


# Values of the driver's enumerations.
_NOT_SUPPORTED = 801
_SOURCE_IS_READ_IN_STREAM_ORDER = 1

Addresses = NDArray[np.uint64]


class _BatchAttributes(ctypes.Structure):
    """CUmemcpyAttributes. The location hints are unused: they are for memory without a fixed location."""

    _fields_ = (
        ("source_order", ctypes.c_int),
        ("source_hint", ctypes.c_int * 2),
        ("target_hint", ctypes.c_int * 2),
        ("flags", ctypes.c_uint),
    )


class DriverCopies:
    """Queues any number of copies between addresses, in any direction, without holding the GIL.

    One call queues all of them if the driver can do that (12.8); otherwise one call each. The calling thread must have
    its device set.
    """

    can_batch = True

    def __init__(self) -> None:
        self._driver = ctypes.CDLL("libcuda.so.1")
        # Later drivers keep this name for the first version of the call, with `failed_at`.
        self.can_batch = self.can_batch and hasattr(self._driver, "cuMemcpyBatchAsync")

    def queue(
        self, targets: Addresses, sources: Addresses, num_bytes: Addresses, stream: torch.cuda.Stream
    ) -> None:
        if self.can_batch:
            result = self._batch(targets, sources, num_bytes, stream)
            if result != _NOT_SUPPORTED:
                check(result, "cuMemcpyBatchAsync")
                return
            self.can_batch = False
        for target, source, count in zip(targets.tolist(), sources.tolist(), num_bytes.tolist(), strict=True):
            self._one(target, source, count, stream)

    def _batch(
        self, targets: Addresses, sources: Addresses, num_bytes: Addresses, stream: torch.cuda.Stream
    ) -> int:
        # The driver needs contiguous arrays of 64-bit numbers.
        arrays = [np.ascontiguousarray(array) for array in (targets, sources, num_bytes)]
        attributes = _BatchAttributes(source_order=_SOURCE_IS_READ_IN_STREAM_ORDER)
        first_with_them, failed_at = ctypes.c_size_t(0), ctypes.c_size_t(0)
        result: int = self._driver.cuMemcpyBatchAsync(
            *(ctypes.c_void_p(array.ctypes.data) for array in arrays),
            ctypes.c_size_t(len(targets)),
            ctypes.byref(attributes),
            ctypes.byref(first_with_them),
            ctypes.c_size_t(1),
            ctypes.byref(failed_at),
            ctypes.c_void_p(stream.cuda_stream),
        )
        return result

    def _one(self, target: int, source: int, num_bytes: int, stream: torch.cuda.Stream) -> None:
        result = self._driver.cuMemcpyAsync(
            ctypes.c_uint64(target),
            ctypes.c_uint64(source),
            ctypes.c_size_t(num_bytes),
            ctypes.c_void_p(stream.cuda_stream),
        )
        check(result, "cuMemcpyAsync")


def check(result: int, what: str) -> None:
    if result != 0:
        raise RuntimeError(f"{what}: the driver answered with error {result}")
