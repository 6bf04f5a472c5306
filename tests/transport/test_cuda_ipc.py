"""The driver's calls, as a stand-in for the driver gets them: how things are passed is checked in C.

That the calls do what they should only a GPU can show: test_gpu.py.
"""

from __future__ import annotations

import ctypes
import re
import shutil
import subprocess
from pathlib import Path

import msgspec
import pytest

from alignedserve.transport.channel import IPC_HANDLE_BYTES, DeviceMemory
from alignedserve.transport.cuda_ipc import CudaDriver

COMPILER = shutil.which("cc") or shutil.which("gcc")
pytestmark = pytest.mark.skipif(COMPILER is None, reason="there is no C compiler")

# Types as cuda.h has them. The handle of the allocation at B is made of B's bytes, eight times.
DRIVER = """
#include <stddef.h>
#include <string.h>
typedef unsigned long long CUdeviceptr;
typedef struct { char reserved[64]; } CUipcMemHandle;
enum { BASE_BITS = 32 };

int failing = 0;
CUdeviceptr closed = 0;

static CUdeviceptr base_of(CUdeviceptr address) { return address >> BASE_BITS << BASE_BITS; }

int cuMemGetAddressRange_v2(CUdeviceptr *base, size_t *size, CUdeviceptr address)
{
    if (failing == 1) return 201;
    *base = base_of(address);
    *size = (size_t)1 << BASE_BITS;
    return 0;
}

int cuIpcGetMemHandle(CUipcMemHandle *handle, CUdeviceptr address)
{
    CUdeviceptr base = base_of(address);
    if (failing == 2) return 1;
    if (address != base) return 1000;
    for (int part = 0; part < 8; part++) memcpy(handle->reserved + 8 * part, &base, 8);
    return 0;
}

int cuIpcOpenMemHandle_v2(CUdeviceptr *address, CUipcMemHandle handle, unsigned int flags)
{
    CUdeviceptr base;
    if (failing == 3) return 400;
    memcpy(&base, handle.reserved, 8);
    for (int part = 1; part < 8; part++)
        if (memcmp(handle.reserved + 8 * part, &base, 8)) return 1001;
    if (flags != 1) return 1002;
    *address = base ^ 0x700000000000;
    return 0;
}

int cuIpcCloseMemHandle(CUdeviceptr address)
{
    if (failing == 4) return 1;
    closed = address;
    return 0;
}
"""
BASE, OFFSET = 0x7F3A_0000_0000, 0x2345_6000
MAPPED = BASE ^ 0x7000_0000_0000


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> str:
    directory: Path = tmp_path_factory.mktemp("driver")
    (directory / "driver.c").write_text(DRIVER)
    built = directory / "libcuda.so.1"
    assert COMPILER is not None
    subprocess.run([COMPILER, "-shared", "-fPIC", "-o", built, directory / "driver.c"], check=True)
    return str(built)


def test_what_one_process_describes_another_one_maps(library: str) -> None:
    driver = CudaDriver(library)
    described = driver.describe(BASE + OFFSET, 3 << 30)
    assert described == DeviceMemory(BASE.to_bytes(8, "little") * 8, OFFSET, 3 << 30)
    sent = msgspec.msgpack.decode(msgspec.msgpack.encode(described), type=DeviceMemory)
    assert driver.map(sent) == MAPPED
    driver.unmap(MAPPED)
    assert ctypes.c_uint64.in_dll(ctypes.CDLL(library), "closed").value == MAPPED


@pytest.mark.parametrize(
    ("number", "name", "error"),
    [
        (1, "cuMemGetAddressRange", 201),
        (2, "cuIpcGetMemHandle", 1),
        (3, "cuIpcOpenMemHandle", 400),
        (4, "cuIpcCloseMemHandle", 1),
    ],
)
def test_a_call_that_fails_is_named(library: str, number: int, name: str, error: int) -> None:
    driver = CudaDriver(library)
    described = driver.describe(BASE, 4096)
    failing = ctypes.c_int.in_dll(ctypes.CDLL(library), "failing")
    failing.value = number
    try:
        with pytest.raises(RuntimeError, match=re.escape(f"{name}: the driver answered with error {error}")):
            driver.describe(BASE, 4096)
            driver.map(described)
            driver.unmap(MAPPED)
    finally:
        failing.value = 0


@pytest.mark.parametrize("num_bytes", [IPC_HANDLE_BYTES - 1, IPC_HANDLE_BYTES + 1])
def test_a_handle_of_another_size_is_no_frame(num_bytes: int) -> None:
    data = msgspec.msgpack.encode(DeviceMemory(bytes(num_bytes), 0, 1))
    with pytest.raises(msgspec.ValidationError):
        msgspec.msgpack.decode(data, type=DeviceMemory)
