"""Maps GPU memory of another process on the same host, through the driver's IPC handles.

A handle names a whole allocation of the driver, and torch's allocator may use only part of it. So it is sent with an
offset. Handles and mappings copy nothing, and the owner of the memory runs no code for them.

The calling thread must have a context (`cuda.use`). Errors are RuntimeErrors that name the call.
"""

from __future__ import annotations

import ctypes
from ctypes import POINTER, c_int, c_size_t, c_uint, c_uint64

from alignedserve.transport.channel import IPC_HANDLE_BYTES, DeviceMemory
from alignedserve.transport.cuda import check

# CU_IPC_MEM_LAZY_ENABLE_PEER_ACCESS: allows this GPU to read a mapping of another GPU's memory.
_LAZY_ENABLE_PEER_ACCESS = 1


class _Handle(ctypes.Structure):
    """CUipcMemHandle, which is passed by value."""

    _fields_ = (("reserved", ctypes.c_ubyte * IPC_HANDLE_BYTES),)


class CudaDriver:
    def __init__(self, library: str = "libcuda.so.1") -> None:
        driver = ctypes.CDLL(library)
        # CUdeviceptr has 64 bits. The suffixes are those of cuda.h since CUDA 3.2 and 11.0.
        self._get_range = driver.cuMemGetAddressRange_v2
        self._get_range.argtypes = [POINTER(c_uint64), POINTER(c_size_t), c_uint64]
        self._get_handle = driver.cuIpcGetMemHandle
        self._get_handle.argtypes = [POINTER(_Handle), c_uint64]
        self._open_handle = driver.cuIpcOpenMemHandle_v2
        self._open_handle.argtypes = [POINTER(c_uint64), _Handle, c_uint]
        self._close_handle = driver.cuIpcCloseMemHandle
        self._close_handle.argtypes = [c_uint64]
        for call in (self._get_range, self._get_handle, self._open_handle, self._close_handle):
            call.restype = c_int

    def describe(self, address: int, num_bytes: int) -> DeviceMemory:
        """Returns a description for `map` in another process. It is valid while this process has the memory."""
        base, size, handle = c_uint64(), c_size_t(), _Handle()
        check(self._get_range(base, size, address), "cuMemGetAddressRange")
        check(self._get_handle(handle, base.value), "cuIpcGetMemHandle")
        return DeviceMemory(bytes(handle), address - base.value, num_bytes)

    def map(self, memory: DeviceMemory) -> int:
        """Returns the address of the allocation that contains the memory. It is valid until `unmap`."""
        base = c_uint64()
        handle = _Handle.from_buffer_copy(memory.handle)
        check(self._open_handle(base, handle, _LAZY_ENABLE_PEER_ACCESS), "cuIpcOpenMemHandle")
        return base.value

    def unmap(self, base: int) -> None:
        """Unmaps the allocation. No copy from it may be running."""
        check(self._close_handle(base), "cuIpcCloseMemHandle")
